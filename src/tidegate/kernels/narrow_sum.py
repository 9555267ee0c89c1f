"""Exact sums of doubles that lie within a few powers of two of each other, as amounts of money do.

The same sums as `exact_sum.py` writes, byte by byte, where 128 bits are enough for the sum of all values, from the
lowest bit of the smallest to the sign: two words for each group, one pass to add, one to write.

    lower word, bit 0   whether the group has a value
    bits 1 … 127        the sum, in units of the lowest bit that any value has, two's complement
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types

from tidegate.kernels.compiling import (
    BYTES,
    INT32S,
    INT64,
    READ_BYTES,
    READ_INT32S,
    READ_INT64S,
    kernel,
)
from tidegate.kernels.exact_sum import HEADER, UNITS, is_valid
from tidegate.kernels.key_bytes import int64, store_half, store_word
from tidegate.kernels.memory import pointer, prefetch, store
from tidegate.kernels.words import leading_zeros

UINT64S = types.Array(types.uint64, 1, "C")
AHEAD: Final = 16  # rows between the one at hand and the one whose sum is fetched
MOST_BITS: Final = 127
MOST_DIGITS: Final = 5

_EXPONENTS: Final = 0x7FF
_FRACTION: Final = (1 << 52) - 1
_DIGIT = np.uint64((1 << 32) - 1)
_U0, _ONE, _U32, _U33, _U63, _U64 = (np.uint64(number) for number in (0, 1, 32, 33, 63, 64))


@kernel(types.UniTuple(INT64, 2)(READ_INT64S, READ_BYTES, INT64))
def span_exponents(values: Any, valid: Any, valid_start: int) -> Any:
    """The lowest and the highest exponent bits of values other than 0, 1 for tiny ones; (2047, 0) without any."""
    low, high = int64(_EXPONENTS), int64(0)
    for row in range(values.shape[0]):
        bits = values[row]
        if bits << 1 != 0 and is_valid(valid, valid_start, row):
            exponent = max((bits >> 52) & _EXPONENTS, 1)
            low, high = min(low, exponent), max(high, exponent)
    return low, high


@kernel(types.void(READ_INT64S, READ_BYTES, INT64, READ_INT32S, INT64, UINT64S))
def add_narrow(values: Any, valid: Any, valid_start: int, groups: Any, low: int, sums: Any) -> None:
    """Add each value to its group's two words; no exponent is below `low`, none above what 128 bits can hold."""
    fetched = pointer(sums)
    for row in range(groups.shape[0]):
        if row + AHEAD < groups.shape[0]:
            prefetch(fetched, 2 * int64(groups[row + AHEAD]))
        if not is_valid(valid, valid_start, row):
            continue
        at, bits = 2 * int64(groups[row]), values[row]
        exponent = (bits >> 52) & _EXPONENTS
        fraction = np.uint64(bits & _FRACTION)
        if exponent:
            fraction |= _ONE << np.uint64(52)
        shift = np.uint64(max(exponent, low) - low + 1)  # 0 has no exponent of its own
        if shift < _U64:
            lower, upper = fraction << shift, fraction >> (_U64 - shift)
        else:
            lower, upper = _U0, fraction << (shift - _U64)
        before = sums[at]
        if bits < 0:
            sums[at] = (before - lower) | _ONE
            sums[at + 1] -= upper + np.uint64(before < lower)
        else:
            after = before + lower
            sums[at] = after | _ONE
            sums[at + 1] += upper + np.uint64(after < before)


@kernel(INT64(UINT64S, INT64, INT32S, BYTES, BYTES))
def write_narrow(sums: Any, low: int, bounds: Any, data: Any, valid: Any) -> Any:
    """Write the sums as `exact_sum.write_sums` does; answers how many bytes they are.

    `data` has room for MOST_DIGITS digits a group and a header, `valid` (zeros at first) gets a bit for each group
    with a value.
    """
    target = pointer(data)
    position = low - 1075 + UNITS
    shift, first = np.uint64(position & 31), position >> 5
    # the sum moved up to where digits begin: two words, and what is above them
    down = _U33 - shift
    at = int64(0)
    bounds[0] = 0
    for group in range(bounds.shape[0] - 1):
        lower, upper = sums[2 * group], sums[2 * group + 1]
        if lower & _ONE != _U0:
            valid[group >> 3] |= np.uint8(1 << (group & 7))
            middle = (lower >> down) | (upper << (_U64 - down))
            high = int64(upper) >> int64(down)
            low_word = (((lower >> _ONE) << shift) & _DIGIT) | (middle << _U32)
            high_word, above = (middle >> _U32) | (np.uint64(high) << _U32), high >> 32
            # bits that differ from the sign, and how many digits these and a sign take
            sign = np.uint64(high >> 63)
            if np.uint64(above) != sign:
                stop = int64(4) + ((64 - leading_zeros(np.uint64(above) ^ sign)) >> 5) + 1
            elif high_word != sign:
                stop = int64(2) + ((64 - leading_zeros(high_word ^ sign)) >> 5) + 1
            elif low_word != sign:
                stop = ((64 - leading_zeros(low_word ^ sign)) >> 5) + 1
            else:
                stop = int64(sign & _ONE)
            start = int64(0)
            while start < stop and low_word & _DIGIT == _U0:
                low_word = (low_word >> _U32) | (high_word << _U32)
                high_word = (high_word >> _U32) | (np.uint64(above) << _U32)
                above >>= 32
                start += 1
            store(target, at, 0)
            store(target, at + 1, first + start if start < stop else 0)
            # all digits there can be: those that are not wanted are written over, or lie in the room behind
            store_word(target, at + HEADER, low_word)
            store_word(target, at + HEADER + 8, high_word)
            store_half(target, at + HEADER + 16, above)
            at += HEADER + 4 * (stop - start)
        bounds[group + 1] = at
    return at
