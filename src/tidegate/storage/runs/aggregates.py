"""Mergeable aggregates: input rows become states, states merge, a state becomes a result.

Results depend on the multiset of input rows alone, never on their order, nor on how they were cut into batches
and merged:

    count   rows, or values that are not null
    sum     whole numbers and decimals exactly (a result that does not fit its type is an error when it is
            read, not before); doubles exactly too, rounded once to the nearest when read. NaN, or infinities of
            both signs, make NaN; else an infinity wins; a sum of −0.0 alone is 0.0. No value at all: null
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
from typing import Protocol

import numpy as np
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.kernels.aggregates import add_numbers, count_rows
from tidegate.storage.runs.assembling import int64_column, words
from tidegate.storage.runs.exact_doubles import divide_sums, round_to_doubles, validity
from tidegate.storage.runs.hashing import Int32s
from tidegate.storage.runs.picking import order_keys, pick, take_picked
from tidegate.storage.runs.summing import (
    divide_doubles,
    merge_states,
    refuse_unsummable,
    sum_state,
    sum_values,
)

_DOUBLE, _INT64, _INT32 = pa.float64(), pa.int64(), pa.int32()
_NO_BYTES = np.empty(0, np.uint8)


class Aggregate(Protocol):
    """What a fold does to the rows of one identity."""

    @property
    def name(self) -> str: ...

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns it reads of the rows that come in."""

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
        """Changes when states of before could no longer be merged with states of now."""


def input_column(rows: pa.RecordBatch, aggregate: str, name: str, type_: pa.DataType | None) -> pa.Array:
    """An aggregate's input, refused when it is absent or of another type."""
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
    """How many rows there are, or with `input`, how many of its values are not null."""

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
class Sum:
    """The sum of a column: int64 for whole numbers, decimal128 for decimals, double for doubles."""

    name: str
    input: str
    type: pa.DataType = _DOUBLE

    def __post_init__(self) -> None:
        refuse_unsummable(self.name, self.type)

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input,)

    @property
    def state(self) -> tuple[pa.Field, ...]:
        return (pa.field(self.name, sum_state(self.type)),)

    @property
    def result(self) -> pa.DataType:
        if pa.types.is_decimal(self.type):
            return pa.decimal128(38, self.type.scale)
        return _INT64 if pa.types.is_integer(self.type) else _DOUBLE

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        return [sum_values(input_column(rows, self.name, self.input, self.type), groups, count)]

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

    def fingerprint(self) -> str:
        return f"sum/1({self.input}:{self.type})"


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of a column, as a double."""

    name: str
    input: str
    type: pa.DataType = _DOUBLE

    def __post_init__(self) -> None:
        refuse_unsummable(self.name, self.type)

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input,)

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
        column = input_column(rows, self.name, self.input, self.type)
        counts = np.zeros(count, np.int64)
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
        return divide_doubles(sums.cast(_DOUBLE), np.maximum(words(counts), 1))

    def fingerprint(self) -> str:
        return f"mean/1({self.input}:{self.type})"


@dataclass(frozen=True, slots=True)
class _Extreme:
    name: str
    input: str
    type: pa.DataType = _DOUBLE

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input,)

    @property
    def state(self) -> tuple[pa.Field, ...]:
        return (pa.field(self.name, self.type),)

    @property
    def result(self) -> pa.DataType:
        return self.type

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        return self.merge([input_column(rows, self.name, self.input, self.type)], groups, count)

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        picked = pick((order_keys(states[0]),), states[0], groups, count, highest=self.is_highest)
        return [take_picked(states[0], picked)]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return states[0]

    @property
    def is_highest(self) -> bool:
        raise NotImplementedError

    def fingerprint(self) -> str:
        return f"{type(self).__name__.lower()}/1({self.input}:{self.type})"


class Min(_Extreme):
    """The lowest value of a column that can be ordered."""

    __slots__ = ()

    @property
    def is_highest(self) -> bool:
        return False


class Max(_Extreme):
    """The highest value of a column that can be ordered."""

    __slots__ = ()

    @property
    def is_highest(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class _Edge:
    name: str
    input: str
    type: pa.DataType
    position: tuple[str, str, str] = ("event_ts", "partition", "offset")
    """The columns with the event time (int64, or a timestamp), the source partition and the offset."""

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

    @property
    def result(self) -> pa.DataType:
        return self.type

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        value = input_column(rows, self.name, self.input, self.type)
        columns = [input_column(rows, self.name, name, None) for name in self.position]
        for name, column in zip(self.position, columns, strict=True):
            if column.null_count:
                raise InvalidError(f"aggregate {self.name}: column {name} orders rows and has nulls")
        wanted = zip(columns, (_INT64, _INT32, _INT64), strict=True)
        return self.merge([value, *(column.cast(type_) for column, type_ in wanted)], groups, count)

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        keys = tuple(order_keys(column) for column in states[1:])
        picked = pick(keys, states[1], groups, count, highest=self.is_highest)
        return [take_picked(column, picked) for column in states]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return states[0]

    @property
    def is_highest(self) -> bool:
        raise NotImplementedError

    def fingerprint(self) -> str:
        return f"{type(self).__name__.lower()}/1({self.input}:{self.type};{','.join(self.position)})"


class First(_Edge):
    """The value at the lowest (event time, partition, offset)."""

    __slots__ = ()

    @property
    def is_highest(self) -> bool:
        return False


class Last(_Edge):
    """The value at the highest (event time, partition, offset)."""

    __slots__ = ()

    @property
    def is_highest(self) -> bool:
        return True


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
