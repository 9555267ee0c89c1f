"""Aggregates: against plain Python, and the same whatever the order, the cuts and the merges."""

from __future__ import annotations

import datetime
import math
import struct
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import CorruptError, InvalidError
from tidegate.storage.runs.aggregates import Aggregate, Count, Custom, First, Last, Max, Mean, Min, Sum
from tidegate.storage.spec import Merge, StoreSpec

MONEY = pa.decimal128(20, 2)
INT64 = pa.int64()
GROUPS = 3
doubles = st.floats() | st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1e308, -1e308, 5e-324])
int64s = st.integers(-(2**63), 2**63 - 1)


def same(left: Any, right: Any) -> bool:
    """Equal to the bit for doubles, where −0.0 is not 0.0 and every NaN is one."""
    if isinstance(left, float) and isinstance(right, float):
        return struct.pack("d", left) == struct.pack("d", right) or (math.isnan(left) and math.isnan(right))
    return type(left) is type(right) and bool(left == right)


def sums(values: list[Any]) -> Any:
    return sum(values) if values else None


def double_sum(values: list[float]) -> float | None:
    if not values:
        return None
    special = [x for x in values if not math.isfinite(x)]
    if special:
        return sum(special)  # of NaN and infinities, Python's own rule is ours
    try:
        return float(sum((Fraction(x) for x in values), Fraction(0))) + 0.0
    except OverflowError:
        return math.inf if sum((Fraction(x) for x in values), Fraction(0)) > 0 else -math.inf


def double_mean(values: list[float]) -> float | None:
    total = double_sum(values)
    if total is None or not values:
        return None
    if math.isinf(total) and all(math.isfinite(x) for x in values):
        scaled = float(sum((Fraction(x) for x in values), Fraction(0)) / 2**128)
        return scaled / len(values) * 2.0**128
    return total / len(values)


def rank(value: Any) -> Any:
    if isinstance(value, float):
        return (math.isnan(value), 0.0 if math.isnan(value) else value, math.copysign(1, value))
    return value


def lowest(values: list[Any]) -> Any:
    return min(values, key=rank, default=None)


def highest(values: list[Any]) -> Any:
    return max(values, key=rank, default=None)


CASES: list[Any] = [
    pytest.param(Count("x"), pa.float64(), doubles, None, id="count"),
    pytest.param(Count("x", "v"), pa.float64(), doubles, len, id="count-of-column"),
    pytest.param(Sum("x", "v"), pa.float64(), doubles, double_sum, id="sum-double"),
    pytest.param(Sum("x", "v", pa.float32()), pa.float32(), st.floats(width=32), double_sum, id="sum-float"),
    pytest.param(Sum("x", "v", pa.int64()), pa.int64(), st.integers(-(2**55), 2**55), sums, id="sum-int64"),
    pytest.param(Sum("x", "v", pa.uint8()), pa.uint8(), st.integers(0, 255), sums, id="sum-uint8"),
    pytest.param(Sum("x", "v", pa.uint64()), pa.uint64(), st.integers(0, 2**56), sums, id="sum-uint64"),
    pytest.param(
        Sum("x", "v", MONEY), MONEY, st.decimals(-(10**17), 10**17, places=2), sums, id="sum-decimal"
    ),
    pytest.param(Mean("x", "v"), pa.float64(), doubles, double_mean, id="mean-double"),
    pytest.param(
        Mean("x", "v", pa.int32()),
        pa.int32(),
        st.integers(-(2**31), 2**31 - 1),
        lambda values: sum(values) / len(values) if values else None,
        id="mean-int32",
    ),
    *(
        pytest.param(kind("x", "v", type_), type_, values, oracle, id=f"{kind.__name__.lower()}-{type_}")
        for kind, oracle in ((Min, lowest), (Max, highest))
        for type_, values in (
            (pa.float64(), doubles),
            (pa.float32(), st.floats(width=32)),
            (pa.int64(), int64s),
            (pa.uint64(), st.integers(0, 2**64 - 1)),
            (pa.int8(), st.integers(-128, 127)),
            (pa.bool_(), st.booleans()),
            (pa.string(), st.text(max_size=3)),
            (pa.binary(), st.binary(max_size=3)),
            (MONEY, st.decimals(-(10**17), 10**17, places=2)),
            (pa.date32(), st.dates(datetime.date(1950, 1, 1), datetime.date(2100, 1, 1))),
        )
    ),
]


def cut(random: Any, count: int) -> list[list[int]]:
    """Rows 0 … count in a random order, cut into random batches."""
    rows = list(range(count))
    random.shuffle(rows)
    batches: list[list[int]] = []
    while rows:
        size = random.randint(1, len(rows))
        batches.append(rows[:size])
        rows = rows[size:]
    return batches


def fold(aggregate: Aggregate, batch: pa.RecordBatch, groups: list[int], random: Any) -> list[pa.Array]:
    """States of shuffled, re-cut rows, merged pairwise in a random order; one state for each group."""
    everyone = np.arange(GROUPS, dtype=np.int32)
    empty = aggregate.partial(batch.slice(0, 0), np.empty(0, np.int32), GROUPS)
    states = [empty] if random.random() < 0.5 else []
    for rows in cut(random, batch.num_rows):
        part = batch.take(pa.array(rows, pa.int32()))
        states.append(aggregate.partial(part, np.array([groups[row] for row in rows], np.int32), GROUPS))
    while len(states) > 1:
        left, right = (states.pop(random.randrange(len(states))) for _ in range(2))
        both = [pa.concat_arrays([a, b]) for a, b in zip(left, right, strict=True)]
        states.append(aggregate.merge(both, np.concatenate([everyone, everyone]), GROUPS))
    return states[0] if states else empty


@pytest.mark.parametrize(("aggregate", "type_", "values", "oracle"), CASES)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), random=st.randoms(use_true_random=False))
def test_result_is_that_of_the_multiset_however_rows_are_shuffled_cut_and_merged(
    aggregate: Aggregate, type_: pa.DataType, values: Any, oracle: Any, data: Any, random: Any
) -> None:
    rows = data.draw(st.lists(st.tuples(st.integers(0, GROUPS - 1), st.none() | values), max_size=25))
    column = pa.array([value for _, value in rows], type_)
    batch, groups = pa.record_batch({"v": column}), [group for group, _ in rows]
    once, again = fold(aggregate, batch, groups, random), fold(aggregate, batch, groups, random)
    for left, right, field in zip(once, again, aggregate.state, strict=True):
        assert left.type == field.type
        assert [same(a, b) for a, b in zip(left.to_pylist(), right.to_pylist(), strict=True)] == [
            True
        ] * GROUPS
        left.validate(full=True)
    results = aggregate.finish(once)
    assert results.type == aggregate.result
    for group, got in enumerate(results.to_pylist()):
        stored = [value for value, of in zip(column.to_pylist(), groups, strict=True) if of == group]
        kept = [value for value in stored if value is not None]
        expected = len(stored) if oracle is None else oracle(kept)
        assert same(got, expected), (got, expected)


@pytest.mark.parametrize(("kind", "choose"), [(First, min), (Last, max)])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), random=st.randoms(use_true_random=False))
def test_first_and_last_go_by_event_time_partition_offset(
    kind: Any, choose: Any, data: Any, random: Any
) -> None:
    positions = st.tuples(st.integers(-2, 2), st.integers(0, 2), st.integers(0, 20))
    rows = data.draw(
        st.lists(
            st.tuples(st.integers(0, GROUPS - 1), positions, st.none() | st.text(max_size=2)),
            max_size=25,
            unique_by=lambda row: row[1],
        )
    )
    batch = pa.record_batch(
        {
            "v": pa.array([value for _, _, value in rows], pa.string()),
            "event_ts": pa.array([at[0] for _, at, _ in rows], pa.timestamp("ms", "UTC")),
            "partition": pa.array([at[1] for _, at, _ in rows], pa.int32()),
            "offset": pa.array([at[2] for _, at, _ in rows], pa.int64()),
        }
    )
    aggregate = kind("x", "v", pa.string())
    states = fold(aggregate, batch, [group for group, _, _ in rows], random)
    for group, got in enumerate(aggregate.finish(states).to_pylist()):
        among = [(at, value) for of, at, value in rows if of == group]
        assert got == (choose(among, key=lambda row: row[0])[1] if among else None)


def states_of(aggregate: Aggregate, values: Sequence[Any], type_: pa.DataType) -> list[pa.Array]:
    batch = pa.record_batch({"v": pa.array(values, type_)})
    return aggregate.partial(batch, np.zeros(len(values), np.int32), 1)


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        (pa.int64(), [2**63 - 1, 1]),
        (pa.int64(), [-(2**63), -1]),
        (pa.uint64(), [2**64 - 1]),
        (pa.decimal128(38, 0), [Decimal(10**38 - 1), Decimal(1)]),
    ],
    ids=str,
)
def test_a_sum_outside_its_type_is_an_error_and_only_if_it_stays_outside(
    type_: pa.DataType, values: Any
) -> None:
    aggregate = Sum("x", "v", type_)
    states = states_of(aggregate, values, type_)
    with pytest.raises(InvalidError, match="does not fit"):
        aggregate.finish(states)
    if not pa.types.is_unsigned_integer(type_):
        back = states_of(aggregate, [-value for value in values[1:]], type_)
        both = [pa.concat_arrays([states[0], back[0]])]
        merged = aggregate.merge(both, np.zeros(2, np.int32), 1)
        assert aggregate.finish(merged).to_pylist() == values[:1]


def test_a_mean_is_finite_where_the_sum_is_not() -> None:
    aggregate = Mean("x", "v")
    assert aggregate.finish(states_of(aggregate, [1.5e308] * 10, pa.float64())).to_pylist() == [1.5e308]
    assert aggregate.finish(states_of(aggregate, [1.0, math.inf], pa.float64())).to_pylist() == [math.inf]


def test_a_decimal_mean_is_a_double() -> None:
    aggregate = Mean("x", "v", MONEY)
    values = [Decimal("1.00"), Decimal("2.50"), None]
    assert aggregate.finish(states_of(aggregate, values, MONEY)).to_pylist() == [1.75]


def test_the_state_of_a_double_sum_is_compact() -> None:
    states = states_of(Sum("x", "v"), np.random.default_rng(1).random(1000).tolist(), pa.float64())
    assert len(states[0][0].as_py()) <= 2 + 4 * 4


def test_a_malformed_sum_is_corrupt_not_a_number() -> None:
    aggregate = Sum("x", "v")
    wrong = [pa.array([b"\0\1\2"], pa.binary())]
    with pytest.raises(CorruptError, match="malformed"):
        aggregate.merge(wrong, np.zeros(1, np.int32), 1)
    with pytest.raises(CorruptError, match="malformed"):
        aggregate.finish(wrong)


@pytest.mark.parametrize("kind", [Sum, Mean])
def test_what_cannot_be_summed_is_refused_when_it_is_declared(kind: Any) -> None:
    with pytest.raises(InvalidError, match="cannot be summed"):
        kind("x", "v", pa.string())


def test_what_has_no_order_is_refused() -> None:
    type_ = pa.list_(pa.int64())
    with pytest.raises(InvalidError, match="no order"):
        states_of(Min("x", "v", type_), [[1]], type_)


@pytest.mark.parametrize("aggregate", [Sum("x", "v"), Min("x", "v"), Count("x", "w")])
def test_an_input_that_is_absent_or_of_another_type_is_named(aggregate: Aggregate) -> None:
    batch = pa.record_batch({"v": pa.array([1], pa.int64())})
    with pytest.raises(InvalidError, match="column"):
        aggregate.partial(batch, np.zeros(1, np.int32), 1)


def test_first_refuses_rows_without_a_position() -> None:
    batch = pa.record_batch(
        {
            "v": pa.array([1.0]),
            "event_ts": pa.array([None], pa.int64()),
            "partition": pa.array([0], pa.int32()),
            "offset": pa.array([0], pa.int64()),
        }
    )
    with pytest.raises(InvalidError, match="orders rows"):
        First("x", "v", pa.float64()).partial(batch, np.zeros(1, np.int32), 1)


def by_group(values: pa.Array, groups: Any, count: int) -> list[pa.Array]:
    """The product of each group's values, by Arrow."""
    table = pa.table({"g": pa.array(groups), "v": values}).group_by("g").aggregate([("v", "product")])
    found = dict(zip(table["g"].to_pylist(), table["v_product"].to_pylist(), strict=True))
    return [pa.array([found.get(group, 1) for group in range(count)], pa.int64())]


def product(state_type: pa.DataType = INT64) -> Custom:
    return Custom(
        "x",
        ("v",),
        (pa.field("x", state_type),),
        pa.int64(),
        lambda rows, groups, count: by_group(rows.column("v"), groups, count),
        lambda states, groups, count: by_group(states[0], groups, count),
        lambda states: pc.negate(states[0]),
    )


def test_a_custom_aggregate_folds_by_its_functions() -> None:
    aggregate: Aggregate = product()
    states = states_of(aggregate, [2, 3, 7], pa.int64())
    merged = aggregate.merge([pa.concat_arrays(states * 2)], np.zeros(2, np.int32), 1)
    assert aggregate.finish(merged).to_pylist() == [-(42**2)]


def test_a_custom_aggregate_is_held_to_its_declared_state() -> None:
    with pytest.raises(InvalidError, match="partial answered"):
        states_of(product(pa.int32()), [2], pa.int64())
    with pytest.raises(InvalidError, match="name its state columns"):
        Custom("x", (), (pa.field("y", pa.int64()),), pa.int64(), *[lambda *_: []] * 3)  # type: ignore[arg-type]


def test_fingerprints_tell_aggregates_apart() -> None:
    all_of_them: list[Aggregate] = [
        Count("x"), Count("x", "v"), Sum("x", "v"), Sum("x", "w"), Sum("x", "v", pa.int64()), Mean("x", "v"),
        Min("x", "v"), Max("x", "v"), First("x", "v", pa.int64()), Last("x", "v", pa.int64()), product(),
    ]  # fmt: skip
    assert len({aggregate.fingerprint() for aggregate in all_of_them}) == len(all_of_them)
    spec = StoreSpec("s", Merge.FOLD, aggregates=(Count("n"), Mean("m", "v")))
    assert spec.payload.names == ["n", "m.sum", "m.count"]
