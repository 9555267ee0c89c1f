"""Read JSON objects into typed columns, and write columns as JSON objects, in one pass.

A row read is good, has no value, or is *irregular*: then a full parser must read it. Good rows are exact. Irregular are
text that is not JSON, a declared field that occurs twice, another type than declared, a required field that is null or
absent, numbers with too many digits, half a surrogate pair, and names with escapes. Undeclared fields are checked and
skipped. Columns of one kind are concatenated: with n rows, field f of a row has its number at slot × n + row, its
string's end at slot × (n + 1) + row + 1, its string's bytes from slot × room on, its flag at f × n + row.

A double is written here when a decimal number of at most 15 digits is exactly it, which is then also the shortest. The
least k is tried for which m / 10^k is the value with a whole m below 10^15: m and 10^k (up to 10^22) are exact and a
division rounds once, so the text reads back as the value. The caller passes the texts of all other doubles.
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
    READ_FLAGS,
    READ_INT32S,
    READ_INT64S,
    are_equal,
    copy,
    helper,
    keep,
    kernel,
    load,
    pointer,
    store,
)
from tidegate.kernels.json_text import (
    CLOSE_OBJECT,
    COLON,
    COMMA,
    ESCAPED,
    MINUS,
    NOWHERE,
    OPEN_OBJECT,
    QUOTE,
    UNKNOWN,
    WHOLE,
    copy_text,
    double_bits,
    is_digit,
    pass_literal,
    pass_string,
    pass_value,
    read_number,
    skip_blanks,
    unescape,
)  # fmt: skip

# -- reading ---------------------------------------------------------------------------------------

SIGN: Final = -(1 << 63)
INTEGER: Final = 0
DOUBLE: Final = 1
BOOLEAN: Final = 2
STRING: Final = 3
TEXT: Final = 4  # any value, as the JSON text it is
GOOD: Final = 0
NO_VALUE: Final = 1
IRREGULAR: Final = 2
REMEMBERED: Final = 8  # members of a row that are passed over and may come again as they were


@helper
def find_field(
    source: Any, at: int, close: int, names: Any, name_limits: Any, fields: int, expected: int
) -> int:
    """The index of the declared field named source[at:close]; -1 for none."""
    for step in range(fields):
        field = expected + step
        if field >= fields:
            field -= fields
        if are_equal(source, at, close, names, load(name_limits, field), load(name_limits, field + 1)):
            return field
    return -1


@helper
def is_again(source: Any, at: int, end: int, known: Any, number: int) -> bool:
    """Whether here stands, up to a comma or the object's end, what a row before had as a member to be passed over."""
    start, length = load(known, 2 * number), load(known, 2 * number + 1)
    after = at + length
    if length == 0 or after >= end:
        return False
    byte = load(source, after)
    if byte != COMMA and byte != CLOSE_OBJECT:
        return False
    return are_equal(source, start, start + length, source, at, after)


@helper
def read_whole(source: Any, at: int, end: int, last_word: int, target: Any, place: int) -> int:
    """Store the whole number at `at`; the position after it, or `NOWHERE`."""
    after, negative, digits, _, kind = read_number(source, at, end, last_word)
    if kind != WHOLE:
        return NOWHERE
    store(target, place, -digits if negative else digits)
    return after


@helper
def read_double(source: Any, at: int, end: int, last_word: int, target: Any, place: int) -> int:
    """Store the bits of the double nearest to the number at `at`; the position after it, or `NOWHERE`."""
    after, negative, digits, power, kind = read_number(source, at, end, last_word)
    if kind == UNKNOWN:
        return NOWHERE
    bits = double_bits(digits, power)
    if bits < 0:
        return NOWHERE
    store(target, place, bits + SIGN if negative else bits)  # bits are not negative: this sets the 64th
    return after


@helper
def read_string(
    source: Any, at: int, end: int, last_word: int, target: Any, base: int, ends: Any, place: int
) -> int:
    """Append the string at `at` to its column; the position after it, or `NOWHERE`."""
    if load(source, at) != QUOTE:
        return NOWHERE
    close, escapes = pass_string(source, at + 1, end, last_word)
    if close < 0:
        return NOWHERE
    into = base + load(ends, place)
    if escapes == ESCAPED:
        after = unescape(source, at + 1, close, target, into)
        if after < 0:
            return NOWHERE
    else:
        after = copy_text(source, at + 1, close, target, into)
    store(ends, place + 1, after - base)
    return close + 1


@helper
def read_text(
    source: Any, at: int, end: int, last_word: int, target: Any, base: int, ends: Any, place: int
) -> int:
    """Append the value at `at`, as it is written, to its column; the position after it, or `NOWHERE`."""
    after = pass_value(source, at, end, last_word)
    if after < 0:
        return NOWHERE
    store(ends, place + 1, copy_text(source, at, after, target, base + load(ends, place)) - base)
    return after


@kernel(
    INT64(
        READ_BYTES, READ_INT32S, READ_FLAGS, READ_BYTES, READ_INT32S, READ_INT32S, READ_INT32S, READ_INT32S,
        INT64, INT64S, INT32S, BYTES, BYTES, BYTES, INT64S,
    )
)  # fmt: skip
def read_json_rows(
    data: Any, bounds: Any, present: Any, names: Any, name_bounds: Any, kinds: Any, slots: Any, required: Any,
    room: int, numbers: Any, string_ends: Any, string_content: Any, valid: Any, verdicts: Any, seen: Any,
) -> int:  # fmt: skip
    """Read every row; returns the number of irregular ones.

    `seen` has room for one number a field and is used up here; `room` is the bytes each string column has, at
    least as many as all rows have together.
    """
    source, limits, fields, rows = pointer(data), pointer(bounds), kinds.shape[0], present.shape[0]
    name_source, name_limits = pointer(names), pointer(name_bounds)
    kind_of, slot_of, is_required = pointer(kinds), pointer(slots), pointer(required)
    number_of, ends, content = pointer(numbers), pointer(string_ends), pointer(string_content)
    flags, verdict_of, seen_in = pointer(valid), pointer(verdicts), pointer(seen)
    last_word, irregular = data.shape[0] - 8, 0
    spans = np.zeros(2 * REMEMBERED, np.int64)
    known = pointer(spans)
    for field in range(fields):
        store(seen_in, field, -1)
        if load(kind_of, field) >= STRING:
            store(ends, load(slot_of, field) * (rows + 1), 0)
    for row in range(rows):
        at, end = load(limits, row), load(limits, row + 1)
        verdict, expected, found, passed = IRREGULAR, 0, 0, 0
        at = skip_blanks(source, at, end)
        if not present[row]:
            verdict, at = NO_VALUE, end
        elif at < end and load(source, at) == OPEN_OBJECT:
            at = skip_blanks(source, at + 1, end)
            if at < end and load(source, at) == CLOSE_OBJECT:
                verdict = GOOD
        else:
            at = end
        while verdict == IRREGULAR and at < end:
            # a name, and what it is called
            if load(source, at) != QUOTE:
                break
            name, field, member = at + 1, -1, at
            if passed < REMEMBERED and is_again(source, at, end, known, passed):
                at += load(known, 2 * passed + 1)
                passed += 1
                byte = load(source, at)
                if byte == CLOSE_OBJECT:
                    verdict = GOOD
                elif byte == COMMA:
                    at = skip_blanks(source, at + 1, end)
                continue
            if expected < fields:
                first, last = load(name_limits, expected), load(name_limits, expected + 1)
                close = name + last - first
                is_there = close < end and load(source, close) == QUOTE
                if is_there and are_equal(source, name, close, name_source, first, last):
                    field = expected
            if field < 0:
                close, escapes = pass_string(source, name, end, last_word)
                if close < 0 or escapes == ESCAPED:
                    break
                if expected == fields:
                    expected = 0
                field = find_field(source, name, close, name_source, name_limits, fields, expected)
            at = skip_blanks(source, close + 1, end)
            if at >= end or load(source, at) != COLON:
                break
            at = skip_blanks(source, at + 1, end)
            if at >= end:
                break
            # its value
            if field < 0:
                at = pass_value(source, at, end, last_word)
                if passed < REMEMBERED:
                    store(known, 2 * passed, member)
                    store(known, 2 * passed + 1, max(0, at - member))
                    passed += 1
            else:
                if load(seen_in, field) == row:
                    break
                store(seen_in, field, row)
                expected, found = field + 1, found + 1
                kind, slot, letter = load(kind_of, field), load(slot_of, field), load(source, at)
                place = slot * rows + row if kind < STRING else slot * (rows + 1) + row
                store(flags, field * rows + row, 1)
                if letter == 0x6E:  # null
                    at = pass_literal(source, at, end)
                    if load(is_required, field):
                        break
                    store(flags, field * rows + row, 0)
                    if kind >= STRING:
                        store(ends, place + 1, load(ends, place))
                    else:
                        store(number_of, place, 0)
                elif kind == STRING:
                    at = read_string(source, at, end, last_word, content, slot * room, ends, place)
                elif kind == TEXT:
                    at = read_text(source, at, end, last_word, content, slot * room, ends, place)
                elif kind == BOOLEAN:
                    store(number_of, place, letter == 0x74)
                    at = pass_literal(source, at, end) if letter == 0x74 or letter == 0x66 else NOWHERE
                elif letter != MINUS and not is_digit(letter):
                    break
                elif kind == INTEGER:
                    at = read_whole(source, at, end, last_word, number_of, place)
                else:
                    at = read_double(source, at, end, last_word, number_of, place)
            if at < 0:
                break
            at = skip_blanks(source, at, end)
            if at >= end:
                break
            byte = load(source, at)
            if byte == CLOSE_OBJECT:
                verdict = GOOD
            elif byte != COMMA:
                break
            else:
                at = skip_blanks(source, at + 1, end)
        if verdict == GOOD and skip_blanks(source, at + 1, end) != end:
            verdict = IRREGULAR
        if verdict == GOOD and found < fields:
            for field in range(fields):
                if load(seen_in, field) != row and load(is_required, field):
                    verdict = IRREGULAR
        if verdict != GOOD or found < fields:
            for field in range(fields):
                if verdict != GOOD or load(seen_in, field) != row:
                    slot = load(slot_of, field)
                    store(flags, field * rows + row, 0)
                    if load(kind_of, field) >= STRING:
                        place = slot * (rows + 1) + row
                        store(ends, place + 1, load(ends, place))
                    else:
                        store(number_of, slot * rows + row, 0)
        irregular += verdict == IRREGULAR
        store(verdict_of, row, verdict)
    keep(spans)
    return irregular


# -- writing ---------------------------------------------------------------------------------------

READ_DOUBLES = types.Array(types.float64, 1, "C", readonly=True)
DECIMAL: Final = 1  # numbers over a power of ten, or a text where there is no power
TEXTS: Final = 2  # texts
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


@helper
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
            is_text = kind == TEXTS or (kind == DECIMAL and load(power_of, place) == NO_POWER)
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
