"""Client for a real Kafka cluster (`kafka://`), with the same methods as a log folder."""
