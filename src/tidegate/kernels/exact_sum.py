"""Sums of doubles without any rounding, as numbers in base 2^32 that grow where they must.

A sum is Σ digit[i] · 2^(32·(low + i) − 1088): digits are 32 bits each, the top one signed (two's complement).
Position 0 lies below the smallest double, so every finite double is a whole number of units, and sums of any
number of them are exact. Written down:

    flags u8 | low u8 | digits u32…      little-endian; flags: 1 saw +∞, 2 saw −∞, 4 saw NaN

in one way only: no digit at the low end is 0, none at the top repeats the sign of the one below, no digits at
all for 0 and next to a flag. So equal multisets of inputs have equal bytes, however they were cut and merged.

While adding, each group has a row of int64 limbs, one for each digit between the lowest and the highest
position of its inputs and one more for carries. A limb takes 2^31 addends before it could overflow, more than an
Arrow column has. Work goes: `span_*` (which positions), `lay_out` (limbs), `add_*`, `settle` (carries,
lengths), `write_sums`. Validity is a bitmap from bit `valid_start` on; no bytes means that all are valid.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import (
    BYTES,
    INT32S,
    INT64,
    INT64S,
    READ_BYTES,
    READ_INT32S,
    READ_INT64S,
    kernel,
)
from tidegate.kernels.key_bytes import int64, load_word
from tidegate.kernels.memory import load, pointer, prefetch, store
from tidegate.kernels.words import leading_zeros

SAW_PLUS: Final = 1
SAW_MINUS: Final = 2
SAW_NAN: Final = 4
SAW_VALUE: Final = 8  # of work in progress only
HEADER: Final = 2
NO_POSITION: Final = 255
UNITS: Final = 1088  # position 0 is 2^-1088; the smallest double is 2^-1074
ROOM: Final = 1  # limbs above the highest position: 2^31 addends carry less than 32 bits and a sign
AHEAD: Final = 16  # rows between the one at hand and the one whose limbs are fetched

UINT64S = types.Array(types.uint64, 1, "C")

_FRACTION: Final = (1 << 52) - 1
_DIGIT: Final = (1 << 32) - 1
_ONE, _U0 = np.uint64(1), np.uint64(0)
_TOP, _U64 = np.uint64(1 << 63), np.uint64(64)
_SIGN: Final = 1 << 31


@register_jitable
def is_valid(bitmap: Any, start: int, row: int) -> Any:
    if bitmap.shape[0] == 0:
        return True
    bit = start + row
    return (int64(bitmap[bit >> 3]) >> (bit & 7)) & 1 != 0


@register_jitable
def _bit_position(bits: Any) -> Any:
    """The position of the lowest bit of a finite double's fraction."""
    return max((bits >> 52) & 0x7FF, 1) - 1075 + UNITS


@kernel(types.void(READ_INT64S, READ_BYTES, INT64, READ_INT32S, BYTES, BYTES, BYTES))
def span_doubles(
    values: Any, valid: Any, valid_start: int, groups: Any, lows: Any, highs: Any, flags: Any
) -> None:
    """Widen each group's positions by its values (doubles, as numbers of their bits)."""
    for row in range(groups.shape[0]):
        if not is_valid(valid, valid_start, row):
            continue
        group, bits = groups[row], values[row]
        flag = SAW_VALUE
        if (bits >> 52) & 0x7FF == 0x7FF:
            if bits & _FRACTION:
                flag = SAW_VALUE | SAW_NAN
            else:
                flag = SAW_VALUE | (SAW_MINUS if bits < 0 else SAW_PLUS)
        elif bits << 1 != 0:
            position = _bit_position(bits)
            lows[group] = min(int64(lows[group]), position >> 5)
            highs[group] = max(int64(highs[group]), (position + 52) >> 5)
        flags[group] |= flag


@kernel(types.void(READ_BYTES, READ_INT32S, READ_BYTES, INT64, READ_INT32S, BYTES, BYTES, BYTES))
def span_sums(
    data: Any, bounds: Any, valid: Any, valid_start: int, groups: Any, lows: Any, highs: Any, flags: Any
) -> None:
    """Widen each group's positions by its written sums; those were checked by `count_malformed`."""
    source = pointer(data)
    for row in range(groups.shape[0]):
        if not is_valid(valid, valid_start, row):
            continue
        group, start = groups[row], int64(bounds[row])
        digits = (int64(bounds[row + 1]) - start - HEADER) >> 2
        if digits > 0:
            low = load(source, start + 1)
            lows[group] = min(int64(lows[group]), low)
            highs[group] = max(int64(highs[group]), low + digits - 1)
        flags[group] |= SAW_VALUE | load(source, start)


@kernel(INT64(READ_BYTES, READ_INT32S, READ_BYTES, INT64))
def count_malformed(data: Any, bounds: Any, valid: Any, valid_start: int) -> int:
    """How many values are not written sums."""
    source = pointer(data)
    malformed = 0
    for row in range(bounds.shape[0] - 1):
        if is_valid(valid, valid_start, row):
            start, length = int64(bounds[row]), int64(bounds[row + 1]) - int64(bounds[row])
            is_sized = length >= HEADER and (length - HEADER) & 3 == 0
            if (
                not is_sized
                or load(source, start) > 7
                or load(source, start + 1) + ((length - HEADER) >> 2) > 128
            ):
                malformed += 1
    return malformed


@kernel(INT64(BYTES, BYTES, BYTES, INT64S))
def lay_out(lows: Any, highs: Any, flags: Any, places: Any) -> Any:
    """Where each group's limbs begin; answers how many there are in all. A flagged group needs none."""
    filled = int64(0)
    for group in range(lows.shape[0]):
        places[group] = filled
        if flags[group] & (SAW_PLUS | SAW_MINUS | SAW_NAN):
            lows[group] = NO_POSITION
        if lows[group] != NO_POSITION:
            filled += int64(highs[group]) - int64(lows[group]) + 1 + ROOM
    places[lows.shape[0]] = filled
    return filled


@kernel(types.void(READ_INT64S, READ_BYTES, INT64, READ_INT32S, BYTES, INT64S, INT64S))
def add_doubles(
    values: Any, valid: Any, valid_start: int, groups: Any, lows: Any, places: Any, limbs: Any
) -> None:
    """Add each value to its group's limbs."""
    fetched = pointer(limbs)
    for row in range(groups.shape[0]):
        if row + AHEAD < groups.shape[0]:
            prefetch(fetched, places[groups[row + AHEAD]])
        group, bits = groups[row], values[row]
        if bits << 1 == 0 or not is_valid(valid, valid_start, row) or lows[group] == NO_POSITION:
            continue
        position = _bit_position(bits)
        fraction = bits & _FRACTION
        if (bits >> 52) & 0x7FF:
            fraction |= 1 << 52
        at = places[group] + (position >> 5) - int64(lows[group])
        shift = position & 31
        # 53 bits moved up by at most 31 are up to three digits; the third is 0 where it falls on the room
        above = fraction >> (32 - shift)
        low, middle, high = (fraction << shift) & _DIGIT, above & _DIGIT, above >> 32
        if bits < 0:
            low, middle, high = -low, -middle, -high
        limbs[at] += low
        limbs[at + 1] += middle
        limbs[at + 2] += high


@register_jitable
def _load_digit(source: Any, at: int) -> Any:
    low = load(source, at) | (load(source, at + 1) << 8)
    return low | (load(source, at + 2) << 16) | (load(source, at + 3) << 24)


@kernel(types.void(READ_BYTES, READ_INT32S, READ_BYTES, INT64, READ_INT32S, BYTES, INT64S, INT64S))
def add_sums(
    data: Any, bounds: Any, valid: Any, valid_start: int, groups: Any, lows: Any, places: Any, limbs: Any
) -> None:
    """Add each written sum to its group's limbs."""
    source = pointer(data)
    for row in range(groups.shape[0]):
        group = groups[row]
        if not is_valid(valid, valid_start, row) or lows[group] == NO_POSITION:
            continue
        start = int64(bounds[row])
        digits = (int64(bounds[row + 1]) - start - HEADER) >> 2
        at = places[group] + load(source, start + 1) - int64(lows[group])
        for digit in range(digits):
            number = _load_digit(source, start + HEADER + 4 * digit)
            if digit == digits - 1 and number >> 31:
                number -= 1 << 32
            limbs[at + digit] += number


@kernel(INT64(INT64S, BYTES, BYTES, INT64S, INT32S))
def settle(limbs: Any, lows: Any, flags: Any, places: Any, bounds: Any) -> Any:
    """Carry, and find what is to be written: digits from limb places[group] on, from position lows[group] on.

    `bounds` gets the offsets of the written sums; answers their bytes, or -1 when those are more than a column
    can have.
    """
    filled = int64(0)
    bounds[0] = 0
    for group in range(lows.shape[0]):
        if lows[group] != NO_POSITION:
            start, stop = places[group], places[group + 1]
            carry = int64(0)
            for at in range(start, stop):
                total = limbs[at] + carry
                carry = total >> 32
                limbs[at] = total & _DIGIT
            # the last limb was room: what is carried out of it is nothing but the sign
            while stop > start and limbs[stop - 1] == carry & _DIGIT:
                below = int64(0) if stop - 1 == start else limbs[stop - 2]
                if (below >> 31) != (carry & 1):
                    break
                stop -= 1
            first = start
            while first < stop and limbs[first] == 0:
                first += 1
            lows[group] = int64(lows[group]) + first - start
            places[group] = first
            filled += 4 * (stop - first)
        if flags[group]:
            filled += HEADER
        if filled > 0x7FFFFFFF:
            return -1
        bounds[group + 1] = filled
    return filled


@kernel(types.void(INT64S, BYTES, BYTES, INT64S, READ_INT32S, BYTES, BYTES))
def write_sums(limbs: Any, lows: Any, flags: Any, places: Any, bounds: Any, data: Any, valid: Any) -> None:
    """Write the settled sums; `valid` (zeros at first) gets a bit for each group with a value."""
    target = pointer(data)
    for group in range(lows.shape[0]):
        if flags[group] == 0:
            continue
        valid[group >> 3] |= np.uint8(1 << (group & 7))
        at, stop = int64(bounds[group]), int64(bounds[group + 1])
        has_digits = stop - at > HEADER
        store(target, at, int64(flags[group]) & 7)
        store(target, at + 1, int64(lows[group]) if has_digits else 0)
        at += HEADER
        limb = places[group]
        while at < stop:
            number = limbs[limb]
            for byte in range(4):
                store(target, at + byte, number >> (8 * byte))
            at, limb = at + 4, limb + 1


@register_jitable
def _magnitude(source: Any, start: int, digit: int, is_negative: bool) -> Any:
    """A digit of the absolute value; the lowest digit is never 0, so below it nothing is borrowed."""
    number = _load_digit(source, start + HEADER + 4 * digit)
    if not is_negative:
        return np.uint64(number)
    return np.uint64((1 << 32) - number if digit == 0 else _DIGIT - number)


@register_jitable
def _nearest(source: Any, start: int, digits: int, scale: int) -> Any:
    """The bits of the double nearest to a written sum times 2^-scale, to the even one of two as near."""
    is_negative = _load_digit(source, start + HEADER + 4 * (digits - 1)) >> 31 != 0
    top = digits - 1
    while _magnitude(source, start, top, is_negative) == _U0:
        top -= 1
    leading = _magnitude(source, start, top, is_negative)
    length = 0
    while length < 32 and leading >> np.uint64(length) != _U0:
        length += 1
    word, filled, digit = leading << np.uint64(64 - length), length, top - 1
    rest = _U0
    while digit >= 0:
        number = _magnitude(source, start, digit, is_negative)
        if filled + 32 <= 64:
            word |= number << np.uint64(32 - filled)
        elif filled < 64:
            word |= number >> np.uint64(filled - 32)
            rest |= number << np.uint64(96 - filled)
        else:
            rest |= number
        filled += 32
        digit -= 1
    exponent = 32 * (load(source, start + 1) + top) + length - 1 - UNITS - scale
    if exponent > 1023:
        bits = np.uint64(0x7FF) << np.uint64(52)
    elif exponent < -1074:  # only by `scale`
        bits = _U0
    else:
        kept = np.uint64(min(53, exponent + 1075))
        number, left_over = word >> (np.uint64(64) - kept), word << kept
        is_half = left_over == _TOP
        if left_over > _TOP or (is_half and (rest != _U0 or number & _ONE != _U0)):
            number += _ONE
        bits = number
        if exponent >= -1022:
            bits += np.uint64(exponent + 1022) << np.uint64(52)
    return bits | _TOP if is_negative else bits


@register_jitable
def _nearest_short(source: Any, start: int, digits: int) -> Any:
    """What `_nearest` answers for at most three digits and no scale, in two words and without a loop."""
    at = start + HEADER
    if digits == 3:
        low, high = load_word(source, at), (int64(_load_digit(source, at + 8)) ^ _SIGN) - _SIGN
    elif digits == 2:
        low = load_word(source, at)
        high = int64(low) >> 63
    else:
        high = (int64(_load_digit(source, at)) ^ _SIGN) - _SIGN
        low = np.uint64(high)
        high >>= 63
    is_negative = high < 0
    upper = np.uint64(high)
    if is_negative:
        low = ~low + _ONE
        upper = ~upper + np.uint64(low == _U0)
    if upper == _U0:
        zeros = leading_zeros(low)
        word, rest, length = low << np.uint64(zeros), _U0, 64 - zeros
    else:  # 32 bits at most, so something is always moved up
        zeros = leading_zeros(upper)
        moved = np.uint64(zeros)
        word, rest = (upper << moved) | (low >> (_U64 - moved)), low << moved
        length = 128 - zeros
    exponent = 32 * load(source, start + 1) + length - 1 - UNITS
    number, left_over = word >> np.uint64(11), word << np.uint64(53)
    if left_over > _TOP or (left_over == _TOP and (rest != _U0 or number & _ONE != _U0)):
        number += _ONE
    bits = number + (np.uint64(exponent + 1022) << np.uint64(52))
    return bits | _TOP if is_negative else bits


@kernel(types.void(READ_BYTES, READ_INT32S, READ_BYTES, INT64, INT64, UINT64S))
def round_sums(data: Any, bounds: Any, valid: Any, valid_start: int, scale: int, results: Any) -> None:
    """The bits of the double nearest to each sum times 2^-scale; what is too large is infinite, a null 0."""
    source = pointer(data)
    for row in range(results.shape[0]):
        results[row] = _U0
        if not is_valid(valid, valid_start, row):
            continue
        start, stop = int64(bounds[row]), int64(bounds[row + 1])
        flags = load(source, start)
        digits = (stop - start - HEADER) >> 2
        # neither below the normal doubles nor above them, wherever the first bit is
        if flags == 0 and scale == 0 and 0 < digits <= 3 and 3 <= load(source, start + 1) <= 60:
            results[row] = _nearest_short(source, start, digits)
        elif flags & SAW_NAN or flags == SAW_PLUS | SAW_MINUS:
            results[row] = np.uint64(0x7FF8) << np.uint64(48)
        elif flags == SAW_PLUS:
            results[row] = np.uint64(0x7FF0) << np.uint64(48)
        elif flags == SAW_MINUS:
            results[row] = np.uint64(0xFFF0) << np.uint64(48)
        elif stop - start > HEADER:
            results[row] = _nearest(source, start, digits, scale)
