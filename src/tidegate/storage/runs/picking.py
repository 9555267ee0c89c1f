"""One row chosen for each group, by order keys: what min, max, first and last have in common.

Thread rule: pure.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import InvalidError
from tidegate.kernels.aggregates import pick_rows
from tidegate.storage.runs.assembling import NO_NUMBERS, words
from tidegate.storage.runs.exact_doubles import validity
from tidegate.storage.runs.hashing import Int32s
from tidegate.storage.runs.run import Int64s

_LOWEST = np.int64(-(2**63))
_HIGHEST = np.int64(2**63 - 1)
_DOUBLE, _INT64 = pa.float64(), pa.int64()


def order_keys(column: pa.Array) -> Int64s:
    """Numbers that order as the values do; NaN above every number, −0.0 below 0.0. Nulls have any number."""
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
