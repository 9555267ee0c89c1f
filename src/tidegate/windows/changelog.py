"""Changelog topics as Kafka Streams names and sets them up: one for each store, named after application and store.

Window and session stores: `compact,delete` (with duplicates kept: `delete`) for the store's retention and a day more,
because a store's retention is stream time and a topic's is wall clock. Key-value stores: `compact`. All have
message.timestamp.type=CreateTime: a record's timestamp is that of the value, and a restored store needs it.

Later settings override earlier ones: `everywhere` (all topics of the application), the computed ones, `own` (this
store's). So only a setting of the store itself changes the computed retention.

Thread rule: pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from tidegate.durations import DurationLike, milliseconds
from tidegate.errors import InvalidError
from tidegate.windows.keys import LATEST

StoreKind = Literal["window", "session", "key-value"]
ADDITIONAL_MS: Final = 86_400_000


def changelog_name(application: str, store: str) -> str:
    """Return the name of a store's changelog topic."""
    if not application or not store:
        raise InvalidError(
            f"a changelog is named after an application and a store, not {application!r} and {store!r}"
        )
    return f"{application}-{store}-changelog"


def changelog_settings(
    kind: StoreKind,
    *,
    retention: int | DurationLike | None = None,
    retain_duplicates: bool = False,
    additional: int | DurationLike = ADDITIONAL_MS,
    everywhere: Mapping[str, str] | None = None,
    own: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the settings of a store's changelog topic, for `Log.create_topic`."""
    reckoned = {"message.timestamp.type": "CreateTime"}
    if kind == "key-value":
        if retention is not None or retain_duplicates:
            raise InvalidError("a key-value store keeps one value of each key for ever: it has no retention")
        reckoned["cleanup.policy"] = "compact"
    elif retention is None:
        raise InvalidError(f"the changelog of a {kind} store needs the store's retention")
    else:
        kept = milliseconds(retention) + milliseconds(additional)
        reckoned["cleanup.policy"] = "delete" if retain_duplicates else "compact,delete"
        reckoned["retention.ms"] = str(min(kept, LATEST))
    return {**(everywhere or {}), **reckoned, **(own or {})}
