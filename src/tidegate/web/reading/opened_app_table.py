"""A table of an app: windows read from the app's own state, as its commits have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import InvalidError
from tidegate.web.failures import NotThereError
from tidegate.web.reading.opened import CommitOf, Opened, page_of, shown_key, typed_key
from tidegate.web.reading.site import Site, check_wanted
from tidegate.web.reading.table_documents import ExplainDocument, LateShown, PartShown, RowShown
from tidegate.web.reading.texts import shown_text, text_of

if TYPE_CHECKING:
    from tidegate.pipeline.reading.result_table import ResultTable
    from tidegate.storage.backends.port import StorageBackend

LATEST: Final = 2**63 - 1
_OWN: Final = ("key", "window_start", "window_end", "timestamp")


def open_app_table(site: Site, app: str, short: str) -> ResultTable:
    from tidegate.pipeline.reading.recorded import open_recorded, recorded_tables
    from tidegate.web.reading.apps import require_app

    require_app(site, app)
    backend = site.require_backend()
    if short not in {each.name for each in recorded_tables(backend, app)}:
        raise NotThereError(f"app {app} has no table {short[:100]!r}; look at what there is: /api/tables")
    return open_recorded(backend, app, short, clock=site.clock)


def app_table_commits(backend: StorageBackend, app: str) -> list[CommitOf]:
    """The commits of an app, which are those of its tables; none need be open."""
    from tidegate.pipeline.rounds.ways_out import app_commits

    return [CommitOf(each.round, each.committed_ms, each.records) for each in app_commits(backend, app)]


class AppTable(Opened):
    """One commit of an app's table."""

    def __init__(self, name: str, app: str, backend: StorageBackend, table: ResultTable) -> None:
        from tidegate.pipeline.reading.recorded import unread_columns

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
        return typed_key(key, self._table.flow.key_serde.name)

    def commits(self) -> list[CommitOf]:
        return app_table_commits(self._backend, self.app)

    def fetch(self, key: str, first: int, last: int) -> list[RowShown]:
        wanted = self.typed(key)
        return [_row(row) for row in self._table.fetch(wanted, first, last).to_arrow().to_pylist()]

    def scan(self, first: int, last: int, skip: int, limit: int) -> tuple[list[RowShown], bool]:
        rows, more = page_of(self._table.scan(first, last), skip, limit)
        return [_row(row) for row in rows], more

    def some_keys(self, most: int) -> list[str]:
        """Keys of the newest windows."""
        newest = max((line.stream_time for line in self._table.commit.tasks), default=-1)
        since = max(0, newest - 2 * (self.window_ms or 3_600_000))
        keys = self._table.fetch_all(since).to_arrow().column("key").unique()
        return [str(shown_key(key)) for key in keys.slice(0, most).to_pylist()]

    def late(self, most: int) -> tuple[list[LateShown], int]:
        found = self._table.late()
        return [_late(row) for row in found.slice(0, most).to_pylist()], int(found.num_rows)

    def explain(self, log: Any, key: str, start: int | None, end: int | None, most: int) -> ExplainDocument:
        from tidegate.pipeline.reading.explaining import explain_window
        from tidegate.web.reading.copying import Copy

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


def _row(row: dict[str, Any]) -> RowShown:
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
