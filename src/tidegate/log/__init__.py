"""Kafka's partition log on disk, byte for byte: the rooms below, from bytes up to a folder of topics."""
