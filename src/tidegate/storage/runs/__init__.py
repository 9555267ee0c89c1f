"""Runs: immutable sorted rows of one bucket; building, merging and folding them."""
