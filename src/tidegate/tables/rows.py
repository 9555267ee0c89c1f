"""Query results: rows as Python values, Arrow, pandas, polars and HTML.

A `RowForm` describes what a kind of table stores and how that becomes values. The columns of a table over a topic:
key, window_start, window_end (not for plain keys), value, timestamp, partition, offset. Keys and values are read
with the table's serdes; a value of declared JSON fields is a struct. `timestamp` is that of the record that set the
value, null where it had none.

In a notebook, tables and results show a few rows, HTML-escaped, and never scan the whole table.

Thread rule: immutable values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.durations import format_duration
from tidegate.errors import InvalidError, TidegateError
from tidegate.notebook import SHOWN_ROWS, cell, facts_html, grid_html, grid_text
from tidegate.tables.options import TableRules, TableShape
from tidegate.windows.keys import LATEST, SessionWindow, TimeWindow

if TYPE_CHECKING:
    from tidegate.tables.topic_table import TopicTable


# --- html


def rows_html(table: pa.Table, total: int | None) -> str:
    """Render the given rows, and how many there are (None: not counted)."""
    types = [str(field.type) for field in table.schema]
    return grid_html(table.column_names, _values(table), total=total, types=types)


def rows_text(table: pa.Table, total: int | None) -> str:
    """Render the same for a terminal."""
    return grid_text(table.column_names, _values(table), total=total)


def table_html(table: TopicTable) -> str:
    """Render a description of the table and some of its rows: the first batch of a scan."""
    shape = table.rules.shape
    told = facts_html(
        f"table {shape.name}",
        {
            "topic": shape.topic,
            "kind": shape.kind,
            "window size": format_duration(shape.size_ms) if shape.size_ms else None,
            "retention": format_duration(shape.retention_ms) if shape.is_windowed else None,
            "role": table.role,
        },
    )
    try:
        shown = some_rows(table)
    except TidegateError as error:
        return f"{told}<p>{cell(str(error))}</p>"
    return told + ("<p>no rows</p>" if shown is None else rows_html(shown, None))


def some_rows(table: TopicTable) -> pa.Table | None:
    """Return the first batch of a scan; None if there is none."""
    first = next(table.batches(batch_rows=SHOWN_ROWS, timeout=0), None)
    return None if first is None else pa.Table.from_batches([first]).slice(0, SHOWN_ROWS)


def _values(table: pa.Table) -> list[list[Any]]:
    return [list(row.values()) for row in table.slice(0, SHOWN_ROWS).to_pylist()]


# --- results


@dataclass(frozen=True, slots=True)
class Row:
    """One window of one key; `window` is None in a table of plain keys.

    `partition` and `offset` are those of the record that set the value; None where many records make it.
    """

    key: Any
    window: TimeWindow | SessionWindow | None
    value: Any
    timestamp: int | None
    partition: Any = None
    offset: Any = None


class RowForm(Protocol):
    """Converts the stored rows of one kind of table to values."""

    @property
    def name(self) -> str:
        """The table's name."""

    @property
    def stored(self) -> pa.Schema:
        """The columns of stored rows."""

    @property
    def order(self) -> tuple[str, ...]:
        """The columns by which the rows of a result are sorted."""

    def typed(self, stored: pa.Table) -> pa.Table:
        """Return rows as users see them."""

    def values(self, stored: pa.Table) -> Iterator[Row]:
        """Return the same as Python values."""


class Rows(Sequence[Row]):
    """The rows of a result: iterate them, or take them as a table."""

    def __init__(self, stored: pa.Table, form: RowForm) -> None:
        self._stored = stored
        self._form = form
        self._table: pa.Table | None = None

    @classmethod
    def of(cls, batches: Sequence[pa.RecordBatch], form: RowForm, *, backward: bool = False) -> Rows:
        """Build a result, sorted by key, then window; reversed on request."""
        stored = pa.Table.from_batches(batches, form.stored)
        if stored.num_rows > 1:
            direction = "descending" if backward else "ascending"
            stored = stored.take(
                pc.sort_indices(stored, sort_keys=[(name, direction) for name in form.order])
            )
        return cls(stored, form)

    def __len__(self) -> int:
        return int(self._stored.num_rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Rows: ...

    def __getitem__(self, index: int | slice) -> Row | Rows:
        if isinstance(index, slice):
            rows = pa.array(range(*index.indices(len(self))), pa.int64())
            return Rows(self._stored.take(rows), self._form)
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return next(self._form.values(self._stored.slice(index % len(self), 1)))

    def __iter__(self) -> Iterator[Row]:
        return self._form.values(self._stored)

    def __repr__(self) -> str:
        return f"Rows({len(self)} of {self._form.name})"

    def _repr_html_(self) -> str:
        return rows_html(self._first(), len(self))

    def show(self) -> None:
        """Print the first rows."""
        print(rows_text(self._first(), len(self)))

    def _first(self) -> pa.Table:
        return self._form.typed(self._stored.slice(0, SHOWN_ROWS))

    def to_arrow(self) -> pa.Table:
        """Return one table with typed keys and values."""
        if self._table is None:
            self._table = self._form.typed(self._stored)
        return self._table

    def to_pandas(self) -> Any:
        return self.to_arrow().to_pandas()

    def to_polars(self) -> Any:
        try:
            import polars
        except ImportError:
            raise InvalidError(
                "polars is not installed: pip install 'tidegate[polars]', then try again"
            ) from None
        return polars.from_arrow(self.to_arrow())


RAW_SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("ts", pa.int64()),
        pa.field("seq", pa.int64()),
        pa.field("value", pa.binary()),
        pa.field("value_ts", pa.int64()),
        pa.field("offset", pa.int64()),
        pa.field("partition", pa.int32()),
    ]
)


@dataclass(frozen=True, slots=True)
class StoredForm:
    """Rows of a table over a topic: bytes, read with the table's serdes."""

    rules: TableRules
    stored: ClassVar[pa.Schema] = RAW_SCHEMA
    order: ClassVar[tuple[str, ...]] = ("key", "ts", "seq", "partition")

    @property
    def name(self) -> str:
        return self.rules.shape.name

    def typed(self, stored: pa.Table) -> pa.Table:
        """Return stored rows with keys and values as their serdes read them."""
        raw, shape = stored.combine_chunks(), self.rules.shape
        key = self.rules.key.decode_column(_one(raw.column("key"))).require_good()
        value = self.rules.value.decode_column(_one(raw.column("value"))).require_good()
        columns: dict[str, Any] = {"key": key}
        ts = raw.column("ts").to_numpy()
        if shape.kind == "window":
            ends = ts + np.minimum(shape.size_ms, LATEST - ts)
            columns |= {"window_start": pa.array(ts), "window_end": pa.array(ends)}
        elif shape.kind == "session":
            columns |= {"window_start": raw.column("seq"), "window_end": raw.column("ts")}
        times = raw.column("value_ts")
        columns |= {
            "value": value,
            "timestamp": pc.if_else(pc.less(times, 0), pa.scalar(None, pa.int64()), times),
            "partition": raw.column("partition"),
            "offset": raw.column("offset"),
        }
        return pa.table(columns)

    def values(self, stored: pa.Table) -> Iterator[Row]:
        shape, key_of, value_of = self.rules.shape, self.rules.key.decode, self.rules.value.decode
        for row in stored.to_pylist():
            yield Row(
                key_of(row["key"]),
                window_of(shape, row["ts"], row["seq"]),
                value_of(row["value"]),
                None if row["value_ts"] < 0 else row["value_ts"],
                row["partition"],
                row["offset"],
            )


def window_of(shape: TableShape, ts: int, seq: int) -> TimeWindow | SessionWindow | None:
    """Return the window of a stored row."""
    if shape.kind == "window":
        return TimeWindow(ts, min(ts + shape.size_ms, LATEST))
    return SessionWindow(seq, ts) if shape.kind == "session" else None


def _one(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
