"""What the command line prints: data on stdout in the asked-for format, talk on stderr.

Rows are plain mappings; `print_rows` writes them as an aligned table, JSON, JSON lines or CSV. Verbosity obeys
`-q` and `-v`; colour appears on terminals only and never with `NO_COLOR`. `Progress` is one line that is
rewritten on a terminal, and a JSON heartbeat every five seconds elsewhere.

O1  nothing in a record drives the terminal: control characters, terminal codes and direction marks are shown as
    escapes in every format. What writes record bytes as they are does so into pipes and files only (`TerminalBytes`).
O2  the user and the password of a URL are never printed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, BinaryIO, Final, Self, TextIO

import click

from tidegate.clock import Clock, SystemClock
from tidegate.durations import format_duration, format_size
from tidegate.errors import without_credentials
from tidegate.kernels.compile_progress import CompileProgress

_DOUBTFUL: Final = re.compile(r"[^ -~\n\t]")
_HEARTBEAT_MS = 5000
_REDRAW_MS = 100
_BAR_STEPS = 5


class Verbosity:
    """How much is said: 0 errors only, 1 as usual, 2 with details."""

    level = 1


def print_rows(
    rows: Iterable[Mapping[str, Any]],
    *,
    format: str,
    columns: Sequence[str],
    stream: TextIO | None = None,
) -> None:
    """Rows as `table`, `json`, `jsonl` or `csv`. `columns` orders the table and CSV; JSON prints all."""
    out = stream if stream is not None else sys.stdout
    if format == "jsonl":
        for row in rows:
            out.write(to_json(row) + "\n")
    elif format == "json":
        out.write(to_json(list(rows), indent=2) + "\n")
    elif format == "csv":
        import csv

        writer = csv.writer(out)
        writer.writerow(columns)
        for row in rows:
            writer.writerow(["" if row.get(name) is None else _cell(row.get(name)) for name in columns])
    else:
        _print_table(list(rows), columns, out)


def print_object(fields: Mapping[str, Any], *, format: str, stream: TextIO | None = None) -> None:
    """Print one thing: `NAME  value` lines as a table, or one JSON object."""
    out = stream if stream is not None else sys.stdout
    if format in ("json", "jsonl"):
        out.write(to_json(fields, indent=2 if format == "json" else None) + "\n")
    elif format == "csv":
        print_rows([fields], format="csv", columns=list(fields), stream=out)
    else:
        width = max((len(name) for name in fields), default=0)
        for name, value in fields.items():
            out.write(f"{_bold(name.upper().ljust(width), out)}  {_cell(value)}\n")


def to_json(value: Any, *, indent: int | None = None) -> str:
    """JSON, on one line unless it is indented; bytes become text, or `{"base64": …}` where they are not UTF-8."""
    return visible(json.dumps(_plain(value), indent=indent, ensure_ascii=False))


def visible(text: str) -> str:
    """The text with all that cannot be seen as JSON's `\\uXXXX`; line ends and tabs stay. JSON stays the same (O1)."""
    return _DOUBTFUL.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1]


class TerminalBytes:
    """A terminal as a file for bytes, which shows what cannot be seen as escapes (O1)."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def write(self, data: bytes) -> int:
        text = bytes(data).decode("utf-8", "backslashreplace").replace("\r\n", "\n")
        self._out.write(visible(text).encode("utf-8", "backslashreplace"))
        return len(data)

    def flush(self) -> None:
        self._out.flush()


class TerminalText:
    """The same for text."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> int:
        return self._out.write(visible(text))

    def flush(self) -> None:
        self._out.flush()


def echo(text: str = "") -> None:
    """One line, or several, of what was asked for; `visible`, and without credentials (O1, O2)."""
    click.echo(visible(without_credentials(text)))


def printable(value: bytes | str | None) -> str:
    """Record bytes for a person's terminal: text where it is text, escapes where it is not; null is empty."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else value.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def say(message: str) -> None:
    """Talk, unless `-q`."""
    _tell(1, message)


def detail(message: str) -> None:
    """Talk that only `-v` shows."""
    _tell(2, message)


def warn(message: str) -> None:
    """Something to notice, unless `-q`."""
    _tell(1, message, _colour("warning:", "yellow") + " ")


def error_line(message: str, *, kafka_name: str | None = None) -> None:
    """The error an unsuccessful run ends with: one line, or the lines of a message that has several."""
    named = f" [{kafka_name}]" if kafka_name and kafka_name not in message else ""
    told = "\n".join(map(printable, without_credentials(message).split("\n")))
    _clear_line()
    click.echo(f"{_colour('error:', 'red')} {told}{named}", err=True)


class WarningHandler(logging.Handler):
    """Warnings of the library as lines of talk; `-q` sets its level above them."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = printable(record.getMessage())
            _clear_line()
            click.echo(f"{_colour(f'{record.levelname.lower()}:', 'yellow')} {message}", err=True)
        except Exception:  # noqa: BLE001 - as every handler: a line that cannot be written must not end the work
            self.handleError(record)


WARNINGS = WarningHandler(logging.WARNING)


class LiveLine:
    """A status line on stderr: rewritten in place on a terminal, a line of JSON every five seconds elsewhere."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self.is_terminal = sys.stderr.isatty()
        self._quiet = is_quiet()  # read here: `tell` may run on a thread that has no click context
        self._told_ms: int | None = None
        self._drawn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def tell(
        self, text: Callable[[], str], document: Callable[[], dict[str, Any]], *, at_once: bool = False
    ) -> None:
        """Show the current state; does nothing within the pause after the last one, unless `at_once`."""
        now_ms = self._clock.monotonic_ms()
        pause_ms = _REDRAW_MS if self.is_terminal else _HEARTBEAT_MS
        recent = self._told_ms is not None and now_ms - self._told_ms < pause_ms
        if self._quiet or (recent and not at_once):
            return
        self._told_ms = now_ms
        if not self.is_terminal:
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


class Progress(LiveLine):
    """Progress of long work: `with Progress("scanning", total=bytes, unit="bytes") as progress`.

    `advance` is cheap (it reads the clock and usually returns), but is meant per batch, not per record.
    """

    def __init__(
        self, label: str, *, total: int | None = None, unit: str = "records", clock: Clock | None = None
    ) -> None:
        super().__init__(clock)
        self.label = label
        self.total = total
        self.unit = unit
        self.done = 0
        self.counts: dict[str, int] = {}
        self._started_ms = self._told_ms = self._clock.monotonic_ms()

    @property
    def elapsed_ms(self) -> int:
        return self._clock.monotonic_ms() - self._started_ms

    def advance(self, done: int, **counts: int) -> None:
        """Add `done` units; named counts (faults=1, records=500) are summed and shown."""
        self.done += done
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        self.tell(self._line, self._document)

    def _document(self) -> dict[str, Any]:
        elapsed_ms, share = self.elapsed_ms, self._share()
        return {
            "doing": self.label,
            "done": self.done,
            "total": self.total,
            "unit": self.unit,
            "percent": None if share is None else round(share * 100),
            "left_ms": self._left_ms(elapsed_ms),
            **self.counts,
            "elapsed_ms": elapsed_ms,
        }

    def _share(self) -> float | None:
        return min(1.0, self.done / self.total) if self.total else None

    def _left_ms(self, elapsed_ms: int) -> int | None:
        """How long the rest takes at the pace so far; None while nothing can be said."""
        share = self._share()
        return None if not share or share >= 1 else round(elapsed_ms * (1 - share) / share)

    def _line(self) -> str:
        elapsed_ms = self.elapsed_ms
        seconds = max(elapsed_ms, 1) / 1000
        amount = format_size if self.unit == "bytes" else "{:,}".format
        parts = [f"{self.label}: {amount(self.done)}"]
        share, left_ms = self._share(), self._left_ms(elapsed_ms)
        if share is not None and self.total is not None:
            parts[0] += f" of {amount(self.total)} ({share:.0%})"
        if left_ms is not None:
            parts.append(f"{format_duration(max(1, round(left_ms / 1000)) * 1000)} left")
        parts.insert(1, f"{amount(round(self.done / seconds))}/s")
        parts += [f"{count:,} {name}" for name, count in self.counts.items()]
        return ", ".join(parts)


def bar(share: float) -> str:
    """A share as five steps and a percentage: `▰▰▱▱▱ 38%`."""
    full = min(_BAR_STEPS, max(0, round(share * _BAR_STEPS)))
    return f"{'▰' * full}{'▱' * (_BAR_STEPS - full)} {share:.0%}"


def short(number: float) -> str:
    """A number with three digits: `950`, `12.4 k`, `3.1 M`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


class CompileReporter:
    """Tell a person who waits for kernels to be compiled: at once that they are, then how far it is.

    Called in whichever thread compiles; so `talk` is handed in, and not looked up in the context of the thread.
    """

    def __init__(self, talk: Verbosity, *, clock: Clock | None = None) -> None:
        self._talk = talk
        self._clock = clock or SystemClock()
        self._started_ms: int | None = None
        self._told_ms = 0

    def __call__(self, progress: CompileProgress) -> None:
        if self._talk.level < 1:
            return
        now_ms = self._clock.monotonic_ms()
        if self._started_ms is None:
            self._started_ms = self._told_ms = now_ms
            _clear_line()
            click.echo(f"compiling kernels for this machine ({progress.kept})", err=True)
        if sys.stderr.isatty():
            _clear_line()
            if progress.kernel:
                sys.stderr.write(self._line(progress, now_ms - self._started_ms))
            sys.stderr.flush()
        elif now_ms - self._told_ms >= _HEARTBEAT_MS:
            self._told_ms = now_ms
            click.echo(self._line(progress, now_ms - self._started_ms), err=True)

    def _line(self, progress: CompileProgress, elapsed_ms: int) -> str:
        return (
            f"compiling kernels: {progress.compiled} ready of at most {progress.at_most}, "
            f"{elapsed_ms // 1000} s{progress.kernel and ', now '}{progress.kernel}"
        )


def _print_table(rows: list[Mapping[str, Any]], columns: Sequence[str], out: TextIO) -> None:
    cells = [[_cell(row.get(name)) for name in columns] for row in rows]
    right = [
        all(isinstance(row.get(name), int | float | None) for row in rows) and bool(rows) for name in columns
    ]
    heads = [name.replace("_", " ").upper() for name in columns]
    widths = [max(len(head), *(len(line[i]) for line in cells), 0) for i, head in enumerate(heads)]
    out.write(_bold(_aligned(heads, widths, right), out) + "\n")
    for line in cells:
        out.write(_aligned(line, widths, right) + "\n")


def _aligned(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = [
        cell.rjust(width) if flush_right else cell.ljust(width)
        for cell, width, flush_right in zip(cells, widths, right, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes | str):
        return printable(value)
    if isinstance(value, Mapping | list | tuple):
        return to_json(value)
    return str(value)


def _plain(value: Any) -> Any:
    """Only what JSON has; any key is text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        from base64 import b64encode

        return {"base64": b64encode(value).decode("ascii")}


def is_quiet() -> bool:
    """Whether `-q` was given."""
    return _level() < 1


def is_verbose() -> bool:
    """Whether `-v` was given."""
    return _level() > 1


def _level() -> int:
    context = click.get_current_context(silent=True)
    talk = None if context is None else context.find_root().obj
    return talk.level if isinstance(talk, Verbosity) else 1


def _tell(level: int, message: str, mark: str = "") -> None:
    if _level() >= level:
        _clear_line()
        click.echo(mark + visible(without_credentials(message)), err=True)


def is_colourful(stream: TextIO) -> bool:
    """Whether it is a terminal, and nobody asked for no colours."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _colour(text: str, colour: str) -> str:
    return click.style(text, fg=colour, bold=True) if is_colourful(sys.stderr) else text


def _bold(text: str, out: TextIO) -> str:
    return click.style(text, bold=True) if is_colourful(out) else text


def _clear_line() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
