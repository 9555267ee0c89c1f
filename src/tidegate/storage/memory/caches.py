"""The two caches of runs, `WRITE_BUFFER` for deltas and `BASE_RUNS` for compacted ones: hot copies by id.

Owns: which hot copies exist, and their bytes in the pool. Does not own what a run means (the index), nor when
one goes away (writer, maintenance).

A hot copy is charged with its run's logical bytes. Ids come from one counter of the process, so an id is never
seen twice, in either cache, also after `clear`. Whoever holds a `HotCopy` keeps its rows: removing one only
ends its accounting.

Safe from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import count

from tidegate.errors import InternalError
from tidegate.storage.index.entries import HotCopy, Tenant
from tidegate.storage.memory.pool import WorkerMemoryPool
from tidegate.storage.runs.run import Run

_IDS = count(1)


class RunCache:
    """Hot copies of one tenant, of all tasks of the worker."""

    def __init__(self, tenant: Tenant, pool: WorkerMemoryPool) -> None:
        self.tenant = tenant
        self._pool = pool
        self._lock = threading.Lock()
        self._tasks: dict[str, dict[int, HotCopy]] = {}

    def put(self, task: str, run: Run, *, complete: bool = True, over_limit: bool = False) -> HotCopy:
        """Take the run in. At the worker total this waits, or raises `OverloadError`; never when `over_limit`,
        which is for outputs whose inputs leave in a moment."""
        if over_limit:
            self._pool.reserve_over_limit(task, self.tenant, run.nbytes)
        else:
            self._pool.reserve(task, self.tenant, run.nbytes)
        hot = HotCopy(self.tenant, next(_IDS), run, complete)
        with self._lock:
            self._tasks.setdefault(task, {})[hot.id] = hot
        return hot

    def get(self, task: str, hot_id: int) -> HotCopy | None:
        with self._lock:
            return self._tasks.get(task, {}).get(hot_id)

    def replace(self, task: str, old: HotCopy, run: Run | None, *, complete: bool = False) -> HotCopy | None:
        """Put `run` in the place of `old`, or nothing; `old` must be there."""
        self._check(old)
        new = None if run is None else HotCopy(self.tenant, next(_IDS), run, complete)
        with self._lock:
            hot = self._tasks.get(task, {})
            if old.id not in hot:
                raise InternalError(
                    f"hot copy {old.id} of task {task} is not in {self.tenant}, so it cannot be "
                    "replaced; somebody dropped it during maintenance of its bucket"
                )
            del hot[old.id]
            if new is not None:
                hot[new.id] = new
        growth = (0 if run is None else run.nbytes) - old.run.nbytes
        if growth > 0:
            self._pool.reserve_over_limit(task, self.tenant, growth)
        else:
            self._pool.release(task, self.tenant, -growth)
        return new

    def remove(self, task: str, hot: HotCopy) -> int:
        """Let a hot copy go; the bytes given back, 0 when it was gone already."""
        self._check(hot)
        with self._lock:
            found = self._tasks.get(task, {}).pop(hot.id, None)
        if found is None:
            return 0
        self._pool.release(task, self.tenant, found.run.nbytes)
        return found.run.nbytes

    def remove_all(self, task: str, hots: Iterable[HotCopy]) -> int:
        """Let several go at once; the bytes given back."""
        wanted = list(hots)
        for hot in wanted:
            self._check(hot)
        with self._lock:
            mine = self._tasks.get(task, {})
            found = [gone for hot in wanted if (gone := mine.pop(hot.id, None)) is not None]
        nbytes = sum(gone.run.nbytes for gone in found)
        self._pool.release(task, self.tenant, nbytes)
        return nbytes

    def bytes(self, task: str) -> int:
        return self._pool.used(task, self.tenant)

    def count(self, task: str) -> int:
        with self._lock:
            return len(self._tasks.get(task, ()))

    def clear(self, task: str) -> int:
        """Let all of a task's go, other tasks untouched; the bytes given back."""
        with self._lock:
            gone = self._tasks.pop(task, {})
        nbytes = sum(hot.run.nbytes for hot in gone.values())
        self._pool.release(task, self.tenant, nbytes)
        return nbytes

    def _check(self, hot: HotCopy) -> None:
        if hot.tenant is not self.tenant:
            raise InternalError(f"hot copy {hot.id} belongs to {hot.tenant}, not {self.tenant}")
