"""The metrics of storage: every gauge and counter of a worker, by name.

Components report each operation once, through the methods of `StorageStats`. Gauges are read from their owners on
demand: `refresh` calls each watched owner, and `snapshot` refreshes first.

Safe from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from tidegate.metrics import Instrument, Metrics
from tidegate.storage.maintenance.retirement import BatchPins, BatchRetirementQueue, PackUse
from tidegate.storage.memory.backlog import BacklogBudget
from tidegate.storage.memory.pool import HotRuns, WorkerMemoryPool
from tidegate.storage.memory.scratch import Scratch, ScratchLimiter
from tidegate.storage.state_cache import StateCache

PREFIX = "tidegate_storage_"

Readings: TypeAlias = "Mapping[str, Mapping[tuple[str, ...], float]]"
"""Numbers by instrument (without prefix) and label values, in the order of the instrument's labels."""

_OF_TASK = {
    "appended_rows": "rows accepted",
    "appended_bytes": "bytes accepted",
    "pruned_rows": "rows pruned",
    "pruned_bytes": "bytes pruned",
    "loads": "times a reader needed runs that were not in memory",
    "loaded_runs": "runs that readers took from packs",
    "loaded_bytes": "bytes of those runs",
    "pressure_runs": "times memory was relieved",
    "pressure_needed_bytes": "memory that relief was to take back",
    "pressure_freed_bytes": "memory that relief took back",
    "pressure_short": "times relief did not reach its target",
    "evicted_keys": "keys taken out of memory",
    "evicted_bytes": "memory of the keys taken out",
    "eviction_retries": "keys whose eviction must be tried again",
    "dump_calls": "packs written",
    "dump_runs": "runs written",
    "dump_bytes": "bytes of the runs written",
    "dump_seconds": "time spent writing packs",
    "compact_published": "compactions published",
    "compact_runs": "runs that went into compactions",
    "compact_bytes": "bytes that went into compactions",
    "compact_seconds": "time spent compacting",
    "rehydrate_published": "rehydrations published",
    "rehydrate_runs": "runs brought back into memory",
    "rehydrate_bytes": "bytes brought back into memory",
    "rehydrate_seconds": "time spent rehydrating",
    "repack_runs": "runs moved out of packs that were mostly dead",
    "repack_bytes": "bytes of the runs moved",
    "deleted_packs": "packs deleted",
    "failed_deletes": "deletes that failed and are tried again",
    "checkpoints": "checkpoints completed",
    "checkpoint_packs": "packs written by checkpoints",
    "checkpoint_bytes": "bytes written by checkpoints",
    "checkpoint_seconds": "time spent in checkpoints",
    "restores": "restores completed",
    "restore_seconds": "time spent restoring",
    "maintenance_retries": "turns of background maintenance that found the backend out of reach",
    "maintenance_failures": "errors that stopped a task's maintenance",
}
_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "lost": ("publishes that lost the race to another change", ("task", "operation")),
    "overloads": ("waits that ended in an error", ("task", "reason")),
}
_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "hot_runs": ("runs with a hot copy", ("task", "tenant")),
    "hot_bytes": ("pool memory in use", ("task", "tenant")),
    "pool_bytes": ("pool memory in use by all tasks", ()),
    "pool_limit_bytes": ("the worker total", ()),
    "backlog_bytes": ("bytes accepted and not pruned, of all tasks", ()),
    "backlog_limit_bytes": ("the backlog limit", ()),
    "waiting": ("threads that wait for room now", ("what",)),
    "waited": ("waits for room so far", ("what",)),
    "scratch_in_use": ("scratch slots taken", ("kind",)),
    "open_leases": ("leases on packs not closed yet", ("task",)),
    "reclaimable_bytes": ("bytes in packs that no live metadata names", ("task",)),
    "retired_packs": ("packs waiting to be deleted, and for what", ("task", "why")),
    "state_values": ("resident state values", ("task", "namespace")),
    "state_dirty": ("state changes not saved yet", ("task", "namespace")),
    "state_loads": ("state values read from the shelf so far", ("task", "namespace")),
    "state_flushed": ("state values written to the shelf so far", ("task", "namespace")),
}


class StorageStats:
    """The metrics of one worker's storage."""

    def __init__(self, metrics: Metrics) -> None:
        self._watched: list[Callable[[], None]] = []
        self._tasks: dict[str, Callable[[], None]] = {}
        self._all: dict[str, Instrument] = {}
        for name, summary in _OF_TASK.items():
            self._all[name] = metrics.counter(f"{PREFIX}{name}_total", summary, ("task",))
        for name, (summary, labels) in _COUNTERS.items():
            self._all[name] = metrics.counter(f"{PREFIX}{name}_total", summary, labels)
        for name, (summary, labels) in _GAUGES.items():
            self._all[name] = metrics.gauge(f"{PREFIX}{name}", summary, labels)

    # what happened

    def appended(self, task: str, *, rows: int, nbytes: int) -> None:
        self._count(task, appended_rows=rows, appended_bytes=nbytes)

    def pruned(self, task: str, *, rows: int, nbytes: int) -> None:
        self._count(task, pruned_rows=rows, pruned_bytes=nbytes)

    def loaded(self, task: str, runs: int, nbytes: int) -> None:
        """Count runs that a reader loaded from the backend."""
        self._count(task, loads=1, loaded_runs=runs, loaded_bytes=nbytes)

    def dumped(self, task: str, *, runs: int, nbytes: int, ms: int, packs: int = 1) -> None:
        """Count written packs."""
        self._count(task, dump_calls=packs, dump_runs=runs, dump_bytes=nbytes, dump_seconds=ms / 1000)

    def compacted(self, task: str, *, runs: int, nbytes: int, ms: int = 0) -> None:
        self._count(
            task, compact_published=1, compact_runs=runs, compact_bytes=nbytes, compact_seconds=ms / 1000
        )

    def rehydrated(self, task: str, *, runs: int, nbytes: int, ms: int = 0) -> None:
        self._count(
            task,
            rehydrate_published=1,
            rehydrate_runs=runs,
            rehydrate_bytes=nbytes,
            rehydrate_seconds=ms / 1000,
        )

    def repacked(self, task: str, *, runs: int, nbytes: int) -> None:
        self._count(task, repack_runs=runs, repack_bytes=nbytes)

    def evicted(self, task: str, *, keys: int, nbytes: int, retried: int = 0) -> None:
        self._count(task, evicted_keys=keys, evicted_bytes=nbytes, eviction_retries=retried)

    def relieved(self, task: str, *, need: int, freed: int, short: int | None = None) -> None:
        """Memory was relieved; `short` is what is still above the target, at least what was not freed."""
        missed = max(0, need - freed) if short is None else short
        self._count(
            task,
            pressure_runs=1,
            pressure_needed_bytes=need,
            pressure_freed_bytes=freed,
            pressure_short=int(missed > 0),
        )

    def lost(self, task: str, operation: str) -> None:
        """Count a publish that lost its compare-and-swap, so that its work was discarded."""
        self._all["lost"].add(1, task=task, operation=operation)

    def deleted(self, task: str, *, packs: int, failed: int) -> None:
        self._count(task, deleted_packs=packs, failed_deletes=failed)

    def checkpointed(self, task: str, *, packs: int, ms: int, nbytes: int = 0) -> None:
        self._count(
            task, checkpoints=1, checkpoint_packs=packs, checkpoint_bytes=nbytes, checkpoint_seconds=ms / 1000
        )

    def restored(self, task: str, *, ms: int = 0) -> None:
        self._count(task, restores=1, restore_seconds=ms / 1000)

    def overloaded(self, task: str, reason: str | None) -> None:
        """Count a wait that ended in an error."""
        self._all["overloads"].add(1, task=task, reason=reason or "other")

    def failed(self, task: str) -> None:
        """Count an error that stopped the task's maintenance."""
        self._count(task, maintenance_failures=1)

    def retried(self, task: str) -> None:
        """Count an unreachable backend; background maintenance tries again at its next turn."""
        self._count(task, maintenance_retries=1)

    # what is

    def watch(self, look: Callable[[], None]) -> None:
        """Call `look` at each refresh; it sets gauges (`set`)."""
        self._watched.append(look)

    def set(self, name: str, value: float, **labels: object) -> None:
        """Set one gauge."""
        self._all[name].set(value, **labels)

    def refresh(self) -> None:
        """Update the gauges."""
        for look in (*self._watched, *list(self._tasks.values())):
            look()

    def snapshot(self) -> Readings:
        """Refresh and return all present values."""
        self.refresh()
        return {
            name: {tuple(sample.labels.values()): sample.value for sample in instrument.samples()}
            for name, instrument in self._all.items()
        }

    def watch_memory(
        self, pool: WorkerMemoryPool, backlog: BacklogBudget, scratch: ScratchLimiter, *caches: HotRuns
    ) -> None:
        """Read the gauges of memory, backlog and scratch from these."""

        def look() -> None:
            self.set("pool_bytes", pool.total)
            self.set("pool_limit_bytes", pool.limit)
            self.set("backlog_bytes", backlog.used)
            self.set("backlog_limit_bytes", backlog.limit)
            for what, waiting, waited in (
                ("memory", pool.waiting, pool.waits),
                ("backlog", backlog.waiting, backlog.waits),
            ):
                self.set("waiting", waiting, what=what)
                self.set("waited", waited, what=what)
            for kind in Scratch:
                self.set("scratch_in_use", scratch.in_use(kind), kind=kind)
                self.set("waiting", scratch.waiting(kind), what=f"{kind} scratch")
            for task, tenants in pool.ledger().items():
                for tenant, nbytes in tenants.items():
                    self.set("hot_bytes", nbytes, task=task, tenant=tenant)
                for cache in caches:
                    self.set("hot_runs", cache.count(task), task=task, tenant=cache.tenant)

        self.watch(look)

    def watch_task(
        self,
        task: str,
        pins: BatchPins,
        retirement: BatchRetirementQueue,
        use: PackUse,
        states: Callable[[], Iterable[StateCache[Any]]],
    ) -> None:
        """Read the gauges of one task from these, until `forget_task`."""

        def look() -> None:
            self.set("open_leases", pins.open_leases(task), task=task)
            self.set("reclaimable_bytes", use.reclaimable(task), task=task)
            for why, packs in retirement.waiting(task)._asdict().items():
                self.set("retired_packs", packs, task=task, why=why)
            for cache in states():
                place = {"task": task, "namespace": cache.namespace}
                self.set("state_values", len(cache), **place)
                self.set("state_dirty", cache.dirty, **place)
                self.set("state_loads", cache.loads, **place)
                self.set("state_flushed", cache.flushed, **place)

        self._tasks[task] = look

    def forget_task(self, task: str) -> None:
        """Remove the gauges of a task that left the worker; its counters stay."""
        self._tasks.pop(task, None)
        for name, (_, labels) in _GAUGES.items():
            if "task" in labels:
                self._all[name].forget(task=task)

    def _count(self, task: str, **amounts: float) -> None:
        for name, amount in amounts.items():
            self._all[name].add(amount, task=task)
