"""Tables: which there are, one key's windows, late rows, what changed between commits, why a value is what it is.

Two kinds are one here. A table of an app is named `APP:TABLE` and is read from the app's own state; a table that a
process keeps over a topic (`windowed_table` and its like) has a name of its own.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from tidegate.errors import InvalidError
from tidegate.web.reading.copying import Copy, cli, copied, log_python
from tidegate.web.reading.opened import Opened, known_tables, opened
from tidegate.web.reading.searching import moment_of
from tidegate.web.reading.site import Site
from tidegate.web.reading.texts import Text, text_of

LATEST: Final = 2**63 - 1
SHOWN_WINDOWS: Final = 500
SHOWN_LATE: Final = 50
SHOWN_KEYS: Final = 12
MOST_COMPARED: Final = 200_000

Moment = Annotated[
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
    commit: int
    commits: int
    committed_ms: int
    unreadable: str | None = None


class TableList(msgspec.Struct, frozen=True):
    """All tables here."""

    state: str
    tables: list[TableLine]
    by_hand: Copy


class RowShown(msgspec.Struct, frozen=True):
    """One row: a key, its window (null for plain keys), its values by name."""

    key: Any
    window_start_ms: int | None
    window_end_ms: int | None
    value: dict[str, Any]
    timestamp_ms: int | None


class RowsDocument(msgspec.Struct, frozen=True):
    """Rows as one commit has them; `next` goes on where there are more."""

    table: str
    commit: int
    rows: list[RowShown]
    next: str | None = None


class LateShown(msgspec.Struct, frozen=True):
    """A record that was set aside for its time."""

    partition: int
    offset: int
    key: Text
    event_ms: int
    window_start_ms: int | None
    how_late_ms: int
    reason: str
    operator: str


class LateDocument(msgspec.Struct, frozen=True):
    """Records that came too late, or too early."""

    table: str
    commit: int
    topic: str
    total: int
    rows: list[LateShown]


class CommitShown(msgspec.Struct, frozen=True):
    """A commit that can still be read."""

    number: int
    committed_ms: int
    records: int | None


class TableDocument(msgspec.Struct, frozen=True):
    """One table: what it is, one key's windows, late rows, commits."""

    name: str
    app: str
    kind: str
    topic: str
    changelog: str
    window_ms: int
    columns: list[str]
    column: str
    commit: int
    committed_ms: int
    commits: list[CommitShown]
    positions: dict[str, int]
    key: str
    some_keys: list[str]
    rows: list[RowShown]
    rows_total: int
    late: list[LateShown]
    late_total: int
    by_hand: Copy


class ChangeShown(msgspec.Struct, frozen=True):
    """One row that differs between two commits; before or after is null where it was not there."""

    key: Any
    window_start_ms: int | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class DiffDocument(msgspec.Struct, frozen=True):
    """What changed from one commit to another."""

    table: str
    before: int
    after: int
    gained: int
    lost: int
    changed: int
    rows: list[ChangeShown]
    is_complete: bool
    by_hand: Copy


class PartShown(msgspec.Struct, frozen=True):
    """A record that speaks of a window, and what became of it."""

    partition: int
    offset: int
    timestamp_ms: int | None
    outcome: str
    reason: str
    value: Text


class ExplainDocument(msgspec.Struct, frozen=True):
    """Why a value is what it is."""

    table: str
    topic: str
    key: str
    window_start_ms: int | None
    window_end_ms: int | None
    value: dict[str, Any] | None
    sentence: str
    parts: list[PartShown]
    outcomes: dict[str, int]
    looked_at: int | None
    notes: list[str]
    by_hand: Copy


class TableQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which key, which stretch of window starts, as of which commit, which column as a chart."""

    key: Key = ""
    since: Moment = ""
    until: Moment = ""
    as_of: Round | None = None
    column: Annotated[str, msgspec.Meta(max_length=200)] = ""


class FetchQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key's windows that start in [since, until], both included."""

    key: Key
    since: Moment = ""
    until: Moment = ""
    as_of: Round | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000


class ScanQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All keys' rows, page by page; every page of one scan is of one commit."""

    since: Moment = ""
    until: Moment = ""
    as_of: Round | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000
    after: Annotated[str, msgspec.Meta(max_length=60, description="`next` of the page before")] = ""


class ExplainQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key, the start of its window (none for plain keys), and of a session the end."""

    key: Key
    start: Moment = ""
    end: Moment = ""


class LateQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many to show."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000


class DiffQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From which commit to which, and of which key (all, where the table is small)."""

    before: Round
    after: Round
    key: Key = ""


def table_list(site: Site) -> TableList:
    lines = []
    for name in known_tables(site):
        try:
            with opened(site, name) as table:
                commits = table.commits()
                newest = commits[-1]
                lines.append(
                    TableLine(
                        name,
                        table.app,
                        table.kind,
                        table.topic,
                        newest.number,
                        len(commits),
                        newest.committed_ms,
                    )
                )
        except InvalidError as error:
            lines.append(TableLine(name, name.partition(":")[0], "", "", 0, 0, 0, str(error)))
    return TableList(
        str(site.state_path),
        lines,
        copied(
            [cli("tidegate table info", state=site.state_path)],
            "app.read(NAME)  # or tidegate.windowed_table(…)",
        ),
    )


def table_document(site: Site, name: str, question: TableQuestion) -> TableDocument:
    with opened(site, name, question.as_of) as table:
        some = table.some_keys(SHOWN_KEYS)
        key = question.key or (some[0] if some else "")
        rows = table.fetch(key, *_bounds(question.since, question.until)) if key else []
        late, late_total = table.late(SHOWN_LATE)
        columns = table.columns
        numbers = [
            each for each in columns if any(isinstance(row.value.get(each), int | float) for row in rows)
        ]
        column = question.column if question.column in columns else (numbers or columns or [""])[0]
        return TableDocument(
            name=name,
            app=table.app,
            kind=table.kind,
            topic=table.topic,
            changelog=table.changelog,
            window_ms=table.window_ms,
            columns=columns,
            column=column,
            commit=table.number,
            committed_ms=table.committed_ms,
            commits=[CommitShown(each.number, each.committed_ms, each.records) for each in table.commits()],
            positions={str(number): offset for number, offset in sorted(table.positions.items())},
            key=key,
            some_keys=some,
            rows=rows[-SHOWN_WINDOWS:],
            rows_total=len(rows),
            late=late,
            late_total=late_total,
            by_hand=_by_hand(site, table, key),
        )


def fetch(site: Site, name: str, question: FetchQuestion) -> RowsDocument:
    with opened(site, name, question.as_of) as table:
        rows = table.fetch(question.key, *_bounds(question.since, question.until))
        return RowsDocument(name, table.number, rows[: question.limit])


def scan(site: Site, name: str, question: ScanQuestion) -> RowsDocument:
    """A page of all rows: `after` is COMMIT-SKIP, so that a scan stays with the commit it began with."""
    commit, skip = _after(question.after)
    as_of = commit if commit is not None else question.as_of
    with opened(site, name, as_of) as table:
        rows, more = table.scan(*_bounds(question.since, question.until), skip, question.limit)
        following = f"{table.number}-{skip + len(rows)}" if more and rows else None
        return RowsDocument(name, table.number, rows, following)


def late(site: Site, name: str, question: LateQuestion) -> LateDocument:
    with opened(site, name) as table:
        rows, total = table.late(question.limit)
        return LateDocument(name, table.number, table.topic, total, rows)


def diff(site: Site, name: str, question: DiffQuestion) -> DiffDocument:
    """Rows of two commits held against each other."""
    with opened(site, name, question.before) as first, opened(site, name, question.after) as second:
        old, old_more = _compared(first, question.key)
        new, new_more = _compared(second, question.key)
    changes = [
        ChangeShown(place[0], place[1], old.get(place), new.get(place))
        for place in sorted({*old, *new}, key=repr)
        if old.get(place) != new.get(place)
    ]
    python = (
        f'with app.read("{name.partition(":")[2] or name}") as table:\n'
        f"    before, after = table.as_of({question.before}), table.as_of({question.after})"
    )
    return DiffDocument(
        table=name,
        before=question.before,
        after=question.after,
        gained=sum(1 for each in changes if each.before is None),
        lost=sum(1 for each in changes if each.after is None),
        changed=sum(1 for each in changes if each.before is not None and each.after is not None),
        rows=changes[:SHOWN_WINDOWS],
        is_complete=not (old_more or new_more),
        by_hand=copied([_commits_line(site, name)], python),
    )


def explain(site: Site, name: str, question: ExplainQuestion) -> ExplainDocument:
    with opened(site, name) as table:
        start = moment_of(question.start, 0) if question.start else None
        end = moment_of(question.end, 0) if question.end else None
        found = table.explain(site.log, question.key, start, end, site.limits.scan_records)
        outcomes: dict[str, int] = {}
        for part in found.parts:
            outcomes[part.outcome] = outcomes.get(part.outcome, 0) + 1
        return msgspec.structs.replace(
            found,
            outcomes=outcomes,
            by_hand=_by_hand(site, table, question.key, explains=question.start or "0"),
        )


def _commits_line(site: Site, name: str) -> str:
    app, colon, _ = name.partition(":")
    if colon:
        return cli("tidegate app checkpoints", app, state=site.state_path)
    return cli("tidegate table info", name, state=site.state_path)


def _compared(table: Opened, key: str) -> tuple[dict[tuple[Any, Any, Any], dict[str, Any]], bool]:
    if key:
        rows, more = table.fetch(key, 0, LATEST), False
    else:
        rows, more = table.scan(0, LATEST, 0, MOST_COMPARED)
    return {(row.key, row.window_start_ms, row.window_end_ms): row.value for row in rows}, more


def _bounds(since: str, until: str) -> tuple[int, int]:
    return moment_of(since, 0), LATEST if not until else moment_of(until, 0)


def _after(written: str) -> tuple[int | None, int]:
    if not written:
        return None, 0
    commit, dash, skip = written.partition("-")
    if (
        not dash
        or not (commit + skip).isascii()
        or not commit.isdigit()
        or not skip.isdigit()
        or len(skip) > 12
    ):
        raise InvalidError("after is what the page before gave as `next`; take it as it was")
    return int(commit), int(skip)


def _by_hand(site: Site, table: Opened, key: str, explains: str = "") -> Copy:
    short = table.name.partition(":")[2] or table.name
    if table.app:
        lines = (
            "from tidegate.pipeline.reading.recorded import open_recorded",
            "from tidegate.storage import open_backend",
            "",
            f"backend = open_backend({str(site.state_path)!r})",
            f"with open_recorded(backend, {table.app!r}, {short!r}) as table:",
            f"    print(table.fetch({key!r}).to_arrow())",
        )
        python = "\n".join(lines)
        if table.changelog:
            return copied([cli("tidegate consume", table.changelog, "-e", log=site.log_path)], python)
        return copied([cli("tidegate app status", table.app, state=site.state_path)], python)
    if explains:
        line = cli("tidegate table explain", short, key, explains, log=site.log_path, state=site.state_path)
    else:
        line = cli("tidegate table fetch", short, key, state=site.state_path)
    opening = {
        "window": f"tg.windowed_table(log, {table.topic!r}, {table.window_ms}, ",
        "session": f"tg.sessioned_table(log, {table.topic!r}, ",
        "key": f"tg.table(log, {table.topic!r}, ",
    }[table.kind]
    python = log_python(
        site.log_path,
        f"named = tg.Materialized({short!r})",
        f"table = {opening}state={str(site.state_path)!r}, materialized=named, read_only=True)",
        f"print(table.fetch({key!r}))" if table.kind != "key" else f"print(table.get({key!r}))",
    )
    return copied([line], python)


def shown_text(raw: Any) -> Text:
    """A value of any kind as text to look at."""
    if raw is None or isinstance(raw, bytes):
        return text_of(raw)
    return text_of(
        msgspec.json.encode(raw, enc_hook=str) if not isinstance(raw, str) else raw.encode("utf-8", "replace")
    )
