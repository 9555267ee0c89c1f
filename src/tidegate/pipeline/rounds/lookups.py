"""Which commits of tables a round looks things up in: the newest when it is planned, the same when it is repeated.

Thread rule: one master, one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tidegate.pipeline.tasks.lookups import newest_commits, table_commits
from tidegate.storage.backends.port import StorageBackend


class TableCommits:
    """The tables beside an app, as planning sees them."""

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend

    def newest(self, tables: Iterable[str]) -> dict[str, int]:
        """The newest commit of each table; `UnavailableError` when one has none yet."""
        return newest_commits(self._backend, list(tables))

    def are_kept(self, planned: Mapping[str, int]) -> bool:
        """Whether a plan's commits can still be read: a table keeps only the last ones."""
        return all(
            any(each.number == number for each in table_commits(self._backend, table).commits)
            for table, number in planned.items()
        )
