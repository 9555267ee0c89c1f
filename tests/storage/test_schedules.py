"""Whatever is interleaved with whatever, storage holds what a dict of rows would hold.

Each schedule is drawn from its seed: appends, upserts, tombstones, folds, prunes and state blobs on two tasks with
three stores each, between the phases of compactions, dumps, evictions, rehydrations, pressure relief, deletions
and checkpoints; with crashes, restores, releases and garbage collection in between. At the end everything is
compared, then pruned, and every budget must be at zero.

A failure prints the seed and the shortest part of the schedule that still fails; run that again with

    SimulatedWorker(seed, MemoryBackend()).run([...])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from schedules import ScheduleFailure, Step, check_schedules, draw, shrink
from simulated_worker import WEIGHTS, SimulatedWorker, run_schedule
from tidegate.clock import ManualClock
from tidegate.files import Files
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.backends.memory import MemoryBackend

BLOCKS, SCHEDULES, LENGTH = 30, 75, 26
FOLDER_SCHEDULES = 12
SOAK_BLOCKS, SOAK_SCHEDULES, SOAK_LENGTH = 20, 400, 300  # 2.4 M steps


def in_memory(seed: int, steps: Sequence[Step]) -> None:
    run_schedule(seed, steps, MemoryBackend)


@pytest.mark.parametrize("block", range(BLOCKS), ids=lambda block: f"WS-T56-{block}")
def test_any_interleaving_equals_the_oracle_and_ends_at_zero(block: int) -> None:
    first = block * SCHEDULES
    check_schedules(in_memory, range(first, first + SCHEDULES), length=LENGTH, weights=WEIGHTS)


def test_any_interleaving_equals_the_oracle_over_a_folder(tmp_path: Path) -> None:
    def run(seed: int, steps: Sequence[Step]) -> None:
        root = tmp_path / f"{seed}-{len(list(tmp_path.iterdir()))}"
        run_schedule(seed, steps, partial(FolderBackend, root, files=Files(), clock=ManualClock()))

    check_schedules(run, range(10**6, 10**6 + FOLDER_SCHEDULES), length=LENGTH, weights=WEIGHTS)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(SOAK_BLOCKS))
def test_millions_of_steps_equal_the_oracle(block: int) -> None:
    first = 10**7 + block * SOAK_SCHEDULES
    check_schedules(in_memory, range(first, first + SOAK_SCHEDULES), length=SOAK_LENGTH, weights=WEIGHTS)


def test_the_schedules_do_every_kind_of_step_and_get_somewhere() -> None:
    """A property test that never gets anywhere proves nothing."""
    names = {step.name for seed in range(50) for step in draw(seed, LENGTH, WEIGHTS)}
    assert names == set(WEIGHTS)
    done: Counter[str] = Counter()
    for seed in range(240):
        worker = SimulatedWorker(seed, MemoryBackend())
        worker.run(draw(seed, LENGTH, WEIGHTS))
        for sample in worker.metrics.samples():
            done[sample.name.removeprefix("tidegate_storage_")] += int(sample.value)
    for counter in (
        "compact_published_total", "dump_runs_total", "rehydrate_published_total", "evicted_keys_total",
        "eviction_retries_total", "lost_total", "deleted_packs_total", "checkpoints_total", "restores_total",
        "pruned_rows_total", "pressure_runs_total",
    ):  # fmt: skip
        assert done[counter] >= 5, (counter, done[counter])


def test_a_compaction_and_two_checkpoints_never_wait_for_each_other() -> None:
    """Slots and buckets are taken in one order everywhere; found by seed 300146."""
    steps = [
        Step("append", 29135, 64147, 26688),
        Step("append", 33159, 31843, 54857),
        Step("append", 10664, 56215, 5737),
        Step("dump", 12260, 10329, 47106),
        Step("begin_checkpoint", 31823, 46520, 65156),
        Step("append", 26005, 35787, 48427),
        Step("begin_checkpoint", 28057, 50228, 57955),
        Step("compact", 38590, 4444, 46529),
        Step("run_through", 55521, 27638, 49165),
    ]
    in_memory(300146, steps)


def test_a_death_before_a_token_arrives_leaves_every_retained_checkpoint() -> None:
    """Whoever keeps tokens still has the two older ones; found by seed 500123."""
    worker = SimulatedWorker(0, MemoryBackend())
    task = worker.tasks[0]
    for number in range(2):
        worker.write(task, task.stores["events"], [{"key": b"a", "ts": number, "value": number}])
        worker.run([Step("checkpoint", 0, 0, 0)])
    worker.write(task, task.stores["events"], [{"key": b"a", "ts": 2, "value": 2}])
    third = worker.runtime.checkpointing(task.name)
    while next(third) != "written":
        pass
    worker.run([Step("delete", 0, 0, 0), Step("run_through", 0, 0, 0)])
    assert len(task.kept) == 2
    worker.crash()  # restores the second, and asks for the first to be kept
    worker.check_everything()


def test_a_planted_fault_is_found_and_shrunk() -> None:
    """Losing one bucket's rows in an eviction: the message has the seed and few steps."""

    def losing(seed: int, steps: Sequence[Step]) -> None:
        worker = SimulatedWorker(seed, MemoryBackend())
        for step in steps:
            worker.run([step])
            if step.name == "evict":
                for task in worker.tasks:
                    for store in task.stores.values():
                        store.oracle.rows.popitem() if len(store.oracle.rows) > 3 else None
        worker.finish()

    with pytest.raises(ScheduleFailure, match=r"schedule of seed \d+ .*\n.*shortest part") as caught:
        check_schedules(losing, range(100), length=LENGTH, weights=WEIGHTS)
    assert 2 <= str(caught.value).count("Step(") <= 6


def test_shrinking_keeps_what_is_needed_and_nothing_else() -> None:
    steps = [Step(name, 0, 0, 0) for name in "abcdefgh"]

    def fails(chosen: list[Step]) -> bool:
        names = "".join(step.name for step in chosen)
        return "b" in names and "g" in names

    assert [step.name for step in shrink(steps, fails)] == ["b", "g"]
