"""How the demo speaks: numbered steps, the command to type oneself, what it answers, and folder listings.

Plain text in a pipe or with `NO_COLOR`; on a terminal colours and rules by rich, imported only there.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tidegate.errors import TidegateError

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100


class Stage:
    """Prints the play."""

    def __init__(self) -> None:
        self._console = _console()
        self._steps = 0

    def title(self, text: str) -> None:
        if self._console is None:
            click.echo(f"{text}\n{'=' * len(text)}")
        else:
            self._console.rule(f"[bold]{text}")

    def step(self, title: str, *sentences: str) -> None:
        """A numbered step and what is to be seen in it."""
        self._steps += 1
        if self._console is None:
            click.echo(f"\n{self._steps}. {title}")
        else:
            self._console.print(f"\n[bold cyan]{self._steps}. {title}[/]", highlight=False)
        for sentence in sentences:
            self.say(sentence)

    def say(self, text: str) -> None:
        for line in _wrapped(text):
            click.echo(f"   {line}")

    def command(self, text: str) -> None:
        """What to type to do the same."""
        if self._console is None:
            click.echo(f"\n   $ {text}")
        else:
            from rich.text import Text

            self._console.print(Text(f"\n   $ {text}", style="bold green"), soft_wrap=True)

    def answer(self, text: str, *, most: int | None = None) -> None:
        """What the command printed, or its first lines."""
        lines = text.rstrip("\n").splitlines()
        shown = lines if most is None else lines[:most]
        for line in shown:
            if self._console is None:
                click.echo(f"   {line}")
            else:
                from rich.text import Text

                self._console.print(Text(f"   {line}", style="dim"), soft_wrap=True)
        if len(shown) < len(lines):
            click.echo(f"   … {len(lines) - len(shown)} more lines")

    def listing(self, sizes: Mapping[str, int], changed: Iterable[str] = (), note: str = "") -> None:
        """A folder: bytes and name; what is new or different since the last listing is marked."""
        marked = set(changed)
        click.echo()
        if note:
            self.say(note)
        for name, size in sizes.items():
            marks = "*" if name in marked else " "
            line = f"   {marks} {size:>12,}  {name}"
            if self._console is None:
                click.echo(line)
            else:
                style = "red" if name.endswith(".deleted") else "bold" if name in marked else "dim"
                self._console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def folder_sizes(folder: Path) -> dict[str, int]:
    """The files of a folder that belong to Kafka's format, with their sizes."""
    return {
        path.name: path.stat().st_size
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.startswith("tidegate.") and not path.name.endswith(".tmp")
    }


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, WIDTH - 3) or [""]


def _console() -> Console | None:
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return None
    from rich.console import Console

    return Console()


def run_verb(stage: Stage, arguments: Sequence[str], *, quiet: bool = False, expected: int = 0) -> str:
    """Show a command, run it in this process and give what it printed."""
    from tidegate.cli.main import run

    if not quiet:
        stage.command(" ".join(["tidegate", *map(quoted, arguments)]))
    printed, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told):
        code = run(list(arguments))
    if code != expected:
        raise TidegateError(f"{' '.join(arguments)} ended with {code}, not {expected}: {told.getvalue()}")
    return printed.getvalue()


def quoted(text: object) -> str:
    """As a shell takes it."""
    return shlex.quote(str(text))
