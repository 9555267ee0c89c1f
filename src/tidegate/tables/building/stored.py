"""Tables as they lie in a state folder: which there are, and each as a commit left it, without its log.

For looking around and for tools; an application opens its table with the log it is built from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidegate.clock import Clock
from tidegate.errors import InvalidError, UnavailableError
from tidegate.tables.building.commits import Commit, load_commits, stored_tables
from tidegate.tables.building.consumed import Consumed
from tidegate.tables.building.shape import TableRules, TableShape
from tidegate.tables.building.source import Snapshot
from tidegate.tables.key_table import KeyTableAt
from tidegate.tables.serdes.json_serde import Json
from tidegate.tables.serdes.plain import Bytes, Double, Int, Long, Serde, String
from tidegate.tables.sessioned_table import SessionedTableAt
from tidegate.tables.table import TableAt
from tidegate.tables.windowed_table import WindowedTableAt

if TYPE_CHECKING:
    from tidegate.storage.backends.port import StorageBackend

__all__ = ["SERDES", "open_commit", "open_committed", "serde_named", "stored_tables"]

KINDS: dict[str, type[TableAt]] = {"window": WindowedTableAt, "session": SessionedTableAt, "key": KeyTableAt}
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
    return open_commit(backend, shape, chosen, clock=clock, key=key, value=value)


def open_commit(
    backend: StorageBackend,
    shape: TableShape,
    commit: Commit,
    *,
    clock: Clock,
    key: Serde[Any] | None = None,
    value: Serde[Any] | None = None,
) -> TableAt:
    """A stored table as this commit left it, whatever its list of commits says by now."""
    rules = TableRules(
        shape,
        key or serde_named(shape.key_serde),
        value or serde_named(shape.value_serde),
        Consumed(),
        "fail",
    )
    return KINDS[shape.kind](Snapshot(backend, rules, commit, clock=clock), rules)


def serde_named(written: str) -> Serde[Any]:
    """The serde that a table was made with, where its name says all; bytes for every other."""
    return {repr(serde): serde for serde in SERDES.values()}.get(written, SERDES["bytes"])
