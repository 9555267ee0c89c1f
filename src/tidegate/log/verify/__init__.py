"""Audit any Kafka data folder from its own files; reads everything, writes nothing."""
