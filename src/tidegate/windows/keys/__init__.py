"""The bytes of windowed keys and values: one at a time, and whole columns."""
