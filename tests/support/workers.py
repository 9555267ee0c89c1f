"""A small worker for tests: a storage runtime on a manual clock, with stores that are quick to fill and to read.

`Worker` wires the real runtime over a memory backend (or the one given); `rows_of` reads a store back as plain
tuples, so that a test can compare with a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from tidegate.clock import Clock, ManualClock
from tidegate.metrics import Metrics
from tidegate.randomness import SeededRandomness
from tidegate.scheduling import ManualScheduler
from tidegate.storage.backends.base import StorageBackend
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import AppendBatch, BucketIndex, PlainState, Tenant
from tidegate.storage.maintenance.operations import Operation, Result
from tidegate.storage.metrics import PREFIX
from tidegate.storage.reader import RangeRequest
from tidegate.storage.runs.aggregates import Count, Sum
from tidegate.storage.runtime import WorkerStorageRuntime
from tidegate.storage.spec import Merge, StoreSpec
from tidegate.storage.state import StateHandle

BUCKET_MS = 1000
TASK = "app/orders/0"

Row = tuple[Any, ...]


def store(merge: Merge = Merge.APPEND, name: str = "events", **shape: Any) -> PlainState:
    """An empty store with a column `value`, or one that counts and sums it."""
    shape = {"bucket_ms": BUCKET_MS, **shape}
    if merge is Merge.FOLD:
        spec = StoreSpec(name, merge, aggregates=(Count("count"), Sum("sum", "value", pa.int64())), **shape)
    else:
        spec = StoreSpec(name, merge, payload=pa.schema([pa.field("value", pa.int64())]), **shape)
    return PlainState(BucketIndex(spec))


def rows_batch(merge: Merge, rows: Sequence[Row]) -> pa.RecordBatch:
    """(key, ts, value) for `append` and `fold`; (key, ts, value or None for a tombstone) for `last`."""
    columns = {
        "key": pa.array([row[0] for row in rows], pa.binary()),
        "ts": pa.array([row[1] for row in rows], pa.int64()),
    }
    if merge is not Merge.APPEND:
        columns["seq"] = pa.array([0] * len(rows), pa.int64())
    if merge is Merge.LAST:
        columns["deleted"] = pa.array([row[2] is None for row in rows], pa.bool_())
    columns["value"] = pa.array([row[2] for row in rows], pa.int64())
    return pa.RecordBatch.from_pydict(columns)


def resident(handle: StateHandle[Any], key: bytes) -> Any:
    """A state value if it is in memory; loads nothing."""
    entry = handle._entries.get(key)
    return None if entry is None else entry.value


def readings(metrics: Metrics) -> dict[str, dict[tuple[str, ...], float]]:
    """The numbers of storage by instrument, without prefix and `_total`, and label values."""
    return {
        each.name.removeprefix(PREFIX).removesuffix("_total"): {
            tuple(sample.labels.values()): sample.value for sample in samples
        }
        for each, samples in metrics.collect()
    }


class Worker:
    """A runtime and what it was given."""

    def __init__(
        self,
        config: StorageConfig | None = None,
        *,
        backend: StorageBackend | None = None,
        clock: Clock | None = None,
        scheduler: Any = None,
        metrics: Metrics | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        self.clock: Any = clock or ManualClock()
        self.scheduler: Any = scheduler or ManualScheduler(self.clock)
        self.backend: Any = backend or MemoryBackend(randomness=SeededRandomness(seed + 1))
        self.metrics = metrics or Metrics()
        self.runtime = WorkerStorageRuntime.open(
            config or StorageConfig.for_tests(**settings),
            self.backend,
            clock=self.clock,
            scheduler=self.scheduler,
            randomness=SeededRandomness(seed),
            metrics=self.metrics,
        )
        self.parts = self.runtime._parts

    def attach(self, state: PlainState, task: str = TASK) -> PlainState:
        self.runtime.attach(task, state)
        return state

    def append(self, state: PlainState, rows: Sequence[Row], task: str = TASK) -> list[AppendBatch]:
        """Append and insert."""
        batch = rows_batch(state.index.spec.merge, rows)
        parts = self.runtime.writer().append(task, state, batch)
        state.index.insert(parts)
        return parts

    def run(self, operation: Operation[Result]) -> Result:
        """An operation to its end."""
        while True:
            try:
                next(operation)
            except StopIteration as ended:
                result: Result = ended.value
                return result

    def rows(self, state: PlainState, task: str = TASK, keys: Iterable[bytes] | None = None) -> list[Row]:
        """What the store holds, as (key, ts, payload…), sorted; each row once as the reader sees it."""
        reader = self.runtime.reader()
        names = state.index.spec.payload.names
        if keys is None:
            with reader.scan(task, state) as scan:
                table = _table(scan, names)
        else:
            plan = reader.plan(task, state, [RangeRequest(list(keys))])
            with reader.load(plan) as loaded:
                table = loaded.to_table()
        columns = [table.column(name).to_pylist() for name in ("key", "ts", *names)]
        return sorted(zip(*columns, strict=True))

    def counter(self, name: str, task: str = TASK) -> float:
        """A counter of the task."""
        return readings(self.metrics)[name].get((task,), 0.0)

    def used(self, tenant: str, task: str = TASK) -> int:
        return self.parts.pool.used(task, Tenant(tenant))

    def hot_bytes(self, task: str = TASK) -> int:
        """What the task's hot copies weigh, summed from the indexes."""
        indexes = [each.state.index for each in self.parts.tasks.get(task).attached()]
        found = [index.snapshot(start) for index in indexes for start in index.hot_buckets()]
        runs = [run.hot.run for bucket in found if bucket for run in bucket.runs if run.hot is not None]
        return sum(run.nbytes for run in runs)

    def objects(self, part: str = "") -> list[str]:
        """Names of the objects on the backend."""
        return sorted(each.name for each in self.backend.list("") if part in each.name)


def _table(scan: Any, names: Sequence[str]) -> pa.Table:
    batches = list(scan)
    if not batches:
        return pa.table({name: pa.nulls(0) for name in ("key", "ts", *names)})
    return pa.Table.from_batches(batches)
