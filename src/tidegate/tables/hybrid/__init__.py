"""Hybrid tables: a pushed version that follows a live topic, with replicas and a leader for each partition."""
