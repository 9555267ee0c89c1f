"""What users say: App, Stream, steps and sinks; checked, explained and compared before anything runs."""
