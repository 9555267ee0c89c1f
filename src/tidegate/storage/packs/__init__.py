"""Packs and manifests: how runs and checkpoints lie on disk."""
