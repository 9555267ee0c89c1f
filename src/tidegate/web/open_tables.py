"""The three kinds of tables behind one interface, `Opened`: tables of apps, of topics, and pushed versions.

Thread rule: an open table may be read from any thread; the site closes it when it is evicted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec

from tidegate.clock import Clock
from tidegate.durations import format_duration
from tidegate.errors import CommitGoneError, CorruptError, InvalidError, UnavailableError
from tidegate.web.apps import app_names, require_app
from tidegate.web.failures import NotThereError
from tidegate.web.schemas import Copy, ExplainDocument, LateShown, PartShown, RowShown, shown_text, text_of
from tidegate.web.site import Site, check_wanted

if TYPE_CHECKING:
    import pyarrow as pa

    from tidegate.pipeline.table import ResultTable
    from tidegate.storage.backends.base import StorageBackend
    from tidegate.tables.commits import Commit
    from tidegate.tables.options import TableShape
    from tidegate.tables.versions.catalog import TableVersion, VersionList


# -- the interface ---------------------------------------------------------------------------------

Answer = TypeVar("Answer")
LOOKED_AT_KEYS: Final = 10_000


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
    from tidegate.pipeline.table_catalog import recorded_tables
    from tidegate.tables.commits import stored_tables
    from tidegate.tables.versions.catalog import versioned_tables

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

    backend = site.require_backend()
    app, colon, _ = name.partition(":")
    if colon:
        return app_table_commits(backend, app, None)
    if load_versions(backend, name) is not None:
        return pushed_commits(backend, name)
    return stored_commits(backend, name)


def asked(site: Site, name: str, as_of: int | None, look: Callable[[Opened], Answer]) -> Answer:
    """Return what `look` finds in the table.

    When the commit that is read is collected meanwhile, `look` is called again with the newest one.
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
    from tidegate.tables.topic_table import table_at
    from tidegate.tables.versions.catalog import load_versions

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
            kept = [each.number for each in app_table_commits(backend, app, table.flow.name)]
            if as_of not in kept:
                raise NotThereError(f"commit {as_of} of {name} is not kept; there are {kept}")
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


def shown_key(key: Any) -> Any:
    """A key as JSON has it; bytes as text that may be typed again."""
    from tidegate.tables.serdes.base import text_of_key

    return text_of_key(key) if isinstance(key, bytes) else key


def some_of(keys: Any, most: int) -> list[str]:
    """The first different keys of a column, as text that may be typed again."""
    import pyarrow as pa

    from tidegate.tables.serdes.base import text_of_key

    if not pa.types.is_nested(keys.type):
        keys = keys.unique()
    some = dict.fromkeys(text_of_key(key) for key in keys.slice(0, LOOKED_AT_KEYS).to_pylist())
    return list(some)[:most]


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


# -- tables of apps --------------------------------------------------------------------------------

LATEST: Final = 2**63 - 1
_OWN: Final = ("key", "window_start", "window_end", "timestamp")


def open_app_table(site: Site, app: str, short: str) -> ResultTable:
    from tidegate.pipeline.table_catalog import open_recorded, recorded_tables

    require_app(site, app)
    backend = site.require_backend()
    if short not in {each.name for each in recorded_tables(backend, app)}:
        raise NotThereError(f"app {app} has no table {short[:100]!r}; look at what there is: /api/tables")
    return open_recorded(backend, app, short, clock=site.clock)


def app_table_commits(backend: StorageBackend, app: str, flow: str | None) -> list[CommitOf]:
    """The commits of an app that have state of this flow (None: all), which are those of its tables."""
    from tidegate.pipeline.admin import app_commits

    return [
        CommitOf(each.round, each.committed_ms, each.records)
        for each in app_commits(backend, app)
        if flow is None or flow in each.flows
    ]


class AppTable(Opened):
    """One commit of an app's table."""

    def __init__(self, name: str, app: str, backend: StorageBackend, table: ResultTable) -> None:
        from tidegate.pipeline.table_catalog import unread_columns

        flow, commit = table.flow, table.commit
        self.name, self.app, self._backend, self._table = name, app, backend, table
        self.kind = "session" if hasattr(_kind(table), "gap_ms") else "window"
        self.topic = flow.source.topic
        self.changelog = flow.topics[0].topic if flow.topics else ""
        self.window_ms = int(getattr(_kind(table), "size_ms", 0) or getattr(_kind(table), "difference_ms", 0))
        self.columns = [each for each in table.schema.names if each not in _OWN]
        self.number, self.committed_ms = commit.round, commit.committed_ms
        self.positions = table.position
        self.unread_columns = unread_columns(flow)

    def typed(self, key: str) -> Any:
        from tidegate.tables.serdes.base import key_of_text

        return key_of_text(self._table.flow.key_serde, key)

    def commits(self) -> list[CommitOf]:
        return app_table_commits(self._backend, self.app, self._table.flow.name)

    def fetch(self, key: str, first: int, last: int) -> list[RowShown]:
        wanted = self.typed(key)
        return [_app_row(row) for row in self._table.fetch(wanted, first, last).to_arrow().to_pylist()]

    def scan(self, first: int, last: int, skip: int, limit: int) -> tuple[list[RowShown], bool]:
        rows, more = page_of(self._table.scan(first, last), skip, limit)
        return [_app_row(row) for row in rows], more

    def some_keys(self, most: int) -> list[str]:
        """Keys of the newest windows."""
        newest = max((line.stream_time for line in self._table.commit.tasks), default=-1)
        since = max(0, newest - 2 * (self.window_ms or 3_600_000))
        return some_of(self._table.fetch_all(since).to_arrow().column("key"), most)

    def late(self, most: int) -> tuple[list[LateShown], int]:
        found = self._table.late()
        return [_late(row) for row in found.slice(0, most).to_pylist()], int(found.num_rows)

    def explain(self, log: Any, key: str, start: int | None, end: int | None, most: int) -> ExplainDocument:
        from tidegate.pipeline.lineage import explain_window

        if start is None:
            raise InvalidError(
                f"table {self.name} has windows; say when the one begins that is asked about: start=…"
            )
        wanted = self.typed(key)
        found = explain_window(self._table, log, wanted, start, most_records=most, between=check_wanted)
        value = None if found.value is None else {name: plain(each) for name, each in found.value.items()}
        return ExplainDocument(
            table=self.name,
            topic=self.topic,
            key=key,
            window_start_ms=found.start,
            window_end_ms=found.end,
            value=value,
            sentence=f"{found.counted} records make this value"
            if found.value is not None
            else "There is no such window in this table",
            parts=[
                PartShown(
                    each.partition,
                    each.offset,
                    each.timestamp,
                    each.outcome,
                    each.reason,
                    shown_text(each.value),
                )
                for each in found.contributions
            ],
            outcomes={},
            looked_at=found.looked_at,
            notes=list(found.notes),
            by_hand=Copy("", ""),
        )


def _kind(table: ResultTable) -> Any:
    window = table.flow.window
    return None if window is None else window.kind


def _app_row(row: dict[str, Any]) -> RowShown:
    return RowShown(
        shown_key(row["key"]),
        row["window_start"],
        row["window_end"],
        {name: plain(value) for name, value in row.items() if name not in _OWN},
        row["timestamp"],
    )


def plain(value: Any) -> Any:
    """A value as JSON has it: bytes as text, moments as ISO, numbers that JSON has not as text."""
    if isinstance(value, bytes):
        return text_of(value).text
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return str(value)


def _late(row: dict[str, Any]) -> LateShown:
    start = row["window_start"]
    return LateShown(
        row["partition"],
        row["offset"],
        text_of(row["key"], 200),
        row["event_ts"],
        None if start is None or start < 0 else start,
        row["how_late_ms"],
        row["reason"],
        row["operator"],
    )


# -- tables over topics ----------------------------------------------------------------------------


def newest_of(backend: StorageBackend, name: str) -> tuple[TableShape, Commit]:
    """What the table is, and its last commit."""
    from tidegate.tables.commits import load_commits

    try:
        found = load_commits(backend, name)
    except InvalidError:  # no name that a table can have
        found = None
    if found is None:
        raise NotThereError(f"there is no table {name[:100]!r} here; look at what there is: /api/tables")
    if not found[0].commits:
        raise UnavailableError(f"table {name} has no commit yet; wait for the process that builds it")
    return found[0].shape, found[0].commits[-1]


def open_stored_table(backend: StorageBackend, name: str, number: int, clock: Clock) -> Any:
    from tidegate.tables.topic_table import open_committed

    newest_of(backend, name)
    return open_committed(backend, name, clock=clock, number=number)


def follow_stored_table(backend: StorageBackend, name: str, clock: Clock) -> Any:
    from tidegate.tables.topic_table import follow_stored

    newest_of(backend, name)
    return follow_stored(backend, name, clock=clock)


def stored_commits(backend: StorageBackend, name: str) -> list[CommitOf]:
    """The commits of a table that is kept over a topic; it need not be open."""
    from tidegate.tables.commits import load_commits

    found = load_commits(backend, name)
    if found is None:
        return []
    return [CommitOf(each.number, each.committed_ms, each.rows) for each in found[0].commits]


class StoredTable(Opened):
    """One commit of a stored table."""

    def __init__(self, name: str, backend: StorageBackend, table: Any) -> None:
        self.name, self._backend, self._table = name, backend, table
        shape, commit = table.rules.shape, table.commit
        self.kind, self.topic, self.changelog = shape.kind, shape.topic, shape.topic
        self.window_ms = shape.size_ms
        self.rules = f"consumed=tg.Consumed(tg.{shape.key_serde}, tg.{shape.value_serde}), "
        if shape.kind != "key":
            self.rules += f"retention={format_duration(shape.retention_ms)!r}, "
        if shape.kind == "window":
            self.rules += f"key_format={shape.key_format!r}, "
        self.number, self.committed_ms, self.positions = (
            commit.number,
            commit.committed_ms,
            dict(commit.positions),
        )
        kind = table.rules.value.arrow_type
        self.columns = [kind.field(place).name for place in range(getattr(kind, "num_fields", 0))] or [
            "value"
        ]

    def commits(self) -> list[CommitOf]:
        return stored_commits(self._backend, self.name)

    def typed(self, key: str) -> Any:
        from tidegate.tables.serdes.base import key_of_text

        return key_of_text(self._table.rules.key, key)

    def fetch(self, key: str, first: int, last: int) -> list[RowShown]:
        return [
            _stored_row(row) for row in self._table.fetch(self.typed(key), first, last).to_arrow().to_pylist()
        ]

    def scan(self, first: int, last: int, skip: int, limit: int) -> tuple[list[RowShown], bool]:
        rows, more = page_of(self._table.scan(first, last), skip, limit)
        return [_stored_row(row) for row in rows], more

    def some_keys(self, most: int) -> list[str]:
        batch = next(iter(self._table.batches(batch_rows=4096)), None)
        if batch is None:
            return []
        return some_of(batch.column("key"), most)

    def late(self, most: int) -> tuple[list[LateShown], int]:
        """What was late is counted by the table; its records are in the topic."""
        return [], sum(state.counts.expired for state in self._table.source.partitions)

    def explain(self, log: Any, key: str, start: int | None, end: int | None, most: int) -> ExplainDocument:
        from tidegate.tables.explain import explain

        if self.kind != "key" and start is None:
            raise InvalidError(
                f"table {self.name} has windows; say when the one begins that is asked about: start=…"
            )
        if self.kind == "session" and end is None:
            raise InvalidError(f"table {self.name} has sessions; say start=… and end=…")
        ts, seq = (end, start) if self.kind == "session" else (start, 0)
        raw = self._table.rules.key.encode(self.typed(key))
        found = explain(self._table.source, log, raw or b"", ts or 0, seq or 0)
        lines = found.lines()
        return ExplainDocument(
            table=self.name,
            topic=self.topic,
            key=key,
            window_start_ms=None if found.window is None else found.window.start,
            window_end_ms=None if found.window is None else found.window.end,
            value=None if found.value is None else _values(found.value),
            sentence="There is no such row in this table" if found.value is None else lines[1].capitalize(),
            parts=[
                PartShown(
                    each.partition,
                    each.offset,
                    each.timestamp,
                    each.outcome,
                    each.reason or "",
                    shown_text(plain(each.value)),
                )
                for each in found.contributions
            ],
            outcomes={},
            looked_at=None,
            notes=[line for line in lines[1 if found.value is None else 2 :] if not line.startswith("  ")],
            by_hand=Copy("", ""),
        )


def _stored_row(row: dict[str, Any]) -> RowShown:
    return RowShown(
        shown_key(row["key"]),
        row.get("window_start"),
        row.get("window_end"),
        _values(row["value"]),
        row.get("timestamp"),
    )


def _values(value: Any) -> dict[str, Any]:
    """Values by name; JSON that was not declared comes as text, and is read here."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return {"value": value}
    return (
        {str(name): plain(each) for name, each in value.items()}
        if isinstance(value, dict)
        else {"value": plain(value)}
    )


# -- pushed tables ---------------------------------------------------------------------------------


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
    from tidegate.tables.versions.reader import VersionedTable

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
    from tidegate.tables.versions.catalog import State

    return [each for each in _known(backend, name).versions if each.state is State.READY]
