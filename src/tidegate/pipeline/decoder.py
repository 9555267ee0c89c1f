"""Decode keys and values of a source's records into the columns that its flow declares.

A serde that reads several columns at once (JSON with fields) gives them directly; one whose values are structs gives
its fields; any other serde, or none, gives one column `value`. Where a serde is declared, a null value is not an
event: a deletion in a table's topic is nothing that a stream could add up. Without a serde null values pass.

A source of windowed keys gives events with the inner keys, and the windows' bounds as leading columns. Where state
is kept, the event time is the session's end, or one millisecond before the end of any other window, which is the same
for every change of it; the record's own time is that of the newest record in the window.

Thread rule: values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.durations import UNITS, bounds_of, format_moment, in_ms, likely_unit
from tidegate.errors import InternalError, InvalidError
from tidegate.pipeline.topology import Source
from tidegate.windows.events import NO_TIME, Int64s
from tidegate.windows.keys import decode_keys
from tidegate.windows.kinds import LATEST

Flags = npt.NDArray[np.bool_]
NO_ROWS = np.empty(0, np.int64)


class Decoded(NamedTuple):
    """Keys and columns with a row for every record; which rows have no value (None: none), which are bad and why."""

    key: pa.BinaryArray
    values: pa.RecordBatch
    absent: Flags | None
    bad_rows: Int64s
    reasons: tuple[str, ...]

    def with_bad(self, rows: Mapping[int, str]) -> Decoded:
        """Return the same with more bad rows; for a row that is already bad, the first reason is kept."""
        if not rows:
            return self
        bad = {**rows, **dict(zip(self.bad_rows.tolist(), self.reasons, strict=True))}
        ordered = sorted(bad)
        return self._replace(bad_rows=np.array(ordered, np.int64), reasons=tuple(bad[row] for row in ordered))


class RecordDecoder:
    """Reads the records of one source into `schema`."""

    def __init__(self, source: Source, schema: pa.Schema, *, checks_time: bool = False) -> None:
        """`checks_time`: a record whose event time seems to be in another unit is bad."""
        self._checks_time = checks_time
        self._serde: Any = source.value
        self._windows = source.windows
        self._schema = schema
        self._timestamp = source.timestamp

    def decode(self, records: pa.RecordBatch) -> Decoded:
        key, raw = records.column("key"), records.column("value")
        columns, bad_rows, reasons = self._columns(raw)
        absent, bad = None, dict[int, str]()
        if (self._serde is not None or self._windows is not None) and raw.null_count:
            absent = raw.is_null().to_numpy(zero_copy_only=False)
        if self._windows is not None:
            keys = decode_keys(
                key, self._windows.key_format, size_ms=self._windows.size_ms, checks=self._windows.checks
            )
            key, columns = keys.inner, [pa.array(keys.start), pa.array(keys.end), *columns]
            bad = {int(row): keys.reason(int(row)) for row in np.flatnonzero(~keys.good)}
        decoded = Decoded(key, self._batch(columns), absent, bad_rows, reasons).with_bad(bad)
        if not self._checks_time:
            return decoded
        return decoded.with_bad(self.implausible_times(decoded.values, records.column("timestamp")))

    def implausible_times(self, values: pa.RecordBatch, timestamps: pa.Array) -> dict[int, str]:
        """Return rows whose event time is outside of the plausible range, but inside it in another unit, with the
        reason."""
        column = timestamps if self._timestamp is None else values.column(self._timestamp)
        unit = column.type.unit if pa.types.is_timestamp(column.type) else "ms"
        if not (pa.types.is_timestamp(column.type) or pa.types.is_int64(column.type)) or not len(column):
            return {}
        times = column.view(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        beyond = _beyond_ms(times, unit)
        first, stop = bounds_of(unit)
        if beyond is None and first <= int(times.min()) and int(times.max()) < stop:
            return {}
        wrong = np.zeros(len(times), np.bool_)
        for each in UNITS:
            if each != unit:
                low, high = bounds_of(each)
                wrong |= (times >= low) & (times < high)
        name = "the record's timestamp" if self._timestamp is None else f"event time {self._timestamp!r}"
        said = {int(row): f"{name} is {self._says(int(times[row]), unit)}" for row in np.flatnonzero(wrong)}
        if beyond is None:
            return said
        return {
            int(row): f"{name} is {times[row]} {UNITS[unit]}, more than 64 bits of milliseconds can say"
            for row in np.flatnonzero(beyond)
        } | said

    def _says(self, number: int, unit: str) -> str:
        likely = likely_unit(number, unit)
        if likely is None:
            raise InternalError(f"{number} {UNITS[unit]} seemed implausible as an event time")
        here, meant = format_moment(in_ms(number, unit)), format_moment(in_ms(number, likely))
        hint = "have the producer set milliseconds"
        if self._timestamp is not None:
            hint = f"declare it timestamp[{likely}]"
        return f"{number}: {here} in {UNITS[unit]}, but {meant} in {UNITS[likely]}; {hint}"

    def _columns(self, raw: pa.BinaryArray) -> tuple[list[pa.Array], Int64s, tuple[str, ...]]:
        if self._serde is None:
            return [raw], NO_ROWS, ()
        if getattr(self._serde, "fields", None):
            decoded = self._serde.decode_values(raw)
            return decoded.batch.columns, decoded.bad_rows, decoded.reasons
        column = self._serde.decode_column(raw)
        columns = column.values.flatten() if pa.types.is_struct(column.values.type) else [column.values]
        return columns, column.bad_rows, column.reasons

    def event_time(self, values: pa.RecordBatch, timestamps: pa.Array) -> Int64s:
        """Return the event time of each row: the declared column, or the record's timestamp; -1 where there is none."""
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
        """Return the ends of sessions, and the millisecond before the ends of other windows.

        Sliding windows include their end, but the bytes of a key do not say whether its window is sliding.
        """
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


def _beyond_ms(times: Int64s, unit: str) -> Flags | None:
    """Which seconds are too large to be expressed in milliseconds; None: none are."""
    if unit != "s":
        return None
    most = LATEST // 1000
    is_beyond: Flags = (times > most) | (times < -most)
    return is_beyond if is_beyond.any() else None
