"""Operators over event batches: windows of every kind, deduplication, retractions."""
