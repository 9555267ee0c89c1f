"""Maintenance: compact, dump, evict, rehydrate, retire, delete; the supervisor that runs it."""
