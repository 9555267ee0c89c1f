"""Tables and answers in a notebook: a few rows, everything escaped, never a scan of it all."""

from __future__ import annotations

from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidegate.durations import format_duration
from tidegate.errors import TidegateError
from tidegate.tables.queries.reading import all_rows
from tidegate.tables.queries.results import typed

if TYPE_CHECKING:
    from tidegate.tables.table import Table

SHOWN_ROWS = 10
LONGEST_CELL = 120


def rows_html(table: pa.Table, total: int) -> str:
    """The rows given, and how many there are."""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.column_names)
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row.values()) + "</tr>"
        for row in table.to_pylist()
    )
    more = f"<p>{table.num_rows} of {total} rows</p>" if total > table.num_rows else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def table_html(table: Table) -> str:
    """What the table is and some of its rows: the first batch of a scan, no more."""
    shape = table.rules.shape
    facts = [("table", shape.name), ("topic", shape.topic), ("kind", shape.kind), ("role", table.role)]
    if shape.size_ms:
        facts.append(("window size", format_duration(shape.size_ms)))
    if shape.is_windowed:
        facts.append(("retention", format_duration(shape.retention_ms)))
    told = "".join(f"<li>{escape(name)}: {_cell(value)}</li>" for name, value in facts)
    try:
        shown = _some_rows(table)
    except TidegateError as error:
        return f"<ul>{told}</ul><p>{escape(str(error))}</p>"
    return f"<ul>{told}</ul>{shown}"


def _some_rows(table: Table) -> str:
    start = table._first
    first = table._read(
        lambda source: list(islice(all_rows(source, start, batch_rows=SHOWN_ROWS), 1)), None, 0
    )
    if not first:
        return "<p>no rows</p>"
    return rows_html(typed(pa.Table.from_batches(first).slice(0, SHOWN_ROWS), table.rules), SHOWN_ROWS)


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return escape(text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 1] + "…")
