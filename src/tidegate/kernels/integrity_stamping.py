"""Fresh `div` headers for many records, over Arrow buffers (layout: `integrity/header.py`).

`stamp_records` numbers and check-sums rows as long as they fit their chain, and writes 40 bytes for each;
`measure_headers` and `merge_headers` put those behind the headers the rows came with. A `div` or `divc` that
a row came with is left out: it belonged to another log.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import BYTES, INT32S, INT64, INT64S, READ_BYTES, kernel
from tidegate.kernels.crc32 import ONES, fold_bytes, fold_int32
from tidegate.kernels.encoding import RECORD_SOURCE, Column, RecordSource, column_of, length_at
from tidegate.kernels.integrity_headers import HEADERS_ONLY, STAMP_BYTES, is_div
from tidegate.kernels.memory import copy, load, pointer, store
from tidegate.kernels.record_checksum import data_crc, data_field_sum

PUT: Final = 0
DELETE: Final = 1
ADHASH: Final = 4
ADHASH2: Final = 5
CONTROL_KEY_BYTES: Final = 33

# Positions in the array `stamp_records` answers through.
STOP: Final = 0
CHECKSUM: Final = 1
USED_BYTES: Final = 2
RESERVED_ROW: Final = 3


@register_jitable
def store_int32(target: Any, at: int, value: int) -> None:
    """Four bytes, big-endian."""
    store(target, at, value >> 24)
    store(target, at + 1, value >> 16)
    store(target, at + 2, value >> 8)
    store(target, at + 3, value)


@register_jitable
def is_control_key(key: Column, row: int) -> bool:
    """Whether a key, 33 bytes long, begins with `00 "DIV" 00`."""
    at = load(key.ends, row)
    first = load(key.content, at) == 0 and load(key.content, at + 1) == 0x44
    second = load(key.content, at + 2) == 0x49 and load(key.content, at + 3) == 0x56
    return first and second and load(key.content, at + 4) == 0


@kernel(types.void(RECORD_SOURCE, INT64, INT64, INT64, READ_BYTES, INT64, INT64, BYTES, INT64S))
def stamp_records(
    source: RecordSource,
    start: int,
    stop: int,
    max_bytes: int,
    template: Any,
    sequence: int,
    checksum_type: int,
    into: Any,
    answer: Any,
) -> None:
    """Write the headers of rows `start` to `stop`, or of as many as have at most `max_bytes` of key and value.

    `template` is the header but for kind, sequence and checksum; the first row gets `sequence`. Answers the
    row after the last, the chain's summand, the bytes used, and the first row with a reserved key, or -1.
    """
    target, blank = pointer(into), pointer(template)
    key, value = column_of(source.key), column_of(source.value)
    ones = np.int64(ONES)
    flags = np.int64(load(blank, 3))
    total, used, reserved, at, row = np.int64(0), 0, -1, 0, start
    while row < stop:
        key_length, value_length = length_at(key, row), length_at(value, row)
        size = max(key_length, 0) + max(value_length, 0)
        if size > max_bytes - used:
            break
        if key_length == CONTROL_KEY_BYTES and reserved < 0 and is_control_key(key, row):
            reserved = row
        used += size
        kind = DELETE if value_length < 0 else PUT
        crc = data_crc(kind, key, 0, value, row)
        if flags & HEADERS_ONLY:
            crc = fold_bytes(fold_int32(crc, flags), blank, 28, 36)
        crc ^= ones
        copy(target, at, blank, 0, STAMP_BYTES)
        store(target, at + 1, kind)
        store_int32(target, at + 24, sequence)
        store_int32(target, at + 36, crc)
        if checksum_type == ADHASH2:
            total += crc
        elif checksum_type == ADHASH:
            total += data_field_sum(kind, key, value, row)
        sequence += 1
        at += STAMP_BYTES
        row += 1
    answer[STOP], answer[CHECKSUM], answer[USED_BYTES], answer[RESERVED_ROW] = row, total, used, reserved


# Positions in the array `measure_headers` answers through.
ENTRIES: Final = 0
KEY_BYTES: Final = 1
VALUE_BYTES: Final = 2
NULL_VALUES: Final = 3


@kernel(types.void(RECORD_SOURCE, INT64, INT64, INT64S))
def measure_headers(source: RecordSource, start: int, stop: int, answer: Any) -> None:
    """How many headers of rows `start` to `stop` are kept, and what they take."""
    ends = pointer(source.header_ends)
    key, value = column_of(source.header_key), column_of(source.header_value)
    entries, key_bytes, value_bytes, nulls = 0, 0, 0, 0
    for entry in range(load(ends, start), load(ends, stop)):
        if is_div(key, entry):
            continue
        entries += 1
        key_bytes += length_at(key, entry)
        length = length_at(value, entry)
        value_bytes += max(length, 0)
        nulls += length < 0
    answer[ENTRIES], answer[KEY_BYTES], answer[VALUE_BYTES] = entries, key_bytes, value_bytes
    answer[NULL_VALUES] = nulls


class HeaderArrays(NamedTuple):
    """The buffers of a headers column. `ends[0]` and the first of each kind of end are 0; `valid` is zeroed, or
    empty when no value is null."""

    ends: Any
    key_ends: Any
    key_content: Any
    value_ends: Any
    value_valid: Any
    value_content: Any


HEADER_ARRAYS = types.NamedTuple([INT32S, INT32S, BYTES, INT32S, BYTES, BYTES], HeaderArrays)


@register_jitable
def append_bytes(
    ends: Any, content: Any, room: int, index: int, source: Any, position: int, length: int
) -> bool:
    """Put bytes as value `index` (length -1: a null, which takes none); whether there was room."""
    filled = load(ends, index)
    kept = max(length, 0)
    if kept > room - filled:
        return False
    copy(content, filled, source, position, kept)
    store(ends, index + 1, filled + kept)
    return True


@kernel(types.boolean(RECORD_SOURCE, INT64, INT64, READ_BYTES, READ_BYTES, HEADER_ARRAYS))
def merge_headers(
    source: RecordSource, start: int, stop: int, name: Any, stamps: Any, into: HeaderArrays
) -> bool:
    """The kept headers of rows `start` to `stop`, each row's followed by `name` and its 40 bytes of `stamps`.

    False when the targets do not have exactly the room that was measured.
    """
    given, ends = pointer(source.header_ends), pointer(into.ends)
    key, value = column_of(source.header_key), column_of(source.header_value)
    own_name, fresh, own_length = pointer(name), pointer(stamps), len(name)
    key_ends, key_content, key_room = pointer(into.key_ends), pointer(into.key_content), len(into.key_content)
    value_ends, value_content = pointer(into.value_ends), pointer(into.value_content)
    value_valid, nullable, value_room = (
        pointer(into.value_valid),
        len(into.value_valid),
        len(into.value_content),
    )
    room, filled, at = len(into.key_ends) - 1, 0, 0
    for row in range(start, stop):
        for entry in range(load(given, row), load(given, row + 1)):
            if is_div(key, entry):
                continue
            if filled >= room:
                return False
            position, length = load(key.ends, entry), length_at(key, entry)
            if not append_bytes(key_ends, key_content, key_room, filled, key.content, position, length):
                return False
            position, length = load(value.ends, entry), length_at(value, entry)
            if not append_bytes(
                value_ends, value_content, value_room, filled, value.content, position, length
            ):
                return False
            if nullable and length >= 0:
                store(value_valid, filled >> 3, load(value_valid, filled >> 3) | 1 << (filled & 7))
            filled += 1
        if filled >= room:
            return False
        if not append_bytes(key_ends, key_content, key_room, filled, own_name, 0, own_length):
            return False
        if not append_bytes(value_ends, value_content, value_room, filled, fresh, at, STAMP_BYTES):
            return False
        if nullable:
            store(value_valid, filled >> 3, load(value_valid, filled >> 3) | 1 << (filled & 7))
        filled += 1
        at += STAMP_BYTES
        store(ends, row - start + 1, filled)
    return filled == room
