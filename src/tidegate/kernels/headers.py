"""Find the batches in a buffer, read their 61-byte headers into rows (layout: `log/batch.py`), choose some.

`count_batches` walks from length to length and proves that each header is there; `read_headers` then
fills as many rows as were counted; `choose_batches` says which of them a reader wants. None of them looks at
CRCs or records.

A row is also how the record kernels are told where records lie: behind the header at `position`, up to the
end that `length` gives. Records that were decompressed into memory of their own have no header there; their
row says position -61, and the records begin at 0.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import BYTES, INT64, READ_BYTES, kernel, rows_of
from tidegate.kernels.memory import load, pointer

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


@register_jitable
def signed(source: Any, position: int, width: int) -> int:
    """The big-endian signed integer of `width` bytes at `position`."""
    value = load(source, position)
    if value >= 0x80:
        value -= 0x100
    for step in range(1, width):
        value = (value << 8) | load(source, position + step)
    return value


@register_jitable
def body_start(row: Any) -> int:
    start: int = row.position + HEADER_SIZE
    return start


@register_jitable
def body_stop(row: Any) -> int:
    stop: int = row.position + LENGTH_OVERHEAD + row.length
    return stop


@register_jitable
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
        length = signed(source, position + 8, 4)
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
        row.base_offset = signed(source, position, 8)
        row.length = signed(source, position + 8, 4)
        row.leader_epoch = signed(source, position + 12, 4)
        row.crc = signed(source, position + 17, 4) & 0xFFFFFFFF
        row.attributes = signed(source, position + 21, 2)
        row.last_offset_delta = signed(source, position + 23, 4)
        row.base_timestamp = signed(source, position + 27, 8)
        row.max_timestamp = signed(source, position + 35, 8)
        row.producer_id = signed(source, position + 43, 8)
        row.producer_epoch = signed(source, position + 51, 2)
        row.base_sequence = signed(source, position + 53, 4)
        row.count = signed(source, position + 57, 4)
        position += row.length + LENGTH_OVERHEAD


@register_jitable
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

    Answers how many those are; or stops at the first that breaks a rule, with its index and the rule.
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
