"""`table`: a plain topic as a table, the last value of each key.

A windowed serde works here too, and gives a table by (key, window) that never expires; `windowed_table` is what keeps
a retention, so a warning says so.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tidegate.errors import TidegateWarning
from tidegate.tables.building.consumed import Consumed
from tidegate.tables.building.materialized import Materialized
from tidegate.tables.building.shape import TableRules, table_rules
from tidegate.tables.opening import open_table
from tidegate.tables.queries.forms import KeyQueries
from tidegate.tables.serdes.plain import Serde
from tidegate.tables.serdes.windowed import WindowedSerde
from tidegate.tables.table import Table, TableAt
from tidegate.tables.windowed_table import _partitions

if TYPE_CHECKING:
    from tidegate.tables.queries.explain import Explanation


class KeyTableAt(TableAt, KeyQueries):
    """A table of plain keys as one of its commits left it."""


class KeyTable(Table, KeyQueries):
    """The last value of each key, kept up to date from a topic."""

    _at = KeyTableAt

    def explain(self, key: Any) -> Explanation:
        """Which records made this key's value, what was left out and why, and what it still waits for."""
        return self._explain(key, 0, 0)


def table(
    log: Any,
    topic: str,
    *,
    state: str | Path,
    consumed: Consumed | None = None,
    materialized: Materialized | None = None,
    windowed_key: Serde[Any] | None = None,
    on_bad_key: Literal["fail", "skip"] = "fail",
    read_only: bool = False,
    follow: bool = False,
    **settings: Any,
) -> KeyTable:
    """Read a plain topic as a table, kept in the folder `state`.

    `windowed_key` takes a windowed serde for the whole key, where windows are wanted by key and without an end.
    """
    rules = table_rules(
        "key",
        topic,
        _partitions(log, topic),
        consumed=consumed,
        materialized=materialized,
        on_bad_key=on_bad_key,
    )
    if windowed_key is not None:
        if not isinstance(windowed_key, WindowedSerde):
            raise TypeError(f"{windowed_key!r} is not windowed; give plain key serdes in Consumed")
        warnings.warn(
            f"table {rules.shape.name} keeps windows of {topic} by key, without an end; windowed_table and "
            "sessioned_table keep them for a retention",
            TidegateWarning,
            stacklevel=2,
        )
        rules = TableRules(rules.shape, windowed_key, rules.value, rules.consumed, rules.on_bad_key)
    return open_table(KeyTable, log, rules, state, read_only=read_only, follow=follow, **settings)
