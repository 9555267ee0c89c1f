"""Tumbling, hopping and unlimited windows: the rules of Kafka Streams, record by record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tidegate.errors import InvalidError
from tidegate.storage import StorageConfig, WorkerStorageRuntime
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.aggregates.folds import resolve
from tidegate.windows.events import EventBatch
from tidegate.windows.keys import SessionWindow, TimeWindow
from tidegate.windows.kinds import LATEST, Hopping, Session, Tumbling, Unlimited
from tidegate.windows.operators.base import Moment, Output
from tidegate.windows.operators.windows import WindowOperator
from tidegate.windows.stores.window_store import WindowStore
from window_oracles import ms

COUNTED = resolve({"n": agg.count()}, pa.schema([]))


def make(kind: Any, emit: str = "update", **options: Any) -> WindowOperator:
    runtime = WorkerStorageRuntime.open(StorageConfig.for_tests(), MemoryBackend())
    return WindowOperator(runtime, "task", "windows", kind, COUNTED, emit=emit, **options)


def events(times: list[int], keys: list[bytes | None] | None = None, *, first_offset: int = 0) -> EventBatch:
    count = len(times)
    return EventBatch(
        key=pa.array(keys or [b"k"] * count, pa.binary()),
        ts=np.array(times, np.int64),
        offset=np.arange(first_offset, first_offset + count),
        partition=np.zeros(count, np.int32),
        stream_time=np.full(count, -1, np.int64),
        values=pa.record_batch({"x": pa.array(np.ones(count))}),
    )


def shown(output: Output) -> list[tuple[int, int, int, int]]:
    """(start, end, count, timestamp) of every row."""
    return [
        (row["window_start"], row["window_end"], row["values"]["n"], row["ts"])
        for row in output.rows.to_batch().to_pylist()  # type: ignore[union-attr]
    ]


def one_by_one(operator: WindowOperator, times: list[int]) -> list[list[tuple[int, int, int, int]]]:
    return [
        shown(operator.process(events([time], first_offset=at), Moment(0))) for at, time in enumerate(times)
    ]


@pytest.mark.parametrize(
    ("kind", "ts", "starts"),
    [
        pytest.param(Hopping("12ms", "5ms"), 21, [10, 15, 20], id="WIN-7.6-01 hopping by 5"),
        pytest.param(Hopping("6ms", "5ms"), 7, [5], id="WIN-7.6-01 hopping with one window"),
        pytest.param(Tumbling("12ms"), 21, [12], id="WIN-7.6-01 tumbling"),
        pytest.param(Hopping("10ms", "5ms"), 3, [0], id="no window starts before the epoch"),
        pytest.param(Hopping("10ms", "5ms"), -1, [], id="a time before the epoch has no window"),
    ],
)
def test_windows_of_a_record(kind: Hopping, ts: int, starts: list[int]) -> None:
    assert list(kind.starts(ts)) == starts
    operator = make(kind)
    found = shown(operator.process(events([ts]), Moment(0)))
    assert [(start, end) for start, end, _, _ in found] == [(start, start + kind.size_ms) for start in starts]


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda: Tumbling(0), id="WIN-7.6-02 size 0"),
        pytest.param(lambda: Tumbling(ms(-1)), id="WIN-7.6-02 size -1"),
        pytest.param(lambda: Hopping("10ms", 0), id="WIN-7.6-02 advance 0"),
        pytest.param(lambda: Hopping("10ms", ms(-1)), id="WIN-7.6-02 advance -1"),
        pytest.param(lambda: Hopping("10ms", "11ms"), id="WIN-7.6-02 advance above size"),
        pytest.param(lambda: Tumbling("10ms", grace=ms(-1)), id="WIN-7.6-02 grace -1"),
        pytest.param(lambda: Session(0), id="WIN-7.6-02 gap 0"),
        pytest.param(
            lambda: Tumbling("10ms", grace="5ms", retention="14ms"), id="retention below size and grace"
        ),
        pytest.param(lambda: Unlimited(-1), id="an unlimited window before the epoch"),
        pytest.param(lambda: make(Unlimited(0), "close"), id="an unlimited window on close"),
        pytest.param(lambda: make(Tumbling("10ms"), compat="flink"), id="an unknown compat"),
    ],
)
def test_windows_that_cannot_be(wrong: Any) -> None:
    with pytest.raises(InvalidError):
        wrong()


def test_time_windows_overlap_inside_their_bounds_sessions_at_them() -> None:
    """WIN-7.6-03."""
    window = TimeWindow(50, 100)
    assert not window.overlaps(TimeWindow(0, 50))
    assert not window.overlaps(TimeWindow(100, 150))
    session = SessionWindow(50, 100)
    assert session.overlaps(SessionWindow(0, 50))
    assert session.overlaps(SessionWindow(100, 150))
    assert not session.overlaps(SessionWindow(101, 150))


@pytest.mark.parametrize("cut", [1, 3, 10], ids="in batches of {}".format)
def test_a_record_counts_only_for_windows_that_were_open_when_it_came(cut: int) -> None:
    """WIN-7.6-04: size 10, advance 5, grace 90."""
    times = [100, 0, 1, 2, 3, 4, 5, 6, 105, 106]
    for emit in ("update", "close"):
        operator, rows = make(Hopping("10ms", "5ms", grace="90ms"), emit), []
        for at in range(0, len(times), cut):
            rows += shown(operator.process(events(times[at : at + cut], first_offset=at), Moment(0)))
        assert operator.counters["late_windows"] == 7
        assert (5, 15, 2, 6) in rows
        assert not [row for row in rows if row[0] == 0]
        if emit == "close":
            assert rows == [(5, 15, 2, 6)]


def test_windows_close_with_the_clock_less_grace() -> None:
    """WIN-7.6-05: size 10, grace 90: [100, 110) closes at 200."""
    operator = make(Tumbling("10ms", grace="90ms"))
    found = one_by_one(operator, [200, 100, 101, 102, 103, 104, 105, 6])
    assert found[0] == [(200, 210, 1, 200)]
    assert not any(found[1:])
    assert operator.counters["late_records"] == operator.counters["late_windows"] == 7


def test_counts_on_update_and_on_close() -> None:
    """WIN-7.6-06: size 2, grace 1."""
    times = [0, 1, 2, 1, 0, 5, 0]
    assert one_by_one(make(Tumbling("2ms", grace="1ms")), times) == [
        [(0, 2, 1, 0)], [(0, 2, 2, 1)], [(2, 4, 1, 2)], [(0, 2, 3, 1)], [(0, 2, 4, 1)], [(4, 6, 1, 5)], [],
    ]  # fmt: skip
    closed = one_by_one(make(Tumbling("2ms", grace="1ms"), "close"), times)
    assert closed == [[], [], [], [], [], [(0, 2, 4, 1), (2, 4, 1, 2)], []]


def test_a_leap_in_time_loses_no_closed_window() -> None:
    """Kafka Streams loses windows here that retention no longer lets it read."""
    operator = make(Tumbling("10ms"), "close")
    assert one_by_one(operator, [10, 25, 10**9]) == [[], [(10, 20, 1, 10)], [(20, 30, 1, 25)]]
    assert operator.states[0].index.bucket_count == 1


def test_windows_come_in_order_of_end_and_key_each_once() -> None:
    operator = make(Hopping("20ms", "10ms", grace="5ms"), "close")
    keys = [b"b", b"a", b"c", b"a", b"b"]
    rows = operator.process(events([1, 12, 3, 15, 31], keys), Moment(0)).rows.to_batch().to_pylist()  # type: ignore[union-attr]
    rows += operator.tick(Moment(0)).rows.to_batch().to_pylist()  # type: ignore[union-attr]
    rows += operator.process(events([1, 100], [b"a", b"z"]), Moment(0)).rows.to_batch().to_pylist()  # type: ignore[union-attr]
    found = [(row["window_end"], row["key"], row["values"]["n"]) for row in rows]
    assert found == [
        (20, b"a", 2), (20, b"b", 1), (20, b"c", 1), (30, b"a", 2), (40, b"b", 1), (50, b"b", 1),
    ]  # fmt: skip


def test_records_without_a_key_or_from_before_the_epoch_move_no_clock_and_are_counted() -> None:
    operator = make(Tumbling("10ms"))
    output = operator.process(events([5, 10**6, -7, 6], [b"k", None, b"k", b"k"]), Moment(0))
    assert shown(output) == [(0, 10, 2, 6)]
    assert output.counters == {
        "records": 4, "accepted": 2, "no_key": 1, "negative_time": 1, "emitted": 1,
    }  # fmt: skip
    assert operator.clocks.time_of(0) == 6


def test_an_unlimited_window_takes_everything_from_its_start_on() -> None:
    operator = make(Unlimited(100))
    output = operator.process(events([50, 100, 10**12, 101]), Moment(0))
    assert shown(output) == [(100, LATEST, 3, 10**12)]
    assert output.counters["before_start"] == 1
    assert shown(operator.process(events([102]), Moment(0))) == [(100, LATEST, 4, 10**12)]


def test_times_at_the_end_of_time_have_a_window_that_ends_there() -> None:
    operator = make(Tumbling("1000ms", grace="1ms"))
    (row,) = shown(operator.process(events([LATEST]), Moment(0)))
    assert row[1:] == (LATEST, 1, LATEST)


def test_a_leap_to_the_end_of_time_inside_a_batch_keeps_windows_apart() -> None:
    operator = make(Hopping("10ms", "5ms", grace=ms(LATEST - 10)))
    rows = (
        operator.process(events([3, LATEST - 3, 12], [b"a", b"b", b"a"]), Moment(0))
        .rows.to_batch()
        .to_pylist()
    )  # type: ignore[union-attr]
    late = LATEST // 5 * 5
    found = sorted((row["key"], row["window_start"], row["window_end"], row["count"]) for row in rows)
    assert found == [
        (b"a", 0, 10, 1), (b"a", 5, 15, 1), (b"a", 10, 20, 1),
        (b"b", late - 10, late, 1), (b"b", late - 5, LATEST, 1),
    ]  # fmt: skip


def test_names_of_the_user_never_clash_with_those_of_storage() -> None:
    runtime = WorkerStorageRuntime.open(StorageConfig.for_tests(), MemoryBackend())
    values = pa.record_batch(
        {"ts": pa.array([1.5, 2.5]), "seq": pa.array([4.0, None]), "key": pa.array([1, 2])}
    )
    sums = {"key": agg.sum("ts"), "ts": agg.sum("seq"), "notes.count": agg.count()}
    resolved = resolve(sums, values.schema)
    operator = WindowOperator(runtime, "task", "windows", Tumbling("10ms"), resolved)
    batch = events([1, 2]).with_values(values)
    (row,) = operator.process(batch, Moment(0)).rows.to_batch().to_pylist()  # type: ignore[union-attr]
    assert row["values"] == {"key": 4.0, "ts": 4.0, "notes.count": 2}
    assert (row["min_offset"], row["max_offset"], row["count"]) == (0, 1, 2)


def test_a_batch_without_a_column_that_is_aggregated_is_refused_before_anything_is_folded() -> None:
    runtime = WorkerStorageRuntime.open(StorageConfig.for_tests(), MemoryBackend())
    sums = resolve({"total": agg.sum("amount")}, pa.schema([("amount", pa.float64())]))
    operator = WindowOperator(runtime, "task", "windows", Tumbling("10ms"), sums)
    with pytest.raises(InvalidError, match="'amount'"):
        operator.process(events([1]), Moment(0))
    assert operator.states[0].index.bucket_count == 0


def test_dropped_time_segments_give_their_backlog_back() -> None:
    runtime = WorkerStorageRuntime.open(StorageConfig.for_tests(), MemoryBackend())
    operator = WindowOperator(runtime, "task", "windows", Tumbling("1m"), COUNTED)
    for minute in range(50):
        operator.process(events([60_000 * minute]), Moment(0))
    assert operator.states[0].index.bucket_count <= 3
    assert runtime.backlog.used == operator.states[0].index.total_charge


def test_public_definitions_of_aggregates_are_taken_too() -> None:
    runtime = WorkerStorageRuntime.open(StorageConfig.for_tests(), MemoryBackend())
    batch = events([1, 12, 3]).with_values(pa.record_batch({"offset": pa.array([5, 6, 7])}))
    definitions = {
        "key": agg.sum("offset"),
        "ts": agg.count(),
        "last": agg.last("offset"),
    }
    resolved = resolve(definitions, batch.values.schema)
    operator = WindowOperator(runtime, "task", "windows", Hopping("10ms", "5ms", grace="20ms"), resolved)
    rows = operator.process(batch, Moment(0)).rows.to_batch().to_pylist()  # type: ignore[union-attr]
    assert [(row["window_start"], row["values"]) for row in rows] == [
        (0, {"key": 12, "ts": 2, "last": 7}),
        (5, {"key": 6, "ts": 1, "last": 6}),
        (10, {"key": 6, "ts": 1, "last": 6}),
    ]


@pytest.mark.parametrize("emit", ["update", "close"])
@pytest.mark.parametrize("kind", [Tumbling("10ms"), Hopping("10ms", "5ms")])
def test_windows_nobody_hears_of_are_kept_the_same_and_never_sent(kind: Any, emit: str) -> None:
    heard, unheard = make(kind, emit), make(kind, emit, heard=False)
    for at, times in enumerate(([1, 2, 12], [13, 4, 27], [90])):
        batch = events(times, first_offset=10 * at)
        assert len(unheard.process(batch, Moment(0)).rows) == 0
        heard.process(batch, Moment(0))
        assert unheard.windows().to_batch().equals(heard.windows().to_batch())
    assert len(unheard.tick(Moment(0, closing=True)).rows) == 0
    counted = {name: number for name, number in heard.counters.items() if name != "emitted"}
    assert {name: number for name, number in unheard.counters.items() if name != "emitted"} == counted


@pytest.mark.parametrize(
    ("emit", "compat", "store_compat"),
    [
        ("update", None, "tidegate"),
        ("close", None, "tidegate"),
        ("update", "kafka-streams", "kafka-streams"),
        ("close", "kafka-streams", "kafka-streams/time-ordered"),
    ],
)
def test_an_operator_shows_the_windows_that_a_store_of_its_rules_shows(
    emit: str, compat: str | None, store_compat: str
) -> None:
    kind = Tumbling("10ms", retention="30ms")
    operator = make(kind, emit, compat=compat)
    runtime = WorkerStorageRuntime.open(StorageConfig.for_tests(), MemoryBackend())
    store = WindowStore(runtime.context("task"), "windows", retention=30, window_size=10, compat=store_compat)
    for ts in (0, 10, 20, 25, 30, 31, 40, 70):
        operator.process(events([ts]), Moment(0))
        store.put(b"k", b"v", ts // 10 * 10)
        starts = [each.window.start for each, _ in store.all()]
        assert operator.windows().window_start.tolist() == starts
