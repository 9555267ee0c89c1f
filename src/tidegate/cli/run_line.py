"""The one live line of a run, its heartbeats where nobody watches, and the summary it ends with.

    shop  12.4 M records  2.1 M/s  lag 3.6 M (2s)  stream time 10:41:07  backlog ▰▰▱▱▱ 38%  memory ▰▱▱▱▱ 12%  2 faults

On a terminal the line is rewritten on stderr; elsewhere a line of JSON goes there every five seconds, with every
number. Bars are shares of the budgets.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click

from tidegate.cli.output import is_quiet, printable, say, to_json
from tidegate.clock import Clock, SystemClock
from tidegate.durations import format_duration

if TYPE_CHECKING:
    from tidegate.pipeline.rounds.progress import Progress
    from tidegate.pipeline.rounds.run import Summary

REDRAW_MS, HEARTBEAT_MS = 100, 5_000
BAR = 5


class LiveLine:
    """A line on stderr that is written anew on a terminal; elsewhere, now and then, a line of JSON."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._terminal = sys.stderr.isatty()
        self._quiet = (
            is_quiet()
        )  # asked here: `tell` is called on the run's own thread, which has no command line
        self._told_ms: int | None = None
        self._drawn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def tell(
        self, text: Callable[[], str], document: Callable[[], dict[str, Any]], *, at_once: bool = False
    ) -> None:
        """One look; most calls return at once, unless something new is to be told."""
        now_ms = self._clock.monotonic_ms()
        pause = REDRAW_MS if self._terminal else HEARTBEAT_MS
        recent = self._told_ms is not None and now_ms - self._told_ms < pause
        if self._quiet or (recent and not at_once):
            return
        self._told_ms = now_ms
        if not self._terminal:
            click.echo(to_json(document()), err=True)
            return
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\x1b[K{text()[:width]}")
        sys.stderr.flush()
        self._drawn = True

    def clear(self) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._drawn = False


class RunLine(LiveLine):
    """Shows how a run goes; give `show` to it as its progress callback."""

    def __init__(self, name: str, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self._name = name

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


def short(number: float) -> str:
    """`950`, `12.4 k`, `3.1 M`: three digits say enough."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def bar(share: float) -> str:
    """Five steps and the per cent."""
    full = min(BAR, max(0, round(share * BAR)))
    return f"{'▰' * full}{'▱' * (BAR - full)} {share:.0%}"


def _document(summary: Summary) -> dict[str, Any]:
    return {**dataclasses.asdict(summary), "summary": str(summary)}
