"""A batch of events without those that do not go on.

For masks that let most of the events through: every column is read from front to back and written once. Columns of
other than four or eight bytes, text or bytes, and columns with nulls, are filtered by Arrow.

Thread rule: pure functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.kernels.stream_time import (
    filter_bounds,
    filter_bytes,
    filter_even,
    filter_halves,
    filter_words,
)
from tidegate.storage.runs.assembling import even_width, numbers_column
from tidegate.storage.runs.hashing import binary_parts
from tidegate.windows.events import EventBatch

Flags = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]


def keep_events(batch: EventBatch, flags: Flags) -> EventBatch:
    """The events whose flag is true."""
    count = int(np.count_nonzero(flags))
    if count == len(batch):
        return batch
    marks = flags.view(np.uint8)
    values = [_column(column, flags, marks, count) for column in batch.values.columns]
    return EventBatch(
        key=_column(batch.key, flags, marks, count),
        ts=_numbers(batch.ts, marks, count),
        offset=_numbers(batch.offset, marks, count),
        partition=_numbers(batch.partition, marks, count),
        stream_time=_numbers(batch.stream_time, marks, count),
        values=pa.RecordBatch.from_arrays(values, schema=batch.values.schema)
        if values
        else batch.values.slice(0, count),
    )


def _numbers(values: npt.NDArray[Any], marks: Bytes, count: int) -> npt.NDArray[Any]:
    """Values of four or eight bytes."""
    into = np.empty(count + 1, values.dtype)
    if values.dtype.itemsize == 8:
        filter_words(marks, np.ascontiguousarray(values).view(np.int64), into.view(np.int64))
    else:
        filter_halves(marks, np.ascontiguousarray(values).view(np.int32), into.view(np.int32))
    return into[:count]


def _column(column: pa.Array, flags: Flags, marks: Bytes, count: int) -> pa.Array:
    type_ = column.type
    if not column.null_count and len(column):
        if pa.types.is_primitive(type_) and type_.bit_width in (32, 64):
            width = type_.bit_width // 8
            held = np.frombuffer(column.buffers()[1], f"i{width}", len(column), width * column.offset)
            return numbers_column(type_, _numbers(held, marks, count))
        if pa.types.is_binary(type_) or pa.types.is_string(type_):
            data, bounds = binary_parts(column.view(pa.binary()))
            if width := even_width(bounds):
                room = np.empty((count + 1) * width, np.uint8)
                filter_even(marks, data, int(bounds[0]), width, room)
                even = np.arange(0, count * width + 1, width, dtype=np.int32)
                buffers = [None, pa.py_buffer(even), pa.py_buffer(room[: count * width])]
                return pa.Array.from_buffers(type_, count, buffers, 0)
            ends = np.empty(count + 1, np.int32)
            content = np.empty(filter_bounds(marks, bounds, ends), np.uint8)
            filter_bytes(marks, bounds, data, content)
            return pa.Array.from_buffers(type_, count, [None, pa.py_buffer(ends), pa.py_buffer(content)], 0)
    return column.filter(pa.array(flags))
