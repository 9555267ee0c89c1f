"""How long a record really lives, and why."""
