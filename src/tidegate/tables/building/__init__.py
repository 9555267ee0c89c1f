"""From a changelog topic to committed state: consume, validate, apply, commit."""
