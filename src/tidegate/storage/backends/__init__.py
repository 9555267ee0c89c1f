"""Backends that store packs and manifests: memory, a local folder, an object store."""
