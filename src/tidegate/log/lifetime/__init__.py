"""Forecast how long records stay readable and on disk, and why."""
