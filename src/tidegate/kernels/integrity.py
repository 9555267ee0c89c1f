"""Read, check-sum and write the integrity headers of many records at once, over Arrow buffers.

`integrity/header.py` has the layouts, `integrity/columns.py` the rules for malformed metadata and what checksums cover.
`read_stamps` converts a headers column into one `STAMP_ROW` per record and never fails. `stamp_records` numbers and
check-sums rows as long as they fit their chain and writes 40 bytes for each; `measure_headers` and `merge_headers`
append those to the rows' existing headers and leave out an existing `div` or `divc`, which belongs to another log.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import types

from tidegate.kernels.hashing import ONES, fold_bytes, fold_int32, fold_int64
from tidegate.kernels.jit import (
    BYTES,
    INT32S,
    INT64,
    INT64S,
    READ_BYTES,
    UINT32S,
    UINT64S,
    copy,
    helper,
    kernel,
    load,
    load_int32,
    load_int64,
    load_uint64,
    pointer,
    rows_of,
    store,
    store_int32,
)
from tidegate.kernels.record_encoding import RECORD_SOURCE, Column, RecordSource, column_of, length_at

# -- reading headers -------------------------------------------------------------------------------

UNMANAGED: Final = 0
MANAGED: Final = 1
MALFORMED: Final = 2
STAMP_ROW: Final = np.dtype(
    [
        ("guid_high", "u8"),
        ("guid_low", "u8"),
        ("timestamp", "i8"),
        ("certified_checksum", "u8"),
        ("certified_stamp_sum", "u8"),
        ("certified_records", "i8"),
        ("chain", "i4"),
        ("sequence", "i4"),
        ("crc", "u4"),
        ("payload", "i4"),
        ("state", "u1"),
        ("kind", "u1"),
        ("control", "u1"),
        ("flags", "u1"),
        ("announced_type", "u1"),
        ("certified_type", "u1"),
        ("certified", "u1"),
    ],
    align=True,
)
STAMP_BYTES: Final = 40
VERSION: Final = 1
CONTROL: Final = 2
NO_CONTROL: Final = 255
NONE: Final = -1
REPEATED: Final = -2
START_OF_PUSH: Final = 0
END_OF_PUSH: Final = 1
START_OF_CHAIN: Final = 2
END_OF_CHAIN: Final = 3
START_BYTES: Final = 2  # of a start of chain or push
END_OF_CHAIN_BYTES: Final = 22
HEADERS_ONLY: Final = 8  # the flag
LOW: Final = 0xFFFFFFFF


class Found(NamedTuple):
    """Which header entries of a record are the metadata: an index, NONE or REPEATED."""

    stamp: int
    payload: int


@helper
def is_div(key: Column, entry: int) -> int:
    """The length of the name if entry `entry` is called `div` or `divc`, else 0."""
    length = length_at(key, entry)
    if length != 3 and length != 4:
        return 0
    at = load(key.ends, entry)
    if (
        load(key.content, at) != 0x64
        or load(key.content, at + 1) != 0x69
        or load(key.content, at + 2) != 0x76
    ):
        return 0
    if length == 4 and load(key.content, at + 3) != 0x63:
        return 0
    return length


@helper
def find(key: Column, first: int, stop: int) -> Found:
    stamp, payload = NONE, NONE
    for entry in range(first, stop):
        name = is_div(key, entry)
        if name == 3:
            stamp = entry if stamp == NONE else REPEATED
        elif name == 4:
            payload = entry if payload == NONE else REPEATED
    return Found(stamp, payload)


@helper
def is_checksum_type(number: int) -> bool:
    return number == 0 or number == 4 or number == 5


@helper
def read_payload(control: int, entry: int, value: Column, into: Any, row: int) -> bool:
    """Decode `divc` into the row; returns whether it is valid for this control type."""
    if control > END_OF_CHAIN:  # its payload is free, or this release does not know it
        into[row]["payload"] = max(entry, NONE)
        return entry != REPEATED
    length = length_at(value, entry) if entry >= 0 else NONE
    if length < START_BYTES:
        return False
    content, at = value.content, load(value.ends, entry)
    checksum_type = load(content, at + 1)
    if load(content, at) != VERSION:
        return False
    if control == START_OF_CHAIN:
        if length != START_BYTES or not is_checksum_type(checksum_type):
            return False
        into[row]["announced_type"] = checksum_type
    elif control == END_OF_CHAIN:
        if length != END_OF_CHAIN_BYTES or not is_checksum_type(checksum_type):
            return False
        into[row]["certified"] = 1
        into[row]["certified_type"] = checksum_type
        into[row]["certified_checksum"] = load_uint64(content, at + 2)
        into[row]["certified_records"] = load_int32(content, at + 10) & LOW
        into[row]["certified_stamp_sum"] = load_uint64(content, at + 14)
    elif control == START_OF_PUSH and length != START_BYTES:
        return False
    into[row]["payload"] = entry
    return True


@kernel(types.void(RECORD_SOURCE, rows_of(STAMP_ROW)))
def read_stamps(source: RecordSource, into: Any) -> None:
    """Fill one row per record; `into` is zeroed."""
    ends = pointer(source.header_ends)
    key, value = column_of(source.header_key), column_of(source.header_value)
    for row in range(len(source.header_ends) - 1):
        found = find(key, load(ends, row), load(ends, row + 1))
        into[row]["payload"] = NONE
        if found.stamp == NONE:
            continue
        into[row]["state"] = MALFORMED
        if found.stamp == REPEATED or length_at(value, found.stamp) != STAMP_BYTES:
            continue
        content, at = value.content, load(value.ends, found.stamp)
        kind, control = load(content, at + 1), load(content, at + 2)
        chain, sequence = load_int32(content, at + 20), load_int32(content, at + 24)
        if load(content, at) != VERSION or chain < 0 or sequence < 0:
            continue
        if kind == CONTROL:
            if not read_payload(control, found.payload, value, into, row):
                continue
        elif control != NO_CONTROL:
            continue
        stamp = into[row]
        stamp["guid_high"], stamp["guid_low"] = load_uint64(content, at + 4), load_uint64(content, at + 12)
        stamp["timestamp"] = load_int64(content, at + 28)
        stamp["chain"], stamp["sequence"], stamp["crc"] = chain, sequence, load_int32(content, at + 36) & LOW
        stamp["kind"], stamp["control"], stamp["flags"] = kind, control, load(content, at + 3)
        stamp["state"] = MANAGED


# -- checksums -------------------------------------------------------------------------------------

NONCE_BYTES: Final = 4
SCHEMA: Final = 0


@helper
def data_crc(kind: Any, key: Column, key_left_out: int, value: Column, row: int) -> Any:
    """The unfinished CRC over kind, key (without its last bytes) and value."""
    crc = fold_int32(np.int64(ONES), np.int64(kind))
    length = length_at(key, row)
    crc = fold_int32(crc, length)
    if length > key_left_out:
        start = load(key.ends, row)
        crc = fold_bytes(crc, key.content, start, start + length - key_left_out)
    length = length_at(value, row)
    if length >= 0:
        start = load(value.ends, row)
        crc = fold_bytes(fold_int32(crc, np.int64(SCHEMA)), value.content, start, start + length)
    return crc


@helper
def data_field_sum(kind: Any, key: Column, value: Column, row: int) -> Any:
    """The sum of one CRC per field; a null key or value adds nothing."""
    ones = np.int64(ONES)
    total = fold_int32(ones, np.int64(kind)) ^ ones
    length = length_at(key, row)
    if length > 0:
        start = load(key.ends, row)
        total += fold_bytes(ones, key.content, start, start + length) ^ ones
    length = length_at(value, row)
    if length >= 0:
        start = load(value.ends, row)
        total += fold_int32(ones, np.int64(SCHEMA)) ^ ones
        total += fold_bytes(ones, value.content, start, start + length) ^ ones
    return total


@kernel(types.void(RECORD_SOURCE, rows_of(STAMP_ROW), INT64, UINT32S))
def record_checksums(source: RecordSource, stamps: Any, payloads: int, out: Any) -> None:
    """One CRC per record into `out`, 0 for those that are not managed.

    Without `payloads` only control records are computed; for the others the header's checksum is copied.
    """
    into = pointer(out)
    key, value, payload = column_of(source.key), column_of(source.value), column_of(source.header_value)
    for row in range(len(stamps)):
        stamp = stamps[row]
        if stamp["state"] != MANAGED:
            store(into, row, 0)
        elif stamp["kind"] == CONTROL:
            crc = data_crc(np.int64(stamp["kind"]), key, NONCE_BYTES, value, row)
            crc = fold_int32(fold_int32(crc, np.int64(stamp["control"])), np.int64(stamp["flags"]))
            crc = fold_int64(crc, stamp["timestamp"])
            entry: Any = np.int64(stamp["payload"])
            length = length_at(payload, entry) if entry >= 0 else -1
            crc = fold_int32(crc, length)
            if length > 0:
                start = load(payload.ends, entry)
                crc = fold_bytes(crc, payload.content, start, start + length)
            store(into, row, crc ^ ONES)
        elif payloads:
            crc = data_crc(np.int64(stamp["kind"]), key, 0, value, row)
            if stamp["flags"] & HEADERS_ONLY:
                crc = fold_int64(fold_int32(crc, np.int64(stamp["flags"])), stamp["timestamp"])
            store(into, row, crc ^ ONES)
        else:
            claimed: Any = np.int64(stamp["crc"])
            store(into, row, claimed)


@helper
def field_sum(stamp: Any, key: Column, value: Column, row: int) -> Any:
    """The sum of one CRC per field; a control record's fields are its kind and control type."""
    if stamp["kind"] == CONTROL:
        ones = np.int64(ONES)
        total = fold_int32(ones, np.int64(stamp["kind"])) ^ ones
        return total + (fold_int32(ones, np.int64(stamp["control"])) ^ ones)
    return data_field_sum(np.int64(stamp["kind"]), key, value, row)


@kernel(types.void(RECORD_SOURCE, rows_of(STAMP_ROW), UINT64S))
def field_sums(source: RecordSource, stamps: Any, out: Any) -> None:
    """The field sum of each record into `out`, 0 for those that are not managed."""
    into = pointer(out)
    key, value = column_of(source.key), column_of(source.value)
    for row in range(len(stamps)):
        stamp = stamps[row]
        if stamp["state"] != MANAGED:
            store(into, row, 0)
        else:
            store(into, row, field_sum(stamp, key, value, row))


# -- writing headers -------------------------------------------------------------------------------

PUT: Final = 0
DELETE: Final = 1
ADHASH: Final = 4
ADHASH2: Final = 5
CONTROL_KEY_BYTES: Final = 33
# Positions in the result array of `stamp_records`.
STOP: Final = 0
CHECKSUM: Final = 1
USED_BYTES: Final = 2
RESERVED_ROW: Final = 3


@helper
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

    `template` is the header without kind, sequence and checksum; the first row gets `sequence`. Writes to `answer` the
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


# Positions in the result array of `measure_headers`.
ENTRIES: Final = 0
KEY_BYTES: Final = 1
VALUE_BYTES: Final = 2
NULL_VALUES: Final = 3


@kernel(types.void(RECORD_SOURCE, INT64, INT64, INT64S))
def measure_headers(source: RecordSource, start: int, stop: int, answer: Any) -> None:
    """Count the kept headers of rows `start` to `stop`, and their bytes."""
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


@helper
def append_bytes(
    ends: Any, content: Any, room: int, index: int, source: Any, position: int, length: int
) -> bool:
    """Append bytes as value `index` (length -1: a null without bytes); returns whether there was room."""
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
    """Copy the kept headers of rows `start` to `stop`, each row's followed by `name` and its 40 bytes of `stamps`.

    False when the targets do not have exactly the measured size.
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
