"""A log in a notebook: its first topics, with what their files say without being read.

Offsets and sizes come from names, lengths and checkpoints of files, and of no more than `LOOKED_AT` partitions; no
record is read for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.durations import format_size
from tidegate.errors import TidegateError
from tidegate.notebook import SHOWN_ROWS, facts_html, grid_html, grid_text

if TYPE_CHECKING:
    from tidegate.log.access.embedded import Log

LOOKED_AT: Final = 64
COLUMNS: Final = ("topic", "partitions", "offsets", "bytes")


def log_html(log: Log) -> str:
    """What `Log` shows of itself."""
    facts = {"folder": log.path, "durability": log.durability, "opened": "to read" if log.read_only else None}
    return facts_html("log", facts) + grid_html(COLUMNS, _rows(log), total=len(log.topics()), noun="topics")


def log_text(log: Log) -> str:
    """The same for a terminal."""
    return grid_text(COLUMNS, _rows(log), total=len(log.topics()))


def _rows(log: Log) -> list[list[Any]]:
    """A line for each of the first topics; what cannot be told cheaply, or at all, is left empty."""
    rows: list[list[Any]] = []
    left = LOOKED_AT
    for topic, partitions in list(log.partition_counts().items())[:SHOWN_ROWS]:
        offsets: Any = None
        size: Any = None
        left -= partitions
        if left >= 0:
            try:
                known = log.partition_rows(topic)
                offsets = sum(row["high_watermark"] - row["log_start"] for row in known)
                size = format_size(sum(row["bytes"] for row in known))
            except (TidegateError, OSError) as error:  # deleted meanwhile, or damaged: display never fails
                size = str(error)
        rows.append([topic, partitions, offsets, size])
    return rows
