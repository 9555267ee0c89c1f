"""Operator state: one blob a key, cached, flushed, evicted with the key's rows."""
