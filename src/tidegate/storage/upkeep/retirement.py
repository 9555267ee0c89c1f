"""Deleting packs, safely: what is held by checkpoints, and what waits to be deleted.

The unit of deletion is the pack. When live metadata names no run of it any more (`pack_use`), the
pack is *retired*: put in the queue, where it waits until no reader pins it and no checkpoint holds it. Only then
does `delete_once` remove it.

R1  a pack is not deleted while live, pinned, or held by a retained or unfinished checkpoint (INV-10).
R2  retiring is idempotent; a pack leaves the queue only by a delete that succeeded or by `clear`.
R3  a failed delete is tried again later, each time after a longer pause.
R4  without `deletes` nothing is ever queued: a master deletes, who knows what other processes need.

The queue is lost with the process; packs left behind are found by garbage collection. Safe from any thread; no
lock is held while the backend deletes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tidegate.clock import Clock
from tidegate.errors import UnavailableError
from tidegate.storage.backends.overlap import overlap
from tidegate.storage.upkeep.pins import BatchPins


class Deletes(Protocol):
    """What the queue needs of a backend."""

    def delete(self, name: str) -> None: ...


class CheckpointHolds:
    """Which packs each retained (or unfinished) checkpoint of a task needs.

    A set for each checkpoint, and no count for each pack: few checkpoints are retained, of many packs that are
    mostly the same.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, dict[int, frozenset[str]]] = {}
        self._again: Counter[tuple[str, int]] = Counter()  # holders beyond the first

    def hold(self, task: str, number: int, packs: Iterable[str]) -> None:
        """Keep these packs for checkpoint `number`; called again, the packs of both calls."""
        with self._lock:
            held = self._held.setdefault(task, {})
            held[number] = held.get(number, frozenset()).union(packs)

    def hold_again(self, task: str, number: int) -> bool:
        """One more release is to come before the checkpoint is given up; False when it is given up already."""
        with self._lock:
            if number not in self._held.get(task, ()):
                return False
            self._again[task, number] += 1
            return True

    def release(self, task: str, number: int) -> frozenset[str]:
        """The checkpoint is given up; the packs that no checkpoint of the task holds any more."""
        with self._lock:
            if self._again[task, number]:
                self._again[task, number] -= 1
                return frozenset()
            del self._again[task, number]
            held = self._held.get(task, {})
            return held.pop(number, frozenset()).difference(*held.values())

    def is_held(self, task: str, pack: str) -> bool:
        with self._lock:
            return any(pack in packs for packs in self._held.get(task, {}).values())

    def numbers(self, task: str) -> list[int]:
        """The checkpoints of the task that hold something, or held nothing but are retained, ascending."""
        with self._lock:
            return sorted(self._held.get(task, ()))

    def packs(self, task: str) -> frozenset[str]:
        """Every pack that a checkpoint of the task holds."""
        with self._lock:
            return frozenset().union(*self._held.get(task, {}).values())

    def clear(self, task: str) -> None:
        """Forget all holds of a task that leaves the worker; its files are then garbage collection's."""
        with self._lock:
            for number in self._held.pop(task, {}):
                del self._again[task, number]


@dataclass(slots=True)
class _Retired:
    """One pack in the queue."""

    due_ms: int = 0
    failures: int = 0
    deleting: bool = False


class Deletion(NamedTuple):
    """What one round of deleting did."""

    deleted: tuple[str, ...]
    failed: tuple[str, ...]


class Waiting(NamedTuple):
    """Why retired packs are still there."""

    pinned: int
    held: int
    retrying: int
    ready: int


class BatchRetirementQueue:
    """Retired packs of all tasks of the worker."""

    def __init__(
        self,
        backend: Deletes,
        pins: BatchPins,
        holds: CheckpointHolds,
        clock: Clock,
        *,
        backoff_ms: int,
        backoff_max_ms: int,
        deletes_at_once: int = 1,
        deletes: bool = True,
    ) -> None:
        self._backend = backend
        self._pins = pins
        self._holds = holds
        self._clock = clock
        self._backoff_ms = backoff_ms
        self._backoff_max_ms = backoff_max_ms
        self._deletes_at_once = deletes_at_once
        self._deletes = deletes
        self._lock = threading.Lock()
        self._tasks: dict[str, dict[str, _Retired]] = {}

    def retire(self, task: str, packs: Iterable[str]) -> int:
        """Queue packs that no live metadata names; how many were not queued already."""
        if not self._deletes:
            return 0
        with self._lock:
            queue = self._tasks.setdefault(task, {})
            before = len(queue)
            for pack in packs:
                queue.setdefault(pack, _Retired())
            return len(queue) - before

    def delete_once(self, task: str, max_packs: int) -> Deletion:
        """Delete up to so many of the task's packs that nobody needs, oldest first."""
        chosen = self._choose(task, max_packs)
        deleted: set[str] = set()
        failed: set[str] = set()

        def delete(pack: str) -> None:
            try:
                self._backend.delete(pack)
            except (UnavailableError, OSError):
                failed.add(pack)
            else:
                deleted.add(pack)

        try:
            overlap(delete, chosen, at_most=self._deletes_at_once)
        finally:  # also when the backend raises what no retry will cure: nothing is forgotten
            self._settle(task, chosen, deleted)
        return Deletion(
            tuple(pack for pack in chosen if pack in deleted),
            tuple(pack for pack in chosen if pack in failed),
        )

    def retired(self, task: str) -> list[str]:
        """The queue of a task, oldest first."""
        with self._lock:
            return list(self._tasks.get(task, ()))

    def waiting(self, task: str) -> Waiting:
        """How many retired packs wait, and for what."""
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            queue = [(pack, retired.due_ms) for pack, retired in self._tasks.get(task, {}).items()]
        counts = {"pinned": 0, "held": 0, "retrying": 0, "ready": 0}
        pinned = self._pins.pinned(task)
        for pack, due_ms in queue:
            if pack in pinned:
                counts["pinned"] += 1
            elif self._holds.is_held(task, pack):
                counts["held"] += 1
            else:
                counts["retrying" if due_ms > now_ms else "ready"] += 1
        return Waiting(**counts)

    def clear(self, task: str) -> None:
        """Forget a task's queue: it is restored, or leaves the worker."""
        with self._lock:
            self._tasks.pop(task, None)

    def _choose(self, task: str, max_packs: int) -> list[str]:
        now_ms = self._clock.monotonic_ms()
        chosen: list[str] = []
        with self._lock:
            pinned = self._pins.pinned(task)
            for pack, retired in self._tasks.get(task, {}).items():
                if len(chosen) >= max_packs:
                    break
                if retired.deleting or retired.due_ms > now_ms or pack in pinned:
                    continue
                if not self._holds.is_held(task, pack):
                    retired.deleting = True
                    chosen.append(pack)
        return chosen

    def _settle(self, task: str, chosen: list[str], deleted: set[str]) -> None:
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            queue = self._tasks.get(task, {})
            for pack in chosen:
                retired = queue.get(pack)
                if retired is None:
                    continue
                if pack in deleted:
                    del queue[pack]
                    continue
                retired.deleting = False
                pause_ms = min(self._backoff_ms << min(retired.failures, 30), self._backoff_max_ms)
                retired.failures += 1
                retired.due_ms = now_ms + pause_ms
