"""Kafka's partition log on disk, byte for byte: record batches, log segments, partitions, a folder of topics."""
