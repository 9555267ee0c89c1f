"""Keys and values of a source's records as the columns its flow declares.

A serde that reads several columns at once (JSON with fields) gives them directly; one whose values are structs gives
its fields; any other, and none, is one column `value`. A null value is no event where a serde is declared: a deletion
in the topic of a table says nothing a stream could add up. Without a serde nothing is looked at, and it passes.

A source of windowed keys gives events of the keys inside, with the windows' bounds as columns in front. Where state is
kept, the event time is the last millisecond of the window, which is the same for every change of it; the record's own
time is that of the newest record in the window.

Thread rule: values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.pipeline.definition.steps import Source
from tidegate.windows.events import NO_TIME, Int64s
from tidegate.windows.keys.columns import decode_keys

Flags = npt.NDArray[np.bool_]
NO_ROWS = np.empty(0, np.int64)


class Decoded(NamedTuple):
    """Keys and columns, a row for every record; which rows have no value (None: none), which are bad and why."""

    key: pa.BinaryArray
    values: pa.RecordBatch
    absent: Flags | None
    bad_rows: Int64s
    reasons: tuple[str, ...]


class _Columns(NamedTuple):
    columns: list[pa.Array]
    bad_rows: Int64s
    reasons: tuple[str, ...]


class RecordDecoder:
    """Reads the records of one source into `schema`."""

    def __init__(self, source: Source, schema: pa.Schema) -> None:
        self._serde: Any = source.value
        self._windows = source.windows
        self._schema = schema
        self._timestamp = source.timestamp

    def decode(self, records: pa.RecordBatch) -> Decoded:
        key, raw = records.column("key"), records.column("value")
        found = self._columns(raw)
        absent = None
        if (self._serde is not None or self._windows is not None) and raw.null_count:
            absent = raw.is_null().to_numpy(zero_copy_only=False)
        if self._windows is not None:
            keys = decode_keys(
                key, self._windows.key_format, size_ms=self._windows.size_ms, checks=self._windows.checks
            )
            bounds = [pa.array(keys.start), pa.array(keys.end)]
            bad = {int(row): keys.reason(int(row)) for row in np.flatnonzero(~keys.good)}
            bad |= zip(found.bad_rows.tolist(), found.reasons, strict=True)
            rows = sorted(bad)
            key = keys.inner
            found = _Columns(
                [*bounds, *found.columns], np.array(rows, np.int64), tuple(bad[row] for row in rows)
            )
        return Decoded(key, self._batch(found.columns), absent, found.bad_rows, found.reasons)

    def _columns(self, raw: pa.BinaryArray) -> _Columns:
        if self._serde is None:
            return _Columns([raw], NO_ROWS, ())
        if getattr(self._serde, "fields", None):
            decoded = self._serde.decode_values(raw)
            return _Columns(decoded.batch.columns, decoded.bad_rows, decoded.reasons)
        column = self._serde.decode_column(raw)
        columns = column.values.flatten() if pa.types.is_struct(column.values.type) else [column.values]
        return _Columns(columns, column.bad_rows, column.reasons)

    def event_time(self, values: pa.RecordBatch, timestamps: pa.Array) -> Int64s:
        """When each event was: the declared column, or the record's own time; -1 where there is none."""
        column = timestamps
        if self._timestamp is not None:
            column = values.column(self._timestamp)
        if pa.types.is_timestamp(column.type):
            if column.type.unit != "ms":
                column = column.cast(pa.timestamp("ms", column.type.tz), safe=False)
            column = column.view(pa.int64())
        elif pa.types.is_date(column.type):
            column = column.cast(pa.timestamp("ms")).view(pa.int64())
        elif column.type != pa.int64():
            column = column.cast(pa.int64())
        if column.null_count:
            column = column.fill_null(NO_TIME)
        times: Int64s = column.to_numpy()
        return times

    def window_time(self, values: pa.RecordBatch) -> Int64s:
        """The last millisecond of each event's window; sessions include their end, windows of time do not."""
        ends: Int64s = values.column(1).view(pa.int64()).to_numpy()
        return ends if self._windows is None or self._windows.size_ms is None else ends - 1

    def _batch(self, columns: list[pa.Array]) -> pa.RecordBatch:
        if len(columns) != len(self._schema):
            raise InvalidError(f"{len(columns)} columns were read where {self._schema.names} are declared")
        typed = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(columns, self._schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(typed, schema=self._schema)
