"""Aggregates that can be undone: each row counts `at:weight` times, and -1 takes back what a row added before.

They are exact, so what is left does not depend on what came and went: a count, a sum or a mean equals that of the rows
that are left. NaN and infinities are counted beside the sum of the finite values, since a sum cannot give them back.

Minimum, maximum, first, last, distinct values, the largest, lists and reducers cannot be undone: what a row displaced
is not kept.

Thread rule: pure values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.kernels.aggregates import add_numbers
from tidegate.storage import Mean, Sum
from tidegate.storage.runs.aggregates import input_column
from tidegate.storage.runs.assembling import int64_column, words
from tidegate.storage.runs.hashing import Int32s

WEIGHT: Final = "at:weight"
_INT64, _DOUBLE = pa.int64(), pa.float64()
_NOT_FINITE: Final = ("nan", "above", "below")  # NaN, infinity, minus infinity


@dataclass(frozen=True, slots=True)
class RetractableCount:
    """How many rows are left, or with `input`, how many of its values that are not null."""

    name: str
    input: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        return (WEIGHT,) if self.input is None else (self.input, WEIGHT)

    @property
    def state(self) -> tuple[pa.Field, ...]:
        return (pa.field(self.name, _INT64, nullable=False),)

    @property
    def result(self) -> pa.DataType:
        return _INT64

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        valid = None if self.input is None else input_column(rows, self.name, self.input, None).is_valid()
        return [_counted(rows, valid, groups, count)]

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        return [_added(words(states[0]), groups, count)]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return states[0]

    def fingerprint(self) -> str:
        return f"retractable-count/1({self.input or '*'})"


@dataclass(frozen=True, slots=True)
class RetractableSum:
    """The sum of a column over the rows that are left; null where none has a value."""

    name: str
    input: str
    type: pa.DataType = _DOUBLE

    def __post_init__(self) -> None:
        self._sum()  # refuses what cannot be summed

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input, WEIGHT)

    @property
    def state(self) -> tuple[pa.Field, ...]:
        counted = ("count", *_NOT_FINITE) if pa.types.is_floating(self.type) else ("count",)
        return (
            *self._sum().state,
            *(pa.field(f"{self.name}.{each}", _INT64, nullable=False) for each in counted),
        )

    @property
    def result(self) -> pa.DataType:
        return self._sum().result

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        column = input_column(rows, self.name, self.input, self.type)
        counted = [column.is_valid()]
        if pa.types.is_floating(self.type):
            is_infinite = pc.is_inf(column)
            counted += [
                pc.is_nan(column),
                pc.and_(is_infinite, pc.greater(column, 0.0)),
                pc.and_(is_infinite, pc.less(column, 0.0)),
            ]
            column = pc.if_else(pc.is_finite(column), column, pa.scalar(None, self.type))
        return [
            self._summed(column, words(rows.column(WEIGHT)), groups, count),
            *(_counted(rows, each, groups, count) for each in counted),
        ]

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        return [
            *self._sum().merge([states[0]], groups, count),
            *(_added(words(each), groups, count) for each in states[1:]),
        ]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return self._whole(states, self._sum().finish([states[0]]))

    def fingerprint(self) -> str:
        return f"retractable-sum/1({self.input}:{self.type})"

    def _sum(self) -> Sum:
        return Sum(f"{self.name}.sum", self.input, self.type)

    def _summed(
        self, column: pa.Array, weight: npt.NDArray[np.int64], groups: Int32s, count: int
    ) -> pa.Array:
        """The state of a sum in which values of rows taken back count against it."""

        def summed(values: pa.Array, of: Int32s) -> pa.Array:
            return self._sum().partial(pa.RecordBatch.from_arrays([values], [self.input]), of, count)[0]

        if not (weight < 0).any():
            return summed(column, groups)
        if pa.types.is_floating(column.type):
            return summed(pc.if_else(pa.array(weight < 0), pc.negate(column), column), groups)
        states = [
            summed(column.take(pa.array(chosen)), groups[chosen])
            for chosen in (np.flatnonzero(weight > 0), np.flatnonzero(weight < 0))
        ]
        both = np.concatenate([np.arange(count, dtype=np.int32)] * 2)
        return self._sum().merge([pa.concat_arrays([states[0], pc.negate(states[1])])], both, count)[0]

    def _whole(self, states: Sequence[pa.Array], finite: pa.Array) -> pa.Array:
        """Results of the finite values, with what the others make of them; null where no value is left."""
        results = pc.fill_null(finite, pa.scalar(0).cast(finite.type)) if finite.null_count else finite
        if len(states) > 2:
            nan, above, below = (words(each) > 0 for each in states[2:])
            doubles = results.to_numpy(zero_copy_only=False).copy()
            doubles[above], doubles[below] = np.inf, -np.inf
            doubles[nan | (above & below)] = np.nan
            results = pa.array(doubles, finite.type)
        has_none = words(states[1]) <= 0
        return (
            pc.if_else(pa.array(has_none), pa.scalar(None, results.type), results)
            if has_none.any()
            else results
        )


class RetractableMean(RetractableSum):
    """The mean of a column over the rows that are left, as a double; null where none has a value."""

    __slots__ = ()

    @property
    def result(self) -> pa.DataType:
        return _DOUBLE

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        finite = Mean(self.name, self.input, self.type).finish([states[0], states[1]])
        return self._whole(states, finite)

    def fingerprint(self) -> str:
        return f"retractable-mean/1({self.input}:{self.type})"


def _counted(rows: pa.RecordBatch, is_counted: pa.Array | None, groups: Int32s, count: int) -> pa.Array:
    weight = words(rows.column(WEIGHT))
    if is_counted is not None:
        weight = np.where(pc.fill_null(is_counted, False).to_numpy(zero_copy_only=False), weight, 0)
    return _added(weight, groups, count)


def _added(numbers: npt.NDArray[np.int64], groups: Int32s, count: int) -> pa.Array:
    sums = np.zeros(count, np.int64)
    add_numbers(np.ascontiguousarray(numbers), groups, sums)
    return int64_column(sums)
