"""Maintenance."""
