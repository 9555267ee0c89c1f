"""Building tables from topics: consume, decode, validate, materialise."""
