"""The one live line of a run, its heartbeats where nobody watches, and the summary it ends with.

    shop  12.4 M records  2.1 M/s  lag 3.6 M (2s)  stream time 10:41:07  backlog ▰▰▱▱▱ 38%  memory ▰▱▱▱▱ 12%  2 faults

On a terminal the line is rewritten on stderr; elsewhere a line of JSON goes there every five seconds, with every
number. Bars are shares of the budgets.
"""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from tidegate.cli.output import LiveLine, bar, printable, say, short, to_json
from tidegate.durations import format_duration

if TYPE_CHECKING:
    from tidegate.pipeline.rounds.progress import Progress
    from tidegate.pipeline.rounds.run import Summary


class RunLine(LiveLine):
    """Shows how a run goes; give `show` to it as its progress callback."""

    def show(self, progress: Progress) -> None:
        """One look at the run."""
        self.tell(lambda: line(progress), lambda: dataclasses.asdict(progress))

    def end(self, summary: Summary) -> None:
        """What it came to; the summary says what stopped, with the way out."""
        self.clear()
        if not self._terminal:
            click.echo(to_json(_document(summary)))
            return
        say(str(summary))


def line(progress: Progress) -> str:
    """The live line."""
    parts = [
        printable(progress.app),
        f"{short(progress.records)} records",
        f"{short(progress.records_per_second)}/s",
        "caught up" if progress.caught_up else _lag(progress),
    ]
    if (time := _stream_time(progress)) is not None:
        parts.append(f"stream time {time}")
    if progress.backlog_limit_bytes:
        parts.append(f"backlog {bar(progress.backlog_bytes / progress.backlog_limit_bytes)}")
    if progress.memory_limit_bytes:
        parts.append(f"memory {bar(progress.memory_bytes / progress.memory_limit_bytes)}")
    faults = sum(progress.faults.values())
    parts.append(f"{faults:,} faults" if faults != 1 else "1 fault")
    if progress.stopped:
        parts.append(f"{len(progress.stopped)} stopped")
    return "  ".join(parts)


def _lag(progress: Progress) -> str:
    left = "" if progress.eta_s is None else f" ({format_duration(max(1, round(progress.eta_s)) * 1000)})"
    return f"lag {short(progress.lag_records)}{left}"


def _stream_time(progress: Progress) -> str | None:
    """How far the slowest partition has come."""
    times = [time for flow in progress.watermarks.values() for time in flow.values() if 0 <= time < 2**53]
    return None if not times else datetime.fromtimestamp(min(times) / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _document(summary: Summary) -> dict[str, Any]:
    return {**dataclasses.asdict(summary), "summary": str(summary)}
