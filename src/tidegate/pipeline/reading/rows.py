"""Windows of a flow as one commit has them, for the queries of `Table`.

Columns: key, window_start, window_end, then the aggregates under their own names, then `timestamp`: the newest event
time in the window. An aggregate that is called like one of the others comes as `value.<name>`. Times are epoch
milliseconds.

Thread rule: from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.reading.late import dead_letters, late_rows
from tidegate.pipeline.reading.snapshot import FlowSnapshot
from tidegate.pipeline.rounds.records import CommitRecord, Records
from tidegate.pipeline.tasks.chain import WindowOperators
from tidegate.tables.queries import KeyEnds
from tidegate.tables.rows import Row
from tidegate.windows.keys import SessionWindow, TimeWindow, partitions_of_inner_keys
from tidegate.windows.kinds import LATEST, Session, Sliding
from tidegate.windows.operators.base import WindowRows

OWN = ("key", "window_start", "window_end", "timestamp")


class FlowForm:
    """What a flow's windows become."""

    order = ("key", "window_start", "window_end")

    def __init__(self, flow: Flow) -> None:
        self.name = flow.name
        self._flow = flow

    @cached_property
    def columns(self) -> list[tuple[str, str]]:
        """The aggregates' names and columns, in their order."""
        names = self._flow.result_schema.names
        return [(name, f"value.{name}" if name in OWN else name) for name in names]

    @cached_property
    def stored(self) -> pa.Schema:
        times = pa.int64()
        values = zip(self.columns, self._flow.result_schema, strict=True)
        return pa.schema(
            [
                pa.field("key", self._flow.key_serde.arrow_type),
                pa.field("window_start", times),
                pa.field("window_end", times),
                *[pa.field(column, field.type) for (_, column), field in values],
                pa.field("timestamp", times),
            ]
        )

    def batch(self, rows: WindowRows) -> pa.RecordBatch:
        """Windows with their keys as the flow's serde reads them."""
        key = self._flow.key_serde.decode_column(rows.key).require_good()
        starts, ends, times = (pa.array(each) for each in (rows.window_start, rows.window_end, rows.ts))
        columns = [key, starts, ends, *rows.values.columns, times]
        return pa.RecordBatch.from_arrays(columns, schema=self.stored)

    def typed(self, stored: pa.Table) -> pa.Table:
        return stored

    def values(self, stored: pa.Table) -> Iterator[Row]:
        window = self._flow.window
        of = SessionWindow if window is not None and isinstance(window.kind, Session) else TimeWindow
        for row in stored.to_pylist():
            value = {name: row[column] for name, column in self.columns}
            yield Row(row["key"], of(row["window_start"], row["window_end"]), value, row["timestamp"])


class FlowRows:
    """`RowSource` over the operators of a flow's tasks."""

    def __init__(self, snapshot: FlowSnapshot, form: FlowForm, records: Records) -> None:
        self.form = form
        self._snapshot, self._records = snapshot, records
        self._flow = snapshot.source.flow
        window = self._flow.window
        self._kind = None if window is None else window.kind
        self.kind = "session" if isinstance(self._kind, Session) else "window"

    @property
    def commit(self) -> CommitRecord:
        return self._snapshot.commit

    def encoded(self, key: Any) -> bytes | None:
        return self._flow.key_serde.encode(key)

    def find(self, keys: Sequence[bytes], first: int, last: int) -> list[pa.RecordBatch]:
        column = pa.array(keys, pa.binary())
        if len(keys) > 1:
            column = column.unique()
        low, high = self._operators_bounds(first, last)
        found = (each.windows_of(column, low, high) for each in self._owners(column))
        return [self.form.batch(rows) for each in found if len(rows := self._begun(each, last))]

    def scan(
        self, first: int, last: int, *, keys: KeyEnds | None = None, batch_rows: int = 1 << 16
    ) -> Iterator[pa.RecordBatch]:
        low, high = self._operators_bounds(first, last)
        for operator in self._snapshot.source.windows.values():
            for piece in operator.scan(low, high):
                found = self._begun(piece, last)
                rows = found if keys is None else found.take(_between(found.key, keys))
                batch = self.form.batch(rows)
                for start in range(0, batch.num_rows, batch_rows):
                    yield batch.slice(start, batch_rows)

    def late(self) -> pa.Table:
        return late_rows(self._snapshot)

    def dead_letters(self) -> pa.Table:
        return dead_letters(self._snapshot.backend, self._records, self.commit, self._flow.name)

    def _owners(self, keys: pa.BinaryArray) -> list[WindowOperators]:
        """The operators that may hold these keys: in a re-keyed flow those of their shards.

        Else the producing application has decided which partition, and with it which task, a key is in.
        """
        windows, shards = self._snapshot.source.windows, self._flow.shards
        if self._flow.rekey_at is None or shards is None or set(windows) != set(range(shards)):
            return list(windows.values())
        owners = np.maximum(partitions_of_inner_keys(keys, shards), 0)
        return [windows[number] for number in np.unique(owners).tolist()]

    def _operators_bounds(self, first: int, last: int) -> tuple[int, int]:
        """Bounds as operators take them: those of sliding windows and sessions count by ends."""
        if isinstance(self._kind, Sliding):
            width = self._kind.difference_ms
            return min(first, LATEST - width) + width, min(last, LATEST - width) + width
        return first, LATEST if self.kind == "session" else last

    def _begun(self, rows: WindowRows, last: int) -> WindowRows:
        """Of sessions, which were found by their ends, those that start at `last` or before."""
        if self.kind != "session" or last == LATEST or not len(rows):
            return rows
        return rows.take(np.flatnonzero(rows.window_start <= last))


def _between(column: pa.BinaryArray, keys: KeyEnds) -> Any:
    chosen = np.ones(len(column), np.bool_)
    if keys.low is not None:
        chosen &= pc.greater_equal(column, pa.scalar(keys.low, pa.binary())).to_numpy(zero_copy_only=False)
    if keys.high is not None:
        chosen &= pc.less_equal(column, pa.scalar(keys.high, pa.binary())).to_numpy(zero_copy_only=False)
    return np.flatnonzero(chosen)
