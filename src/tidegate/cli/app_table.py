"""Tables that apps keep, as `tidegate table` shows them: found by name, read without the app's program.

A table is named as in `.table(name)`; where several apps have one of that name, as APP:NAME.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tidegate.durations import format_moment
from tidegate.errors import InvalidError

if TYPE_CHECKING:
    from tidegate.pipeline.reading.recorded import RecordedTable
    from tidegate.pipeline.reading.result_table import ResultTable
    from tidegate.storage.backends.port import StorageBackend


@contextmanager
def opened_app_table(
    backend: StorageBackend,
    found: RecordedTable,
    *,
    number: int | None,
    key_serde: str | None,
    value_serde: str | None,
) -> Iterator[ResultTable]:
    """The table at its app's last commit, or at commit `number`."""
    from tidegate.pipeline.reading.recorded import open_recorded

    if key_serde is not None or value_serde is not None:
        raise InvalidError(
            f"table {found.name} is of app {found.app}, which says how keys and values are read; leave --key and "
            "--value out"
        )
    with open_recorded(backend, found.app, found.name) as table, table.pinned() as newest:
        if number is None:
            yield newest
            return
        with table.as_of(number) as past:
            yield past


def app_table_facts(backend: StorageBackend, found: RecordedTable) -> dict[str, Any]:
    """What is known of the table."""
    with opened_app_table(backend, found, number=None, key_serde=None, value_serde=None) as table:
        commit, rounds = table.commit, table.rounds()
        tasks = [line for line in commit.tasks if line.flow == found.flow]
        return {
            "table": found.name,
            "kind": "windows of an app",
            "app": found.app,
            "flow": found.flow,
            "topic": found.topic,
            "windows": str(None if table.flow.window is None else table.flow.window.kind),
            "key serde": table.flow.key_serde.name,
            "columns": ", ".join(f"{each.name} {each.type}" for each in table.schema),
            "commit": commit.round,
            "committed": format_moment(commit.committed_ms),
            "earliest commit": rounds[0] if rounds else commit.round,
            "position": ", ".join(f"{number}: {offset}" for number, offset in sorted(table.position.items())),
            "backlog bytes": sum(line.backlog_bytes for line in tasks),
        }


def explain_lines(table: ResultTable, log: Any, key: Any, start_ms: int) -> Iterator[str]:
    """Lines that name the records that made the value of a window, and for each of the others why it is not in it."""
    from tidegate.cli.output import counted, to_json
    from tidegate.pipeline.reading.explaining import explain_window

    said = explain_window(table, log, key, start_ms)
    bounds = f"{format_moment(said.start)} to {format_moment(said.end)}"
    value = "there is no such window" if said.value is None else to_json(said.value)
    yield f"{said.key} from {bounds}: {value}"
    for each in said.contributions:
        why = f": {each.reason}" if each.reason else ""
        place = f"partition {each.partition} offset {each.offset} at {format_moment(each.timestamp)}"
        yield f"  {place} {each.outcome}{why}"
    yield from (f"  note: {note}" for note in said.notes)
    yield f"{counted(said.counted, 'record')} of {said.looked_at:,} looked at make the value"
