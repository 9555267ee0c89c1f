"""`tidegate demo`: from a log with planted faults to a windowed table, exactly once, each step with its command.

    1  a shop's orders are written, with faults planted in them (`demo_shop`)
    2  `verify` finds each of them, without a JVM
    3  a pipeline of eight lines runs on Spark (or, without Java, in this process)
    4  its table is read by another process
    5  the same pipeline is killed in the middle, twice, and goes on: nothing changed

What is shown is computed, never typed in: the demo fails loudly when something is not as it says.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from tidegate.cli.demo_stage import Stage
from tidegate.cli.options import Verb
from tidegate.errors import InvalidError


@click.command("demo", cls=Verb)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where to put everything; an empty or new folder. Without it: a new temporary one.",
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "spark", "local"]),
    default="auto",
    show_default=True,
    help="Where the pipeline runs; auto is Spark where it is installed.",
)
@click.option("--canary", is_flag=True, help="The other play: how long does a record really live?")
@click.option("--ui", "shows", is_flag=True, help="Then serve the page on the demo's data, until Ctrl-C.")
def command(folder: Path | None, engine: str, canary: bool, shows: bool) -> int:
    """See faults planted, found, and a pipeline that counts right all the same.

    Writes real files into a folder and shows for every step the command that does the same by hand. Takes about a
    minute; Spark is used where Java is there. With --canary it shows how a log is written, rolled and aged out.
    """
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="tidegate-demo-"))
    elif folder.exists() and any(folder.iterdir()):
        raise InvalidError(f"{folder} is not empty; choose a new folder with --folder")
    if canary:
        from tidegate.cli.demo_canary import play

        play(folder.absolute(), Stage())
    else:
        from tidegate.cli.demo_play import Play

        Play(folder.absolute(), Stage(), engine).run()
    if shows:
        from tidegate.cli.ui import serve_page

        serve_page(folder.absolute() / "data" if not canary else folder.absolute(), opens=True)
    return 0
