"""The read path: plan, pin and capture, load, ordered views."""
