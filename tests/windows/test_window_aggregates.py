"""The aggregates users ask for: what they answer, whatever the cuts and the order of merging; what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maintenance_steps import dumping
from tidegate.errors import CorruptError, InvalidError
from tidegate.storage import BucketIndex, Merge, PlainState, StoreSpec
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.aggregates.folds import ResolvedAggregates, resolve
from tidegate.windows.events import EventBatch
from workers import TASK, Worker

SCHEMA = pa.schema(
    [
        pa.field("key", pa.string()),
        pa.field("ts", pa.float64()),
        pa.field("seq", pa.int32()),
        pa.field("offset", pa.decimal128(12, 2)),
        pa.field("deleted", pa.bool_()),
    ]
)


def largest(states: pa.Array, groups: Any, count: int) -> pa.Array:
    """A reducer: the longest text of each group, of equally long ones the highest."""
    found: list[str | None] = [None] * count
    for group, text in zip(groups.tolist(), states.to_pylist(), strict=True):
        best = found[group]
        if text is not None and (best is None or (len(text), text) > (len(best), best)):
            found[group] = text
    return pa.array(found, pa.string())


def squares(rows: pa.RecordBatch, groups: Any, count: int) -> pa.Array:
    numbers = pc.fill_null(rows.column("seq"), 0).to_numpy().astype(np.int64)
    others = pc.fill_null(rows.column("ts").is_valid(), False).to_numpy(zero_copy_only=False)
    return add(pa.array(numbers * numbers * others), groups, count)


def add(states: pa.Array, groups: Any, count: int) -> pa.Array:
    totals = np.zeros(count, np.int64)
    np.add.at(totals, groups, states.to_numpy())
    return pa.array(totals)


DEFINITIONS = {
    "key": agg.count(),
    "ts": agg.count("ts"),
    "a.sum": agg.sum("ts"),
    "a": agg.mean("ts"),
    "deleted": agg.min("key"),
    "seq": agg.max("ts"),
    "first": agg.first("key"),
    "last": agg.last("seq"),
    "distinct": agg.count_distinct("ts"),
    "names": agg.count_distinct("key"),
    "about": agg.approx_count_distinct("key"),
    "top": agg.top_k("ts", 2),
    "all": agg.collect("key"),
    "some": agg.collect("seq", limit=3),
    "money": agg.sum("offset"),
    "longest": agg.reduce("key", largest, state=pa.string()),
    "squares": agg.reduce(
        ["seq", "ts"], add, state=pa.int64(), partial=squares, finish=lambda states: states.cast(pa.float64()),
        result=pa.float64(),
    ),
}  # fmt: skip

DOUBLES = st.sampled_from([0.0, -0.0, 1.5, -2.0, 1e300, -1e300, 1e-300, 0.1, math.nan])
ROWS = st.lists(
    st.tuples(
        st.none() | st.sampled_from(["a", "b", "cc", "dd", ""]),
        st.none() | DOUBLES,
        st.none() | st.integers(-5, 5),
        st.none() | st.integers(-500, 500).map(lambda cents: Decimal(cents) / 100),
        st.booleans(),
        st.integers(0, 3),  # event time
        st.integers(0, 1),  # partition
        st.integers(0, 2),  # group
    ),
    min_size=1,
    max_size=25,
)


def events_of(rows: Sequence[Any], offsets: Sequence[int]) -> EventBatch:
    columns = [pa.array([row[at] for row in rows], field.type) for at, field in enumerate(SCHEMA)]
    return EventBatch(
        key=pa.array([b"group-%d" % row[7] for row in rows], pa.binary()),
        ts=np.array([row[5] for row in rows], np.int64),
        offset=np.array(offsets, np.int64),
        partition=np.array([row[6] for row in rows], np.int32),
        stream_time=np.zeros(len(rows), np.int64),
        values=pa.RecordBatch.from_arrays(columns, schema=SCHEMA),
    )


def order_of(number: float) -> tuple[bool, float, bool]:
    return math.isnan(number), 0.0 if math.isnan(number) else number, math.copysign(1, number) > 0


def expected_of(members: list[tuple[int, Any]]) -> dict[str, Any]:
    """The answers in plain Python; `members` are (offset, row)."""
    members = sorted(members, key=lambda each: (each[1][5], each[1][6], each[0]))
    rows = [row for _, row in members]
    keys = [row[0] for row in rows]
    texts = [key for key in keys if key is not None]
    numbers = [row[1] for row in rows if row[1] is not None]
    money = [row[3] for row in rows if row[3] is not None]
    total = None
    if numbers:
        total = math.nan if any(map(math.isnan, numbers)) else math.fsum(numbers)
    ordered = sorted(numbers, key=order_of, reverse=True)
    return {
        "key": len(rows),
        "ts": len(numbers),
        "a.sum": total,
        "a": None if total is None else total / len(numbers),
        "deleted": min(texts, default=None),
        "seq": ordered[0] if ordered else None,
        "first": keys[0],
        "last": rows[-1][2],
        "distinct": len({"nan" if math.isnan(number) else number for number in numbers}),
        "names": len(set(texts)),
        "about": len(set(texts)),
        "top": ordered[:2],
        "all": keys,
        "some": [row[2] for row in rows][:3],
        "money": sum(money) if money else None,
        "longest": max(texts, key=lambda text: (len(text), text), default=None),
        "squares": float(sum((row[2] or 0) ** 2 for row in rows if row[1] is not None)),
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(same(*pair) for pair in zip(left, right, strict=True))
    if isinstance(left, float) and isinstance(right, float) and (math.isnan(left) or math.isnan(right)):
        return math.isnan(left) and math.isnan(right)
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-15)  # a mean is rounded twice here
    return bool(left == right)


def fold(
    resolved: ResolvedAggregates, pieces: Sequence[tuple[EventBatch, Any]], tree: np.random.Generator
) -> Any:
    """Each piece to states, then states merged two by two in any order; a batch of states for three groups."""
    states: list[pa.RecordBatch] = []
    for events, groups in pieces:
        rows = pa.RecordBatch.from_pydict(resolved.inputs(events) or {"none": pa.nulls(len(events))})
        columns = [column for each in resolved.storage for column in each.partial(rows, groups, 3)]
        states.append(pa.RecordBatch.from_arrays(columns, schema=resolved.state_schema))
    while len(states) > 1:
        left, right = (states.pop(int(tree.integers(len(states)))) for _ in range(2))
        both = pa.concat_batches([left, right])
        groups = np.tile(np.arange(3, dtype=np.int32), 2)
        columns = [
            column
            for each in resolved.storage
            for column in each.merge([both.column(part.name) for part in each.state], groups, 3)
        ]
        states.append(pa.RecordBatch.from_arrays(columns, schema=resolved.state_schema))
    return states[0]


@settings(max_examples=120, deadline=None)
@given(ROWS, st.integers(0, 2**32))
def test_answers_do_not_depend_on_cuts_order_or_merging(rows: list[Any], seed: int) -> None:
    chance = np.random.default_rng(seed)
    resolved = resolve(DEFINITIONS, SCHEMA)
    found = []
    for turn in range(3):
        order = list(range(len(rows))) if turn == 0 else chance.permutation(len(rows)).tolist()
        cuts = (
            [0, len(rows)]
            if turn == 0
            else sorted({0, len(rows), *chance.integers(0, len(rows) + 1, 4).tolist()})
        )
        pieces = []
        for first, stop in pairwise(cuts):
            part = order[first:stop]
            groups = np.array([rows[at][7] for at in part], np.int32)
            pieces.append((events_of([rows[at] for at in part], part), groups))
        found.append(fold(resolved, pieces, chance))
    for again in found[1:]:
        for one, other in zip(found[0].columns, again.columns, strict=True):
            assert same(one.to_pylist(), other.to_pylist()), "states are the same, not only results"
    results = resolved.finish(found[0])
    for group in range(3):
        members = [(at, row) for at, row in enumerate(rows) if row[7] == group]
        if not members:
            continue
        expected = expected_of(members)
        for name, answer in expected.items():
            assert same(results.column(name)[group].as_py(), answer), (name, group)


def test_aggregates_live_in_a_fold_store_whatever_their_names() -> None:
    """Aggregates called key, ts, seq, deleted over columns of these names; stored, evicted, restored, merged."""
    resolved = resolve(DEFINITIONS, SCHEMA)
    chance = np.random.default_rng(4)
    rows = [
        (
            str(chance.choice(["a", "bb", "c"])),
            float(chance.integers(5)),
            int(chance.integers(9)),
            Decimal(int(chance.integers(99))) / 100,
            True,
            int(chance.integers(50)),
            0,
            int(chance.integers(3)),
        )
        for _ in range(200)
    ]
    spec = StoreSpec("folds", Merge.FOLD, aggregates=resolved.storage, bucket_ms=100)
    worker = Worker()
    state = PlainState(BucketIndex(spec))
    worker.attach(state)
    for start in range(0, 200, 23):
        events = events_of(rows[start : start + 23], range(start, min(start + 23, 200)))
        columns = {
            "key": events.key,
            "ts": pa.array(np.zeros(len(events), np.int64)),
            **resolved.inputs(events),
        }
        state.index.insert(worker.runtime.writer().append(TASK, state, pa.RecordBatch.from_pydict(columns)))
        if start % 2:
            worker.run(dumping(worker.runtime, TASK, state, [0], evict=True))
    token = worker.runtime.checkpoint(TASK)
    other = Worker(backend=worker.backend, seed=9)
    state = PlainState(
        BucketIndex(
            StoreSpec("folds", Merge.FOLD, aggregates=resolve(DEFINITIONS, SCHEMA).storage, bucket_ms=100)
        )
    )
    other.attach(state)
    other.runtime.apply_checkpoint(TASK, token)
    with other.runtime.reader().scan(TASK, state) as scan:
        table = pa.Table.from_batches(list(scan)).combine_chunks()
    results = resolved.finish({name: table.column(name).combine_chunks() for name in table.column_names})
    for row, key in enumerate(table.column("key").to_pylist()):
        members = [(at, each) for at, each in enumerate(rows) if b"group-%d" % each[7] == key]
        for name, answer in expected_of(members).items():
            assert same(results.column(name)[row].as_py(), answer), name


def finished(definition: agg.AggregateDefinition, column: pa.Array) -> Any:
    schema = pa.schema([pa.field("x", column.type)])
    resolved = resolve([definition], schema)
    count = len(column)
    events = EventBatch(
        pa.array([b""] * count), np.arange(count)[::-1], np.arange(count), np.zeros(count, np.int32),
        np.zeros(count, np.int64), pa.RecordBatch.from_arrays([column], schema=schema),
    )  # fmt: skip
    rows = pa.RecordBatch.from_pydict(resolved.inputs(events))
    states = resolved.storage[0].partial(rows, np.zeros(count, np.int32), 1)
    return resolved.finish(dict(zip(resolved.state_schema.names, states, strict=True))).column(0)[0].as_py()


@pytest.mark.parametrize(
    ("column", "distinct"),
    [
        (pa.array([1, 2, 2, None], pa.int8()), 2),
        (pa.array([2**64 - 1, 0, 0], pa.uint64()), 2),
        (pa.array([True, False, True]), 2),
        (pa.array([0.0, -0.0, math.nan, -math.nan], pa.float32()), 2),
        (pa.array(["é", "e", "é"], pa.large_string()), 2),
        (pa.array([b"a", b"b", b"a"], pa.binary(1)), 2),
        (pa.array([1, 2, 1], pa.timestamp("ns", "UTC")), 2),
        (pa.array([1, 2, 1], pa.date32()), 2),
        (pa.array([Decimal("1.10"), Decimal("1.1"), Decimal("2")], pa.decimal128(10, 2)), 2),
        (pa.array([], pa.int64()), 0),
    ],
    ids=lambda each: str(each.type) if isinstance(each, pa.Array) else "",
)
def test_distinct_values_of_any_plain_type(column: pa.Array, distinct: int) -> None:
    for sliced in (column, pa.concat_arrays([pa.nulls(3, column.type), column]).slice(3)):
        assert finished(agg.count_distinct("x"), sliced) == distinct
        assert finished(agg.approx_count_distinct("x"), sliced) == distinct


def test_top_k_takes_the_largest_and_as_often_as_they_came() -> None:
    assert finished(agg.top_k("x", 3), pa.array([1, 5, None, 5, 3])) == [5, 5, 3]
    assert finished(agg.top_k("x", 3), pa.array(["b", "a"])) == ["b", "a"]
    assert finished(agg.top_k("x", 1), pa.array([1.0, math.nan]))[0] != 1.0


def test_order_is_that_of_event_time_not_of_arrival() -> None:
    column = pa.array(["late", None, "early"])  # event times descend
    assert finished(agg.collect("x"), column) == ["early", None, "late"]
    assert finished(agg.first("x"), column) == "early"
    assert finished(agg.last("x"), column) == "late"


def test_definitions_are_values() -> None:
    assert agg.sum("x") == agg.sum("x") != agg.sum("y")
    assert agg.top_k("x", 2) != agg.top_k("x", 3)
    assert len({agg.count(), agg.count("x")}) == 2
    assert [agg.count().name, agg.sum("x").name, agg.sum("x").named("t").name] == ["count", "sum_x", "t"]
    with pytest.raises(AttributeError):
        agg.count().name = "other"  # type: ignore[misc]


def test_a_sequence_names_results_itself() -> None:
    resolved = resolve([agg.count(), agg.sum("ts").named("total")], SCHEMA)
    assert resolved.result_schema == pa.schema([("count", pa.int64()), ("total", pa.float64())])


def test_another_column_or_type_is_another_fingerprint() -> None:
    def prints(definition: agg.AggregateDefinition, type_: pa.DataType = pa.int64()) -> str:  # noqa: B008
        return resolve({"a": definition}, pa.schema([("x", type_), ("y", type_)])).storage[0].fingerprint()

    kinds = [agg.count_distinct, agg.approx_count_distinct, agg.collect, agg.first, agg.sum]
    assert all(prints(kind("x")) != prints(kind("y")) for kind in kinds)
    assert all(prints(kind("x")) != prints(kind("x"), pa.int32()) for kind in kinds)
    assert prints(agg.top_k("x", 1)) != prints(agg.top_k("x", 2))
    one, two = (agg.reduce("x", add, state=pa.int64(), version=version) for version in "12")
    assert prints(one) != prints(two)


LISTS = pa.schema([("list", pa.list_(pa.int64())), ("text", pa.string()), ("n", pa.int64())])


@pytest.mark.parametrize(
    ("definitions", "error", "words"),
    [
        ([agg.sum("amout")], InvalidError, r"no column 'amout' among \['list', 'text', 'n'\]"),
        ([agg.sum("tex")], InvalidError, r"did you mean text\?"),
        (
            [agg.sum("text")],
            InvalidError,
            "string cannot be summed.*the columns are list list<.*text string, n int64",
        ),
        ([agg.mean("list")], InvalidError, "the columns are"),
        ([agg.min("list")], InvalidError, "no order.*the columns are"),
        ([agg.top_k("list", 1)], InvalidError, "no order"),
        ([agg.count_distinct("list")], InvalidError, "cannot be told apart"),
        ([agg.approx_count_distinct("list")], InvalidError, "cannot be told apart"),
        ([agg.reduce("text", add, state=pa.int64())], InvalidError, "values are string and its states int64"),
        ([], InvalidError, "without any aggregate"),
        ([agg.count(), agg.count()], InvalidError, "count come twice"),
        (["count"], TypeError, "is no aggregate"),
        ({"a": max}, TypeError, "is no aggregate"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_columns_there_are(
    definitions: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        resolve(definitions, LISTS)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: agg.top_k("x", 0), InvalidError),
        (lambda: agg.top_k("x", True), TypeError),
        (lambda: agg.collect("x", limit=0), InvalidError),
        (lambda: agg.sum(1), TypeError),  # type: ignore[arg-type]
        (lambda: agg.reduce(["a", "b"], add, state=pa.int64()), InvalidError),
        (lambda: agg.reduce("a", add, state=pa.int64(), result=pa.string()), InvalidError),
    ],
)
def test_options_that_cannot_be_are_refused(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


def test_a_column_twice_is_refused() -> None:
    with pytest.raises(InvalidError, match="2 columns 'x'"):
        resolve([agg.count("x")], pa.schema([("x", pa.int64()), ("x", pa.int64())]))


def test_a_reducer_is_held_to_its_types() -> None:
    wrong = agg.reduce("x", lambda states, groups, count: pa.nulls(count), state=pa.int64())
    with pytest.raises(InvalidError, match="partial answered"):
        finished(wrong, pa.array([1, 2]))
    wrong = agg.reduce("x", add, state=pa.int64(), finish=lambda states: states.cast(pa.string()))
    with pytest.raises(InvalidError, match="finish answered 1 values of string"):
        finished(wrong, pa.array([1, 2]))


def test_a_damaged_sketch_is_refused() -> None:
    aggregate = resolve([agg.approx_count_distinct("n")], LISTS).storage[0]
    with pytest.raises(CorruptError, match="no sketch"):
        aggregate.finish([pa.array([b"\x01", b"\x07"], pa.binary())])
    with pytest.raises(CorruptError, match="no sketch"):
        aggregate.merge([pa.array([b"\x01", b"\x07"], pa.binary())], np.zeros(2, np.int32), 1)
