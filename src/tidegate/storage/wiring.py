"""How the parts of a worker's storage are made from one config and joined; and how to see what is still held.

Nothing is decided here: this is the list of parts, in the order in which one needs another.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from tidegate.clock import Clock
from tidegate.metrics import Metrics
from tidegate.randomness import Randomness
from tidegate.storage.backends.port import StorageBackend
from tidegate.storage.config import StorageConfig
from tidegate.storage.memory.backlog import BacklogBudget
from tidegate.storage.memory.caches import BaseRuns, WriteBuffer
from tidegate.storage.memory.pool import WorkerMemoryPool
from tidegate.storage.memory.scratch import Scratch, ScratchLimiter
from tidegate.storage.packs.open_packs import PackCache
from tidegate.storage.parts import StorageParts
from tidegate.storage.reading.reader import StorageReader
from tidegate.storage.state.handle import StateCaches
from tidegate.storage.state.shelf import StateShelf
from tidegate.storage.stats import StorageStats
from tidegate.storage.tasks import Tasks
from tidegate.storage.upkeep.operations import BucketLocks
from tidegate.storage.upkeep.pack_use import PackUse
from tidegate.storage.upkeep.pins import BatchPins
from tidegate.storage.upkeep.retirement import BatchRetirementQueue, CheckpointHolds


class Wired(NamedTuple):
    """What the runtime starts from. The shelf still wants to be told its writer."""

    parts: StorageParts
    reader: StorageReader
    shelf: StateShelf


class Leaks(NamedTuple):
    """What somebody holds; all zero when everybody gave back what he took."""

    leases: int
    reader_permits: int
    maintenance_permits: int
    busy_buckets: int
    held_keys: int


def wire(
    config: StorageConfig, backend: StorageBackend, clock: Clock, randomness: Randomness, metrics: Metrics
) -> Wired:
    """Every part of one worker's storage."""
    tasks, pins, holds, stats = Tasks(), BatchPins(), CheckpointHolds(), StorageStats(metrics)
    pool = WorkerMemoryPool(config, clock)
    packs = PackCache(
        backend,
        max_open=config.max_open_packs,
        reads_at_once=config.load_io_parallelism if backend.is_remote else 1,
    )
    scratch = ScratchLimiter(
        clock,
        reader_slots=config.max_inflight_loads,
        maintenance_slots=config.max_inflight_maintenance,
        timeout_ms=config.scratch_timeout_ms,
        working_bytes=config.working_bytes,
    )

    def loaded(task: str, runs: int, nbytes: int, store: str, buckets: Collection[int]) -> None:
        stats.loaded(task, runs, nbytes)
        if buckets:
            tasks.get(task).note_cold(store, buckets)

    reader = StorageReader(
        packs, pins, scratch, lambda task: tasks.get(task).key_lru, stats.overloaded, loaded
    )
    shelf = StateShelf(tasks, reader, config.max_run_rows)
    parts = StorageParts(
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
        retirement=BatchRetirementQueue(
            backend,
            pins,
            holds,
            clock,
            backoff_ms=config.delete_backoff_ms,
            backoff_max_ms=config.delete_backoff_max_ms,
            deletes_at_once=config.delete_parallelism if backend.is_remote else 1,
            deletes=config.deletes,
        ),
        packs=packs,
        states=StateCaches(
            shelf,
            pool,
            clock,
            key_lru=lambda task: tasks.get(task).key_lru,
            timeout_ms=config.load_timeout_ms,
            overloaded=stats.overloaded,
        ),
        stats=stats,
        locks=BucketLocks(),
        tasks=tasks,
    )
    stats.watch_memory(pool, parts.backlog, scratch, parts.write_buffer, parts.base_runs)
    return Wired(parts, reader, shelf)


def leaks_of(parts: StorageParts) -> Leaks:
    """What is held now."""
    return Leaks(
        leases=parts.pins.open_leases(),
        reader_permits=parts.scratch.in_use(Scratch.READER),
        maintenance_permits=parts.scratch.in_use(Scratch.MAINTENANCE),
        busy_buckets=parts.locks.held(),
        held_keys=sum(storage.key_lru.held for storage in parts.tasks.all()),
    )
