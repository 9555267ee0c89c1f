"""Windows over keyed events: kinds, operators, aggregates, window and session stores, deduplication.

The public names are imported lazily, on first access.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.windows.aggregates.folds import resolve
    from tidegate.windows.changelog import changelog_name, changelog_settings
    from tidegate.windows.events import EventBatch
    from tidegate.windows.keys import (
        KeyFormat,
        SessionWindow,
        TimeWindow,
        decode_key,
        encode_key,
        encode_keys,
    )
    from tidegate.windows.kinds import Deduplicate
    from tidegate.windows.operators.base import Moment
    from tidegate.windows.operators.dedupe import DedupeOperator
    from tidegate.windows.operators.session import SessionOperator
    from tidegate.windows.operators.windows import WindowOperator
    from tidegate.windows.stores.window_store import WindowStore

_HOMES = {
    "DedupeOperator": "operators.dedupe",
    "Deduplicate": "kinds",
    "EventBatch": "events",
    "KeyFormat": "keys",
    "Moment": "operators.base",
    "SessionOperator": "operators.session",
    "SessionWindow": "keys",
    "TimeWindow": "keys",
    "WindowOperator": "operators.windows",
    "WindowStore": "stores.window_store",
    "changelog_name": "changelog",
    "changelog_settings": "changelog",
    "decode_key": "keys",
    "encode_key": "keys",
    "encode_keys": "keys",
    "resolve": "aggregates.folds",
}

__all__ = [
    "DedupeOperator",
    "Deduplicate",
    "EventBatch",
    "KeyFormat",
    "Moment",
    "SessionOperator",
    "SessionWindow",
    "TimeWindow",
    "WindowOperator",
    "WindowStore",
    "changelog_name",
    "changelog_settings",
    "decode_key",
    "encode_key",
    "encode_keys",
    "resolve",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tidegate.windows' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"tidegate.windows.{home}"), name)
    return value
