"""One process runs an app (R-27): of those that race one wins, the others are told at once and change no byte; a fork
is refused; a dead owner blocks nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidegate.clock import ManualClock
from tidegate.errors import ConflictError, TidegateError
from tidegate.log.log import Log
from tidegate.pipeline.checkpoint import Records
from tidegate.pipeline.definition.app import App
from tidegate.pipeline.lease import AppLease
from tidegate.randomness import SeededRandomness
from tidegate.storage import open_backend
from tidegate.tables.serdes.base import String
from tidegate.tables.serdes.json import Json

RACERS = 4
RACES = 50
OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_one_owner import app_in

run = app_in(Path(sys.argv[2])).start("local", trigger="1h", lease_ms=3_600_000)
run.await_caught_up("60s")
print("running", flush=True)
time.sleep(600)
"""


def app_in(folder: Path) -> App:
    app = App("shop", data=folder)
    app.stream("orders", key=String(), value=Json(n="long")).filter("n >= 0").to_topic("copy")
    return app


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    with Log(tmp_path / "log") as log:
        log.create_topic("orders", 1)
        with log.writer("orders") as writer:
            writer.write(pa.table({"key": ["a"] * 20, "value": [f'{{"n":{n}}}' for n in range(20)]}))
    return tmp_path


def tree(folder: Path) -> dict[str, bytes]:
    """Every byte there is, but for locks and who has the turn."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith((".lock", "lease"))
    }


@pytest.mark.parametrize("races", [pytest.param(RACES, id="R-27-races")])
def test_of_those_that_race_for_an_app_one_wins(tmp_path: Path, races: int, tally: Any) -> None:
    """Threads with a backend each: to the lease they are processes of different machines."""
    refused = 0
    for race in range(races):
        folder, start = tmp_path / f"{race}", threading.Barrier(RACERS)
        won: list[AppLease] = []
        told: list[BaseException] = []

        def runner(
            number: int, folder: Path = folder, start: threading.Barrier = start
        ) -> Callable[[], None]:
            backend = open_backend(folder, randomness=SeededRandomness(number))

            def race_for_it() -> None:
                start.wait(30)
                try:
                    won.append(  # noqa: B023 - joined before the next race
                        AppLease(
                            Records(backend, "app"),
                            clock=ManualClock(),
                            randomness=SeededRandomness(100 * race + number),  # noqa: B023
                            lease_ms=10_000,
                        )
                    )
                except TidegateError as error:
                    told.append(error)  # noqa: B023

            return race_for_it

        threads = [threading.Thread(target=runner(number)) for number in range(RACERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert len(won) == 1 and len(told) == RACERS - 1, (race, told)
        assert all(isinstance(error, ConflictError) for error in told), told
        refused += len(told)
    tally(races * RACERS, detected=refused, races=races)


def owned(folder: Path) -> subprocess.Popen[str]:
    """The app in a process of its own, caught up and waiting."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(Path(__file__).parent), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert owner.stdout is not None
    line = owner.stdout.readline()
    assert line.startswith("running"), line + owner.stdout.read()
    return owner


@pytest.mark.parametrize("way", [pytest.param("process", id="R-27-second-process-and-dead-owner")])
def test_a_second_process_changes_no_byte_and_a_dead_owner_blocks_nobody(
    filled: Path, way: str, tally: Any
) -> None:
    """Its turn would have lasted an hour; that it is dead is seen at once on its own machine."""
    owner = owned(filled)
    try:
        before = tree(filled)
        for _ in range(5):
            with pytest.raises(ConflictError, match=f"process {owner.pid}"):
                app_in(filled).start("local")
        assert tree(filled) == before
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(30)
    assert app_in(filled).run("local", until="caught_up").caught_up
    tally(6, detected=5, repaired=1)


@pytest.mark.parametrize("what", [pytest.param("log", id="R-27-fork")])
def test_what_was_opened_before_a_fork_is_refused_after_it(filled: Path, what: str) -> None:
    """A child has no lock of its parent's, so it must not write as if it had."""
    with Log(filled / "log") as log, log.writer("orders") as writer:
        before = tree(filled)
        child = os.fork()
        if child == 0:
            try:
                writer.write(pa.table({"key": ["a"], "value": ["{}"]}))
            except TidegateError as error:
                os._exit(0 if "fork" in str(error) else 2)
            except BaseException:  # noqa: BLE001 - a child of a test must not run the rest of it
                os._exit(3)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert tree(filled) == before
        writer.write(pa.table({"key": ["a"], "value": ['{"n":1}']}))  # the parent goes on
