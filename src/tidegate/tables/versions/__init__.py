"""Versions of a table: pushed whole, proven complete, swapped in, rolled back."""
