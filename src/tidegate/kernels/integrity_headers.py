"""The `div` and `divc` headers of many records at once, over Arrow buffers (layouts: `integrity/header.py`).

`read_stamps` turns a headers column into one `STAMP_ROW` per record. Any bytes give rows, never an error: a
record without `div` is unmanaged, one whose metadata cannot be taken at its word is malformed (the rules:
`integrity/columns.py`).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import kernel, rows_of
from tidegate.kernels.encoding import RECORD_SOURCE, Column, RecordSource, column_of, length_at
from tidegate.kernels.memory import load, pointer

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


class Found(NamedTuple):
    """Which header entries of a record are the metadata: an index, NONE or REPEATED."""

    stamp: int
    payload: int


@register_jitable
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


@register_jitable
def find(key: Column, first: int, stop: int) -> Found:
    stamp, payload = NONE, NONE
    for entry in range(first, stop):
        name = is_div(key, entry)
        if name == 3:
            stamp = entry if stamp == NONE else REPEATED
        elif name == 4:
            payload = entry if payload == NONE else REPEATED
    return Found(stamp, payload)


@register_jitable
def int32_at(content: Any, at: int) -> int:
    """Four bytes, big-endian, without a sign."""
    upper = load(content, at) << 24 | load(content, at + 1) << 16
    return upper | load(content, at + 2) << 8 | load(content, at + 3)


@register_jitable
def int64_at(content: Any, at: int) -> int:
    """Eight bytes, big-endian."""
    return int32_at(content, at) << 32 | int32_at(content, at + 4)


@register_jitable
def is_checksum_type(number: int) -> bool:
    return number == 0 or number == 4 or number == 5


@register_jitable
def read_payload(control: int, entry: int, value: Column, into: Any, row: int) -> bool:
    """Take what `divc` says into the row; whether it is what this control type needs."""
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
        into[row]["certified_checksum"] = int64_at(content, at + 2)
        into[row]["certified_records"] = int32_at(content, at + 10)
        into[row]["certified_stamp_sum"] = int64_at(content, at + 14)
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
        chain, sequence = int32_at(content, at + 20), int32_at(content, at + 24)
        if load(content, at) != VERSION or chain >> 31 or sequence >> 31:
            continue
        if kind == CONTROL:
            if not read_payload(control, found.payload, value, into, row):
                continue
        elif control != NO_CONTROL:
            continue
        stamp = into[row]
        stamp["guid_high"], stamp["guid_low"] = int64_at(content, at + 4), int64_at(content, at + 12)
        stamp["timestamp"] = int64_at(content, at + 28)
        stamp["chain"], stamp["sequence"], stamp["crc"] = chain, sequence, int32_at(content, at + 36)
        stamp["kind"], stamp["control"], stamp["flags"] = kind, control, load(content, at + 3)
        stamp["state"] = MANAGED
