"""Tables and answers in a notebook: a few rows, everything escaped, never a scan of it all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidegate.durations import format_duration
from tidegate.errors import TidegateError
from tidegate.notebook import SHOWN_ROWS, cell, facts_html, grid_html, grid_text

if TYPE_CHECKING:
    from tidegate.tables.topic_table import TopicTable


def rows_html(table: pa.Table, total: int | None) -> str:
    """The rows given, and how many there are (None: nobody counted)."""
    types = [str(field.type) for field in table.schema]
    return grid_html(table.column_names, _values(table), total=total, types=types)


def rows_text(table: pa.Table, total: int | None) -> str:
    """The same for a terminal."""
    return grid_text(table.column_names, _values(table), total=total)


def table_html(table: TopicTable) -> str:
    """What the table is and some of its rows: the first batch of a scan, no more."""
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
    """The first batch of a scan, no more; None when there is nothing."""
    first = next(table.batches(batch_rows=SHOWN_ROWS, timeout=0), None)
    return None if first is None else pa.Table.from_batches([first]).slice(0, SHOWN_ROWS)


def _values(table: pa.Table) -> list[list[Any]]:
    return [list(row.values()) for row in table.slice(0, SHOWN_ROWS).to_pylist()]
