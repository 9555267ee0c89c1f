"""`tidegate table versions|diff|swap|rollback|retain|delete-version`: the versions of a table, and which is shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from tidegate.cli.options import Verb, dry_run_option, format_option, log_option, talk_options, yes_option
from tidegate.cli.output import counted, print_object, print_rows, say, warn
from tidegate.cli.state import opened_backend, state_option
from tidegate.errors import InvalidError


@click.command("versions", cls=Verb)
@click.argument("name")
@click.option("--swaps", is_flag=True, help="List the swaps instead: when which version took whose place.")
@state_option
@format_option()
@talk_options
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


@click.command("diff", cls=Verb)
@click.argument("before")
@click.argument("after")
@click.option(
    "-n", "--num", type=click.IntRange(0), default=5, show_default=True, help="Examples of each kind."
)
@click.option("--exit-code", is_flag=True, help="End with 1 when the versions differ.")
@state_option
@format_option(("table", "json"))
@talk_options
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


@click.command("swap", cls=Verb)
@click.argument("name")
@click.argument("number", type=int)
@state_option
@talk_options
def swap(name: str, number: int, state: str) -> None:
    """Show version NUMBER of a table from now on; it must be ready. One atomic step, whatever the size."""
    with _versions(state, name) as catalog:
        before = catalog.require().current
        catalog.swap(number)
    say(f"table {name} shows version {number}" + (f" instead of {before}" if before else ""))


@click.command("rollback", cls=Verb)
@click.argument("name")
@state_option
@talk_options
def rollback(name: str, state: str) -> None:
    """Show the version again that was shown before the last swap."""
    with _versions(state, name) as catalog:
        before = catalog.require().current
        now = catalog.rollback().current
    say(f"table {name} shows version {now} again instead of {before}")


@click.command("retain", cls=Verb)
@click.argument("name")
@click.argument("count", type=click.IntRange(1))
@log_option
@state_option
@dry_run_option
@yes_option
@talk_options
def retain(name: str, count: int, log_url: str, state: str, dry_run: bool, yes: bool) -> None:
    """Keep COUNT ready versions of a table and delete the others; the current and the previous one always stay."""
    from tidegate.tables.versions.record import State, superfluous

    with _versions(state, name) as catalog:
        known = catalog.require()
        numbers = superfluous(known, count)
        numbers += [each.number for each in known.versions if each.state is State.RETIRED]
        _delete(catalog, sorted(set(numbers)), log_url, dry_run=dry_run, yes=yes)


@click.command("delete-version", cls=Verb)
@click.argument("name")
@click.argument("number", type=int)
@log_option
@state_option
@dry_run_option
@yes_option
@talk_options
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
    from tidegate.tables.versions.deleting import delete_version, files_of

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
    if not yes:
        click.confirm(f"Delete {told}, with their topics?", abort=True, err=True)
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
