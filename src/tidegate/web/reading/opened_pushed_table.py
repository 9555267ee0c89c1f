"""A table that is pushed in versions, as one of them has it: here a commit is a version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidegate.clock import Clock
from tidegate.errors import InvalidError
from tidegate.web.failures import NotThereError
from tidegate.web.reading.opened import CommitOf
from tidegate.web.reading.opened_stored_table import StoredTable
from tidegate.web.reading.table_documents import ExplainDocument

if TYPE_CHECKING:
    from tidegate.storage.backends.port import StorageBackend
    from tidegate.tables.versions.record import VersionList


def shown_version(backend: StorageBackend, name: str, number: int | None) -> int:
    """The version that readers see, or the one asked for if it can be read."""
    known = _ready(backend, name)
    wanted = _known(backend, name).current if number is None else number
    if wanted not in {each.number for each in known}:
        there = ", ".join(str(each.number) for each in known) or "none"
        asked = "no version is shown yet" if number is None else f"version {number} cannot be read"
        raise NotThereError(f"of table {name[:100]!r} {asked}; versions that can be read: {there}")
    return wanted


def open_pushed_table(backend: StorageBackend, name: str, number: int, clock: Clock) -> Any:
    from tidegate.tables.versions.reading import VersionedTable

    return VersionedTable(backend, name, number=number, clock=clock)


def pushed_commits(backend: StorageBackend, name: str) -> list[CommitOf]:
    """The versions of a table that can be read; it need not be open."""
    return [CommitOf(each.number, each.ended_ms, each.rows) for each in _ready(backend, name)]


class PushedTable(StoredTable):
    """One version of a table."""

    def __init__(self, name: str, backend: StorageBackend, table: Any) -> None:
        super().__init__(name, backend, table)
        self.is_versioned = True

    def commits(self) -> list[CommitOf]:
        return pushed_commits(self._backend, self.name)

    def late(self, most: int) -> tuple[list[Any], int]:
        """Nothing is late for a push."""
        return [], 0

    def explain(self, log: Any, key: str, start: int | None, end: int | None, most: int) -> ExplainDocument:
        raise InvalidError(
            f"a row of {self.name} is the one its push sent last for the key; see its records in topic {self.topic}"
        )


def _known(backend: StorageBackend, name: str) -> VersionList:
    from tidegate.tables.versions.catalog import Versions

    return Versions(backend, name).list()


def _ready(backend: StorageBackend, name: str) -> list[Any]:
    from tidegate.tables.versions.record import State

    return [each for each in _known(backend, name).versions if each.state is State.READY]
