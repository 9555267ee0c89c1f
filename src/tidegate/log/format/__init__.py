"""The bytes of record batches, and the conversion to and from Arrow."""
