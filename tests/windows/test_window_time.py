"""Clocks, late rows, records from the future, silent sources, restarts; and the streams Kafka Streams was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from streams_fixtures import load_fixture

from tidegate.clock import ManualClock
from tidegate.errors import CorruptError, InvalidError, OverloadError
from tidegate.storage import StorageConfig, WorkerStorageRuntime
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.aggregates.folds import resolve
from tidegate.windows.events import NO_TIME, EventBatch
from tidegate.windows.keys import KeyFormat, decode_keys
from tidegate.windows.kinds import Hopping, Tumbling
from tidegate.windows.operators.base import Moment, Output
from tidegate.windows.operators.clock import Clocks, Progress, decode, encode
from tidegate.windows.operators.late import LateSettings
from tidegate.windows.operators.windowed_operator import FutureGuard
from tidegate.windows.operators.windows import WindowOperator
from window_oracles import ms

VALUES = pa.schema([pa.field("name", pa.string())])
KEPT: dict[str, Any] = {"values": VALUES, "late": LateSettings("1d", max_bytes=10_000)}


class Worker:
    """A worker that can be started again from its last checkpoint."""

    def __init__(self, kind: Any, emit: str = "update", **options: Any) -> None:
        self.made = lambda: WindowOperator(
            self.runtime,
            "task",
            "windows",
            kind,
            resolve({"n": agg.count()}, pa.schema([])),
            emit=emit,
            **options,
        )
        self.backend, self.offset = MemoryBackend(), 0
        self.runtime = WorkerStorageRuntime.open(
            StorageConfig.for_tests(), self.backend, clock=ManualClock(0)
        )
        self.operator = self.made()

    def restart(self) -> None:
        token = self.runtime.checkpoint("task")
        self.runtime = WorkerStorageRuntime.open(
            StorageConfig.for_tests(), self.backend, clock=ManualClock(0)
        )
        self.runtime.apply_checkpoint("task", token)
        self.operator = self.made()

    def give(self, *times: int, key: bytes = b"k", partition: int = 0, **moment: Any) -> Output:
        count = len(times)
        batch = EventBatch(
            key=pa.array([key] * count, pa.binary()),
            ts=np.array(times, np.int64),
            offset=np.arange(self.offset, self.offset + count),
            partition=np.full(count, partition, np.int32),
            stream_time=np.full(count, NO_TIME, np.int64),
            values=pa.RecordBatch.from_arrays([pa.array([f"n{time}" for time in times])], schema=VALUES),
        )
        self.offset += count
        return self.operator.process(batch, Moment(**{"now_ms": 0, **moment}))

    def tick(self, **moment: Any) -> list[tuple[int, int]]:
        return shown(self.operator.tick(Moment(**{"now_ms": 0, **moment})))

    def late(self) -> list[dict[str, Any]]:
        assert self.operator.late_table is not None
        return self.operator.late_table.read().to_pylist()


def shown(output: Output) -> list[tuple[int, int]]:
    """(start, count) of every row."""
    rows = output.rows.to_batch().to_pylist()  # type: ignore[union-attr]
    return [(row["window_start"], row["values"]["n"]) for row in rows]


# ── late rows ────────────────────────────────────────────────────────────────────────────────────────────────


def test_late_records_stay_readable_with_how_late_they_were_and_why() -> None:
    worker = Worker(Tumbling("10ms", grace="5ms"), **KEPT)
    worker.give(100, 84, 95)
    assert worker.late() == [
        {
            "key": b"k", "stream_time": 100, "event_ts": 84, "partition": 0, "offset": 1, "window_start": 80,
            "how_late_ms": 6, "reason": "late", "values": {"name": "n84"},
        }
    ]  # fmt: skip
    more_grace = Worker(Tumbling("10ms", grace=ms(5 + 6)), **KEPT)
    more_grace.give(100, 84, 95)
    assert more_grace.late() == []


def test_a_record_is_late_once_for_each_window_that_had_closed() -> None:
    worker = Worker(Hopping("10ms", "5ms", grace=0), **KEPT)
    output = worker.give(12, 8)  # [0, 10) has closed, [5, 15) has not
    assert [(row["offset"], row["window_start"], row["how_late_ms"]) for row in worker.late()] == [(1, 0, 3)]
    assert output.counters["late_windows"] == 1
    assert "late_records" not in output.counters
    assert output.late is not None
    assert output.late.window_start.tolist() == [0]


def test_beyond_its_bytes_the_late_table_counts() -> None:
    worker = Worker(Tumbling("10ms"), values=VALUES, late=LateSettings("1d", max_bytes=300))
    worker.give(1000, 1, 2, 3, 4)
    assert [row["event_ts"] for row in worker.late()] == [1, 2]
    assert worker.operator.counters["late_not_kept"] == 2
    assert worker.operator.counters["late_records"] == 4


def test_late_rows_go_after_their_retention_and_make_room() -> None:
    worker = Worker(Tumbling("10ms"), values=VALUES, late=LateSettings("2h", max_bytes=300))
    hour = 3_600_000
    worker.give(hour, 1, 2, 3)
    assert len(worker.late()) == 2
    worker.give(10 * hour)
    assert worker.late() == []
    worker.give(1)
    assert [row["event_ts"] for row in worker.late()] == [1]


def test_late_rows_survive_a_restart() -> None:
    worker = Worker(Tumbling("10ms"), **KEPT)
    worker.give(1000, 1)
    before = worker.late()
    worker.restart()
    assert worker.late() == before
    worker.give(2)
    assert [row["offset"] for row in worker.late()] == [1, 2]


# ── the future ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", ["keep", "late", "drop"])
def test_one_fast_clock_does_not_make_the_others_late(policy: Any) -> None:
    worker = Worker(Tumbling("10ms"), future=FutureGuard("100ms", policy), **KEPT)
    rows = shown(worker.give(50, 151, 52, 150, now_ms=50))
    assert ((50, 2) in rows) and ((150, 2 if policy == "keep" else 1) in rows)
    assert worker.operator.clocks.floor == 150
    assert worker.operator.counters["future"] == 1
    late = [
        (row["event_ts"], row["how_late_ms"], row["reason"], row["window_start"]) for row in worker.late()
    ]
    assert late == ([(151, 1, "future", NO_TIME)] if policy == "late" else [])


def test_a_guard_that_sets_aside_needs_a_late_table() -> None:
    with pytest.raises(InvalidError, match="late table"):
        Worker(Tumbling("10ms"), future=FutureGuard("100ms", "late"))
    with pytest.raises(InvalidError, match="policy"):
        FutureGuard("100ms", "ignore")  # type: ignore[arg-type]


# ── several partitions, silent ones, the end ─────────────────────────────────────────────────────────────────


def test_windows_close_when_every_partition_has_passed_them() -> None:
    worker = Worker(Tumbling("10ms"), "close", partitions=(0, 1))
    assert shown(worker.give(5, 25, partition=0)) == []
    assert shown(worker.give(7, partition=1)) == []  # in time by its own partition's clock
    assert shown(worker.give(18, partition=1)) == [(0, 2)]
    assert shown(worker.give(9, partition=0)) == []
    assert worker.operator.counters["late_records"] == 1
    assert shown(worker.give(30, partition=1)) == [(10, 1)]


def test_a_silent_partition_does_not_hold_the_others_back() -> None:
    worker = Worker(Tumbling("10ms"), "close", partitions=(0, 1), idle_close=1000)
    assert shown(worker.give(5, 25, partition=0, now_ms=0)) == []
    assert shown(worker.give(26, partition=0, now_ms=999)) == []
    assert shown(worker.give(27, partition=0, now_ms=1000)) == [(0, 1)]
    assert worker.operator.clocks.silent_since() == {0: 1000, 1: 0}
    assert shown(worker.give(3, partition=1, now_ms=1001)) == []  # what it closed without, stays closed
    assert worker.operator.counters["late_records"] == 1
    assert shown(worker.give(100, partition=0, now_ms=1002)) == []  # and now it is waited for again


def test_when_all_are_silent_time_passes_as_the_rounds_do() -> None:
    worker = Worker(Tumbling("1000ms", grace="500ms"), "close", idle_close=2000)
    worker.give(100, 200, now_ms=10_000)
    assert worker.tick(now_ms=11_999) == []
    assert worker.tick(now_ms=12_000) == [(0, 2)]  # 200 and 2000 of silence are past 1500
    assert worker.tick(now_ms=99_000) == []
    worker.restart()
    assert worker.tick(now_ms=99_001) == []
    assert shown(worker.give(300, now_ms=99_002)) == []
    assert worker.operator.counters["late_records"] == 1


def test_without_idle_close_time_stands_still() -> None:
    worker = Worker(Tumbling("10ms"), "close")
    worker.give(5)
    assert worker.tick(now_ms=10**12) == []


def test_a_watermark_or_the_end_of_the_input_closes_windows() -> None:
    worker = Worker(Tumbling("10ms"), "close")
    worker.give(5, 15, 16)
    assert worker.tick(watermark=20) == [(10, 2)]
    worker.give(25)
    assert worker.tick(closing=True) == [(20, 1)]
    assert worker.tick(closing=True) == []
    assert shown(worker.give(10**9)) == []
    assert worker.operator.counters["late_records"] == 1


def test_stream_times_from_before_a_shuffle_count_when_they_are_trusted() -> None:
    for stamped, expected in ((True, []), (False, [(0, 1)])):
        worker = Worker(Tumbling("10ms"), stamped=stamped)
        batch = EventBatch(
            key=pa.array([b"k"], pa.binary()),
            ts=np.array([5]),
            offset=np.array([0]),
            partition=np.zeros(1, np.int32),
            stream_time=np.array([40]),
            values=pa.record_batch({"name": ["n"]}),
        )
        assert shown(worker.operator.process(batch, Moment(0))) == expected


# ── restarts ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_clocks_survive_a_restart() -> None:
    worker = Worker(Tumbling("10ms"), "close", partitions=(0, 3))
    worker.give(5, 25)
    worker.give(26, partition=3)
    before = worker.operator.counters
    worker.restart()
    assert worker.operator.counters == before
    assert worker.operator.clocks.time_of(3) == 26
    assert shown(worker.give(7)) == []
    assert worker.operator.counters["late_records"] == 1
    assert shown(worker.give(30)) == []  # partition 3 is waited for
    assert shown(worker.give(31, partition=3)) == [(20, 2)]


def test_kafka_streams_forgets_its_clocks_but_not_what_it_emitted() -> None:
    worker = Worker(Tumbling("10ms"), compat="kafka-streams")
    worker.give(25)
    assert shown(worker.give(5)) == []
    worker.restart()
    assert worker.operator.clocks.floor == NO_TIME
    assert shown(worker.give(5)) == [(0, 1)]
    worker = Worker(Tumbling("10ms"), "close", compat="kafka-streams")
    assert shown(worker.give(5, 25)) == [(0, 1)]
    worker.restart()
    assert shown(worker.give(6, 26)) == []
    assert shown(worker.give(31)) == [(20, 2)]


@pytest.mark.parametrize(
    ("compat", "emit", "starts"),
    [
        (None, "close", [20]),
        (None, "update", [20]),
        ("kafka-streams", "update", [20]),
        ("kafka-streams", "close", [10, 10, 20]),
    ],
)
def test_on_close_kafka_streams_reads_a_millisecond_further_back(
    compat: str | None, emit: str, starts: list[int]
) -> None:
    """Its time-ordered store shows a window that starts a retention before the newest one; its other stores do not."""
    worker = Worker(Tumbling("10ms"), emit, compat=compat)
    for key in (b"a", b"b"):
        worker.give(10, key=key)
    worker.give(20)
    assert worker.operator.windows().window_start.tolist() == starts
    keys = pa.array([b"a", b"b", b"k"], pa.binary())
    assert sorted(worker.operator.windows_of(keys).window_start.tolist()) == starts


def test_progress_of_another_format_or_damaged_is_refused() -> None:
    progress = Progress(Clocks([0], [5], [1], [False], 5), 7, {"records": 3}, {0: 12})
    assert encode(decode(encode(progress), Progress)) == encode(progress)
    with pytest.raises(CorruptError, match="format 9"):
        decode(b"\x09" + encode(progress)[1:], Progress)
    with pytest.raises(CorruptError, match="cannot be read"):
        decode(encode(progress)[:-3], Progress)


def test_a_batch_that_storage_has_no_room_for_can_be_given_again() -> None:
    worker, plain = (Worker(Tumbling("10ms"), **KEPT) for _ in range(2))
    expected = [plain.give(5), plain.give(30, 1, 31)]
    assert shown(worker.give(5)) == shown(expected[0])
    before = worker.operator.counters
    full = 1 << 50
    worker.runtime.backlog.force(full, task="task")
    with pytest.raises(OverloadError):
        worker.give(30, 1, 31)
    assert worker.operator.counters == before
    assert worker.operator.clocks.time_of(0) == 5
    assert worker.late() == []
    worker.runtime.backlog.release(full, task="task")
    worker.offset = 1
    assert shown(worker.give(30, 1, 31)) == shown(expected[1])
    assert worker.late() == plain.late()
    assert worker.operator.counters == plain.operator.counters


# ── what Kafka Streams made of the same records ──────────────────────────────────────────────────────────────

RECORDED = ["tumbling-count", "tumbling-small", "tumbling-late", "hopping-count", "hopping-keys"]


def recorded_kind(about: dict[str, Any]) -> Hopping:
    return Hopping(ms(about["size"]), ms(about["advance"]), grace=ms(about["grace"]))


def replay(name: str, emit: str) -> tuple[list[tuple[bytes, int, int, int]], WindowOperator, Any]:
    recorded = load_fixture(name)
    worker, rows = Worker(recorded_kind(recorded.about), emit), []
    for given in recorded.inputs:
        output = worker.give(given.timestamp, key=given.key).rows.to_batch().to_pylist()  # type: ignore[union-attr]
        rows += [(row["key"], row["window_start"], row["values"]["n"], row["ts"]) for row in output]
    return rows, worker.operator, recorded


def written(recorded: Any) -> list[tuple[bytes, int, int, int]]:
    out = recorded.written("out")
    keys = decode_keys(
        pa.array([each.key for each in out], pa.binary()), KeyFormat.TOPIC, size_ms=recorded.size_ms
    )
    counts = [int.from_bytes(each.value, "big") for each in out]
    times = [each.timestamp for each in out]
    return list(zip(keys.inner.to_pylist(), keys.start.tolist(), counts, times, strict=True))


@pytest.mark.parametrize("name", RECORDED)
def test_record_by_record_the_rows_are_those_of_kafka_streams(name: str) -> None:
    rows, operator, recorded = replay(name, "update")
    assert sorted(rows) == sorted(written(recorded))
    assert operator.counters.get("late_windows", 0) == recorded.dropped
    kept = operator.windows().to_batch().to_pylist()
    answered = sorted(
        (row.key, row.start, row.end, int.from_bytes(row.value, "big"), row.timestamp)
        for row in recorded.read("all")
    )
    found = [
        (row["key"], row["window_start"], row["window_end"], row["values"]["n"], row["ts"]) for row in kept
    ]
    assert sorted(found) == answered


def test_on_close_no_window_is_missing_that_kafka_streams_emits_nor_any_it_loses() -> None:
    rows, _, recorded = replay("close-tumbling", "close")
    emitted = written(recorded)
    assert set(emitted) < set(rows)
    lost = [row for row in rows if row not in emitted]
    assert [start for _, start, _, _ in lost] == [10, 15, 20]
