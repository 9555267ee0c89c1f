"""Where packs live: memory, a local folder, an object store."""
