"""Encode records from Arrow's buffers (record layout: `record_batch.py`).

Two passes over the same columns. `size_records` computes how many rows fit into a batch and their exact size in bytes;
`encode_records` writes them into memory of that size. Both use the same arithmetic, and the second relies on the first:
the columns belong to the caller and Arrow arrays do not change.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import types

from tidegate.kernels.jit import (
    BYTES,
    INT64,
    READ_BYTES,
    READ_INT32S,
    READ_INT64S,
    copy,
    helper,
    kernel,
    load,
    pointer,
    rows_of,
    store,
)
from tidegate.kernels.record_batch import varint_size, write_varint


class BinarySource(NamedTuple):
    """One Arrow binary column: `ends` has a row more than the column; `valid` may be empty (no nulls),
    its first row then being bit `skip`."""

    ends: Any
    content: Any
    valid: Any
    skip: int


class RecordSource(NamedTuple):
    """The columns of records to encode. `header_ends` is empty when no record has headers; `deltas` is empty
    when offsets are consecutive; a null timestamp is -1 already."""

    timestamp: Any
    deltas: Any
    key: BinarySource
    value: BinarySource
    header_ends: Any
    header_key: BinarySource
    header_value: BinarySource


BINARY_SOURCE = types.NamedTuple([READ_INT32S, READ_BYTES, READ_BYTES, INT64], BinarySource)
RECORD_SOURCE = types.NamedTuple(
    [READ_INT64S, READ_INT64S, BINARY_SOURCE, BINARY_SOURCE, READ_INT32S, BINARY_SOURCE, BINARY_SOURCE],
    RecordSource,
)


class Sizes(NamedTuple):
    """What `size_records` finds about the batch it would fill."""

    stop: int
    """The row after the last one that fits."""
    body_bytes: int
    base_timestamp: int
    min_timestamp: int
    """Over the timestamps that are not -1; the largest number when none is."""
    max_timestamp: int
    max_timestamp_row: int
    """The first row with it."""
    null_keys: int


SIZES_ROW: Final = np.dtype([(name, "i8") for name in Sizes._fields], align=True)

NO_TIMESTAMP: Final = -1
LARGEST_INT64: Final = 2**63 - 1


class Column(NamedTuple):
    """Pointers to a binary column's buffers."""

    ends: Any
    content: Any
    valid: Any
    nullable: bool
    skip: int


@helper
def column_of(source: BinarySource) -> Column:
    return Column(
        pointer(source.ends),
        pointer(source.content),
        pointer(source.valid),
        len(source.valid) > 0,
        source.skip,
    )


@helper
def length_at(column: Column, row: int) -> int:
    """Bytes of the value at `row`, -1 for null."""
    if column.nullable:
        bit = column.skip + row
        if not (load(column.valid, bit >> 3) >> (bit & 7)) & 1:
            return -1
    return load(column.ends, row + 1) - load(column.ends, row)


@helper
def sized(length: int) -> int:
    """Bytes of a field of that length, its own length varint included."""
    return varint_size(length) + (length if length > 0 else 0)


@helper
def write_field(target: Any, position: int, column: Column, row: int) -> int:
    length = length_at(column, row)
    position = write_varint(target, position, length)
    if length > 0:
        copy(target, position, column.content, load(column.ends, row), length)
        position += length
    return position


@helper
def headers_size(key: Column, value: Column, first: int, stop: int) -> int:
    size = varint_size(stop - first)
    for header in range(first, stop):
        size += sized(length_at(key, header)) + sized(length_at(value, header))
    return size


@kernel(types.void(RECORD_SOURCE, INT64, INT64, INT64, INT64, INT64, rows_of(SIZES_ROW)))
def size_records(
    source: RecordSource,
    start: int,
    max_body_bytes: int,
    max_records: int,
    own_base: int,
    base_timestamp: int,
    into: Any,
) -> None:
    """How many rows from `start` make a body of at most `max_body_bytes`, and what that batch will say.

    There is always one row, however large. With `own_base` the first timestamp is the base, else that given.
    """
    timestamps, deltas, explicit = pointer(source.timestamp), pointer(source.deltas), len(source.deltas) > 0
    key, value = column_of(source.key), column_of(source.value)
    header_ends, has_headers = pointer(source.header_ends), len(source.header_ends) > 0
    header_key, header_value = column_of(source.header_key), column_of(source.header_value)
    rows = len(source.timestamp)
    if own_base:
        base_timestamp = load(timestamps, start)
    stop = min(rows, start + max_records)
    body_bytes, null_keys = 0, 0
    min_timestamp, max_timestamp, max_timestamp_row = LARGEST_INT64, NO_TIMESTAMP, start
    for row in range(start, stop):
        timestamp = load(timestamps, row)
        key_length = length_at(key, row)
        size = (
            1
            + varint_size(timestamp - base_timestamp)
            + varint_size(load(deltas, row) if explicit else row - start)
            + sized(key_length)
            + sized(length_at(value, row))
        )
        if has_headers:
            size += headers_size(header_key, header_value, load(header_ends, row), load(header_ends, row + 1))
        else:
            size += 1
        size += varint_size(size)
        if body_bytes + size > max_body_bytes and row > start:
            stop = row
            break
        body_bytes += size
        if key_length < 0:
            null_keys += 1
        if timestamp != NO_TIMESTAMP and timestamp < min_timestamp:
            min_timestamp = timestamp
        if timestamp > max_timestamp:
            max_timestamp, max_timestamp_row = timestamp, row
    sizes = into[0]
    sizes.stop, sizes.body_bytes, sizes.base_timestamp = stop, body_bytes, base_timestamp
    sizes.min_timestamp, sizes.max_timestamp = min_timestamp, max_timestamp
    sizes.max_timestamp_row, sizes.null_keys = max_timestamp_row, null_keys


@kernel(INT64(RECORD_SOURCE, INT64, INT64, INT64, BYTES, INT64))
def encode_records(
    source: RecordSource, start: int, stop: int, base_timestamp: int, buffer: Any, position: int
) -> int:
    """Write rows `start` to `stop` at `position` of the buffer, which `size_records` measured for them.

    Returns the position after them.
    """
    target = pointer(buffer)
    timestamps, deltas, explicit = pointer(source.timestamp), pointer(source.deltas), len(source.deltas) > 0
    key, value = column_of(source.key), column_of(source.value)
    header_ends, has_headers = pointer(source.header_ends), len(source.header_ends) > 0
    header_key, header_value = column_of(source.header_key), column_of(source.header_value)
    for row in range(start, stop):
        timestamp_delta = load(timestamps, row) - base_timestamp
        offset_delta = load(deltas, row) if explicit else row - start
        first, last = 0, 0
        if has_headers:
            first, last = load(header_ends, row), load(header_ends, row + 1)
        size = (
            1
            + varint_size(timestamp_delta)
            + varint_size(offset_delta)
            + sized(length_at(key, row))
            + sized(length_at(value, row))
            + headers_size(header_key, header_value, first, last)
        )
        position = write_varint(target, position, size)
        store(target, position, 0)
        position = write_varint(target, position + 1, timestamp_delta)
        position = write_varint(target, position, offset_delta)
        position = write_field(target, position, key, row)
        position = write_field(target, position, value, row)
        position = write_varint(target, position, last - first)
        for header in range(first, last):
            position = write_field(target, position, header_key, header)
            position = write_field(target, position, header_value, header)
    return position
