"""Aggregates of windows: definitions, their resolution against columns, and aggregates that keep values."""
