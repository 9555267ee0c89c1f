"""`table`: a plain topic as a table, the last value of each key.

A windowed serde works here too, and gives a table by (key, window) that never expires; `windowed_table` is what keeps
a retention, so a warning says so.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from tidegate.errors import TidegateWarning
from tidegate.tables.building.consumed import Consumed
from tidegate.tables.building.materialized import Materialized
from tidegate.tables.building.shape import TableRules, table_rules
from tidegate.tables.opening import open_topic
from tidegate.tables.serdes.plain import Serde
from tidegate.tables.serdes.windowed import WindowedSerde
from tidegate.tables.topic_table import TopicTable


class KeyTable(TopicTable):
    """The last value of each key, kept up to date from a topic."""


def table(
    log: Any,
    topic: str,
    *,
    state: str | Path,
    consumed: Consumed | None = None,
    materialized: Materialized | None = None,
    windowed_key: Serde[Any] | None = None,
    on_key_error: Literal["fail", "drop", "keep"] = "fail",
    read_only: bool = False,
    follow: bool = False,
    **settings: Any,
) -> KeyTable:
    """Read a plain topic as a table, kept in the folder `state`.

    `log` is an open log, or where it is: a folder or `kafka://host:port`.
    `windowed_key` takes a windowed serde for the whole key, where windows are wanted by key and without an end.
    """
    if windowed_key is not None and not isinstance(windowed_key, WindowedSerde):
        raise TypeError(f"{windowed_key!r} is not windowed; give plain key serdes in Consumed")

    def rules_of(partitions: tuple[int, ...]) -> TableRules:
        rules = table_rules(
            "key",
            topic,
            partitions,
            consumed=consumed,
            materialized=materialized,
            on_key_error=on_key_error,
        )
        return rules if windowed_key is None else replace(rules, key=windowed_key)

    found = open_topic(KeyTable, log, topic, rules_of, state, read_only=read_only, follow=follow, **settings)
    if windowed_key is not None:
        warnings.warn(
            f"table {found.name} keeps windows of {topic} by key, without an end; windowed_table and "
            "sessioned_table keep them for a retention",
            TidegateWarning,
            stacklevel=2,
        )
    return found
