"""Check the records of batches and write them into Arrow's buffers, in one pass (layout: `measuring.py`).

The caller cannot know how large the columns will be, so the pass stops when one is full, says which, and goes
on from that very record when it is called again with larger arrays. Nothing about the record it stopped at is
counted, and its fields are simply written again.

Bitmaps come filled with ones and a null clears its bit, so a column without nulls costs nothing.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import BYTES, INT32S, INT64, INT64S, READ_BYTES, kernel, rows_of
from tidegate.kernels.headers import HEADER_ROW, body_start, body_stop, is_stamped
from tidegate.kernels.measuring import NO_TIMESTAMP, skip_fields
from tidegate.kernels.memory import copy, load, pointer, prefetch, store
from tidegate.kernels.varints import read_varint, read_varlong


class BinaryArrays(NamedTuple):
    """The buffers of one Arrow binary column with room for `len(ends) - 1` values; `ends[0]` is 0."""

    ends: Any
    valid: Any
    content: Any


class RecordArrays(NamedTuple):
    """The buffers of decoded records. `header_ends` counts headers, as a list column's offsets do."""

    offset: Any
    timestamp: Any
    timestamp_valid: Any
    key: BinaryArrays
    value: BinaryArrays
    header_ends: Any
    header_key: BinaryArrays
    header_value: BinaryArrays


BINARY_ARRAYS = types.NamedTuple([INT32S, BYTES, BYTES], BinaryArrays)
RECORD_ARRAYS = types.NamedTuple(
    [INT64S, INT64S, BYTES, BINARY_ARRAYS, BINARY_ARRAYS, INT32S, BINARY_ARRAYS, BINARY_ARRAYS], RecordArrays
)


class Progress(NamedTuple):
    """How far decoding is: what the arrays hold, and where to go on. All zeros at the start."""

    records: int
    headers: int
    unordered: int
    """Records whose offset is not above the one before them, or is beyond their batch's last."""
    batch: int
    """Where the next call goes on: in which batch, at which of its records (`position` is that record's)."""
    record: int
    position: int
    previous_delta: int
    wanted: int
    """What the full column must have room for, at least."""


PROGRESS_ROW: Final = np.dtype([(name, "i8") for name in Progress._fields], align=True)

DONE: Final = 0
MALFORMED: Final = 1  # at `batch`, `record`, `position`
FULL_RECORDS: Final = 2
FULL_KEYS: Final = 3
FULL_VALUES: Final = 4
FULL_HEADERS: Final = 5
FULL_HEADER_KEYS: Final = 6
FULL_HEADER_VALUES: Final = 7

CACHE_LINE: Final = 64
AHEAD: Final = 2048  # bytes: far enough for memory to answer, near enough to be still in the cache then


class Column(NamedTuple):
    """Pointers to the buffers of a binary column, and how many bytes it has room for."""

    ends: Any
    valid: Any
    content: Any
    room: int


@register_jitable
def column_of(arrays: BinaryArrays) -> Column:
    return Column(pointer(arrays.ends), pointer(arrays.valid), pointer(arrays.content), len(arrays.content))


@register_jitable(forceinline=True)
def clear_bit(bitmap: Any, index: int) -> None:
    store(bitmap, index >> 3, load(bitmap, index >> 3) & ~(1 << (index & 7)))


@register_jitable(forceinline=True)
def fetch_ahead(content: Any, position: int) -> None:
    """Ask for what comes after `position`: copies are so short that the processor does not see it coming."""
    prefetch(content, position + AHEAD)
    prefetch(content, position + AHEAD + CACHE_LINE)


@register_jitable(forceinline=True)
def put(column: Column, index: int, source: Any, position: int, end: int) -> tuple[int, int]:
    """Append the sized field at `position` as value `index`.

    Answers the position after it (above `end` when it is malformed), and the room the column must have when
    it was too small (0 when it was not).
    """
    length, position = read_varint(source, position, end)
    filled = load(column.ends, index)
    if length < 0:
        clear_bit(column.valid, index)
        store(column.ends, index + 1, filled)
        return position if length == -1 else end + 1, 0
    if length > end - position:
        return end + 1, 0
    if length > column.room - filled:
        return position, filled + length
    fetch_ahead(source, position)
    fetch_ahead(column.content, filled)
    copy(column.content, filled, source, position, length)
    store(column.ends, index + 1, filled + length)
    return position + length, 0


@register_jitable
def put_headers(
    names: Column, values: Column, first: int, room: int, count: int, source: Any, position: int, end: int
) -> tuple[int, int, int]:
    """Append the `count` headers at `position`, `first` being there already and `room` all that fit.

    Answers the position after them (above `end` when they are malformed), and which column is full (`DONE` for
    none) with the room it must have.
    """
    if count < 0 or count > end - position:
        return end + 1, DONE, 0
    if count > room - first:
        return position, FULL_HEADERS, first + count
    for index in range(first, first + count):
        length, _ = read_varint(source, position, end)
        if length < 0:  # a header's key may not be null
            return end + 1, DONE, 0
        position, wanted = put(names, index, source, position, end)
        if wanted:
            return position, FULL_HEADER_KEYS, wanted
        position, wanted = put(values, index, source, position, end)
        if wanted:
            return position, FULL_HEADER_VALUES, wanted
    return position, DONE, 0


@kernel(INT64(READ_BYTES, rows_of(HEADER_ROW), INT64, INT64, rows_of(PROGRESS_ROW), RECORD_ARRAYS))
def decode_records(
    buffer: Any, batches: Any, from_offset: int, to_offset: int, into: Any, arrays: RecordArrays
) -> int:
    """Append the records of `batches` with offsets from `from_offset` up to, not including, `to_offset`.

    Answers `DONE`, or why it stopped; `into[0]` then says where.
    """
    source, progress = pointer(buffer), into[0]
    offsets, timestamps = pointer(arrays.offset), pointer(arrays.timestamp)
    timestamp_valid, record_room = pointer(arrays.timestamp_valid), len(arrays.offset)
    key, value = column_of(arrays.key), column_of(arrays.value)
    header_ends, header_room = pointer(arrays.header_ends), len(arrays.header_key.ends) - 1
    header_key, header_value = column_of(arrays.header_key), column_of(arrays.header_value)
    records, headers, unordered = progress.records, progress.headers, progress.unordered
    status, wanted = DONE, 0
    while progress.batch < len(batches):
        batch = batches[progress.batch]
        body_end, count = body_stop(batch), np.int64(batch.count)
        base_offset, base_timestamp = batch.base_offset, batch.base_timestamp
        append_time, stamped = batch.max_timestamp, is_stamped(batch)
        number, start, previous = progress.record, progress.position, progress.previous_delta
        if number == 0:
            start, previous = body_start(batch), -1
        while number < count:
            length, position = read_varint(source, start, body_end)
            if length < 0 or length > body_end - position:
                status = MALFORMED
                break
            end = position + length
            timestamp_delta, position = read_varlong(source, position + 1, end)
            offset_delta, position = read_varint(source, position, end)
            offset = base_offset + offset_delta
            if from_offset <= offset < to_offset:
                if records >= record_room:
                    status, wanted = FULL_RECORDS, records + 1
                    break
                store(offsets, records, offset)
                timestamp = append_time if stamped else base_timestamp + timestamp_delta
                store(timestamps, records, timestamp)
                if timestamp == NO_TIMESTAMP:
                    clear_bit(timestamp_valid, records)
                position, wanted = put(key, records, source, position, end)
                if wanted:
                    status = FULL_KEYS
                    break
                position, wanted = put(value, records, source, position, end)
                if wanted:
                    status = FULL_VALUES
                    break
                added, position = read_varint(source, position, end)
                if added != 0:
                    position, status, wanted = put_headers(
                        header_key, header_value, headers, header_room, added, source, position, end
                    )
                    if status != DONE:
                        break
                if position != end:
                    status = MALFORMED
                    break
                records += 1
                headers += added
                store(header_ends, records, headers)
            elif skip_fields(source, position, end) != end:
                status = MALFORMED
                break
            unordered += offset_delta <= previous
            previous, start, number = offset_delta, end, number + 1
        if status == DONE and start != body_end:
            status = MALFORMED
        if status != DONE:
            progress.record, progress.position, progress.previous_delta = number, start, previous
            break
        unordered += previous > batch.last_offset_delta
        progress.batch, progress.record = progress.batch + 1, 0
    progress.records, progress.headers, progress.unordered = records, headers, unordered
    progress.wanted = wanted
    return status
