"""Read Kafka record batches (v2): varints, batch headers, record facts, decoding to Arrow, filtering.

Varints are zig-zag numbers, 7 bits a byte, lowest first, at most 5 or 10 bytes; bits above the 32nd (64th) are dropped,
as in Java. Readers never read at or beyond `end`. Without a number they return position `end + 1`, from which every
further read fails in the same way; so a kernel reads a whole record and then checks the position once. A record is

    length varint | attributes int8 | timestamp delta varlong | offset delta varint
    | key length varint (-1 null), key | value length varint (-1 null), value
    | header count varint | { key length varint, key, value length varint (-1 null), value }*

`length` counts the bytes after itself and the fields must fill them exactly; `count` records must fill their body
exactly. The caller reads a bad record again in Python to name the broken rule.

Batch headers (layout: `log/format/batch.py`) are read into rows, which also say where records are: after the header at
`position`, up to the end given by `length`. Records decompressed into a separate buffer have position -61, so that they
begin at 0.

`decode_records` writes records into Arrow's buffers. It stops when one is full, returns which, and resumes at the same
record when called again with larger arrays. Bitmaps come filled with ones and a null clears its bit.

`copy_kept` copies the kept records of batch bodies, for compaction: all from the offset delta on is unchanged, because
the base offset is; length and timestamp delta are rewritten.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import types

from tidegate.kernels.jit import (
    BYTES,
    INT32S,
    INT64,
    INT64S,
    READ_BYTES,
    READ_FLAGS,
    copy,
    helper,
    kernel,
    load,
    load_int16,
    load_int32,
    load_int64,
    pointer,
    prefetch,
    rows_of,
    store,
)

# -- varints ---------------------------------------------------------------------------------------


@helper(forceinline=True)
def read_varint(source: Any, position: int, end: int) -> tuple[int, int]:
    """The 32-bit number at `position`, and the position after it (`end + 1` when there is none)."""
    if position >= end:
        return 0, end + 1
    raw = load(source, position)
    if raw < 0x80:
        return (raw >> 1) ^ -(raw & 1), position + 1
    if position + 1 < end:  # two bytes are so common that they are worth their own lines
        byte = load(source, position + 1)
        if byte < 0x80:
            raw = (raw & 0x7F) | byte << 7
            return (raw >> 1) ^ -(raw & 1), position + 2
    raw, position = read_raw(source, position, end, 5)
    raw &= 0xFFFFFFFF
    return (raw >> 1) ^ -(raw & 1), position


@helper(forceinline=True)
def read_varlong(source: Any, position: int, end: int) -> tuple[int, int]:
    """The 64-bit number at `position`, and the position after it (`end + 1` when there is none)."""
    if position >= end:
        return 0, end + 1
    raw = load(source, position)
    if raw < 0x80:
        return (raw >> 1) ^ -(raw & 1), position + 1
    if position + 1 < end:
        byte = load(source, position + 1)
        if byte < 0x80:
            raw = (raw & 0x7F) | byte << 7
            return (raw >> 1) ^ -(raw & 1), position + 2
    raw, position = read_raw(source, position, end, 10)
    # the shift must not carry the sign along: in compiled code `raw` is a signed 64-bit number
    return ((raw >> 1) & 0x7FFFFFFFFFFFFFFF) ^ -(raw & 1), position


@helper
def read_raw(source: Any, position: int, end: int, places: int) -> tuple[int, int]:
    """The number at `position` before zig-zag, of at most `places` bytes; (0, `end + 1`) when there is none."""
    raw = 0
    for place in range(places):
        if position + place >= end:
            return 0, end + 1
        byte = load(source, position + place)
        raw |= (byte & (0x7F if place < 9 else 0x01)) << 7 * place
        if byte < 0x80:
            return raw, position + place + 1
    return 0, end + 1


@helper
def varint_size(value: int) -> int:
    """Bytes of `value` as a varint or varlong: both encode a number they share alike."""
    raw = (value << 1) ^ (value >> 63)
    if raw < 0:  # the 64th bit is set: compiled code sees a negative number
        return 10
    size = 1
    while raw >= 0x80:
        raw >>= 7
        size += 1
    return size


@helper
def write_varint(target: Any, position: int, value: int) -> int:
    """Write `value` at `position`, where the caller knows there is room; the position after it."""
    raw = (value << 1) ^ (value >> 63)
    while raw < 0 or raw >= 0x80:
        store(target, position, (raw & 0x7F) | 0x80)
        raw = (raw >> 7) & 0x01FFFFFFFFFFFFFF
        position += 1
    store(target, position, raw)
    return position + 1


# -- batch headers ---------------------------------------------------------------------------------

HEADER_ROW: Final = np.dtype(
    [
        ("position", "i8"),
        ("base_offset", "i8"),
        ("length", "i4"),
        ("leader_epoch", "i4"),
        ("crc", "u4"),
        ("attributes", "i2"),
        ("producer_epoch", "i2"),
        ("last_offset_delta", "i4"),
        ("base_sequence", "i4"),
        ("base_timestamp", "i8"),
        ("max_timestamp", "i8"),
        ("producer_id", "i8"),
        ("count", "i4"),
    ],
    align=True,
)
HEADER_SIZE: Final = 61
LENGTH_OVERHEAD: Final = 12
MAGIC: Final = 2
WHOLE: Final = 0  # the buffer ends where a batch ends
PARTIAL: Final = 1  # the buffer ends inside a batch
BAD_LENGTH: Final = 2  # a length below the smallest possible one
BAD_MAGIC: Final = 3
LARGEST_BASE_OFFSET: Final = 2**63 - 1 - 2**31  # beyond it, a last offset would overflow
NEGATIVE_OFFSET: Final = 1
OFFSET_OVERFLOW: Final = 2
NEGATIVE_DELTA: Final = 3
NEGATIVE_COUNT: Final = 4
TOO_MANY_RECORDS: Final = 5
UNKNOWN_CODEC: Final = 6


@helper
def body_start(row: Any) -> int:
    start: int = row.position + HEADER_SIZE
    return start


@helper
def body_stop(row: Any) -> int:
    stop: int = row.position + LENGTH_OVERHEAD + row.length
    return stop


@helper
def is_stamped(row: Any) -> bool:
    """Whether every record has the batch's append time, its `max_timestamp`."""
    stamped: bool = (row.attributes & 0x08) != 0
    return stamped


@kernel(types.UniTuple(INT64, 3)(READ_BYTES, INT64, INT64))
def count_batches(buffer: Any, start: int, stop: int) -> tuple[int, int, int]:
    """How many whole batches follow each other from `start`, where they end, and why there."""
    source = pointer(buffer)
    position = start
    batches = 0
    while position < stop:
        left = stop - position
        if left < HEADER_SIZE:
            return batches, position, PARTIAL
        length = load_int32(source, position + 8)
        if length < HEADER_SIZE - LENGTH_OVERHEAD:
            return batches, position, BAD_LENGTH
        if load(source, position + 16) != MAGIC:
            return batches, position, BAD_MAGIC
        if length > left - LENGTH_OVERHEAD:
            return batches, position, PARTIAL
        position += length + LENGTH_OVERHEAD
        batches += 1
    return batches, position, WHOLE


@kernel(types.void(READ_BYTES, INT64, rows_of(HEADER_ROW)))
def read_headers(buffer: Any, start: int, rows: Any) -> None:
    """Fill `rows` with the headers of the batches counted from `start`."""
    source = pointer(buffer)
    position = start
    for index in range(len(rows)):
        row = rows[index]
        row.position = position
        row.base_offset = load_int64(source, position)
        row.length = load_int32(source, position + 8)
        row.leader_epoch = load_int32(source, position + 12)
        row.crc = load_int32(source, position + 17) & 0xFFFFFFFF
        row.attributes = load_int16(source, position + 21)
        row.last_offset_delta = load_int32(source, position + 23)
        row.base_timestamp = load_int64(source, position + 27)
        row.max_timestamp = load_int64(source, position + 35)
        row.producer_id = load_int64(source, position + 43)
        row.producer_epoch = load_int16(source, position + 51)
        row.base_sequence = load_int32(source, position + 53)
        row.count = load_int32(source, position + 57)
        position += row.length + LENGTH_OVERHEAD


@helper
def refusal(row: Any) -> int:
    """Which rule the fields of a header break, 0 for none. No sound batch, compacted or not, breaks one."""
    if row.base_offset < 0:
        return NEGATIVE_OFFSET
    if row.base_offset > LARGEST_BASE_OFFSET:
        return OFFSET_OVERFLOW
    if row.last_offset_delta < 0:
        return NEGATIVE_DELTA
    if row.count < 0:
        return NEGATIVE_COUNT
    if row.count > np.int64(row.last_offset_delta) + 1:
        return TOO_MANY_RECORDS
    if (row.attributes & 0x07) > 4:
        return UNKNOWN_CODEC
    return 0


@kernel(types.UniTuple(INT64, 3)(rows_of(HEADER_ROW), INT64, INT64, BYTES))
def choose_batches(rows: Any, from_offset: int, to_offset: int, chosen: Any) -> tuple[int, int, int]:
    """Set `chosen[i]` to 1 for each batch with offsets from `from_offset` up to, not including, `to_offset`.

    Returns how many those are; or stops at the first that breaks a rule, with its index and the rule.
    """
    count = 0
    for index in range(len(rows)):
        row = rows[index]
        broken = refusal(row)
        if broken:
            return count, index, broken
        wanted = row.base_offset < to_offset and row.base_offset + row.last_offset_delta >= from_offset
        chosen[index] = wanted
        count += wanted
    return count, -1, 0


# -- facts about the records of a batch ------------------------------------------------------------

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


@helper
def skip_sized(source: Any, position: int, end: int) -> tuple[int, int]:
    """The length of the field at `position` (-1 for null), and the position after it, above `end` if bad."""
    length, position = read_varint(source, position, end)
    if length < -1 or length > end - position:
        return length, end + 1
    return length, position + max(length, 0)


@helper
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


@helper
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


# -- records to Arrow ------------------------------------------------------------------------------


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


@helper
def column_of(arrays: BinaryArrays) -> Column:
    return Column(pointer(arrays.ends), pointer(arrays.valid), pointer(arrays.content), len(arrays.content))


@helper(forceinline=True)
def clear_bit(bitmap: Any, index: int) -> None:
    store(bitmap, index >> 3, load(bitmap, index >> 3) & ~(1 << (index & 7)))


@helper(forceinline=True)
def fetch_ahead(content: Any, position: int) -> None:
    """Ask for what comes after `position`: copies are so short that the processor does not see it coming."""
    prefetch(content, position + AHEAD)
    prefetch(content, position + AHEAD + CACHE_LINE)


@helper(forceinline=True)
def put(column: Column, index: int, source: Any, position: int, end: int) -> tuple[int, int]:
    """Append the sized field at `position` as value `index`.

    Returns the position after it (above `end` when it is malformed), and the room the column must have when
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


@helper
def put_headers(
    names: Column, values: Column, first: int, room: int, count: int, source: Any, position: int, end: int
) -> tuple[int, int, int]:
    """Append the `count` headers at `position`, `first` being there already and `room` all that fit.

    Returns the position after them (above `end` when they are malformed), and which column is full (`DONE` for
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

    Returns `DONE`, or why it stopped; `into[0]` then says where.
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


# -- batches without some of their records ---------------------------------------------------------

GROWTH_BYTES: Final = 16
"""How much longer one record may become: its length and its timestamp delta take at most 5 and 10 bytes."""
REBUILD_ROW: Final = np.dtype(
    [
        ("body_start", "i8"),  # where the records of the batch lie in the source
        ("body_stop", "i8"),
        ("first_row", "i8"),  # of its records in `keep`
        ("records", "i8"),
        ("delta_ms", "i8"),  # added to each timestamp delta, or its new value when that is fixed
        ("delta_is_fixed", "i1"),
        ("room", "i8"),  # bytes left free in front of the kept records, for a header
        ("start", "i8"),  # filled in: where the batch begins and ends in the target
        ("stop", "i8"),
    ],
    align=True,
)


@helper
def _copy_kept(source: Any, row: Any, keep: Any, target: Any, filled: int, capacity: int) -> int:
    position = row.body_start
    end = row.body_stop
    for record in range(row.records):
        length, start = read_varint(source, position, end)
        if start > end or length < 1 or length > end - start:
            return -1
        position = start + length
        if not keep[row.first_row + record]:
            continue
        delta, rest = read_varlong(source, start + 1, position)
        if rest > position:
            return -1
        delta = row.delta_ms if row.delta_is_fixed else delta + row.delta_ms
        tail = position - rest
        if tail + GROWTH_BYTES > capacity - filled:
            return -1
        filled = write_varint(target, filled, 1 + varint_size(delta) + tail)
        store(target, filled, load(source, start))
        filled = write_varint(target, filled + 1, delta)
        copy(target, filled, source, rest, tail)
        filled += tail
    return filled if position == end else -1


@kernel(INT64(READ_BYTES, rows_of(REBUILD_ROW), READ_FLAGS, BYTES))
def copy_kept(bodies: Any, rows: Any, keep: Any, into: Any) -> int:
    """Copy the kept records of each row's body into `into`, one after the other, and note where they lie.

    How many rows were done: fewer than all when a body does not hold its records or there is no more room.
    """
    source = pointer(bodies)
    target = pointer(into)
    capacity = len(into)
    filled = 0
    for index in range(len(rows)):
        row = rows[index]
        row.start = filled
        inside = 0 <= row.body_start <= row.body_stop <= len(bodies) and row.room <= capacity - filled
        if not inside or row.first_row < 0 or row.first_row + row.records > len(keep):
            return index
        filled = _copy_kept(source, row, keep, target, filled + row.room, capacity)
        if filled < 0:
            return index
        row.stop = filled
    return len(rows)
