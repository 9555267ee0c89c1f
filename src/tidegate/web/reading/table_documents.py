"""What is asked of tables, and what is answered: the documents that pages and programs get alike."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from tidegate.web.reading.copying import Copy
from tidegate.web.reading.numbers import Answer, Detail, LateRecords, Moment, Name, Offset, Setting, metric
from tidegate.web.reading.texts import Text

Written = Annotated[
    str, msgspec.Meta(max_length=40, description="A moment: 2026-01-01T10:00Z, or epoch milliseconds")
]
Key = Annotated[str, msgspec.Meta(max_length=2000)]
Round = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class TableLine(msgspec.Struct, frozen=True):
    """One table in a list."""

    name: str
    app: str
    kind: str
    topic: str
    commit: Name
    commits: Annotated[int, metric("tidegate_table_commits")]
    committed_ms: Moment
    unreadable: str | None = None


class TableList(msgspec.Struct, frozen=True):
    """All tables here."""

    state: str
    tables: list[TableLine]
    by_hand: Copy


class RowShown(msgspec.Struct, frozen=True):
    """One row: a key, its window (null for plain keys), its values by name."""

    key: Any
    window_start_ms: Moment | None
    window_end_ms: Moment | None
    value: dict[str, Any]
    timestamp_ms: Moment | None


class RowsDocument(msgspec.Struct, frozen=True):
    """Rows as one commit has them; `next` goes on where there are more."""

    table: str
    commit: Name
    rows: list[RowShown]
    next: str | None = None


class LateShown(msgspec.Struct, frozen=True):
    """A record that was set aside for its time."""

    partition: Name
    offset: Offset
    key: Text
    event_ms: Moment
    window_start_ms: Moment | None
    how_late_ms: Detail
    reason: str
    operator: str


class LateDocument(msgspec.Struct, frozen=True):
    """Records that came too late, or too early."""

    table: str
    commit: Name
    topic: str
    total: LateRecords
    rows: list[LateShown]


class CommitShown(msgspec.Struct, frozen=True):
    """A commit that can still be read."""

    number: Name
    committed_ms: Moment
    records: Detail | None


class TableDocument(msgspec.Struct, frozen=True):
    """One table: what it is, one key's windows, late rows, commits."""

    name: str
    app: str
    kind: str
    topic: str
    changelog: str
    window_ms: Setting
    is_versioned: bool
    columns: list[str]
    unread_columns: list[str]
    """Columns that are empty here, because only the app's program can tell their values."""
    column: str
    commit: Name
    committed_ms: Moment
    commits: list[CommitShown]
    positions: dict[str, Offset]
    key: str
    some_keys: list[str]
    rows: list[RowShown]
    rows_total: Answer
    late: list[LateShown]
    late_total: LateRecords
    by_hand: Copy


class ChangeShown(msgspec.Struct, frozen=True):
    """One row that differs between two commits; before or after is null where it was not there."""

    key: Any
    window_start_ms: Moment | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class DiffDocument(msgspec.Struct, frozen=True):
    """What changed from one commit (of a pushed table: version) to another."""

    table: str
    is_versioned: bool
    before: Name
    after: Name
    gained: Answer
    lost: Answer
    changed: Answer
    rows: list[ChangeShown]
    is_complete: bool
    by_hand: Copy


class PartShown(msgspec.Struct, frozen=True):
    """A record that speaks of a window, and what became of it."""

    partition: Name
    offset: Offset
    timestamp_ms: Moment | None
    outcome: str
    reason: str
    value: Text


class ExplainDocument(msgspec.Struct, frozen=True):
    """Why a value is what it is."""

    table: str
    topic: str
    key: str
    window_start_ms: Moment | None
    window_end_ms: Moment | None
    value: dict[str, Any] | None
    sentence: str
    parts: list[PartShown]
    outcomes: dict[str, Answer]
    looked_at: Answer | None
    notes: list[str]
    by_hand: Copy


class TableQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which key, which stretch of window starts, as of which commit, which column as a chart."""

    key: Key = ""
    since: Written = ""
    until: Written = ""
    as_of: Round | None = None
    column: Annotated[str, msgspec.Meta(max_length=200)] = ""


class FetchQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key's windows that start in [since, until], both included."""

    key: Key
    since: Written = ""
    until: Written = ""
    as_of: Round | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000


class ScanQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All keys' rows, page by page; every page of one scan is of one commit."""

    since: Written = ""
    until: Written = ""
    as_of: Round | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000
    after: Annotated[str, msgspec.Meta(max_length=60, description="`next` of the page before")] = ""


class ExplainQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key, the start of its window (none for plain keys), and of a session the end."""

    key: Key
    start: Written = ""
    end: Written = ""


class LateQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many to show."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000


class DiffQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From which commit to which, and of which key (all, where the table is small)."""

    before: Round
    after: Round
    key: Key = ""
