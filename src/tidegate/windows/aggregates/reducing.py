"""A user's reducer as a storage aggregate: its functions are called with plain Arrow, and held to their types.

Thread rule: values; the functions are the user's and run on the operator's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.storage import Custom

Int32s = npt.NDArray[np.int32]
PartialStates: TypeAlias = Callable[[pa.RecordBatch, Int32s, int], pa.Array]
MergeStates: TypeAlias = Callable[[pa.Array, Int32s, int], pa.Array]
FinishStates: TypeAlias = Callable[[pa.Array], pa.Array]


@dataclass(frozen=True, slots=True)
class Reducer:
    """The functions of a reducer, and the types they keep to."""

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
    """The storage aggregate of a reducer over these columns, which come in under the names `inputs`."""
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
