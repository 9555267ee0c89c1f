"""Aggregates whose state is a list of values: the k largest, or all in the order of their records.

Both sort a batch's values by group once and cut the result into lists, so a state is always sorted, and the same
records give the same state however they were cut and merged.

Thread rule: pure values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import InvalidError
from tidegate.storage.runs.aggregates import input_column, order_keys
from tidegate.storage.runs.columns import int64_column, words

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


def members(lists: pa.ListArray, groups: Int32s) -> tuple[pa.Array, Int32s]:
    """The values of all lists behind each other, and of each its list's group."""
    return lists.flatten(), np.repeat(groups, list_lengths(lists))


def list_lengths(lists: pa.ListArray) -> Int64s:
    lengths: Int64s = (
        pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    )
    return lengths


def cut_lists(values: pa.Array, rows: Int64s, groups: Int32s, count: int) -> pa.ListArray:
    """`values[rows]` as one list for each of `count` groups; `groups` are those of the rows and ascend."""
    ends = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(groups, minlength=count), out=ends[1:])
    return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), values.take(int64_column(rows)))


def ranks_in_groups(groups: Int32s) -> Int64s:
    """The number of each row inside its group; `groups` ascend."""
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
class TopK:
    """The k largest values, the largest first; NaN is larger than every number."""

    name: str
    input: str
    type: pa.DataType
    k: int

    def __post_init__(self) -> None:
        order_keys(pa.array([], self.type))  # refuses what has no order

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input,)

    @property
    def state(self) -> tuple[pa.Field, ...]:
        return (pa.field(self.name, pa.list_(self.type)),)

    @property
    def result(self) -> pa.DataType:
        return pa.list_(self.type)

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        return self._largest(
            *without_nulls(input_column(rows, self.name, self.input, self.type), groups), count
        )

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        return self._largest(*members(states[0], groups), count)

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return states[0]

    def fingerprint(self) -> str:
        return f"top_k/1({self.input}:{self.type};{self.k})"

    def _largest(self, values: pa.Array, groups: Int32s, count: int) -> list[pa.Array]:
        order = np.lexsort((~order_keys(values), groups))
        order = order[ranks_in_groups(groups[order]) < self.k]
        return [cut_lists(values, order, groups[order], count)]


@dataclass(frozen=True, slots=True)
class Collect:
    """All values, or the first `limit`, in the order of (event time, source partition, offset); null ones too."""

    name: str
    input: str
    type: pa.DataType
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

    @property
    def result(self) -> pa.DataType:
        return pa.list_(self.type)

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

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return states[0]

    def fingerprint(self) -> str:
        return f"collect/1({self.input}:{self.type};{','.join(self.position)};{self.limit})"

    def _sorted(self, columns: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        _, ts, partition, offset = columns
        order = np.lexsort((words(offset), partition.to_numpy(), words(ts), groups))
        if self.limit is not None:
            order = order[ranks_in_groups(groups[order]) < self.limit]
        return [cut_lists(column, order, groups[order], count) for column in columns]
