"""States of sums by type: doubles as exact digits, whole numbers and decimals in 128 or 256 bits.

Thread rule: pure.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.kernels.aggregates import add_wide
from tidegate.storage.runs.assembling import words
from tidegate.storage.runs.exact_doubles import merge_sums, sum_doubles, validity, with_nulls_of
from tidegate.storage.runs.hashing import Int32s
from tidegate.storage.runs.run import Int64s

_DOUBLE, _INT64, _BINARY = pa.float64(), pa.int64(), pa.binary()
_WHOLE = pa.decimal128(38, 0)


def refuse_unsummable(name: str, type_: pa.DataType) -> None:
    """Only whole numbers, doubles and decimal128 add up."""
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal128)
    if not any(is_kind(type_) for is_kind in kinds):
        raise InvalidError(f"aggregate {name}: {type_} cannot be summed; cast to a number or decimal128")


def sum_state(type_: pa.DataType) -> pa.DataType:
    """What a sum of this type is kept as: wide enough that no order of adding can overflow it."""
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


def divide_doubles(sums: pa.Array, counts: Int64s) -> pa.Array:
    """Each sum, a double, divided by a number above zero."""
    return with_nulls_of(sums, words(sums).view(np.float64) / counts, _DOUBLE)
