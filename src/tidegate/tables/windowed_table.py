"""`windowed_table`: any windowed changelog topic, Kafka Streams' own or ours, as a table of time windows.

The eight forms of KIP-300 are two functions: `consumed` and `materialized` may each be left out. The topic holds keys
with their window start (see `windows.keys`); where a window ends is not in the bytes, so its size must be given.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

from tidegate.durations import DurationLike
from tidegate.tables.building.consumed import Consumed
from tidegate.tables.building.materialized import Materialized
from tidegate.tables.building.shape import table_rules
from tidegate.tables.opening import open_topic
from tidegate.tables.topic_table import TopicTable


class WindowedTable(TopicTable):
    """Windows of time by key, kept up to date from a topic."""


def windowed_table(
    log: Any,
    topic: str,
    window_size: DurationLike,
    *,
    state: str | Path,
    consumed: Consumed | None = None,
    materialized: Materialized | None = None,
    key_format: Literal["changelog", "topic"] = "changelog",
    retention: DurationLike | None = None,
    on_key_error: Literal["fail", "drop", "keep"] = "fail",
    read_only: bool = False,
    follow: bool = False,
    **settings: Any,
) -> WindowedTable:
    """Read a topic of time windows as a table, kept in the folder `state`.

    `log` is an open log, or where it is: a folder or `kafka://host:port`.

    `retention` is how far behind the newest window others stay readable; by default a day, or the window size if
    that is more. Further settings are those of `opening.open_table`.
    """
    rules_of = partial(
        table_rules,
        "window",
        topic,
        size=window_size,
        consumed=consumed,
        materialized=materialized,
        key_format=key_format,
        retention=retention,
        on_key_error=on_key_error,
    )
    return open_topic(
        WindowedTable, log, topic, rules_of, state, read_only=read_only, follow=follow, **settings
    )
