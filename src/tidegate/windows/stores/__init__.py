"""Window, session and key-value stores, and when what is in them goes."""
