"""Power loss in the middle of a log's life: every legal state of the disk keeps what was acknowledged (R-2).

A short run is recorded effect by effect; `crash_states` then lays out what a disk may hold when the power goes at
any point: unsynced writes lost, torn or kept out of order, names not yet on the disk. Each state is opened for
writing as the next start would.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from tidegate.clock import ManualClock
from tidegate.files import Files
from tidegate.log.log import Log
from tidegate.randomness import SeededRandomness
from tidegate.scheduling import ManualScheduler
from tidegate.testing.faults import Recorder, Recording, crash_states

CONFIG = {"segment.bytes": 500, "segment.index.bytes": 120, "index.interval.bytes": 60}
WRITES = 12


def open_log(path: Path, files: Files | None = None) -> Log:
    clock = ManualClock()
    return Log(
        path, files=files, clock=clock, scheduler=ManualScheduler(clock), randomness=SeededRandomness(1)
    )


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    root = tmp_path_factory.mktemp("recorded") / "log"
    recorder = Recorder(root)
    with open_log(root, Files(watch=recorder)) as log:
        log.create_topic("orders", config=CONFIG)
        writer = log.writer("orders")
        for number in range(WRITES):
            writer.write(pa.table({"value": [b"v%03d" % number]}))
            recorder.mark(str(number))  # from here on it is promised
    recorder.mark("closed")
    return recorder.recording


def check(recording: Recording, model: str, stride: int, folder: Path) -> int:
    checked = 0
    for number, state in enumerate(crash_states(recording, model=model, limit=24)):  # type: ignore[arg-type]
        if number % stride:
            continue
        checked += 1
        path = state.write_to(folder / str(number))
        promised = [b"v%03d" % mark for mark in range(sum(mark != "closed" for mark in state.marks))]
        with open_log(path) as log:
            if "orders" not in log.topics():
                assert not promised, state.story
                continue
            log.writer("orders").write(pa.table({"value": [b"after"]}))
            stored = log.reader("orders").read_all().column("value").to_pylist()
        assert stored[: len(promised)] == promised, state.story
        assert stored[-1] == b"after", state.story
        assert stored[:-1] == [b"v%03d" % n for n in range(len(stored) - 1)], state.story
    return checked


@pytest.mark.parametrize("model", ["ordered", "weak"])
def test_a_power_cut_loses_nothing_that_was_acknowledged(
    recording: Recording, model: str, tmp_path: Path
) -> None:
    assert check(recording, model, 20, tmp_path) > 100


@pytest.mark.soak
@pytest.mark.parametrize("model", ["ordered", "weak"])
def test_no_power_cut_at_all_loses_anything(recording: Recording, model: str, tmp_path: Path) -> None:
    check(recording, model, 1, tmp_path)
