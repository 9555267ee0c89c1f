"""Deletion of packs: a pack may go when it has no live run, no reader pins it, and no checkpoint holds it.

`PackUse` counts the runs of each pack that live metadata names. A pack without any is *retired*: it waits in the queue
until no lease pins it and no retained or unfinished checkpoint holds it. Only then `delete_once` removes it.

R1  a pack is not deleted while live, pinned, or held by a retained or unfinished checkpoint (INV-10).
R2  a pack leaves the queue only by a delete that succeeded or by `clear`; a failed delete is tried again later.
R3  without `deletes` nothing is ever queued: a master deletes, because it knows the needs of other processes.
I1  a lease unpins exactly once, however often and on whichever thread it is closed (INV-13).
U1  live runs = adds − removes; removing a run twice raises and changes nothing.

The queue is lost with the process; garbage collection finds packs left behind. Safe from any thread; no lock is held
while the backend deletes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import NamedTuple

from tidegate.clock import Clock
from tidegate.errors import InternalError, UnavailableError
from tidegate.storage.backends.base import StorageBackend, overlap
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import StoredRef

# -- pins of readers ---------------------------------------------------------------------------------


class Lease(NamedTuple):
    """Pinned packs; close it once, by hand or with `with`."""

    pins: BatchPins
    task: str
    number: int
    packs: frozenset[str]

    def close(self) -> None:
        """Unpin the packs; idempotent."""
        self.pins._unpin(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BatchPins:
    """The open leases of one worker, by task."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, dict[int, Lease]] = {}
        self._numbers = count()

    def pin(self, task: str, refs: Iterable[StoredRef]) -> Lease:
        """Pin the packs of these runs until the lease is closed."""
        packs = frozenset(ref.pack for ref in refs)
        with self._lock:
            lease = Lease(self, task, next(self._numbers), packs)
            self._tasks.setdefault(task, {})[lease.number] = lease
            return lease

    def pinned(self, task: str) -> frozenset[str]:
        """Every pinned pack of the task."""
        with self._lock:
            return frozenset().union(*(lease.packs for lease in self._tasks.get(task, {}).values()))

    def open_leases(self, task: str | None = None) -> int:
        """The number of open leases, of one task or of all; at the end of the work, a leak."""
        with self._lock:
            return sum(len(leases) for name, leases in self._tasks.items() if task in (None, name))

    def _unpin(self, lease: Lease) -> None:
        with self._lock:
            self._tasks.get(lease.task, {}).pop(lease.number, None)


# -- live runs ---------------------------------------------------------------------------------------

SLOT_ROOM = 4096  # what a run may take in a pack besides its bytes, generously


@dataclass(slots=True)
class _Use:
    """One pack."""

    runs: int = 0
    live_bytes: int = 0
    total_bytes: int = 0


class PackUse:
    """The packs of all tasks of a worker, and their live runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, dict[str, _Use]] = {}

    def add(self, task: str, refs: Iterable[StoredRef]) -> None:
        """Count these runs as live."""
        with self._lock:
            packs = self._tasks.setdefault(task, {})
            for ref in refs:
                use = packs.setdefault(ref.pack, _Use())
                use.runs += 1
                use.live_bytes += ref.nbytes
                use.total_bytes = max(use.total_bytes, use.live_bytes)

    def remove(self, task: str, refs: Iterable[StoredRef]) -> list[str]:
        """Remove these runs from the live counts; returns the packs without live runs, to be retired."""
        refs = list(refs)
        with self._lock:
            packs = self._tasks.get(task, {})
            for pack, count in Counter(ref.pack for ref in refs).items():
                live = packs[pack].runs if pack in packs else 0
                if count > live:
                    raise InternalError(
                        f"{count} runs of pack {pack} of task {task} go out of use and {live} are in use; a run was "
                        "dropped twice, restart the worker from its last checkpoint"
                    )
            for ref in refs:
                packs[ref.pack].runs -= 1
                packs[ref.pack].live_bytes -= ref.nbytes
            return [pack for pack in dict.fromkeys(ref.pack for ref in refs) if not packs[pack].runs]

    def see(self, task: str, refs: Iterable[StoredRef]) -> None:
        """Record runs that a checkpoint names, as a lower bound of their packs' sizes."""
        found: Counter[str] = Counter()
        for ref in refs:
            found[ref.pack] += ref.nbytes
        with self._lock:
            packs = self._tasks.setdefault(task, {})
            for pack, nbytes in found.items():
                use = packs.setdefault(pack, _Use())
                use.total_bytes = max(use.total_bytes, nbytes)

    def measure(self, task: str, files: Mapping[str, int]) -> None:
        """Record file sizes: bytes beyond the live runs, head, foot and padding are dead."""
        with self._lock:
            packs = self._tasks.get(task, {})
            for pack, nbytes in files.items():
                use = packs.get(pack)
                if use is not None and use.runs:
                    use.total_bytes = max(use.total_bytes, nbytes - SLOT_ROOM * (use.runs + 1))

    def packs(self, task: str) -> frozenset[str]:
        """Every live pack of the task."""
        with self._lock:
            return frozenset(pack for pack, use in self._tasks.get(task, {}).items() if use.runs)

    def sparse(self, task: str, permille: int) -> list[str]:
        """Live packs whose share of live bytes is below `permille`."""
        with self._lock:
            return [
                pack
                for pack, use in self._tasks.get(task, {}).items()
                if use.runs and use.live_bytes * 1000 < use.total_bytes * permille
            ]

    def reclaimable(self, task: str) -> int:
        """Bytes in packs of the task that no live metadata names."""
        with self._lock:
            return sum(use.total_bytes - use.live_bytes for use in self._tasks.get(task, {}).values())

    def forget(self, task: str, packs: Iterable[str]) -> None:
        """Drop the records of deleted packs."""
        with self._lock:
            known = self._tasks.get(task, {})
            for pack in packs:
                known.pop(pack, None)

    def forget_dead(self, task: str) -> None:
        """Drop the records of the task's dead packs, which are left to garbage collection."""
        with self._lock:
            live = {pack: use for pack, use in self._tasks.pop(task, {}).items() if use.runs}
            if live:
                self._tasks[task] = live


# -- holds of checkpoints, and the queue -------------------------------------------------------------


class CheckpointHolds:
    """The packs that each retained (or unfinished) checkpoint of a task needs.

    A set for each checkpoint, and no count for each pack: few checkpoints are retained, of many packs that are
    mostly the same.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, dict[int, tuple[frozenset[str], int]]] = {}  # the packs, and how many holders

    def hold(self, task: str, number: int, packs: Iterable[str]) -> None:
        """Hold these packs for checkpoint `number`, in addition to those of earlier calls."""
        with self._lock:
            held = self._held.setdefault(task, {})
            before, holders = held.get(number, (frozenset(), 1))
            held[number] = before.union(packs), holders

    def hold_again(self, task: str, number: int) -> bool:
        """Add a holder, so that one more release is needed; False when the checkpoint was released already."""
        with self._lock:
            held = self._held.get(task, {})
            if number not in held:
                return False
            packs, holders = held[number]
            held[number] = packs, holders + 1
            return True

    def release(self, task: str, number: int) -> None:
        """Remove a holder; without any left, the checkpoint holds its packs no longer."""
        with self._lock:
            held = self._held.get(task, {})
            packs, holders = held.pop(number, (frozenset[str](), 1))
            if holders > 1:
                held[number] = packs, holders - 1

    def is_held(self, task: str, pack: str) -> bool:
        with self._lock:
            return any(pack in packs for packs, _ in self._held.get(task, {}).values())

    def packs(self, task: str) -> frozenset[str]:
        """Every pack that a checkpoint of the task holds."""
        with self._lock:
            return frozenset().union(*(packs for packs, _ in self._held.get(task, {}).values()))

    def clear(self, task: str) -> None:
        """Drop all holds of a task that leaves the worker; its files are left to garbage collection."""
        with self._lock:
            self._held.pop(task, None)


@dataclass(slots=True)
class _Retired:
    """One pack in the queue."""

    due_ms: int = 0
    failures: int = 0
    deleting: bool = False


class Deletion(NamedTuple):
    """The result of one round of deletes."""

    deleted: tuple[str, ...]
    failed: tuple[str, ...]


class BatchRetirementQueue:
    """Retired packs of all tasks of the worker."""

    def __init__(
        self,
        config: StorageConfig,
        backend: StorageBackend,
        pins: BatchPins,
        holds: CheckpointHolds,
        clock: Clock,
    ) -> None:
        self._config = config
        self._backend = backend
        self._pins = pins
        self._holds = holds
        self._clock = clock
        self._lock = threading.Lock()
        self._tasks: dict[str, dict[str, _Retired]] = {}

    def retire(self, task: str, packs: Iterable[str]) -> None:
        """Queue packs without live runs."""
        if self._config.deletes:
            with self._lock:
                queue = self._tasks.setdefault(task, {})
                for pack in packs:
                    queue.setdefault(pack, _Retired())

    def delete_once(self, task: str, max_packs: int) -> Deletion:
        """Delete up to `max_packs` of the task's unreferenced packs, oldest first."""
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
            overlap(delete, chosen, at_most=self._config.delete_parallelism if self._backend.is_remote else 1)
        finally:  # also after a permanent error of the backend: no pack is lost from the queue
            self._settle(task, chosen, deleted)
        return Deletion(
            tuple(pack for pack in chosen if pack in deleted),
            tuple(pack for pack in chosen if pack in failed),
        )

    def retired(self, task: str) -> list[str]:
        """The queue of a task, oldest first."""
        with self._lock:
            return list(self._tasks.get(task, ()))

    def waiting(self, task: str) -> dict[str, int]:
        """How many retired packs are pinned, held, retrying after a failed delete, and ready."""
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            queue = [(pack, retired.due_ms) for pack, retired in self._tasks.get(task, {}).items()]
        counts = {"pinned": 0, "held": 0, "retrying": 0, "ready": 0}
        pinned, held = self._pins.pinned(task), self._holds.packs(task)
        for pack, due_ms in queue:
            counts[
                "pinned"
                if pack in pinned
                else "held"
                if pack in held
                else "retrying"
                if due_ms > now_ms
                else "ready"
            ] += 1
        return counts

    def clear(self, task: str) -> None:
        """Drop a task's queue, because it is restored or leaves the worker."""
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
                pause_ms = min(
                    self._config.delete_backoff_ms << min(retired.failures, 30),
                    self._config.delete_backoff_max_ms,
                )
                retired.failures += 1
                retired.due_ms = now_ms + pause_ms
