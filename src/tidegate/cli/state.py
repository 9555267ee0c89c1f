"""`tidegate state`: sign the files of a state, or remove their signatures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tidegate.cli.options import Group, dry_run_option, opened_backend, state_option, verbosity_options
from tidegate.cli.output import error_line, say
from tidegate.durations import format_size
from tidegate.errors import InvalidError

if TYPE_CHECKING:
    from tidegate.storage.backends.signed import SigningReport

_VARIABLES = "TIDEGATE_STATE_KEY or TIDEGATE_STATE_KEY_FILE"


@click.group("state", cls=Group)
def command() -> None:
    """Sign the files of a state, or take the signatures off.

    \b
    tidegate state sign --dry-run      what is not signed, and what was changed by somebody else
    tidegate state sign                sign what is there, also what an older key signed
    tidegate state unsign              go on without signatures

    Keys are in TIDEGATE_STATE_KEY or TIDEGATE_STATE_KEY_FILE. End what writes to the state first.
    """


@command.command("sign")
@state_option
@dry_run_option
@verbosity_options
def sign(state: str, dry_run: bool) -> int:
    """Sign every file of a state with the first key, and trust those that are not signed yet.

    Use it when a key is set for the first time, or replaced. Files whose signature is wrong are named and left as they
    are; then the exit code is 1. Killed anywhere, it can be run again.
    """
    from tidegate.storage import resign, state_keys

    keys = state_keys()
    if keys is None:
        raise InvalidError(f"no key is set: put one in {_VARIABLES} (`openssl rand -hex 32` makes one)")
    with opened_backend(state, read_only=dry_run) as backend:
        report = resign(backend, dry_run=dry_run)
    verb = "would be signed" if dry_run else "were signed"
    return _told(report, f"{verb} with key {keys.id}", f"{report.unchanged:,} were already")


@command.command("unsign")
@state_option
@dry_run_option
@verbosity_options
def unsign(state: str, dry_run: bool) -> int:
    """Take the signatures off every file of a state, without verifying them.

    For a state that is to be used without a key, or whose key is lost. It runs without a key.
    """
    from tidegate.storage import resign, state_keys

    keys = state_keys()
    if keys is not None:
        raise InvalidError(
            f"{keys.source} is set, and with a key files without a signature are not read; unset it first"
        )
    with opened_backend(state, read_only=dry_run) as backend:
        report = resign(backend, dry_run=dry_run)
    verb = "would have" if dry_run else "have"
    return _told(report, f"{verb} no signature any more", f"{report.unchanged:,} had none")


def _told(report: SigningReport, changed: str, unchanged: str) -> int:
    for error in report.refused:
        error_line(str(error), kafka_name=error.kafka_name)
    refused = f"; {len(report.refused):,} were left as they are" if report.refused else ""
    say(f"{report.changed:,} files ({format_size(report.changed_bytes)}) {changed}; {unchanged}{refused}")
    return 1 if report.refused else 0
