"""How a load comes to its stored runs: with a permit, from packs that are pinned, several packs at once.

The packs were pinned when the buckets were captured; `admit` takes the load's scratch permit when the first
stored run is asked for, and nothing when none is.

Thread rule: one thread at a time, the load's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

from tidegate.errors import InvalidError
from tidegate.storage.index.entries import RunEntry, StoredRef
from tidegate.storage.memory.scratch import ScratchLimiter
from tidegate.storage.packs.open_packs import PackCache
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import StoreSpec


class Loaded(Protocol):
    """Who counts what is read from the backend, and which buckets of a store it was for; none for a scan."""

    def __call__(self, task: str, runs: int, nbytes: int, store: str, buckets: Collection[int]) -> None: ...


class RunLoader:
    """Reads the stored runs of one load."""

    __slots__ = ("_admit", "_is_sweep", "_packs", "_read", "_spec", "_task", "_told", "scratch")

    def __init__(
        self,
        packs: PackCache,
        task: str,
        spec: StoreSpec,
        admit: Callable[[], None],
        told: Loaded,
        scratch: ScratchLimiter,
        *,
        is_sweep: bool,
    ) -> None:
        self.scratch = scratch
        self._is_sweep = is_sweep
        self._read: set[int] = set()  # buckets that were told: each counts once for a load
        self._packs = packs
        self._task = task
        self._spec = spec
        self._admit = admit
        self._told = told

    def __call__(self, entry: RunEntry) -> Run:
        """One run."""
        return next(self.all([entry]))

    def all(self, entries: Sequence[RunEntry]) -> Iterator[Run]:
        """These runs, in this order; their packs are opened beside one another where that is worth it."""
        places = [self._place(entry) for entry in entries]
        if places:
            self._admit()
            buckets = set() if self._is_sweep else {entry.bucket for entry in entries} - self._read
            self._read |= buckets
            nbytes = sum(place.nbytes for place in places)
            self._told(self._task, len(places), nbytes, self._spec.name, buckets)
        return self._packs.load_all(self._task, self._spec, places)

    @property
    def ahead(self) -> int:
        """How many buckets are worth asking for at once; 1 when the backend is near."""
        return self._packs.reads_at_once

    def bring(self, entries: Iterable[RunEntry]) -> None:
        """Open the packs of runs that are asked for soon."""
        packs = [self._place(entry).pack for entry in entries]
        if packs:
            self._admit()
            self._packs.bring(packs)

    def _place(self, entry: RunEntry) -> StoredRef:
        if entry.stored is None:
            raise InvalidError(f"store {self._spec.name}, bucket {entry.bucket}: a run without any place")
        return entry.stored
