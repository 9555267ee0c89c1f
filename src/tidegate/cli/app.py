"""`tidegate app`: what apps did by their records, and the ways out that messages name. Thin over `ways_out`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from tidegate.cli.options import (
    GroupVerb,
    command_options,
    format_option,
    talk_options,
    yes_option,
)
from tidegate.cli.output import print_object, print_rows, say
from tidegate.cli.state import opened_backend, state_option
from tidegate.durations import format_moment, format_size

if TYPE_CHECKING:
    from tidegate.pipeline.rounds.ways_out import CommitInfo


@click.group("app", cls=GroupVerb)
def command() -> None:
    """See what an app did, and the ways out that messages name.

    \b
    tidegate app status                               every app of ./data/state
    tidegate app status shop --log ./data/log         with what is left to read
    tidegate app checkpoints shop                     the commits that are kept
    tidegate app resume shop --partition orders-3     go on with a partition that a fault stopped
    tidegate app acknowledge shop                     the faults found so far are known
    tidegate app replay shop --to-round 120           compute again from a commit, or from the beginning
    tidegate app reset shop                           forget everything it knows

    Changes are refused while the app runs. Topics and their records are never touched.
    """


@command.command("status")
@click.argument("app", required=False)
@state_option
@click.option(
    "--log", "log_url", metavar="URL", envvar="TIDEGATE_LOG", help="Also say how much is left to read."
)
@command_options
@format_option()
@talk_options
def status(
    app: str | None,
    state: str,
    log_url: str | None,
    command_config: str | None,
    command_properties: dict[str, str],
    format: str,
) -> int:
    """Print where APP stands, or all apps.

    Exit codes are those of `tidegate run`: 1 when validation found faults that nobody acknowledged, or stopped a
    partition; 5 when a partition is stopped because it cannot be read.
    """
    from tidegate.pipeline.rounds.stops import exit_code_of, faults_of, new_faults
    from tidegate.pipeline.rounds.ways_out import app_status, list_apps

    with opened_backend(state) as backend, _log(log_url, command_config, command_properties) as log:
        names = list_apps(backend) if app is None else [app]
        found = [app_status(backend, name, log, orphans=True) for name in names]
    if not found:
        say(f"no app has state in {state}")
    columns = (
        "app",
        "round",
        "records",
        "lag",
        "committed",
        "run_by",
        "stopped",
        "faults",
        "losses",
        "orphans",
        "change",
    )
    rows = [
        {
            "app": each.app,
            "round": each.round,
            "records": each.records,
            "lag": each.lag_records,
            "committed": format_moment(each.committed_ms),
            "run_by": each.owner or None,
            "stopped": len(each.stopped),
            "faults": sum(faults_of(each.totals, each.topics).values()),
            "losses": len(each.losses),
            "orphans": each.orphans,
            "change": each.change or None,
            "generation": each.generation,
            "backlog_bytes": each.backlog_bytes,
            "orphan_bytes": each.orphan_bytes,
            "held": {flow: held.events for flow, held in each.held.items()},
            "positions": each.positions,
            "watermarks": each.watermarks,
            "totals": each.totals,
            "faults_by_kind": faults_of(each.totals, each.topics),
            "new_faults": new_faults(each.totals, each.topics),
        }
        for each in found
    ]
    print_rows(rows, format=format, columns=columns)
    for one in found:
        for flow, held in one.held.items():
            waited = f", until {one.topics[flow]}-{held.waits_for[1]} has come as far as they are"
            say(f"held back: {held.events:,} records of {flow}{waited if held.waits_for[1] >= 0 else ''}")
    for one in found:
        if one.orphans:
            say(
                f"orphans: {one.orphans:,} objects ({format_size(one.orphan_bytes or 0)}) of {one.app} that no commit "
                "needs; runs remove them when they are an hour old"
            )
    stopped = [each for one in found for each in one.stopped]
    for each in stopped:
        say(f"stopped ({each.reason}): {each.message}")
        say(f"  resume with: {each.command}")
    for one in found:
        if new_faults(one.totals, one.topics):
            kinds = ", ".join(
                f"{count:,} {kind}" for kind, count in faults_of(one.totals, one.topics).items()
            )
            say(f"{one.app}: faults: {kinds}; when they are known: tidegate app acknowledge {one.app}")
    return exit_code_of(stopped, sum(new_faults(one.totals, one.topics) for one in found))


@command.command("checkpoints")
@click.argument("app")
@state_option
@format_option()
@talk_options
def checkpoints(app: str, state: str, format: str) -> None:
    """Print the commits of APP that are kept: what `replay --to-round` and `as_of` reach."""
    from tidegate.pipeline.rounds.ways_out import app_commits

    with opened_backend(state) as backend:
        commits = app_commits(backend, app)
    rows = [
        {
            "round": each.round,
            "committed": format_moment(each.committed_ms),
            "records": each.records,
            "generation": each.generation,
            "change": each.change or None,
            "positions": each.positions,
        }
        for each in commits
    ]
    print_rows(
        rows, format=format, columns=("round", "committed", "records", "generation", "positions", "change")
    )


@command.command("reset")
@click.argument("app")
@state_option
@yes_option
@talk_options
def reset(app: str, state: str, yes: bool) -> None:
    """Forget all that APP knows: state, and where it was reading. Its topics stay as they are."""
    from tidegate.pipeline.rounds.ways_out import reset_app

    if not yes:
        click.confirm(f"Forget all state of app {app}?", abort=True, err=True)
    with opened_backend(state, read_only=False) as backend:
        _told(app, reset_app(backend, app))


@command.command("replay")
@click.argument("app")
@click.option("--to-round", type=click.IntRange(min=0), help="Back to a commit that is kept, state and all.")
@click.option(
    "--from-offset",
    "offsets",
    metavar="FLOW:P=OFFSET",
    multiple=True,
    help="With empty state of that partition from this offset on (repeatable; all partitions of a re-keyed flow).",
)
@state_option
@yes_option
@talk_options
def replay(app: str, to_round: int | None, offsets: tuple[str, ...], state: str, yes: bool) -> None:
    """Compute APP's results again: from the beginning of the log, from a commit, or from offsets.

    Results are sent again; in tables the later ones count.
    """
    from tidegate.pipeline.rounds.ways_out import replay_app

    if not yes:
        click.confirm(f"Send results of app {app} again?", abort=True, err=True)
    with opened_backend(state, read_only=False) as backend:
        _told(app, replay_app(backend, app, to_round=to_round, from_offsets=_offsets(offsets)))


@command.command("resume")
@click.argument("app")
@click.option("--partition", metavar="FLOW:P|TOPIC-P", required=True, help="The stopped partition.")
@click.option(
    "--skip-to",
    type=click.IntRange(min=0),
    help="Go on there, at or behind where it stopped; what is skipped is recorded for ever.",
)
@state_option
@talk_options
def resume(app: str, partition: str, skip_to: int | None, state: str) -> None:
    """Go on with a partition of APP that a fault stopped, where it stopped or behind it."""
    from tidegate.pipeline.rounds.ways_out import resume_partition

    with opened_backend(state, read_only=False) as backend:
        _told(app, resume_partition(backend, app, partition, skip_to=skip_to))


@command.command("acknowledge")
@click.argument("app")
@state_option
@talk_options
def acknowledge(app: str, state: str) -> None:
    """Say that the faults that APP found so far are known; run and status end with 0 again until a new one comes."""
    from tidegate.pipeline.rounds.ways_out import acknowledge_faults

    with opened_backend(state, read_only=False) as backend:
        _told(app, acknowledge_faults(backend, app))


@command.command("rebase")
@click.argument("app")
@click.option("--log", "log_url", metavar="URL", envvar="TIDEGATE_LOG", required=True, help="The app's log.")
@command_options
@state_option
@yes_option
@talk_options
def rebase(
    app: str,
    log_url: str,
    command_config: str | None,
    command_properties: dict[str, str],
    state: str,
    yes: bool,
) -> None:
    """Let APP go on where its output topics end now, after something else wrote into them."""
    from tidegate.pipeline.rounds.ways_out import rebase_outputs

    if not yes:
        click.confirm(f"Let app {app} write behind records that are not its own?", abort=True, err=True)
    with (
        opened_backend(state, read_only=False) as backend,
        _log(log_url, command_config, command_properties) as log,
    ):
        _told(app, rebase_outputs(backend, app, log))


@contextmanager
def _log(url: str | None, command_config: str | None, client: dict[str, str]) -> Iterator[Any]:
    from tidegate.cli.options import opened

    if url is None:
        yield None
        return
    with opened(url, command_config, client, read_only=True) as log:
        yield log


def _offsets(given: tuple[str, ...]) -> dict[str, dict[int, int]] | None:
    found: dict[str, dict[int, int]] = {}
    for each in given:
        place, _, offset = each.partition("=")
        flow, _, number = place.rpartition(":")
        if not flow or not number.isdigit() or not offset.isdigit():
            raise click.UsageError(
                f"--from-offset {each}: say FLOW:PARTITION=OFFSET, like orders-per-minute:0=1200"
            )
        found.setdefault(flow, {})[int(number)] = int(offset)
    return found or None


def _told(app: str, made: CommitInfo) -> None:
    say(f"app {app}: {made.change}; commit {made.round}")
    print_object({"app": app, "round": made.round, "change": made.change}, format="jsonl")
