"""How much of each pack live metadata still names: when a pack can go, and when it is worth writing anew.

A pack is *live* while an index names a run of it, *dead* from then until it is deleted. Its size is the most that
was ever known to be in it; after a restore, what the retained checkpoints name of it, and more when its file is
larger than that can be (`measure`).

U1  live runs = adds − removes; a run that goes out of use twice raises, and changes nothing.

Safe from any thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tidegate.errors import InternalError
from tidegate.storage.index.entries import StoredRef

SLOT_ROOM = 4096  # what a run may take in a pack besides its bytes, generously


@dataclass(slots=True)
class _Use:
    """One pack."""

    runs: int = 0
    live_bytes: int = 0
    total_bytes: int = 0


class PackUse:
    """The packs of all tasks of a worker, and what of them is live."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, dict[str, _Use]] = {}

    def add(self, task: str, refs: Iterable[StoredRef]) -> None:
        """These runs are live now."""
        with self._lock:
            packs = self._tasks.setdefault(task, {})
            for ref in refs:
                use = packs.setdefault(ref.pack, _Use())
                use.runs += 1
                use.live_bytes += ref.nbytes
                use.total_bytes = max(use.total_bytes, use.live_bytes)

    def remove(self, task: str, refs: Iterable[StoredRef]) -> list[str]:
        """These runs are live no more; the packs that are dead by that, which are to be retired."""
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
        """A checkpoint names these runs, each once: their packs are at least that large."""
        found: Counter[str] = Counter()
        for ref in refs:
            found[ref.pack] += ref.nbytes
        with self._lock:
            packs = self._tasks.setdefault(task, {})
            for pack, nbytes in found.items():
                use = packs.setdefault(pack, _Use())
                use.total_bytes = max(use.total_bytes, nbytes)

    def measure(self, task: str, files: Mapping[str, int]) -> None:
        """So large are these files: what live runs cannot take of them, head, foot and padding included, is dead."""
        with self._lock:
            packs = self._tasks.get(task, {})
            for pack, nbytes in files.items():
                use = packs.get(pack)
                if use is not None and use.runs:
                    use.total_bytes = max(use.total_bytes, nbytes - SLOT_ROOM * (use.runs + 1))

    def live(self, task: str, pack: str) -> int:
        """How many runs of the pack are live."""
        with self._lock:
            use = self._tasks.get(task, {}).get(pack)
            return 0 if use is None else use.runs

    def packs(self, task: str) -> frozenset[str]:
        """Every live pack of the task."""
        with self._lock:
            return frozenset(pack for pack, use in self._tasks.get(task, {}).items() if use.runs)

    def sparse(self, task: str, permille: int) -> list[str]:
        """Live packs of whose bytes less than this share is live."""
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
        """These dead packs were deleted."""
        with self._lock:
            known = self._tasks.get(task, {})
            for pack in packs:
                known.pop(pack, None)

    def forget_dead(self, task: str) -> None:
        """Forget the task's dead packs: it is restored or leaves, and they are left to garbage collection."""
        with self._lock:
            live = {pack: use for pack, use in self._tasks.pop(task, {}).items() if use.runs}
            if live:
                self._tasks[task] = live
