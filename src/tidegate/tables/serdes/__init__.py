"""Between bytes and values: single ones and whole columns; what could not be read."""
