"""Aggregates by group: exact sums of doubles, sums, minima and maxima, HyperLogLog sketches.

`groups[row]` is the group of a row. Validity is a bitmap from bit `valid_start` on; no bytes means that all are valid.

An exact sum is a number in base 2^32 of variable length, Σ digit[i] · 2^(32·(low + i) − 1088), with 32-bit digits and
a signed top one. Position 0 lies below the smallest double, so sums of any number of doubles are exact. Its bytes are

    flags u8 | low u8 | digits u32…      little-endian; flags: 1 saw +∞, 2 saw −∞, 4 saw NaN

without a lowest digit of 0, a top digit that only repeats the sign, or digits for 0 or with a flag: equal multisets of
inputs have equal bytes, however they were divided and merged. While adding, each group has a row of int64 limbs, one
for each digit and one for carries; a limb takes 2^31 addends, more than an Arrow column has. The steps are `span_*`
(positions), `lay_out` (limbs), `add_*`, `settle` (carries, lengths), `write_sums`.

`add_narrow` and `write_narrow` write the same bytes where 128 bits hold the sum of all values. The lowest bit of a
group's two words says whether it has a value; the others are the sum in units of the lowest bit of any value.

A sketch has 4096 registers, chosen by the top 12 bits of a hash; one keeps the largest of (leading zeros of the other
52 bits) + 1. While fewer than 1366 registers are set its bytes have the first form, then the second:

    01 | place and value of each register that is not 0, ascending: three bytes big-endian, place << 6 | value
    02 | all registers, a byte each
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types

from tidegate.kernels.jit import (
    BYTES,
    INT32S,
    INT64,
    INT64S,
    READ_BYTES,
    READ_INT32S,
    READ_INT64S,
    READ_UINT64S,
    UINT64S,
    helper,
    int64,
    keep,
    kernel,
    leading_zeros,
    load,
    load_word,
    pointer,
    prefetch,
    store,
    store_half,
    store_word,
)

# -- exact sums ------------------------------------------------------------------------------------

SAW_PLUS: Final = 1
SAW_MINUS: Final = 2
SAW_NAN: Final = 4
SAW_VALUE: Final = 8  # of work in progress only
HEADER: Final = 2
NO_POSITION: Final = 255
UNITS: Final = 1088  # position 0 is 2^-1088; the smallest double is 2^-1074
ROOM: Final = 1  # limbs above the highest position: 2^31 addends carry less than 32 bits and a sign
AHEAD: Final = 16  # rows between the one at hand and the one whose limbs are fetched
_FRACTION: Final = (1 << 52) - 1
_DIGIT: Final = (1 << 32) - 1
_ONE, _U0 = np.uint64(1), np.uint64(0)
_TOP, _U64 = np.uint64(1 << 63), np.uint64(64)
_SIGN: Final = 1 << 31


@helper
def is_valid(bitmap: Any, start: int, row: int) -> Any:
    if bitmap.shape[0] == 0:
        return True
    bit = start + row
    return (int64(bitmap[bit >> 3]) >> (bit & 7)) & 1 != 0


@helper
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
    """The number of values that are not valid encoded sums."""
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
    """Where each group's limbs begin; returns how many there are in all. A flagged group needs none."""
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


@helper
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

    `bounds` gets the offsets of the written sums; returns their bytes, or -1 when those are more than a column
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
            # the last limb is for carries: its own carry is only the sign
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


@helper
def _magnitude(source: Any, start: int, digit: int, is_negative: bool) -> Any:
    """A digit of the absolute value; the lowest digit is never 0, so below it nothing is borrowed."""
    number = _load_digit(source, start + HEADER + 4 * digit)
    if not is_negative:
        return np.uint64(number)
    return np.uint64((1 << 32) - number if digit == 0 else _DIGIT - number)


@helper
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


@helper
def _nearest_short(source: Any, start: int, digits: int) -> Any:
    """`_nearest` for at most three digits and no scale, in two words and without a loop."""
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
        # in the range of normal doubles, for any position of the first bit
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


# -- exact sums in a narrow range of exponents -----------------------------------------------------

MOST_BITS: Final = 127
MOST_DIGITS: Final = 5
_EXPONENTS: Final = 0x7FF
_DIGIT_WORD = np.uint64((1 << 32) - 1)
_U32, _U33, _U63 = np.uint64(32), np.uint64(33), np.uint64(63)


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
    """Write the sums as `write_sums` does; returns their total bytes.

    `data` has room for MOST_DIGITS digits a group and a header, `valid` (zeros at first) gets a bit for each group
    with a value.
    """
    target = pointer(data)
    position = low - 1075 + UNITS
    shift, first = np.uint64(position & 31), position >> 5
    # the sum shifted to a digit boundary: two words, and the bits above them
    down = _U33 - shift
    at = int64(0)
    bounds[0] = 0
    for group in range(bounds.shape[0] - 1):
        lower, upper = sums[2 * group], sums[2 * group + 1]
        if lower & _ONE != _U0:
            valid[group >> 3] |= np.uint8(1 << (group & 7))
            middle = (lower >> down) | (upper << (_U64 - down))
            high = int64(upper) >> int64(down)
            low_word = (((lower >> _ONE) << shift) & _DIGIT_WORD) | (middle << _U32)
            high_word, above = (middle >> _U32) | (np.uint64(high) << _U32), high >> 32
            # bits that differ from the sign, and the number of digits for them and a sign
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
            while start < stop and low_word & _DIGIT_WORD == _U0:
                low_word = (low_word >> _U32) | (high_word << _U32)
                high_word = (high_word >> _U32) | (np.uint64(above) << _U32)
                above >>= 32
                start += 1
            store(target, at, 0)
            store(target, at + 1, first + start if start < stop else 0)
            # write all possible digits: surplus ones are overwritten, or lie in the spare room at the end
            store_word(target, at + HEADER, low_word)
            store_word(target, at + HEADER + 8, high_word)
            store_half(target, at + HEADER + 16, above)
            at += HEADER + 4 * (stop - start)
        bounds[group + 1] = at
    return at


# -- folds -----------------------------------------------------------------------------------------

_ONES = np.uint64(0xFFFFFFFFFFFFFFFF)
_U1 = np.uint64(1)
_SIGN_BIT = np.uint64(63)


@kernel(types.void(READ_BYTES, INT64, READ_INT32S, INT64S))
def count_rows(valid: Any, valid_start: int, groups: Any, counts: Any) -> None:
    """Add the valid rows of each group to `counts`."""
    if valid.shape[0] == 0:
        for row in range(groups.shape[0]):
            counts[groups[row]] += 1
    else:
        for row in range(groups.shape[0]):
            counts[groups[row]] += is_valid(valid, valid_start, row)


@kernel(types.void(READ_INT64S, READ_INT32S, INT64S))
def add_numbers(values: Any, groups: Any, sums: Any) -> None:
    """Add each value to its group's sum, modulo 2^64: for counts, which never come near."""
    for row in range(groups.shape[0]):
        sums[groups[row]] += values[row]


@kernel(types.void(READ_UINT64S, INT64, READ_BYTES, INT64, READ_INT32S, INT64, UINT64S, BYTES))
def add_wide(
    values: Any,
    value_words: int,
    valid: Any,
    valid_start: int,
    groups: Any,
    sum_words: int,
    sums: Any,
    seen: Any,
) -> None:
    """Add each value of `value_words` words to its group's sum of `sum_words`, lowest word first, signed.

    `seen` (a byte a group) is set for groups with a valid row.
    """
    for row in range(groups.shape[0]):
        if not is_valid(valid, valid_start, row):
            continue
        group = np.int64(groups[row])
        seen[group] = 1
        first, into = row * value_words, group * sum_words
        sign = _ONES if values[first + value_words - 1] >> _SIGN_BIT else _U0
        carry = _U0
        for word in range(sum_words):
            addend = values[first + word] if word < value_words else sign
            before = sums[into + word]
            total = before + addend
            with_carry = total + carry
            carry = _U1 if total < before or with_carry < total else _U0
            sums[into + word] = with_carry


@helper
def _is_below(first: Any, second: Any, third: Any, left: Any, right: Any) -> bool:
    if first[left] != first[right] or second.shape[0] == 0:
        return bool(first[left] < first[right])
    if second[left] != second[right]:
        return bool(second[left] < second[right])
    return bool(third[left] < third[right])


@kernel(types.void(READ_INT64S, READ_INT64S, READ_INT64S, READ_BYTES, INT64, READ_INT32S, INT64, INT32S))
def pick_rows(
    first: Any, second: Any, third: Any, valid: Any, valid_start: int, groups: Any, highest: int, picked: Any
) -> None:
    """The valid row of each group with the lowest (`highest` 0) or highest (1) key, the earliest of equal ones.

    A key is (first, second, third), or `first` alone when the others have no elements. `picked` comes filled
    with -1, which stays for a group without a valid row.
    """
    for row in range(groups.shape[0]):
        if not is_valid(valid, valid_start, row):
            continue
        best = picked[groups[row]]
        if best < 0:
            is_better = True
        elif highest:
            is_better = _is_below(first, second, third, best, row)
        else:
            is_better = _is_below(first, second, third, row, best)
        if is_better:
            picked[groups[row]] = row


# -- HyperLogLog -----------------------------------------------------------------------------------

BITS: Final = 12
REGISTERS: Final = 1 << BITS
REST: Final = 64 - BITS  # bits of a hash that are counted
SPARSE, DENSE = 1, 2
MOST_SPARSE: Final = (REGISTERS - 1) // 3  # registers set in the first form
LARGEST: Final = REGISTERS + 1  # bytes
FEW: Final = 48  # registers that are quicker sorted than looked for
DOUBLES = types.Array(types.float64, 1, "C")
_BITS, _REST = np.uint64(BITS), np.uint64(REST)
_END = np.uint64(1 << (BITS - 1))  # stops the count at 53


@helper
def _raise(registers: Any, places: Any, met: Any, place: Any, value: Any) -> Any:
    """Raise a register; how many are set, the first `FEW` of them named in `places` as they come."""
    before = load(registers, place)
    if before == 0:
        if met < FEW:
            places[met] = place
        met += 1
    if value > before:
        store(registers, place, value)
    return met


@helper
def _put(content: Any, at: Any, place: Any, value: Any) -> Any:
    entry = (place << 6) | value
    store(content, at, entry >> 16)
    store(content, at + 1, (entry >> 8) & 255)
    store(content, at + 2, entry & 255)
    return at + 3


@helper
def _write(registers: Any, places: Any, met: Any, content: Any, at: Any) -> Any:
    """Write the sketch and set the registers back to 0; where it ends."""
    if met > MOST_SPARSE:
        store(content, at, DENSE)
        for place in range(REGISTERS):
            store(content, at + 1 + place, load(registers, place))
            store(registers, place, 0)
        return at + LARGEST
    store(content, at, SPARSE)
    at += 1
    if met <= FEW:
        for turn in range(1, met):
            place = places[turn]
            hole = turn
            while hole > 0 and places[hole - 1] > place:
                places[hole] = places[hole - 1]
                hole -= 1
            places[hole] = place
        for turn in range(met):
            at = _put(content, at, int64(places[turn]), load(registers, int64(places[turn])))
            store(registers, int64(places[turn]), 0)
        return at
    for place in range(REGISTERS):
        value = load(registers, place)
        if value != 0:
            at = _put(content, at, place, value)
            store(registers, place, 0)
    return at


@kernel(types.void(READ_UINT64S, READ_INT64S, READ_INT64S, BYTES, INT32S, BYTES))
def sketch_hashes(hashes: Any, order: Any, starts: Any, scratch: Any, ends: Any, content: Any) -> None:
    """One sketch for each group: of the hashes order[starts[g]:starts[g + 1]]. `scratch` are 4096 zeros."""
    registers, target = pointer(scratch), pointer(content)
    places = np.empty(FEW, np.int64)
    at = int64(0)
    ends[0] = 0
    for group in range(starts.shape[0] - 1):
        met = int64(0)
        for turn in range(starts[group], starts[group + 1]):
            number = hashes[order[turn]]
            value = int64(leading_zeros((number << _BITS) | _END)) + 1
            met = _raise(registers, places, met, int64(number >> _REST), value)
        at = _write(registers, places, met, target, at)
        ends[group + 1] = at


@helper
def _add(source: Any, first: Any, stop: Any, registers: Any, places: Any, met: Any) -> Any:
    """Raise the registers by a sketch: how many are set; -1 for bytes that are none."""
    if stop == first:
        return met
    form = load(source, first)
    if form == DENSE and stop - first == LARGEST:
        for place in range(REGISTERS):
            value = load(source, first + 1 + place)
            if value > REST + 1:
                return int64(-1)
            if value != 0:
                met = _raise(registers, places, met, place, value)
        return met
    if form != SPARSE or (stop - first - 1) % 3 != 0:
        return int64(-1)
    for at in range(first + 1, stop, 3):
        entry = (load(source, at) << 16) | (load(source, at + 1) << 8) | load(source, at + 2)
        place, value = entry >> 6, entry & 63
        if place >= REGISTERS or value == 0 or value > REST + 1:
            return int64(-1)
        met = _raise(registers, places, met, place, value)
    return met


@kernel(INT64(READ_BYTES, READ_INT32S, READ_INT64S, READ_INT64S, BYTES, INT32S, BYTES))
def merge_sketches(
    data: Any, bounds: Any, order: Any, starts: Any, scratch: Any, ends: Any, content: Any
) -> Any:
    """One sketch for each group: of the sketches order[starts[g]:starts[g + 1]]. The one that is none, or -1."""
    source, registers, target = pointer(data), pointer(scratch), pointer(content)
    places = np.empty(FEW, np.int64)
    at = int64(0)
    ends[0] = 0
    for group in range(starts.shape[0] - 1):
        met = int64(0)
        for turn in range(starts[group], starts[group + 1]):
            one = order[turn]
            met = _add(source, int64(bounds[one]), int64(bounds[one + 1]), registers, places, met)
            if met < 0:
                return one
        at = _write(registers, places, met, target, at)
        ends[group + 1] = at
    return int64(-1)


@helper
def _sigma(share: Any) -> Any:
    """x + Σ x^(2^k) · 2^(k − 1)."""
    if share == 1.0:
        return np.inf
    total, power, before = share, 1.0, -1.0
    while total != before:
        share *= share
        before = total
        total += share * power
        power += power
    return total


@helper
def _tau(share: Any) -> Any:
    """(1 − x − Σ (1 − x^(2^−k))² · 2^−k) / 3."""
    if share == 0.0 or share == 1.0:
        return 0.0
    total, power, before = 1.0 - share, 1.0, -1.0
    while total != before:
        share = np.sqrt(share)
        before = total
        power *= 0.5
        total -= (1.0 - share) ** 2 * power
    return total / 3.0


@kernel(INT64(READ_BYTES, READ_INT32S, DOUBLES))
def estimate_sketches(data: Any, bounds: Any, numbers: Any) -> Any:
    """How many different hashes each sketch has seen, about. The one that is none, or -1."""
    source = pointer(data)
    scratch = np.zeros(REGISTERS, np.uint8)
    registers = pointer(scratch)
    places = np.empty(FEW, np.int64)
    counts = np.zeros(REST + 2, np.int64)
    size = float(REGISTERS)
    for one in range(numbers.shape[0]):
        met = _add(source, int64(bounds[one]), int64(bounds[one + 1]), registers, places, int64(0))
        if met < 0:
            return int64(one)
        counts[:] = 0
        counts[0] = REGISTERS - met
        if met <= FEW:
            for turn in range(met):
                counts[load(registers, places[turn])] += 1
                store(registers, places[turn], 0)
        else:
            for place in range(REGISTERS):
                value = load(registers, place)
                if value != 0:
                    counts[value] += 1
                    store(registers, place, 0)
        total = size * _tau(1.0 - counts[REST + 1] / size)
        for value in range(REST, 0, -1):
            total = 0.5 * (total + counts[value])
        total += size * _sigma(counts[0] / size)
        numbers[one] = size * size / (2.0 * np.log(2.0)) / total
    keep(scratch)
    return int64(-1)
