"""Mergeable aggregates: input rows become states, states merge, a state becomes a result.

Results depend on the multiset of input rows alone, never on their order, nor on how they were cut into batches
and merged:

    count   rows, or values that are not null
    sum     whole numbers and decimals exactly, in 128 or 256 bits (a result that does not fit its type is an error when
            it is read, not before); doubles exactly too (`kernels/aggregates.py`), rounded once to the nearest when
            read. NaN, or infinities of both signs, make NaN; else an infinity wins; a sum of −0.0 alone is 0.0. No
            value at all: null
    mean    the sum as a double, divided by the number of values; a double for every type
    min max NaN lies above every number (so min is NaN only when all are; Spark's order), −0.0 below 0.0
    first   the value at the lowest (event time, partition, offset), a null value too; last at the highest.
    last    A position names one record, so rows at the same position are the same row
    custom  what its functions do

Nulls are left out by count(column), sum, mean, min, max. Thread rule: pure values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import CorruptError, InvalidError
from tidegate.kernels.aggregates import (
    HEADER,
    MOST_BITS,
    MOST_DIGITS,
    NO_POSITION,
    add_doubles,
    add_narrow,
    add_numbers,
    add_sums,
    add_wide,
    count_malformed,
    count_rows,
    lay_out,
    pick_rows,
    round_sums,
    settle,
    span_doubles,
    span_exponents,
    span_sums,
    write_narrow,
    write_sums,
)
from tidegate.storage.runs.columns import (
    NO_NUMBERS,
    Int32s,
    binary_parts,
    int64_column,
    numbers_column,
    words,
)
from tidegate.storage.runs.run import Int64s

# -- exact sums of doubles ---------------------------------------------------------------------------

Bytes = npt.NDArray[np.uint8]
_NO_BYTES = np.empty(0, np.uint8)
_DOUBLE, _INT64, _INT32, _BINARY = pa.float64(), pa.int64(), pa.int32(), pa.binary()
_INFINITE = 0x7FF  # the exponent bits of what is not finite
_MOST_BYTES = HEADER + 4 * MOST_DIGITS
_INFINITY_SCALE = 128  # sums of fewer than 2^64 doubles stay below 2^1088


def validity(column: pa.Array) -> tuple[Bytes, int]:
    """The validity bitmap of a column and the bit of its first row; no bytes when nothing is null."""
    if not column.null_count:
        return _NO_BYTES, 0
    return np.frombuffer(column.buffers()[0], np.uint8), column.offset


def sum_doubles(column: pa.Array, groups: Int32s, count: int) -> pa.Array:
    """The exact sum of each group's values; `column` is float64."""
    values, valid = words(column), validity(column)
    low, high = span_exponents(values, *valid)
    # the exponent span plus fraction, sign, and the carries of that many additions
    if high < _INFINITE and max(high - low, 0) + 53 + len(values).bit_length() + 1 <= MOST_BITS:
        return _sum_narrow(values, valid, groups, count, low if high else 1)
    lows, highs, flags = _begin(count)
    span_doubles(values, *valid, groups, lows, highs, flags)
    return _write(
        lows, highs, flags, lambda places, limbs: add_doubles(values, *valid, groups, lows, places, limbs)
    )


def _sum_narrow(values: Int64s, valid: tuple[Bytes, int], groups: Int32s, count: int, low: int) -> pa.Array:
    sums = np.zeros(2 * count, np.uint64)
    add_narrow(values, *valid, groups, low, sums)
    bounds, bitmap = np.empty(count + 1, np.int32), np.zeros((count + 7) // 8, np.uint8)
    data = np.empty(count * _MOST_BYTES, np.uint8)
    data.resize(
        write_narrow(sums, low, bounds, data, bitmap), refcheck=False
    )  # gives back what was not needed
    return _column(count, bounds, data, bitmap)


def merge_sums(column: pa.Array, groups: Int32s, count: int) -> pa.Array:
    """The exact sum of each group's sums."""
    parts, valid = binary_parts(column), validity(column)
    _refuse_malformed(column)
    lows, highs, flags = _begin(count)
    span_sums(*parts, *valid, groups, lows, highs, flags)
    return _write(
        lows, highs, flags, lambda places, limbs: add_sums(*parts, *valid, groups, lows, places, limbs)
    )


def round_to_doubles(column: pa.Array, *, scale: int = 0) -> pa.Array:
    """The double nearest to each sum times 2^-scale, infinite when it is too large for one."""
    _refuse_malformed(column)
    results = np.empty(len(column), np.uint64)
    round_sums(*binary_parts(column), *validity(column), scale, results)
    return with_nulls_of(column, results.view(np.float64), pa.float64())


def divide_sums(column: pa.Array, counts: Int64s) -> pa.Array:
    """Each sum divided by a number above zero; finite also where the sum alone is not."""
    sums = round_to_doubles(column)
    doubles = words(sums).view(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = doubles / counts
        if np.isinf(means).any():
            scaled = words(round_to_doubles(column, scale=_INFINITY_SCALE)).view(np.float64)
            means = np.where(np.isinf(means), scaled / counts * 2.0**_INFINITY_SCALE, means)
    return with_nulls_of(column, means, pa.float64())


def with_nulls_of(column: pa.Array, values: npt.NDArray[np.float64], type_: pa.DataType) -> pa.Array:
    """`values` as a column that is null where `column` is."""
    if not column.null_count:
        return numbers_column(type_, values)
    return pa.array(values, type_, mask=column.is_null().to_numpy(zero_copy_only=False))


def _refuse_malformed(column: pa.Array) -> None:
    malformed = count_malformed(*binary_parts(column), *validity(column))
    if malformed:
        raise CorruptError(
            f"{malformed} of {len(column)} sums of doubles are malformed; restore from a checkpoint"
        )


def _begin(count: int) -> tuple[Bytes, Bytes, Bytes]:
    return np.full(count, NO_POSITION, np.uint8), np.zeros(count, np.uint8), np.zeros(count, np.uint8)


def _write(lows: Bytes, highs: Bytes, flags: Bytes, add: Callable[[Int64s, Int64s], None]) -> pa.Array:
    count = len(lows)
    places, bounds = np.empty(count + 1, np.int64), np.empty(count + 1, np.int32)
    limbs = np.zeros(lay_out(lows, highs, flags, places), np.int64)
    add(places, limbs)
    size = settle(limbs, lows, flags, places, bounds)
    if size < 0:
        raise InvalidError(f"sums of {count} groups need more than 2 GiB; append smaller batches")
    data, valid = np.empty(size, np.uint8), np.zeros((count + 7) // 8, np.uint8)
    write_sums(limbs, lows, flags, places, bounds, data, valid)
    return _column(count, bounds, data, valid)


def _column(count: int, bounds: Int32s, data: Bytes, valid: Bytes) -> pa.Array:
    null_count = count - int(np.bitwise_count(valid).sum())
    buffers = [pa.py_buffer(valid) if null_count else None, pa.py_buffer(bounds), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), count, buffers, null_count)


# -- states of sums ----------------------------------------------------------------------------------

_WHOLE = pa.decimal128(38, 0)


def sum_state(type_: pa.DataType) -> pa.DataType:
    """The state type of a sum of this type, wide enough that no order of addition overflows."""
    if pa.types.is_decimal(type_):
        return pa.decimal256(76, type_.scale)
    return _WHOLE if pa.types.is_integer(type_) else _BINARY


def sum_values(column: pa.Array, groups: Int32s, count: int) -> pa.Array:
    """The sum of each group's values, as a state; null where there is none."""
    if pa.types.is_floating(column.type):
        return sum_doubles(column.cast(_DOUBLE), groups, count)
    if pa.types.is_integer(column.type):
        if column.type == pa.uint64():
            return _add(column.cast(pa.decimal128(20, 0)), 2, groups, count, _WHOLE)
        return _add(column.cast(_INT64), 1, groups, count, _WHOLE)
    return _add(column, 2, groups, count, sum_state(column.type))


def merge_states(column: pa.Array, groups: Int32s, count: int) -> pa.Array:
    """The sum of each group's states."""
    if column.type == _BINARY:
        return merge_sums(column, groups, count)
    return _add(column, column.type.byte_width // 8, groups, count, column.type)


def _add(column: pa.Array, value_words: int, groups: Int32s, count: int, type_: pa.DataType) -> pa.Array:
    """Sums of whole numbers of 64-bit words."""
    sum_words = type_.byte_width // 8
    sums, seen = np.zeros(count * sum_words, np.uint64), np.zeros(count, np.uint8)
    if len(column):
        at = 8 * value_words * column.offset
        values = np.frombuffer(column.buffers()[1], np.uint64, len(column) * value_words, at)
        add_wide(values, value_words, *validity(column), groups, sum_words, sums, seen)
    null_count = count - int(np.count_nonzero(seen))
    bitmap = pa.py_buffer(np.packbits(seen, bitorder="little")) if null_count else None
    return pa.Array.from_buffers(type_, count, [bitmap, pa.py_buffer(sums)], null_count)


# -- one row of each group ---------------------------------------------------------------------------

_LOWEST = np.int64(-(2**63))
_HIGHEST = np.int64(2**63 - 1)


def order_keys(column: pa.Array) -> Int64s:
    """Integers in the order of the values; NaN above every number, −0.0 below 0.0. Undefined where null."""
    type_ = column.type
    if pa.types.is_floating(type_):
        doubles = words(column.cast(_DOUBLE))
        keys = np.where(doubles < 0, doubles ^ _HIGHEST, doubles)
        keys[np.isnan(doubles.view(np.float64))] = _HIGHEST
        return keys
    if type_ == pa.uint64():
        return words(column) ^ _LOWEST
    if pa.types.is_integer(type_) or pa.types.is_boolean(type_):
        return words(column.cast(_INT64))
    if pa.types.is_temporal(type_) and not pa.types.is_interval(type_):
        if type_.bit_width == 32:
            return words(column.view(pa.int32()).cast(_INT64))
        return words(column)
    try:
        ranks: Int64s = pc.rank(column, tiebreaker="dense").to_numpy().view(np.int64)
        return ranks
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        raise InvalidError(
            f"values of type {type_} have no order ({error}); choose another column"
        ) from error


def pick(keys: tuple[Int64s, ...], nulls: pa.Array, groups: Int32s, count: int, *, highest: bool) -> Int32s:
    """The row of each group with the highest or lowest of one or three keys; -1 where all of `nulls` are null."""
    first, second, third = keys if len(keys) == 3 else (keys[0], NO_NUMBERS, NO_NUMBERS)
    picked = np.full(count, -1, np.int32)
    pick_rows(first, second, third, *validity(nulls), groups, int(highest), picked)
    return picked


def take_picked(column: pa.Array, picked: Int32s) -> pa.Array:
    """The values at the picked rows, null for none; every NaN the same NaN."""
    absent = picked < 0
    taken = column.take(pa.array(picked, mask=absent if absent.any() else None))
    if pa.types.is_floating(taken.type):
        is_nan = pc.is_nan(taken)
        if pc.any(is_nan).as_py():
            taken = pc.if_else(is_nan, pa.scalar(float("nan"), taken.type), taken)
    return taken


# -- aggregates --------------------------------------------------------------------------------------


class Aggregate(Protocol):
    """An aggregate of a fold store: how rows of one identity are combined."""

    @property
    def name(self) -> str: ...

    @property
    def inputs(self) -> tuple[str, ...]:
        """The input columns it reads."""

    @property
    def state(self) -> tuple[pa.Field, ...]:
        """The columns of a state, named `name` or `name.part`."""

    @property
    def result(self) -> pa.DataType: ...

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        """One state for each of `count` groups; `groups[i]` is the group of input row i, in any order."""

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        """One state for each of `count` groups out of many; `groups[i]` is the group of state i."""

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        """The result of every state."""

    def fingerprint(self) -> str:
        """An id that changes when older states can no longer be merged with new ones."""


def input_column(rows: pa.RecordBatch, aggregate: str, name: str, type_: pa.DataType | None) -> pa.Array:
    """An aggregate's input column; raises if it is missing or of another type."""
    place = rows.schema.get_field_index(name)
    if place < 0:
        raise InvalidError(f"aggregate {aggregate}: no single column {name!r} among {rows.schema.names}")
    column = rows.column(place)
    if type_ is not None and column.type != type_:
        raise InvalidError(
            f"aggregate {aggregate}: column {name} is {column.type}, declared {type_}; cast it"
        )
    return column


@dataclass(frozen=True, slots=True)
class Count:
    """The number of rows, or of non-null values of `input`."""

    name: str
    input: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        return () if self.input is None else (self.input,)

    @property
    def state(self) -> tuple[pa.Field, ...]:
        return (pa.field(self.name, _INT64, nullable=False),)

    @property
    def result(self) -> pa.DataType:
        return _INT64

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        valid, start = _NO_BYTES, 0
        if self.input is not None:
            valid, start = validity(input_column(rows, self.name, self.input, None))
        counts = np.zeros(count, np.int64)
        count_rows(valid, start, groups, counts)
        return [int64_column(counts)]

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        counts = np.zeros(count, np.int64)
        add_numbers(words(states[0]), groups, counts)
        return [int64_column(counts)]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return states[0]

    def fingerprint(self) -> str:
        return f"count/1({self.input or '*'})"


@dataclass(frozen=True, slots=True)
class _OfColumn:
    """Base of the aggregates of one column."""

    name: str
    input: str
    type: pa.DataType = _DOUBLE
    is_sum: ClassVar[bool] = False

    def __post_init__(self) -> None:
        kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal128)
        if self.is_sum and not any(is_kind(self.type) for is_kind in kinds):
            raise InvalidError(
                f"aggregate {self.name}: {self.type} cannot be summed; cast to a number or decimal128"
            )

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input,)

    @property
    def result(self) -> pa.DataType:
        return self.type

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return states[0]

    def fingerprint(self) -> str:
        return f"{type(self).__name__.lower()}/1({self.input}:{self.type})"

    def _column(self, rows: pa.RecordBatch) -> pa.Array:
        return input_column(rows, self.name, self.input, self.type)


class Sum(_OfColumn):
    """The sum of a column: int64 for whole numbers, decimal128 for decimals, double for doubles."""

    __slots__ = ()
    is_sum = True

    @property
    def state(self) -> tuple[pa.Field, ...]:
        return (pa.field(self.name, sum_state(self.type)),)

    @property
    def result(self) -> pa.DataType:
        if pa.types.is_decimal(self.type):
            return pa.decimal128(38, self.type.scale)
        return _INT64 if pa.types.is_integer(self.type) else _DOUBLE

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        return [sum_values(self._column(rows), groups, count)]

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        return [merge_states(states[0], groups, count)]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        if pa.types.is_floating(self.type):
            return round_to_doubles(states[0])
        try:
            return states[0].cast(self.result)
        except pa.ArrowInvalid as error:
            raise InvalidError(
                f"aggregate {self.name}: a sum of {self.input} does not fit {self.result} ({error}); "
                "sum a wider type or smaller windows"
            ) from error


class Mean(_OfColumn):
    """The mean of a column, as a double."""

    __slots__ = ()
    is_sum = True

    @property
    def state(self) -> tuple[pa.Field, ...]:
        return (
            pa.field(f"{self.name}.sum", sum_state(self.type)),
            pa.field(f"{self.name}.count", _INT64, nullable=False),
        )

    @property
    def result(self) -> pa.DataType:
        return _DOUBLE

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        column, counts = self._column(rows), np.zeros(count, np.int64)
        count_rows(*validity(column), groups, counts)
        return [sum_values(column, groups, count), int64_column(counts)]

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        counts = np.zeros(count, np.int64)
        add_numbers(words(states[1]), groups, counts)
        return [merge_states(states[0], groups, count), int64_column(counts)]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        sums, counts = states
        if pa.types.is_floating(self.type):
            return divide_sums(sums, np.maximum(words(counts), 1))
        doubles = sums.cast(_DOUBLE)
        return with_nulls_of(sums, words(doubles).view(np.float64) / np.maximum(words(counts), 1), _DOUBLE)


class _Extreme(_OfColumn):
    __slots__ = ()
    is_highest: ClassVar[bool]

    @property
    def state(self) -> tuple[pa.Field, ...]:
        return (pa.field(self.name, self.type),)

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        return self.merge([self._column(rows)], groups, count)

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        picked = pick((order_keys(states[0]),), states[0], groups, count, highest=self.is_highest)
        return [take_picked(states[0], picked)]


class Min(_Extreme):
    """The lowest value of a column that can be ordered."""

    __slots__ = ()
    is_highest = False


class Max(_Extreme):
    """The highest value of a column that can be ordered."""

    __slots__ = ()
    is_highest = True


@dataclass(frozen=True, slots=True)
class _Edge(_OfColumn):
    position: tuple[str, str, str] = ("event_ts", "partition", "offset")
    """The columns with the event time (int64, or a timestamp), the source partition and the offset."""

    is_highest: ClassVar[bool]

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input, *self.position)

    @property
    def state(self) -> tuple[pa.Field, ...]:
        return (
            pa.field(self.name, self.type),
            pa.field(f"{self.name}.ts", _INT64),
            pa.field(f"{self.name}.partition", _INT32),
            pa.field(f"{self.name}.offset", _INT64),
        )

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        columns = [input_column(rows, self.name, name, None) for name in self.position]
        for name, column in zip(self.position, columns, strict=True):
            if column.null_count:
                raise InvalidError(f"aggregate {self.name}: column {name} orders rows and has nulls")
        wanted = zip(columns, (_INT64, _INT32, _INT64), strict=True)
        cursor = [column.cast(type_) for column, type_ in wanted]
        return self.merge([self._column(rows), *cursor], groups, count)

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        keys = tuple(order_keys(column) for column in states[1:])
        picked = pick(keys, states[1], groups, count, highest=self.is_highest)
        return [take_picked(column, picked) for column in states]

    def fingerprint(self) -> str:
        return f"{type(self).__name__.lower()}/1({self.input}:{self.type};{','.join(self.position)})"


class First(_Edge):
    """The value at the lowest (event time, partition, offset)."""

    __slots__ = ()
    is_highest = False


class Last(_Edge):
    """The value at the highest (event time, partition, offset)."""

    __slots__ = ()
    is_highest = True


@dataclass(frozen=True, slots=True)
class Custom:
    """A user's aggregate: three functions over Arrow columns, and the types they keep to.

    The functions get what `Aggregate` describes and must not depend on the order of rows or states if results
    shall not. `version` goes into the fingerprint: change it when old states no longer merge with new ones.
    """

    name: str
    inputs: tuple[str, ...]
    state: tuple[pa.Field, ...]
    result: pa.DataType
    partial_with: Callable[[pa.RecordBatch, Int32s, int], Sequence[pa.Array]]
    merge_with: Callable[[Sequence[pa.Array], Int32s, int], Sequence[pa.Array]]
    finish_with: Callable[[Sequence[pa.Array]], pa.Array]
    version: str = "1"

    def __post_init__(self) -> None:
        wrong = [f.name for f in self.state if f.name != self.name and not f.name.startswith(f"{self.name}.")]
        if wrong or not self.state:
            raise InvalidError(
                f"aggregate {self.name}: name its state columns {self.name!r} or {self.name!r}.part"
            )

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        return self._checked("partial", self.partial_with(rows, groups, count), count)

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        return self._checked("merge", self.merge_with(states, groups, count), count)

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return self.finish_with(states)

    def _checked(self, step: str, columns: Sequence[pa.Array], count: int) -> list[pa.Array]:
        types = [column.type for column in columns]
        if types != [field.type for field in self.state] or any(len(column) != count for column in columns):
            lengths = [len(column) for column in columns]
            raise InvalidError(
                f"aggregate {self.name}: {step} answered {types} of {lengths} rows; "
                f"its state is {[str(field.type) for field in self.state]} of {count}"
            )
        return list(columns)

    def fingerprint(self) -> str:
        return (
            f"custom/{self.version}({self.name};{','.join(self.inputs)};{[str(f.type) for f in self.state]})"
        )
