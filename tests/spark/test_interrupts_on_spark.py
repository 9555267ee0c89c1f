"""Ctrl-C while a Spark session runs rounds: the call ends, no job goes on, the app is free, and the same process and
session run it again with exact results. The local form is in `tests/pipeline/test_interrupts.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.pipeline.checkpoint import Records
from tidegate.storage import open_backend
from tidegate.tables.commits import read_lease

ROWS = 300
WAIT_S = 300
AT = 1_767_261_600_000
APP = """
import os, time
from pathlib import Path
import pyarrow as pa
import tidegate as tg

gate = Path({gate!r})

def make():
    place, schema = str(gate), pa.schema([("n", pa.int64())])

    def gated(batch):  # in here, so that it travels by value
        import time
        from pathlib import Path
        gate = Path(place)
        while batch.num_rows and gate.exists():
            gate.with_name("reached").touch()
            time.sleep(0.02)
        return batch.select(["n"])

    app = tg.App("shop", data={data!r})
    stream = app.stream("orders", value=tg.Json(n="int64")).map(gated, schema)
    stream.key_by("n", shards=2).window(tg.Tumbling("10s")).agg(n=tg.count()).to_table("per_window")
    return app

app = make()
"""
CELLS = """
import sys
import threading
import tidegate.spark
from shop import app, gate

def said(*words):
    print("said:", *words, flush=True)

def jobs():
    return list(spark.sparkContext.statusTracker().getActiveJobsIds())

def until_no_jobs():
    deadline = time.monotonic() + 300
    while jobs() and time.monotonic() < deadline:
        time.sleep(0.05)
    return jobs()

import time
spark = tidegate.spark.session("cells", master="local[2,4]")
spark.sparkContext.setLogLevel("OFF")
said("ready")
while True:
    try:
        cell = sys.stdin.readline()
    except KeyboardInterrupt:  # between two cells
        continue
    try:
        exec(compile(cell, "<cell>", "single"))
    except BaseException as error:
        said(type(error).__name__)
"""


def filled(folder: Path) -> Path:
    with tg.Log(folder / "log") as log:
        log.create_topic("orders", 2)
        log.writer("orders").write(
            pa.table(
                {
                    "key": [f"k{number % 7}" for number in range(ROWS)],
                    "value": [json.dumps({"n": number}) for number in range(ROWS)],
                    "timestamp": [AT + number for number in range(ROWS)],
                }
            )
        )
    (folder / "shop.py").write_text(APP.format(gate=str(folder / "gate"), data=str(folder)))
    (folder / "gate").touch()
    return folder


def owner(folder: Path) -> str:
    """Who has the app's lease; nobody is empty."""
    backend = open_backend(folder / "state")
    found = read_lease(backend, Records(backend, "shop").lease_name)
    assert found is not None
    return found[0].owner


def until(holds: Callable[[], bool], why: str, within_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, why
        time.sleep(0.02)


def started(folder: Path, arguments: list[str], **more: Any) -> subprocess.Popen[str]:
    sources = str(Path(tg.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{sources}{os.pathsep}{folder}"},
        text=True,
        **more,
    )


def is_reached(folder: Path) -> bool:
    """Whether a task waits at the gate now."""
    (folder / "reached").unlink(missing_ok=True)
    time.sleep(0.5)
    return (folder / "reached").exists()


class Cells:
    """A process that runs cells one after the other on one Spark session, as a notebook does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = started(
            folder, ["-c", CELLS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.until_said("ready")

    def begin(self, cell: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(cell + "\n")
        self.process.stdin.flush()

    def until_said(self, words: str) -> str:
        assert self.process.stdout is not None
        heard = []
        for line in self.process.stdout:
            heard.append(line)
            if line.startswith("said:"):
                assert words in line, "".join(heard)
                return line
        raise AssertionError(f"it never said {words!r}: {''.join(heard)}")

    def run(self, cell: str, words: str) -> None:
        self.begin(cell)
        self.until_said(words)

    def in_round(self, cell: str) -> None:
        """Run a cell until its round has reached the step that waits at the gate."""
        (self.folder / "gate").touch()
        (self.folder / "reached").unlink(missing_ok=True)
        self.begin(cell)
        until((self.folder / "reached").exists, "it is in its round")


@pytest.fixture
def cells(tmp_path: Path) -> Iterator[Cells]:
    made = Cells(filled(tmp_path))
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def test_a_cell_on_spark_can_be_interrupted_once_or_twice_and_run_again(cells: Cells) -> None:
    folder = cells.folder
    for interrupts in (1, 2):
        cells.in_round("app.run(spark)")
        for _ in range(interrupts):
            cells.process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        cells.until_said("KeyboardInterrupt")
        assert (folder / "gate").exists(), "it did not wait for its round, which never ends"
        assert owner(folder) == "", "the next one need not wait"
        cells.run("said(until_no_jobs())", "[]")
        until(lambda: not is_reached(folder), "Spark ends tasks of a cancelled job after 2 s")
    (folder / "gate").unlink()
    cells.run('said(app.run(spark, until="caught_up").records)', str(ROWS))
    cells.run("said(spark.range(10).count(), until_no_jobs())", "10 []")
    cells.run('said(sum(app.open_table("per_window").to_arrow()["n"].to_pylist()))', str(ROWS))


def test_a_run_in_the_background_is_given_up_with_its_job(cells: Cells) -> None:
    """A second run begins while the first one's round hangs; only the second one's results count."""
    folder = cells.folder
    cells.in_round("run = app.start(spark)")
    cells.run("run.give_up(); said(until_no_jobs())", "[]")
    assert owner(folder) == ""
    (folder / "gate").unlink()
    cells.run('said(app.run(spark, until="caught_up").records)', str(ROWS))
    cells.run('said(sum(app.open_table("per_window").to_arrow()["n"].to_pylist()))', str(ROWS))
    cells.run("said(type(run.error).__name__, run.is_running)", "FencedError False")


@pytest.mark.parametrize("interrupts", [1, 2])
def test_the_command_line_on_spark_is_interrupted(tmp_path: Path, interrupts: int) -> None:
    folder = filled(tmp_path)
    command = ["-m", "tidegate.cli.main", "run", "shop:app", "--engine", "spark", "--master", "local[2,4]"]
    process = started(folder, command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        until((folder / "reached").exists, "it is in its round")
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        heard = list[str]()
        for line in process.stderr:
            heard.append(line)
            if "once more to stop at once" in line:
                break
        if interrupts == 1:  # the round comes to its end, and counts
            (folder / "gate").unlink()
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130, heard
    finally:
        process.kill()
        process.wait()
    assert owner(folder) == ""
    (folder / "gate").unlink(missing_ok=True)
    left = ROWS if interrupts == 2 else 0
    again = ["-m", "tidegate.cli.main", "run", "shop:app", "--engine", "local", "--once"]
    ended = started(folder, again, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    told = ended.communicate(timeout=WAIT_S)[0]
    assert ended.returncode == 0 and f"{left} records" in told, told
    with open_table(folder) as table:
        assert sum(table.to_arrow()["n"].to_pylist()) == ROWS


def open_table(folder: Path) -> Any:
    names: dict[str, Any] = {}
    exec(compile((folder / "shop.py").read_text(), "shop.py", "exec"), names)
    return names["app"].open_table("per_window")
