"""Rounds of a pipeline as Spark jobs: what runs in Python workers, where, and how events cross Spark's shuffle."""
