"""What a window operator answers does not depend on where its stream was cut, restored or evicted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate.clock import ManualClock
from tidegate.storage import StorageConfig, WorkerStorageRuntime
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.aggregates.folds import resolve
from tidegate.windows.events import EventBatch
from tidegate.windows.kinds import Hopping, Tumbling, Unlimited
from tidegate.windows.operators.base import Moment, Output
from tidegate.windows.operators.late import LateSettings
from tidegate.windows.operators.windowed_operator import FutureGuard
from tidegate.windows.operators.windows import WindowOperator

VALUES = pa.schema([pa.field("ts", pa.float64()), pa.field("name", pa.string())])
AGGREGATES = resolve(
    {"count": agg.count(), "sum": agg.sum("ts"), "max": agg.max("ts"), "first": agg.first("name")}, VALUES
)
NOW = 10_000
KINDS = {
    "tumbling": Tumbling("10ms"),
    "tumbling with grace": Tumbling("10ms", grace="15ms"),
    "tumbling kept longer": Tumbling("10ms", grace="5ms", retention="200000ms"),
    "hopping": Hopping("12ms", "5ms", grace="3ms"),
    "hopping with long grace": Hopping("20ms", "4ms", grace="40ms"),
    "hopping, no grace": Hopping("30ms", "7ms"),
    "hopping over buckets": Hopping("90000ms", "30000ms", grace="20000ms"),
    "unlimited": Unlimited(5),
}


def events(rows: list[tuple[int, int, int]]) -> EventBatch:
    """Rows of (key or -1, time, partition); offsets count per stream."""
    count = len(rows)
    numbers = np.arange(count)
    return EventBatch(
        key=pa.array([None if key < 0 else b"key-%d" % key for key, _, _ in rows], pa.binary()),
        ts=np.array([ts for _, ts, _ in rows], np.int64),
        offset=numbers.astype(np.int64),
        partition=np.array([partition for _, _, partition in rows], np.int32),
        stream_time=np.full(count, -1, np.int64),
        values=pa.RecordBatch.from_arrays(
            [pa.array(1.0 / (1 + numbers)), pa.array([f"n{number}" for number in numbers])], schema=VALUES
        ),
    )


class Run:
    """One operator through one stream, with its output written down."""

    def __init__(self, kind: Any, emit: str, partitions: tuple[int, ...]) -> None:
        self.kind, self.emit, self.partitions = kind, emit, partitions
        self.backend = MemoryBackend()
        self.table: dict[tuple[bytes, int], Any] = {}
        self.closed: list[Any] = []
        self.late: list[Any] = []
        self.open(None)

    def open(self, token: bytes | None) -> None:
        self.runtime = WorkerStorageRuntime.open(
            StorageConfig.for_tests(), self.backend, clock=ManualClock(0)
        )
        if token is not None:
            self.runtime.apply_checkpoint("task", token)
        self.operator = WindowOperator(
            self.runtime,
            "task",
            "windows",
            self.kind,
            AGGREGATES,
            emit=self.emit,
            partitions=self.partitions,
            values=VALUES,
            late=LateSettings("1d", max_bytes=4000),
            future=FutureGuard(ahead="200000ms", policy="late"),
        )

    def restart(self) -> None:
        token = self.runtime.checkpoint("task")
        self.runtime.detach("task")
        self.open(token)

    def evict(self) -> None:
        for state in self.operator.states:
            buckets = state.index.hot_buckets()
            for _ in self.runtime.dumping("task", state, buckets, evict=True):
                pass

    def maintain(self) -> None:
        while not self.runtime.maintain("task", 1000):
            pass

    def note(self, output: Output) -> None:
        rows = output.rows.to_batch().to_pylist()
        self.closed += rows
        self.table.update({(row["key"], row["window_start"]): row for row in rows})
        if output.late is not None:
            late = output.late
            self.late += list(
                zip(
                    late.events.key.to_pylist(),
                    late.events.offset.tolist(),
                    late.window_start.tolist(),
                    late.how_late_ms.tolist(),
                    late.reason.to_pylist(),
                    strict=True,
                )
            )

    def result(self) -> dict[str, Any]:
        counters = self.operator.counters
        if self.emit == "update":
            counters.pop("emitted", None)
        return {
            "table": self.table,
            "kept": self.operator.windows().to_batch().to_pylist(),
            "closed": self.closed if self.emit == "close" else None,
            "late": self.late,
            "late table": self.operator.late_table.read().to_pylist() if self.operator.late_table else None,
            "counters": counters,
        }


def run(
    kind: Any, emit: str, partitions: tuple[int, ...], stream: EventBatch, cuts: list[tuple[int, str]]
) -> Any:
    worker, start = Run(kind, emit, partitions), 0
    for at, then in [*sorted(cuts), (len(stream), "nothing")]:
        worker.note(worker.operator.process(stream.slice(start, max(start, at)), Moment(NOW)))
        start = max(start, at)
        if then != "nothing":
            getattr(worker, then)()
    worker.note(worker.operator.tick(Moment(NOW)))
    result = worker.result()
    worker.note(worker.operator.tick(Moment(NOW, closing=True)))
    result["at the end"] = worker.closed if emit == "close" else None
    return result


TIMES = st.one_of(
    st.integers(0, 60), st.integers(-2, 300), st.integers(0, 150_000), st.just(10**9), st.integers(0, 20)
)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], list[tuple[int, str]]]:
    rows = draw(st.lists(st.tuples(st.integers(-1, 4), TIMES, st.integers(0, 1)), min_size=1, max_size=40))
    if draw(st.booleans()):  # a stream that runs forward, with disorder
        base = np.cumsum(draw(st.lists(st.integers(0, 8), min_size=len(rows), max_size=len(rows))))
        rows = [(key, int(at) - ts % 25, part) for (key, ts, part), at in zip(rows, base, strict=True)]
    if draw(st.booleans()):
        rows = [(key, ts, 0) for key, ts, _ in rows]
    actions = st.sampled_from(["nothing", "nothing", "restart", "evict", "maintain"])
    cuts = draw(st.lists(st.tuples(st.integers(0, len(rows)), actions), max_size=8))
    return rows, cuts


@pytest.mark.parametrize("emit", ["update", "close"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=streams())
def test_any_cut_gives_the_same_table_the_same_closed_windows_and_the_same_late_rows(
    kind: Any, emit: str, drawn: tuple[list[tuple[int, int, int]], list[tuple[int, str]]]
) -> None:
    if emit == "close" and isinstance(kind, Unlimited):
        return
    rows, cuts = drawn
    partitions = (0,) if all(partition == 0 for _, _, partition in rows) else (0, 1)
    stream = events(rows)
    whole = run(kind, emit, partitions, stream, [])
    assert run(kind, emit, partitions, stream, cuts) == whole
    one_by_one = [(at, "nothing") for at in range(1, len(rows))]
    assert run(kind, emit, partitions, stream, one_by_one) == whole
