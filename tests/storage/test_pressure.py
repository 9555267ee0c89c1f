"""Relief of memory: whole keys go, rows and state together, and only as many as it takes."""

from __future__ import annotations

import threading
from itertools import islice

import pyarrow as pa
import pytest

from maintenance_steps import compacting, dumping, relieving
from tidegate.clock import SystemClock
from tidegate.errors import OverloadError
from tidegate.storage.index import PlainState, Tenant
from tidegate.storage.reader import RangeRequest
from tidegate.storage.runs.columns import hash_keys
from tidegate.storage.state import BytesCodec
from workers import TASK, Row, Worker, resident, store

KIB = 1024


def limits(soft: int, reserve: int = 0) -> dict[str, int]:
    return {"reserve_bytes": reserve, "soft_max_bytes": soft}


def rows_of(key: bytes, count: int, *, ts: int = 1000, step: int = 10) -> list[Row]:
    return [(key, ts + position * step, position) for position in range(count)]


def hot_keys(state: PlainState) -> set[bytes]:
    """Keys with any row in memory."""
    index = state.index
    found = [run for start in index.all_buckets() for run in index.snapshot(start).runs]  # type: ignore[union-attr]
    return {key for run in found if run.hot is not None for key in run.hot.run.keys.to_pylist()}


def test_relief_goes_down_to_the_low_watermark() -> None:
    """WS-T39"""
    worker = Worker(write_buffer=limits(KIB), low_watermark_permille=500, hot_bucket_count=0)
    state = worker.attach(store())
    for batch in range(16):
        worker.append(state, [(b"k%d" % (n % 32), 1000 * batch + n, n) for n in range(256)])
    assert worker.runtime.writer().is_over_limit(TASK)
    freed = worker.runtime.writer().relieve(TASK)
    assert freed > 0
    assert worker.used("write_buffer") <= 512
    assert worker.counter("pressure_runs") >= 1
    assert worker.counter("dump_runs") >= 1
    assert len(worker.rows(state)) == 4096


def test_use_of_exactly_the_soft_max_calls_for_nothing() -> None:
    """WS-T40"""
    probe = Worker()
    size = sum(part.nbytes for part in probe.append(probe.attach(store()), rows_of(b"a", 20)))
    for soft, expected in ((size, False), (size - 1, True)):
        worker = Worker(write_buffer=limits(soft))
        state = worker.attach(store())
        worker.append(state, rows_of(b"a", 20))
        assert worker.runtime.writer().is_over_limit(TASK) is expected
        assert (worker.runtime.writer().relieve(TASK) > 0) is expected


def test_the_cold_key_goes_with_all_its_rows_and_state_and_the_other_stays() -> None:
    """WS-T41"""
    worker = Worker(write_buffer=limits(7 * KIB), low_watermark_permille=900)
    events, other = worker.attach(store()), worker.attach(store(name="other"))
    state = worker.runtime.state_handle(TASK, "windows", BytesCodec())
    for name, repeat in ((b"A", 100), (b"B", 100)):
        worker.append(events, rows_of(name, repeat, step=40))
        worker.append(other, rows_of(name, repeat // 4))
        state.put(name, b"state of " + name)
    assert hot_keys(events) == {b"A", b"B"} and worker.counter("pressure_runs") == 0
    worker.append(events, rows_of(b"B", 80, ts=5000))
    assert worker.counter("pressure_runs") == 1, "the append relieves; nobody has to ask for it"
    assert hot_keys(events) == {b"B"}
    assert hot_keys(other) == {b"B"}
    (cache,) = worker.parts.tasks.get(TASK).handles()
    assert resident(cache, b"A") is None
    assert resident(cache, b"B") == b"state of B"
    shelf = worker.parts.tasks.get(TASK).stores["state.windows"].state
    assert hot_keys(shelf) <= {b"B"}  # type: ignore[arg-type]
    b_rows = [row for row in worker.rows(events) if row[0] == b"B"]
    assert len(b_rows) == 180
    assert worker.rows(events, keys=[b"A"]) == sorted(rows_of(b"A", 100, step=40))
    assert state.get(b"A") == b"state of A"
    assert worker.used("write_buffer") <= 7 * KIB * 900 // 1000


def test_an_evicted_key_goes_on_where_it_was_when_rows_arrive() -> None:
    """WS-T42"""
    worker = Worker(write_buffer=limits(512), state_cache=limits(16))
    events = worker.attach(store())
    state = worker.runtime.state_handle(TASK, "windows", BytesCodec())
    worker.append(events, rows_of(b"A", 60))
    state.put(b"A", b"60")
    worker.runtime.writer().relieve(TASK)
    (cache,) = worker.parts.tasks.get(TASK).handles()
    assert resident(cache, b"A") is None
    numbers = worker.parts.tasks.get(TASK).stores["events"].next_seq
    worker.append(events, rows_of(b"A", 5, ts=1900))
    assert worker.parts.tasks.get(TASK).stores["events"].next_seq == numbers + 5
    assert state.get_or_load(b"A", lambda: b"0") == b"60", "loaded, not made anew"
    assert len(worker.rows(events, keys=[b"A"])) == 65
    with worker.runtime.reader().scan(TASK, events) as scan:
        seqs = [seq for batch in scan for seq in batch.column("seq").to_pylist()]
    assert len(set(seqs)) == 65


def test_an_evicted_key_is_in_the_next_checkpoint_and_comes_back_with_it() -> None:
    """WS-T43"""
    worker = Worker(write_buffer=limits(512), state_cache=limits(16))
    events = worker.attach(store())
    state = worker.runtime.state_handle(TASK, "windows", BytesCodec())
    worker.append(events, rows_of(b"A", 60))
    state.put(b"A", b"sixty")
    worker.runtime.writer().relieve(TASK)
    assert hot_keys(events) == set()
    token = worker.runtime.checkpoint(TASK)
    later = Worker(backend=worker.backend, seed=9)
    fresh = later.attach(store())
    later.runtime.apply_checkpoint(TASK, token)
    assert later.rows(fresh) == rows_of(b"A", 60)
    assert later.runtime.state_handle(TASK, "windows", BytesCodec()).get(b"A") == b"sixty"


def test_a_value_in_use_is_passed_over_and_a_view_in_use_stays_readable() -> None:
    """WS-T44"""
    worker = Worker(write_buffer=limits(5 * KIB), low_watermark_permille=900)
    events = worker.attach(store())
    state = worker.runtime.state_handle(TASK, "windows", BytesCodec())
    for name in (b"A", b"B"):
        worker.append(events, rows_of(name, 80))
        state.put(name, name)
    reader = worker.runtime.reader()
    with state.use(b"B", bytes), reader.load(reader.plan(TASK, events, [RangeRequest([b"A"])])) as loaded:
        worker.append(events, rows_of(b"C", 80))  # relief takes the rows of A, the coldest
        assert hot_keys(events) == {b"B", b"C"}
        (cache,) = worker.parts.tasks.get(TASK).handles()
        assert cache.evict(hash_keys(pa.array([b"A", b"B"], pa.binary()))) == 0, "A is gone, B is in use"
        assert resident(cache, b"B") == b"B"
        assert loaded.to_table().num_rows == 80
    assert len(worker.rows(events)) == 240


def test_a_bucket_that_changed_during_the_eviction_keeps_the_blob_and_a_retry_ends_it() -> None:
    """WS-T45, WS-INV-20: a blob leaves memory only when all rows of its key are stored."""
    worker = Worker(write_buffer=limits(KIB), low_watermark_permille=100)
    events = worker.attach(store())
    state = worker.runtime.state_handle(TASK, "windows", BytesCodec())
    worker.append(events, [(b"A", 1000 + 50 * n, n) for n in range(60)])  # three buckets
    state.put(b"A", b"blob")
    operation = relieving(worker.runtime, TASK)
    phases = []
    for phase in operation:
        phases.append(phase)
        if phase == "stored" and phases.count("stored") == 3:
            worker.append(events, [(b"A", 2999, 999)])  # the second bucket changes before it is published
            break
    (cache,) = worker.parts.tasks.get(TASK).handles()
    rest = list(islice(operation, 3))
    assert "published" in rest
    assert resident(cache, b"A") == b"blob", "its rows are not all stored yet"
    worker.run(operation)
    worker.runtime.writer().relieve(TASK)
    assert len(worker.rows(events, keys=[b"A"])) == 61
    assert worker.used("write_buffer") <= 102
    assert resident(cache, b"A") is None
    assert state.get(b"A") == b"blob"
    assert worker.runtime.leaks() == (0, 0, 0, 0)


def test_relief_that_cannot_reach_its_target_says_so_and_the_writer_goes_on() -> None:
    """WS-T46"""
    worker = Worker(write_buffer=limits(512), state_cache=limits(64), low_watermark_permille=100)
    events = worker.attach(store())
    state = worker.runtime.state_handle(TASK, "windows", BytesCodec())
    worker.append(events, [*rows_of(b"A", 40), *rows_of(b"B", 40)])
    with state.use(b"A", lambda: bytes(1000)):
        relief = worker.run(relieving(worker.runtime, TASK))
        assert relief.freed_bytes > 0
        assert relief.short_bytes > 0
        assert hot_keys(events) == set()
        worker.append(events, rows_of(b"C", 5))
    assert worker.counter("pressure_short") >= 1
    assert len(worker.rows(events)) == 85


def test_only_the_offender_is_evicted() -> None:
    """WS-T47"""
    worker = Worker(
        write_buffer=limits(2 * KIB, reserve=2 * KIB), base_runs=limits(64), state_cache=limits(64)
    )
    quiet, loud = worker.attach(store(), "quiet"), worker.attach(store(), "loud")
    worker.append(quiet, rows_of(b"q", 40), "quiet")
    worker.append(loud, rows_of(b"l", 400), "loud")
    before = worker.used("write_buffer", "quiet")
    worker.runtime.writer().relieve("quiet")
    worker.runtime.writer().relieve("loud")
    assert worker.used("write_buffer", "quiet") == before > 0
    assert worker.used("write_buffer", "loud") < 2 * KIB


def test_at_the_worker_total_other_tasks_give_way_above_their_reserves_and_then_it_is_an_error() -> None:
    """WS-T48"""
    worker = Worker(
        worker_total_bytes=8 * KIB,
        max_tasks=2,
        max_batch_bytes=8 * KIB,
        memory_timeout_ms=50,
        write_buffer=limits(64 * KIB, reserve=2 * KIB),
        base_runs=limits(64 * KIB),
        state_cache=limits(64 * KIB),
    )
    first, second = worker.attach(store(), "one"), worker.attach(store(), "two")
    worker.append(first, rows_of(b"a", 120), "one")
    worker.append(first, rows_of(b"b", 120), "one")
    assert worker.used("write_buffer", "one") > 5 * KIB
    worker.append(second, rows_of(b"c", 150), "two")
    assert worker.parts.pool.total <= 8 * KIB
    assert worker.used("write_buffer", "one") >= 0
    assert len(worker.rows(first, "one")) == 240
    handle = worker.runtime.state_handle("one", "windows", BytesCodec())
    charged = worker.parts.backlog.used
    with handle.use(b"a", lambda: bytes(4 * KIB)), pytest.raises(OverloadError) as told:
        worker.append(second, rows_of(b"d", 280), "two")
    assert told.value.reason == "worker_memory"
    assert "worker_total_bytes" in str(told.value)
    assert worker.parts.backlog.used == charged, "what was not accepted is not charged"
    handle.delete(b"a")
    worker.append(second, rows_of(b"d", 200), "two")
    assert len(worker.rows(second, "two")) == 350
    assert worker.parts.pool.total <= 8 * KIB


def test_clean_base_runs_go_before_any_key_is_evicted() -> None:
    worker = Worker(base_runs=limits(KIB), low_watermark_permille=500)
    events = worker.attach(store())
    worker.append(events, rows_of(b"A", 60))
    worker.append(events, rows_of(b"A", 60))
    worker.run(compacting(worker.runtime, TASK, events, 1000))
    worker.run(dumping(worker.runtime, TASK, events, [1000], evict=False))
    worker.append(events, rows_of(b"A", 5, ts=3000))
    assert worker.used("base_runs") > KIB
    written = worker.objects()
    relief = worker.run(relieving(worker.runtime, TASK))
    assert relief.keys == 0
    assert worker.used("base_runs") == 0
    assert worker.used("write_buffer") > 0
    assert worker.objects() == written
    assert len(worker.rows(events)) == 125


def test_relief_while_another_thread_appends_loses_nothing() -> None:
    worker = Worker(clock=SystemClock(), write_buffer=limits(16 * KIB))
    events = worker.attach(store())
    stop, errors = threading.Event(), []

    def relieve() -> None:
        try:
            while not stop.is_set():
                worker.runtime.writer().relieve(TASK)
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            errors.append(error)

    thread = threading.Thread(target=relieve)
    thread.start()
    try:
        expected = []
        for batch in range(60):
            rows = [(b"k%d" % (n % 50), 1000 + batch * 20 + n % 900, n) for n in range(200)]
            worker.append(events, rows)
            expected += rows
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert worker.rows(events) == sorted(expected)
    assert worker.parts.backlog.used == events.index.total_charge
    assert worker.parts.pool.total == worker.hot_bytes()
    assert worker.parts.pool.used(TASK, Tenant.STATE_CACHE) == 0
