"""The two caches of runs in memory: `WriteBuffer` for rows just accepted, `BaseRuns` for compacted and rehydrated ones.

Owns: which hot copies exist, and their bytes in the pool. Does not own what a run means (the index), nor when
one goes away (writer, maintenance).

C1  a hot copy is charged with its run's logical bytes, to its cache's tenant.
C2  ids come from one counter of the process, so an id is never seen twice, in either cache, also after `clear`.
C3  whoever holds a `HotCopy` keeps its rows: removing one only ends its accounting.
C4  the write buffer takes rows of a caller in all together or not at all, and makes the caller wait at the worker
    total. Base runs never wait: what compaction makes replaces runs that leave in a moment, and what would be
    rehydrated without room is not (`has_room`).

Safe from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import ClassVar

from tidegate.errors import InternalError
from tidegate.storage.index.entries import HotCopy, Tenant, next_tick
from tidegate.storage.memory.pool import WorkerMemoryPool
from tidegate.storage.runs.run import Run


class HotRuns:
    """Hot copies of one tenant, of all tasks of the worker: what both caches have in common."""

    tenant: ClassVar[Tenant]

    def __init__(self, pool: WorkerMemoryPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._tasks: dict[str, dict[int, HotCopy]] = {}

    def shrink(self, task: str, old: HotCopy, rest: Run) -> HotCopy:
        """A copy with some of the keys of `old`, beside it until the caller removes one of the two; never waits."""
        self._check(old)
        self._pool.reserve_over_limit(task, self.tenant, rest.nbytes)
        return self._keep(task, rest, complete=False)

    def remove(self, task: str, hot: HotCopy) -> int:
        """Drop a hot copy; the bytes given back, 0 when it was gone already."""
        return self.remove_all(task, [hot])

    def remove_all(self, task: str, hots: Iterable[HotCopy]) -> int:
        """Drop several at once; the bytes given back."""
        wanted = list(hots)
        for hot in wanted:
            self._check(hot)
        with self._lock:
            mine = self._tasks.get(task, {})
            found = [gone for hot in wanted if (gone := mine.pop(hot.id, None)) is not None]
        nbytes = sum(gone.run.nbytes for gone in found)
        self._pool.release(task, self.tenant, nbytes)
        return nbytes

    def count(self, task: str) -> int:
        with self._lock:
            return len(self._tasks.get(task, ()))

    def clear(self, task: str) -> int:
        """Drop all of a task's, other tasks untouched; the bytes given back."""
        with self._lock:
            gone = self._tasks.pop(task, {})
        nbytes = sum(hot.run.nbytes for hot in gone.values())
        self._pool.release(task, self.tenant, nbytes)
        return nbytes

    def _keep(self, task: str, run: Run, *, complete: bool = True) -> HotCopy:
        hot = HotCopy(self.tenant, next_tick(), run, complete)
        with self._lock:
            self._tasks.setdefault(task, {})[hot.id] = hot
        return hot

    def _check(self, hot: HotCopy) -> None:
        if hot.tenant is not self.tenant:
            raise InternalError(f"hot copy {hot.id} belongs to {hot.tenant}, not {self.tenant}")


class WriteBuffer(HotRuns):
    """Deltas: runs as they were accepted, until they are compacted, evicted or pruned."""

    tenant = Tenant.WRITE_BUFFER

    def put_all(self, task: str, runs: Sequence[Run], *, forced: bool = False) -> list[HotCopy]:
        """Take the runs in, all or none. At the worker total this waits, or raises `OverloadError`; never when
        `forced`, for state blobs that are flushed to make room."""
        reserve = self._pool.reserve_over_limit if forced else self._pool.reserve
        kept: list[HotCopy] = []
        try:
            for run in runs:
                reserve(task, self.tenant, run.nbytes)
                kept.append(self._keep(task, run))
        except BaseException:
            self.remove_all(task, kept)
            raise
        return kept

    def is_over_limit(self, task: str, incoming_bytes: int = 0) -> bool:
        """Whether the task's deltas, with what is about to come, are above the soft max; exactly there is not."""
        return self._pool.is_above_soft(task, self.tenant, incoming_bytes)


class BaseRuns(HotRuns):
    """Bases: merged runs, and stored ones that were brought back for readers."""

    tenant = Tenant.BASE_RUNS

    def put(self, task: str, run: Run) -> HotCopy:
        """Take a run in, whatever room there is: its inputs leave in a moment, or `has_room` was asked."""
        self._pool.reserve_over_limit(task, self.tenant, run.nbytes)
        return self._keep(task, run)

    def has_room(self, task: str, nbytes: int) -> bool:
        """Whether so many bytes more bring no relief near: at or below the low watermarks of task and worker."""
        return self._pool.has_room(task, self.tenant, nbytes)
