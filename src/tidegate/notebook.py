"""How things show themselves in a notebook and at a prompt: a few facts, a few rows, "… n more".

Pure functions over values that are already there. Whoever calls them has made sure that no topic was read and no Spark
job started for it: display must be cheap. Everything that comes from records is escaped, and cut when it is long.

N1  no more than `SHOWN_ROWS` rows and `SHOWN_COLUMNS` columns, each cell at most `LONGEST_CELL` characters.
N2  HTML: every text goes through `cell`; nothing in a record can become markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

SHOWN_ROWS: Final = 10
SHOWN_COLUMNS: Final = 20
LONGEST_CELL: Final = 120


def cell(value: Any) -> str:
    """A value as HTML (N1, N2); None is empty."""
    return escape(_short(value))


def facts_html(title: str, facts: Mapping[str, Any]) -> str:
    """A heading and what is known, as a list; facts that are None are left out."""
    told = "".join(
        f"<li>{escape(name)}: {cell(value)}</li>" for name, value in facts.items() if value is not None
    )
    return f"<b>{cell(title)}</b><ul>{told}</ul>"


def grid_html(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    total: int | None,
    types: Sequence[str] = (),
    noun: str = "rows",
) -> str:
    """The first rows as a table; `total` is how many there are, None where nobody counted."""
    shown = [list(row)[:SHOWN_COLUMNS] for _, row in zip(range(SHOWN_ROWS), rows, strict=False)]
    head = "".join(f"<th>{cell(name)}</th>" for name in columns[:SHOWN_COLUMNS])
    kinds = "".join(f"<td><i>{cell(name)}</i></td>" for name in types[:SHOWN_COLUMNS])
    body = "".join("<tr>" + "".join(f"<td>{cell(each)}</td>" for each in row) + "</tr>" for row in shown)
    below = more(len(shown), total, noun)
    return (
        f"<table><thead><tr>{head}</tr>{f'<tr>{kinds}</tr>' if kinds else ''}</thead><tbody>{body}</tbody></table>"
        + (f"<p>{escape(below)}</p>" if below else "")
    )


def grid_text(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, total: int | None) -> str:
    """The same for a terminal."""
    shown = [[_plain(each) for each in row] for _, row in zip(range(SHOWN_ROWS), rows, strict=False)]
    widths = [max([len(name), *(len(row[place]) for row in shown)]) for place, name in enumerate(columns)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in [list(columns), *shown]
    ]
    below = more(len(shown), total, "rows")
    return "\n".join([*lines, below] if below else lines)


def more(shown: int, total: int | None, noun: str) -> str:
    """`… 490 more rows`; nothing when all are shown."""
    if total is None:
        return f"… the first {shown} {noun}" if shown == SHOWN_ROWS else ""
    return f"… {total - shown:,} more {noun}" if total > shown else ""


def _short(value: Any) -> str:
    text = "" if value is None else value if isinstance(value, str) else str(value)
    return text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 1] + "…"


def _plain(value: Any) -> str:
    """Nothing in a record can drive the terminal."""
    text = _short(value)
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
