"""Window, session and key-value stores, and the rules by which their rows expire."""
