"""Packs that are mostly dead: what is live moves out of them, and nothing else changes."""

from __future__ import annotations

import pytest

from backend_faults import RefuseAt, WatchedBackend
from maintenance_steps import compacting, deleting, dumping, repacking
from tidegate.errors import InvalidError, UnavailableError
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.backends.sealed import pack_name, segment_of_pack
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import PlainState
from tidegate.storage.spec import Merge
from workers import TASK, Row, Worker, readings, store

SEGMENT = 10_000
LATE = 9_000  # the bucket that stays


def rows(count: int, ts: int) -> list[Row]:
    return [(b"k%d" % number, ts, number) for number in range(count)]


def worn_worker(**settings: object) -> tuple[Worker, PlainState]:
    """A worker with one pack of ten buckets, of which nine were pruned."""
    worker = Worker(**settings)  # type: ignore[arg-type]
    state = worker.attach(store(segment_ms=SEGMENT))
    for bucket in range(10):
        worker.append(state, rows(20, 1000 * bucket))
    assert worker.run(dumping(worker.runtime, TASK, state, state.index.all_buckets(), evict=True)) == 10
    for ts in (20_000, 21_000):  # the newest, which maintenance leaves alone
        worker.append(state, rows(1, ts))
    worker.runtime.writer().prune(TASK, state, LATE)
    return worker, state


def reclaimable(worker: Worker) -> float:
    return readings(worker.metrics)["reclaimable_bytes"][TASK,]


def test_a_pass_moves_the_live_runs_and_deletes_the_old_pack() -> None:
    """WS-INV-14: the backlog does not move, and no row does."""
    worker, state = worn_worker()
    old, before, backlog = worker.objects("packs"), worker.rows(state), worker.runtime.backlog.used
    held = reclaimable(worker)
    size = sum(run.nbytes for bucket in state.index.query(0, LATE) for run in bucket.runs)
    assert held == 9 * size
    assert worker.runtime.maintain(TASK, 10**6)
    new = worker.objects("packs")
    assert len(old) == len(new) == 1 and old != new
    assert segment_of_pack(new[0], TASK, "events") == 0
    assert worker.rows(state) == before and worker.runtime.backlog.used == backlog
    assert (worker.counter("repack_runs"), worker.counter("repack_bytes")) == (1, size)
    assert reclaimable(worker) == 0 and not any(worker.runtime.leaks())
    assert worker.runtime.maintain(TASK, 10**6) and worker.objects("packs") == new, "once is enough"


@pytest.mark.parametrize("permille", [0, 99])
def test_packs_with_a_larger_live_share_stay(permille: int) -> None:
    worker, _ = worn_worker(repack_live_permille=permille)
    old = worker.objects("packs")
    assert worker.runtime.maintain(TASK, 10**6)
    assert worker.objects("packs") == old and reclaimable(worker) > 0


def test_a_segment_that_is_still_written_is_left_alone() -> None:
    worker, state = worn_worker(hot_bucket_count=3)
    old = worker.objects("packs")
    assert worker.runtime.maintain(TASK, 10**6) and worker.objects("packs") == old
    worker.append(state, rows(1, 22_000))
    assert worker.runtime.maintain(TASK, 10**6) and old[0] not in worker.objects("packs")


def test_several_sparse_packs_of_a_segment_become_one_and_hot_copies_stay_hot() -> None:
    worker = Worker()
    state = worker.attach(store(Merge.LAST, segment_ms=SEGMENT))
    for batch in range(3):
        for bucket in range(10):
            worker.append(state, rows(20, 1000 * bucket + batch))
        worker.run(dumping(worker.runtime, TASK, state, state.index.all_buckets(), evict=batch < 2))
    worker.append(state, rows(1, 20_000))
    worker.append(state, rows(1, 21_000))
    worker.runtime.writer().prune(TASK, state, LATE)
    before, used = worker.rows(state), worker.used("write_buffer")
    assert len(worker.objects("packs")) == 3
    worker.run(repacking(worker.runtime, TASK))
    found = state.index.snapshot(LATE)
    assert found is not None and [run.hot is not None for run in found.runs] == [False, False, True]
    assert len({run.stored.pack for run in found.runs if run.stored is not None}) == 1
    worker.run(deleting(worker.runtime, TASK))
    assert len(worker.objects("packs")) == 1
    assert worker.rows(state) == before and worker.used("write_buffer") == used


@pytest.mark.parametrize("phase", ["captured", "stored", "published"])
@pytest.mark.parametrize("event", ["close", "append", "prune", "compact"])
def test_whatever_happens_between_its_phases_no_row_is_lost_and_nothing_leaks(phase: str, event: str) -> None:
    """WS-INV-7"""
    worker, state = worn_worker()
    expected = worker.rows(state)
    operation = repacking(worker.runtime, TASK)
    for reached in operation:
        if reached == phase:
            break
    if event == "append":
        worker.append(state, [(b"new", LATE, 1)])
        expected = sorted([*expected, (b"new", LATE, 1)])
    elif event == "prune":
        worker.runtime.writer().prune(TASK, state, SEGMENT)
        expected = [row for row in expected if row[1] >= SEGMENT]
    elif event == "compact":
        assert not worker.run(compacting(worker.runtime, TASK, state, LATE)), "the bucket is busy"
    if event == "close":
        operation.close()
    else:
        worker.run(operation)
    assert worker.rows(state) == expected and not any(worker.runtime.leaks())
    for _ in range(2):
        worker.run(repacking(worker.runtime, TASK))
        worker.run(deleting(worker.runtime, TASK))
    named = {run.stored.pack for bucket in state.index.query(0, SEGMENT) for run in bucket.runs if run.stored}
    assert set(worker.objects("packs")) == named == worker.parts.use.packs(TASK)
    assert reclaimable(worker) == 0 and worker.rows(state) == expected


def test_a_busy_bucket_is_passed_over_and_tried_again() -> None:
    worker, state = worn_worker()
    old = worker.objects("packs")
    unlock = worker.parts.locks.try_lock(TASK, "events", LATE)
    assert unlock is not None
    worker.run(repacking(worker.runtime, TASK))
    assert worker.objects("packs") == old
    unlock()
    worker.run(repacking(worker.runtime, TASK))
    worker.run(deleting(worker.runtime, TASK))
    assert worker.objects("packs") != old and len(worker.rows(state)) == 22


def test_readers_keep_the_old_pack_until_they_are_done() -> None:
    worker, state = worn_worker()
    old = worker.objects("packs")[0]
    with worker.runtime.reader().scan(TASK, state) as scan:
        assert worker.runtime.maintain(TASK, 10**6)
        assert old in worker.objects("packs")
        assert sum(batch.num_rows for batch in scan) == 22
    worker.run(deleting(worker.runtime, TASK))
    assert old not in worker.objects("packs")


def test_a_checkpoint_keeps_the_old_pack_until_it_is_released() -> None:
    """WS-INV-10"""
    worker, state = worn_worker()
    expected = worker.rows(state)
    old = worker.objects("packs")[0]
    token = worker.runtime.checkpoint(TASK)
    assert worker.runtime.maintain(TASK, 10**6)
    assert old in worker.objects("packs") and reclaimable(worker) > 0
    later = worker.runtime.checkpoint(TASK)

    again = Worker(backend=worker.backend)
    restored = again.attach(store(segment_ms=SEGMENT))
    again.runtime.apply_checkpoint(TASK, token)
    assert again.rows(restored) == expected

    worker.runtime.release_checkpoint(TASK, token)
    assert worker.runtime.maintain(TASK, 10**6)
    assert old not in worker.objects("packs") and reclaimable(worker) == 0
    worker.runtime.apply_checkpoint(TASK, later)
    assert worker.rows(state) == expected


def test_a_put_that_fails_or_loses_its_answer_changes_nothing() -> None:
    for after in (False, True):
        faults = RefuseAt(1, kinds=frozenset({"put"}), after=after, lifted=True)
        worker, state = worn_worker(backend=WatchedBackend(MemoryBackend(), faults))
        expected, old = worker.rows(state), worker.objects("packs")
        faults.arm()
        with pytest.raises(UnavailableError):
            worker.run(repacking(worker.runtime, TASK))
        assert worker.rows(state) == expected and not any(worker.runtime.leaks())
        worker.run(deleting(worker.runtime, TASK))
        assert worker.objects("packs") == old, "what the failed put may have left is gone"


def test_a_restored_worker_sees_what_retained_checkpoints_know_to_be_dead() -> None:
    worker = Worker()
    state = worker.attach(store(segment_ms=SEGMENT))
    for bucket in range(10):
        worker.append(state, rows(20, 1000 * bucket))
    first = worker.runtime.checkpoint(TASK)
    for ts in (20_000, 21_000):
        worker.append(state, rows(1, ts))
    worker.runtime.writer().prune(TASK, state, LATE)
    second = worker.runtime.checkpoint(TASK)

    again = Worker(backend=worker.backend, seed=7)
    restored = again.attach(store(segment_ms=SEGMENT))
    again.runtime.apply_checkpoint(TASK, second, retained=[first])
    assert reclaimable(again) > 0
    assert again.runtime.maintain(TASK, 10**6)
    assert again.counter("repack_runs") == 1 and len(again.rows(restored)) == 22


def test_a_restored_worker_finds_what_died_before_any_checkpoint_it_knows() -> None:
    worker = Worker(write_buffer={"reserve_bytes": 0, "soft_max_bytes": 4 << 20})  # nothing is evicted before
    state = worker.attach(store(segment_ms=SEGMENT))
    for bucket in range(10):
        worker.append(state, rows(3000, 1000 * bucket))
    worker.run(dumping(worker.runtime, TASK, state, state.index.all_buckets(), evict=True))
    (old,) = worker.objects("packs")
    for ts in (20_000, 21_000):
        worker.append(state, rows(1, ts))
    worker.runtime.writer().prune(TASK, state, LATE)
    token = worker.runtime.checkpoint(TASK)

    again = Worker(backend=worker.backend, seed=7)
    restored = again.attach(store(segment_ms=SEGMENT))
    again.runtime.apply_checkpoint(TASK, token)
    assert reclaimable(again) == 0, "a manifest names what is live"
    assert again.runtime.maintain(TASK, 10**6)
    assert again.counter("repack_runs") == 1 and len(again.rows(restored)) == 3002
    assert reclaimable(again) > 0 and old in again.objects("packs"), "until the checkpoint is released"
    again.runtime.checkpoint(TASK)
    again.runtime.release_checkpoint(TASK, token)
    assert again.runtime.maintain(TASK, 10**6)
    assert reclaimable(again) == 0 and old not in again.objects("packs")


@pytest.mark.parametrize("merge", list(Merge))
def test_a_restored_pack_that_is_all_live_is_not_written_again(merge: Merge) -> None:
    worker = Worker()
    state = worker.attach(store(merge, segment_ms=SEGMENT))
    for bucket in range(10):
        worker.append(state, rows(1, 1000 * bucket))
    worker.append(state, rows(1, 20_000))
    worker.append(state, rows(1, 21_000))
    token = worker.runtime.checkpoint(TASK)
    again = Worker(backend=worker.backend, seed=7)
    again.attach(store(merge, segment_ms=SEGMENT))
    again.runtime.apply_checkpoint(TASK, token)
    assert again.runtime.maintain(TASK, 10**6)
    assert again.counter("repack_runs") == reclaimable(again) == 0


def test_a_packs_name_tells_its_segment_to_its_own_store_only() -> None:
    name = pack_name("a/b", "s.x", -20_000, "7f")
    assert segment_of_pack(name, "a/b", "s.x") == -20_000
    assert segment_of_pack(name, "a/b", "s") is segment_of_pack(name, "a", "s.x") is None


def test_a_share_above_the_whole_is_refused() -> None:
    with pytest.raises(InvalidError, match="repack_live_permille"):
        StorageConfig(repack_live_permille=1001)
