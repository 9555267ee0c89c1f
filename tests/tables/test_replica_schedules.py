"""Two or three leaders, deaths at any effect, pauses, clocks that differ, late appends: one table for all replicas."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest

from schedules import ScheduleFailure, Step, draw, shrink
from simulated_replicas import LIVE, WEIGHTS, World
from tidegate.errors import TidegateWarning

LENGTH = 50
SCHEDULES, PARTS = 1000, 4
FIRST_LIVE = (
    4  # where the first switch lands: before it are a chain's start and three records before the rewind
)


def outcome(seed: int, steps: list[Step]) -> World:
    world = World(seed, nodes=2 + seed % 2)
    world.run(steps)
    world.check()
    return world


def run(seed: int, length: int = LENGTH) -> World:
    steps = draw(seed, length, WEIGHTS)
    try:
        return outcome(seed, steps)
    except Exception as error:

        def fails(fewer: list[Step]) -> bool:
            try:
                outcome(seed, fewer)
            except Exception:  # noqa: BLE001 - any failure counts
                return True
            return False

        shortest = shrink(steps, fails, attempts=100)
        raise ScheduleFailure(f"seed {seed}: {error!r}; shortest schedule: {shortest}") from error


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Leaders fall all the time here; capturing what they say would take longer than the schedules."""
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        # A leader that was replaced and has not noticed it finds that records have aged out; its word does not count.
        warnings.simplefilter("ignore", TidegateWarning)
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_replica_comes_to_the_same_table_whoever_led_when(part: int) -> None:
    leaders = fenced = aged = 0
    for seed in range(part, SCHEDULES, PARTS):
        world = run(seed)
        leaders += world.epochs
        aged += world.log.partitions[LIVE].start > FIRST_LIVE
        fenced += max(node.state.counts.fenced for node in world.nodes)
    assert leaders > 2 * SCHEDULES // PARTS, "the schedules are too tame"
    assert aged > SCHEDULES // PARTS // 5, "the live topic hardly ever let go of records that were copied"
    assert fenced > SCHEDULES // PARTS // 5, "hardly anybody appended late"


@pytest.mark.soak
def test_many_long_schedules() -> None:
    for seed in range(10_000, 30_000):
        run(seed, 200)
