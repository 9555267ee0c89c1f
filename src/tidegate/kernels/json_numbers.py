"""Decimal text to the nearest double, and to whole numbers, inside kernels; exact or not at all.

A decimal number is w × 10**q. Its nearest double comes from the top bits of w × 5**q, of which a table holds 128
bits (the Eisel-Lemire algorithm): where those decide how to round, the answer is the correctly rounded one; where
they do not, and for numbers of more than 19 digits, subnormal ones and ones too large, there is no answer here
and a full parser must be asked. Only whole-number arithmetic takes place.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba.extending import register_jitable

from tidegate.kernels.json_text import DOT, MINUS, NOWHERE, ZERO, is_digit
from tidegate.kernels.key_bytes import load_word
from tidegate.kernels.memory import load
from tidegate.kernels.words import add_words, leading_zeros, multiply_high, multiply_low, trailing_zeros

LEAST_POWER: Final = -342
LARGEST_POWER: Final = 308
WHOLE: Final = 1
FRACTION: Final = 2
UNKNOWN: Final = 0


def _powers_of_five() -> np.ndarray[Any, np.dtype[np.uint64]]:
    """For each power, 5**q scaled to 128 bits with the highest one set: the upper and the lower half."""
    halves = []
    for power in range(LEAST_POWER, LARGEST_POWER + 1):
        if power >= 0:
            exact = 5**power
            surplus = exact.bit_length() - 128
            scaled = exact >> surplus if surplus > 0 else exact << -surplus
        else:  # the reciprocal, rounded up
            divisor = 5**-power
            bits = (divisor - 1).bit_length()
            scaled = (1 << (bits + 127 if power >= -27 else 2 * bits + 128)) // divisor + 1
            scaled >>= max(0, scaled.bit_length() - 128)
        halves += [scaled >> 64, scaled & (1 << 64) - 1]
    return np.array(halves, np.uint64)


POWERS: Final = _powers_of_five()
_LOW_NINE: Final = np.uint64(0x1FF)
_ALL: Final = np.uint64(0xFFFFFFFFFFFFFFFF)
_ONE: Final = np.uint64(1)
_THREE: Final = np.uint64(3)
_HIDDEN_BIT: Final = 1 << 52
TENS: Final = np.array([10**power for power in range(9)], np.int64)
_ZEROS: Final = np.uint64(0x3030303030303030)
_ABOVE_NINE: Final = np.uint64(0x7676767676767676)
_HIGHS: Final = np.uint64(0x8080808080808080)
_PAIRS, _FOURS = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
# each byte (pair, four) times ten (a hundred, ten thousand) and the one behind it
_TENS, _HUNDREDS, _THOUSANDS = np.uint64(2561), np.uint64(6553601), np.uint64(42949672960001)


@register_jitable
def double_bits(digits: int, power: int) -> Any:
    """The bits of the double nearest to digits × 10**power, or `NOWHERE`; `digits` is 0 or more."""
    if digits == 0:
        return 0
    if power < LEAST_POWER or power > LARGEST_POWER:
        return NOWHERE
    word = np.uint64(digits)
    shift = leading_zeros(word)
    word = word << np.uint64(shift)
    place = 2 * (power - LEAST_POWER)
    high, low = multiply_high(word, POWERS[place]), multiply_low(word, POWERS[place])
    if high & _LOW_NINE == _LOW_NINE:  # the lower half of the power may carry into what decides
        more = multiply_high(word, POWERS[place + 1])
        low = add_words(low, more)
        if low < more:
            high = add_words(high, _ONE)
    if low == _ALL and (power < -27 or power > 55):
        return NOWHERE
    upper = np.int64(high >> np.uint64(63))
    cut = np.uint64(upper + 9)
    mantissa = high >> cut
    exponent = ((217706 * power) >> 16) + 63 + upper - shift + 1023
    if exponent <= 0:
        return NOWHERE
    # Exactly between two doubles, the even one: only such powers can get there.
    if low <= _ONE and -4 <= power <= 23 and mantissa & _THREE == _ONE and mantissa << cut == high:
        mantissa = mantissa & ~_ONE
    fraction: Any = np.int64((mantissa + (mantissa & _ONE)) >> _ONE)
    if fraction >= 2 * _HIDDEN_BIT:
        fraction, exponent = _HIDDEN_BIT, exponent + 1
    if exponent >= 0x7FF:
        return NOWHERE
    return exponent << 52 | (fraction & (_HIDDEN_BIT - 1))


@register_jitable
def _leading_digits(word: Any) -> Any:
    """How many of eight bytes, from the first on, are digits; and the number those are, if not all eight are."""
    word ^= _ZEROS
    others = (add_words(word, _ABOVE_NINE) | word) & _HIGHS  # right up to the first that is no digit
    count = trailing_zeros(others) >> 3
    if count == 0 or count == 8:
        return count, 0
    word <<= np.uint64(64 - 8 * count)  # zeros before the first digit
    word = multiply_low(word, _TENS) >> np.uint64(8)
    word = multiply_low(word & _PAIRS, _HUNDREDS) >> np.uint64(16)
    return count, np.int64(multiply_low(word & _FOURS, _THOUSANDS) >> np.uint64(32))


@register_jitable
def _read_short(source: Any, at: int, end: int, last_word: int) -> tuple[int, int, int, int]:
    """A number of at most seven digits before its point and as many behind, word by word: the position after it, its
    digits, power and kind. `UNKNOWN`: it is another one."""
    if at > last_word:
        return at, 0, 0, UNKNOWN
    count, digits = _leading_digits(load_word(source, at))
    after = at + count
    if count == 0 or count == 8 or after >= end or (count > 1 and load(source, at) == ZERO):
        return at, 0, 0, UNKNOWN
    byte = load(source, after)
    if byte != DOT:
        return after, digits, 0, UNKNOWN if byte | 0x20 == 0x65 else WHOLE
    at = after + 1
    if at > last_word:
        return at, 0, 0, UNKNOWN
    count, fraction = _leading_digits(load_word(source, at))
    after = at + count
    if count == 0 or count == 8 or after >= end or load(source, after) | 0x20 == 0x65:
        return at, 0, 0, UNKNOWN
    return after, digits * TENS[count] + fraction, -count, FRACTION


@register_jitable
def _read_digits(source: Any, at: Any, end: Any, digits: Any, significant: Any) -> Any:
    """Digits from `at` on behind those read before: the position after them, all of them, and how many count.

    The last is negative when they are more than a number can hold.
    """
    while at < end:
        byte = load(source, at)
        if not is_digit(byte):
            break
        if significant >= 18 and not (significant == 18 and fits(digits, byte - ZERO)):
            return at, 0, -1
        digits = 10 * digits + byte - ZERO
        significant += digits != 0
        at += 1
    return at, digits, significant


@register_jitable
def read_number(source: Any, at: int, end: int, last_word: int) -> tuple[int, int, int, int, int]:
    """The number at `at`: the position after it, whether it is negative, its digits and power, and its kind.

    Its value is ± digits × 10**power. `UNKNOWN` as the kind means it is no number, or has more than 19 digits or
    digits above 2**63 - 1. `last_word` is the last place where eight bytes can be read, in or after the text.
    """
    negative = 0
    if load(source, at) == MINUS:
        negative, at = 1, at + 1
    after, digits, power, kind = _read_short(source, at, end, last_word)
    if kind != UNKNOWN:
        return after, negative, digits, power, kind
    first, power, kind = at, 0, WHOLE
    at, digits, significant = _read_digits(source, at, end, np.int64(0), np.int64(0))
    if significant < 0 or at == first or (load(source, first) == ZERO and at - first > 1):
        return at, negative, 0, 0, UNKNOWN
    if at < end and load(source, at) == DOT:
        at, kind = at + 1, FRACTION
        first = at
        at, digits, significant = _read_digits(source, at, end, digits, significant)
        if significant < 0 or at == first:
            return at, negative, 0, 0, UNKNOWN
        power = first - at
    if at < end and load(source, at) | 0x20 == 0x65:
        at, kind = at + 1, FRACTION
        falling: Any = 0
        if at < end and (load(source, at) == MINUS or load(source, at) == 0x2B):
            falling, at = np.int64(load(source, at) == MINUS), at + 1
        first, exponent = at, 0
        while at < end and is_digit(load(source, at)):
            if exponent > 9999:
                return at, negative, 0, 0, UNKNOWN
            exponent = 10 * exponent + load(source, at) - ZERO
            at += 1
        if at == first:
            return at, negative, 0, 0, UNKNOWN
        power += -exponent if falling else exponent
    return at, negative, digits, power, kind


@register_jitable(forceinline=True)
def fits(digits: int, digit: int) -> bool:
    """Whether one more digit keeps a number within 63 bits."""
    return digits < 922337203685477580 or (digits == 922337203685477580 and digit <= 7)
