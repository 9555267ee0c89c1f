"""Session and sliding windows, situation by situation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.durations import duration_ms
from tidegate.errors import InvalidError, OverloadError
from tidegate.storage import StorageConfig
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.aggregates.folds import resolve
from tidegate.windows.events import EventBatch
from tidegate.windows.kinds import Session, Sliding, Tumbling, WindowKind
from tidegate.windows.operators.base import Moment, Output, WindowRows
from tidegate.windows.operators.late import LateSettings
from tidegate.windows.operators.session import SessionOperator
from tidegate.windows.operators.sliding import SlidingOperator
from tidegate.windows.operators.windowed_operator import FutureGuard
from tidegate.windows.operators.windows import WindowOperator
from window_oracles import KafkaSlidingOracle, Record, SlidingOracle, WindowOracle, ms
from workers import TASK, Worker

COUNTED = resolve({"n": agg.count()}, pa.schema([]))
VALUES = pa.schema([("value", pa.int64())])
Emitted = tuple[int, int, int, int | None]  # start, end, timestamp, count (None: deleted)


def batch(times: list[int], keys: list[bytes] | None = None, first_offset: int = 0) -> EventBatch:
    count = len(times)
    return EventBatch(
        key=pa.array(keys or [b"key"] * count, pa.binary()),
        ts=np.array(times, np.int64),
        offset=np.arange(first_offset, first_offset + count, dtype=np.int64),
        partition=np.zeros(count, np.int32),
        stream_time=np.full(count, -1, np.int64),
        values=pa.RecordBatch.from_arrays([pa.array([1] * count, pa.int64())], schema=VALUES),
    )


def operator_of(kind: WindowKind, worker: Worker | None = None, **settings: Any) -> Any:
    made = {Session: SessionOperator, Sliding: SlidingOperator}.get(type(kind), WindowOperator)
    return made((worker or Worker()).runtime, TASK, "windows", kind, COUNTED, **settings)


def emitted(rows: WindowRows) -> list[Emitted]:
    deleted = [False] * len(rows) if rows.deleted is None else rows.deleted.tolist()
    counts = [None if gone else n for gone, n in zip(deleted, rows.values.column(0).to_pylist(), strict=True)]
    return list(
        zip(rows.window_start.tolist(), rows.window_end.tolist(), rows.ts.tolist(), counts, strict=True)
    )


def one_by_one(operator: Any, times: list[int], keys: list[bytes] | None = None) -> list[Output]:
    """Each record a batch of its own: every step is seen."""
    keys = keys or [b"key"] * len(times)
    return [
        operator.process(batch([time], [key], offset), Moment(0))
        for offset, (time, key) in enumerate(zip(times, keys, strict=True))
    ]


def rows_of(outputs: list[Output]) -> list[Emitted]:
    return [row for output in outputs for row in emitted(output.rows)]  # type: ignore[arg-type]


# ── sliding ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "times", "starts"),
    [
        pytest.param(
            Sliding("10ms", grace="5ms"), [10, 10, 14, 15, 20, 22, 30], [0, 4, 5, 10, 11, 12, 15, 16, 20, 21, 23],
            id="WIN-7.6-07 every window",
        ),
        pytest.param(
            Sliding("50ms"), [0, 5, 6, 3, 13, 10, 70], [0, 1, 4, 6, 7, 11, 20], id="WIN-7.6-07 near the epoch"
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cut", ["one by one", "at once"])
def test_sliding_windows_start_where_they_should(
    kind: Sliding, times: list[int], starts: list[int], cut: str
) -> None:
    operator = operator_of(kind)
    outputs = (
        one_by_one(operator, times) if cut == "one by one" else [operator.process(batch(times), Moment(0))]
    )
    assert sorted({row[0] for row in rows_of(outputs)}) == starts
    if cut == "at once":
        assert len(rows_of(outputs)) == len(starts)


def test_sliding_windows_that_are_final() -> None:
    """WIN-7.6-07: on close only windows that ended before stream time less grace."""
    operator = operator_of(Sliding("10ms", grace="5ms"), emit="close")
    outputs = one_by_one(operator, [10, 10, 14, 15, 20, 22, 30])
    assert rows_of(outputs) == [
        (0, 10, 10, 2), (4, 14, 14, 3), (5, 15, 15, 4), (10, 20, 20, 5), (11, 21, 20, 3), (12, 22, 22, 4)
    ]  # fmt: skip


def test_a_sliding_window_takes_a_record_until_it_ended_grace_ago() -> None:
    operator = operator_of(Sliding("10ms"))
    operator.process(batch([100, 110], [b"a", b"b"]), Moment(0))
    taken = operator.process(batch([100], [b"c"], 2), Moment(0))
    assert taken.counters["accepted"] == 1  # time + difference = stream time: a window may still hold it
    assert emitted(taken.rows) == []  # but [90, 100] had closed, and no later record is there yet
    late = operator.process(batch([99], [b"c"], 3), Moment(0)).late
    assert late is not None and late.how_late_ms.tolist() == [1]
    later = operator.process(batch([110], [b"c"], 4), Moment(0))
    assert (100, 110, 110, 2) in emitted(later.rows)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 60)), max_size=30),
    st.integers(1, 15),
)
def test_windows_by_definition_are_the_windows_kafka_streams_derives(
    events: list[tuple[int, int]], width: int
) -> None:
    """As long as no window closes before its records came."""
    kind = Sliding(ms(width), grace="1000ms")
    records = [Record(b"%d" % key, ts, 1, offset) for offset, (key, ts) in enumerate(events)]
    by_definition, derived = SlidingOracle(kind).run(records), KafkaSlidingOracle(kind).run(records)
    assert _members(by_definition) == _members(derived)


def _members(oracle: WindowOracle) -> dict[Any, tuple[int, list[int]]]:
    return {
        window: (ts, sorted(record.offset for record in records))
        for window, (ts, records) in oracle.table.items()
    }


# ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_record_between_two_sessions_makes_them_one() -> None:
    """WIN-7.6-08: 0, gap + 1, gap / 2."""
    gap = 10
    operator = operator_of(Session(ms(gap), grace="100ms"))
    assert emitted(operator.process(batch([0, gap + 1]), Moment(0)).rows) == [(0, 0, 0, 1), (11, 11, 11, 1)]
    assert emitted(operator.process(batch([gap // 2], first_offset=2), Moment(0)).rows) == [
        (0, 0, 0, None), (11, 11, 11, None), (0, 11, 11, 3)
    ]  # fmt: skip
    assert emitted(operator.windows()) == [(0, 11, 11, 3)]


def test_a_session_that_grows_is_deleted_where_it_was_first() -> None:
    """WIN-7.6-09: 0 then 5."""
    outputs = one_by_one(operator_of(Session("10ms")), [0, 5])
    assert rows_of(outputs) == [(0, 0, 0, 1), (0, 0, 0, None), (0, 5, 5, 2)]


def test_inside_a_batch_nothing_is_deleted_that_nobody_saw() -> None:
    assert emitted(operator_of(Session("10ms")).process(batch([0, 5]), Moment(0)).rows) == [(0, 5, 5, 2)]


def test_the_same_moment_again_overwrites_a_session() -> None:
    """WIN-7.6-10: no deletion."""
    assert rows_of(one_by_one(operator_of(Session("10ms")), [7, 7])) == [(7, 7, 7, 1), (7, 7, 7, 2)]


@pytest.mark.parametrize(
    ("kind", "stream_time", "is_taken"),
    [
        pytest.param(Session("10ms"), 11, False, id="WIN-7.6-10 no grace"),
        pytest.param(Session("10ms", grace="1ms"), 11, True, id="WIN-7.6-10 grace 1, just in time"),
        pytest.param(Session("10ms", grace="1ms"), 12, False, id="WIN-7.6-10 grace 1, too late"),
    ],
)
def test_a_session_takes_a_record_until_it_ended_gap_and_grace_ago(
    kind: Session, stream_time: int, is_taken: bool
) -> None:
    outputs = one_by_one(operator_of(kind), [stream_time, 0], [b"other", b"key"])
    assert (outputs[1].late is None) is is_taken
    assert outputs[1].counters.get("late_records", 0) == (0 if is_taken else 1)
    if not is_taken:
        assert outputs[1].late is not None
        assert outputs[1].late.how_late_ms.tolist() == [1]
        assert outputs[1].late.reason.to_pylist() == ["late"]


@pytest.mark.parametrize(("apart", "sessions"), [(10, 1), (11, 2)])
def test_exactly_a_gap_apart_is_one_session(apart: int, sessions: int) -> None:
    assert len(operator_of(Session("10ms")).process(batch([0, apart]), Moment(0)).rows) == sessions


def test_a_late_record_reaches_a_long_session_that_is_still_open() -> None:
    """Its own time is far behind, but the session it falls into ends now; the end lies beyond time + gap."""
    operator = operator_of(Session("10ms"))
    operator.process(batch(list(range(0, 101, 10))), Moment(0))
    output = operator.process(batch([35], first_offset=11), Moment(0))
    assert emitted(output.rows) == [(0, 100, 100, 12)]
    assert output.late is None


def test_what_is_final_stays_final() -> None:
    """On close a closed session is not joined any more, however long it is retained."""
    operator = operator_of(Session("10ms", retention="1000ms"), emit="close")
    outputs = one_by_one(operator, [0, 30, 19], [b"key", b"other", b"key"])
    assert rows_of(outputs) == [(0, 0, 0, 1)]  # emitted when 30 came: it closed at 20
    late = outputs[2].late
    assert late is not None, "19 ended before 20, and finds nobody to join"
    final = operator.tick(Moment(0, closing=True))
    assert emitted(final.rows) == [(30, 30, 30, 1)]


@pytest.mark.parametrize("emit", ["update", "close"])
@pytest.mark.parametrize("retention", [None, 10, 1000])
@pytest.mark.parametrize(
    ("first", "sessions", "late_by"),
    [
        pytest.param(20, [(20, 20, 1), (31, 31, 1)], [1], id="final a moment ago"),
        pytest.param(21, [(21, 22, 2), (31, 31, 1)], [], id="about to be final"),
    ],
)
@pytest.mark.parametrize("cut", ["one by one", "at once"])
def test_a_session_is_final_a_gap_and_grace_after_its_end(
    emit: str,
    retention: int | None,
    first: int,
    sessions: list[tuple[int, int, int]],
    late_by: list[int],
    cut: str,
) -> None:
    """Sessions close at 21 when 31 has come; a record at 22 would join the first one, however long it is kept."""
    operator = operator_of(
        Session("10ms", retention=None if retention is None else f"{retention}ms"), emit=emit
    )
    times, keys = [first, 31, 22], [b"key", b"other", b"key"]
    outputs = (
        one_by_one(operator, times, keys)
        if cut == "one by one"
        else [operator.process(batch(times, keys), Moment(0))]
    )
    outputs.append(operator.tick(Moment(0, closing=True)))
    found: dict[tuple[int, int], int | None] = {(start, end): n for start, end, _, n in rows_of(outputs)}
    assert sorted((*bounds, n) for bounds, n in found.items() if n is not None) == sessions
    assert [
        by for each in outputs if each.late is not None for by in each.late.how_late_ms.tolist()
    ] == late_by


def test_a_record_far_behind_does_not_make_an_open_session_begin_earlier() -> None:
    """It lies in no open session, and time before 90 is final: a final session may be there that nobody remembers."""
    operator = operator_of(Session("10ms"))
    operator.process(batch(list(range(20, 101, 10))), Moment(0))
    output = operator.process(batch([15], first_offset=9), Moment(0))
    assert output.late is not None and output.late.how_late_ms.tolist() == [75]
    assert emitted(operator.windows()) == [(20, 100, 100, 9)]


@pytest.mark.parametrize(
    ("first", "retention", "expected"),
    [
        pytest.param(20, None, [(22, 22, 22, 1)], id="closed a moment ago, and gone"),
        pytest.param(21, None, [(21, 21, 21, None), (21, 22, 22, 2)], id="about to close"),
        pytest.param(21, 10, [(22, 22, 22, 1)], id="about to close, least retention"),
        pytest.param(20, 1000, [(20, 20, 20, None), (20, 22, 22, 2)], id="closed, and retained"),
    ],
)
def test_as_kafka_streams_does_it_a_session_can_be_joined_while_it_is_kept(
    first: int, retention: int | None, expected: list[Emitted]
) -> None:
    """Sessions close at 21 when 31 has come."""
    operator = operator_of(Session("10ms", retention=ms(retention)), compat="kafka-streams")
    one_by_one(operator, [first, 31], [b"key", b"other"])
    assert emitted(operator.process(batch([22], first_offset=2), Moment(0)).rows) == expected


@pytest.mark.parametrize(("compat", "ends"), [(None, [20]), ("kafka-streams", [10, 20])])
def test_on_close_kafka_streams_reads_sliding_windows_a_millisecond_longer(
    compat: str | None, ends: list[int]
) -> None:
    operator = operator_of(Sliding("5ms", retention="15ms"), emit="close", compat=compat)
    one_by_one(operator, [10, 20])
    assert [end for _, end, _, _ in emitted(operator.windows()) if end in (10, 20)] == ends


# ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [Session("10ms"), Sliding("10ms")])
def test_old_rows_leave_the_store(kind: WindowKind) -> None:
    operator = operator_of(kind)
    for day in range(5):
        operator.process(batch([day * 86_400_000]), Moment(0))
    assert len(operator.states[0].index.all_buckets()) == 1
    assert len(operator.windows()) == 1


@pytest.mark.parametrize("kind", [Session("10ms"), Sliding("10ms")])
def test_late_and_future_records_are_set_aside(kind: WindowKind) -> None:
    operator = operator_of(kind, values=VALUES, late=LateSettings(), future=FutureGuard("1s"), partitions=[0])
    output = operator.process(batch([500, 9_000, 1]), Moment(1_000))
    assert output.late is not None
    assert output.late.reason.to_pylist() == ["future", "late"]
    assert output.late.how_late_ms.tolist() == [7_000, 489]
    table = operator.late_table.read()
    assert table["offset"].to_pylist() == [1, 2]
    assert table["stream_time"].to_pylist() == [500, 500]
    kept = operator_of(kind, future=FutureGuard("1s", "keep"))
    output = kept.process(batch([500, 9_000]), Moment(1_000))
    assert output.late is None and kept.clocks.floor == 500
    assert 9_000 in {end for _, end, _, _ in emitted(output.rows)}


@pytest.mark.parametrize("kind", [Session("10ms"), Sliding("10ms")])
def test_records_without_a_key_or_time_are_counted(kind: WindowKind) -> None:
    output = operator_of(kind).process(batch([5, -1, 6], [None, b"a", b"a"]), Moment(0))  # type: ignore[list-item]
    assert output.counters == {
        "records": 3, "accepted": 1, "no_key": 1, "negative_time": 1, "emitted": len(output.rows)  # type: ignore[arg-type]
    }  # fmt: skip


@pytest.mark.parametrize("kind", [Session("10ms"), Sliding("10ms")])
def test_idle_sources_and_watermarks_close_windows(kind: WindowKind) -> None:
    idle = operator_of(kind, emit="close", idle_close="1m")
    assert not len(idle.process(batch([100]), Moment(1_000)).rows)
    assert [row[3] for row in emitted(idle.tick(Moment(1_000 + duration_ms("1m"))).rows)] == [1]
    marked = operator_of(kind, emit="close")
    assert not len(marked.process(batch([100]), Moment(0, watermark=100)).rows)
    assert [row[3] for row in emitted(marked.tick(Moment(0, watermark=10_000)).rows)] == [1]
    assert not len(marked.tick(Moment(0, closing=True)).rows)


@pytest.mark.parametrize("kind", [Session("10ms"), Sliding("10ms")])
def test_a_batch_that_finds_no_room_changes_nothing(kind: WindowKind) -> None:
    worker = Worker(StorageConfig.for_tests(backlog_limit_bytes=4096, backlog_timeout_ms=1))
    operator = operator_of(kind, worker)
    operator.process(batch([5]), Moment(0))
    before = operator.counters, operator.clocks.floor, emitted(operator.windows())
    crowd = batch(list(range(100, 400)), [b"key-%d" % number for number in range(300)], 1)
    with pytest.raises(OverloadError):
        operator.process(crowd, Moment(0))
    assert (operator.counters, operator.clocks.floor, emitted(operator.windows())) == before


@pytest.mark.parametrize("made", [SessionOperator, SlidingOperator])
def test_operators_refuse_what_they_cannot_do(made: Any) -> None:
    kind = Session("10ms") if made is SessionOperator else Sliding("10ms")
    runtime = Worker().runtime
    with pytest.raises(TypeError):
        made(runtime, TASK, "a", Tumbling("10ms"), COUNTED)
    with pytest.raises(InvalidError, match="compat"):
        made(runtime, TASK, "b", kind, COUNTED, compat="other")
    with pytest.raises(InvalidError, match="values"):
        made(runtime, TASK, "c", kind, COUNTED, late=LateSettings())
    with pytest.raises(InvalidError, match="late table"):
        made(runtime, TASK, "d", kind, COUNTED, future=FutureGuard("1s"))


@pytest.mark.parametrize("kind", [Session("10ms", grace="5ms"), Sliding("10ms", grace="5ms")])
def test_compat_forgets_the_clocks_on_restart(kind: WindowKind) -> None:
    found = {}
    for compat in (None, "kafka-streams"):
        worker = Worker()
        operator_of(kind, worker, compat=compat).process(batch([1_000]), Moment(0))
        token = worker.runtime.checkpoint(TASK)
        again = Worker(backend=worker.backend, seed=7)
        operator = operator_of(kind, again, compat=compat)
        again.runtime.apply_checkpoint(TASK, token)
        found[compat] = operator.process(batch([0], [b"other"]), Moment(0)).counters.get("late_records", 0)
    assert found == {None: 1, "kafka-streams": 0}


def test_dense_windows_are_put_together_from_a_tree() -> None:
    """Hundreds of records in each window: sums by nodes are the sums by records."""
    generator = np.random.default_rng(5)
    times = np.sort(generator.integers(0, 600, 900))
    operator = SlidingOperator(
        Worker().runtime,
        TASK,
        "windows",
        Sliding("200ms", grace="10000ms"),
        resolve({"n": agg.count(), "s": agg.sum("value")}, VALUES),
    )
    given_batch = batch(times.tolist())
    values = generator.integers(-9, 9, 900)
    given_batch = given_batch.with_values(pa.RecordBatch.from_arrays([pa.array(values)], schema=VALUES))
    rows = operator.process(given_batch, Moment(0)).rows
    assert isinstance(rows, WindowRows) and rows.count.max() > 250
    for start, end, count, total in zip(
        rows.window_start.tolist(), rows.window_end.tolist(),
        rows.values.column(0).to_pylist(), rows.values.column(1).to_pylist(), strict=True,
    ):  # fmt: skip
        inside = (times >= start) & (times <= end)
        assert (count, total) == (np.count_nonzero(inside), values[inside].sum())
