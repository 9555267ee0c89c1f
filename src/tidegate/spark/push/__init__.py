"""A DataFrame becomes the next version of a table."""
