"""The parts of a worker's storage, and its state per task: stores, key accesses, checkpoints, failure.

The runtime builds `StorageParts`; the writer, maintenance and checkpoints use it; operators never see it. Its methods
keep the accounting consistent: a hot copy is dropped together with its pool bytes, a stored run with its pack's count
of live slots. Only a task's operator thread changes its stores; maintenance only looks them up. `TaskStorage.failure`
is set by the first maintenance operation that fails; from then on every call for the task raises it until the task is
restored.

Thread rule: any thread, except for a task's stores.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import pyarrow as pa

from tidegate.clock import Clock
from tidegate.errors import ConflictError, CorruptError, InternalError, InvalidError, UnavailableError
from tidegate.randomness import Randomness
from tidegate.storage.backends.base import StorageBackend
from tidegate.storage.backends.sealed import pack_name
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import (
    BucketIndex,
    BucketIndexState,
    HotCopy,
    RunEntry,
    StoredRef,
    Tenant,
)
from tidegate.storage.maintenance.operations import BucketLocks
from tidegate.storage.maintenance.retirement import BatchPins, BatchRetirementQueue, CheckpointHolds, PackUse
from tidegate.storage.manifest import ManifestChain, StoreState
from tidegate.storage.memory.backlog import BacklogBudget
from tidegate.storage.memory.key_lru import ColdReads
from tidegate.storage.memory.pool import BaseRuns, HotRuns, WorkerMemoryPool, WriteBuffer
from tidegate.storage.memory.scratch import ScratchLimiter
from tidegate.storage.metrics import StorageStats
from tidegate.storage.pack import NewPack, PackCache, write_packs
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import Cursor, StoreSpec
from tidegate.storage.state import NamedValues, StateCaches

if TYPE_CHECKING:
    from tidegate.storage.memory.key_lru import KeyLru


# -- tasks -------------------------------------------------------------------------------------------

STATE_PREFIX = "state."


@dataclass(slots=True)
class AttachedStore:
    """One store of a task, with the writer's next row number."""

    state: BucketIndexState
    next_seq: int = 0
    hot_buckets: int = 2  # the newest buckets, which periodic maintenance skips
    cold_reads: ColdReads = field(default_factory=ColdReads)

    @property
    def spec(self) -> StoreSpec:
        return self.state.index.spec


class Mark(NamedTuple):
    """A fingerprint of a store's state, to detect appends, prunes and used row numbers."""

    rows_of: BucketIndex
    data_version: int
    next_seq: int


def mark_of(store: AttachedStore) -> Mark:
    """The store's present mark; on the operator's thread."""
    return Mark(store.state.index, store.state.index.data_version, store.next_seq)


@dataclass(slots=True)
class LastCheckpoint:
    """The checkpoint a task last equalled (None: the beginning), and the marks of its stores then."""

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
    is_measured: bool = True  # whether the file sizes of restored packs were read (dead bytes)
    # None: equal to no checkpoint from now on
    last_checkpoint: LastCheckpoint | None = field(default_factory=LastCheckpoint)
    unnamed_since_ms: int | None = None  # when the first pack was stored that no checkpoint names yet
    failure: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        """Raise the error that stopped the task, if any."""
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
        """Whether the stores equal those of this checkpoint; ignores state caches."""
        last = self.last_checkpoint
        if last is None or last.token != token or self.failure is not None:
            return False
        stores = self.stores
        if len(stores) != len(last.marks) or not self.named.is_saved():
            return False
        return all(
            (store := stores.get(name)) is not None and mark_of(store) == mark
            for name, mark in last.marks.items()
        )

    def fail(self, error: BaseException) -> None:
        """Stop the task; the first error is kept."""
        with self.lock:
            if self.failure is None:
                self.failure = error

    def note_unnamed(self, stored_ms: int) -> None:
        """Note that a pack stored at this time is live and not yet in a checkpoint."""
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
        """Count a load that read stored runs of these buckets; state blobs have their own cache and do not count."""
        found = self.stores.get(store)
        if found is not None and not store.startswith(STATE_PREFIX):
            found.cold_reads.note(buckets)

    def attached(self) -> list[AttachedStore]:
        """All stores by name, those of state blobs included."""
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
        """Register the task's storage; returns the existing one if there is any."""
        with self._lock:
            return self._tasks.setdefault(storage.task, storage)

    def remove(self, task: str) -> None:
        with self._lock:
            if self._tasks.pop(task, None) is None:
                raise InternalError(f"task {task} is removed twice")

    def all(self) -> list[TaskStorage]:
        with self._lock:
            return list(self._tasks.values())


# -- parts -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StorageParts:
    """All components of one worker's storage."""

    config: StorageConfig
    clock: Clock
    randomness: Randomness
    backend: StorageBackend
    pool: WorkerMemoryPool
    write_buffer: WriteBuffer
    base_runs: BaseRuns
    scratch: ScratchLimiter
    backlog: BacklogBudget
    pins: BatchPins
    use: PackUse
    holds: CheckpointHolds
    retirement: BatchRetirementQueue
    packs: PackCache
    states: StateCaches
    stats: StorageStats
    locks: BucketLocks
    tasks: Tasks

    def ms_since(self, started_ms: int) -> int:
        return self.clock.monotonic_ms() - started_ms

    # -- hot copies ------------------------------------------------------------------------------

    def cache_of(self, tenant: Tenant) -> HotRuns:
        return self.base_runs if tenant is Tenant.BASE_RUNS else self.write_buffer

    def drop_hot(self, task: TaskStorage, copies: Iterable[HotCopy]) -> int:
        """Drop hot copies; returns the pool bytes freed, 0 for copies already dropped."""
        return sum(self.cache_of(hot.tenant).remove(task.task, hot) for hot in copies)

    # -- stored runs -----------------------------------------------------------------------------

    def load(self, task: TaskStorage, spec: StoreSpec, entry: RunEntry) -> Run:
        """Return the whole run, from memory if complete there, else from its pack (which must be pinned)."""
        if entry.hot is not None and entry.hot.complete:
            return entry.hot.run
        if entry.stored is None:
            raise_nowhere(task.task, spec, entry)
        return self.packs.load(task.task, spec, entry.stored)

    def load_all(self, task: TaskStorage, spec: StoreSpec, entries: Sequence[RunEntry]) -> list[Run]:
        """Return the runs of these entries, as `load` does; packs are opened together."""
        refs = [entry.stored for entry in entries if not entry.is_hot and entry.stored is not None]
        stored = dict(zip(refs, self.packs.load_all(task.task, spec, refs), strict=True))
        return [
            self.load(task, spec, entry) if entry.is_hot or entry.stored is None else stored[entry.stored]
            for entry in entries
        ]

    def store(self, task: TaskStorage, spec: StoreSpec, segment: int, runs: Sequence[Run]) -> list[StoredRef]:
        """Write runs of one time segment as a new pack, which counts as live until `retire`."""
        (refs,) = self.store_all(task, [(spec, segment, runs)])
        return refs

    def store_all(
        self, task: TaskStorage, segments: Sequence[tuple[StoreSpec, int, Sequence[Run]]]
    ) -> list[list[StoredRef]]:
        """Write a new pack for each time segment of each store, all durable together; as `store` does."""
        unique = self.randomness.uuid
        packs = [
            NewPack(spec, segment, runs, pack_name(task.task, spec.name, segment, unique().hex))
            for spec, segment, runs in segments
        ]
        started = self.clock.monotonic_ms()
        at_once = self.config.load_io_parallelism if self.backend.is_remote else 1
        try:
            refs = write_packs(self.backend, task.task, packs, at_once=at_once)
        except ConflictError:
            raise  # the name belongs to another object: do not retire it
        except BaseException:
            # A put may have succeeded although it raised: its object must not be left behind.
            self.retirement.retire(task.task, [pack.name for pack in packs])
            raise
        task.note_unnamed(started)
        for stored in refs:
            self.use.add(task.task, stored)
        self.stats.dumped(
            task.task,
            packs=len(refs),
            runs=sum(map(len, refs)),
            nbytes=sum(ref.nbytes for stored in refs for ref in stored),
            ms=self.ms_since(started),
        )
        return refs

    def retire(self, task: TaskStorage, refs: Iterable[StoredRef]) -> None:
        """Remove stored runs from the live counts; a pack without live runs is queued for deletion."""
        unused = self.use.remove(task.task, refs)
        if unused and self.config.deletes:
            self.retirement.retire(task.task, unused)
        elif unused:  # its master's from now on: nothing is to be known of it here
            for pack in unused:
                self.packs.forget(pack)
            self.use.forget(task.task, unused)


def own_memory(run: Run, nbytes: int) -> Run:
    """Copy a stored run, a view of a mapped file, into its own memory; its logical size stays `nbytes`."""
    owned = Run(run.bucket, _copy(run.directory), _copy(run.rows))
    owned.__dict__["nbytes"] = (
        nbytes  # the index's number, so that the pool sees the same run at the same size
    )
    return owned


def _copy(batch: pa.RecordBatch) -> pa.RecordBatch:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


def raise_nowhere(task: str, spec: StoreSpec, entry: RunEntry) -> NoReturn:
    raise InternalError(
        f"the run of order {entry.order} in bucket {entry.bucket} of {task}/{spec.name} has neither "
        "a stored copy nor a complete hot one; restore the task from its last checkpoint"
    )
