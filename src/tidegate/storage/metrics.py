"""The metrics of storage: every gauge and counter of a worker, by name.

Components count each operation once, with the methods of `StorageStats`. Gauges are read from their owners when the
metrics are asked for, and have no numbers once the runtime is closed.

Safe from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tidegate.metrics import Instrument, Metrics
from tidegate.storage.scratch import Scratch

if TYPE_CHECKING:
    from tidegate.storage.parts import StorageParts, TaskStorage

PREFIX = "tidegate_storage_"

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
}


class StorageStats:
    """The metrics of one worker's storage."""

    def __init__(self, metrics: Metrics) -> None:
        self._looks: dict[str, Callable[[], None]] = {}  # by task, and "" for the worker's own
        self._all: dict[str, Instrument] = {}
        for name, summary in _OF_TASK.items():
            self._all[name] = metrics.counter(f"{PREFIX}{name}_total", summary, ("task",))
        for name, (summary, labels) in _COUNTERS.items():
            self._all[name] = metrics.counter(f"{PREFIX}{name}_total", summary, labels)
        for name, (summary, labels) in _GAUGES.items():
            self._all[name] = metrics.gauge(f"{PREFIX}{name}", summary, labels)
        self._metrics = metrics
        metrics.read_when_asked(self._read, [self._all[name] for name in _GAUGES])

    def close(self) -> None:
        """Remove the gauges, whose owners are gone; counters stay."""
        self._metrics.stop_reading(self._read)

    def count(self, task: str, **amounts: float) -> None:
        """Add to counters of a task (`_OF_TASK`)."""
        for name, amount in amounts.items():
            self._all[name].add(amount, task=task)

    def lost(self, task: str, operation: str) -> None:
        """Count a publish that lost its compare-and-swap, so that its work was discarded."""
        self._all["lost"].add(1, task=task, operation=operation)

    def overloaded(self, task: str, reason: str | None) -> None:
        """Count a wait that ended in an error."""
        self._all["overloads"].add(1, task=task, reason=reason or "other")

    def watch_memory(self, parts: StorageParts) -> None:
        """Read the gauges of memory, backlog and scratch from these."""
        pool, backlog, scratch = parts.pool, parts.backlog, parts.scratch

        def look() -> None:
            self._add("pool_bytes", pool.total)
            self._add("pool_limit_bytes", pool.limit)
            self._add("backlog_bytes", backlog.used)
            self._add("backlog_limit_bytes", backlog.limit)
            for what, waiting, waited in (
                ("memory", pool.waiting, pool.waits),
                ("backlog", backlog.waiting, backlog.waits),
            ):
                self._add("waiting", waiting, what=what)
                self._add("waited", waited, what=what)
            for kind in Scratch:
                self._add("scratch_in_use", scratch.in_use(kind), kind=kind)
                self._add("waiting", scratch.waiting(kind), what=f"{kind} scratch")
            for task, tenants in pool.ledger().items():
                for tenant, nbytes in tenants.items():
                    self._add("hot_bytes", nbytes, task=task, tenant=tenant)
                for cache in (parts.write_buffer, parts.base_runs):
                    self._add("hot_runs", cache.count(task), task=task, tenant=cache.tenant)

        self._looks[""] = look

    def watch_task(self, storage: TaskStorage) -> None:
        """Read the gauges of one task from these, until `forget_task`."""
        task, parts = storage.task, storage.parts

        def look() -> None:
            self._add("open_leases", parts.pins.open_leases(task), task=task)
            self._add("reclaimable_bytes", parts.use.reclaimable(task), task=task)
            for why, packs in parts.retirement.waiting(task).items():
                self._add("retired_packs", packs, task=task, why=why)

        self._looks[task] = look

    def forget_task(self, task: str) -> None:
        """Read the gauges of a task no longer, which left the worker; its counters stay."""
        self._looks.pop(task, None)

    def _read(self) -> None:
        for look in list(self._looks.values()):
            look()

    def _add(self, name: str, value: float, **labels: object) -> None:
        self._all[name].add(value, **labels)
