"""What `kafka-dump-log` prints, line for line, and the same for machines."""
