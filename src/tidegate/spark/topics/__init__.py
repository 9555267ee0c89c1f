"""Topics as DataFrames and streams: what is read, by whom, and what validation says of it."""
