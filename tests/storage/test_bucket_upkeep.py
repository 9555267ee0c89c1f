"""Compact, dump and rehydrate, one bucket at a time: nothing lost, nothing twice, nothing leaked."""

from __future__ import annotations

from itertools import islice

import pytest

from backend_faults import RefuseAt, WatchedBackend
from maintenance_steps import compacting, deleting, dumping, rehydrating, relieving
from tidegate.errors import UnavailableError
from tidegate.storage.backends.base import MissingObjectError
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.index import Tenant
from tidegate.storage.spec import Merge
from workers import TASK, Row, Worker, store

BUCKET = 1000


def rows(count: int, *, start: int = 0, key: bytes = b"k", ts: int = BUCKET) -> list[Row]:
    return [(key, ts + position % 900, position) for position in range(start, start + count)]


def placed(worker: Worker, state: object) -> list[tuple[bool, bool, bool]]:
    """(base, hot, stored) of each run of the bucket."""
    found = state.index.snapshot(BUCKET)  # type: ignore[attr-defined]
    return [(run.base, run.hot is not None, run.stored is not None) for run in found.runs]


def steps(operation: object, phase: str) -> None:
    """Drive an operation until it has ended this phase."""
    for reached in operation:  # type: ignore[attr-defined]
        if reached == phase:
            return
    raise AssertionError(f"never reached {phase}")


def test_compacting_two_overlapping_deltas_leaves_one_base_run() -> None:
    """WS-T23"""
    worker = Worker()
    state = worker.attach(store())
    first = worker.append(state, [(b"a", 1000, 1), (b"a", 1500, 2)])
    second = worker.append(state, [(b"a", 1200, 3)])
    before = worker.rows(state)
    assert worker.run(compacting(worker.runtime, TASK, state, BUCKET))
    assert placed(worker, state) == [(True, True, False)]
    assert len([*first, *second]) == 2 and worker.parts.write_buffer.count(TASK) == 0
    assert worker.rows(state) == before


def test_an_append_during_a_compaction_wins_and_nothing_of_the_merge_stays() -> None:
    """WS-T24"""
    worker = Worker()
    state = worker.attach(store())
    worker.append(state, rows(3))
    worker.append(state, rows(3, start=3))
    held = worker.parts.pool.total
    operation = compacting(worker.runtime, TASK, state, BUCKET)
    steps(operation, "placed")
    assert worker.parts.pool.total > held
    added = sum(part.nbytes for part in worker.append(state, rows(1, start=6)))
    assert worker.run(operation) is False
    assert worker.parts.pool.total == held + added
    assert placed(worker, state) == [(False, True, False)] * 3
    assert len(worker.rows(state)) == 7
    assert worker.parts.pool.total == worker.hot_bytes()


def test_compaction_and_dump_of_one_bucket_take_turns() -> None:
    """WS-T25, WS-INV-17: at most one operation works on a bucket."""
    worker = Worker()
    state = worker.attach(store())
    worker.append(state, rows(5))
    worker.append(state, rows(5, start=5))
    before = worker.rows(state)
    dump = dumping(worker.runtime, TASK, state, [BUCKET], evict=True)
    steps(dump, "stored")
    assert worker.run(compacting(worker.runtime, TASK, state, BUCKET)) is False, "the bucket is busy"
    assert worker.run(dump) == 1
    compaction = compacting(worker.runtime, TASK, state, BUCKET)
    worker.append(state, rows(2, start=10))
    worker.append(state, rows(2, start=12))
    steps(compaction, "merged")
    assert worker.run(dumping(worker.runtime, TASK, state, [BUCKET], evict=True)) == 0
    assert worker.run(compaction) is True
    assert worker.rows(state) == sorted([*before, *rows(4, start=10)])


def test_a_dump_that_keeps_hot_gives_every_run_a_stored_copy() -> None:
    """WS-T26"""
    worker = Worker()
    state = worker.attach(store())
    worker.append(state, rows(5))
    assert worker.run(dumping(worker.runtime, TASK, state, [BUCKET], evict=False)) == 1
    assert placed(worker, state) == [(False, True, True)]
    assert worker.used("write_buffer") > 0
    assert worker.rows(state) == rows(5)


def test_dumping_twice_repeats_no_row_and_writes_nothing_new() -> None:
    """WS-T27"""
    worker = Worker()
    state = worker.attach(store())
    worker.append(state, rows(5))
    worker.run(dumping(worker.runtime, TASK, state, [BUCKET], evict=False))
    written = worker.objects("packs")
    assert worker.rows(state) == rows(5)
    assert worker.run(dumping(worker.runtime, TASK, state, [BUCKET], evict=False)) == 0
    assert worker.objects("packs") == written
    worker.append(state, rows(2, start=5))
    worker.run(dumping(worker.runtime, TASK, state, [BUCKET], evict=False))
    assert worker.rows(state) == rows(7)
    found = state.index.snapshot(BUCKET)
    assert found is not None
    assert sum(run.rows for run in found.runs if run.stored is not None) == 7


@pytest.mark.parametrize("deltas", [pytest.param(1, id="WS-T28"), pytest.param(3, id="WS-T29")])
def test_history_that_was_evicted_survives_compaction_and_the_next_dump(deltas: int) -> None:
    worker = Worker()
    state = worker.attach(store())
    worker.append(state, rows(100))
    worker.run(dumping(worker.runtime, TASK, state, [BUCKET], evict=True))
    assert worker.used("write_buffer") == 0
    for delta in range(deltas):
        worker.append(state, rows(10 // deltas, start=100 + delta * (10 // deltas)))
    expected = 100 + deltas * (10 // deltas)
    worker.run(compacting(worker.runtime, TASK, state, BUCKET))
    assert len(worker.rows(state)) == expected
    worker.run(dumping(worker.runtime, TASK, state, [BUCKET], evict=True))
    assert worker.rows(state) == rows(expected)
    assert worker.rows(state, keys=[b"k"]) == rows(expected)
    assert worker.parts.pool.total == 0


def test_a_dump_that_lost_the_race_retires_its_pack_and_touches_no_metadata() -> None:
    """WS-T30"""
    worker = Worker()
    state = worker.attach(store())
    worker.append(state, rows(5))
    operation = dumping(worker.runtime, TASK, state, [BUCKET], evict=True)
    steps(operation, "stored")
    (pack,) = worker.objects("packs")
    worker.append(state, rows(1, start=5))
    layout = state.index.snapshot(BUCKET).layout_version  # type: ignore[union-attr]
    assert worker.run(operation) == 0
    assert state.index.snapshot(BUCKET).layout_version == layout  # type: ignore[union-attr]
    assert placed(worker, state) == [(False, True, False)] * 2
    assert worker.parts.retirement.retired(TASK) == [pack]
    worker.run(deleting(worker.runtime, TASK))
    assert worker.objects("packs") == []


def test_a_put_that_fails_publishes_nothing_and_retires_what_was_written() -> None:
    """WS-T31"""
    inner = MemoryBackend()
    refuse = RefuseAt(2, kinds=frozenset({"put"}))
    worker = Worker(backend=WatchedBackend(inner, refuse))
    state = worker.attach(store())
    for bucket in (1000, 2000, 3000):
        worker.append(state, rows(3, ts=bucket))
    before, charged = worker.rows(state), worker.parts.backlog.used
    held = worker.parts.pool.total
    with pytest.raises(UnavailableError):
        worker.run(dumping(worker.runtime, TASK, state, [1000, 2000, 3000], evict=True))
    assert state.index.unstored_buckets() == [1000, 2000, 3000]
    assert worker.rows(state) == before
    worker.run(deleting(worker.runtime, TASK))
    assert worker.objects("packs") == []
    assert (worker.parts.pool.total, worker.parts.backlog.used) == (held, charged)
    assert worker.run(dumping(worker.runtime, TASK, state, [1000, 2000, 3000], evict=True)) == 3
    assert worker.rows(state) == before


def test_rehydration_fills_base_runs_keeps_the_stored_copy_and_is_idempotent() -> None:
    """WS-T32"""
    worker = Worker()
    state = worker.attach(store())
    worker.append(state, rows(20))
    worker.run(dumping(worker.runtime, TASK, state, [BUCKET], evict=True))
    assert worker.run(rehydrating(worker.runtime, TASK, state, BUCKET)) is True
    assert placed(worker, state) == [(False, True, True)]
    assert worker.used("base_runs") > 0
    assert worker.run(rehydrating(worker.runtime, TASK, state, BUCKET)) is False
    assert worker.rows(state) == rows(20)
    assert len(worker.objects("packs")) == 1


def test_a_rehydration_that_cannot_read_publishes_nothing() -> None:
    """WS-INV-8"""
    worker = Worker()
    state = worker.attach(store())
    worker.append(state, rows(20))
    worker.run(dumping(worker.runtime, TASK, state, [BUCKET], evict=True))
    worker.append(state, rows(1, start=20))
    for name in worker.objects("packs"):
        worker.backend.delete(name)
    worker.parts.packs.forget(state.index.snapshot(BUCKET).runs[0].stored.pack)  # type: ignore[union-attr]
    for operation in (
        rehydrating(worker.runtime, TASK, state, BUCKET),
        compacting(worker.runtime, TASK, state, BUCKET, whole=False),
    ):
        held = worker.parts.pool.total
        if "rehydrat" in operation.__name__:
            with pytest.raises(MissingObjectError):
                worker.run(operation)
        assert worker.parts.pool.total == held
        assert placed(worker, state) == [(False, False, True), (False, True, False)]
    assert worker.runtime.leaks() == (0, 0, 0, 0)


def test_a_reader_keeps_its_view_while_its_runs_are_replaced_and_deleted_after() -> None:
    """WS-T33, WS-INV-9: new runs are published before old packs are retired, and those go when unpinned."""
    worker = Worker()
    state = worker.attach(store())
    for part in range(10):
        worker.append(state, rows(5, start=part * 5))
        worker.run(dumping(worker.runtime, TASK, state, [BUCKET], evict=True))
    old = worker.objects("packs")
    from tidegate.storage.reader import RangeRequest

    reader = worker.runtime.reader()
    loaded = reader.load(reader.plan(TASK, state, [RangeRequest([b"k"])]))
    assert worker.run(compacting(worker.runtime, TASK, state, BUCKET, whole=False)) is True
    worker.run(dumping(worker.runtime, TASK, state, [BUCKET], evict=True))
    worker.run(deleting(worker.runtime, TASK))
    assert set(old) <= set(worker.objects("packs")), "the view pins what was replaced"
    assert loaded.to_table().num_rows == 50
    loaded.close()
    worker.run(deleting(worker.runtime, TASK))
    assert not set(old) & set(worker.objects("packs"))
    assert worker.rows(state) == rows(50)


@pytest.mark.parametrize("merge", list(Merge))
@pytest.mark.parametrize("kind", ["compact", "dump", "evict", "rehydrate", "relieve", "checkpoint"])
def test_an_operation_closed_after_any_phase_leaks_nothing(kind: str, merge: Merge) -> None:
    """WS-T38"""
    phase = 0
    while True:
        worker = Worker(
            write_buffer={"reserve_bytes": 0, "soft_max_bytes": 64 if kind == "relieve" else 1 << 20}
        )
        state = worker.attach(store(merge))
        worker.append(state, [(b"a", 1000, 1), (b"b", 1100, 2), (b"c", 2100, 2)])
        worker.append(state, [(b"a", 1050, 1), (b"b", 1100, 5), (b"c", 2100, 3)])
        if kind == "rehydrate":
            worker.run(dumping(worker.runtime, TASK, state, [1000, 2000], evict=True))
        before, charged = worker.rows(state), worker.parts.backlog.used
        held = worker.parts.pool.total
        operation = {
            "compact": lambda w=worker, s=state: compacting(w.runtime, TASK, s, BUCKET),
            "dump": lambda w=worker, s=state: dumping(w.runtime, TASK, s, [1000, 2000], evict=False),
            "evict": lambda w=worker, s=state: dumping(w.runtime, TASK, s, [1000, 2000], evict=True),
            "rehydrate": lambda w=worker, s=state: rehydrating(w.runtime, TASK, s, BUCKET),
            "relieve": lambda w=worker, s=state: relieving(w.runtime, TASK),
            "checkpoint": lambda w=worker, s=state: w.runtime.checkpointing(TASK),
        }[kind]()
        reached = list(islice(operation, phase))
        operation.close()
        assert worker.rows(state) == before
        assert worker.runtime.leaks() == (0, 0, 0, 0), reached
        found = [run for start in state.index.all_buckets() for run in state.index.snapshot(start).runs]
        hot = sum(run.hot.run.nbytes for run in found if run.hot)
        assert worker.parts.pool.total == hot
        assert hot <= held or kind == "rehydrate"
        assert worker.parts.backlog.used == worker.runtime.charge_of(TASK) <= charged
        assert worker.parts.backlog.used == charged or (kind == "compact" and merge is not Merge.APPEND)
        worker.run(deleting(worker.runtime, TASK))
        assert set(worker.objects("packs")) == {run.stored.pack for run in found if run.stored}
        if len(reached) < phase:
            break
        phase += 1
    assert phase >= 2


def test_compaction_and_rehydration_move_bytes_to_base_runs_exactly() -> None:
    """WS-T50"""
    worker = Worker()
    state = worker.attach(store())
    worker.append(state, rows(30))
    worker.append(state, rows(30, start=30))
    assert worker.used("base_runs") == 0
    worker.run(compacting(worker.runtime, TASK, state, BUCKET))
    run = state.index.snapshot(BUCKET).runs[0]  # type: ignore[union-attr]
    assert worker.used("write_buffer") == 0
    assert worker.used("base_runs") == run.nbytes == worker.parts.pool.total
    worker.run(dumping(worker.runtime, TASK, state, [BUCKET], evict=True))
    assert worker.parts.pool.total == 0
    worker.run(rehydrating(worker.runtime, TASK, state, BUCKET))
    assert worker.used("base_runs") == run.nbytes
    worker.runtime.writer().prune(TASK, state, 5000)
    assert worker.parts.pool.total == 0
    assert worker.parts.backlog.used == 0


@pytest.mark.parametrize("merge", list(Merge))
def test_backlog_moves_only_where_merging_makes_rows_unreachable(merge: Merge) -> None:
    """WS-T49"""
    worker = Worker()
    state = worker.attach(store(merge))
    worker.append(state, rows(50))
    worker.append(state, rows(50))
    charged = worker.parts.backlog.used
    assert charged == state.index.total_charge
    worker.run(dumping(worker.runtime, TASK, state, [BUCKET], evict=False))
    worker.run(dumping(worker.runtime, TASK, state, [BUCKET], evict=True))
    worker.run(rehydrating(worker.runtime, TASK, state, BUCKET))
    assert worker.parts.backlog.used == charged
    worker.run(compacting(worker.runtime, TASK, state, BUCKET))
    if merge is Merge.APPEND:
        assert worker.parts.backlog.used == charged
    else:
        assert worker.parts.backlog.used == state.index.total_charge < charged
    worker.runtime.writer().prune(TASK, state, 10_000)
    assert worker.parts.backlog.used == 0


def test_tombstones_go_with_a_merge_of_the_oldest_run_and_stay_otherwise() -> None:
    worker = Worker()
    state = worker.attach(store(Merge.LAST))
    worker.append(state, [(b"a", 1000, 1), (b"b", 1000, 1)])
    worker.run(dumping(worker.runtime, TASK, state, [BUCKET], evict=True))
    worker.append(state, [(b"a", 1000, None)])
    worker.append(state, [(b"c", 1000, 1)])
    worker.run(compacting(worker.runtime, TASK, state, BUCKET))
    assert worker.rows(state) == [(b"b", 1000, 1), (b"c", 1000, 1)], (
        "the tombstone still hides the stored row"
    )
    assert state.index.total_rows == 4
    worker.run(rehydrating(worker.runtime, TASK, state, BUCKET))
    worker.run(compacting(worker.runtime, TASK, state, BUCKET))
    assert worker.rows(state) == [(b"b", 1000, 1), (b"c", 1000, 1)]
    assert state.index.total_rows == 2
    worker.append(state, [(b"b", 1000, None), (b"c", 1000, None)])
    worker.run(compacting(worker.runtime, TASK, state, BUCKET))
    assert state.index.bucket_count == 0
    assert (worker.parts.pool.total, worker.parts.backlog.used) == (0, 0)


@pytest.mark.parametrize("merge", list(Merge))
def test_a_bucket_larger_than_a_batch_is_merged_strip_by_strip_and_stored_as_it_goes(merge: Merge) -> None:
    worker = Worker(max_batch_bytes=4096, max_run_rows=64)
    state = worker.attach(store(merge))
    for part in range(12):
        worker.append(state, [(b"key%d" % (n % 97), 1000 + n % 7, n + part) for n in range(200)])
        worker.run(dumping(worker.runtime, TASK, state, [BUCKET], evict=True))
    before = worker.rows(state)
    assert worker.run(compacting(worker.runtime, TASK, state, BUCKET, whole=False)) is True
    found = state.index.snapshot(BUCKET)
    assert found is not None
    assert len({run.order for run in found.runs}) < 12
    assert len(found.runs) > len({run.order for run in found.runs}), "pieces of one merge share its order"
    assert all(run.stored is not None and run.rows <= 64 for run in found.runs if run.base)
    assert worker.rows(state) == before
    assert worker.rows(state, keys=[b"key5"]) == [row for row in before if row[0] == b"key5"]
    assert worker.parts.backlog.used == state.index.total_charge
    while worker.run(compacting(worker.runtime, TASK, state, BUCKET, whole=False)):
        pass
    worker.run(deleting(worker.runtime, TASK))
    named = {run.stored.pack for run in state.index.snapshot(BUCKET).runs if run.stored}  # type: ignore[union-attr]
    assert set(worker.objects("packs")) == named
    assert worker.rows(state) == before


def test_hot_copies_never_outlive_their_place_in_the_index() -> None:
    """WS-INV-7"""
    worker = Worker()
    state = worker.attach(store())
    worker.append(state, rows(4))
    worker.append(state, rows(4, start=4))
    operation = compacting(worker.runtime, TASK, state, BUCKET)
    steps(operation, "merged")
    worker.runtime.writer().prune(TASK, state, 9000)
    assert worker.run(operation) is False
    assert worker.parts.pool.total == 0
    assert worker.parts.base_runs.count(TASK) == 0
    assert worker.hot_bytes() == 0
    assert worker.parts.pool.used(TASK, Tenant.BASE_RUNS) == 0
