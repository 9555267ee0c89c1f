"""What a screen shows, as a command line and as Python: to do the same by hand, in any folder. Pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec


class Copy(msgspec.Struct, frozen=True):
    """The same answer by hand."""

    cli: str
    python: str


def cli(
    verb: str,
    *words: str,
    log: Path | str | None = None,
    state: Path | str | None = None,
    **options: str | None,
) -> str:
    """A command line, quoted for a shell; options that are None are left out."""
    parts = [verb, *map(shlex.quote, words)]
    for name, value in options.items():
        if value is not None:
            parts += [f"--{name.strip('_').replace('_', '-')}", shlex.quote(value)]
    if log is not None:
        parts += ["--log", shlex.quote(str(log))]
    if state is not None:
        parts += ["--state", shlex.quote(str(state))]
    return " ".join(parts)


def copied(lines: Sequence[str], python: str) -> Copy:
    return Copy("\n".join(lines), python)


def log_python(log: Path | str, *lines: str) -> str:
    """Lines of Python with the log open."""
    inside = "\n".join(f"    {line}" for line in lines)
    if isinstance(log, str):
        opening = "import tidegate as tg\nfrom tidegate.log.access.connect import open_log"
        return f"{opening}\n\nwith open_log({log!r}) as log:\n{inside}"
    return f"import tidegate as tg\n\nwith tg.Log({str(log)!r}, read_only=True) as log:\n{inside}"


def state_python(state: Path | str, names: str, *lines: str) -> str:
    """Lines of Python with the state of apps open."""
    return "\n".join(
        (
            f"from tidegate.pipeline.rounds.ways_out import {names}",
            "from tidegate.storage import open_backend",
            "",
            f"backend = open_backend({str(state)!r}, read_only=True)",
            *lines,
        )
    )
