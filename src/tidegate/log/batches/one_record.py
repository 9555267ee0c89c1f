"""Read one record, slowly: for control records, and to say what is wrong with a record the kernels refuse.

Plain Python over plain bytes, one field after the other, each failure with its own words. Never used where
every record passes. Layout: `kernels/measuring.py`.

Thread rule: pure functions.
"""

from __future__ import annotations

from typing import NamedTuple

from tidegate.errors import CorruptError
from tidegate.log.batches.batch import Buffer


class OneRecord(NamedTuple):
    """A record as stored: deltas, and views of its bytes."""

    timestamp_delta: int
    offset_delta: int
    key: memoryview | None
    value: memoryview | None
    headers: list[tuple[memoryview, memoryview | None]]
    end: int
    """Position after the record."""


def read_record(body: Buffer, position: int = 0) -> OneRecord:
    """The record at `position`; `CorruptError` (`INVALID_RECORD`) says which field is wrong."""
    view = memoryview(body)
    length, start = _varint(view, position, "its length")
    if not 0 <= length <= len(view) - start:
        raise malformed(f"it says it has {length} bytes, {len(view) - start} are there")
    record = view[start : start + length]
    if not record:
        raise malformed("it has no bytes")
    timestamp_delta, place = _varint(record, 1, "its timestamp delta", bits=64)
    offset_delta, place = _varint(record, place, "its offset delta")
    key, place = _field(record, place, "its key")
    value, place = _field(record, place, "its value")
    count, place = _varint(record, place, "its header count")
    if not 0 <= count <= len(record) - place:
        raise malformed(f"it says it has {count} headers in {len(record) - place} bytes")
    headers = []
    for number in range(count):
        name, place = _field(record, place, f"the key of header {number}")
        if name is None:
            raise malformed(f"header {number} has no key")
        datum, place = _field(record, place, f"the value of header {number}")
        headers.append((name, datum))
    if place != len(record):
        raise malformed(f"{len(record) - place} of its {length} bytes belong to no field")
    return OneRecord(timestamp_delta, offset_delta, key, value, headers, start + length)


def _field(record: memoryview, position: int, what: str) -> tuple[memoryview | None, int]:
    length, position = _varint(record, position, f"the length of {what}")
    if length == -1:
        return None, position
    if not 0 <= length <= len(record) - position:
        raise malformed(f"{what} says it has {length} bytes, {len(record) - position} are left")
    return record[position : position + length], position + length


def _varint(buffer: memoryview, position: int, what: str, bits: int = 32) -> tuple[int, int]:
    """The zig-zag varint at `position`, and the position after it."""
    value = 0
    for shift in range(0, bits, 7):
        if position >= len(buffer):
            raise malformed(f"the bytes end inside {what}")
        byte = buffer[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            value &= (1 << bits) - 1
            return (value >> 1) ^ -(value & 1), position
    raise malformed(f"{what} takes more than {bits // 7 + 1} bytes")


def malformed(what: str) -> CorruptError:
    return CorruptError(what, kafka_name="INVALID_RECORD")
