"""Readers of one table do not wait for each other, over every kind of table: whoever is slow delays only itself.

A reader is slow in three ways: it takes long over the batches of a scan, it waits for the backend, or it waits while it
opens a newer commit. In each of them another one asks, and is answered before the slow one goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from table_stages import BOUND_S, KINDS, SLOW, Stage

PAUSED = 33  # more scans than a snapshot has slots for loads
LOOK_S = 0.2  # after that long a table looks for a newer commit again


class Asked(threading.Thread):
    """A question on a thread of its own; what comes of it is told by `answer`."""

    def __init__(self, question: Callable[[], Any], name: str | None = None) -> None:
        super().__init__(name=name, daemon=True)
        self._question = question
        self._found: Any = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._found = self._question()
        except Exception as error:  # noqa: BLE001  (told by `answer`)
            self._error = error

    def answer(self) -> Any:
        self.join(BOUND_S)
        assert not self.is_alive(), "it still waits"
        if self._error is not None:
            raise self._error
        return self._found


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__.lower())
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    made = request.param(tmp_path)
    yield made
    made.gate.go_on.set()
    made.close()


def test_scans_that_are_paused_keep_nobody_waiting_and_stay_with_their_commit(stage: Stage) -> None:
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def scan() -> set[int]:
        batches = stage.table.batches()
        first = next(batches)
        begun.release()
        assert go_on.wait(BOUND_S)
        return stage.of([first, *batches])

    paused = [Asked(scan) for _ in range(PAUSED)]
    for _ in paused:
        assert begun.acquire(timeout=BOUND_S)
    assert Asked(stage.values).answer() == {1}
    assert Asked(stage.get).answer() == 1
    stage.commit(2)
    time.sleep(LOOK_S)
    assert Asked(stage.values).answer() == {2}
    assert Asked(stage.get).answer() == 2
    assert all(each.is_alive() for each in paused)
    go_on.set()
    assert [each.answer() for each in paused] == [{1}] * PAUSED


def test_whoever_waits_for_the_backend_waits_alone(stage: Stage) -> None:
    assert stage.table.position  # opened, and no row read yet
    stage.gate.is_shut = True
    slow = Asked(stage.values, SLOW)
    assert stage.gate.stuck.wait(BOUND_S)
    assert Asked(stage.values).answer() == {1}
    assert Asked(stage.get).answer() == 1
    assert slow.is_alive()
    stage.gate.go_on.set()
    assert slow.answer() == {1}


def test_whoever_opens_a_newer_commit_keeps_nobody_waiting(stage: Stage) -> None:
    assert stage.values() == {1}
    stage.commit(2)
    time.sleep(LOOK_S)
    stage.gate.is_shut = True
    slow = Asked(stage.values, SLOW)
    assert stage.gate.stuck.wait(BOUND_S)
    time.sleep(LOOK_S)
    assert Asked(stage.values).answer() == {1}
    assert Asked(stage.get).answer() == 1
    assert slow.is_alive()
    stage.gate.go_on.set()
    assert slow.answer() == {2}
    time.sleep(LOOK_S)
    assert stage.values() == {2}
