"""Tables: the list, one key's windows, scans, late rows, differences between commits, and explanations.

A table of an app is named `APP:TABLE`; a table over a topic (`windowed_table` and its like) has its own name; a pushed
table has versions where the others have commits.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from tidegate.durations import format_duration
from tidegate.errors import InvalidError, TidegateError, UnavailableError
from tidegate.web.open_tables import Opened, asked, known_tables, opened
from tidegate.web.records import moment_of
from tidegate.web.schemas import (
    ChangeShown,
    Copy,
    DiffDocument,
    DiffQuestion,
    ExplainDocument,
    ExplainQuestion,
    FetchQuestion,
    LateDocument,
    LateQuestion,
    RowsDocument,
    ScanQuestion,
    TableDocument,
    TableLine,
    TableList,
    TableQuestion,
    cli,
    log_python,
    shared,
)
from tidegate.web.site import Site

LATEST: Final = 2**63 - 1
SHOWN_WINDOWS: Final = 500
SHOWN_LATE: Final = 50
SHOWN_KEYS: Final = 12
MOST_COMPARED: Final = 200_000
_LIST_PYTHON: Final = """\
from tidegate.pipeline.admin import list_apps
from tidegate.pipeline.table_catalog import recorded_tables
from tidegate.storage import open_backend
from tidegate.tables.commits import stored_tables

backend = open_backend({!r})
for app in list_apps(backend):
    for table in recorded_tables(backend, app):
        print(table)
print(stored_tables(backend))"""
_APP_PYTHON: Final = """\
from tidegate.pipeline.table_catalog import open_recorded
from tidegate.storage import open_backend

backend = open_backend({state!r}, read_only=True)
with open_recorded(backend, {app!r}, {table!r}) as table:
"""


def table_list(site: Site) -> TableList:
    lines = []
    for name in known_tables(site):
        try:
            with opened(site, name) as table:
                commits = table.commits()
                if not commits:
                    raise UnavailableError("it is made anew just now; ask again in a moment")
                number, committed_ms = commits[-1].number, commits[-1].committed_ms
                lines.append(
                    TableLine(name, table.app, table.kind, table.topic, number, len(commits), committed_ms)
                )
        except TidegateError as error:  # without a commit yet, say: the others are shown all the same
            lines.append(TableLine(name, name.partition(":")[0], "", "", 0, 0, 0, str(error)))
    return TableList(
        str(site.state_path),
        lines,
        Copy(cli("tidegate table info", state=site.state_path), _LIST_PYTHON.format(str(site.state_path))),
    )


def table_document(site: Site, name: str, question: TableQuestion) -> TableDocument:
    return asked(site, name, question.as_of, lambda table: _document(site, table, question))


def _document(site: Site, table: Opened, question: TableQuestion) -> TableDocument:
    some = table.some_keys(SHOWN_KEYS)
    key = question.key or (some[0] if some else "")
    rows = table.fetch(key, *_bounds(question.since, question.until)) if key else []
    late, late_total = table.late(SHOWN_LATE)
    if question.as_of is None:
        known_late(site)[table.name] = late_total
    columns = table.columns
    numbers = [each for each in columns if any(isinstance(row.value.get(each), int | float) for row in rows)]
    column = question.column if question.column in columns else (numbers or columns or [""])[0]
    found = {
        "unread_columns": list(table.unread_columns),
        "column": column,
        "commit": table.number,
        "commits": table.commits(),
        "positions": {str(number): offset for number, offset in sorted(table.positions.items())},
        "key": key,
        "some_keys": some,
        "rows": rows[-SHOWN_WINDOWS:],
        "rows_total": len(rows),
        "late": late,
        "late_total": late_total,
        "by_hand": _by_hand(site, table, key),
    }
    return TableDocument(**shared(table, TableDocument) | found)


def fetch(site: Site, name: str, question: FetchQuestion) -> RowsDocument:
    def look(table: Opened) -> RowsDocument:
        rows = table.fetch(question.key, *_bounds(question.since, question.until))
        return RowsDocument(name, table.number, rows[: question.limit])

    return asked(site, name, question.as_of, look)


def scan(site: Site, name: str, question: ScanQuestion) -> RowsDocument:
    """A page of all rows: `after` is COMMIT-SKIP, so that a scan stays with the commit it began with."""
    commit, skip = _after(question.after)

    def look(table: Opened) -> RowsDocument:
        rows, more = table.scan(*_bounds(question.since, question.until), skip, question.limit)
        following = f"{table.number}-{skip + len(rows)}" if more and rows else None
        return RowsDocument(name, table.number, rows, following)

    return asked(site, name, question.as_of if commit is None else commit, look)


def late(site: Site, name: str, question: LateQuestion) -> LateDocument:
    def look(table: Opened) -> LateDocument:
        rows, total = table.late(question.limit)
        known_late(site)[name] = total
        return LateDocument(name, table.number, table.topic, total, rows)

    return asked(site, name, None, look)


def known_late(site: Site) -> dict[str, int]:
    """How many late rows tables had when they were last looked at, by name: counting them reads them."""
    found: dict[str, int] = site.kept("late", dict)
    return found


def diff(site: Site, name: str, question: DiffQuestion) -> DiffDocument:
    """Return the rows that differ between two commits."""
    with opened(site, name, question.before) as first, opened(site, name, question.after) as second:
        old, old_more = _compared(first, question.key)
        new, new_more = _compared(second, question.key)
        is_versioned, wanted = first.is_versioned, first.typed(question.key) if question.key else None
    changes = [
        ChangeShown(place[0], place[1], old.get(place), new.get(place))
        for place in sorted({*old, *new}, key=repr)
        if old.get(place) != new.get(place)
    ]
    return DiffDocument(
        table=name,
        is_versioned=is_versioned,
        before=question.before,
        after=question.after,
        gained=sum(1 for each in changes if each.before is None),
        lost=sum(1 for each in changes if each.after is None),
        changed=sum(1 for each in changes if each.before is not None and each.after is not None),
        rows=changes[:SHOWN_WINDOWS],
        is_complete=not (old_more or new_more),
        by_hand=_diff_by_hand(site, name, wanted, question, is_versioned=is_versioned),
    )


def explain(site: Site, name: str, question: ExplainQuestion) -> ExplainDocument:
    start = moment_of(question.start, 0) if question.start else None
    end = moment_of(question.end, 0) if question.end else None

    def look(table: Opened) -> ExplainDocument:
        found = table.explain(site.log, question.key, start, end, site.limits.scan_records)
        copies = _by_hand(site, table, question.key, explains=question.start or "0", end=question.end)
        return msgspec.structs.replace(found, by_hand=copies)

    return asked(site, name, None, look)


def _diff_by_hand(site: Site, name: str, key: Any, question: DiffQuestion, *, is_versioned: bool) -> Copy:
    """Both sides, printed one after the other."""
    app, colon, short = name.partition(":")
    state, numbers = str(site.state_path), f"({question.before}, {question.after})"
    if colon:
        rows = "to_arrow()" if key is None else f"fetch({_literal(key)}).to_arrow()"
        opening = _APP_PYTHON.format(state=state, app=app, table=short)
        python = (
            f"{opening}    for number in {numbers}:\n        with table.as_of(number) as then:\n"
            f"            print(number, then.{rows})"
        )
        return Copy(cli("tidegate app checkpoints", app, state=state), python)
    if is_versioned:
        rows = "to_arrow()" if key is None else f"get({_literal(key)})"
        python = (
            f"import tidegate as tg\n\nfor number in {numbers}:\n"
            f"    with tg.versioned_table({name!r}, state={state!r}, version=number) as table:\n"
            f"        print(number, table.{rows})"
        )
        sides = (f"{name}_v{question.before}", f"{name}_v{question.after}")
        return Copy(cli("tidegate table diff", *sides, state=state), python)
    python = (
        "from tidegate.storage import open_backend\nfrom tidegate.tables.commits import load_commits\n\n"
        f"print(load_commits(open_backend({state!r}), {name!r}))"
    )
    return Copy(cli("tidegate table info", name, state=state), python)


def _compared(table: Opened, key: str) -> tuple[dict[tuple[Any, Any, Any], dict[str, Any]], bool]:
    if key:
        rows, more = table.fetch(key, 0, LATEST), False
    else:
        rows, more = table.scan(0, LATEST, 0, MOST_COMPARED)
    return {(_hashable(row.key), row.window_start_ms, row.window_end_ms): row.value for row in rows}, more


def _hashable(key: Any) -> Any:
    """A JSON key as text."""
    from tidegate.tables.serdes.base import text_of_key

    return text_of_key(key) if isinstance(key, dict | list) else key


def _bounds(since: str, until: str) -> tuple[int, int]:
    return moment_of(since, 0), LATEST if not until else moment_of(until, 0)


def _after(written: str) -> tuple[int | None, int]:
    if not written:
        return None, 0
    commit, dash, skip = written.partition("-")
    is_number = (commit + skip).isascii() and commit.isdigit() and skip.isdigit() and len(skip) <= 12
    if not dash or not is_number:
        raise InvalidError("after is what the page before gave as `next`; take it as it was")
    return int(commit), int(skip)


def _by_hand(site: Site, table: Opened, key: str, explains: str = "", end: str = "") -> Copy:
    """What fetches a key (without one, all rows), or explains one of its windows."""
    short, state = table.name.partition(":")[2] or table.name, str(site.state_path)
    line = _by_command(site, table, key, "" if table.is_versioned else explains, end)
    if table.app:
        python = _APP_PYTHON.format(state=state, app=table.app, table=short)
        if explains:
            wanted = f"{_literal(table.typed(key))}, {moment_of(explains, 0)}"
            inside = log_python(site.log_path, f"print(explain_window(table, log, {wanted}))").splitlines()
            python = f"from tidegate.pipeline.lineage import explain_window\n{python}"
            return Copy(line, python + "\n".join(f"    {each}" for each in inside if each))
        asks = f"fetch({_literal(table.typed(key))})" if key else "all()"
        return Copy(line, f"{python}    print(table.{asks}.to_arrow())")
    wanted = _literal(table.typed(key))
    if table.is_versioned:
        python = f"import tidegate as tg\n\nwith tg.versioned_table({short!r}, state={state!r}) as table:\n"
        return Copy(line, f"{python}    print(table.get({wanted}))")
    opening = {
        "window": f"tg.windowed_table(log, {table.topic!r}, {format_duration(table.window_ms)!r}, ",
        "session": f"tg.sessioned_table(log, {table.topic!r}, ",
        "key": f"tg.table(log, {table.topic!r}, ",
    }[table.kind]
    asks = f"fetch({wanted}).to_arrow()" if table.kind != "key" else f"get({wanted})"
    python = log_python(
        site.log_path,
        f"named = tg.Materialized({short!r})",
        f"rules = dict({table.rules}materialized=named, read_only=True)",
        f"with {opening}state={state!r}, **rules) as table:",
        f"    print(table.{asks})",
    )
    return Copy(line, python)


def _literal(key: Any) -> str:
    """Return a key as Python has it; NaN and infinities have no literals."""
    return f"float({str(key)!r})" if isinstance(key, float) else repr(key)


def _by_command(site: Site, table: Opened, key: str, start: str = "", end: str = "") -> str:
    """Return the command that explains a window, fetches a key, or, where there is none, tells about the table."""
    if start:
        place = [key, *([] if table.kind == "key" else [start])]
        place += [end] if end and not table.app else []
        return cli("tidegate table explain", table.name, *place, log=site.log_path, state=site.state_path)
    if key:
        return cli("tidegate table fetch", table.name, key, state=site.state_path)
    return cli("tidegate table info", table.name, state=site.state_path)
