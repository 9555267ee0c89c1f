"""Definitions of window aggregates: `count()`, `sum("amount")`, `top_k("price", 3)`, …

A definition names the columns it reads, not their types; `folds.resolve` checks it against the stream's columns.
Made for `from tidegate.windows import aggregates as agg`: some names here are Python's own, too.

Records of one event time are in the order of source partition, then offset. Nulls are left out, unless stated
otherwise. A result depends on the records alone: not on batch boundaries, nor on the order in which states were
merged. A reducer's functions are called with plain Arrow, and their results must have the declared types.

Thread rule: values and pure functions; reducers run on the operator's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.storage import Custom

# --- reducers

Int32s = npt.NDArray[np.int32]
PartialStates: TypeAlias = Callable[[pa.RecordBatch, Int32s, int], pa.Array]
MergeStates: TypeAlias = Callable[[pa.Array, Int32s, int], pa.Array]
FinishStates: TypeAlias = Callable[[pa.Array], pa.Array]


@dataclass(frozen=True, slots=True)
class Reducer:
    """The functions of a reducer, and their types."""

    state: pa.DataType
    merge: MergeStates
    partial: PartialStates | None
    finish: FinishStates | None
    result: pa.DataType
    version: str


def reducer(
    name: str,
    columns: tuple[str, ...],
    inputs: tuple[str, ...],
    types: tuple[pa.DataType, ...],
    made: Reducer,
) -> Custom:
    """Return the storage aggregate of a reducer over these columns, which are passed under the names `inputs`."""
    if made.partial is None and types[0] != made.state:
        raise InvalidError(f"its values are {types[0]} and its states {made.state}: give partial=, or cast")

    def partial(rows: pa.RecordBatch, groups: Int32s, count: int) -> Sequence[pa.Array]:
        if made.partial is None:
            return [made.merge(rows.column(inputs[0]), groups, count)]
        own = pa.RecordBatch.from_arrays([rows.column(each) for each in inputs], names=list(columns))
        return [made.partial(own, groups, count)]

    def merge(states: Sequence[pa.Array], groups: Int32s, count: int) -> Sequence[pa.Array]:
        return [made.merge(states[0], groups, count)]

    def finish(states: Sequence[pa.Array]) -> pa.Array:
        results = states[0] if made.finish is None else made.finish(states[0])
        if results.type != made.result or len(results) != len(states[0]):
            raise InvalidError(
                f"aggregate {name}: finish answered {len(results)} values of {results.type};"
                f" {len(states[0])} of {made.result} are due"
            )
        return results

    kept = pa.field(name, made.state)
    read = ",".join(str(each) for each in types)
    return Custom(name, inputs, (kept,), made.result, partial, merge, finish, f"{made.version};{read}")


# --- definitions


@dataclass(frozen=True, slots=True)
class AggregateDefinition:
    """The definition of one aggregate: its kind, columns, options and name."""

    kind: str
    columns: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        for column in self.columns:
            if not isinstance(column, str):
                raise TypeError(f"{self.kind} takes the name of a column, not {column!r}")
        if not self.name:
            object.__setattr__(self, "name", "_".join([self.kind, *self.columns]))

    def named(self, name: str) -> AggregateDefinition:
        """Return the same aggregate under another name."""
        return replace(self, name=name)


def count(column: str | None = None) -> AggregateDefinition:
    """Count the records, or the values of a column that are not null."""
    return AggregateDefinition("count", () if column is None else (column,))


def sum(column: str) -> AggregateDefinition:
    """Sum a column: int64 for whole numbers, decimal for decimals, double for doubles; null if there is no value.

    A sum that does not fit is null as well, and its key and window are logged; sum a decimal where this may happen.
    """
    return AggregateDefinition("sum", (column,))


def mean(column: str) -> AggregateDefinition:
    """The mean of a column, a double; null if there is no value."""
    return AggregateDefinition("mean", (column,))


def min(column: str) -> AggregateDefinition:
    """The lowest value of a column."""
    return AggregateDefinition("min", (column,))


def max(column: str) -> AggregateDefinition:
    """The highest value of a column."""
    return AggregateDefinition("max", (column,))


def first(column: str) -> AggregateDefinition:
    """The value of the record with the earliest event time; of several, that with the lowest (partition, offset)."""
    return AggregateDefinition("first", (column,))


def last(column: str) -> AggregateDefinition:
    """The value of the record with the latest event time; of several, that with the highest (partition, offset)."""
    return AggregateDefinition("last", (column,))


def count_distinct(column: str) -> AggregateDefinition:
    """Count the distinct values of a column, exactly. All of them are kept: for many, use `approx_count_distinct`."""
    return AggregateDefinition("count_distinct", (column,))


def approx_count_distinct(column: str) -> AggregateDefinition:
    """Estimate the number of distinct values of a column: standard error 1.6 %, at most 4 KiB a window."""
    return AggregateDefinition("approx_count_distinct", (column,))


def top_k(column: str, k: int) -> AggregateDefinition:
    """The `k` largest values of a column, in descending order; duplicates included."""
    return AggregateDefinition("top_k", (column,), (("k", _positive("top_k", "k", k)),))


def collect(column: str, *, limit: int | None = None) -> AggregateDefinition:
    """All values of a column as a list by event time, then (partition, offset); with `limit` only the first ones."""
    if limit is not None:
        _positive("collect", "limit", limit)
    return AggregateDefinition("collect", (column,), (("limit", limit),))


def reduce(
    columns: str | Sequence[str],
    merge: MergeStates,
    *,
    state: pa.DataType,
    partial: PartialStates | None = None,
    finish: FinishStates | None = None,
    result: pa.DataType | None = None,
    version: str = "1",
) -> AggregateDefinition:
    """A user-defined aggregate, made of functions over Arrow columns.

    `partial(rows, groups, count)` returns one state of type `state` for each of `count` groups, where `groups[i]` is
    the group of row i; without it, the values of the one column are the states of their records. `merge(states,
    groups, count)` merges many states into one per group, and must be associative. Rows and states come in the order
    of the stream, in hopping windows by time, so the result may depend on it; in sessions, which are merged, it must
    not. `finish(states)` returns the results, of type `result`. Change `version` when earlier states cannot be
    merged with new ones.
    """
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    if partial is None and len(names) != 1:
        raise InvalidError(f"reduce of {list(names)}: say with partial= how several columns become one state")
    if result is not None and finish is None and result != state:
        raise InvalidError(f"reduce of {list(names)}: say with finish= how {state} becomes {result}")
    made = Reducer(state, merge, partial, finish, state if result is None else result, version)
    return AggregateDefinition("reduce", names, (("reducer", made),))


def _positive(kind: str, option: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{kind}: {option} is a whole number, not {value!r}")
    if value < 1:
        raise InvalidError(f"{kind}: {option} is {value}; it must be at least 1")
    return value
