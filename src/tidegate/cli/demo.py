"""`tidegate demo`: every step is shown with the command that does the same, and checked while it runs.

Without `--canary` the demo is `demo_shop`. With it: a canary sends one record of about 150 bytes every 5 seconds into a
topic with `segment.bytes=16384` and `retention.ms=600000`; its log is written, rolled, aged out, explained and damaged.
Time is simulated, the files are real and stay in the demo's folder. No JVM is started.

Output is plain text in a pipe or with `NO_COLOR`, and coloured by rich on a terminal.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tidegate.cli.options import Command
from tidegate.cli.output import is_colourful
from tidegate.clock import ManualClock
from tidegate.durations import format_duration
from tidegate.errors import InvalidError, TidegateError

if TYPE_CHECKING:
    from tidegate.log.log import Log


# -- printing --------------------------------------------------------------------------------------

WIDTH = 100


class Stage:
    """Prints the demo: in colour on a terminal, as plain text elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(
            color_system="auto" if is_colourful(sys.stdout) else None,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._steps = 0

    def title(self, text: str) -> None:
        self._print(f"{text}\n{'=' * len(text)}", "bold")

    def step(self, title: str, *sentences: str) -> None:
        """A numbered step and what is to be seen in it."""
        self._steps += 1
        self._print(f"\n{self._steps}. {title}", "bold cyan")
        for sentence in sentences:
            self.say(sentence)

    def say(self, text: str) -> None:
        for line in textwrap.wrap(text, WIDTH - 3) or [""]:
            self._print(f"   {line}")

    def command(self, text: str) -> None:
        """What to type to do the same."""
        self._print(f"\n   $ {text}", "bold green")

    def answer(self, text: str, *, most: int | None = None) -> None:
        """What the command printed, or its first lines."""
        lines = text.rstrip("\n").splitlines()
        for line in lines[:most]:
            self._print(f"   {line}", "dim")
        if most is not None and most < len(lines):
            self._print(f"   … {len(lines) - most} more lines")

    def listing(self, sizes: Mapping[str, int], changed: Iterable[str] = (), note: str = "") -> None:
        """A folder: bytes and name; what is new or different since the last listing is marked."""
        marked = set(changed)
        self._print("")
        if note:
            self.say(note)
        for name, size in sizes.items():
            style = "red" if name.endswith(".deleted") else "bold" if name in marked else "dim"
            self._print(f"   {'*' if name in marked else ' '} {size:>12,}  {name}", style)

    def farewell(self, folder: Path, *commands: str) -> None:
        """The last step: what to try next, and what is left behind."""
        self.step("What to try next")
        for command in commands:
            self.command(command)
        self.say("")
        self.say(f"Everything of this demo is in {folder}; delete it when you like.")

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, soft_wrap=True)

    def run(self, arguments: Sequence[str], *, quiet: bool = False, expected: int = 0) -> str:
        """Show a command, run it in this process and return what it printed."""
        from tidegate.cli.main import run

        if not quiet:
            self.command(shlex.join(["tidegate", *arguments]))
        printed, told = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told):
            code = run(list(arguments))
        if code != expected:
            raise TidegateError(f"{' '.join(arguments)} ended with {code}, not {expected}: {told.getvalue()}")
        return printed.getvalue()


def folder_sizes(folder: Path) -> dict[str, int]:
    """The files of a folder that belong to Kafka's format, with their sizes."""
    return {
        path.name: path.stat().st_size
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.startswith("tidegate.") and not path.name.endswith(".tmp")
    }


# -- the canary ------------------------------------------------------------------------------------

TOPIC = "canary"
SETTINGS = {"retention.ms": "600000", "segment.bytes": "16384"}
EVERY_MS = 5000
START_MS = 1_767_225_600_000  # 2026-01-01T00:00Z


def play(folder: Path, stage: Stage) -> None:
    """All scenes, in order."""
    log_folder = folder / "log"
    stage.title("Tidegate: Kafka's partition log in a folder")
    stage.say(
        f"A canary sends one small record every {EVERY_MS // 1000} seconds. Its topic keeps records for "
        f"10 minutes and log segments of 16 KiB. Time is simulated here; the files are real."
    )
    _life_of_a_log(log_folder, stage)
    _look_inside(log_folder, stage)
    _how_long(folder, stage)
    _check_and_damage(folder, stage)
    log = shlex.quote(str(log_folder))
    stage.farewell(
        folder,
        f"tidegate topic describe {TOPIC} --log {log}",
        f"tidegate consume {TOPIC} --log {log} -n 3",
        f"tidegate log lifetime {TOPIC} --log {log}",
        "tidegate verify /var/lib/kafka/data        # any Kafka data folder, read-only",
        "tidegate doctor                            # what this machine has for Spark and Kafka",
    )


def _life_of_a_log(log_folder: Path, stage: Stage) -> None:
    """Write, roll, age out: 25 simulated minutes."""
    canary = Canary(log_folder)
    try:
        stage.step("A topic is created.")
        settings = " ".join(f"-X {key}={value}" for key, value in SETTINGS.items())
        stage.command(f"tidegate topic create {TOPIC} --log {shlex.quote(str(log_folder))} {settings}")

        stage.step("Records arrive, and a file grows.")
        canary.run_until(minutes=2)
        canary.show(stage, f"after 2 minutes: {canary.sent} records in the active log segment:")
        canary.run_until(minutes=9)
        canary.show(stage, f"after 9 minutes: {canary.sent} records, still one log segment:")

        stage.step(
            "A record no longer fits, and the log rolls.",
            "The log segment is closed for good, its indexes are cut to their size, and a new one is begun.",
        )
        canary.run_until_file("*109.log")
        canary.show(
            stage,
            f"after {canary.time()}: records 0 to 108 are closed in 16,314 bytes; the next log segment is "
            f"named after its first record, 109:",
        )

        stage.step(
            "The first log segment outlives its 10 minutes.",
            "Retention counts from a log segment's newest record, and looks every 5 minutes.",
        )
        canary.run_until(minutes=20)
        canary.show(stage, "after 20 minutes: record 0 is twice as old as retention allows, and readable:")
        canary.run_until_file("*0.log.deleted")
        first = canary.log.partition(TOPIC, 0).log_start_offset
        canary.show(stage, f"after {canary.time()}: marked .deleted. Readers start at offset {first} now:")
        canary.run_until_file("*.log.deleted", is_there=False)
        canary.show(stage, f"after {canary.time()}: a minute later the files are off the disk:")
        canary.run_until(minutes=25)
    finally:
        canary.log.close()


def _look_inside(log_folder: Path, stage: Stage) -> None:
    segment = sorted((log_folder / f"{TOPIC}-0").glob("*.log"))[0]
    stage.step("Look inside: line for line what kafka-dump-log prints.")
    stage.answer(stage.run(["log", "dump", "--print-data-log", "--files", str(segment)]), most=6)
    index = segment.with_suffix(".index")
    stage.answer(stage.run(["log", "dump", "--files", str(index)]), most=6)


def _how_long(folder: Path, stage: Stage) -> None:
    stage.step("How long does a record really live?")
    workload = ["--record-bytes", "150", "--interval", "5s"]
    for key, value in SETTINGS.items():
        workload += ["-X", f"{key}={value}"]
    answer = json.loads(stage.run(["log", "lifetime", *workload, "--format", "json"], quiet=True))
    picture = folder / "lifetime.html"
    drawn = ["--picture", str(picture), "--format", "table"]
    stage.answer(stage.run(["log", "lifetime", *workload, *drawn]))
    least, readable, on_disk = (
        format_duration(answer[key]) for key in ("guaranteed_ms", "visible_max_ms", "disk_max_ms")
    )
    stage.say(
        f"Retention says 10 minutes. A record is kept for {least} at least; the first of a log segment is "
        f"readable for up to {readable} and on disk for up to {on_disk}."
    )
    if picture.exists():
        stage.say(f"The same as a picture: {picture}")


def _check_and_damage(folder: Path, stage: Stage) -> None:
    stage.step("Check everything: checksums, order, indexes, producers.")
    stage.answer(stage.run(["verify", str(folder / "log"), "--format", "table"]))
    damaged = folder / "damaged"
    shutil.copytree(folder / "log", damaged)
    segment = sorted((damaged / f"{TOPIC}-0").glob("*.log"))[0]
    position = segment.stat().st_size // 2
    with segment.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0b0001_0000]))
    stage.step(f"One bit flips in a copy, at byte {position:,} of {segment.name}.")
    stage.answer(stage.run(["verify", str(damaged), "--format", "table"], expected=1))
    stage.say("Found, named, and the command ends with exit code 1: ready for a cron job.")


class Canary:
    """The workload: a topic, a simulated clock, one record every 5 seconds, retention as a broker runs it."""

    def __init__(self, folder: Path) -> None:
        from tidegate.log.log import Log
        from tidegate.randomness import SeededRandomness
        from tidegate.scheduling import ManualScheduler

        self.clock = ManualClock(START_MS)
        self.scheduler = ManualScheduler(self.clock)
        parts = {
            "clock": self.clock,
            "scheduler": self.scheduler,
            "randomness": SeededRandomness(0),
            "durability": "os",
        }
        with Log(folder, **parts) as log:  # type: ignore[arg-type]
            log.create_topic(TOPIC, config=SETTINGS)
        self.log: Log = Log(folder, maintenance=True, **parts)  # type: ignore[arg-type]
        self.writer = self.log.writer(TOPIC, producer_id=1)  # numbered batches: `verify` can prove more
        self.folder = folder / f"{TOPIC}-0"
        self.sent = 0
        self._last: dict[str, int] = {}

    def run_until(self, *, minutes: int) -> None:
        while self.clock.now_ms() < START_MS + minutes * 60_000:
            self._tick()

    def run_until_file(self, pattern: str, *, is_there: bool = True) -> None:
        for _ in range(400):
            if any(self.folder.glob(pattern)) == is_there:
                return
            self._tick()
        raise TidegateError(f"{self.folder}: waited half an hour of simulated time for {pattern}")

    def _tick(self) -> None:
        """Send one record, then let 5 seconds pass; background work runs when it is due."""
        import pyarrow as pa

        now_ms = self.clock.now_ms()
        value = (
            f'{{"producerId":"strimzi-canary-client","messageId":{1 + 3 * self.sent},"timestamp":{now_ms}}}'
        )
        self.writer.write(pa.table({"value": [value], "timestamp": pa.array([now_ms], pa.int64())}))
        self.sent += 1
        for _ in range(EVERY_MS // 1000):
            self.clock.advance("1s")
            self.scheduler.run_due()

    def time(self) -> str:
        return format_duration(self.clock.now_ms() - START_MS)

    def show(self, stage: Stage, note: str) -> None:
        sizes = folder_sizes(self.folder)
        stage.listing(sizes, [name for name, size in sizes.items() if self._last.get(name) != size], note)
        self._last = sizes


# -- tidegate demo ---------------------------------------------------------------------------------


@click.command("demo", cls=Command)
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
        play(folder.absolute(), Stage())
    else:
        from tidegate.cli.demo_shop import Play

        Play(folder.absolute(), Stage(), engine).run()
    if shows:
        from tidegate.cli import ui

        data = folder.absolute() if canary else folder.absolute() / "data"
        click.get_current_context().invoke(ui.command, data=data, opens=True)
    return 0
