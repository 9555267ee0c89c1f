"""How many different values: exactly, by keeping them; approximately, by a HyperLogLog sketch.

Equal means: −0.0 and 0.0 are one value, all NaN are one value, text and bytes are compared byte by byte.

The sketch has 4096 registers (12 bits of the value's XXH64 choose one, it keeps the longest run of zeros met in the
other 52), a standard error of 1.04 / √4096 = 1.6 %, and is read with Ertl's improved estimator, which has no bias to
correct at small or large numbers (O. Ertl, New cardinality estimation algorithms for HyperLogLog sketches, 2017).
Its bytes, canonical for the set of values (layout: `kernels/aggregates.py`), are kept for ever: so is the hash.

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
from tidegate.storage.runs.aggregates import input_column
from tidegate.storage.runs.hashing import BinaryParts, UInt64s, binary_parts, hash_parts
from tidegate.storage.runs.picking import order_keys
from tidegate.windows.aggregates.lists import Int32s, cut_lists, list_lengths, members, without_nulls
from tidegate.windows.keys.binary_columns import make_binary, room_for

STANDARD_ERROR = 1.04 / REGISTERS**0.5


def one_of_equals(column: pa.Array) -> pa.Array:
    """The column with one zero and one NaN."""
    if not pa.types.is_floating(column.type):
        return column
    zero, nan = pa.scalar(0.0, column.type), pa.scalar(float("nan"), column.type)
    plain = pc.if_else(pc.equal(column, zero), zero, column)
    return pc.if_else(pc.is_nan(plain), nan, plain)


def refuse_incomparable(type_: pa.DataType) -> None:
    """Values are compared by their bytes: nested and encoded ones have none of their own."""
    if pa.types.is_nested(type_) or pa.types.is_dictionary(type_) or pa.types.is_null(type_):
        raise InvalidError(f"values of type {type_} cannot be told apart; choose a plain column, or cast it")


@dataclass(frozen=True, slots=True)
class _Distinct:
    name: str
    input: str
    type: pa.DataType

    def __post_init__(self) -> None:
        refuse_incomparable(self.type)

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input,)

    @property
    def result(self) -> pa.DataType:
        return pa.int64()

    def values(self, rows: pa.RecordBatch, groups: Int32s) -> tuple[pa.Array, Int32s]:
        column, groups = without_nulls(input_column(rows, self.name, self.input, self.type), groups)
        return one_of_equals(column), groups


class CountDistinct(_Distinct):
    """The exact number; the state is the sorted list of values."""

    __slots__ = ()

    @property
    def state(self) -> tuple[pa.Field, ...]:
        return (pa.field(self.name, pa.list_(self.type)),)

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
    """About the number; the state is a sketch."""

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
    """XXH64 of the bytes of every value; there are no nulls."""
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
