"""Replicas as real processes: killed, stopped and woken again at any moment, while a live topic is written.

Whatever happened, every replica must come to the same table: the one that the topics say, record by record, with
nothing lost and nothing there twice, and in every fencing epoch the effects of one writer.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from replica_processes import NAMES, VERSION, Nursery, Stage, until
from simulated_replicas import led


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path, seed=7)
    yield made
    made.close()


def lives(stage: Stage, nursery: Nursery, kills: int) -> dict[str, int]:
    """Replicas come and go while the live topic is written: `kills` of them by kill -9, others stopped or ended."""
    did = {"kill": 0, "stop": 0, "end": 0}
    for name in NAMES:
        nursery.start(name)
    timers: list[threading.Timer] = []
    while did["kill"] < kills:
        stage.write_live()
        time.sleep(stage.random.uniform(0, 0.15))
        name = stage.leader_of(stage.random.randrange(2), nursery) or stage.random.choice(NAMES)
        if stage.random.random() < 0.3:
            name = stage.random.choice(NAMES)
        what = stage.random.choices(["kill", "stop", "end", "nothing"], [5, 2, 1, 2])[0]
        if what == "nothing":
            continue
        did[what] += 1
        if what == "stop":
            # Some wake up before their lease has ended, some after; whoever stops holding a folder's lock holds all up.
            nursery.send(name, signal.SIGSTOP)
            timers.append(threading.Timer(stage.random.uniform(0.1, 1.6), wake, [nursery.living[name]]))
            timers[-1].start()
            continue
        if what == "end":
            wake(nursery.living[name])
        nursery.send(name, signal.SIGKILL if what == "kill" else signal.SIGTERM)
        nursery.start(name)
    for timer in timers:
        timer.join()
    return did


def wake(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def test_promotion_and_demotion_under_kill_9_with_a_live_writer(stage: Stage) -> None:
    with Nursery(stage.folder) as nursery:
        did = lives(stage, nursery, kills=24)
        stage.write_live()
    assert did["kill"] == 24
    assert stage.check(NAMES) > 10, f"hardly anybody led: {did}"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_many_deaths(tmp_path: Path, seed: int) -> None:
    stage = Stage(tmp_path, seed)
    with Nursery(stage.folder) as nursery:
        lives(stage, nursery, kills=150)
    stage.check(NAMES)
    stage.close()


def test_a_leader_that_is_stopped_before_an_append_and_wakes_up_late_changes_nothing(stage: Stage) -> None:
    with Nursery(stage.folder) as nursery:
        nursery.start("a")
        stage.write_live()
        until(lambda: stage.leader_of(0, nursery) == "a", "a leads")
        nursery.start("b")
        (stage.folder / f"stop-{nursery.living['a']}").touch()
        stage.write_live()
        until(lambda: nursery.is_stopped("a"), "a stops in front of an append")
        until(lambda: stage.leader_of(0, nursery) == stage.leader_of(1, nursery) == "b", "b leads both")
        stage.write_live()
        until(lambda: all(each.live_lag == 0 for each in stage.statuses()["b"].partitions), "b has copied it")
        nursery.send("a", signal.SIGCONT)
        stage.write_live()
        until(lambda: sum(each.fenced for each in stage.statuses()["b"].partitions) > 0, "a's append arrives")
        until(lambda: stage.statuses()["a"].leads == (), "a is a standby again")
        for name in ("a", "b"):
            nursery.send(name, signal.SIGTERM)
    late = [
        offset for number in (0, 1) for _, offset, counts in led(stage.rows(VERSION, number)) if not counts
    ]
    assert late, "the paused leader did append"
    assert stage.check(("a", "b")) >= 2
