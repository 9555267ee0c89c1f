"""Bounded memory: the pool, the two caches of runs, scratch permits, the backlog, last uses of keys."""
