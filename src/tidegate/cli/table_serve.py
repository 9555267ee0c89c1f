"""`tidegate table serve`: be one replica of a hybrid table, until told to stop."""

from __future__ import annotations

import signal
import threading
from typing import Any

import click

from tidegate.cli.options import DURATION, Verb, command_options, log_option, talk_options
from tidegate.cli.output import LiveLine, say, short
from tidegate.cli.state import state_option
from tidegate.errors import InvalidError

REDRAW_SECONDS = 0.5


@click.command("serve", cls=Verb)
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
@talk_options
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
    from tidegate.tables.hybrid_table import hybrid_table

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
    from tidegate.clock import SystemClock
    from tidegate.tables.replicas.status import described

    clock = SystemClock()
    stop_ms = None if seconds is None else clock.monotonic_ms() + int(seconds * 1000)
    with LiveLine() as live:
        while not ends.wait(REDRAW_SECONDS if stop_ms is None else min(REDRAW_SECONDS, 0.1)):
            table.check()
            if stop_ms is not None and clock.monotonic_ms() >= stop_ms:
                break
            live.tell(lambda: line(table.status()), lambda: described(table.status()))


def _numbers(written: str | None) -> list[int] | None:
    if written is None:
        return None
    try:
        return [int(each) for each in written.split(",")]
    except ValueError:
        raise InvalidError(f"--partitions {written}: give numbers, as in 0,1") from None
