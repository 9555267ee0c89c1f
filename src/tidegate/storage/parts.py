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
from typing import TYPE_CHECKING, Any, NamedTuple

from tidegate.clock import Clock
from tidegate.errors import ConflictError, CorruptError, InternalError, InvalidError, UnavailableError
from tidegate.randomness import Randomness
from tidegate.scheduling import Scheduled
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
from tidegate.storage.maintenance.operations import BucketLocks, Operation
from tidegate.storage.maintenance.retirement import BatchPins, BatchRetirementQueue, CheckpointHolds, PackUse
from tidegate.storage.manifest import ManifestChain, StoreState
from tidegate.storage.memory.backlog import BacklogBudget
from tidegate.storage.memory.key_lru import ColdReads
from tidegate.storage.memory.pool import BaseRuns, HotRuns, WorkerMemoryPool, WriteBuffer
from tidegate.storage.metrics import StorageStats
from tidegate.storage.pack import NewPack, PackCache, write_packs
from tidegate.storage.runs.run import Run
from tidegate.storage.scratch import ScratchLimiter
from tidegate.storage.spec import StoreSpec
from tidegate.storage.state import NamedValues, StateCodec, StateHandle, Value

if TYPE_CHECKING:
    from tidegate.storage.memory.key_lru import KeyLru
    from tidegate.storage.state_store import StateStore


# -- tasks -------------------------------------------------------------------------------------------

STATE_PREFIX = "state."


@dataclass(slots=True)
class AttachedStore:
    """One store of a task, with the writer's next row number."""

    task: TaskStorage = field(repr=False)
    state: BucketIndexState
    next_seq: int = 0
    hot_buckets: int = 2  # the newest buckets, which periodic maintenance skips
    cold_reads: ColdReads = field(default_factory=ColdReads)

    @property
    def spec(self) -> StoreSpec:
        return self.state.index.spec

    def newest_buckets(self) -> list[int]:
        """Ascending starts of the newest `hot_buckets` buckets."""
        return self.state.index.all_buckets()[-self.hot_buckets :] if self.hot_buckets else []

    def cold(self, buckets: Sequence[int]) -> list[int]:
        """Those of the buckets that are older than the newest ones."""
        newest = self.newest_buckets()
        return [bucket for bucket in buckets if not newest or bucket < newest[0]]


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
class Upkeep:
    """The background jobs and the unfinished inline pass of one task."""

    jobs: list[Scheduled] = field(default_factory=list)
    working: threading.Lock = field(default_factory=threading.Lock)
    stopping: threading.Event = field(default_factory=threading.Event)
    inline: Operation[None] | None = None
    overrun_ms: int = 0  # what inline passes took beyond their budgets so far


@dataclass(slots=True)
class TaskStorage:
    """One task of the worker."""

    parts: StorageParts = field(repr=False)
    task: str
    key_lru: KeyLru
    chain: ManifestChain
    named: NamedValues
    stores: dict[str, AttachedStore] = field(default_factory=dict)
    restored: dict[str, StoreState] = field(default_factory=dict)  # of the last restore, not attached yet
    number: int = 0  # of the last checkpoint
    retained: list[int] = field(default_factory=list)  # checkpoints whose objects are held, oldest first
    is_measured: bool = True  # whether the file sizes of restored packs were read (dead bytes)
    # None: equal to no checkpoint from now on
    last_checkpoint: LastCheckpoint | None = field(default_factory=LastCheckpoint)
    unnamed_since_ms: int | None = None  # when the first pack was stored that no checkpoint names yet
    failure: BaseException | None = None
    upkeep: Upkeep = field(default_factory=Upkeep)
    lock: threading.Lock = field(default_factory=threading.Lock)
    _handles: dict[str, StateHandle[Any]] = field(default_factory=dict)

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

    def drop_hot(self, copies: Iterable[HotCopy]) -> int:
        """Drop hot copies; returns the pool bytes freed, 0 for copies already dropped."""
        return sum(self.parts.cache_of(hot.tenant).remove(self.task, hot) for hot in copies)

    # -- stored runs -----------------------------------------------------------------------------

    def load_all(self, spec: StoreSpec, entries: Sequence[RunEntry]) -> list[Run]:
        """Return whole runs, from memory if complete there, else from their packs (which must be pinned)."""
        refs = []
        for entry in entries:
            if entry.stored is None and not entry.is_hot:
                raise InternalError(
                    f"the run of order {entry.order} in bucket {entry.bucket} of {self.task}/{spec.name} has neither "
                    "a stored copy nor a complete hot one; restore the task from its last checkpoint"
                )
            if entry.stored is not None and not entry.is_hot:
                refs.append(entry.stored)
        stored = self.parts.packs.load_all(self.task, spec, refs)
        return [entry.hot_run or next(stored) for entry in entries]

    def store_all(self, segments: Sequence[tuple[StoreSpec, int, Sequence[Run]]]) -> list[list[StoredRef]]:
        """Write a new pack for the runs of each (store, time segment), all durable together.

        They count as live until `retire`.
        """
        unique = self.parts.randomness.uuid
        packs = [
            NewPack(spec, segment, runs, pack_name(self.task, spec.name, segment, unique().hex))
            for spec, segment, runs in segments
        ]
        started = self.parts.clock.monotonic_ms()
        at_once = self.parts.config.load_io_parallelism if self.parts.backend.is_remote else 1
        try:
            refs = write_packs(self.parts.backend, self.task, packs, at_once=at_once)
        except ConflictError:
            raise  # the name belongs to another object: do not retire it
        except BaseException:
            # A put may have succeeded although it raised: its object must not be left behind.
            self.parts.retirement.retire(self.task, [pack.name for pack in packs])
            raise
        self.note_unnamed(started)
        for stored in refs:
            self.parts.use.add(self.task, stored)
        self.parts.stats.count(
            self.task,
            dump_calls=len(refs),
            dump_runs=sum(map(len, refs)),
            dump_bytes=sum(ref.nbytes for stored in refs for ref in stored),
            dump_seconds=self.parts.ms_since(started) / 1000,
        )
        return refs

    def retire(self, refs: Iterable[StoredRef]) -> None:
        """Remove stored runs from the live counts; a pack without live runs is queued for deletion."""
        unused = self.parts.use.remove(self.task, refs)
        if unused and self.parts.config.deletes:
            self.parts.retirement.retire(self.task, unused)
        elif unused:  # its master's from now on: nothing is to be known of it here
            for pack in unused:
                self.parts.packs.forget(pack)
            self.parts.use.forget(self.task, unused)

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

    def handle(self, namespace: str, codec: StateCodec[Value]) -> StateHandle[Value]:
        """The task's state of this name, which the first call creates."""
        if not namespace or "/" in namespace:
            raise InvalidError(
                f"state namespace {namespace!r} of task {self.task}: use a non-empty name without '/'"
            )
        with self.lock:
            found = self._handles.get(namespace)
            if found is None:
                found = self._handles[namespace] = StateHandle(self, namespace, codec)
            elif type(found.codec) is not type(codec):
                raise InvalidError(
                    f"state {namespace} of task {self.task} is open with {type(found.codec).__name__} and asked for "
                    f"with {type(codec).__name__}: use one codec, or another namespace"
                )
            return found

    def handles(self) -> list[StateHandle[Any]]:
        """All states by key, by namespace."""
        with self.lock:
            return [self._handles[name] for name in sorted(self._handles)]

    def attached(self) -> list[AttachedStore]:
        """All stores by name, those of state blobs included."""
        with self.lock:
            return [self.stores[name] for name in sorted(self.stores)]


class Tasks(dict[str, TaskStorage]):
    """All tasks of the worker, by id. Safe from any thread."""

    def __missing__(self, task: str) -> TaskStorage:
        raise InvalidError(f"task {task!r} has no storage here: attach a state or apply a checkpoint first")


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
    shelf: StateStore
    stats: StorageStats
    locks: BucketLocks
    tasks: Tasks

    def ms_since(self, started_ms: int) -> int:
        return self.clock.monotonic_ms() - started_ms

    def is_kept(self, stored_ms: int | None) -> bool:
        """Whether no master can have collected what was stored then, and no checkpoint names yet, as garbage."""
        config = self.config
        return config.deletes or stored_ms is None or 2 * self.ms_since(stored_ms) < config.garbage_grace_ms

    def cache_of(self, tenant: Tenant) -> HotRuns:
        return self.base_runs if tenant is Tenant.BASE_RUNS else self.write_buffer
