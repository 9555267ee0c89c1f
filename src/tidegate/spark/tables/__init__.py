"""Committed tables as DataFrames."""
