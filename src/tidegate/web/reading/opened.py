"""One table, open: the two kinds behind the same few calls.

Thread rule: an open table answers from any thread; commits that are opened one by one are closed when others are used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tidegate.errors import CommitGoneError, CorruptError, InvalidError, UnavailableError
from tidegate.web.failures import NotThereError
from tidegate.web.reading.site import Site, check_wanted

if TYPE_CHECKING:
    import pyarrow as pa

    from tidegate.storage.backends.port import StorageBackend
    from tidegate.tables.versions.record import TableVersion
    from tidegate.web.reading.table_documents import ExplainDocument, LateShown, RowShown

Answer = TypeVar("Answer")


class CommitOf(NamedTuple):
    """A commit that can be read."""

    number: int
    committed_ms: int
    records: int | None


class Opened(ABC):
    """A table as one commit has it."""

    name: str
    app: str = ""
    kind: str = ""
    topic: str = ""
    changelog: str = ""
    window_ms: int = 0
    is_versioned: bool = False
    unread_columns: tuple[str, ...] = ()
    """Columns whose values only the app's program can tell (`reduce`)."""
    rules: str = ""
    """How the table is opened in Python, beyond its topic: serdes, and what windows were said to be."""
    columns: list[str]
    number: int
    committed_ms: int
    positions: dict[int, int]

    def typed(self, key: str) -> Any:
        """A key as typed, as the table takes it."""
        return key

    @abstractmethod
    def commits(self) -> list[CommitOf]: ...

    @abstractmethod
    def fetch(self, key: str, first: int, last: int) -> list[RowShown]: ...

    @abstractmethod
    def scan(self, first: int, last: int, skip: int, limit: int) -> tuple[list[RowShown], bool]:
        """So many rows after `skip`, and whether there are more."""

    @abstractmethod
    def some_keys(self, most: int) -> list[str]: ...

    @abstractmethod
    def late(self, most: int) -> tuple[list[LateShown], int]: ...

    @abstractmethod
    def explain(
        self, log: Any, key: str, start: int | None, end: int | None, most: int
    ) -> ExplainDocument: ...


def known_tables(site: Site) -> list[str]:
    """The names of all tables: apps' first."""
    from tidegate.errors import TidegateError
    from tidegate.pipeline.reading.recorded import recorded_tables
    from tidegate.tables.building.commits import stored_tables
    from tidegate.tables.versions.catalog import versioned_tables
    from tidegate.web.reading.apps import app_names

    backend = site.backend
    if backend is None:
        return []
    names = []
    for app in app_names(site):
        try:
            names += [f"{app}:{each.name}" for each in recorded_tables(backend, app)]
        except TidegateError:
            continue
    pushed = versioned_tables(backend)
    parts = {each.shape(number).name for table in pushed for each, number in _partitions(backend, table)}
    return [*names, *pushed, *(each for each in stored_tables(backend) if each not in parts)]


def _partitions(backend: StorageBackend, table: str) -> list[tuple[TableVersion, int]]:
    """Each partition of each version is kept as a table of its own, which nobody needs to see."""
    from tidegate.tables.versions.catalog import Versions

    versions = Versions(backend, table).list().versions
    return [(each, number) for each in versions for number in range(each.partitions)]


def kept_commits(site: Site, name: str) -> list[CommitOf]:
    """The commits of a table that can be read, without opening it."""
    from tidegate.tables.versions.catalog import load_versions
    from tidegate.web.reading.opened_app_table import app_table_commits
    from tidegate.web.reading.opened_pushed_table import pushed_commits
    from tidegate.web.reading.opened_stored_table import stored_commits

    backend = site.require_backend()
    app, colon, _ = name.partition(":")
    if colon:
        return app_table_commits(backend, app)
    if load_versions(backend, name) is not None:
        return pushed_commits(backend, name)
    return stored_commits(backend, name)


def asked(site: Site, name: str, as_of: int | None, look: Callable[[Opened], Answer]) -> Answer:
    """What `look` finds in the table.

    Who keeps the table may let go, meanwhile, what the commit needs that is being read: then in the newest one.
    """
    with opened(site, name, as_of) as table:
        try:
            return look(table)
        except (CorruptError, CommitGoneError):
            commits = kept_commits(site, name)
            if as_of is not None or not commits or commits[-1].number == table.number:
                raise
    with opened(site, name, anew=True) as table:
        return look(table)


@contextmanager
def opened(site: Site, name: str, as_of: int | None = None, *, anew: bool = False) -> Iterator[Opened]:
    """The table, as its last commit or an earlier one has it; `anew` looks whether there is a newer one now."""
    from tidegate.tables.building.stored import table_at
    from tidegate.tables.versions.catalog import load_versions
    from tidegate.web.reading.opened_app_table import AppTable, open_app_table
    from tidegate.web.reading.opened_pushed_table import PushedTable, open_pushed_table, shown_version
    from tidegate.web.reading.opened_stored_table import (
        StoredTable,
        follow_stored_table,
        newest_of,
        open_stored_table,
    )

    backend = site.require_backend()
    app, colon, short = name.partition(":")
    if colon:
        with site.table(name, None, lambda: open_app_table(site, app, short)) as table:
            if as_of is None:
                if anew:
                    table.refresh()
                with table.pinned() as newest:
                    yield AppTable(name, app, backend, newest)
                return
            if as_of not in table.rounds():
                raise NotThereError(f"commit {as_of} of {name} is not kept; there are {table.rounds()}")
            with site.table(name, as_of, lambda: table.as_of(as_of)) as past:
                yield AppTable(name, app, backend, past)
        return
    if load_versions(backend, name) is not None:
        shown = shown_version(backend, name, as_of)
        with site.table(name, shown, lambda: open_pushed_table(backend, name, shown, site.clock)) as pushed:
            yield PushedTable(name, backend, pushed)
        return
    if as_of is None:
        with site.table(name, None, lambda: follow_stored_table(backend, name, site.clock)) as newest:
            try:
                newest.refresh(wait=anew)
            except UnavailableError:
                newest_of(backend, name)  # it may be deleted by now
                raise
            with newest.pinned() as snapshot:
                yield StoredTable(name, backend, table_at(snapshot))
        return
    with site.table(name, as_of, lambda: open_stored_table(backend, name, as_of, site.clock)) as stored:
        yield StoredTable(name, backend, stored)


def typed_key(written: str, serde: str) -> Any:
    """A key as typed, as its serde takes it."""
    try:
        if serde in ("int", "long"):
            return int(written)
        if serde == "double":
            return float(written)
        if serde == "json":
            import msgspec

            return msgspec.json.decode(written)
    except (ValueError, OverflowError, RecursionError):
        raise InvalidError(
            f"{written[:60]!r} is no key of this table; its keys are of type {serde}"
        ) from None
    return written.encode("utf-8", "surrogateescape") if serde == "bytes" else written


def shown_key(key: Any) -> Any:
    """A key as JSON has it, and as it may be typed again."""
    if isinstance(key, bytes):
        return key.decode("utf-8", "backslashreplace")
    return key


def page_of(batches: Iterator[pa.RecordBatch], skip: int, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """Rows `skip` to `skip + limit` of batches, and whether there are more."""
    rows: list[dict[str, Any]] = []
    for batch in batches:
        check_wanted()
        if skip >= batch.num_rows:
            skip -= batch.num_rows
            continue
        piece = batch.slice(skip, limit - len(rows) + 1)
        skip = 0
        rows += piece.to_pylist()
        if len(rows) > limit:
            return rows[:limit], True
    return rows, False
