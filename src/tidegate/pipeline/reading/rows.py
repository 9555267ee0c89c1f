"""Windows of a flow as users take them: Python values, Arrow, pandas, polars.

Columns: key, window_start, window_end, then the aggregates under their own names, then `timestamp`: the newest event
time in the window. An aggregate that is called like one of the others comes as `value.<name>`. Times are epoch
milliseconds.

Thread rule: values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.pipeline.definition.flow import Flow
from tidegate.windows.keys.layouts import SessionWindow, TimeWindow
from tidegate.windows.kinds import Session
from tidegate.windows.operators.shapes import WindowRows

OWN = ("key", "window_start", "window_end", "timestamp")


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One window of one key; `value` has the aggregates by name."""

    key: Any
    window: TimeWindow | SessionWindow
    value: dict[str, Any]
    timestamp: int


def result_columns(flow: Flow) -> list[str]:
    """The aggregates' columns, in their order."""
    return [f"value.{name}" if name in OWN else name for name in flow.result_schema.names]


def result_schema(flow: Flow) -> pa.Schema:
    """The columns of a flow's results as a table."""
    times = pa.int64()
    values = zip(result_columns(flow), flow.result_schema, strict=True)
    return pa.schema(
        [
            pa.field("key", flow.key_serde.arrow_type),
            pa.field("window_start", times),
            pa.field("window_end", times),
            *[pa.field(name, field.type) for name, field in values],
            pa.field("timestamp", times),
        ]
    )


def typed_rows(rows: WindowRows, flow: Flow) -> pa.Table:
    """Windows with their keys as the flow's serde reads them."""
    key = flow.key_serde.decode_column(rows.key).require_good()
    columns = [
        key,
        pa.array(rows.window_start),
        pa.array(rows.window_end),
        *rows.values.columns,
        pa.array(rows.ts),
    ]
    return pa.Table.from_arrays(columns, schema=result_schema(flow))


class ResultRows(Sequence[ResultRow]):
    """The answer to a query: iterate it, or take it as a table."""

    def __init__(self, table: pa.Table, flow: Flow) -> None:
        self._table, self._flow = table, flow

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @overload
    def __getitem__(self, index: int) -> ResultRow: ...

    @overload
    def __getitem__(self, index: slice) -> ResultRows: ...

    def __getitem__(self, index: int | slice) -> ResultRow | ResultRows:
        if isinstance(index, slice):
            rows = pa.array(range(*index.indices(len(self))), pa.int64())
            return ResultRows(self._table.take(rows), self._flow)
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return next(iter(ResultRows(self._table.slice(index % len(self), 1), self._flow)))

    def __iter__(self) -> Iterator[ResultRow]:
        window = self._flow.window
        of = SessionWindow if window is not None and isinstance(window.kind, Session) else TimeWindow
        names = list(zip(self._flow.result_schema.names, result_columns(self._flow), strict=True))
        for row in self._table.to_pylist():
            value = {name: row[column] for name, column in names}
            yield ResultRow(row["key"], of(row["window_start"], row["window_end"]), value, row["timestamp"])

    def __repr__(self) -> str:
        return f"ResultRows({len(self)} of {self._flow.name})"

    def _repr_html_(self) -> str:
        from tidegate.tables.queries.html import rows_html

        return rows_html(self._table, len(self))

    def show(self) -> None:
        """Print the first rows."""
        from tidegate.tables.queries.html import rows_text

        print(rows_text(self._table, len(self)))

    def to_arrow(self) -> pa.Table:
        return self._table

    def to_pandas(self) -> Any:
        return self._table.to_pandas()

    def to_polars(self) -> Any:
        try:
            import polars
        except ImportError:
            raise InvalidError(
                "polars is not installed: pip install 'tidegate[polars]', then try again"
            ) from None
        return polars.from_arrow(self._table)
