"""Hybrid."""
