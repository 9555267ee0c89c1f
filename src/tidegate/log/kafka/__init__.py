"""A real cluster behind `kafka://`, with the same surface as a folder."""
