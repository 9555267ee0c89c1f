"""Pins: who reads a pack now, so that nobody deletes it under them.

A lease pins a set of packs and unpins them when it is closed. Pins of one pack add up.

I1  counting up, counting down and vanishing at zero are one step under one lock.
I2  a lease unpins exactly once, however often and on whatever thread it is closed (INV-13).
I3  after `clear(task)` old leases of the task count for nothing, and closing them disturbs nothing.

Safe from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType

from tidegate.storage.index.entries import StoredRef


class _Pinned:
    """The counts of one task; replaced as a whole by `clear`, so that old leases reach the old counts only."""

    __slots__ = ("counts", "leases")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.leases = 0


class Lease:
    """Packs held in place; close it once, by hand or with `with`."""

    __slots__ = ("_closed", "_pinned", "_pins", "packs")

    def __init__(self, pins: BatchPins, pinned: _Pinned, packs: frozenset[str]) -> None:
        self.packs = packs
        self._pins = pins
        self._pinned = pinned
        self._closed = False

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
    """The pins of one worker, by task."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, _Pinned] = {}

    def pin(self, task: str, refs: Iterable[StoredRef | str]) -> Lease:
        """Hold the packs of these runs (or the packs so named) until the lease is closed."""
        packs = frozenset(ref if isinstance(ref, str) else ref.pack for ref in refs)
        with self._lock:
            pinned = self._tasks.get(task)
            if pinned is None:
                pinned = self._tasks[task] = _Pinned()
            for pack in packs:
                pinned.counts[pack] = pinned.counts.get(pack, 0) + 1
            pinned.leases += 1
            return Lease(self, pinned, packs)

    def is_pinned(self, task: str, pack: str) -> bool:
        with self._lock:
            pinned = self._tasks.get(task)
            return pinned is not None and pack in pinned.counts

    def pinned(self, task: str) -> frozenset[str]:
        """Every pack of the task that somebody holds now."""
        with self._lock:
            pinned = self._tasks.get(task)
            return frozenset() if pinned is None else frozenset(pinned.counts)

    def open_leases(self, task: str | None = None) -> int:
        """Leases not closed yet, of one task or of all: at the end of the work, a leak."""
        with self._lock:
            chosen = self._tasks.values() if task is None else filter(None, [self._tasks.get(task)])
            return sum(pinned.leases for pinned in chosen)

    def clear(self, task: str) -> None:
        """Forget the task's pins: it is restored, or leaves the worker."""
        with self._lock:
            self._tasks.pop(task, None)

    def _unpin(self, lease: Lease) -> None:
        with self._lock:
            if lease._closed:
                return
            lease._closed = True
            pinned = lease._pinned
            pinned.leases -= 1
            for pack in lease.packs:
                left = pinned.counts[pack] - 1
                if left:
                    pinned.counts[pack] = left
                else:
                    del pinned.counts[pack]
