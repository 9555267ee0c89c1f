"""Columns of exact sums of doubles: made from values, merged, rounded (the bytes: `kernels/aggregates.py`).

A null is the sum of nothing. Thread rule: pure.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import CorruptError, InvalidError
from tidegate.kernels.aggregates import (
    HEADER,
    MOST_BITS,
    MOST_DIGITS,
    NO_POSITION,
    add_doubles,
    add_narrow,
    add_sums,
    count_malformed,
    lay_out,
    round_sums,
    settle,
    span_doubles,
    span_exponents,
    span_sums,
    write_narrow,
    write_sums,
)
from tidegate.storage.runs.assembling import numbers_column, words
from tidegate.storage.runs.hashing import Int32s, binary_parts
from tidegate.storage.runs.run import Int64s

Bytes = npt.NDArray[np.uint8]

_NO_BYTES = np.empty(0, np.uint8)
_INFINITE = 0x7FF  # the exponent bits of what is not finite
_MOST_BYTES = HEADER + 4 * MOST_DIGITS
_INFINITY_SCALE = 128  # sums of fewer than 2^64 doubles stay below 2^1088


def validity(column: pa.Array) -> tuple[Bytes, int]:
    """The bitmap of a column and the bit its first row has; no bytes when nothing is null."""
    if not column.null_count:
        return _NO_BYTES, 0
    return np.frombuffer(column.buffers()[0], np.uint8), column.offset


def sum_doubles(column: pa.Array, groups: Int32s, count: int) -> pa.Array:
    """The exact sum of each group's values; `column` is float64."""
    values, valid = words(column), validity(column)
    low, high = span_exponents(values, *valid)
    # a fraction and a sign more than exponents span, and what so many additions carry
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
