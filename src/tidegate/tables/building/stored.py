"""Tables as they lie in a state folder: which there are, and each as a commit left it, without its log.

For looking around and for tools; an application opens its table with the log it is built from.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tidegate.clock import Clock
from tidegate.errors import InvalidError, UnavailableError
from tidegate.tables.building.commits import load_commits, stored_tables
from tidegate.tables.building.consumed import Consumed
from tidegate.tables.building.shape import TableRules, TableShape
from tidegate.tables.building.source import StoredCommit, StoredCommits, StoredSnapshot
from tidegate.tables.commit_follower import CommitFollower, PinnedCommit
from tidegate.tables.serdes.json_serde import Json
from tidegate.tables.serdes.plain import Bytes, Double, Int, Long, Serde, String
from tidegate.tables.topic_table import TableAt

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend

__all__ = ["SERDES", "follow_stored", "open_committed", "serde_named", "stored_tables", "table_at"]

_ALL: tuple[Any, ...] = (Bytes(), String(), Int(), Long(), Double(), Json())
SERDES: dict[str, Serde[Any]] = {serde.name: serde for serde in _ALL}


def open_committed(
    backend: StorageBackend,
    name: str,
    *,
    clock: Clock,
    number: int | None = None,
    key: Serde[Any] | None = None,
    value: Serde[Any] | None = None,
) -> TableAt:
    """A stored table as its last commit, or the one of this number, left it: no log is needed."""
    found = load_commits(backend, name)
    if found is None:
        known = ", ".join(stored_tables(backend)) or "none"
        raise InvalidError(f"there is no table {name!r} here; there are {known}")
    shape, commits = found[0].shape, found[0].commits
    if not commits:
        raise UnavailableError(f"table {name} has no commit yet; try again when its builder has made one")
    chosen = next((each for each in reversed(commits) if number in (None, each.number)), None)
    if chosen is None:
        raise InvalidError(
            f"commit {number} of table {name} is not kept; there are {commits[0].number} to {commits[-1].number}"
        )
    rules_of = partial(stored_rules, key=key, value=value)
    only = StoredCommits(backend, name, rules_of, clock=clock, only=(shape, chosen))
    return TableAt(CommitFollower(only, clock))


def follow_stored(
    backend: StorageBackend, name: str, *, clock: Clock
) -> CommitFollower[StoredCommit, StoredSnapshot]:
    """A stored table at its newest commit, also where it is made anew as another kind of table."""
    return CommitFollower(StoredCommits(backend, name, stored_rules, clock=clock), clock)


def table_at(snapshot: StoredSnapshot) -> TableAt:
    """The queries of a snapshot that is pinned."""
    return TableAt(PinnedCommit(snapshot))


def stored_rules(
    shape: TableShape, *, key: Serde[Any] | None = None, value: Serde[Any] | None = None
) -> TableRules:
    """How a table is read by somebody who knows no more than its list of commits says."""
    key, value = key or serde_named(shape.key_serde), value or serde_named(shape.value_serde)
    return TableRules(shape, key, value, Consumed(), "fail")


def serde_named(written: str) -> Serde[Any]:
    """The serde that a table was made with, where its name says all; bytes for every other."""
    return {repr(serde): serde for serde in SERDES.values()}.get(written, SERDES["bytes"])
