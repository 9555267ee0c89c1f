"""The storage of one worker process: builds and connects all parts from one config.

There is one runtime per worker process, shared by its tasks: budgets belong to the worker, content to each task. An
operator gets a `RuntimeContext`: it reads with `reader`, writes with `writer`, keeps state in `state_handle`, and may
start and stop the maintenance of its own task (INV-1). A master calls `checkpoint`, `apply_checkpoint` and
`release_checkpoint` and keeps opaque tokens.

Thread rule: one operator thread per task calls `attach`, `detach`, `checkpoint`, `apply_checkpoint` and appends; all
other methods may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import NamedTuple

from tidegate.clock import Clock, SystemClock
from tidegate.errors import InvalidError, OverloadError
from tidegate.metrics import Metrics
from tidegate.randomness import Randomness, SystemRandomness
from tidegate.scheduling import Scheduler, ThreadScheduler
from tidegate.storage.backends.base import StorageBackend
from tidegate.storage.checkpoint import checkpoint, fill, forget, is_at, restore
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import BucketIndexState, ProgressState
from tidegate.storage.maintenance.compaction import reclaim
from tidegate.storage.maintenance.dump import Relief, relieve
from tidegate.storage.maintenance.operations import WAITING, BucketLocks, Operation, Result, run_through
from tidegate.storage.maintenance.retirement import BatchPins, BatchRetirementQueue, CheckpointHolds, PackUse
from tidegate.storage.maintenance.supervisor import MaintenanceSupervisor
from tidegate.storage.manifest import GarbageReport, ManifestChain, Token, collect_garbage
from tidegate.storage.memory.allocator import keep_freed_memory
from tidegate.storage.memory.backlog import BacklogBudget
from tidegate.storage.memory.key_lru import KeyLru
from tidegate.storage.memory.pool import (
    BaseRuns,
    ReliefShare,
    WorkerMemoryPool,
    WriteBuffer,
)
from tidegate.storage.metrics import StorageStats
from tidegate.storage.pack import PackCache
from tidegate.storage.parts import STATE_PREFIX, AttachedStore, StorageParts, Tasks, TaskStorage, mark_of
from tidegate.storage.reader import StorageReader
from tidegate.storage.scratch import Scratch, ScratchLimiter
from tidegate.storage.state import (
    PROGRESS,
    BytesCodec,
    NamedValues,
    StateCodec,
    StateHandle,
    Value,
    progress_name,
)
from tidegate.storage.state_store import StateStore, state_store_of
from tidegate.storage.writer import StorageWriter


class Leaks(NamedTuple):
    """Resources not yet released; all zero when nothing leaks."""

    leases: int
    reader_permits: int
    maintenance_permits: int
    busy_buckets: int


# -- context of a task -------------------------------------------------------------------------------


class RuntimeContext:
    """One task's access to its worker's storage."""

    def __init__(self, task: str, storage: WorkerStorageRuntime) -> None:
        self.task = task
        self._storage = storage

    def reader(self) -> StorageReader:
        return self._storage.reader()

    def writer(self) -> StorageWriter:
        return self._storage.writer()

    def state_handle(
        self, namespace: str, codec: StateCodec[Value], *, keyed: bool = True
    ) -> StateHandle[Value]:
        """Return the task's state of this name; all its handles share the same values.

        With `keyed=False` it has named values only (`keep`).
        """
        return self._storage.state_handle(self.task, namespace, codec, keyed=keyed)

    def attach(self, state: BucketIndexState) -> None:
        """Attach a state's store, which is maintained, checkpointed and restored from now on."""
        self._storage.attach(self.task, state)

    def start_maintenance(self) -> None:
        self._storage.start(self.task)

    def stop_maintenance(self) -> None:
        self._storage.stop(self.task)

    def maintain(self, budget_ms: int) -> bool:
        """Run maintenance on this thread for about `budget_ms`; True when nothing is left to do."""
        return self._storage.maintain(self.task, budget_ms)


# -- runtime -----------------------------------------------------------------------------------------


class WorkerStorageRuntime:
    """The storage of one worker process. Make it with `open`."""

    def __init__(
        self,
        config: StorageConfig,
        backend: StorageBackend,
        clock: Clock,
        scheduler: Scheduler,
        randomness: Randomness,
        metrics: Metrics,
    ) -> None:
        tasks, pins, holds, stats = Tasks(), BatchPins(), CheckpointHolds(), StorageStats(metrics)
        pool = WorkerMemoryPool(config, clock)
        scratch = ScratchLimiter(
            clock,
            reader_slots=config.max_inflight_loads,
            maintenance_slots=config.max_inflight_maintenance,
            timeout_ms=config.scratch_timeout_ms,
            working_bytes=config.working_bytes,
        )
        packs = PackCache(
            backend,
            max_open=config.max_open_packs,
            reads_at_once=config.load_io_parallelism if backend.is_remote else 1,
        )

        def key_lru(task: str) -> KeyLru:
            return tasks[task].key_lru

        def loaded(task: str, runs: int, nbytes: int, store: str, buckets: Collection[int]) -> None:
            stats.count(task, loads=1, loaded_runs=runs, loaded_bytes=nbytes)
            if buckets:
                tasks[task].note_cold(store, buckets)

        self._reader = StorageReader(packs, pins, scratch, key_lru, stats.overloaded, loaded)
        shelf = StateStore(tasks, self._reader, config.max_run_rows)
        self._parts = StorageParts(
            config=config,
            clock=clock,
            randomness=randomness,
            backend=backend,
            pool=pool,
            write_buffer=WriteBuffer(pool),
            base_runs=BaseRuns(pool),
            scratch=scratch,
            backlog=BacklogBudget(
                clock,
                limit_bytes=config.backlog_limit_bytes,
                largest_bytes=config.largest_append_bytes,
                timeout_ms=config.backlog_timeout_ms,
            ),
            pins=pins,
            use=PackUse(),
            holds=holds,
            retirement=BatchRetirementQueue(config, backend, pins, holds, clock),
            packs=packs,
            shelf=shelf,
            stats=stats,
            locks=BucketLocks(),
            tasks=tasks,
        )
        stats.watch_memory(self._parts)
        shelf.writer = self._writer = StorageWriter(self._parts, self._relieve, self._reclaim)
        self.stats, self.pool, self.backlog, self.scratch = stats, pool, self._parts.backlog, scratch
        self._scheduler = scheduler
        self._owns_scheduler = False
        self.supervisor = MaintenanceSupervisor(self._parts, scheduler)
        pool.set_relief(self._relieve_worker)

    @classmethod
    def open(
        cls,
        config: StorageConfig,
        backend: StorageBackend | Callable[[], StorageBackend],
        *,
        clock: Clock | None = None,
        scheduler: Scheduler | None = None,
        randomness: Randomness | None = None,
        metrics: Metrics | None = None,
    ) -> WorkerStorageRuntime:
        """Create the runtime. `backend` may be a function, which is called after the config was validated."""
        if not isinstance(config, StorageConfig):
            raise InvalidError(f"storage is opened with {type(config).__name__}; give it a StorageConfig")
        keep_freed_memory()
        clock = clock or SystemClock()
        runtime = cls(
            config,
            backend() if callable(backend) else backend,
            clock,
            scheduler or ThreadScheduler(clock, "tidegate-storage"),
            randomness or SystemRandomness(),
            metrics or Metrics(),
        )
        runtime._owns_scheduler = scheduler is None
        return runtime

    # -- what operators use ----------------------------------------------------------------------

    def reader(self) -> StorageReader:
        return self._reader

    def writer(self) -> StorageWriter:
        return self._writer

    def state_handle(
        self, task: str, namespace: str, codec: StateCodec[Value], *, keyed: bool = True
    ) -> StateHandle[Value]:
        """Return the state of this name; all handles of one task and name share one cache.

        With `keyed=False` it has named values only (`keep`), and the task no store for values by key.
        """
        storage = self._task(task)
        if keyed and STATE_PREFIX + namespace not in storage.stores:
            self.attach(task, state_store_of(namespace))
        return storage.handle(namespace, codec)

    def context(self, task: str) -> RuntimeContext:
        """Return the context for the task's operators."""
        self._task(task)
        return RuntimeContext(task, self)

    def attach(self, task: str, state: BucketIndexState) -> None:
        """Attach a state's store, with its content from the restored checkpoint if there is any."""
        storage, spec = self._task(task), state.index.spec
        storage.check()
        if (known := storage.stores.get(spec.name)) is not None:
            if known.state.index is state.index:
                return
            raise InvalidError(f"task {task} has a store {spec.name} already: give each store its own name")
        if state.index.bucket_count:
            raise InvalidError(
                f"store {spec.name} of task {task} has runs before it is attached, and nobody accounts for them: "
                "attach the state first, then append"
            )
        is_internal = spec.name.startswith(STATE_PREFIX)
        store = AttachedStore(
            storage, state, hot_buckets=0 if is_internal else self._parts.config.hot_bucket_count
        )
        fill(store)
        if isinstance(state, ProgressState):
            handle = self.state_handle(task, PROGRESS, BytesCodec(), keyed=False)
            handle.keep(spec.name, state.encode_progress)
        with storage.lock:
            storage.stores[spec.name] = store
        if storage.last_checkpoint is not None:
            storage.last_checkpoint.marks[spec.name] = mark_of(store)

    def detach(self, task: str, state: BucketIndexState | None = None) -> None:
        """Detach one store of a task, or without `state` the whole task, and free its memory and budgets.

        Stored data of checkpoints stays; the next checkpoint no longer names a detached store.
        """
        storage, parts = self._parts.tasks[task], self._parts
        self.supervisor.stop(storage)
        if state is not None:
            store = storage.store_of(state)
            storage.last_checkpoint = None
            gone = state.index.load((), next_order=0)
            storage.drop_hot(gone.hot)
            storage.retire(gone.stored)
            parts.backlog.release(gone.charge, task=task)
            storage.named.drop(progress_name(store.spec.name))
            with storage.lock:
                del storage.stores[store.spec.name]
            return
        forget(storage)
        parts.use.forget_dead(task)
        parts.holds.clear(task)
        del parts.tasks[task]
        parts.pool.detach(task)
        parts.stats.forget_task(task)

    # -- checkpoints -----------------------------------------------------------------------------

    def checkpoint(self, task: str) -> bytes:
        """Checkpoint the task and return the token to restore it with. On the operator's thread."""
        parts = self._parts
        parts.tasks[task].check()
        try:
            return run_through(
                self.checkpointing(task), parts.clock, timeout_ms=parts.config.scratch_timeout_ms
            )
        except OverloadError as error:
            parts.stats.overloaded(task, error.reason)
            raise

    def is_at(self, task: str, token: bytes | None) -> bool:
        """Whether the task's content equals that of the checkpoint, so that it can continue from there.

        None is the beginning. Reads nothing and takes some microseconds. On the operator's thread.
        """
        storage = self._parts.tasks.get(task)
        return token is None if storage is None else is_at(storage, token)

    def apply_checkpoint(self, task: str, token: bytes | None, *, retained: Sequence[bytes] = ()) -> None:
        """Restore the task to the checkpoint, or with None to the empty beginning.

        Only metadata is read; rows are read on demand. A task that already equals the checkpoint is not changed.
        `retained` are tokens of older checkpoints that must stay restorable: a new process knows no others, and deletes
        what only those need as soon as the restored content no longer needs it.
        """
        storage = self._task(task)
        if not retained and is_at(storage, token):
            self.supervisor.close_inline(storage)  # as a restore does: no earlier operation continues
            return
        started = self._parts.clock.monotonic_ms()
        was_running = self.supervisor.stop(storage)
        try:
            restore(storage, token, retained)
        finally:  # a refused token changes nothing: the task continues
            if was_running and storage.failure is None:
                self.supervisor.start(storage)
        self._parts.stats.count(task, restores=1, restore_seconds=self._parts.ms_since(started) / 1000)

    def release_checkpoint(self, task: str, token: bytes) -> None:
        """Release a checkpoint that will never be restored; what only it needed may be deleted."""
        decoded = Token.decode(token)
        decoded.check(self._parts.backend, task)
        storage = self._parts.tasks[task]
        self._parts.holds.release(task, decoded.number)
        if decoded.number in storage.retained:
            storage.retained.remove(decoded.number)

    def collect_garbage(
        self, task: str, retained: Sequence[bytes], *, grace_ms: int | None = None, dry_run: bool = False
    ) -> GarbageReport:
        """Remove the task's objects that neither it nor a retained token needs."""
        parts, storage = self._parts, self._parts.tasks.get(task)
        keep: set[str] = set()
        if storage is not None:
            # Live packs, held checkpoints, base manifests, packs pinned by readers, and packs queued for deletion.
            keep = {*parts.use.packs(task), *parts.holds.packs(task), *parts.pins.pinned(task)}
            keep |= {*storage.chain.names(), *parts.retirement.retired(task)}
        return collect_garbage(
            parts.backend,
            task,
            retained,
            grace_ms=parts.config.garbage_grace_ms if grace_ms is None else grace_ms,
            now_ms=parts.clock.now_ms(),
            dry_run=dry_run,
            keep=keep,
        )

    # -- maintenance -----------------------------------------------------------------------------

    def start(self, task: str) -> None:
        """Start the task's background maintenance; idempotent."""
        self.supervisor.start(self._task(task))

    def stop(self, task: str) -> None:
        """Stop the task's background maintenance and wait until none of it runs."""
        self.supervisor.stop(self._parts.tasks[task])

    def maintain(self, task: str, budget_ms: int) -> bool:
        """Run maintenance on this thread for about `budget_ms`; True when a whole pass is finished."""
        return self.supervisor.maintain(self._parts.tasks[task], budget_ms)

    def checkpointing(self, task: str) -> Operation[bytes]:
        """`checkpoint` as a generator."""
        storage = self._parts.tasks[task]
        operation = checkpoint(storage)
        try:
            while True:
                phase = next(operation)
                if phase == WAITING:  # may wait for a bucket of a pass that began meanwhile on this thread
                    self.supervisor.close_inline(storage)
                yield phase
        except StopIteration as ended:
            token: bytes = ended.value
            return token
        finally:
            operation.close()

    # -- looking at it ---------------------------------------------------------------------------

    def charge_of(self, task: str) -> int:
        """The backlog that the runs of all the task's stores hold."""
        storage = self._parts.tasks[task]
        waiting = sum(entry.charge for state in storage.restored.values() for entry in state.entries)
        return waiting + sum(store.state.index.total_charge for store in storage.attached())

    def leaks(self) -> Leaks:
        """Count the resources held now."""
        parts = self._parts
        return Leaks(
            leases=parts.pins.open_leases(),
            reader_permits=parts.scratch.in_use(Scratch.READER),
            maintenance_permits=parts.scratch.in_use(Scratch.MAINTENANCE),
            busy_buckets=parts.locks.held(),
        )

    def close(self) -> Leaks:
        """Stop all maintenance and close the backend, without flushing; returns the resources not released."""
        for storage in list(self._parts.tasks.values()):
            self.supervisor.stop(storage)
        if self._owns_scheduler:
            self._scheduler.close()
        leaks = self.leaks()
        self.stats.close()
        self._parts.pool.set_relief(None)
        self._parts.packs.close()
        self._parts.backend.close()
        return leaks

    def __enter__(self) -> WorkerStorageRuntime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------

    def _task(self, task: str) -> TaskStorage:
        """The task's storage, created on first use."""
        parts = self._parts
        found = parts.tasks.get(task)
        if found is not None:
            return found
        parts.pool.attach(task)
        storage = TaskStorage(
            parts, task, KeyLru(task), ManifestChain(parts.backend, task), NamedValues(task, parts.pool)
        )
        added = parts.tasks.setdefault(task, storage)
        if added is storage:
            parts.stats.watch_task(storage)
        return added

    def _store(self, task: str, state: BucketIndexState) -> AttachedStore:
        return self._parts.tasks[task].store_of(state)

    def _relieve(self, task: str, incoming_bytes: int) -> int:
        relief = relieve(self._parts.tasks[task], incoming_bytes=incoming_bytes)
        return self._through(relief, Relief()).freed_bytes

    def _reclaim(self, task: str) -> bool:
        """Merge the task's hot runs to free backlog; True when other threads may free more."""
        return self._through(reclaim(self._parts.tasks[task]), True)

    def _relieve_worker(self, shares: list[ReliefShare]) -> int:
        """Free memory across tasks by the pool's shares; returns the bytes freed."""
        freed = 0
        for task in dict.fromkeys(share.task for share in shares):
            storage = self._parts.tasks.get(task)
            if storage is None:
                continue
            floors = {
                share.tenant: max(0, self._parts.pool.used(task, share.tenant) - share.nbytes)
                for share in shares
                if share.task == task
            }
            freed += self._through(relieve(storage, floors), Relief()).freed_bytes
        return freed

    def _through(self, operation: Operation[Result], blocked: Result) -> Result:
        """Run the operation to its end; `blocked` when all slots stay taken."""
        try:
            return run_through(operation, self._parts.clock, timeout_ms=self._parts.config.scratch_timeout_ms)
        except OverloadError as error:
            if error.reason != "maintenance_blocked":
                raise
            return blocked
