"""Check the records of a batch and find the facts an append asks for, without writing anything.

    record   length varint | attributes int8 | timestamp delta varlong | offset delta varint
             | key length varint (-1 null), key | value length varint (-1 null), value
             | header count varint | { key length varint, key, value length varint (-1 null), value }*

`length` counts the bytes after itself and the fields must fill them exactly; `count` records must fill
their body exactly. Which rule a bad record breaks is not said here: the caller reads that one record again,
slowly, to name it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba.extending import register_jitable

from tidegate.kernels.compiling import INT64, READ_BYTES, kernel, rows_of
from tidegate.kernels.headers import HEADER_ROW, body_start, body_stop, is_stamped
from tidegate.kernels.memory import pointer
from tidegate.kernels.varints import read_varint, read_varlong

NO_TIMESTAMP: Final = -1
LARGEST_INT64: Final = 2**63 - 1


class Measured(NamedTuple):
    """What `measure_records` finds in one batch."""

    min_timestamp: int
    """Over the timestamps that are not -1; the largest number when none is."""
    max_timestamp: int
    max_timestamp_offset: int
    """Of the first record with it."""
    null_keys: int
    nonconsecutive: int
    """Records whose offset delta is not their number in the batch."""
    record: int
    """How many records are sound, and where they end."""
    position: int


MEASURED_ROW: Final = np.dtype([(name, "i8") for name in Measured._fields], align=True)


@register_jitable
def skip_sized(source: Any, position: int, end: int) -> tuple[int, int]:
    """The length of the field at `position` (-1 for null), and the position after it, above `end` if bad."""
    length, position = read_varint(source, position, end)
    if length < -1 or length > end - position:
        return length, end + 1
    return length, position + max(length, 0)


@register_jitable
def skip_headers(source: Any, position: int, end: int) -> int:
    """The position after the headers at `position`, above `end` if they are bad."""
    count, position = read_varint(source, position, end)
    if count < 0 or count > end - position:
        return end + 1
    for _ in range(count):
        length, position = skip_sized(source, position, end)
        if length < 0:
            return end + 1
        _, position = skip_sized(source, position, end)
    return position


@register_jitable
def skip_fields(source: Any, position: int, end: int) -> int:
    """The position after key, value and headers, above `end` if they are bad."""
    _, position = skip_sized(source, position, end)
    _, position = skip_sized(source, position, end)
    return skip_headers(source, position, end)


@kernel(INT64(READ_BYTES, rows_of(HEADER_ROW), rows_of(MEASURED_ROW)))
def measure_records(buffer: Any, batches: Any, into: Any) -> int:
    """Check every record of the one batch in `batches`; whether all of it is sound. Facts go to `into[0]`."""
    source, batch, facts = pointer(buffer), batches[0], into[0]
    position, body_end = body_start(batch), body_stop(batch)
    min_timestamp, max_timestamp, max_timestamp_offset = LARGEST_INT64, NO_TIMESTAMP, -1
    null_keys = nonconsecutive = number = 0
    start = position
    while number < batch.count:
        length, position = read_varint(source, start, body_end)
        if length < 0 or length > body_end - position:
            break
        end = position + length
        timestamp_delta, position = read_varlong(source, position + 1, end)
        offset_delta, position = read_varint(source, position, end)
        key_length, position = skip_sized(source, position, end)
        _, position = skip_sized(source, position, end)
        if skip_headers(source, position, end) != end:
            break
        timestamp = batch.max_timestamp if is_stamped(batch) else batch.base_timestamp + timestamp_delta
        if timestamp != NO_TIMESTAMP:
            min_timestamp = min(min_timestamp, timestamp)
        if timestamp > max_timestamp:
            max_timestamp, max_timestamp_offset = timestamp, batch.base_offset + offset_delta
        null_keys += key_length < 0
        nonconsecutive += offset_delta != number
        start, number = end, number + 1
    facts.min_timestamp, facts.max_timestamp = min_timestamp, max_timestamp
    facts.max_timestamp_offset = max_timestamp_offset
    facts.null_keys, facts.nonconsecutive = null_keys, nonconsecutive
    facts.record, facts.position = number, start
    return number == batch.count and start == body_end
