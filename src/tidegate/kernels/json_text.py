"""Parse JSON text and numbers inside kernels.

Every function takes the end of the text, never reads beyond it, and returns `NOWHERE` when the text is not JSON or not
supported (nesting deeper than 62); the caller then uses a full parser. Strings must be well-formed UTF-8.

A decimal number is w × 10**q. Its nearest double comes from the top bits of w × 5**q, of which a table holds 128 bits
(the Eisel-Lemire algorithm), by integer arithmetic. Where those do not decide the rounding, and for numbers of more
than 19 digits, subnormal and too large ones, there is no result.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tidegate.kernels.jit import (
    copy_key,
    helper,
    leading_zeros,
    load,
    load_word,
    multiply_high,
    store,
    trailing_zeros,
)

# -- JSON text -------------------------------------------------------------------------------------

NOWHERE: Final = -1
DEEPEST: Final = 62
PLAIN: Final = 0
ESCAPED: Final = 1
QUOTE: Final = 0x22
BACKSLASH: Final = 0x5C
MINUS: Final = 0x2D
DOT: Final = 0x2E
ZERO: Final = 0x30
COMMA: Final = 0x2C
COLON: Final = 0x3A
OPEN_OBJECT: Final = 0x7B
CLOSE_OBJECT: Final = 0x7D
OPEN_LIST: Final = 0x5B
CLOSE_LIST: Final = 0x5D
_ONES: Final = np.uint64(0x0101010101010101)
_HIGHS: Final = np.uint64(0x8080808080808080)
_QUOTES: Final = np.uint64(0x2222222222222222)
_BACKSLASHES: Final = np.uint64(0x5C5C5C5C5C5C5C5C)
_BLANKS: Final = np.uint64(0x2020202020202020)
_NONE: Final = np.uint64(0)
_LETTER_N: Final = 0x6E
_LETTER_T: Final = 0x74
_LETTER_F: Final = 0x66
_LETTER_U: Final = 0x75


@helper(forceinline=True)
def skip_blanks(source: Any, at: int, end: int) -> int:
    while at < end:
        byte = load(source, at)
        if byte > 0x20 or not (byte == 0x20 or byte == 0x0A or byte == 0x0D or byte == 0x09):
            break
        at += 1
    return at


@helper
def special_bytes(word: Any) -> Any:
    """The top bit of the first byte that is a quote, a backslash, a control or not ASCII; above it, anything."""
    quotes, backslashes = word ^ _QUOTES, word ^ _BACKSLASHES
    return (
        ((quotes - _ONES) & ~quotes)
        | ((backslashes - _ONES) & ~backslashes)
        | ((word - _BLANKS) & ~word)
        | word
    ) & _HIGHS


@helper
def pass_character(source: Any, at: int, end: int) -> int:
    """The position after one well-formed UTF-8 character that is not ASCII."""
    lead = load(source, at)
    if lead < 0xC2 or lead > 0xF4:
        return NOWHERE
    more = 1 if lead < 0xE0 else (2 if lead < 0xF0 else 3)
    if at + more >= end:
        return NOWHERE
    second = load(source, at + 1)
    lowest, highest = 0x80, 0xBF
    if lead == 0xE0:
        lowest = 0xA0
    elif lead == 0xED:  # surrogates are no characters
        highest = 0x9F
    elif lead == 0xF0:
        lowest = 0x90
    elif lead == 0xF4:
        highest = 0x8F
    if second < lowest or second > highest:
        return NOWHERE
    for index in range(2, more + 1):
        if load(source, at + index) & 0xC0 != 0x80:
            return NOWHERE
    return at + more + 1


@helper
def hex_digit(byte: int) -> int:
    if 0x30 <= byte <= 0x39:
        return byte - 0x30
    letter = byte | 0x20
    if 0x61 <= letter <= 0x66:
        return letter - 0x61 + 10
    return NOWHERE


@helper
def hex_number(source: Any, at: int, end: int) -> int:
    """The number of four hexadecimal digits."""
    if at + 4 > end:
        return NOWHERE
    number = 0
    for index in range(4):
        digit = hex_digit(load(source, at + index))
        if digit < 0:
            return NOWHERE
        number = number << 4 | digit
    return number


@helper
def pass_escape(source: Any, at: int, end: int) -> int:
    """The position after the escape whose backslash is at `at`."""
    if at + 1 >= end:
        return NOWHERE
    kind = load(source, at + 1)
    if kind == _LETTER_U:
        return at + 6 if hex_number(source, at + 2, end) >= 0 else NOWHERE
    return at + 2 if simple_escape(kind) >= 0 else NOWHERE


@helper
def simple_escape(kind: int) -> int:
    """The byte that a backslash and this letter stand for."""
    if kind in (QUOTE, BACKSLASH, 0x2F):
        return kind
    if kind == 0x62:
        return 0x08
    if kind == _LETTER_F:
        return 0x0C
    if kind == _LETTER_N:
        return 0x0A
    if kind == 0x72:
        return 0x0D
    return 0x09 if kind == _LETTER_T else NOWHERE


@helper
def pass_string(source: Any, at: int, end: int, last_word: int) -> tuple[int, int]:
    """The place of the closing quote of the string whose opening quote is before `at`; whether it has escapes.

    `last_word` is the last place where eight bytes can be read, in or after the text.
    """
    escapes = PLAIN
    while at < end:
        if at <= last_word:
            special = special_bytes(load_word(source, at))
            if special == _NONE:
                at += 8
                continue
            at += trailing_zeros(special) >> 3
            if at >= end:
                break
        byte = load(source, at)
        if byte == QUOTE:
            return at, escapes
        if byte == BACKSLASH:
            escapes = ESCAPED
            at = pass_escape(source, at, end)
        elif byte >= 0x80:
            at = pass_character(source, at, end)
        elif byte < 0x20:
            at = NOWHERE
        else:
            at += 1
        if at < 0:
            break
    return NOWHERE, escapes


@helper
def store_character(target: Any, at: int, code: int) -> int:
    """Write a character as UTF-8; the position after it."""
    if code < 0x80:
        store(target, at, code)
        return at + 1
    if code < 0x800:
        store(target, at, 0xC0 | code >> 6)
        store(target, at + 1, 0x80 | code & 0x3F)
        return at + 2
    if code < 0x10000:
        store(target, at, 0xE0 | code >> 12)
        store(target, at + 1, 0x80 | code >> 6 & 0x3F)
        store(target, at + 2, 0x80 | code & 0x3F)
        return at + 3
    store(target, at, 0xF0 | code >> 18)
    store(target, at + 1, 0x80 | code >> 12 & 0x3F)
    store(target, at + 2, 0x80 | code >> 6 & 0x3F)
    store(target, at + 3, 0x80 | code & 0x3F)
    return at + 4


@helper
def unescape(source: Any, at: int, close: int, target: Any, into: int) -> int:
    """Write a string that was passed, with its escapes resolved; the position after it in `target`.

    Half of a surrogate pair is no character: `NOWHERE`. Never writes more bytes than it reads.
    """
    while at < close:
        byte = load(source, at)
        if byte != BACKSLASH:
            store(target, into, byte)
            at, into = at + 1, into + 1
            continue
        kind = load(source, at + 1)
        if kind != _LETTER_U:
            store(target, into, simple_escape(kind))
            at, into = at + 2, into + 1
            continue
        code = hex_number(source, at + 2, close)
        at += 6
        if 0xD800 <= code < 0xE000:
            if code >= 0xDC00 or at + 6 > close or load(source, at) != BACKSLASH:
                return NOWHERE
            low = hex_number(source, at + 2, close) if load(source, at + 1) == _LETTER_U else NOWHERE
            if low < 0xDC00 or low >= 0xE000:
                return NOWHERE
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
            at += 6
        into = store_character(target, into, code)
    return into


@helper(forceinline=True)
def is_digit(byte: int) -> bool:
    return 0x30 <= byte <= 0x39


@helper
def pass_digits(source: Any, at: int, end: int) -> int:
    """The position after at least one digit."""
    if at >= end or not is_digit(load(source, at)):
        return NOWHERE
    while at < end and is_digit(load(source, at)):
        at += 1
    return at


@helper
def pass_number(source: Any, at: int, end: int) -> int:
    """The position after a number."""
    if load(source, at) == MINUS:
        at += 1
    if at < end and load(source, at) == ZERO:
        at += 1
    else:
        at = pass_digits(source, at, end)
        if at < 0:
            return NOWHERE
    if at < end and load(source, at) == DOT:
        at = pass_digits(source, at + 1, end)
        if at < 0:
            return NOWHERE
    if at < end and load(source, at) | 0x20 == 0x65:
        at += 1
        if at < end and (load(source, at) == MINUS or load(source, at) == 0x2B):
            at += 1
        at = pass_digits(source, at, end)
    return at


@helper
def pass_literal(source: Any, at: int, end: int) -> int:
    """The position after true, false or null."""
    first = load(source, at)
    if first == _LETTER_F:
        if at + 5 > end or load(source, at + 4) != 0x65:
            return NOWHERE
        matches = (
            load(source, at + 1) == 0x61 and load(source, at + 2) == 0x6C and load(source, at + 3) == 0x73
        )
        return at + 5 if matches else NOWHERE
    if at + 4 > end:
        return NOWHERE
    second, third, fourth = load(source, at + 1), load(source, at + 2), load(source, at + 3)
    if first == _LETTER_T and second == 0x72 and third == _LETTER_U and fourth == 0x65:
        return at + 4
    if first == _LETTER_N and second == _LETTER_U and third == 0x6C and fourth == 0x6C:
        return at + 4
    return NOWHERE


@helper
def pass_scalar(source: Any, at: int, end: int, last_word: int) -> int:
    """The position after a string, a number, true, false or null."""
    first = load(source, at)
    if first == QUOTE:
        close, _ = pass_string(source, at + 1, end, last_word)
        return close + 1 if close >= 0 else NOWHERE
    if first == MINUS or is_digit(first):
        return pass_number(source, at, end)
    return pass_literal(source, at, end)


@helper
def pass_name(source: Any, at: int, end: int, last_word: int) -> int:
    """The position of the value after a member's name and colon."""
    if at >= end or load(source, at) != QUOTE:
        return NOWHERE
    close, _ = pass_string(source, at + 1, end, last_word)
    if close < 0:
        return NOWHERE
    at = skip_blanks(source, close + 1, end)
    if at >= end or load(source, at) != COLON:
        return NOWHERE
    return skip_blanks(source, at + 1, end)


@helper
def pass_value(source: Any, at: int, end: int, last_word: int) -> int:
    """The position after any value; `at` is at its first byte."""
    depth, objects = 0, 0  # bit d of `objects`: what is open at depth d is an object
    while True:
        if at >= end:
            return NOWHERE
        first = load(source, at)
        if first in (OPEN_OBJECT, OPEN_LIST):
            is_object = first == OPEN_OBJECT
            at = skip_blanks(source, at + 1, end)
            if at >= end:
                return NOWHERE
            if load(source, at) == (CLOSE_OBJECT if is_object else CLOSE_LIST):
                at += 1
            else:
                if depth == DEEPEST:
                    return NOWHERE
                depth += 1
                if is_object:
                    objects |= 1 << depth
                    at = pass_name(source, at, end, last_word)
                    if at < 0:
                        return NOWHERE
                else:
                    objects &= ~(1 << depth)
                continue
        else:
            at = pass_scalar(source, at, end, last_word)
            if at < 0:
                return NOWHERE
        # A value ends here: close what it was the last of, up to the next comma.
        while depth > 0:
            at = skip_blanks(source, at, end)
            if at >= end:
                return NOWHERE
            byte, in_object = load(source, at), objects >> depth & 1
            if byte == COMMA:
                at = skip_blanks(source, at + 1, end)
                if in_object:
                    at = pass_name(source, at, end, last_word)
                    if at < 0:
                        return NOWHERE
                break
            if byte != (CLOSE_OBJECT if in_object else CLOSE_LIST):
                return NOWHERE
            at, depth = at + 1, depth - 1
        if depth == 0:
            return at


@helper
def copy_text(source: Any, at: int, close: int, target: Any, into: int) -> int:
    copy_key(target, into, source, at, close - at)
    return into + close - at


# -- JSON numbers ----------------------------------------------------------------------------------

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
_PAIRS, _FOURS = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
# each byte (pair, four) times ten (a hundred, ten thousand) and the one behind it
_TENS, _HUNDREDS, _THOUSANDS = np.uint64(2561), np.uint64(6553601), np.uint64(42949672960001)


@helper
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
    high, low = multiply_high(word, POWERS[place]), word * POWERS[place]
    if high & _LOW_NINE == _LOW_NINE:  # the lower half of the power may carry into what decides
        more = multiply_high(word, POWERS[place + 1])
        low += more
        if low < more:
            high += _ONE
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


@helper
def _leading_digits(word: Any) -> Any:
    """How many of eight bytes, from the first on, are digits; and the number those are, if not all eight are."""
    word ^= _ZEROS
    others = ((word + _ABOVE_NINE) | word) & _HIGHS  # right up to the first that is no digit
    count = trailing_zeros(others) >> 3
    if count == 0 or count == 8:
        return count, 0
    word <<= np.uint64(64 - 8 * count)  # zeros before the first digit
    word = (word * _TENS) >> np.uint64(8)
    word = ((word & _PAIRS) * _HUNDREDS) >> np.uint64(16)
    return count, np.int64(((word & _FOURS) * _THOUSANDS) >> np.uint64(32))


@helper
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


@helper
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


@helper
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


@helper(forceinline=True)
def fits(digits: int, digit: int) -> bool:
    """Whether one more digit keeps a number within 63 bits."""
    return digits < 922337203685477580 or (digits == 922337203685477580 and digit <= 7)
