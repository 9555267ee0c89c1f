"""Bounded memory: the pool, the two caches of runs, scratch permits, the backlog, the clock of keys."""
