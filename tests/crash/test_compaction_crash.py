"""A death at every file effect of a compaction, and every state a power cut may leave of one.

Reopened as a broker would, the partition shows what it showed before the swap of some group of segments or
after it, nothing else; and compacting again ends where an undisturbed compaction does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from log_partitions import CompactedPartition, compacting
from tidegate.errors import UnavailableError
from tidegate.files import Effect
from tidegate.log.fetch import Isolation
from tidegate.log.segment import LogSegment
from tidegate.testing.crash_states import Model
from tidegate.testing.faults import (
    CrashAt,
    EffectCounter,
    FailAt,
    Recorder,
    SimulatedCrash,
    Watcher,
    crash_states,
)

CONFIG = compacting(segment_bytes=600, segment_index_bytes=240, index_interval_bytes=100)
Rows = tuple[tuple[int, bytes, bytes | None], ...]


class Switch:
    """A watcher that sees nothing until it is on."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.is_on = False

    def __call__(self, effect: Effect) -> None:
        if self.is_on:
            self.watcher(effect)


@dataclass(frozen=True)
class Story:
    """A closed partition ready to be compacted, and what it shows after each swap of an undisturbed run."""

    folder: Path
    stages: tuple[Rows, ...]
    effects: tuple[str, ...]
    log_end: int

    @property
    def done(self) -> Rows:
        return self.stages[-1]


def rows(world: CompactedPartition) -> Rows:
    table = world.records(control=True)
    return tuple(
        zip(
            table.column("offset").to_pylist(),
            table.column("key").to_pylist(),
            table.column("value").to_pylist(),
            strict=True,
        )
    )


def fill(world: CompactedPartition) -> None:
    for number in range(8):
        world.append([number % 3, 10 + number], producer=1)
    world.append([1], values=[None])
    world.append([4, 5], producer=2, transactional=True)
    world.append([2, 11], codec="zstd")
    world.end("ABORT", 2)
    world.append([5], producer=3, transactional=True)
    world.log.roll()
    world.end("COMMIT", 3)
    world.append([12], values=[None])
    world.append([2, 13, 14])
    world.append([13, 0], codec="gzip")
    world.log.roll()
    world.append([99])


def opened(folder: Path, watcher: Watcher) -> tuple[CompactedPartition, Switch]:
    switch = Switch(watcher)
    return CompactedPartition(folder, CONFIG, switch, clean_stop=True), switch


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one: nothing here depends on a real disk, and syncs take most time."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def story(scratch: Path) -> Story:
    folder = scratch / "story"
    world = CompactedPartition(folder, CONFIG)
    fill(world)
    log_end = world.log.log_end_offset
    world.log.close()
    shutil.copytree(folder, scratch / "run")
    counter = EffectCounter()
    run, switch = opened(scratch / "run", counter)
    stages = [rows(run)]

    def swapped(_: LogSegment) -> None:
        stages.append(rows(run))

    run.log.hooks.on_segment_added.append(swapped)
    switch.is_on = True
    run.clean()
    assert len(stages) >= 4, "several groups"
    assert len(set(stages)) == len(stages), "each swap shows"
    return Story(folder, tuple(stages), tuple(counter.names), log_end)


@pytest.fixture
def copies(story: Story, scratch: Path) -> Iterator[Iterator[Path]]:
    def make() -> Iterator[Path]:
        target = scratch / "copy"
        while True:
            shutil.copytree(story.folder, target)
            try:
                yield target
            finally:
                shutil.rmtree(target)

    maker = make()
    yield maker
    maker.close()


def check_reopened(
    story: Story, folder: Path, recovery_point: int, what: str, *, compact_again: bool = True
) -> None:
    world = CompactedPartition(folder, CONFIG, recovery_point=recovery_point)
    assert rows(world) in story.stages, f"{what}: shows what no stage shows"
    assert world.log.log_end_offset == story.log_end, what
    assert world.names(".cleaned", ".swap", ".deleted") == [], what
    for offset in range(story.log_end):
        fetched = world.log.fetch(offset, max_bytes=1, isolation=Isolation.TXN_COMMITTED)
        assert fetched.data, f"{what}: offset {offset} cannot be read past"
    if compact_again:
        world.clean()
        assert rows(world) == story.done, f"{what}: a second compaction ends elsewhere"
    world.log.close(clean=compact_again)


@pytest.mark.parametrize("torn_bytes", [0, 7])
def test_death_at_any_effect_leaves_a_stage_of_the_compaction(
    story: Story, copies: Iterator[Path], torn_bytes: int
) -> None:
    for number, name in enumerate(story.effects, 1):
        if torn_bytes and not name.startswith("write "):
            continue
        folder = next(copies)
        world, switch = opened(folder, CrashAt(number, torn_bytes=torn_bytes))
        switch.is_on = True
        with pytest.raises(SimulatedCrash):
            world.clean()
        recovery_point = story.log_end if number % 2 else 0
        check_reopened(story, folder, recovery_point, f"death at effect {number} ({name})")


def test_failure_of_any_effect_leaves_a_log_that_reads_and_reopens(
    story: Story, copies: Iterator[Path]
) -> None:
    for number, name in enumerate(story.effects, 1):
        folder = next(copies)
        fault = FailAt(number)
        world, switch = opened(folder, fault)
        switch.is_on = True
        with contextlib.suppress(UnavailableError):
            world.clean()
        assert fault.fired, name
        assert rows(world) in story.stages, f"failure of effect {number} ({name})"
        fault.lift()
        world.log.close(clean=False)
        check_reopened(story, folder, 0, f"failure of effect {number} ({name})")


def power_cuts(story: Story, folder: Path, scratch: Path, model: Model, limit: int) -> int:
    recorder = Recorder(folder)
    world, switch = opened(folder, recorder)
    switch.is_on = True
    world.clean()
    world.clock.advance("1m")
    world.scheduler.run_due()
    states = 0
    for state in crash_states(recorder.recording, model=model, limit=limit):
        states += 1
        left = state.write_to(scratch / "state")
        recovery_point = story.log_end if states % 2 else 0
        check_reopened(story, left, recovery_point, state.story, compact_again=states % 5 == 0)
        shutil.rmtree(left)
    return states


@pytest.mark.parametrize(("model", "at_least"), [("ordered", 100), ("weak", 400)])
def test_any_power_cut_leaves_a_stage_of_the_compaction(
    story: Story, copies: Iterator[Path], scratch: Path, model: Model, at_least: int
) -> None:
    assert power_cuts(story, next(copies), scratch, model, limit=64) >= at_least


def die_twice(story: Story, copies: Iterator[Path], renames: list[int]) -> int:
    deaths = 0
    for number in renames:
        for again in itertools.count(1):
            folder = next(copies)
            world, switch = opened(folder, CrashAt(number))
            switch.is_on = True
            with pytest.raises(SimulatedCrash):
                world.clean()
            try:
                CompactedPartition(folder, CONFIG, CrashAt(again), recovery_point=story.log_end)
            except SimulatedCrash:
                deaths += 1
                what = (
                    f"death at effect {number} ({story.effects[number - 1]}), then at {again} while opening"
                )
                check_reopened(story, folder, story.log_end, what, compact_again=again % 5 == 0)
            else:
                break
    return deaths


def renames(story: Story) -> list[int]:
    return [number for number, name in enumerate(story.effects, 1) if name.startswith("rename ")]


def test_death_while_a_swap_is_finished_or_undone_is_survived_too(
    story: Story, copies: Iterator[Path]
) -> None:
    assert die_twice(story, copies, renames(story)[2:16:3]) > 20


@pytest.mark.soak
def test_death_while_any_swap_is_finished_or_undone_is_survived_too(
    story: Story, copies: Iterator[Path]
) -> None:
    assert die_twice(story, copies, renames(story)) > 200
