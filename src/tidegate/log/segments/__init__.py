"""One log segment: its `.log` file, the indexes and the seal beside it, and finding things in them."""
