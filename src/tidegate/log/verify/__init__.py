"""An audit of native evidence in any Kafka data folder; reads everything, writes nothing."""
