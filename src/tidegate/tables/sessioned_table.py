"""`sessioned_table`: any topic of session windows, Kafka Streams' own or ours, as a table.

Session keys carry both their ends, so there is no window size to give. A merge arrives as deletions of the old
sessions followed by the merged one; between them the table is as the topic was, and nothing is repaired.
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


class SessionedTable(TopicTable):
    """Sessions by key, kept up to date from a topic."""


def sessioned_table(
    log: Any,
    topic: str,
    *,
    state: str | Path,
    consumed: Consumed | None = None,
    materialized: Materialized | None = None,
    retention: DurationLike | None = None,
    on_key_error: Literal["fail", "drop", "keep"] = "fail",
    read_only: bool = False,
    follow: bool = False,
    **settings: Any,
) -> SessionedTable:
    """Read a topic of sessions as a table, kept in the folder `state`.

    `log` is an open log, or where it is: a folder or `kafka://host:port`.

    `retention` is how far behind the newest session end others stay readable; by default a day.
    """
    if "window_size" in settings:
        raise TypeError("sessions carry both their ends: a sessioned table has no window_size")
    rules_of = partial(
        table_rules,
        "session",
        topic,
        consumed=consumed,
        materialized=materialized,
        retention=retention,
        on_key_error=on_key_error,
    )
    return open_topic(
        SessionedTable, log, topic, rules_of, state, read_only=read_only, follow=follow, **settings
    )
