"""Print log files as `kafka-dump-log` does, line for line, or as JSON."""
