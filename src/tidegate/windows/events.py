"""Batches of events, which operators exchange: columns, without an object per record.

The user's columns are a record batch of their own, so that a column called `key` or `ts` means the user's and
nothing else. `stream_time` is the largest event time seen up to and including each record, in offset order, of
its source partition; it is carried from batch to batch, so a result never depends on where a batch was cut.

`keep_events` filters a batch by a mask that is true for most events: every column is read from front to back and
written once. Columns of other than four or eight bytes, text or bytes, and columns with nulls, are filtered by Arrow.

Thread rule: values and pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.kernels.stream_time import (
    filter_bounds,
    filter_bytes,
    filter_even,
    filter_halves,
    filter_words,
)
from tidegate.storage.runs.columns import binary_parts, even_width, numbers_column

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
NO_TIME = -1  # before any event: the clocks of Kafka Streams start here


@dataclass(frozen=True, eq=False)
class RowChanges:
    """Marks events as changes of a table's rows: each sets or deletes one row.

    `weight` is 1 where the event is the row's new content and 0 where the row is deleted. After `Retractions` every
    event is counted `weight` times: 1 adds a row's new content, -1 retracts its previous content.
    """

    row: pa.BinaryArray  # the row's key in its table; null: no row
    weight: Int64s
    written: Int64s  # the timestamp of the record that brought the change

    def take(self, rows: Int64s) -> RowChanges:
        return RowChanges(self.row.take(pa.array(rows)), self.weight[rows], self.written[rows])

    def slice(self, start: int, stop: int) -> RowChanges:
        return RowChanges(
            self.row.slice(start, stop - start), self.weight[start:stop], self.written[start:stop]
        )


@dataclass(frozen=True, eq=False)
class EventBatch:
    """Events of one or several source partitions, in the order they are to be processed."""

    key: pa.BinaryArray  # null: no key
    ts: Int64s
    offset: Int64s
    partition: Int32s
    stream_time: Int64s
    values: pa.RecordBatch
    changes: RowChanges | None = None  # None: plain events, not changes of a table's rows

    def __post_init__(self) -> None:
        lengths = {len(self.key), len(self.ts), len(self.offset), len(self.partition), len(self.stream_time)}
        if lengths | {self.values.num_rows} != {len(self.ts)}:
            raise InvalidError(f"an event batch needs columns of one length, not {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.ts)

    def take(self, rows: Int64s | npt.NDArray[np.bool_]) -> EventBatch:
        """Return some of the events: by position, or where a mask is true."""
        positions: Int64s = (
            np.flatnonzero(rows) if rows.dtype == np.bool_ else rows.astype(np.int64, copy=False)
        )
        if len(positions) == len(self) and rows.dtype == np.bool_:
            return self
        indices = pa.array(positions)
        return EventBatch(
            key=self.key.take(indices),
            ts=self.ts[positions],
            offset=self.offset[positions],
            partition=self.partition[positions],
            stream_time=self.stream_time[positions],
            values=self.values.take(indices),
            changes=None if self.changes is None else self.changes.take(positions),
        )

    def slice(self, start: int, stop: int) -> EventBatch:
        """Return the events from `start` up to `stop`, without copying."""
        return EventBatch(
            key=self.key.slice(start, stop - start),
            ts=self.ts[start:stop],
            offset=self.offset[start:stop],
            partition=self.partition[start:stop],
            stream_time=self.stream_time[start:stop],
            values=self.values.slice(start, stop - start),
            changes=None if self.changes is None else self.changes.slice(start, stop),
        )

    def with_values(self, values: pa.RecordBatch) -> EventBatch:
        return replace(self, values=values)


def weights(events: EventBatch) -> Int64s:
    """Return how often each event counts: once, unless it is a change of a table's row."""
    return np.ones(len(events), np.int64) if events.changes is None else events.changes.weight


def no_events(values: pa.Schema) -> EventBatch:
    """Return an empty batch with these columns."""
    none = np.empty(0, np.int64)
    empty = pa.RecordBatch.from_arrays([pa.array([], each.type) for each in values], schema=values)
    return EventBatch(pa.array([], pa.binary()), none, none, np.empty(0, np.int32), none, empty)


# --- filtering

Flags = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]


def keep_events(batch: EventBatch, flags: Flags) -> EventBatch:
    """Return the events whose flag is true."""
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
