"""The process dies at every single effect, or the effect fails; the last token brings everything back.

One script does all that storage can do to a backend: it is run again for every moment it can die at (before and
after each put, publish and delete of the backend; before each file effect of the folder backend, and inside
each write). Then a new process restores the last token it was given, everything must equal the oracle, and
garbage collection must remove the orphans and nothing else. The same for effects that fail instead: the caller
tries again and goes on.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend_faults import BackendRecorder, DieAt, RefuseAt, WatchedBackend
from schedules import Step, draw
from simulated_worker import WEIGHTS, SimulatedWorker
from tidegate.clock import ManualClock
from tidegate.errors import TidegateError, UnavailableError
from tidegate.files import Files
from tidegate.storage.backends.base import StorageBackend
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.manifest import Token, reachable
from tidegate.testing.faults import CrashAt, EffectCounter, FailAt, SimulatedCrash, dying_process

LATER_MS = 10**9
A, B = 0, 1  # steps choose their task by a % 4, and its store by a // 7
EVENTS, LATEST, TOTALS, EVENTS_OF_B = 0, 8, 14, 21


def script() -> list[Step]:
    """Everything that touches a backend, in an order that leaves work for every kind of effect."""
    steps = []
    for place in (EVENTS, LATEST, TOTALS, EVENTS_OF_B):
        steps += [Step("append", place, 11 + place, 9), Step("append", place, 50 + place, 9)]
    steps += [Step("state", A, 1, 2), Step("state", B, 3, 2), Step("state", A, 5, 6)]
    steps += [Step("checkpoint", A, 0, 0), Step("checkpoint", B, 0, 0)]
    steps += [Step("append", EVENTS, 77, 11), Step("evict", EVENTS, 0, 0), Step("run_through", 0, 0, 0)]
    steps += [Step("append", LATEST, 78, 11), Step("dump", LATEST, 0, 0), Step("run_through", 0, 0, 0)]
    steps += [Step("compact", LATEST, 1, 0), Step("run_through", 0, 0, 0)]
    steps += [Step("append", TOTALS, 79, 11), Step("compact", TOTALS, 1, 0), Step("run_through", 0, 0, 0)]
    steps += [Step("prune", EVENTS, 2, 1), Step("state", A, 1, 4), Step("relieve", A, 0, 0)]
    steps += [Step("checkpoint", A, 0, 0), Step("release", A, 0, 0), Step("delete", A, 0, 0)]
    steps += [Step("run_through", 0, 0, 0), Step("prune", LATEST, 3, 1), Step("append", EVENTS, 80, 11)]
    steps += [Step("checkpoint", A, 0, 0), Step("release", A, 0, 0), Step("collect_garbage", A, 1, 0)]
    steps += [Step("restore", A, 0, 0), Step("append", EVENTS, 81, 5), Step("checkpoint", A, 0, 0)]
    return steps


SCRIPT = script()
SHORT = [
    Step("append", EVENTS, 11, 9), Step("append", TOTALS, 12, 9), Step("state", A, 1, 2),
    Step("checkpoint", A, 0, 0),
    Step("append", EVENTS, 77, 11), Step("evict", EVENTS, 0, 0), Step("run_through", 0, 0, 0),
    Step("prune", EVENTS, 2, 1), Step("checkpoint", A, 0, 0), Step("release", A, 0, 0),
    Step("delete", A, 0, 0), Step("run_through", 0, 0, 0), Step("collect_garbage", A, 1, 0),
    Step("append", LATEST, 13, 9), Step("checkpoint", A, 0, 0),
]  # fmt: skip


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: what a dead process leaves behind does not depend on the disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def come_back(worker: SimulatedWorker, backend: StorageBackend) -> None:
    """A new process: state as of the last token, orphans collected, state the same."""
    worker.backend = backend
    worker.clock.advance(LATER_MS)
    worker.crash()
    worker.check_everything()
    for task in worker.tasks:
        before = {found.name for found in backend.list("")}
        kept = [saved.token for saved in task.kept]
        worker.runtime.collect_garbage(task.name, kept)
        needed = set().union(*(reachable(backend, Token.decode(token)) for token in kept))
        after = {found.name for found in backend.list("")}
        mine = f"{task.name}/"
        assert {name for name in after if name.startswith(mine)} == needed, "only orphans, and all of them"
        assert {name for name in before if not name.startswith(mine)} == {
            name for name in after if not name.startswith(mine)
        }, "nothing of another task"
    worker.check_everything()
    worker.crash()
    worker.check_everything()
    worker.run([Step("append", EVENTS, 9, 9), Step("append", LATEST, 9, 9), Step("checkpoint", A, 0, 0)])
    worker.check_everything()


def moments(steps: list[Step]) -> int:
    recorder = BackendRecorder()
    worker = SimulatedWorker(1, WatchedBackend(MemoryBackend(), recorder))
    worker.run(steps)
    worker.check_everything()
    assert {effect.kind for effect in recorder.effects if effect.mutates} >= {"put", "delete"}
    return recorder.moments


@pytest.mark.parametrize("part", range(4), ids=lambda part: f"WS-T97-{part}")
def test_a_death_at_every_backend_effect_leaves_the_last_token_good(part: int) -> None:
    count = moments(SCRIPT)
    assert count > 40
    for n in range(1 + part, count + 1, 4):
        inner, death = MemoryBackend(), DieAt(n)
        worker = SimulatedWorker(1, WatchedBackend(inner, death))
        with pytest.raises(SimulatedCrash):
            worker.run(SCRIPT)
        assert death.died_at is not None
        come_back(worker, inner)


@pytest.mark.parametrize("seed", range(6))
def test_a_death_at_every_effect_of_a_random_schedule_leaves_the_last_token_good(seed: int) -> None:
    steps = draw(5000 + seed, 40, {**WEIGHTS, "crash": 0})
    recorder = BackendRecorder()
    SimulatedWorker(seed, WatchedBackend(MemoryBackend(), recorder)).run(steps)
    for n in range(1, recorder.moments + 1):
        inner = MemoryBackend()
        worker = SimulatedWorker(seed, WatchedBackend(inner, DieAt(n)))
        with pytest.raises(SimulatedCrash):
            worker.run(steps)
        come_back(worker, inner)


def folder(root: Path, files: Files) -> FolderBackend:
    return FolderBackend(root, files=files, clock=ManualClock())


@pytest.mark.parametrize("torn_bytes", [0, 37], ids=["before", "inside-writes"])
def test_a_death_at_every_file_effect_of_a_folder_leaves_the_last_token_good(
    torn_bytes: int, quick_path: Path
) -> None:
    counter = EffectCounter()
    SimulatedWorker(1, folder(quick_path / "counted", Files(watch=counter)), tasks=("t",)).run(SHORT)
    assert counter.count > 60
    for n, name in enumerate(counter.names, 1):
        if torn_bytes and not name.startswith("write"):
            continue
        root = quick_path / str(n)
        worker: SimulatedWorker | None = None
        with dying_process(CrashAt(n, torn_bytes=torn_bytes)) as files:
            worker = SimulatedWorker(1, folder(root, files), tasks=("t",))
            worker.run(SHORT)
        if worker is not None:  # else it died before there was a backend
            come_back(worker, folder(root, Files()))


def run_with_retries(worker: SimulatedWorker, steps: list[Step]) -> int:
    """Each step again after a failure, as a task does; how often that was needed."""
    failures = 0
    for step in steps:
        try:
            worker.run([step])
        except TidegateError:
            failures += 1
            worker.run([step])
    return failures


@pytest.mark.parametrize("after", [False, True], ids=["refused", "answer-lost"])
def test_every_backend_effect_may_fail_once_and_the_work_goes_on(after: bool) -> None:
    for n in range(1, moments(SCRIPT) // 2 + 1):
        inner, refusal = MemoryBackend(), RefuseAt(n, after=after)
        worker = SimulatedWorker(1, WatchedBackend(inner, refusal))
        run_with_retries(worker, SCRIPT)
        assert refusal.fired == 1
        worker.check_everything()
        come_back(worker, inner)
        worker.finish()


def test_every_file_effect_may_find_the_disk_full_once_and_the_work_goes_on(quick_path: Path) -> None:
    counter = EffectCounter()
    backend = folder(quick_path / "counted", Files(watch=counter))
    made = counter.count  # the folder itself must exist before there is anything to go on with
    SimulatedWorker(1, backend, tasks=("t",)).run(SHORT)
    assert counter.count > made + 60
    for n in range(made + 1, counter.count + 1):
        fault = FailAt(n, errno.ENOSPC, torn_bytes=11)
        root = quick_path / str(n)
        worker = SimulatedWorker(1, folder(root, Files(watch=fault)), tasks=("t",))
        run_with_retries(worker, SHORT)
        assert fault.fired == 1
        worker.check_everything()
        come_back(worker, folder(root, Files()))


def test_a_backend_that_stays_away_stops_the_work_and_loses_nothing() -> None:
    inner = MemoryBackend()
    refusal = RefuseAt(1, persistent=True, lifted=True)
    worker = SimulatedWorker(1, WatchedBackend(inner, refusal))
    worker.run(SCRIPT[:13])
    refusal.arm()
    worker.run([Step("append", EVENTS, 77, 11)])
    with pytest.raises(UnavailableError):
        worker.run([Step("checkpoint", A, 0, 0)])
    with pytest.raises(UnavailableError):
        worker.run([Step("evict", EVENTS, 0, 0), Step("run_through", 0, 0, 0)])
    worker.check_everything()
    refusal.lift()
    worker.run([Step("checkpoint", A, 0, 0)])
    come_back(worker, inner)
    worker.finish()
