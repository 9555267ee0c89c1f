"""Rows of columns as JSON objects: whole numbers, doubles and ready texts, written side by side in one pass.

A double is written here when a decimal number of at most 15 digits is exactly it: such a decimal is the only one of
so few digits that reads back as this double, so it is also the shortest. Of a value x that is m / 10^k for a whole
m below 10^15 the least such k is tried out: m is exact in a double, 10^k is too up to 10^22, and a division rounds
once, so m / 10^k == x says that the text reads back as x. All other doubles (long fractions, very large, very small,
minus zero, no number) are left to the caller, who hands their texts in.
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
from tidegate.kernels.memory import copy, load, pointer, store

READ_DOUBLES = types.Array(types.float64, 1, "C", readonly=True)

INTEGER: Final = 0  # numbers
DECIMAL: Final = 1  # numbers over a power of ten, or a text where there is no power
TEXT: Final = 2  # texts

LONGEST_NUMBER: Final = 24  # bytes of any number written here: sign, 19 digits, point, a leading zero
NO_POWER: Final = 255
LARGEST: Final = 10**15
SMALLEST: Final = 1e-6  # below it, and from the next on, Arrow's texts have an exponent
EXPONENT_FROM: Final = 1e10
MOST_DECIMALS: Final = 20
TENS: Final = np.array([10.0**power for power in range(MOST_DECIMALS + 1)])
NULL: Final = np.frombuffer(b"null", np.uint8)


@kernel(INT64(READ_DOUBLES, READ_DOUBLES, INT64S, BYTES))
def find_decimals(values: Any, tens: Any, numbers: Any, powers: Any) -> int:
    """Fill numbers and powers of ten whose quotients the values are; how many have none (`NO_POWER`)."""
    missing = 0
    for row in range(values.shape[0]):
        value = values[row]
        size = abs(value)
        power = NO_POWER
        number = 0
        if value == 0.0:
            if not np.signbit(value):
                power = 0
        elif SMALLEST <= size < EXPONENT_FROM:
            for tried in range(MOST_DECIMALS + 1):
                scaled = size * tens[tried]
                if scaled >= LARGEST:
                    break
                whole = np.rint(scaled)
                if whole / tens[tried] == size:
                    power = tried
                    number = int(whole) if value > 0.0 else -int(whole)
                    break
        if power == NO_POWER:
            missing += 1
        numbers[row] = number
        powers[row] = power
    return missing


@register_jitable
def _write_number(target: Any, at: int, number: int, power: int) -> int:
    """Write a number over 10^power; the position behind it."""
    if number < 0:
        store(target, at, 45)
        at += 1
    left = abs(number)
    digits = 1
    rest = left // 10
    while rest > 0:
        digits += 1
        rest //= 10
    if digits <= power:
        digits = power + 1
    end = at + digits + (1 if power > 0 else 0)
    place = end - 1
    for written in range(digits):
        if power > 0 and written == power:
            store(target, place, 46)
            place -= 1
        rest = left // 10
        store(target, place, 48 + left - 10 * rest)
        left = rest
        place -= 1
    return end


@kernel(
    INT64(
        INT64, READ_BYTES, READ_INT32S, READ_INT32S, READ_INT32S, READ_INT64S, READ_BYTES, READ_BYTES,
        READ_BYTES, READ_INT32S, READ_BYTES, INT64S, INT32S, BYTES,
    )
)  # fmt: skip
def write_json_objects(
    rows: int, names: Any, name_bounds: Any, kinds: Any, slots: Any, numbers: Any, powers: Any, valid: Any,
    texts: Any, text_bounds: Any, null: Any, cursors: Any, ends: Any, content: Any,
) -> int:  # fmt: skip
    """Write an object for each row; the bytes that took.

    Field f begins with the bytes `names[name_bounds[f]:…]`, its opening brace or comma among them. Its numbers and
    powers lie at `slots[f] * rows`, its flags in `valid` at `f * rows`. Texts of all fields lie behind each other;
    `cursors[f]` is the next one of field f: a TEXT field has one for each row, a DECIMAL one for each row without a
    power.
    """
    name_bytes, text_bytes, target = pointer(names), pointer(texts), pointer(content)
    null_bytes, power_of = pointer(null), pointer(powers)
    fields = kinds.shape[0]
    at = 0
    ends[0] = 0
    for row in range(rows):
        for field in range(fields):
            length = name_bounds[field + 1] - name_bounds[field]
            copy(target, at, name_bytes, name_bounds[field], length)
            at += length
            kind = kinds[field]
            place = slots[field] * rows + row
            is_text = kind == TEXT or (kind == DECIMAL and load(power_of, place) == NO_POWER)
            if valid[field * rows + row] == 0:
                copy(target, at, null_bytes, 0, 4)
                at += 4
            elif is_text:
                text = cursors[field]
                length = text_bounds[text + 1] - text_bounds[text]
                copy(target, at, text_bytes, text_bounds[text], length)
                at += length
            elif kind == INTEGER:
                at = _write_number(target, at, numbers[place], 0)
            else:
                at = _write_number(target, at, numbers[place], load(power_of, place))
            if is_text:
                cursors[field] += 1
        store(target, at, 125)
        at += 1
        ends[row + 1] = at
    return at
