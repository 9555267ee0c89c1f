"""DataFrames and streams into topics, once."""
