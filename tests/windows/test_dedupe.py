"""Deduplication against its rules: the table of cases, each rule alone, what is refused, and bounded state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec import structs

from task_oracles import VALUES, Record, batch_of, forwarded, operator_on
from tidegate.errors import CorruptError, InvalidError, OverloadError
from tidegate.storage.backends.base import StorageBackend
from tidegate.storage.backends.sealed import seal, unseal
from tidegate.storage.manifest import KEPT_BY_NAME, MANIFEST, Body, Token, digest_of
from tidegate.storage.state import extra_name
from tidegate.windows.events import EventBatch
from tidegate.windows.kinds import Deduplicate
from tidegate.windows.operators.base import Moment
from tidegate.windows.operators.dedupe import DedupeOperator
from tidegate.windows.operators.late import LateSettings
from window_oracles import ms
from workers import TASK, Worker

NOW = Moment(now_ms=0)


def run(definition: Deduplicate, records: Sequence[Record]) -> tuple[list[int], dict[str, int], list[int]]:
    """The offsets that went on, the counters, the offsets set aside as late."""
    operator = operator_on(Worker(), definition)
    output = operator.process(batch_of(records), NOW)
    late = [] if output.late is None else output.late.events.offset.tolist()
    return [offset for _, offset in forwarded(output)], operator.counters, late


def records_at(identity: str, *times: int) -> list[Record]:
    return [Record(identity, ts, offset) for offset, ts in enumerate(times)]


# ── the table of cases ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("definition", "records", "passed", "late"),
    [
        pytest.param(
            Deduplicate("id", "60ms", grace="30ms"),
            records_at("x", 100, 159, 160),
            [0, 2],
            [],
            id="WIN-7.7-06",
        ),
        pytest.param(
            Deduplicate("id", "60ms", grace="30ms"),
            records_at("x", 100, 50, 40),
            [0],
            [1, 2],
            id="WIN-7.7-07-late",
        ),
        pytest.param(
            Deduplicate("id", "60ms", grace="60ms"),
            records_at("x", 100, 50, 40),
            [0, 2],
            [],
            id="WIN-7.7-07-grace",
        ),
        pytest.param(
            Deduplicate("id", "60ms", grace="30ms"),
            [Record("x", 100, 0), Record("y", 1000, 1), Record("x", 130, 2)],
            [0, 1],
            [2],
            id="WIN-7.7-08-drop",
        ),
        pytest.param(
            Deduplicate("id", "60ms", grace="30ms", late="forward"),
            [Record("x", 100, 0), Record("y", 1000, 1), Record("x", 130, 2)],
            [0, 1, 2],
            [],
            id="WIN-7.7-08-forward",
        ),
        pytest.param(
            Deduplicate("id", "60ms"),
            [Record("x", 100, 5), Record("x", 100, 5), Record("x", 100, 6)],
            [5, 5],
            [],
            id="WIN-7.7-09-in-one-batch",
        ),
        pytest.param(
            Deduplicate("id", "60ms"),
            [
                Record(None, 100, 0),
                Record(None, 100, 1),
                Record("x", 100, 2, key=None),
                Record("x", 100, 3, key=None),
            ],
            [0, 1, 2],  # without a key the id alone tells a copy
            [],
            id="WIN-7.7-10-no-id",
        ),
    ],
)
def test_cases_of_the_table(
    definition: Deduplicate, records: list[Record], passed: list[int], late: list[int]
) -> None:
    assert run(definition, records)[::2] == (passed, late)


@pytest.mark.parametrize("_row", [pytest.param(0, id="WIN-7.7-09")])
def test_a_replay_after_a_crash_is_forwarded_again_and_another_offset_is_not(_row: int) -> None:
    worker = Worker()
    operator = operator_on(worker, Deduplicate("id", "60ms"))
    first = [Record("x", 100, 0), Record("y", 110, 1)]
    assert forwarded(operator.process(batch_of(first), NOW)) == [(0, 0), (0, 1)]
    again = [*first, Record("x", 120, 2)]  # the state was kept, the output was not
    assert forwarded(operator.process(batch_of(again), NOW)) == [(0, 0), (0, 1)]
    assert operator.counters == {"new": 2, "replays": 2, "duplicates": 1}


@pytest.mark.parametrize("_row", [pytest.param(0, id="WIN-7.7-10")])
def test_a_restored_operator_answers_as_the_one_that_died_and_null_ids_leave_no_row(_row: int) -> None:
    worker = Worker()
    operator = operator_on(worker, Deduplicate("id", "60ms", grace="30ms"))
    operator.process(batch_of([Record("x", 100, 0), Record(None, 500, 1), Record("y", 140, 2)]), NOW)
    assert len(worker.rows(operator.states[0])) == 2  # type: ignore[arg-type]
    token = worker.runtime.checkpoint(TASK)
    rest = [Record("x", 150, 3), Record("z", 105, 4), Record(None, 0, 5), Record("y", 200, 6)]
    expected = forwarded(operator.process(batch_of(rest), NOW))
    assert expected == [(0, 5), (0, 6)], "z is late by the stream time of before"
    other = Worker(backend=worker.backend, seed=5)
    reborn = DedupeOperator(other.runtime, TASK, "dedupe", operator.definition, VALUES, bucket_ms=50)
    other.runtime.apply_checkpoint(TASK, token)
    assert forwarded(reborn.process(batch_of(rest), NOW)) == expected
    assert reborn.counters == operator.counters


# ── rules one by one ─────────────────────────────────────────────────────────────────────────────────────────


def test_grace_is_the_horizon_unless_said() -> None:
    definition = Deduplicate("id", "1m")
    assert (definition.within_ms, definition.grace_ms, definition.retention_ms) == (60_000, 60_000, 120_000)


def test_the_identity_is_the_key_and_the_id() -> None:
    records = [
        Record("x", 1, 0, b"a"),
        Record("x", 1, 1, b"b"),
        Record("bx", 1, 2, b""),
        Record("x", 2, 3, b"a"),
    ]
    assert run(Deduplicate("id", "60ms"), records)[0] == [0, 1, 2]


def test_first_is_first_by_arrival_not_by_time() -> None:
    assert run(Deduplicate("id", "60ms"), records_at("x", 100, 50))[0] == [0]


@pytest.mark.parametrize(("ts", "passes"), [(40, True), (41, False), (159, False), (160, True)])
def test_both_sides_of_the_horizon_are_looked_at_over_batches(ts: int, passes: bool) -> None:
    operator = operator_on(Worker(), Deduplicate("id", "60ms"))
    operator.process(batch_of([Record("x", 100, 0)]), NOW)
    assert bool(forwarded(operator.process(batch_of([Record("x", ts, 1)]), NOW))) is passes


def test_a_duplicate_moves_stream_time() -> None:
    records = [Record("x", 100, 0), Record("x", 150, 1), Record("y", 100, 2)]
    assert run(Deduplicate("id", "60ms", grace="40ms"), records)[2] == [2]


def test_a_duplicate_is_not_kept_unless_it_refreshes() -> None:
    records = records_at("x", 100, 150, 200, 250, 400)
    assert run(Deduplicate("id", "60ms"), records)[0] == [0, 2, 4]
    assert run(Deduplicate("id", "60ms", refresh=True), records)[0] == [0, 4]


def test_the_replay_of_a_refreshing_duplicate_is_dropped_again() -> None:
    worker = Worker()
    operator = operator_on(worker, Deduplicate("id", "60ms", refresh=True))
    records = records_at("x", 100, 150, 100)
    operator.process(batch_of(records), NOW)
    assert forwarded(operator.process(batch_of(records), NOW)) == [(0, 0)]


def test_the_replay_of_a_record_that_is_late_by_now_is_forwarded_while_its_id_is_kept() -> None:
    operator = operator_on(Worker(), Deduplicate("id", "60ms", grace=0))
    records = [Record("x", 100, 0), Record("y", 150, 1)]
    operator.process(batch_of(records), NOW)
    assert forwarded(operator.process(batch_of(records), NOW)) == [(0, 0), (0, 1)]
    operator.process(batch_of([Record("z", 161, 2)]), NOW)
    assert forwarded(operator.process(batch_of(records), NOW)) == [(0, 1)]


def test_partitions_have_their_own_stream_time() -> None:
    records = [Record("x", 1000, 0), Record("y", 10, 0, partition=1), Record("y", 20, 1, partition=1)]
    operator = operator_on(Worker(), Deduplicate("id", "60ms"), partitions=(0, 1))
    assert forwarded(operator.process(batch_of(records), NOW)) == [(0, 0), (1, 0)]
    assert "late" not in operator.counters


def test_a_silent_partition_holds_ids_only_until_it_is_idle() -> None:
    operator = operator_on(Worker(), Deduplicate("id", "60ms"), partitions=(0, 1), idle_close="1000ms")
    operator.process(batch_of([Record("x", 10, 0), Record("y", 10, 0, partition=1)]), Moment(now_ms=0))
    operator.process(batch_of([Record("z", 5000, 1)]), Moment(now_ms=500))
    index = operator.states[0].index
    assert index.total_rows == 3, "partition 1 may still bring a copy of x or y"
    operator.tick(Moment(now_ms=1200))
    assert index.total_rows == 1


def test_stream_times_from_before_a_shuffle_count() -> None:
    batch = batch_of([Record("x", 100, 0), Record("y", 100, 1)])
    batch.stream_time[:] = [100, 500]
    assert operator_on(Worker(), Deduplicate("id", "60ms")).process(batch, NOW).late is None
    late = operator_on(Worker(), Deduplicate("id", "60ms"), stamped=True).process(batch, NOW).late
    assert late is not None and late.events.offset.tolist() == [1]
    assert late.how_late_ms.tolist() == [340]


def test_an_empty_batch_is_a_round_like_any_other() -> None:
    operator = operator_on(Worker(), Deduplicate("id", "60ms"))
    operator.process(batch_of(records_at("x", 10)), NOW)
    output = operator.process(batch_of([]), Moment(0, watermark=10_000))
    assert isinstance(output.rows, EventBatch) and output.rows.values.schema == VALUES
    assert len(output.rows) == 0 and operator.states[0].index.total_rows == 0


def test_equal_offsets_of_two_partitions_are_two_records() -> None:
    records = [Record("x", 10, 0), Record("x", 10, 0, partition=1)]
    assert run(Deduplicate("id", "60ms"), records)[1] == {"new": 1, "duplicates": 1}


def test_late_rows_say_how_late_and_are_kept_readable() -> None:
    operator = operator_on(Worker(), Deduplicate("id", "60ms", grace="30ms"), late_table=LateSettings("1h"))
    output = operator.process(batch_of([Record("x", 100, 0), Record("y", 45, 1)]), NOW)
    assert output.late is not None
    assert output.late.how_late_ms.tolist() == [25]
    assert operator.late_table is not None
    table = operator.late_table.read()
    assert table.column("offset").to_pylist() == [1]
    assert table.column("reason").to_pylist() == ["late"]


def test_rows_keep_their_order_and_their_values() -> None:
    operator = operator_on(Worker(), Deduplicate("id", "60ms"))
    records = [Record(str(number % 50), 100 + number % 7, number) for number in range(200)]
    output = operator.process(batch_of(records), NOW)
    assert isinstance(output.rows, EventBatch)
    assert output.rows.values.column("n").to_pylist() == output.rows.offset.tolist() == list(range(50))
    assert (
        output.rows.stream_time.tolist() == np.maximum.accumulate([100 + n % 7 for n in range(50)]).tolist()
    )


@pytest.mark.parametrize(
    ("columns", "rows", "passed"),
    [
        (pa.int64(), [1, 2, 1, None, None], [0, 1, 3, 4]),
        (pa.float64(), [0.0, -0.0, float("nan"), float("nan"), 1.5], [0, 2, 4]),
        (pa.bool_(), [True, False, True, None, False], [0, 1, 3]),
        (pa.binary(), [b"", b"\0", b"", b"\0\0", b"\0"], [0, 1, 3]),
        (pa.large_string(), ["a", "b", "a", "ab", "b"], [0, 1, 3]),
        (pa.timestamp("ms", "UTC"), [1, 2, 1, 3, 2], [0, 1, 3]),
        (pa.dictionary(pa.int8(), pa.string()), ["a", "b", "a", "c", "b"], [0, 1, 3]),
    ],
    ids=str,
)
def test_ids_of_any_plain_type(columns: pa.DataType, rows: list[Any], passed: list[int]) -> None:
    schema = pa.schema([pa.field("id", columns)])
    operator = DedupeOperator(Worker().runtime, TASK, "d", Deduplicate("id", "60ms"), schema)
    values = pa.RecordBatch.from_arrays([pa.array(rows, columns)], schema=schema)
    plain = batch_of([Record("", 10, offset) for offset in range(5)])
    assert [offset for _, offset in forwarded(operator.process(plain.with_values(values), NOW))] == passed
    sliced = operator.process(plain.with_values(values).slice(1, 5), NOW)  # the same bytes from another place
    assert [offset for _, offset in forwarded(sliced)] == [offset for offset in passed if offset]


def test_several_columns_make_one_id() -> None:
    schema = pa.schema([("a", pa.string()), ("b", pa.string()), ("c", pa.int32())])
    operator = DedupeOperator(Worker().runtime, TASK, "d", Deduplicate(["a", "b", "c"], "60ms"), schema)
    rows = [("ab", "c", 1), ("a", "bc", 1), ("ab", "c", 2), ("ab", None, 1), ("ab", None, 1), ("ab", "c", 1)]
    columns = [
        pa.array(column, each.type) for column, each in zip(zip(*rows, strict=True), schema, strict=True)
    ]
    values = pa.RecordBatch.from_arrays(columns, schema=schema)
    plain = batch_of([Record("", 10, offset) for offset in range(6)])
    assert [offset for _, offset in forwarded(operator.process(plain.with_values(values), NOW))] == [
        0,
        1,
        2,
        3,
        4,
    ]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Deduplicate("id", 0), InvalidError, "within is 0"),
        (lambda: Deduplicate("id", ms(-1)), InvalidError, "negative"),
        (lambda: Deduplicate("id", "soon"), InvalidError, "within"),
        (lambda: Deduplicate("id", "60ms", grace=ms(-1)), InvalidError, "grace"),
        (lambda: Deduplicate("id", "60ms", late="keep"), InvalidError, "'drop' or 'forward'"),  # type: ignore[arg-type]
        (lambda: Deduplicate([], "60ms"), TypeError, "name of a column"),
        (lambda: operator_on(Worker(), Deduplicate("no", "60ms")), InvalidError, r"'no' among \['id', 'n'\]"),
        (
            lambda: DedupeOperator(
                Worker().runtime,
                TASK,
                "d",
                Deduplicate("id", "60ms"),
                pa.schema([("id", pa.list_(pa.int8()))]),
            ),
            InvalidError,
            "cannot be told apart",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_ids_of_other_columns_are_not_compared_with_those_of_the_checkpoint() -> None:
    worker = Worker()
    operator_on(worker, Deduplicate("id", "60ms")).process(batch_of(records_at("x", 1)), NOW)
    token = worker.runtime.checkpoint(TASK)
    other = Worker(backend=worker.backend, seed=3)
    operator_on(other, Deduplicate("n", "60ms"))
    with pytest.raises(InvalidError, match=r"made of \['id'\] \['string'\], now of \['n'\]"):
        other.runtime.apply_checkpoint(TASK, token)


def as_version_1(backend: StorageBackend, token: bytes, *, is_named: bool, is_kept: bool = True) -> bytes:
    """The same checkpoint as releases wrote it that kept progress beside the rows, or there that it is named."""
    found = Token.decode(token)
    body = unseal(MANIFEST, backend.read(found.manifest), Body, name=found.manifest)
    extras, stores = dict(body.extras), {}
    for store, each in body.stores.items():
        beside = extras.get(extra_name(store), b"")
        if beside and not (is_named and is_kept):
            del extras[extra_name(store)]
        stores[store] = structs.replace(each, extra=KEPT_BY_NAME if beside and is_named else beside)
    name = found.manifest.replace(".manifest", "-1.manifest")
    older = structs.replace(body, name=name, stores=stores, extras=extras)
    content = seal(MANIFEST._replace(version=1), older)
    backend.put(name, [content])
    return structs.replace(found, manifest=name, digest=digest_of(content)).encode()


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("attach_first", [True, False])
def test_progress_of_a_release_that_kept_it_beside_the_rows_is_taken_over(
    attach_first: bool, is_named: bool
) -> None:
    definition, worker = Deduplicate("id", "60ms", grace="30ms"), Worker()
    operator = operator_on(worker, definition)
    operator.process(batch_of([Record("x", 100, 0), Record("y", 140, 1)]), NOW)
    token = as_version_1(worker.backend, worker.runtime.checkpoint(TASK), is_named=is_named)
    rest = [Record("x", 150, 3), Record("z", 105, 4), Record("y", 200, 5)]
    expected = forwarded(operator.process(batch_of(rest), NOW))
    assert expected == [(0, 5)], "z is late, x a duplicate"
    other = Worker(backend=worker.backend, seed=5)
    if attach_first:
        reborn = operator_on(other, definition)
        other.runtime.apply_checkpoint(TASK, token)
    else:
        other.runtime.apply_checkpoint(TASK, token)
        reborn = operator_on(other, definition)
    assert forwarded(reborn.process(batch_of(rest), NOW)) == expected
    later = Worker(backend=worker.backend, seed=6)
    later.runtime.apply_checkpoint(TASK, other.runtime.checkpoint(TASK))
    last = operator_on(later, definition)
    assert later.used("state_cache") > 0
    for each in (reborn, last):
        assert (each.counters, each.clocks.time_of(0)) == (operator.counters, 200)


def test_rows_without_their_progress_are_refused() -> None:
    worker = Worker()
    operator_on(worker, Deduplicate("id", "60ms")).process(batch_of(records_at("x", 1)), NOW)
    token = as_version_1(worker.backend, worker.runtime.checkpoint(TASK), is_named=True, is_kept=False)
    other = Worker(backend=worker.backend, seed=3)
    operator_on(other, Deduplicate("id", "60ms"))
    with pytest.raises(CorruptError, match="not its operator's progress"):
        other.runtime.apply_checkpoint(TASK, token)


@pytest.mark.parametrize("data", [b"\x09", b"\x01\x91", b"\x01\xff"])
def test_damaged_progress_is_refused(data: bytes) -> None:
    state = operator_on(Worker(), Deduplicate("id", "60ms")).states[0]
    with pytest.raises(CorruptError, match="progress"):
        state.restore_progress(data)  # type: ignore[attr-defined]


def test_a_batch_that_found_no_room_can_be_given_again() -> None:
    worker = Worker(backlog_limit_bytes=1 << 14, backlog_timeout_ms=1)
    operator = operator_on(worker, Deduplicate("id", "1000ms", grace=0), bucket_ms=100)
    operator.process(batch_of([Record(f"a{number}", 100, number) for number in range(100)]), NOW)
    held = operator.counters
    many = [Record("late", 950, 100), Record("leap", 1900, 101)]
    many += [Record(f"b{number}", 1901, 102 + number) for number in range(400)]
    with pytest.raises(OverloadError):
        operator.process(batch_of(many), NOW)
    assert operator.counters == held
    assert operator.clocks.time_of(0) == 100
    assert forwarded(operator.process(batch_of(many[:2]), NOW)) == [(0, 100), (0, 101)]


def test_state_stays_proportional_to_horizon_and_grace() -> None:
    worker = Worker()
    operator = operator_on(worker, Deduplicate("id", "200ms", grace="100ms"), bucket_ms=50)
    most, index = 0, operator.states[0].index
    for number in range(300):
        start = 10 * number
        records = [Record(f"{start + step}-{copy}", start + step, 30 * number + 3 * step + copy)
                   for step in range(10) for copy in range(3)]  # fmt: skip
        operator.process(batch_of(records), NOW)
        worker.runtime.maintain(TASK, 1000)
        most = max(most, index.total_rows)
    assert operator.counters == {"new": 9000}
    assert 3 * 300 <= most <= 3 * (300 + 50 + 10), "three ids a millisecond, kept for 300 ms and one bucket"
    operator.tick(Moment(0, watermark=10**9))
    assert index.total_rows == 0
    assert worker.runtime.backlog.used == 0
    assert worker.runtime.pool.total == worker.used("state_cache") < 1000, (
        "the operator's progress, nothing else"
    )


def test_a_leap_of_time_keeps_nothing_of_before_it() -> None:
    operator = operator_on(Worker(), Deduplicate("id", "60ms"))
    operator.process(batch_of([Record("a", 1, 0), Record("b", 2, 1), Record("c", 10**12, 2)]), NOW)
    assert operator.states[0].index.total_rows == 1
