"""A table that a process keeps over a topic (`windowed_table`, `sessioned_table`, `table`), as its commits have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.clock import Clock
from tidegate.durations import format_duration
from tidegate.errors import InvalidError, UnavailableError
from tidegate.web.failures import NotThereError
from tidegate.web.reading.opened import CommitOf, Opened, page_of, shown_key, typed_key
from tidegate.web.reading.opened_app_table import plain
from tidegate.web.reading.table_documents import ExplainDocument, LateShown, PartShown, RowShown
from tidegate.web.reading.texts import shown_text

if TYPE_CHECKING:
    from tidegate.storage.backends.port import StorageBackend
    from tidegate.tables.building.commits import Commit
    from tidegate.tables.building.shape import TableShape

LATEST: Final = 2**63 - 1


def newest_of(backend: StorageBackend, name: str) -> tuple[TableShape, Commit]:
    """What the table is, and its last commit."""
    from tidegate.tables.building.commits import load_commits

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
    from tidegate.tables.building.stored import open_committed

    newest_of(backend, name)
    return open_committed(backend, name, clock=clock, number=number)


def follow_stored_table(backend: StorageBackend, name: str, clock: Clock) -> Any:
    from tidegate.tables.building.stored import follow_stored

    newest_of(backend, name)
    return follow_stored(backend, name, clock=clock)


def stored_commits(backend: StorageBackend, name: str) -> list[CommitOf]:
    """The commits of a table that is kept over a topic; it need not be open."""
    from tidegate.tables.building.commits import load_commits

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
        return typed_key(key, self._table.rules.key.name)

    def fetch(self, key: str, first: int, last: int) -> list[RowShown]:
        return [_row(row) for row in self._table.fetch(self.typed(key), first, last).to_arrow().to_pylist()]

    def scan(self, first: int, last: int, skip: int, limit: int) -> tuple[list[RowShown], bool]:
        rows, more = page_of(self._table.scan(first, last), skip, limit)
        return [_row(row) for row in rows], more

    def some_keys(self, most: int) -> list[str]:
        batch = next(iter(self._table.batches(batch_rows=4096)), None)
        if batch is None:
            return []
        return [str(shown_key(key)) for key in batch.column("key").unique().slice(0, most).to_pylist()]

    def late(self, most: int) -> tuple[list[LateShown], int]:
        """What was late is counted by the table; its records are in the topic."""
        return [], sum(state.counts.expired for state in self._table.source.partitions)

    def explain(self, log: Any, key: str, start: int | None, end: int | None, most: int) -> ExplainDocument:
        from tidegate.tables.queries.explain import explain
        from tidegate.web.reading.copying import Copy

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


def _row(row: dict[str, Any]) -> RowShown:
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
