"""`sessioned_table`: any topic of session windows, Kafka Streams' own or ours, as a table.

Session keys carry both their ends, so there is no window size to give. A merge arrives as deletions of the old
sessions followed by the merged one; between them the table is as the topic was, and nothing is repaired.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tidegate.durations import DurationLike, MomentLike, moment_ms
from tidegate.tables.building.consumed import Consumed
from tidegate.tables.building.materialized import Materialized
from tidegate.tables.building.shape import table_rules
from tidegate.tables.opening import open_topic
from tidegate.tables.queries.forms import SessionQueries
from tidegate.tables.table import Table, TableAt

if TYPE_CHECKING:
    from tidegate.tables.queries.explain import Explanation


class SessionedTableAt(TableAt, SessionQueries):
    """A table of sessions as one of its commits left it."""


class SessionedTable(Table, SessionQueries):
    """Sessions by key, kept up to date from a topic."""

    _at = SessionedTableAt

    def explain(self, key: Any, start: MomentLike, end: MomentLike) -> Explanation:
        """Which records made this session's value, what was left out and why, and what it still waits for."""
        return self._explain(key, moment_ms(end), moment_ms(start))


def sessioned_table(
    log: Any,
    topic: str,
    *,
    state: str | Path,
    consumed: Consumed | None = None,
    materialized: Materialized | None = None,
    retention: DurationLike | None = None,
    on_bad_key: Literal["fail", "skip"] = "fail",
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
        on_bad_key=on_bad_key,
    )
    return open_topic(
        SessionedTable, log, topic, rules_of, state, read_only=read_only, follow=follow, **settings
    )
