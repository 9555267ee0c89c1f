"""The parts of a worker's storage in one value, and the few moves that several of them make together.

The runtime builds it; the writer, maintenance and checkpoints work with it; operators never see it. The moves
keep ledgers in step: a hot copy comes and goes together with its pool bytes and its keys' bytes on the clock, a
stored run with its pack's count of live slots.

Thread rule: as the parts themselves, any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import pyarrow as pa

from tidegate.clock import Clock
from tidegate.errors import ConflictError, InternalError
from tidegate.randomness import Randomness
from tidegate.storage.backends.port import StorageBackend
from tidegate.storage.config import StorageConfig
from tidegate.storage.index.entries import HotCopy, RunEntry, StoredRef, Tenant
from tidegate.storage.memory.backlog import BacklogBudget
from tidegate.storage.memory.caches import RunCache
from tidegate.storage.memory.pool import WorkerMemoryPool
from tidegate.storage.memory.scratch import ScratchLimiter
from tidegate.storage.packs.layout import pack_name
from tidegate.storage.packs.open_packs import PackCache
from tidegate.storage.packs.pack import NewPack, write_packs
from tidegate.storage.runs.run import Int64s, Run
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
    write_buffer: RunCache
    base_runs: RunCache
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

    def cache_of(self, tenant: Tenant) -> RunCache:
        return self.base_runs if tenant is Tenant.BASE_RUNS else self.write_buffer

    def put_hot(
        self, task: TaskStorage, tenant: Tenant, run: Run, *, complete: bool = True, over_limit: bool = True
    ) -> HotCopy:
        """Take a run into memory: pool bytes and its keys' bytes."""
        hot = self.cache_of(tenant).put(task.task, run, complete=complete, over_limit=over_limit)
        task.key_clock.add_run(run, bytes_by_key)
        return hot

    def drop_hot(self, task: TaskStorage, copies: Iterable[HotCopy]) -> int:
        """Let hot copies go; the pool bytes that came free. One that is gone already counts for nothing."""
        freed = 0
        for hot in copies:
            given_back = self.cache_of(hot.tenant).remove(task.task, hot)
            if given_back:
                task.key_clock.remove_run(hot.run, bytes_by_key)
            freed += given_back
        return freed

    def shrink_hot(self, task: TaskStorage, old: HotCopy, lines: Int64s, rest: Run | None) -> HotCopy | None:
        """A hot copy without the keys on these lines of its directory; `old` is still there, for `drop_shrunk`.

        Only the keys that go are touched on the clock, and only by `drop_shrunk`: the rest keep what they weigh.
        """
        if rest is None:
            return None
        weigh(rest, row_weight(old.run))
        return self.cache_of(old.tenant).put(task.task, rest, complete=False, over_limit=True)

    def drop_shrunk(self, task: TaskStorage, old: HotCopy, lines: Int64s, new: HotCopy | None) -> int:
        """Let the larger of the two copies go, now that the smaller is published; the pool bytes that came free."""
        given_back = self.cache_of(old.tenant).remove(task.task, old)
        if given_back:
            task.key_clock.remove_bytes(old.run.hashes[lines], bytes_by_key(old.run)[lines])
        return given_back - (0 if new is None else new.run.nbytes)

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


def row_weight(run: Run) -> int:
    """What a row of the run weighs on the key clock: a share of the run's bytes, the same in all its hot copies."""
    weight: int | None = run.__dict__.get("row_weight")
    if weight is None:
        weight = weigh(run, max(1, run.nbytes // max(1, run.row_count)))
    return weight


def weigh(run: Run, weight: int) -> int:
    """Fix the weight of a run's rows: a shrunk copy weighs what the whole one did, row by row."""
    run.__dict__["row_weight"] = weight
    return weight


def bytes_by_key(run: Run) -> Int64s:
    """What each key of a run weighs on the key clock."""
    return np.diff(run.starts).astype(np.int64) * row_weight(run)


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
