"""`tidegate push` and `tidegate table versions|diff|swap|rollback|retain|delete-version`: versions of pushed tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from tidegate.cli.options import (
    Command,
    command_options,
    confirm,
    dry_run_option,
    format_option,
    log_option,
    opened_backend,
    settings_option,
    state_option,
    verbosity_options,
    yes_option,
)
from tidegate.cli.output import (
    LiveLine,
    bar,
    counted,
    is_verbose,
    print_object,
    print_rows,
    printable,
    say,
    warn,
)
from tidegate.durations import format_duration
from tidegate.errors import InvalidError

# -- tidegate push ---------------------------------------------------------------------------------


@click.command("push", cls=Command)
@click.argument("source", required=False)
@click.option("--table", required=True, metavar="NAME", help="The table whose next version this becomes.")
@click.option(
    "--key", "keys", required=True, multiple=True, metavar="COLUMN", help="The key; several make a JSON key."
)
@click.option(
    "--value",
    "values",
    multiple=True,
    metavar="COLUMN",
    help="Value columns; by default all that are no key.",
)
@click.option(
    "--timestamp", metavar="COLUMN", help="The records' timestamps; by default the time of the push."
)
@click.option(
    "--order-by", multiple=True, metavar="COLUMN", help="Of rows with one key, the last by this counts."
)
@click.option("--source-format", metavar="NAME", help="parquet, csv, json, orc, …; by the path's ending.")
@settings_option("An option of Spark's reader (repeatable), like -X delimiter=;.")
@click.option("--sql", metavar="QUERY", help="Push the rows of a query; SOURCE is its view `source`.")
@click.option("--partitions", type=click.IntRange(1), help="Of the version; by default as before, or 4.")
@click.option("--no-swap", is_flag=True, help="Leave the version ready; `table swap` shows it.")
@click.option(
    "--retain", type=click.IntRange(1), metavar="K", help="Keep K ready versions, retire older ones."
)
@click.option("--without-key", type=click.Choice(["refuse", "skip"]), default="refuse", show_default=True,
              help="Rows without a key: refuse the push, or leave them out and count them.")  # fmt: skip
@click.option(
    "--compression",
    type=click.Choice(["none", "gzip", "snappy", "lz4", "zstd"]),
    help="Of the topic's batches.",
)
@click.option("--master", metavar="URL", help="Spark's master.  [default: local[*,4]]")
@format_option(("table", "json"))
@log_option
@state_option
@command_options
@verbosity_options
def push(
    source: str | None,
    table: str,
    keys: tuple[str, ...],
    values: tuple[str, ...],
    timestamp: str | None,
    order_by: tuple[str, ...],
    source_format: str | None,
    settings: dict[str, str],
    sql: str | None,
    partitions: int | None,
    no_swap: bool,
    retain: int | None,
    without_key: str,
    compression: str | None,
    master: str | None,
    format: str,
    log_url: str,
    state: str,
    command_config: str | None,
    command_properties: dict[str, str],
) -> int:
    """Push all rows of SOURCE as the next version of a table, and show it once every partition is proven complete.

    \b
    tidegate push users.parquet --table users --key id
    tidegate push orders.csv --table orders --key customer --key day --retain 3
    tidegate push --sql 'select id, name from parquet.`users`' --table users --key id --no-swap

    Lost, changed or late records fail the version: it is never shown, the report names them, and readers go on with
    the version before. Exit code 1 then. Interrupted or killed, a push leaves a failed version and nothing else.
    A row of CSV or JSON that cannot be read whole is refused; -X mode=PERMISSIVE takes what Spark makes of it.
    """
    from tidegate.cli.options import client_settings
    from tidegate.spark import push as driver
    from tidegate.spark import session
    from tidegate.spark.push import source_frame
    from tidegate.tables.versions.catalog import PushFailedError

    client = client_settings(command_config, command_properties)
    spark = session("tidegate push") if master is None else session("tidegate push", master=master)
    spark.sparkContext.setLogLevel("ERROR" if is_verbose() else "FATAL")  # what fails is told in one line
    frame = source_frame(spark, source, format=source_format, options=settings, sql=sql)
    with PushLine() as line:
        try:
            report = driver.push(
                frame,
                table=table,
                key=keys,
                value=values or None,
                timestamp=timestamp,
                order_by=order_by,
                log=log_url if "://" in log_url else str(Path(log_url).expanduser().absolute()),
                state=state if "://" in state else str(Path(state).expanduser().absolute()),
                partitions=partitions,
                swap=not no_swap,
                retain=retain,
                without_key=without_key,
                compression=compression,
                client=client,
                source=sql if sql is not None else str(source),
                progress=line.show,
            )
        except PushFailedError as failed:
            line.clear()
            if format == "json":
                print_object(failed.report.to_dict(), format=format)
            raise
    if format == "json":
        print_object(report.to_dict(), format=format)
    else:
        say(str(report))
    return 0


class PushLine(LiveLine):
    """Shows how a push goes; give `show` to it."""

    _step = ""

    def show(self, progress: Any) -> None:
        """One look; every new step is told at once."""
        is_new, self._step = progress.step != self._step, progress.step
        self.tell(lambda: push_line(progress), progress.to_dict, at_once=is_new)


def push_line(progress: Any) -> str:
    """`users_v4  sending ▰▰▱▱▱ 40%  12s  18s left`."""
    share = progress.done / progress.total if progress.total else 0.0
    elapsed = format_duration(max(1, round(progress.elapsed_ms / 1000)) * 1000)
    parts = [f"{printable(progress.table)}_v{progress.version}", f"{progress.step} {bar(share)}", elapsed]
    if progress.records:
        parts.append(f"{progress.records:,} records")
    if progress.left_ms is not None:
        parts.append(f"{format_duration(max(1, round(progress.left_ms / 1000)) * 1000)} left")
    return "  ".join(parts)


# -- tidegate table versions, diff, swap, rollback, retain, delete-version -------------------------


@click.command("versions", cls=Command)
@click.argument("name")
@click.option("--swaps", is_flag=True, help="List the swaps instead: when which version took whose place.")
@state_option
@format_option()
@verbosity_options
def versions(name: str, swaps: bool, state: str, format: str) -> None:
    """List the versions of a table: where each stands, how many rows, what was found.

    Versions whose push is gone without a word are shown as they were left; the next push marks them failed.
    """
    from tidegate.durations import format_moment

    with _versions(state, name, read_only=True) as catalog:
        known = catalog.require()
    if swaps:
        rows = [
            {"at": format_moment(each.at_ms), "before": each.before, "after": each.after, "by": each.reason}
            for each in known.swaps
        ]
        print_rows(rows, format=format, columns=("at", "before", "after", "by"))
        return
    rows = []
    for each in known.versions:
        shown = "current" if each.number == known.current else ""
        shown = shown or ("previous" if each.number == known.previous else "")
        rows.append(
            {
                "version": each.number,
                "state": each.state.value,
                "shown": shown or None,
                "rows": each.rows,
                "bytes": each.nbytes,
                "topic": each.topic,
                "created": format_moment(each.created_ms),
                "verdicts": each.verdicts,
                "fault": f"{each.faults[0].kind}: {each.faults[0].message}" if each.faults else None,
            }
        )
    columns = ("version", "state", "shown", "rows", "bytes", "topic", "created", "verdicts", "fault")
    print_rows(rows, format=format, columns=columns)


@click.command("diff", cls=Command)
@click.argument("before")
@click.argument("after")
@click.option(
    "-n", "--num", type=click.IntRange(0), default=5, show_default=True, help="Examples of each kind."
)
@click.option("--exit-code", is_flag=True, help="End with 1 when the versions differ.")
@state_option
@format_option(("table", "json"))
@verbosity_options
def diff(before: str, after: str, num: int, exit_code: bool, state: str, format: str) -> int:
    """Compare two versions, named like users_v3 (or users: the current one): keys gained, lost, changed, and the
    verdicts side by side."""
    from tidegate.tables.versions.diff import diff_versions

    with opened_backend(state) as backend:
        found = diff_versions(backend, _named(backend, before), _named(backend, after), examples=num)
    if format == "json":
        print_object(found.to_dict(), format=format)
    else:
        facts: dict[str, Any] = {
            "before": f"{found.before.name}, {found.before.rows} rows",
            "after": f"{found.after.name}, {found.after.rows} rows",
            "same": found.same,
            "gained": found.gained,
            "lost": found.lost,
            "changed": found.changed,
        }
        for name, (left, right) in found.verdicts.items():
            facts[f"verdict {name}"] = f"{left} | {right}"
        print_object(facts, format=format)
        rows = [
            {"kind": kind, "key": each.key, "before": each.before, "after": each.after}
            for kind, examples in found.examples.items()
            for each in examples
        ]
        if rows:
            print_rows(rows, format=format, columns=("kind", "key", "before", "after"))
    return 1 if exit_code and not found.is_none else 0


@click.command("swap", cls=Command)
@click.argument("name")
@click.argument("number", type=int)
@state_option
@verbosity_options
def swap(name: str, number: int, state: str) -> None:
    """Show version NUMBER of a table from now on; it must be ready. One atomic step, whatever the size."""
    with _versions(state, name) as catalog:
        before = catalog.require().current
        catalog.swap(number)
    say(f"table {name} shows version {number}" + (f" instead of {before}" if before else ""))


@click.command("rollback", cls=Command)
@click.argument("name")
@state_option
@verbosity_options
def rollback(name: str, state: str) -> None:
    """Show the version again that was shown before the last swap."""
    with _versions(state, name) as catalog:
        before = catalog.require().current
        now = catalog.rollback().current
    say(f"table {name} shows version {now} again instead of {before}")


@click.command("retain", cls=Command)
@click.argument("name")
@click.argument("count", type=click.IntRange(1))
@log_option
@state_option
@dry_run_option
@yes_option
@verbosity_options
def retain(name: str, count: int, log_url: str, state: str, dry_run: bool, yes: bool) -> None:
    """Keep COUNT ready versions of a table and delete the others; the current and the previous one always stay."""
    from tidegate.tables.versions.catalog import State, superfluous

    with _versions(state, name) as catalog:
        known = catalog.require()
        numbers = superfluous(known, count)
        numbers += [each.number for each in known.versions if each.state is State.RETIRED]
        _delete(catalog, sorted(set(numbers)), log_url, dry_run=dry_run, yes=yes)


@click.command("delete-version", cls=Command)
@click.argument("name")
@click.argument("number", type=int)
@log_option
@state_option
@dry_run_option
@yes_option
@verbosity_options
def delete(name: str, number: int, log_url: str, state: str, dry_run: bool, yes: bool) -> None:
    """Delete a version that is not shown: its topic, its files, its line in the list."""
    with _versions(state, name) as catalog:
        known = catalog.require()
        known.get(number)
        if number == known.current:
            raise InvalidError(
                f"version {number} is the one table {name} shows; swap another in first, or roll back"
            )
        _delete(catalog, [number], log_url, dry_run=dry_run, yes=yes)


def _delete(catalog: Any, numbers: list[int], log_url: str, *, dry_run: bool, yes: bool) -> None:
    from tidegate.cli.options import opened
    from tidegate.durations import format_size
    from tidegate.tables.versions.push import delete_version, files_of

    if not numbers:
        say("nothing to delete")
        return
    known = catalog.require()
    sizes = {
        number: sum(size for _, size in files_of(catalog.backend, known.get(number))) for number in numbers
    }
    told = ", ".join(
        f"{known.get(number).name} ({format_size(size)} of state)" for number, size in sizes.items()
    )
    if dry_run:
        say(f"would delete {told}, with their topics")
        return
    confirm(f"delete {told}, with their topics?", yes)
    with opened(log_url, None, {}) as log:
        for number in numbers:
            topic = known.get(number).topic
            if topic not in log.topics():
                warn(f"{log_url} has no topic {topic}; if it lies in another log, delete it there")
            delete_version(catalog, log, number)
    say(f"deleted {counted(len(numbers), 'version')}: {told}")


@contextmanager
def _versions(state: str, name: str, *, read_only: bool = False) -> Iterator[Any]:
    from tidegate.tables.versions.catalog import Versions

    with opened_backend(state, read_only=read_only) as backend:
        yield Versions(backend, name)


def _named(backend: Any, name: str) -> Any:
    from tidegate.tables.versions.catalog import Versions, version_named

    found = version_named(backend, name)
    if found is None:
        raise InvalidError(f"there is no version {name!r} here; name one like users_v3")
    table, number = found
    known = Versions(backend, table).require()
    chosen = number or known.current
    if not chosen:
        raise InvalidError(f"table {table} shows no version yet; name one like {table}_v1")
    return known.get(chosen)


VERBS = (versions, diff, swap, rollback, retain, delete)
