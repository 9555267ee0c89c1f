"""Merges that rest between strips: over checkpoints, past others who need the bucket, and within a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from maintenance_steps import compacting, dumping
from tidegate.clock import ManualClock
from tidegate.storage.index import PlainState, RunEntry
from tidegate.storage.maintenance import supervisor
from tidegate.storage.maintenance.compaction import compact, is_crowded
from tidegate.storage.maintenance.operations import RESTING, Operation
from tidegate.storage.parts import TaskStorage
from tidegate.storage.spec import Merge
from workers import TASK, Row, Worker, store

STRIP = 4096


def crowded(worker: Worker, state: PlainState, *, runs: int = 12, keys: int = 200, ts: int = 0) -> list[Row]:
    """One bucket of many stored runs that share all their keys."""
    added: list[Row] = []
    for number in range(runs):
        rows = [(b"k%04d" % key, ts + number, key) for key in range(keys)]
        worker.append(state, rows)
        added += rows
    return added


def resting(worker: Worker, state: PlainState, bucket: int = 0) -> Operation[bool]:
    task = worker.parts.tasks.get(TASK)
    return compact(task.store_of(state), bucket, rest_bytes=STRIP)


def until_rest(operation: Operation[bool]) -> None:
    while next(operation) != RESTING:
        pass


def runs_of(state: PlainState, bucket: int = 0) -> tuple[RunEntry, ...]:
    found = state.index.snapshot(bucket)
    return () if found is None else found.runs


@pytest.mark.parametrize("max_batch_bytes", [16_384, 4 << 20], ids=["stored as made", "in memory"])
@pytest.mark.parametrize("merge", list(Merge))
def test_a_merge_goes_on_after_checkpoints_and_loses_nothing(merge: Merge, max_batch_bytes: int) -> None:
    worker = Worker(max_batch_bytes=max_batch_bytes, deleted_by="master")
    state = worker.attach(store(merge))
    crowded(worker, state)
    expected = worker.rows(state)
    tokens, rests = [worker.runtime.checkpoint(TASK)], 0
    operation = resting(worker, state)
    while (phase := next(operation, None)) is not None:
        if phase == RESTING:
            rests += 1
            assert worker.parts.locks.held() == 0
            worker.append(state, [(b"new", 9000 + rests, 1)])  # into another bucket
            tokens.append(worker.runtime.checkpoint(TASK))
    assert rests >= 3
    assert len({run.order for run in runs_of(state)}) == 1
    assert [row for row in worker.rows(state) if row[0] != b"new"] == expected
    token = worker.runtime.checkpoint(TASK)
    for each in (tokens[0], tokens[-1], token):
        later = Worker(backend=worker.backend, seed=5)
        later.runtime.apply_checkpoint(TASK, each)
        found = later.rows(later.attach(store(merge)))
        assert [row for row in found if row[0] != b"new"] == expected
    assert worker.runtime.leaks() == (0, 0, 0, 0)


def append(worker: Worker, state: PlainState) -> None:
    worker.append(state, [(b"k0001", 5, 77)])


def prune(worker: Worker, state: PlainState) -> None:
    worker.runtime.writer().prune(TASK, state, 10**6)


def evict(worker: Worker, state: PlainState) -> None:
    worker.run(dumping(worker.runtime, TASK, state, [0], evict=True))


def merge_all(worker: Worker, state: PlainState) -> None:
    worker.run(compacting(worker.runtime, TASK, state, 0))


@pytest.mark.parametrize("disturb", [append, prune, evict, merge_all], ids=lambda each: each.__name__)
@pytest.mark.parametrize("max_batch_bytes", [16_384, 4 << 20], ids=["stored as made", "in memory"])
def test_a_bucket_that_changes_in_a_rest_makes_the_merge_give_up(
    disturb: Callable[[Worker, PlainState], None], max_batch_bytes: int
) -> None:
    worker = Worker(max_batch_bytes=max_batch_bytes)
    state = worker.attach(store())
    crowded(worker, state)
    operation = resting(worker, state)
    until_rest(operation)
    disturb(worker, state)
    expected, before = worker.rows(state), runs_of(state)
    assert worker.run(operation) is False
    assert runs_of(state) == before
    assert worker.rows(state) == expected
    assert worker.runtime.leaks() == (0, 0, 0, 0)


def test_a_bucket_that_somebody_has_after_a_rest_is_left_to_them() -> None:
    worker = Worker(max_batch_bytes=16_384)
    state = worker.attach(store(Merge.FOLD))
    crowded(worker, state)
    expected = worker.rows(state)
    operation = resting(worker, state)
    until_rest(operation)
    other = dumping(worker.runtime, TASK, state, [0], evict=True)
    next(other)
    assert worker.run(operation) is False
    worker.run(other)
    assert worker.rows(state) == expected
    assert worker.runtime.leaks() == (0, 0, 0, 0)


def test_what_a_master_may_take_for_garbage_is_not_published() -> None:
    """A strip stored before a checkpoint is named by none; it may be published for half of the grace only."""
    worker = Worker(max_batch_bytes=16_384, deleted_by="master", garbage_grace_ms=10_000)
    state = worker.attach(store())
    crowded(worker, state)
    for wait_ms, published in ((5_000, False), (4_000, True)):
        token = worker.runtime.checkpoint(TASK)
        operation = resting(worker, state)
        until_rest(operation)
        worker.append(state, [(b"new", 9000 + wait_ms, 1)])
        token = worker.runtime.checkpoint(TASK)
        worker.clock.advance(f"{wait_ms}ms")
        assert worker.run(operation) is published
        assert worker.runtime.is_at(TASK, token)
    worker.clock.advance("1s")
    assert not worker.runtime.is_at(TASK, token), "the first strip is half as old as garbage may be"


def test_a_pass_stays_within_its_budgets_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each strip takes 20 ms of a budget of 5: one call in four does something, and the bucket is merged in the end."""

    clock = ManualClock()
    monkeypatch.setattr(supervisor, "REST_BYTES", STRIP)
    worker = Worker(clock=clock, max_batch_bytes=16_384, hot_bucket_count=1)
    state = worker.attach(store())
    expected = [*crowded(worker, state), (b"new", 9000, 1)]
    worker.append(state, [(b"new", 9000, 1)])
    worker.runtime.checkpoint(TASK)
    put = TaskStorage.store_all

    def slowly(task: TaskStorage, segments: Sequence[Any]) -> object:
        clock.advance("20ms")
        return put(task, segments)

    monkeypatch.setattr(TaskStorage, "store_all", slowly)
    took = []
    for _ in range(200):
        began = clock.monotonic_ms()
        ended = worker.runtime.maintain(TASK, 5)
        worker.runtime.checkpoint(TASK)
        took.append(clock.monotonic_ms() - began)
        if ended:
            break
    assert len({run.order for run in runs_of(state)}) == 1
    assert set(took) == {0, 20}
    assert sum(took) <= 5 * len(took) + 20
    assert worker.rows(state) == sorted(expected)


def test_large_runs_of_different_times_do_not_crowd_a_bucket() -> None:
    def run(nbytes: int, min_ts: int, max_ts: int) -> RunEntry:
        return RunEntry(0, 0, 1, 1, nbytes, nbytes, min_ts, max_ts)

    large, small = 3 << 20, 1 << 10
    apart = [run(large, 10 * number, 10 * number + 12) for number in range(9)]
    assert not is_crowded(apart, 8)
    assert is_crowded([run(small, each.min_ts, each.max_ts) for each in apart], 8), (
        "small ones are cheap to merge"
    )
    assert is_crowded([run(large, number, 100) for number in range(9)], 8), "all of them have the last moment"
    assert not is_crowded([run(large, number, 100) for number in range(8)], 8)
