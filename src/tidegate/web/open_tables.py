"""The three kinds of tables behind one interface, `Opened`: tables of apps, of topics, and pushed versions.

Thread rule: an open table may be read from any thread; the site closes it when it is evicted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from tidegate.durations import format_duration
from tidegate.errors import CommitGoneError, CorruptError, InvalidError, UnavailableError
from tidegate.web.apps import app_names, require_app
from tidegate.web.failures import NotThereError
from tidegate.web.schemas import (
    CommitShown,
    Copy,
    ExplainDocument,
    LateShown,
    PartShown,
    RowShown,
    Text,
    text_of,
)
from tidegate.web.site import Site, check_wanted

if TYPE_CHECKING:
    import pyarrow as pa

    from tidegate.pipeline.table import ResultTable
    from tidegate.storage.backends.base import StorageBackend
    from tidegate.tables.versions.catalog import TableVersion


# -- the interface ---------------------------------------------------------------------------------

Answer = TypeVar("Answer")
LOOKED_AT_KEYS: Final = 10_000


class Opened(ABC):
    """A table as one commit has it."""

    app: str = ""
    is_versioned: bool = False
    unread_columns: tuple[str, ...] = ()
    """Columns whose values only the app's program can tell (`reduce`)."""
    rules: str = ""
    """How the table is opened in Python, beyond its topic: serdes, and what windows were said to be."""
    kind: str
    topic: str
    changelog: str
    window_ms: int
    columns: list[str]
    number: int
    committed_ms: int
    positions: dict[int, int]

    def __init__(self, name: str, backend: StorageBackend, table: Any, key_serde: Any) -> None:
        self.name, self._backend, self._table, self._key_serde = name, backend, table, key_serde

    def typed(self, key: str) -> Any:
        """A key as typed, as the table takes it."""
        from tidegate.tables.serdes.base import key_of_text

        return key_of_text(self._key_serde, key)

    def commits(self) -> list[CommitShown]:
        return kept_commits(self._backend, self.name)

    def fetch(self, key: str, first: int, last: int) -> list[RowShown]:
        rows = self._table.fetch(self.typed(key), first, last).to_arrow().to_pylist()
        return [self._row(row) for row in rows]

    def scan(self, first: int, last: int, skip: int, limit: int) -> tuple[list[RowShown], bool]:
        """So many rows after `skip`, and whether there are more."""
        rows, more = page_of(self._table.scan(first, last), skip, limit)
        return [self._row(row) for row in rows], more

    @abstractmethod
    def _row(self, row: dict[str, Any]) -> RowShown: ...

    @abstractmethod
    def some_keys(self, most: int) -> list[str]: ...

    @abstractmethod
    def late(self, most: int) -> tuple[list[LateShown], int]: ...

    @abstractmethod
    def explain(
        self, log: Any, key: str, start: int | None, end: int | None, most: int
    ) -> ExplainDocument: ...

    def _explained(
        self,
        key: str,
        found: Any,
        window: tuple[int | None, int | None],
        value: dict[str, Any] | None,
        sentence: str,
        notes: Sequence[str],
    ) -> ExplainDocument:
        """The document of an explanation of either kind (`pipeline.lineage`, `tables.explain`)."""
        parts = [
            PartShown(
                each.partition, each.offset, each.timestamp, each.outcome, each.reason or "", shown_text(each.value)
            )
            for each in found.contributions
        ]  # fmt: skip
        return ExplainDocument(
            table=self.name,
            topic=self.topic,
            key=key,
            window_start_ms=window[0],
            window_end_ms=window[1],
            value=value,
            sentence=sentence,
            parts=parts,
            outcomes=dict(Counter(each.outcome for each in parts)),
            looked_at=getattr(found, "looked_at", None),
            notes=list(notes),
            by_hand=Copy("", ""),
        )


def known_tables(site: Site) -> list[str]:
    """The names of all tables: apps' first."""
    from tidegate.errors import TidegateError
    from tidegate.pipeline.table_catalog import recorded_tables
    from tidegate.tables.commits import stored_tables
    from tidegate.tables.versions.catalog import Versions, versioned_tables

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
    parts = {  # each partition of each version is kept as a table of its own, which nobody needs to see
        version.shape(number).name
        for table in pushed
        for version in Versions(backend, table).list().versions
        for number in range(version.partitions)
    }
    return [*names, *pushed, *(each for each in stored_tables(backend) if each not in parts)]


def kept_commits(backend: StorageBackend, name: str) -> list[CommitShown]:
    """The commits of a table that can be read (of a pushed one: versions), without opening it."""
    from tidegate.pipeline.admin import app_commits
    from tidegate.pipeline.table_catalog import recorded_tables
    from tidegate.tables.commits import load_commits
    from tidegate.tables.versions.catalog import load_versions

    app, colon, short = name.partition(":")
    if colon:
        flows = {each.flow for each in recorded_tables(backend, app) if each.name == short}
        return [
            CommitShown(each.round, each.committed_ms, each.records)
            for each in app_commits(backend, app)
            if flows & each.flows
        ]
    if load_versions(backend, name) is not None:
        return [CommitShown(each.number, each.ended_ms, each.rows) for each in ready_versions(backend, name)]
    found = load_commits(backend, name)
    if found is None:
        return []
    return [CommitShown(each.number, each.committed_ms, each.rows) for each in found[0].commits]


def asked(site: Site, name: str, as_of: int | None, look: Callable[[Opened], Answer]) -> Answer:
    """Return what `look` finds in the table.

    When the commit that is read is collected meanwhile, `look` is called again with the newest one.
    """
    with opened(site, name, as_of) as table:
        try:
            return look(table)
        except (CorruptError, CommitGoneError):
            commits = kept_commits(site.require_backend(), name)
            if as_of is not None or not commits or commits[-1].number == table.number:
                raise
    with opened(site, name, anew=True) as table:
        return look(table)


@contextmanager
def opened(site: Site, name: str, as_of: int | None = None, *, anew: bool = False) -> Iterator[Opened]:
    """The table, as its last commit or an earlier one has it; `anew` looks whether there is a newer one now."""
    from tidegate.tables.topic_table import follow_stored, open_committed, table_at
    from tidegate.tables.versions.catalog import load_versions
    from tidegate.tables.versions.reader import VersionedTable

    backend, clock = site.require_backend(), site.clock
    if ":" in name:
        with site.table(name, None, lambda: open_app_table(site, name)) as table:
            if as_of is None:
                if anew:
                    table.refresh()
                with table.pinned() as newest:
                    yield AppTable(name, backend, newest)
                return
            kept = [each.number for each in kept_commits(backend, name)]
            if as_of not in kept:
                raise NotThereError(f"commit {as_of} of {name} is not kept; there are {kept}")
            with site.table(name, as_of, lambda: table.as_of(as_of)) as past:
                yield AppTable(name, backend, past)
        return
    if load_versions(backend, name) is not None:
        number = shown_version(backend, name, as_of)
        with site.table(
            name, number, lambda: VersionedTable(backend, name, number=number, clock=clock)
        ) as pushed:
            yield PushedTable(name, backend, pushed)
        return

    def open_stored() -> Any:
        require_commit(backend, name)
        if as_of is None:
            return follow_stored(backend, name, clock=clock)
        return open_committed(backend, name, clock=clock, number=as_of)

    with site.table(name, as_of, open_stored) as stored:
        if as_of is not None:
            yield StoredTable(name, backend, stored)
            return
        try:
            stored.refresh(wait=anew)
        except UnavailableError:
            require_commit(backend, name)  # it may be deleted by now
            raise
        with stored.pinned() as snapshot:
            yield StoredTable(name, backend, table_at(snapshot))


def shown_key(key: Any) -> Any:
    """A key as JSON has it; bytes as text that may be typed again."""
    from tidegate.tables.serdes.base import text_of_key

    return text_of_key(key) if isinstance(key, bytes) else key


def shown_text(raw: Any) -> Text:
    """A value of any kind as text to look at."""
    if raw is None or isinstance(raw, bytes):
        return text_of(raw)
    value = plain(raw)
    return text_of(value.encode("utf-8", "replace") if isinstance(value, str) else msgspec.json.encode(value))


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


def open_app_table(site: Site, name: str) -> ResultTable:
    from tidegate.pipeline.table_catalog import open_recorded, recorded_tables

    app, _, short = name.partition(":")
    require_app(site, app)
    backend = site.require_backend()
    if short not in {each.name for each in recorded_tables(backend, app)}:
        raise NotThereError(f"app {app} has no table {short[:100]!r}; look at what there is: /api/tables")
    return open_recorded(backend, app, short, clock=site.clock)


class AppTable(Opened):
    """One commit of an app's table."""

    def __init__(self, name: str, backend: StorageBackend, table: ResultTable) -> None:
        from tidegate.pipeline.table_catalog import unread_columns

        flow, commit = table.flow, table.commit
        super().__init__(name, backend, table, flow.key_serde)
        kind = None if flow.window is None else flow.window.kind
        self.app = name.partition(":")[0]
        self.kind = "session" if hasattr(kind, "gap_ms") else "window"
        self.topic = flow.source.topic
        self.changelog = flow.topics[0].topic if flow.topics else ""
        self.window_ms = int(getattr(kind, "size_ms", 0) or getattr(kind, "difference_ms", 0))
        self.columns = [each for each in table.schema.names if each not in _OWN]
        self.number, self.committed_ms = commit.round, commit.committed_ms
        self.positions = table.position
        self.unread_columns = unread_columns(flow)

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
        found = explain_window(
            self._table, log, self.typed(key), start, most_records=most, between=check_wanted
        )
        sentence, value = "There is no such window in this table", None
        if found.value is not None:
            sentence = f"{found.counted} records make this value"
            value = {name: plain(each) for name, each in found.value.items()}
        return self._explained(key, found, (found.start, found.end), value, sentence, found.notes)

    def _row(self, row: dict[str, Any]) -> RowShown:
        value = {name: plain(each) for name, each in row.items() if name not in _OWN}
        return RowShown(
            shown_key(row["key"]), row["window_start"], row["window_end"], value, row["timestamp"]
        )


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


def require_commit(backend: StorageBackend, name: str) -> None:
    """Refuse a table that is not there, or has no commit yet."""
    from tidegate.tables.commits import load_commits

    try:
        found = load_commits(backend, name)
    except InvalidError:  # no name that a table can have
        found = None
    if found is None:
        raise NotThereError(f"there is no table {name[:100]!r} here; look at what there is: /api/tables")
    if not found[0].commits:
        raise UnavailableError(f"table {name} has no commit yet; wait for the process that builds it")


class StoredTable(Opened):
    """One commit of a stored table."""

    def __init__(self, name: str, backend: StorageBackend, table: Any) -> None:
        super().__init__(name, backend, table, table.rules.key)
        shape, commit = table.rules.shape, table.commit
        self.kind, self.topic, self.changelog = shape.kind, shape.topic, shape.topic
        self.window_ms = shape.size_ms
        self.rules = f"consumed=tg.Consumed(tg.{shape.key_serde}, tg.{shape.value_serde}), "
        if shape.kind != "key":
            self.rules += f"retention={format_duration(shape.retention_ms)!r}, "
        if shape.kind == "window":
            self.rules += f"key_format={shape.key_format!r}, "
        self.number, self.committed_ms = commit.number, commit.committed_ms
        self.positions = dict(commit.positions)
        kind = table.rules.value.arrow_type
        names = [kind.field(place).name for place in range(getattr(kind, "num_fields", 0))]
        self.columns = names or ["value"]

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
        window = (None, None) if found.window is None else (found.window.start, found.window.end)
        sentence, value, told = "There is no such row in this table", None, lines[2:]
        if found.value is not None:
            sentence, value, told = lines[1].capitalize(), _values(found.value), lines[1:]
        notes = [line for line in told if not line.startswith("  ")]
        return self._explained(key, found, window, value, sentence, notes)

    def _row(self, row: dict[str, Any]) -> RowShown:
        return RowShown(
            shown_key(row["key"]), row.get("window_start"), row.get("window_end"), _values(row["value"]),
            row.get("timestamp"),
        )  # fmt: skip


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


def ready_versions(backend: StorageBackend, name: str) -> list[TableVersion]:
    from tidegate.tables.versions.catalog import State, Versions

    return [each for each in Versions(backend, name).list().versions if each.state is State.READY]


def shown_version(backend: StorageBackend, name: str, number: int | None) -> int:
    """The version that readers see, or the one asked for if it can be read."""
    from tidegate.tables.versions.catalog import Versions

    known = [each.number for each in ready_versions(backend, name)]
    wanted = Versions(backend, name).list().current if number is None else number
    if wanted not in known:
        there = ", ".join(map(str, known)) or "none"
        asked = "no version is shown yet" if number is None else f"version {number} cannot be read"
        raise NotThereError(f"of table {name[:100]!r} {asked}; versions that can be read: {there}")
    return wanted


class PushedTable(StoredTable):
    """One version of a table."""

    is_versioned = True

    def late(self, most: int) -> tuple[list[Any], int]:
        """Nothing is late for a push."""
        return [], 0

    def explain(self, log: Any, key: str, start: int | None, end: int | None, most: int) -> ExplainDocument:
        raise InvalidError(
            f"a row of {self.name} is the one its push sent last for the key; see its records in topic {self.topic}"
        )
