"""Signals: Ctrl-C in `app.run(…)` ends the run and frees the app; of a driver that is stopped (SIGSTOP) for longer than
its lease and a newcomer, one runs the app, whatever comes first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pytest

from tidegate.clock import SystemClock
from tidegate.errors import ConflictError, TidegateError
from tidegate.log.log import Log
from tidegate.pipeline.definition.app import App
from tidegate.pipeline.rounds.records import Records
from tidegate.pipeline.rounds.run import Run, Summary
from tidegate.storage import open_backend
from tidegate.tables.commits import Held, read_lease
from tidegate.tables.serdes.json import Json
from tidegate.windows.aggregates.definitions import count
from tidegate.windows.kinds import Tumbling

ROWS = 300
START = 1_700_000_000_000
WAIT_S = 300
PREPARE = """
import sys, threading
from pathlib import Path

sys.path.insert(0, {tests!r})
from test_interrupts import *

folder = Path({folder!r})
said = lambda *words: print("said:", *words, flush=True)
"""


class Gate:
    """A step of the user's that stops in the middle of a round."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.num_rows:  # it is tried without rows when it is defined
            self.reached.set()
            self.opened.wait(WAIT_S)
        return batch.select(["n"])


def shop(folder: Path, step: Any = None) -> App:
    app = App("shop", data=folder)
    stream = app.stream("orders", value=Json(n="int64"))
    if step is not None:
        stream = stream.map(step, pa.schema([("n", pa.int64())]))
    stream.window(Tumbling("10s")).agg(n=count()).to_table("per_window")
    return app


def filled(folder: Path) -> Path:
    with Log(folder / "log") as log:
        log.create_topic("orders", 2)
        with log.writer("orders") as writer:
            numbers = range(ROWS)
            writer.write(
                pa.table(
                    {
                        "key": [f"k{number % 7}" for number in numbers],
                        "value": [json.dumps({"n": number}) for number in numbers],
                        "timestamp": [START + number for number in numbers],
                    }
                )
            )
    return folder


def newest(folder: Path) -> int | None:
    return Records(open_backend(folder / "state"), "shop").newest()


def owner(folder: Path) -> str:
    """Who has the app's lease; nobody is empty."""
    backend = open_backend(folder / "state")
    found = read_lease(backend, Records(backend, "shop").lease_name)
    assert found is not None
    return found[0].owner


@pytest.fixture(autouse=True)
def before() -> Iterator[None]:
    """Threads that tests before this one left are not ours."""
    _BEFORE.update(threading.enumerate())
    yield
    _BEFORE.clear()


_BEFORE: set[threading.Thread] = set()


def still_running() -> list[str]:
    return [
        each.name
        for each in threading.enumerate()
        if each.name.startswith("tidegate") and each not in _BEFORE
    ]


def process_of(folder: Path, script: str) -> subprocess.Popen[str]:
    prepared = PREPARE.format(tests=str(Path(__file__).parent), folder=str(folder))
    return subprocess.Popen(
        [sys.executable, "-c", prepared + script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.PIPE,
        text=True,
    )


def until_said(output: IO[str], words: str) -> None:
    """Read on until the process said this."""
    heard = []
    for line in output:
        if line.startswith("said:") and words in line:
            return
        heard.append(line)
    raise AssertionError(f"it never said {words!r}: {''.join(heard)}")


INTERRUPTED = """
told = lambda progress: progress.caught_up and said("caught up")
try:
    shop(folder).run("local", trigger="10ms", progress=told)
except KeyboardInterrupt:
    said("interrupted", still_running(), repr(owner(folder)))
summary = shop(folder).run("local", until="caught_up")
said("again", summary.caught_up, summary.rounds)
"""


def test_ctrl_c_ends_the_run_and_the_process_can_run_the_app_again(tmp_path: Path) -> None:
    with process_of(filled(tmp_path), INTERRUPTED) as process:
        assert process.stdout is not None
        until_said(process.stdout, "caught up")
        process.send_signal(signal.SIGINT)
        until_said(process.stdout, "interrupted [] ''")
        until_said(process.stdout, "again True 0")
        assert process.wait(WAIT_S) == 0


def test_a_cell_that_was_interrupted_can_be_run_again(tmp_path: Path) -> None:
    """As in a notebook: cells are run one after the other by a process that outlives an interrupted one."""
    cells = """
told = lambda progress: progress.caught_up and said("caught up")
app = shop(folder)
said("ready")
for cell in sys.stdin:
    try:
        exec(compile(cell, "<cell>", "single"))
    except BaseException as error:
        said(type(error).__name__)
"""
    with process_of(filled(tmp_path), cells) as process:
        assert process.stdout is not None and process.stdin is not None
        until_said(process.stdout, "ready")
        for _ in range(3):
            process.stdin.write('app.run("local", trigger="10ms", progress=told)\n')
            process.stdin.flush()
            until_said(process.stdout, "caught up")
            process.send_signal(signal.SIGINT)
            until_said(process.stdout, "KeyboardInterrupt")
        process.stdin.write('said(still_running(), app.run("local", until="caught_up").caught_up)\n')
        process.stdin.close()
        until_said(process.stdout, "[] True")
        assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize("ends", ["by time", "by a second interrupt"])
def test_a_round_that_does_not_end_is_given_up_and_commits_nothing(tmp_path: Path, ends: str) -> None:
    """The interrupt is one that comes while the main thread waits, as signals do."""
    folder, gate = filled(tmp_path), Gate()
    app = shop(folder, gate)
    stop_within_ms = 100 if ends == "by time" else 1000 * WAIT_S
    with pytest.MonkeyPatch.context() as patched:
        interrupts = [1, 2] if ends == "by a second interrupt" else [1]
        join = Run.join

        def joined(run: Run, timeout: Any = None) -> None:
            assert gate.reached.wait(WAIT_S)
            if interrupts:
                raise KeyboardInterrupt(interrupts.pop(0))
            join(run, timeout)

        patched.setattr(Run, "join", joined)
        with pytest.raises(KeyboardInterrupt):
            app.run("local", stop_within_ms=stop_within_ms)
    assert owner(folder) == "", "the next one need not wait"
    committed = newest(folder)
    gate.opened.set()  # the round comes to its end behind our back
    clock = SystemClock()
    deadline_ms = clock.monotonic_ms() + WAIT_S * 1000
    while still_running() and clock.monotonic_ms() < deadline_ms:
        clock.sleep_ms(10)
    assert still_running() == []
    assert newest(folder) == committed, "nothing was committed after the call had ended"
    assert shop(folder, gate).run("local", until="caught_up").records == ROWS
    rows = shop(folder, gate).open_table("per_window").to_arrow()
    assert sum(rows["n"].to_pylist()) == ROWS


def test_who_runs_an_app_twice_in_one_process_is_told_that_it_is_this_one(tmp_path: Path) -> None:
    app = shop(filled(tmp_path))
    with app.start("local") as run, pytest.raises(ConflictError, match=r"this process.*run\.stop\(\)"):
        run.await_caught_up("300s")
        app.run("local")


def test_a_run_whose_thread_cannot_be_started_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = shop(filled(tmp_path))
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("tidegate-run"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="new thread"):
        app.run("local")
    monkeypatch.undo()
    assert still_running() == [] and owner(tmp_path) == ""
    assert app.run("local", until="caught_up").records == ROWS


# -- stopped ---------------------------------------------------------------------------------------

LEASE_MS = 1000
RUNNING = """
told = lambda progress: said("at", progress.records, progress.caught_up)
try:
    copies(folder, {step}).run("local", trigger="10ms", lease_ms=LEASE_MS, progress=told)
except BaseException as error:
    said("ended with", type(error).__name__)
"""


def wait_while_gated(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A step of the user's that takes as long as there is a file of this name."""
    gate = os.environ.get("GATE", "")
    while gate and batch.num_rows and Path(gate).exists():
        Path(gate).with_name("reached").touch()
        time.sleep(0.01)
    return batch.select(["n"])


def copies(folder: Path, step: Callable[[pa.RecordBatch], pa.RecordBatch] | None = None) -> App:
    app = App("shop", data=folder)
    stream = app.stream("orders", value=Json(n="int64"))
    if step is not None:
        stream = stream.map(step, pa.schema([("n", pa.int64())]))
    stream.to_topic("copies")
    return app


def lease(folder: Path) -> Held:
    backend = open_backend(folder / "state")
    found = read_lease(backend, Records(backend, "shop").lease_name)
    assert found is not None
    return found[0]


def until(holds: Callable[[], bool], why: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, why
        time.sleep(0.02)


def written(folder: Path) -> int:
    with Log(folder / "log", read_only=True) as log:
        table = log.reader("copies").read_all()
    return sum(1 for value in table["value"].to_pylist() if value)


def write_more(folder: Path, rows: int) -> None:
    with Log(folder / "log") as log, log.writer("orders") as writer:
        writer.write(
            pa.table({"key": ["k"] * rows, "value": ['{"n":1}'] * rows, "timestamp": [START] * rows})
        )


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Any]:
    """A process that runs the app, has caught up, and is stopped for longer than its lease."""
    process = process_of(filled(tmp_path), RUNNING.format(step=None))
    try:
        until_said(process.stdout, f"at {ROWS} True")
        process.send_signal(signal.SIGSTOP)
        until(lambda: lease(tmp_path).until_ms < SystemClock().now_ms(), "its lease has run out")
        yield process
    finally:
        process.kill()
        process.wait()


class Newcomer(threading.Thread):
    """Another run of the app, in this process."""

    def __init__(self, folder: Path, *, lease_ms: int = LEASE_MS) -> None:
        super().__init__(daemon=True)
        self.app, self.lease_ms = copies(folder), lease_ms
        self.summary: Summary | None = None
        self.error: TidegateError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.summary = self.app.run("local", until="caught_up", lease_ms=self.lease_ms)
        except TidegateError as error:
            self.error = error

    def ended(self) -> Newcomer:
        self.join(WAIT_S)
        assert not self.is_alive()
        return self


def test_R_27_a_newcomer_leaves_the_app_to_a_stopped_driver_that_holds_its_partitions(
    driver: Any, tmp_path: Path
) -> None:
    write_more(tmp_path, 50)
    before = lease(tmp_path)
    refused = Newcomer(tmp_path).ended().error
    assert isinstance(refused, ConflictError), refused
    assert f"kill -CONT {driver.pid}" in str(refused) and "partition copies-" in str(refused)
    assert lease(tmp_path) == before, "nothing was taken from it"
    driver.send_signal(signal.SIGCONT)
    until_said(driver.stdout, f"at {ROWS + 50} True")  # it goes on as if nothing had been
    assert driver.poll() is None
    driver.send_signal(signal.SIGINT)
    until_said(driver.stdout, "ended with KeyboardInterrupt")
    assert written(tmp_path) == ROWS + 50


def test_R_27_a_driver_that_wakes_while_a_newcomer_waits_goes_on(driver: Any, tmp_path: Path) -> None:
    newcomer = Newcomer(tmp_path, lease_ms=WAIT_S * 1000)
    driver.send_signal(signal.SIGCONT)
    refused = newcomer.ended().error
    assert isinstance(refused, ConflictError) and f"being run by process {driver.pid}" in str(refused)
    write_more(tmp_path, 50)
    until_said(driver.stdout, f"at {ROWS + 50} True")


def test_R_27_a_newcomer_goes_on_when_the_stopped_driver_is_ended(driver: Any, tmp_path: Path) -> None:
    write_more(tmp_path, 50)
    newcomer = Newcomer(tmp_path, lease_ms=WAIT_S * 1000)
    driver.kill()
    driver.wait(WAIT_S)
    summary = newcomer.ended().summary
    assert summary is not None and summary.records == 50, newcomer.error
    assert written(tmp_path) == ROWS + 50


def test_R_27_a_stopped_driver_that_holds_nothing_is_fenced_when_it_wakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped in its first round, before it has opened an output: the newcomer takes the app over."""
    gate = tmp_path / "gate"
    gate.touch()
    monkeypatch.setenv("GATE", str(gate))
    process = process_of(filled(tmp_path), RUNNING.format(step="wait_while_gated"))
    try:
        until((tmp_path / "reached").exists, "it is in its round")
        process.send_signal(signal.SIGSTOP)
        until(lambda: lease(tmp_path).until_ms < SystemClock().now_ms(), "its lease has run out")
        monkeypatch.delenv("GATE")
        app = copies(tmp_path, wait_while_gated)
        assert app.run("local", until="caught_up", lease_ms=LEASE_MS).records == ROWS
        gate.unlink()
        process.send_signal(signal.SIGCONT)
        until_said(process.stdout, "ended with FencedError")
        process.wait(WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert written(tmp_path) == ROWS
