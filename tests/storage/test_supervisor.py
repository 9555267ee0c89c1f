"""Who does maintenance and when: background jobs, inline passes, and what an error does."""

from __future__ import annotations

import pytest

from backend_faults import BackendRecorder, RefuseAt, WatchedBackend
from maintenance_steps import compacting, dumping
from threads import until
from tidegate.clock import SystemClock
from tidegate.errors import CorruptError, UnavailableError
from tidegate.scheduling import ThreadScheduler
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.index import PlainState, Tenant
from tidegate.storage.maintenance.dump import relieve
from tidegate.storage.memory.key_lru import OFTEN
from tidegate.storage.reader import RangeRequest, Time
from tidegate.storage.spec import Merge
from workers import TASK, Row, Worker, store


def rows(count: int, *, start: int = 0, ts: int = 1000) -> list[Row]:
    return [
        (b"k%d" % (position % 5), ts + position % 900, position) for position in range(start, start + count)
    ]


def fill(worker: Worker, state, buckets: range, parts: int = 2) -> None:
    for bucket in buckets:
        for part in range(parts):
            worker.append(state, rows(10, ts=bucket * 1000 + part))


def test_a_bucket_that_did_not_change_is_not_dumped_again() -> None:
    """WS-T34"""
    recorder = BackendRecorder()
    worker = Worker(backend=WatchedBackend(MemoryBackend(), recorder), hot_bucket_count=0)
    state = worker.attach(store())
    fill(worker, state, range(4))
    assert worker.runtime.maintain(TASK, 60_000)
    puts = len(recorder.of("put"))
    assert puts == 4
    for _ in range(5):
        worker.runtime.maintain(TASK, 60_000)
    assert len(recorder.of("put")) == puts
    worker.append(state, rows(1, ts=2000))
    worker.runtime.maintain(TASK, 60_000)
    assert len(recorder.of("put")) == puts + 1


def test_the_newest_buckets_are_left_alone() -> None:
    """WS-T35"""
    worker = Worker()
    state = worker.attach(store())
    fill(worker, state, range(5))
    newest = [state.index.snapshot(start) for start in (3000, 4000)]
    worker.runtime.maintain(TASK, 60_000)
    assert [state.index.snapshot(start) for start in (3000, 4000)] == newest
    assert state.index.hot_buckets() == [3000, 4000]
    assert state.index.unstored_buckets() == [3000, 4000]
    assert all(len(state.index.snapshot(start).runs) == 1 for start in (0, 1000, 2000))
    assert len(worker.rows(state)) == 100


def test_a_newest_bucket_with_very_many_runs_is_compacted_all_the_same() -> None:
    worker = Worker()
    state = worker.attach(store())
    for part in range(40):
        worker.append(state, rows(3, start=part))
    worker.runtime.maintain(TASK, 60_000)
    assert len(state.index.snapshot(1000).runs) <= 8
    assert state.index.hot_buckets() == [1000]
    assert len(worker.rows(state)) == 120


def test_a_busy_bucket_is_passed_over_and_the_job_lives_on() -> None:
    """WS-T36"""
    worker = Worker(hot_bucket_count=0)
    state = worker.attach(store())
    fill(worker, state, range(3))
    busy = compacting(worker.runtime, TASK, state, 1000)
    next(busy)
    assert worker.runtime.maintain(TASK, 60_000)
    assert state.index.hot_buckets() == [1000]
    worker.run(busy)
    assert worker.runtime.maintain(TASK, 60_000)
    assert state.index.hot_buckets() == []
    assert len(worker.rows(state)) == 60


def test_starting_twice_is_one_set_of_jobs_and_stopping_ends_them() -> None:
    """WS-T37"""
    worker = Worker(hot_bucket_count=0)
    state = worker.attach(store())
    fill(worker, state, range(3))
    worker.runtime.start(TASK)
    worker.runtime.start(TASK)
    worker.clock.advance("1s")
    ran = worker.scheduler.run_due()
    assert sorted(set(ran)) == [f"{TASK}/compact", f"{TASK}/delete", f"{TASK}/dump"]
    assert ran.count(f"{TASK}/dump") == 1
    assert state.index.hot_buckets() == []
    worker.runtime.stop(TASK)
    worker.clock.advance("10s")
    assert worker.scheduler.run_due() == []
    fill(worker, state, range(3))
    worker.runtime.start(TASK)
    worker.clock.advance("1s")
    assert worker.scheduler.run_due()
    assert state.index.hot_buckets() == []
    assert len(worker.rows(state)) == 120


def test_background_threads_keep_up_with_a_writer_and_stop_cleanly() -> None:
    clock = SystemClock()
    scheduler = ThreadScheduler(clock)
    worker = Worker(
        clock=clock,
        scheduler=scheduler,
        hot_bucket_count=1,
        compaction_interval_ms=1,
        dump_interval_ms=2,
        write_buffer={"reserve_bytes": 0, "soft_max_bytes": 8192},
    )
    state, folded = worker.attach(store()), worker.attach(store(Merge.FOLD, "sums"))
    worker.runtime.start(TASK)
    expected = []
    for batch in range(150):
        added = rows(40, start=batch, ts=1000 * (batch // 10))
        worker.append(state, added)
        worker.append(folded, added)
        expected += added
    until(lambda: len(state.index.hot_buckets()) <= 1)
    token = worker.runtime.checkpoint(TASK)
    worker.runtime.stop(TASK)
    assert worker.rows(state) == sorted(expected)
    assert sum(row[2] for row in worker.rows(folded)) == len(expected)
    assert worker.runtime.leaks() == (0, 0, 0, 0)
    later = Worker(backend=worker.backend, seed=4)
    later.runtime.apply_checkpoint(TASK, token)
    assert later.rows(later.attach(store())) == sorted(expected)
    scheduler.close()


def test_an_inline_pass_goes_on_where_its_budget_ended() -> None:
    worker = Worker(hot_bucket_count=0)
    state = worker.attach(store())
    fill(worker, state, range(10))
    calls = 1
    while not worker.runtime.maintain(TASK, 0):
        calls += 1
        assert calls < 1000
    assert calls > 10, "a budget of nothing does one operation a call"
    assert state.index.hot_buckets() == []
    assert len(worker.rows(state)) == 200


def test_an_unfinished_inline_pass_never_blocks_a_checkpoint_or_a_restore() -> None:
    for calls in range(1, 12):
        worker = Worker(hot_bucket_count=0)
        state = worker.attach(store())
        fill(worker, state, range(2))
        for _ in range(calls):
            worker.runtime.maintain(TASK, 0)
        token = worker.runtime.checkpoint(TASK)
        for _ in range(calls):
            worker.runtime.maintain(TASK, 0)
        worker.runtime.apply_checkpoint(TASK, token)
        assert worker.runtime.leaks() == (0, 0, 0, 0)
        assert len(worker.rows(state)) == 40


def test_an_error_in_the_background_stops_the_task_with_its_reason() -> None:
    refuse = RefuseAt(1, kinds=frozenset({"put"}), persistent=True)
    worker = Worker(backend=WatchedBackend(MemoryBackend(), refuse), hot_bucket_count=0)
    state = worker.attach(store())
    fill(worker, state, range(2))
    worker.runtime.start(TASK)
    for _ in range(61):  # a backend that is out of reach for a while stops nothing
        assert worker.counter("maintenance_failures") == 0
        worker.append(state, rows(0))
        worker.clock.advance("1s")
        worker.scheduler.run_due()
    for call in (
        lambda: worker.append(state, rows(1)),
        lambda: worker.runtime.checkpoint(TASK),
        lambda: worker.runtime.maintain(TASK, 10),
        lambda: worker.runtime.writer().relieve(TASK),
    ):
        with pytest.raises(UnavailableError, match="refused on purpose"):
            call()
    assert len(worker.rows(state)) == 40, "reading is still allowed"
    assert worker.counter("maintenance_failures") == 1
    refuse.lift()
    worker.runtime.start(TASK)  # nothing was harmed: once the backend is well, it goes on
    worker.clock.advance("1s")
    worker.scheduler.run_due()
    worker.append(state, rows(1))
    assert len(worker.rows(state)) == 41
    assert worker.runtime.leaks() == (0, 0, 0, 0)


@pytest.mark.parametrize("kind", ["put", "delete"])
def test_a_backend_that_is_out_of_reach_for_a_moment_does_not_stop_background_maintenance(kind: str) -> None:
    refuse = RefuseAt(1, kinds=frozenset({kind}), persistent=True, lifted=True)
    worker = Worker(backend=WatchedBackend(MemoryBackend(), refuse), hot_bucket_count=0)
    state = worker.attach(store())
    worker.runtime.start(TASK)
    expected = 0
    for _ in range(40):  # many outages of 10 s, with a turn that succeeds between them
        fill(worker, state, range(2))
        expected += 40
        refuse.arm()
        for _ in range(10):
            worker.clock.advance("1s")
            worker.scheduler.run_due()
        refuse.lift()
        worker.clock.advance("1s")
        worker.scheduler.run_due()
    assert state.index.hot_buckets() == []
    assert len(worker.rows(state)) == expected
    assert worker.counter("maintenance_failures") == 0
    if kind == "put":
        assert refuse.fired and worker.counter("maintenance_retries") >= refuse.fired
    worker.runtime.stop(TASK)
    assert worker.runtime.leaks() == (0, 0, 0, 0)


def test_turns_that_are_far_apart_are_tried_a_few_times_before_the_task_stops() -> None:
    refuse = RefuseAt(1, kinds=frozenset({"put"}), persistent=True)
    worker = Worker(
        backend=WatchedBackend(MemoryBackend(), refuse), hot_bucket_count=0, dump_interval_ms=300_000
    )
    fill(worker, worker.attach(store()), range(2))
    worker.runtime.start(TASK)
    for turn in range(4):
        assert worker.counter("maintenance_failures") == 0, turn
        worker.clock.advance("5m")
        worker.scheduler.run_due()
    assert worker.counter("maintenance_failures") == 1


def test_damage_met_by_maintenance_stops_the_task_until_it_is_restored() -> None:
    inner = MemoryBackend()
    worker = Worker(backend=inner, hot_bucket_count=0, max_open_packs=1)
    state = worker.attach(store())
    token = worker.runtime.checkpoint(TASK)
    for part in range(12):
        worker.append(state, rows(5, start=part))
        worker.run(dumping(worker.runtime, TASK, state, [1000], evict=True))
    for name in worker.objects("packs")[:6]:
        worker.parts.packs.forget(name)
        inner.delete(name)
    with pytest.raises(CorruptError):
        worker.runtime.maintain(TASK, 60_000)
    with pytest.raises(CorruptError, match="stopped because maintenance failed"):
        worker.append(state, rows(1))
    with pytest.raises(CorruptError):
        worker.runtime.start(TASK)
    assert len(state.index.snapshot(1000).runs) == 12, "nothing was published from half the inputs"
    worker.runtime.apply_checkpoint(TASK, token)
    worker.append(state, rows(1))
    assert len(worker.rows(state)) == 1


@pytest.mark.parametrize("merge", list(Merge))
def test_maintenance_work_grows_with_the_rows_not_with_their_square(merge: Merge) -> None:
    """512 appends into one bucket, a pass after each eight: every row is copied a logarithmic number of times."""
    worker = Worker(hot_bucket_count=0)
    state = worker.attach(store(merge))
    for part in range(512):
        worker.append(state, [(b"key%d" % n, 1000, part) for n in range(part * 4, part * 4 + 4)])
        if part % 8 == 7:
            worker.runtime.maintain(TASK, 60_000)
    appended = worker.counter("appended_bytes")
    assert worker.counter("compact_bytes") < 14 * appended
    assert worker.counter("dump_bytes") < 14 * appended
    assert len({run.order for run in state.index.snapshot(1000).runs}) <= 9
    assert len(worker.rows(state)) == 2048


def test_whoever_has_a_bucket_waits_for_nothing_so_checkpoints_that_wait_for_it_go_on() -> None:
    """WS-INV-17: compactions begin without a slot, then two checkpoints take all slots and want the same buckets."""
    worker = Worker(max_inflight_maintenance=2)
    states = {task: worker.attach(store(), task) for task in ("one", "two", "three")}
    for task, state in states.items():
        worker.append(state, rows(5), task)
        worker.append(state, rows(5), task)
        worker.append(state, rows(5, ts=5000), task)
    blockers = [
        dumping(worker.runtime, "three", states["three"], [bucket], evict=True) for bucket in (1000, 5000)
    ]
    for blocker in blockers:
        next(blocker)
    operations = [compacting(worker.runtime, task, states[task], 1000) for task in ("one", "two")]
    assert [next(operation) for operation in operations] == ["waiting", "waiting"]
    for blocker in blockers:
        blocker.close()
    operations = [*(worker.runtime.checkpointing(task) for task in ("one", "two")), *operations]
    for _ in range(200):
        for operation in list(operations):
            try:
                next(operation)
            except StopIteration:
                operations.remove(operation)
    assert operations == []
    assert worker.runtime.leaks() == (0, 0, 0, 0)


# -- buckets that are read cold again and again ---------------------------------------------------


def is_hot(state: PlainState, bucket: int) -> bool:
    found = state.index.snapshot(bucket)
    return found is not None and all(run.is_hot for run in found.runs)


def read(worker: Worker, state: PlainState, bucket: int) -> int:
    """A load of two keys of one bucket; how many rows it gave."""
    reader, bounds = worker.runtime.reader(), Time(bucket, bucket + 999)
    with reader.load(reader.plan(TASK, state, [RangeRequest([b"k1", b"k3"], bounds)])) as loaded:
        return loaded.to_table().num_rows


@pytest.mark.parametrize("merge", list(Merge))
@pytest.mark.parametrize("driven", ["inline", "background"])
def test_a_bucket_that_is_read_cold_again_and_again_comes_back_into_memory(merge: Merge, driven: str) -> None:
    worker = Worker(hot_bucket_count=0)
    state = worker.attach(store(merge))
    fill(worker, state, range(4))

    def pass_by() -> None:
        if driven == "inline":
            assert worker.runtime.maintain(TASK, 60_000)
        else:
            worker.clock.advance(worker.parts.config.dump_interval_ms)
            worker.scheduler.run_due()

    if driven == "background":
        worker.runtime.start(TASK)
    pass_by()
    assert state.index.hot_buckets() == []
    expected = read(worker, state, 1000)
    for _ in range(OFTEN - 2):
        read(worker, state, 1000)
        pass_by()
        assert state.index.hot_buckets() == []
    read(worker, state, 1000)
    pass_by()
    assert state.index.hot_buckets() == [1000] and is_hot(state, 1000)
    loads = worker.counter("loads")
    for _ in range(5):
        assert read(worker, state, 1000) == expected
        pass_by()
    assert worker.counter("loads") == loads, "read from memory, and periodic dumps leave it there"
    assert worker.counter("rehydrate_published") == 1
    worker.append(state, rows(1, ts=1000))
    pass_by()
    assert state.index.hot_buckets() == [], "new rows are stored, and the bucket begins anew"
    assert worker.used("base_runs") == 0


def test_a_bucket_read_now_and_then_and_one_that_is_swept_stay_cold() -> None:
    worker = Worker(hot_bucket_count=0)
    state = worker.attach(store())
    fill(worker, state, range(2))
    assert worker.runtime.maintain(TASK, 60_000)
    for _ in range(3 * OFTEN):
        worker.rows(state)  # a scan
        worker.runtime.maintain(TASK, 60_000)
        worker.runtime.maintain(TASK, 60_000)
        read(worker, state, 1000)
        worker.runtime.maintain(TASK, 60_000)
        worker.runtime.maintain(TASK, 60_000)
    assert state.index.hot_buckets() == []


def test_buckets_that_come_back_stay_within_their_share_and_go_first_under_pressure() -> None:
    soft = 8_000
    worker = Worker(
        hot_bucket_count=0,
        base_runs={"reserve_bytes": 0, "soft_max_bytes": soft},
        write_buffer={"reserve_bytes": 0, "soft_max_bytes": 4_000},
    )
    state = worker.attach(store())
    for bucket in range(20):
        worker.append(state, rows(60, ts=bucket * 1000))
    assert worker.runtime.maintain(TASK, 60_000)
    before, relieved = worker.rows(state), worker.counter("pressure_runs")
    evicted = worker.counter("evicted_keys")
    for _ in range(3):
        for bucket in range(20):
            for _ in range(OFTEN):
                read(worker, state, bucket * 1000)
        assert worker.runtime.maintain(TASK, 60_000)
        most = worker.parts.config.relief_target(Tenant.BASE_RUNS)
        assert 0 < worker.used("base_runs") <= most
        assert worker.parts.pool.total <= worker.parts.pool.limit
    assert worker.counter("pressure_runs") == relieved, "what comes back is no reason for relief"
    hot = len(state.index.hot_buckets())
    assert 0 < hot < 20
    floors = {Tenant.BASE_RUNS: worker.used("base_runs") // 2}
    worker.run(relieve(worker.parts.tasks.get(TASK), floors))
    assert worker.used("base_runs") <= floors[Tenant.BASE_RUNS]
    assert len(state.index.hot_buckets()) < hot
    assert worker.counter("evicted_keys") == evicted, "their copies are dropped; no key is evicted for them"
    assert worker.rows(state) == before


def test_a_restore_forgets_which_buckets_were_read() -> None:
    worker = Worker(hot_bucket_count=0)
    state = worker.attach(store())
    fill(worker, state, range(2))
    assert worker.runtime.maintain(TASK, 60_000)
    token = worker.runtime.checkpoint(TASK)
    worker.append(state, rows(1, ts=5000))
    for _ in range(OFTEN):
        read(worker, state, 1000)
    worker.runtime.apply_checkpoint(TASK, token)
    assert worker.runtime.maintain(TASK, 60_000)
    assert state.index.hot_buckets() == []
