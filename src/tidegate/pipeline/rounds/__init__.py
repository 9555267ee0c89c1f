"""Rounds: how an app goes on, one plan and one commit after the other, whatever dies in between. Start at `records`."""
