"""`tidegate demo --canary`: a real log is written, rolled, aged out, explained and damaged, in under a minute.

The workload is a canary that sends one record of about 150 bytes every 5 seconds into a topic with
`segment.bytes=16384` and `retention.ms=600000`. Time is simulated, the files are real: they stay in the
demo's folder for looking around. No JVM is started.

What is shown is computed, never typed in: the demo fails loudly when the log does not do what it says.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.cli.demo_stage import Stage, folder_sizes, quoted, run_verb
from tidegate.clock import ManualClock
from tidegate.durations import format_duration
from tidegate.errors import TidegateError

if TYPE_CHECKING:
    from tidegate.log.access.embedded import Log

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
    _farewell(folder, stage)


def _life_of_a_log(log_folder: Path, stage: Stage) -> None:
    """Write, roll, age out: 25 simulated minutes."""
    canary = Canary(log_folder)
    try:
        stage.step("A topic is created.")
        settings = " ".join(f"-X {key}={value}" for key, value in SETTINGS.items())
        stage.command(f"tidegate topic create {TOPIC} --log {quoted(log_folder)} {settings}")

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
        first = canary.first_offset()
        canary.show(stage, f"after {canary.time()}: marked .deleted. Readers start at offset {first} now:")
        canary.run_until_gone("*.log.deleted")
        canary.show(stage, f"after {canary.time()}: a minute later the files are off the disk:")
        canary.run_until(minutes=25)
    finally:
        canary.close()


def _look_inside(log_folder: Path, stage: Stage) -> None:
    segment = sorted((log_folder / f"{TOPIC}-0").glob("*.log"))[0]
    stage.step("Look inside: line for line what kafka-dump-log prints.")
    stage.answer(run_verb(stage, ["log", "dump", "--print-data-log", "--files", str(segment)]), most=6)
    index = segment.with_suffix(".index")
    stage.answer(run_verb(stage, ["log", "dump", "--files", str(index)]), most=6)


def _how_long(folder: Path, stage: Stage) -> None:
    stage.step("How long does a record really live?")
    workload = ["--record-bytes", "150", "--interval", "5s"]
    for key, value in SETTINGS.items():
        workload += ["-X", f"{key}={value}"]
    answer = json.loads(run_verb(stage, ["log", "lifetime", *workload, "--format", "json"], quiet=True))
    picture = folder / "lifetime.html"
    drawn = ["--picture", str(picture), "--format", "table"]
    stage.answer(run_verb(stage, ["log", "lifetime", *workload, *drawn]))
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
    stage.answer(run_verb(stage, ["verify", str(folder / "log"), "--format", "table"]))
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
    stage.answer(run_verb(stage, ["verify", str(damaged), "--format", "table"], expected=1))
    stage.say("Found, named, and the command ends with exit code 1: ready for a cron job.")


def _farewell(folder: Path, stage: Stage) -> None:
    log = quoted(folder / "log")
    stage.step("What to try next")
    for line in (
        f"tidegate topic describe {TOPIC} --log {log}",
        f"tidegate consume {TOPIC} --log {log} -n 3",
        f"tidegate log lifetime {TOPIC} --log {log}",
        "tidegate verify /var/lib/kafka/data        # any Kafka data folder, read-only",
        "tidegate doctor                            # what this machine has for Spark and Kafka",
    ):
        stage.command(line)
    stage.say("")
    stage.say(f"Everything of this demo is in {folder}; delete it when you like.")


class Canary:
    """The workload: a topic, a simulated clock, one record every 5 seconds, retention as a broker runs it."""

    def __init__(self, folder: Path) -> None:
        from tidegate.log.access.embedded import Log
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

    def run_until_file(self, pattern: str) -> None:
        self._run_until_found(pattern, present=True)

    def run_until_gone(self, pattern: str) -> None:
        self._run_until_found(pattern, present=False)

    def _run_until_found(self, pattern: str, *, present: bool) -> None:
        for _ in range(400):
            if any(self.folder.glob(pattern)) == present:
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

    def first_offset(self) -> int:
        return self.log.partition(TOPIC, 0).log_start_offset

    def show(self, stage: Stage, note: str) -> None:
        sizes = folder_sizes(self.folder)
        stage.listing(sizes, [name for name, size in sizes.items() if self._last.get(name) != size], note)
        self._last = sizes

    def close(self) -> None:
        self.log.close()
