"""The parts of a worker's storage in one value, and the few moves that several of them make together.

The runtime builds it; the writer, maintenance and checkpoints work with it; operators never see it. The moves
keep ledgers in step: a hot copy goes together with its pool bytes, a stored run with its pack's count of live slots.

Thread rule: as the parts themselves, any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import pyarrow as pa

from tidegate.clock import Clock
from tidegate.errors import ConflictError, InternalError
from tidegate.randomness import Randomness
from tidegate.storage.backends.port import StorageBackend
from tidegate.storage.config import StorageConfig
from tidegate.storage.index.entries import HotCopy, RunEntry, StoredRef, Tenant
from tidegate.storage.memory.backlog import BacklogBudget
from tidegate.storage.memory.caches import BaseRuns, HotRuns, WriteBuffer
from tidegate.storage.memory.pool import WorkerMemoryPool
from tidegate.storage.memory.scratch import ScratchLimiter
from tidegate.storage.packs.layout import pack_name
from tidegate.storage.packs.open_packs import PackCache
from tidegate.storage.packs.pack import NewPack, write_packs
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import StoreSpec
from tidegate.storage.state.handle import StateCaches
from tidegate.storage.stats import StorageStats
from tidegate.storage.tasks import Tasks, TaskStorage
from tidegate.storage.upkeep.operations import BucketLocks
from tidegate.storage.upkeep.pack_use import PackUse
from tidegate.storage.upkeep.pins import BatchPins
from tidegate.storage.upkeep.retirement import BatchRetirementQueue, CheckpointHolds


@dataclass(frozen=True, slots=True)
class StorageParts:
    """Everything one worker's storage is made of."""

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
        """Drop hot copies; the pool bytes that came free. One that is gone already counts for nothing."""
        return sum(self.cache_of(hot.tenant).remove(task.task, hot) for hot in copies)

    # -- stored runs -----------------------------------------------------------------------------

    def load(self, task: TaskStorage, spec: StoreSpec, entry: RunEntry) -> Run:
        """The whole run, from memory if all of it is there, else from its pack (which must be pinned)."""
        if entry.hot is not None and entry.hot.complete:
            return entry.hot.run
        if entry.stored is None:
            raise_nowhere(task.task, spec, entry)
        return self.packs.load(task.task, spec, entry.stored)

    def load_all(self, task: TaskStorage, spec: StoreSpec, entries: Sequence[RunEntry]) -> list[Run]:
        """The runs of these entries, each as `load` does; packs that must be read come together."""
        refs = [entry.stored for entry in entries if not entry.is_hot and entry.stored is not None]
        stored = dict(zip(refs, self.packs.load_all(task.task, spec, refs), strict=True))
        return [
            self.load(task, spec, entry) if entry.is_hot or entry.stored is None else stored[entry.stored]
            for entry in entries
        ]

    def store(self, task: TaskStorage, spec: StoreSpec, segment: int, runs: Sequence[Run]) -> list[StoredRef]:
        """Write runs of one time segment as a new pack, counted as live until `retire` says otherwise."""
        (refs,) = self.store_all(task, [(spec, segment, runs)])
        return refs

    def store_all(
        self, task: TaskStorage, segments: Sequence[tuple[StoreSpec, int, Sequence[Run]]]
    ) -> list[list[StoredRef]]:
        """A new pack for each time segment of each store, all of them durable together; as `store` does."""
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
            raise  # a name is somebody else's object: not ours to retire
        except BaseException:
            # A put may have happened although it failed to say so: its name must not be left behind.
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
        """Stored runs left live metadata (or never entered it); a pack without live runs is queued for deletion."""
        unused = self.use.remove(task.task, refs)
        if unused and self.config.deletes:
            self.retirement.retire(task.task, unused)
        elif unused:  # its master's from now on: nothing is to be known of it here
            for pack in unused:
                self.packs.forget(pack)
            self.use.forget(task.task, unused)


def own_memory(run: Run, nbytes: int) -> Run:
    """The run in memory of its own: a stored run is a view of a mapped file. It weighs what it did, `nbytes`."""
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
