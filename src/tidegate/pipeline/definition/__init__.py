"""The user-facing definition: App, Stream, steps and sinks, checked and explained before anything runs."""
