"""Batches of events, which operators exchange: columns, without an object per record.

The user's columns are a record batch of their own, so that a column called `key` or `ts` means the user's and
nothing else. `stream_time` is the largest event time seen up to and including each record, in offset order, of
its source partition; it is carried from batch to batch, so a result never depends on where a batch was cut.

`keep_events` filters a batch by a mask that is true for most events: every column is read from front to back and
written once. Columns of other than four or eight bytes, text or bytes, and columns with nulls, are filtered by Arrow.

Thread rule: values and pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

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


class Columns:
    """The base of dataclasses whose fields are columns of one length: numpy, Arrow or further columns; None: absent."""

    def __post_init__(self) -> None:
        lengths = {len(column) for column in self._columns() if column is not None}
        if len(lengths) != 1:
            raise InvalidError(f"{type(self).__name__} needs columns of one length, not {sorted(lengths)}")

    def _columns(self) -> list[Any]:
        return [getattr(self, each.name) for each in fields(self)]  # type: ignore[arg-type]

    def take(self, rows: Int64s) -> Self:
        """Return some of the rows, by position."""
        indices = pa.array(rows)
        return type(self)(*(_taken(column, rows, indices) for column in self._columns()))

    def slice(self, start: int, stop: int) -> Self:
        """Return the rows from `start` up to `stop`, without copying."""
        return type(self)(*(_sliced(column, start, stop) for column in self._columns()))


def _taken(column: Any, rows: Int64s, indices: pa.Array) -> Any:
    if column is None or isinstance(column, np.ndarray):
        return None if column is None else column[rows]
    return column.take(rows if isinstance(column, Columns) else indices)


def _sliced(column: Any, start: int, stop: int) -> Any:
    if column is None or isinstance(column, np.ndarray):
        return None if column is None else column[start:stop]
    return column.slice(start, stop if isinstance(column, Columns) else stop - start)


@dataclass(frozen=True, eq=False)
class RowChanges(Columns):
    """Marks events as changes of a table's rows: each sets or deletes one row.

    `weight` is 1 where the event is the row's new content and 0 where the row is deleted. After `Retractions` every
    event is counted `weight` times: 1 adds a row's new content, -1 retracts its previous content.
    """

    row: pa.BinaryArray  # the row's key in its table; null: no row
    weight: Int64s
    written: Int64s  # the timestamp of the record that brought the change

    def __len__(self) -> int:
        return len(self.weight)


@dataclass(frozen=True, eq=False)
class EventBatch(Columns):
    """Events of one or several source partitions, in the order they are to be processed."""

    key: pa.BinaryArray  # null: no key
    ts: Int64s
    offset: Int64s
    partition: Int32s
    stream_time: Int64s
    values: pa.RecordBatch
    changes: RowChanges | None = None  # None: plain events, not changes of a table's rows

    def __len__(self) -> int:
        return len(self.ts)

    def take(self, rows: Int64s | npt.NDArray[np.bool_]) -> EventBatch:
        """Return some of the events: by position, or where a mask is true."""
        if rows.dtype == np.bool_:
            return self if rows.all() else super().take(np.flatnonzero(rows))
        return super().take(rows.astype(np.int64, copy=False))

    def with_values(self, values: pa.RecordBatch) -> EventBatch:
        return replace(self, values=values)


def weights(events: EventBatch) -> Int64s:
    """Return how often each event counts: once, unless it is a change of a table's row."""
    return np.ones(len(events), np.int64) if events.changes is None else events.changes.weight


def only_column(values: pa.RecordBatch, name: str) -> pa.Array:
    """Return the user's column of this name; `InvalidError` if there is none, or several."""
    place = values.schema.get_field_index(name)
    if place < 0:
        raise InvalidError(f"no single column {name!r} among the values {values.schema.names}")
    return values.column(place)


def no_events(values: pa.Schema) -> EventBatch:
    """Return an empty batch with these columns."""
    none = np.empty(0, np.int64)
    empty = pa.RecordBatch.from_pylist([], values)
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
