"""Aggregates that keep values: lists (`collect`, `top_k`) and distinct counts.

A state is always sorted, so the same records give the same state however they were batched and merged. Equality: −0.0
and 0.0 are one value, all NaN are one value, text and bytes are compared byte by byte.

The sketch of approximate distinct counts is a HyperLogLog of 4096 registers over XXH64 (standard error 1.6 %), read
with Ertl's improved estimator (New cardinality estimation algorithms for HyperLogLog sketches, 2017). Its bytes,
canonical for the set of values (layout: `kernels/aggregates.py`), are a stored format, and so is the hash.

Thread rule: pure values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import CorruptError, InvalidError
from tidegate.kernels.aggregates import LARGEST, REGISTERS, estimate_sketches, merge_sketches, sketch_hashes
from tidegate.storage.runs.aggregates import input_column, order_keys
from tidegate.storage.runs.columns import BinaryParts, UInt64s, binary_parts, hash_parts, int64_column, words
from tidegate.windows.keys import make_binary, room_for

# --- lists

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


def members(lists: pa.ListArray, groups: Int32s) -> tuple[pa.Array, Int32s]:
    """Return the values of all lists, concatenated, and the group of each value's list."""
    return lists.flatten(), np.repeat(groups, list_lengths(lists))


def list_lengths(lists: pa.ListArray) -> Int64s:
    lengths: Int64s = (
        pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    )
    return lengths


def cut_lists(values: pa.Array, rows: Int64s, groups: Int32s, count: int) -> pa.ListArray:
    """Return `values[rows]` as one list for each of `count` groups; `groups` are those of the rows and ascend."""
    ends = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(groups, minlength=count), out=ends[1:])
    return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), values.take(int64_column(rows)))


def ranks_in_groups(groups: Int32s) -> Int64s:
    """Return the number of each row inside its group; `groups` ascend."""
    places = np.arange(len(groups), dtype=np.int64)
    if not len(groups):
        return places
    is_first = np.empty(len(groups), np.bool_)
    is_first[0], is_first[1:] = True, groups[1:] != groups[:-1]
    return places - np.maximum.accumulate(np.where(is_first, places, 0))


def without_nulls(column: pa.Array, groups: Int32s) -> tuple[pa.Array, Int32s]:
    if not column.null_count:
        return column, groups
    valid = column.is_valid()
    return column.filter(valid), groups[valid.to_numpy(zero_copy_only=False)]


@dataclass(frozen=True, slots=True)
class _OfColumn:
    """The base of aggregates of one column."""

    name: str
    input: str
    type: pa.DataType

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input,)

    @property
    def state(self) -> tuple[pa.Field, ...]:
        return (pa.field(self.name, pa.list_(self.type)),)

    @property
    def result(self) -> pa.DataType:
        return pa.list_(self.type)

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return states[0]


@dataclass(frozen=True, slots=True)
class TopK(_OfColumn):
    """The k largest values, the largest first; NaN is larger than every number."""

    k: int

    def __post_init__(self) -> None:
        order_keys(pa.array([], self.type))  # refuses types without an order

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        return self._largest(
            *without_nulls(input_column(rows, self.name, self.input, self.type), groups), count
        )

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        return self._largest(*members(states[0], groups), count)

    def fingerprint(self) -> str:
        return f"top_k/1({self.input}:{self.type};{self.k})"

    def _largest(self, values: pa.Array, groups: Int32s, count: int) -> list[pa.Array]:
        order = np.lexsort((~order_keys(values), groups))
        order = order[ranks_in_groups(groups[order]) < self.k]
        return [cut_lists(values, order, groups[order], count)]


@dataclass(frozen=True, slots=True)
class Collect(_OfColumn):
    """All values, or the first `limit`, in the order of (event time, source partition, offset); nulls included."""

    position: tuple[str, str, str]
    limit: int | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input, *self.position)

    @property
    def state(self) -> tuple[pa.Field, ...]:
        return (
            pa.field(self.name, pa.list_(self.type)),
            pa.field(f"{self.name}.ts", pa.list_(pa.int64())),
            pa.field(f"{self.name}.partition", pa.list_(pa.int32())),
            pa.field(f"{self.name}.offset", pa.list_(pa.int64())),
        )

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        columns = [input_column(rows, self.name, self.input, self.type)]
        for name, type_ in zip(self.position, (pa.int64(), pa.int32(), pa.int64()), strict=True):
            column = input_column(rows, self.name, name, None)
            if column.null_count:
                raise InvalidError(f"aggregate {self.name}: column {name} orders rows and has nulls")
            columns.append(column.cast(type_))
        return self._sorted(columns, groups, count)

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        groups_of_values = np.repeat(groups, list_lengths(states[0]))
        return self._sorted([column.flatten() for column in states], groups_of_values, count)

    def fingerprint(self) -> str:
        return f"collect/1({self.input}:{self.type};{','.join(self.position)};{self.limit})"

    def _sorted(self, columns: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        _, ts, partition, offset = columns
        order = np.lexsort((words(offset), partition.to_numpy(), words(ts), groups))
        if self.limit is not None:
            order = order[ranks_in_groups(groups[order]) < self.limit]
        return [cut_lists(column, order, groups[order], count) for column in columns]


# --- different values

STANDARD_ERROR = 1.04 / REGISTERS**0.5


def one_of_equals(column: pa.Array) -> pa.Array:
    """Return the column with one zero and one NaN."""
    if not pa.types.is_floating(column.type):
        return column
    zero, nan = pa.scalar(0.0, column.type), pa.scalar(float("nan"), column.type)
    plain = pc.if_else(pc.equal(column, zero), zero, column)
    return pc.if_else(pc.is_nan(plain), nan, plain)


def refuse_incomparable(type_: pa.DataType) -> None:
    """Refuse nested and encoded types: values are compared by their bytes, and these have no unique ones."""
    if pa.types.is_nested(type_) or pa.types.is_dictionary(type_) or pa.types.is_null(type_):
        raise InvalidError(f"values of type {type_} cannot be told apart; choose a plain column, or cast it")


@dataclass(frozen=True, slots=True)
class _Distinct(_OfColumn):
    def __post_init__(self) -> None:
        refuse_incomparable(self.type)

    @property
    def result(self) -> pa.DataType:
        return pa.int64()

    def values(self, rows: pa.RecordBatch, groups: Int32s) -> tuple[pa.Array, Int32s]:
        column, groups = without_nulls(input_column(rows, self.name, self.input, self.type), groups)
        return one_of_equals(column), groups


class CountDistinct(_Distinct):
    """The exact number of distinct values; the state is the sorted list of values."""

    __slots__ = ()

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        return self._each_once(*self.values(rows, groups), count)

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        return self._each_once(*members(states[0], groups), count)

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return pa.array(list_lengths(states[0]))

    def fingerprint(self) -> str:
        return f"count_distinct/1({self.input}:{self.type})"

    def _each_once(self, values: pa.Array, groups: Int32s, count: int) -> list[pa.Array]:
        keys = order_keys(values)
        order = np.lexsort((keys, groups))
        keys, sorted_groups = keys[order], groups[order]
        is_new = np.ones(len(order), np.bool_)
        is_new[1:] = (keys[1:] != keys[:-1]) | (sorted_groups[1:] != sorted_groups[:-1])
        return [cut_lists(values, order[is_new], sorted_groups[is_new], count)]


class ApproxCountDistinct(_Distinct):
    """An estimate of the number of distinct values; the state is a sketch."""

    __slots__ = ()

    @property
    def state(self) -> tuple[pa.Field, ...]:
        return (pa.field(self.name, pa.binary()),)

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        values, groups = self.values(rows, groups)
        hashes, order = value_hashes(values), np.argsort(groups, kind="stable")
        starts = np.searchsorted(groups[order], np.arange(count + 1))
        room = int(np.minimum(1 + 3 * np.diff(starts), LARGEST).sum())
        ends, content = np.empty(count + 1, np.int32), np.empty(room_for(room, "sketches"), np.uint8)
        sketch_hashes(hashes, order, starts, np.zeros(REGISTERS, np.uint8), ends, content)
        return [make_binary(ends, content[: ends[-1]], None)]

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        parts, order = binary_parts(states[0]), np.argsort(groups, kind="stable")
        starts = np.searchsorted(groups[order], np.arange(count + 1))
        room = int(parts.bounds[-1] - parts.bounds[0]) + count
        ends, content = np.empty(count + 1, np.int32), np.empty(room_for(room, "sketches"), np.uint8)
        wrong = merge_sketches(*parts, order, starts, np.zeros(REGISTERS, np.uint8), ends, content)
        if wrong >= 0:
            raise CorruptError(f"aggregate {self.name}: state {wrong} is no sketch of distinct values")
        return [make_binary(ends, content[: ends[-1]], None)]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        numbers = np.empty(len(states[0]), np.float64)
        wrong = estimate_sketches(*binary_parts(states[0]), numbers)
        if wrong >= 0:
            raise CorruptError(f"aggregate {self.name}: state {wrong} is no sketch of distinct values")
        return pa.array(np.rint(numbers).astype(np.int64))

    def fingerprint(self) -> str:
        return f"approx_count_distinct/1({self.input}:{self.type})"


def value_hashes(column: pa.Array) -> UInt64s:
    """Return the XXH64 of the bytes of every value; there are no nulls."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    has_width = (pa.types.is_primitive, pa.types.is_decimal, pa.types.is_fixed_size_binary)
    if not any(check(column.type) for check in has_width):
        return hash_parts(binary_parts(column))
    width, rows = column.type.bit_width // 8, len(column)
    if not rows:
        return np.empty(0, np.uint64)
    data = np.frombuffer(column.buffers()[1], np.uint8)
    first = column.offset * width
    bounds: npt.NDArray[np.int64] = first + width * np.arange(rows + 1, dtype=np.int64)
    room_for(int(bounds[-1]), "a column to count")
    return hash_parts(BinaryParts(data, bounds.astype(np.int32)))
