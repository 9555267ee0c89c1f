"""Pins: who reads a pack now, so that nobody deletes it under them.

A lease pins a set of packs and unpins them when it is closed. Pins of one pack add up.

I1  a pack is pinned while an open lease names it; opening, closing and asking are one step each under one lock.
I2  a lease unpins exactly once, however often and on whatever thread it is closed (INV-13).
I3  after `clear(task)` old leases of the task count for nothing, and closing them disturbs nothing.

Safe from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType

from tidegate.storage.index.entries import StoredRef


class Lease:
    """Packs held in place; close it once, by hand or with `with`."""

    __slots__ = ("_open", "_pins", "packs")

    def __init__(self, pins: BatchPins, leases: set[Lease], packs: frozenset[str]) -> None:
        self.packs = packs
        self._pins = pins
        self._open = leases

    def close(self) -> None:
        """Let the packs go; closing again does nothing."""
        self._pins._unpin(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BatchPins:
    """The pins of one worker, by task: the leases that are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, set[Lease]] = {}  # replaced by `clear`: old leases reach the old set only

    def pin(self, task: str, refs: Iterable[StoredRef | str]) -> Lease:
        """Hold the packs of these runs (or the packs so named) until the lease is closed."""
        packs = frozenset([ref if isinstance(ref, str) else ref.pack for ref in refs])
        with self._lock:
            leases = self._tasks.get(task)
            if leases is None:
                leases = self._tasks[task] = set()
            lease = Lease(self, leases, packs)
            leases.add(lease)
            return lease

    def pinned(self, task: str) -> frozenset[str]:
        """Every pack of the task that somebody holds now."""
        with self._lock:
            return frozenset().union(*(lease.packs for lease in self._tasks.get(task, ())))

    def open_leases(self, task: str | None = None) -> int:
        """Leases not closed yet, of one task or of all: at the end of the work, a leak."""
        with self._lock:
            chosen = self._tasks.values() if task is None else filter(None, [self._tasks.get(task)])
            return sum(len(leases) for leases in chosen)

    def clear(self, task: str) -> None:
        """Forget the task's pins: it is restored, or leaves the worker."""
        with self._lock:
            self._tasks.pop(task, None)

    def _unpin(self, lease: Lease) -> None:
        with self._lock:
            lease._open.discard(lease)
