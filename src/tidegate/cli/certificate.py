"""`tidegate certificate`: what was read, as a small document; and whether the log still says so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tidegate.cli.options import GroupVerb, command_options, format_option, log_option, talk_options
from tidegate.cli.output import echo, print_object, say, to_json, visible
from tidegate.cli.parallel import parallel_options, parallel_runner
from tidegate.cli.state import state_option
from tidegate.errors import InvalidError

if TYPE_CHECKING:
    from tidegate.storage.backends.port import StorageBackend

_LARGEST_BYTES = 256 << 20
_OUT_OF_REACH = 3


@click.group("certificate", cls=GroupVerb)
def command() -> None:
    """Certify what was read, and check later that the log still says so.

    \b
    tidegate certificate export orders -o orders.json           all of a topic, audited
    tidegate certificate export shop --round 120 -o 120.json    what a round of an app read
    tidegate certificate export users_v3 -o users_v3.json       a version of a table (users: the current one)
    tidegate certificate check orders.json --log /mnt/mirror    read again and compare
    """


@command.command("export")
@click.argument("subject", metavar="APP|TABLE|TOPIC")
@log_option
@state_option
@click.option(
    "--kind",
    type=click.Choice(["auto", "app", "table", "topic"]),
    default="auto",
    show_default=True,
    help="What it is; auto looks for an app of that name, then a table with versions, then a topic.",
)
@click.option(
    "--round", "round_number", type=click.IntRange(min=0), help="Which round of an app; the last one."
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to; stdout.",
)
@click.option(
    "--key-file",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Sign with HMAC-SHA256 and this file's bytes as the key.",
)
@parallel_options
@command_options
@talk_options
def export(
    subject: str,
    log_url: str,
    state: str,
    kind: str,
    round_number: int | None,
    output: Path | None,
    key_file: Path | None,
    spark: bool,
    master: str | None,
    jobs: int,
    command_config: str | None,
    command_properties: dict[str, str],
) -> None:
    """Read what an app's round, a table's version or a topic holds, and write its certificate."""
    from tidegate.cli.options import client_settings
    from tidegate.clock import SystemClock
    from tidegate.files import Files
    from tidegate.integrity.topic_certificates import certify_topic
    from tidegate.pipeline.reading.certificates import certify_round
    from tidegate.tables.certificates import certify_version

    files, now_ms = Files(), SystemClock().now_ms()
    key = None if key_file is None else files.read(key_file, limit=1 << 20)
    given: dict[str, Any] = {"now_ms": now_ms, "key": key}
    given["client"] = client_settings(command_config, command_properties)
    backend = None if kind == "topic" else _backend(state)
    try:
        found = _kind_of(subject, kind, backend, state)
        if round_number is not None and found != "app":
            raise InvalidError(f"--round is an app's, and {subject} is a {found} here")
        with parallel_runner(spark, master, jobs) as runner:
            if backend is not None and found == "app":
                made = certify_round(backend, subject, round_number, log_url, runner=runner, **given)
            elif backend is not None and found == "table":
                made = certify_version(backend, subject, log_url, runner=runner, **given)
            else:
                made = certify_topic(log_url, subject, runner=runner, **given)
    finally:
        if backend is not None:
            backend.close()
    text = to_json(made) + "\n"
    if output is None:
        click.echo(visible(text) if sys.stdout.isatty() else text, nl=False)
    else:
        files.publish(output, text.encode())
    say(f"{made['records']:,} records of {len(made['ranges'])} ranges certified; digest {made['digest']}")


@command.command("check")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@log_option
@click.option(
    "--key-file",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Refuse a certificate that is not signed with this key.",
)
@click.option("--complete", is_flag=True, help="Fail also when a part has aged out and cannot be checked.")
@parallel_options
@command_options
@format_option(("table", "json"), default="table")
@talk_options
def check(
    file: Path,
    log_url: str,
    key_file: Path | None,
    complete: bool,
    spark: bool,
    master: str | None,
    jobs: int,
    command_config: str | None,
    command_properties: dict[str, str],
    format: str,
) -> int:
    """Read the log again: proven, changed (exit code 1), or aged out (3 when nothing is left to check)."""
    from tidegate.cli.options import client_settings
    from tidegate.files import Files
    from tidegate.integrity.certificates import check_certificate, parse_certificate

    files = Files()
    key = None if key_file is None else files.read(key_file, limit=1 << 20)
    document = parse_certificate(files.read(file, limit=_LARGEST_BYTES), key=key)
    client = client_settings(command_config, command_properties)
    with parallel_runner(spark, master, jobs) as runner:
        found = check_certificate(document, log_url, client=client, runner=runner)
    if format == "json":
        print_object(
            {"digest": document["digest"], "topics": [each.as_dict() for each in found]}, format="json"
        )
    for each in found:
        say(
            f"{each.topic}: {each.verdict}; of {each.records:,} records {each.proven:,} are proven, "
            f"{each.aged_out:,} aged out"
        )
        if format == "table":
            for changed in each.changed:
                echo(
                    f"changed: {each.topic}-{changed.partition} offsets {changed.first} to {changed.next - 1}: "
                    f"{changed.reason}"
                )
    verdicts = {each.verdict for each in found}
    if "changed" in verdicts or (complete and verdicts - {"proven"}):
        return 1
    return _OUT_OF_REACH if verdicts == {"aged out"} else 0


def _kind_of(subject: str, kind: str, backend: StorageBackend | None, state: str) -> str:
    from tidegate.pipeline.rounds.records import Records
    from tidegate.tables.versions.catalog import version_named

    if backend is not None and kind in ("auto", "app") and Records(backend, subject).load_app() is not None:
        return "app"
    if backend is not None and kind in ("auto", "table") and version_named(backend, subject) is not None:
        return "table"
    if kind in ("app", "table"):
        raise InvalidError(f"there is no {kind} {subject} in {state}; say where with --state")
    return "topic"


def _backend(state: str) -> StorageBackend | None:
    """The state, if there is any: a topic needs none."""
    from tidegate.storage import open_backend
    from tidegate.storage.backends.port import NoStateError

    try:
        return open_backend(state, read_only=True)
    except NoStateError:
        return None
