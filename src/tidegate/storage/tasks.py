"""What a worker knows of one task: its stores, its keys' last uses, its state caches, its checkpoints, its failure.

Owned by the runtime, shared with the writer and maintenance. A task's stores are changed by its one operator
thread; maintenance only looks them up. `failure` is set once, by whichever maintenance operation failed, and from
then on every call for the task raises it until the task is restored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tidegate.errors import CorruptError, InternalError, InvalidError, UnavailableError
from tidegate.storage.index.bucket_index import BucketIndex
from tidegate.storage.index.state import BucketIndexState, ExtraState
from tidegate.storage.memory.cold_reads import ColdReads
from tidegate.storage.packs.manifest import ManifestChain, StoreState
from tidegate.storage.spec import Cursor, StoreSpec
from tidegate.storage.state.named import NamedValues

if TYPE_CHECKING:
    from tidegate.storage.memory.key_lru import KeyLru

STATE_PREFIX = "state."


@dataclass(slots=True)
class AttachedStore:
    """One store of a task, with what the index does not know: the writer's next number."""

    state: BucketIndexState
    next_seq: int = 0
    hot_buckets: int = 2  # the newest buckets that periodic maintenance leaves alone
    cold_reads: ColdReads = field(default_factory=ColdReads)

    @property
    def spec(self) -> StoreSpec:
        return self.state.index.spec


class Mark(NamedTuple):
    """By what to tell that a store is as it was: nothing appended or pruned, no number used, the same extra."""

    rows_of: BucketIndex
    data_version: int
    next_seq: int
    extra: bytes


def mark_of(store: AttachedStore, extra: bytes | None = None) -> Mark:
    """The store as it is now; on the operator's thread. `extra` when it was encoded at this moment anyway."""
    state = store.state
    if extra is None:
        extra = state.encode_extra() if isinstance(state, ExtraState) else b""
    return Mark(state.index, state.index.data_version, store.next_seq, extra)


@dataclass(slots=True)
class Standing:
    """The checkpoint a task was last equal to (None: the beginning), and its stores as they were then."""

    token: bytes | None = None
    named: frozenset[str] = frozenset()  # stores the checkpoint names
    marks: dict[str, Mark] = field(default_factory=dict)  # those that are attached


@dataclass(slots=True)
class TaskStorage:
    """One task of the worker."""

    task: str
    key_lru: KeyLru
    chain: ManifestChain
    named: NamedValues
    stores: dict[str, AttachedStore] = field(default_factory=dict)
    restored: dict[str, StoreState] = field(default_factory=dict)  # of the last restore, not attached yet
    cursors: dict[str, Cursor | None] = field(default_factory=dict)  # the highest of each restored store
    number: int = 0  # of the last checkpoint
    retained: list[int] = field(default_factory=list)  # checkpoints whose objects are held, oldest first
    is_measured: bool = True  # whether the files of restored packs were looked at for what is dead in them
    standing: Standing | None = field(default_factory=Standing)  # None: equal to no checkpoint for good
    unnamed_since_ms: int | None = None  # when the first pack was stored that no checkpoint names yet
    failure: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        """Raise what stopped the task, if anything did."""
        failure = self.failure
        if failure is None:
            return
        message = (
            f"task {self.task} was stopped because maintenance failed: {failure}. "
            "Restore it from its last checkpoint (apply_checkpoint), or start it anew"
        )
        if isinstance(failure, CorruptError):
            raise CorruptError(message, path=failure.path, position=failure.position) from failure
        raise UnavailableError(message) from failure

    def is_as_at(self, token: bytes | None) -> bool:
        """Whether the stores hold what they held at this checkpoint; state caches are not looked at."""
        standing = self.standing
        if standing is None or standing.token != token or self.failure is not None:
            return False
        stores = self.stores
        if len(stores) != len(standing.marks) or not self.named.is_saved():
            return False
        return all(
            (store := stores.get(name)) is not None and mark_of(store) == mark
            for name, mark in standing.marks.items()
        )

    def fail(self, error: BaseException) -> None:
        """Stop the task; the first reason stays."""
        with self.lock:
            if self.failure is None:
                self.failure = error

    def note_unnamed(self, stored_ms: int) -> None:
        """Something is live now that was stored then, and that no checkpoint names yet."""
        since_ms = self.unnamed_since_ms
        self.unnamed_since_ms = stored_ms if since_ms is None else min(since_ms, stored_ms)

    def store_of(self, state: BucketIndexState) -> AttachedStore:
        """The attached store of a state, or `InvalidError`."""
        spec = state.index.spec
        found = self.stores.get(spec.name)
        if found is None or found.state.index is not state.index:
            raise InvalidError(
                f"store {spec.name} of task {self.task} is not attached"
                + ("" if found is None else " with this state: another one has its name")
                + "; call runtime.attach(task, state) first"
            )
        return found

    def note_cold(self, store: str, buckets: Iterable[int]) -> None:
        """A load had to read stored runs of these buckets; state blobs have a cache of their own, and do not count."""
        found = self.stores.get(store)
        if found is not None and not store.startswith(STATE_PREFIX):
            found.cold_reads.note(buckets)

    def attached(self) -> list[AttachedStore]:
        """All stores, also those of state blobs, by name."""
        with self.lock:
            return [self.stores[name] for name in sorted(self.stores)]


class Tasks:
    """All tasks of the worker, by id. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskStorage] = {}

    def get(self, task: str) -> TaskStorage:
        found = self._tasks.get(task)
        if found is None:
            raise InvalidError(
                f"task {task!r} has no storage here: attach a state or apply a checkpoint first"
            )
        return found

    def find(self, task: str) -> TaskStorage | None:
        return self._tasks.get(task)

    def add(self, storage: TaskStorage) -> TaskStorage:
        """The task's storage: this one, or the one that was there already."""
        with self._lock:
            return self._tasks.setdefault(storage.task, storage)

    def remove(self, task: str) -> None:
        with self._lock:
            if self._tasks.pop(task, None) is None:
                raise InternalError(f"task {task} is removed twice")

    def all(self) -> list[TaskStorage]:
        with self._lock:
            return list(self._tasks.values())
