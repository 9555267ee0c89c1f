"""Replicas of a hybrid table: who leads a partition, what it copies from the live topic, what all make of it."""
