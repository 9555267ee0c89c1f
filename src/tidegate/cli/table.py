"""`tidegate table`: read the tables of a state folder, and serve replicas of hybrid tables.

A table is read at its last commit, or an earlier one; nothing is built. Tables of apps are named as in
`.to_table(name)`; where several apps have a table of that name, as APP:NAME. The commands about versions are in
`versions`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from tidegate.cli.options import (
    DURATION,
    SERDE_NAMES,
    AnyFunction,
    Command,
    Group,
    command_options,
    format_option,
    log_option,
    opened_backend,
    state_option,
    verbosity_options,
)
from tidegate.cli.output import LiveLine, counted, echo, print_object, print_rows, printable, say, short
from tidegate.cli.versions import VERBS
from tidegate.durations import format_moment
from tidegate.errors import InvalidError

if TYPE_CHECKING:
    from tidegate.pipeline.table import ResultTable
    from tidegate.pipeline.table_catalog import RecordedTable
    from tidegate.storage.backends.base import StorageBackend


# -- tidegate table serve --------------------------------------------------------------------------

REDRAW_SECONDS = 0.5


@click.command("serve", cls=Command)
@click.argument("name")
@click.option(
    "--live", "live", metavar="TOPIC", required=True, help="The live topic that goes on from the push."
)
@click.option(
    "--rewind",
    default="1d",
    show_default=True,
    help="How far before the push's end the live topic is read from.",
)
@click.option(
    "--rewind-from", type=click.Choice(["end", "start"]), default="end", show_default=True,
    help="Rewind from the end of the push, or from its start.",
)  # fmt: skip
@click.option("--partitions", metavar="0,1", help="The partitions to replicate; all by default.")
@click.option(
    "--replica", metavar="NAME", help="Whose rows to go on with; by default the first that nobody serves."
)
@click.option(
    "--max-age",
    metavar="TIME",
    help="Forget producers silent for longer; at least the rewind. Never by default.",
)
@click.option(
    "--commit-interval", default="5s", show_default=True, help="How often what is drained is committed."
)
@click.option(
    "--lease-ttl", default="10s", show_default=True, help="When a leader that says nothing is replaced."
)
@click.option(
    "--for",
    "duration",
    type=DURATION,
    metavar="TIME",
    help="Stop after so long; without it on Ctrl-C or SIGTERM.",
)
@state_option
@log_option
@command_options
@verbosity_options
def serve(
    name: str,
    state: str,
    log_url: str,
    partitions: str | None,
    duration: str | None,
    command_config: str | None,
    command_properties: dict[str, str],
    **options: Any,
) -> None:
    """Serve a replica of NAME, a table's current version or a version topic, and go on with a live topic.

    \b
    tidegate table serve users --live user-updates --rewind 1d
    tidegate table serve users_v3 --live user-updates --partitions 0,1 --replica left

    Start it in several processes, on one machine or many, with the same --state: one of them leads each partition, the
    others follow and take over. A line of JSON on stderr every five seconds says how it stands.
    """
    from tidegate.cli.options import opened
    from tidegate.durations import duration_ms
    from tidegate.tables.hybrid.table import hybrid_table

    ends = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ends.set())
    seconds = None if duration is None else duration_ms(duration) / 1000
    with opened(log_url, command_config, command_properties) as log:
        table = hybrid_table(log, name, state=state, partitions=_numbers(partitions), follow=True, **options)
        try:
            say(f"replica {table.replica} of {table.version}, with {options['live']}; Ctrl-C ends it")
            _watch(table, ends, seconds)
        finally:
            table.close()
        say(f"replica {table.replica} of {table.version} is closed")


def line(status: Any) -> str:
    """The live line: `users_v3.r0  leads 0, 2  follows 1  lag 12  live lag 3 k  1 fault`."""
    leads = [str(each.partition) for each in status.partitions if each.role == "leader"]
    follows = [str(each.partition) for each in status.partitions if each.role == "standby"]
    stopped = [str(each.partition) for each in status.partitions if each.role == "offline"]
    parts = [status.replica]
    for word, numbers in (("leads", leads), ("follows", follows), ("stopped", stopped)):
        if numbers:
            parts.append(f"{word} {', '.join(numbers)}")
    parts.append(f"lag {short(sum(each.lag for each in status.partitions))}")
    live = [each.live_lag for each in status.partitions if each.live_lag >= 0]
    parts.append(f"live lag {short(sum(live))}" if live else "not switched yet")
    faults = sum(each.faults + each.live_faults for each in status.partitions)
    parts.append(f"{faults:,} faults" if faults != 1 else "1 fault")
    lost = sum(each.live_lost for each in status.partitions)
    if lost:
        parts.append(f"{lost:,} lost by the live topic")
    return "  ".join(parts)


def _watch(table: Any, ends: threading.Event, seconds: float | None) -> None:
    """Show the status until `ends` is set or the time is over."""
    from msgspec import to_builtins

    from tidegate.clock import SystemClock

    clock = SystemClock()
    stop_ms = None if seconds is None else clock.monotonic_ms() + int(seconds * 1000)
    with LiveLine() as live:
        while not ends.wait(REDRAW_SECONDS if stop_ms is None else min(REDRAW_SECONDS, 0.1)):
            table.check()
            if stop_ms is not None and clock.monotonic_ms() >= stop_ms:
                break
            live.tell(lambda: line(table.status()), lambda: to_builtins(table.status()))


def _numbers(written: str | None) -> list[int] | None:
    if written is None:
        return None
    try:
        return [int(each) for each in written.split(",")]
    except ValueError:
        raise InvalidError(f"--partitions {written}: give numbers, as in 0,1") from None


# -- tidegate table fetch, scan, info, explain -----------------------------------------------------


def _reading_options(command: AnyFunction) -> AnyFunction:
    """What every verb that opens a table takes."""
    serde = click.Choice(SERDE_NAMES)
    for option in (
        click.option(
            "--key", "key_serde", type=serde, help="How to read keys; by default as the table was made."
        ),
        click.option("--value", "value_serde", type=serde, help="How to read values; likewise."),
        click.option("--commit", "number", type=int, help="An earlier commit; `info` lists them."),
        state_option,
        verbosity_options,
    ):
        command = option(command)
    return command


@click.group("table", cls=Group)
def command() -> None:
    """Look into tables: single windows, ranges, what a table is, why a value is what it is; and its versions.

    \b
    tidegate table info                                       which tables there are
    tidegate table fetch counts user-1 --from 2026-01-01T10:00Z
    tidegate table scan counts -n 20
    tidegate table explain counts user-1 1700000040000
    tidegate table versions users                             of a table that is pushed
    tidegate table diff users_v3 users_v4
    tidegate table serve users --live user-updates            one that goes on after its push

    The last commit is shown; the process that builds the table goes on meanwhile. Of a table that is pushed, the
    current version is; name another one like users_v3. Tables that apps keep are named as in .to_table(NAME), or as
    APP:NAME where several apps have one of that name.
    """


@command.command("fetch")
@click.argument("name")
@click.argument("key")
@click.option("--from", "first", default="0", help="Window starts from here on (session ends).")
@click.option("--to", "last", help="Window starts up to here (session starts).")
@click.option("--backward", is_flag=True, help="The latest first.")
@format_option()
@_reading_options
def fetch(
    name: str, key: str, first: str, last: str | None, backward: bool, format: str, **options: Any
) -> None:
    """Print the windows of one KEY; times are epoch milliseconds or like 2026-01-01T10:00Z."""
    from tidegate.tables.serdes.base import key_of_text

    bounds = (_moment(first), 2**63 - 1 if last is None else _moment(last))
    with _opened(name, **options) as table:
        serde, number = (
            (table.flow.key_serde, table.round)
            if _is_of_app(table)
            else (table.rules.key, table.commit.number)
        )
        rows = table.fetch(key_of_text(serde, key), *bounds, backward=backward)
        print_rows(rows.to_arrow().to_pylist(), format=format, columns=rows.to_arrow().column_names)
        say(f"{counted(len(rows), 'window')} of {key} at commit {number}")


@command.command("scan")
@click.argument("name")
@click.option("-n", "--num", type=click.IntRange(1), help="Stop after so many rows.")
@format_option()
@_reading_options
def scan(name: str, num: int | None, format: str, **options: Any) -> None:
    """Print all rows of the table, in no promised order."""
    with _opened(name, **options) as table:
        rows = (row for batch in table.scan() for row in batch.to_pylist())
        shown = list(islice(rows, num)) if num is not None else rows
        columns = table.schema.names if _is_of_app(table) else _columns(table)
        print_rows(shown, format=format, columns=columns)


@command.command("info")
@click.argument("name", required=False)
@state_option
@format_option()
@verbosity_options
def info(name: str | None, state: str, format: str) -> None:
    """Say what a table is and how far it goes; without NAME, list the tables of the folder."""
    from tidegate.clock import SystemClock
    from tidegate.durations import format_duration, format_moment
    from tidegate.pipeline.admin import app_commits
    from tidegate.pipeline.table_catalog import all_recorded
    from tidegate.tables.commits import lease_name, load_commits, read_lease, stored_tables
    from tidegate.tables.hybrid.status import freshest_replica
    from tidegate.tables.topic_table import open_committed
    from tidegate.tables.versions.catalog import load_versions, version_named, versioned_tables

    with opened_backend(state) as backend:
        if name is None:
            rows, parts = [], set()
            for each in versioned_tables(backend):
                listed = load_versions(backend, each)
                known = () if listed is None else listed[0].versions
                parts |= {one.shape(number).name for one in known for number in range(one.partitions)}
                topic = listed[0].current_version.topic if listed and listed[0].current_version else None
                rows.append({"table": each, "kind": "versions", "topic": topic, "commits": len(known)})
            for each in stored_tables(backend):
                if each in parts:
                    continue
                found = load_commits(backend, each)
                if found is not None:
                    shape, commits = found[0].shape, found[0].commits
                    rows.append(
                        {"table": each, "kind": shape.kind, "topic": shape.topic, "commits": len(commits)}
                    )
            for of_app in all_recorded(backend):
                count = len(app_commits(backend, of_app.app))
                named = f"{of_app.app}:{of_app.name}"
                rows.append({"table": named, "kind": "app", "topic": of_app.topic, "commits": count})
            print_rows(rows, format=format, columns=("table", "kind", "topic", "commits"))
            return
        versioned = version_named(backend, name)
        if versioned is not None:
            print_object(_version_facts(backend, *versioned), format=format)
            return
        if (found_app := _of_app(backend, name)) is not None:
            print_object(_app_table_facts(backend, found_app), format=format)
            return
        name = freshest_replica(backend, name) or name
        table = open_committed(backend, name, clock=SystemClock())
        with table:
            shape, commit = table.rules.shape, table.commit
            held = read_lease(backend, lease_name(name))
            found = load_commits(backend, name)
            facts: dict[str, Any] = {
                "table": name,
                "kind": shape.kind,
                "topic": shape.topic,
                "key format": shape.key_format or "plain",
                "window size": format_duration(shape.size_ms) if shape.size_ms else "none",
                "retention": format_duration(shape.retention_ms) if shape.is_windowed else "none",
                "key serde": shape.key_serde,
                "value serde": shape.value_serde,
                "commit": commit.number,
                "committed": format_moment(commit.committed_ms),
                "earliest commit": found[0].commits[0].number if found is not None else commit.number,
                "stored rows": commit.rows,
                "position": ", ".join(
                    f"{number}: {offset}" for number, offset in sorted(commit.positions.items())
                ),
                "builder": "none"
                if held is None or not held[0].owner
                else f"process {held[0].pid} on {held[0].host}",
            }
            for state_of in table.source.partitions:
                for outcome in state_of.counts.__struct_fields__:
                    facts[outcome] = facts.get(outcome, 0) + getattr(state_of.counts, outcome)
            facts |= _replicas(backend, shape.topic)
            print_object(facts, format=format)


@command.command("explain")
@click.argument("name")
@click.argument("key")
@click.argument("start", required=False)
@click.argument("end", required=False)
@log_option
@_reading_options
def explain(name: str, key: str, start: str | None, end: str | None, log_url: str, **options: Any) -> None:
    """Say which records made a window's value: START for a time window, START and END for a session."""
    from tidegate.cli.options import opened
    from tidegate.tables.explain import explain as explained
    from tidegate.tables.serdes.base import key_of_text

    with _opened(name, **options) as table, opened(log_url, None, {}, read_only=True) as log:
        if _is_of_app(table):
            if start is None or end is not None:
                raise InvalidError(f"table {name} is kept by an app: give START, and no END")
            for told in _explain_app_table(
                table, log, key_of_text(table.flow.key_serde, key), _moment(start)
            ):
                click.echo(printable(told))
            return
        kind = table.rules.shape.kind
        if {"window": (True, False), "session": (True, True), "key": (False, False)}[kind] != (
            start is not None,
            end is not None,
        ):
            wanted = {"window": "START", "session": "START and END", "key": "neither START nor END"}[kind]
            raise InvalidError(f"table {name} is of kind {kind}: give {wanted}")
        first, last = _moment(start or "0"), _moment(end or "0")
        ts, seq = (last, first) if kind == "session" else (first, 0)
        raw = table.rules.key.encode(key_of_text(table.rules.key, key))
        for line in explained(table.source, log, raw or b"", ts, seq).lines():
            echo(line)


command.add_command(serve)


@contextmanager
def _opened(
    name: str, *, state: str, key_serde: str | None, value_serde: str | None, number: int | None
) -> Iterator[Any]:
    from tidegate.clock import SystemClock
    from tidegate.tables.hybrid.status import freshest_replica
    from tidegate.tables.serdes.json import PLAIN_SERDES
    from tidegate.tables.topic_table import open_committed
    from tidegate.tables.versions.catalog import Versions, version_named
    from tidegate.tables.versions.reader import VersionedTable

    choose: Callable[[str | None], Any] = lambda chosen: None if chosen is None else PLAIN_SERDES[chosen]  # noqa: E731
    with opened_backend(state) as backend:
        if (of_app := _of_app(backend, name)) is not None:
            serdes = {"key_serde": key_serde, "value_serde": value_serde}
            with _opened_app_table(backend, of_app, number=number, **serdes) as kept:
                yield kept
            return
        replica = freshest_replica(backend, name)
        versioned = None if replica is not None else version_named(backend, name)
        if versioned is not None:
            if number is not None:
                raise InvalidError(
                    f"table {name} has versions and no commits to choose; name one, like {name}_v1"
                )
            named, chosen = versioned
            chosen = (
                chosen or Versions(backend, named).require().current or None
            )  # the same for the whole command
            with VersionedTable(
                backend, named, number=chosen, key=choose(key_serde), value=choose(value_serde)
            ) as current:
                yield current
            return
        table = open_committed(
            backend,
            replica or name,
            clock=SystemClock(),
            number=number,
            key=choose(key_serde),
            value=choose(value_serde),
        )
        with table:
            yield table


def _of_app(backend: Any, name: str) -> Any:
    """The app's table of that name; None where there is another table called so, or none at all."""
    from tidegate.pipeline.table_catalog import all_recorded, find_recorded
    from tidegate.tables.commits import stored_tables
    from tidegate.tables.hybrid.status import freshest_replica
    from tidegate.tables.versions.catalog import version_named

    if ":" not in name and (
        name in stored_tables(backend)
        or version_named(backend, name) is not None
        or freshest_replica(backend, name) is not None
    ):
        return None
    found = find_recorded(backend, name)
    known = all_recorded(backend) if found is None else []
    if found is None and (known or ":" in name):
        others = [*stored_tables(backend), *(f"{each.app}:{each.name}" for each in known)]
        raise InvalidError(f"there is no table {name!r} here; there are {', '.join(others) or 'none'}")
    return found


def _is_of_app(table: Any) -> bool:
    return hasattr(table, "flow")


def _replicas(backend: Any, version: str) -> dict[str, str]:
    """What the replicas of a hybrid table said last."""
    from tidegate.durations import format_moment
    from tidegate.tables.hybrid.status import read_statuses

    facts = {}
    for status in read_statuses(backend, version):
        roles = "; ".join(
            f"{each.partition}: {each.role}, epoch {each.epoch}, lag {each.lag}, live lag {each.live_lag}"
            + (f", {each.live_lost} lost by the live topic" if each.live_lost else "")
            + (f", {each.error}" if each.error else "")
            for each in status.partitions
        )
        facts[f"replica {status.replica}"] = (
            f"process {status.pid} on {status.host} at {format_moment(status.at_ms)}: {roles}"
        )
    return facts


def _version_facts(backend: Any, table: str, number: int | None) -> dict[str, Any]:
    """What is known of one version; of the current one when no number is given."""
    from tidegate.durations import format_moment
    from tidegate.tables.versions.catalog import Versions

    known = Versions(backend, table).require()
    chosen = number or known.current
    facts: dict[str, Any] = {"table": table, "kind": "versions", "current": known.current or None}
    facts |= {"previous": known.previous or None, "versions": [each.number for each in known.versions]}
    if chosen:
        version = known.get(chosen)
        facts |= {
            "version": version.number,
            "state": version.state.value,
            "topic": version.topic,
            "partitions": version.partitions,
            "rows": version.rows,
            "bytes": version.nbytes,
            "key serde": version.key_serde,
            "value serde": version.value_serde,
            "source": version.source or None,
            "created": format_moment(version.created_ms),
            "pushed": format_moment(version.pushed_ms) if version.pushed_ms else None,
            "repeated keys": version.repeated_keys,
            "without key": version.without_key,
            "verdicts": version.verdicts,
        }
        for fault in version.faults:
            facts[f"fault of partition {fault.partition}"] = f"{fault.kind}: {fault.message}"
        facts |= _replicas(backend, version.topic)
    return facts


def _columns(table: Any) -> list[str]:
    windows = ["window_start", "window_end"] if table.rules.shape.is_windowed else []
    return ["key", *windows, "value", "timestamp", "partition", "offset"]


def _moment(written: str) -> int:
    """A time as typed on the command line: epoch milliseconds, or as people write it."""
    from tidegate.durations import moment_ms

    return moment_ms(int(written) if written.lstrip("+-").isdecimal() else written)


for _verb in VERBS:
    command.add_command(_verb)


# -- tables of apps --------------------------------------------------------------------------------


@contextmanager
def _opened_app_table(
    backend: StorageBackend,
    found: RecordedTable,
    *,
    number: int | None,
    key_serde: str | None,
    value_serde: str | None,
) -> Iterator[ResultTable]:
    """The table at its app's last commit, or at commit `number`."""
    from tidegate.pipeline.table_catalog import open_recorded

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


def _app_table_facts(backend: StorageBackend, found: RecordedTable) -> dict[str, Any]:
    """What is known of the table."""
    with _opened_app_table(backend, found, number=None, key_serde=None, value_serde=None) as table:
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


def _explain_app_table(table: ResultTable, log: Any, key: Any, start_ms: int) -> Iterator[str]:
    """Lines that name the records that made the value of a window, and for each of the others why it is not in it."""
    from tidegate.cli.output import counted, to_json
    from tidegate.pipeline.lineage import explain_window

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
