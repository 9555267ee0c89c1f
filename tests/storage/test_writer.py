"""The write path: what is accepted is charged once, what fails leaves nothing behind, and a full backlog brakes."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pytest

from maintenance_steps import compacting, deleting, dumping, rehydrating
from threads import Beside, until
from tidegate.clock import SystemClock
from tidegate.errors import InvalidError, OverloadError, UnavailableError
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import PlainState, RunEntry, Tenant
from tidegate.storage.runtime import WorkerStorageRuntime
from tidegate.storage.scratch import Scratch
from tidegate.storage.spec import EARLIEST, LATEST, Merge
from tidegate.storage.state import BytesCodec
from workers import TASK, Row, Worker, rows_batch, store


def rows(count: int, *, start: int = 0, ts: int = 1000, key: bytes = b"k") -> list[Row]:
    return [(key, ts + position % 900, position) for position in range(start, start + count)]


def test_an_append_is_charged_what_its_runs_weigh_and_touches_no_index() -> None:
    worker = Worker()
    state = worker.attach(store())
    writer = worker.runtime.writer()
    parts = writer.append(TASK, state, rows_batch(Merge.APPEND, [*rows(3), *rows(2, ts=5000)]))
    assert [part.bucket for part in parts] == [1000, 5000]
    assert [part.rows for part in parts] == [3, 2]
    assert state.index.all_buckets() == []
    weight = sum(part.nbytes for part in parts)
    assert (
        weight == sum(part.charge for part in parts) == worker.parts.backlog.used == worker.parts.pool.total
    )
    writer.undo(TASK, parts)
    assert (worker.parts.backlog.used, worker.parts.pool.total) == (0, 0)
    assert worker.parts.write_buffer.count(TASK) == 0


def test_an_empty_batch_is_nothing() -> None:
    worker = Worker()
    state = worker.attach(store())
    assert worker.runtime.writer().append(TASK, state, rows_batch(Merge.APPEND, [])) == []
    assert worker.parts.backlog.used == 0


def test_rows_of_a_store_that_is_not_attached_are_refused() -> None:
    worker = Worker()
    state = store()
    with pytest.raises(InvalidError, match="attach"):
        worker.append(state, rows(1))
    worker.attach(state)
    with pytest.raises(InvalidError, match="not attached with this state"):
        worker.append(store(), rows(1))
    with pytest.raises(InvalidError, match="own name"):
        worker.attach(store())
    worker.attach(state)


def test_a_batch_that_cannot_be_built_takes_nothing_and_uses_no_number() -> None:
    worker = Worker()
    state = worker.attach(store())
    worker.append(state, rows(3))
    used, total = worker.parts.backlog.used, worker.parts.pool.total
    wrong = rows_batch(Merge.APPEND, rows(3)).rename_columns(["key", "ts", "other"])
    with pytest.raises(InvalidError):
        worker.runtime.writer().append(TASK, state, wrong)
    assert (worker.parts.backlog.used, worker.parts.pool.total) == (used, total)
    assert worker.parts.tasks.get(TASK).stores["events"].next_seq == 3


def test_large_batches_are_split_and_still_numbered_in_order() -> None:
    worker = Worker(max_batch_bytes=4096, max_run_rows=100)
    state = worker.attach(store())
    parts = worker.append(state, rows(1000))
    assert max(part.rows for part in parts) <= 100
    with worker.runtime.reader().scan(TASK, state) as scan:
        table = pa.Table.from_batches(list(scan))
    by_seq = dict(zip(table["seq"].to_pylist(), table["value"].to_pylist(), strict=True))
    assert by_seq == {number: number for number in range(1000)}


def test_more_than_fits_beside_the_pool_is_refused_by_name() -> None:
    worker = Worker(memory_ceiling_bytes=9 << 20, max_batch_bytes=1 << 20)
    state = worker.attach(store())
    with pytest.raises(InvalidError, match="memory_ceiling_bytes"):
        worker.append(state, rows(100_000))
    assert (worker.parts.backlog.used, worker.parts.pool.total) == (0, 0)


def test_a_control_message_overtakes_blocked_data_and_frees_it() -> None:
    """WS-T54: the operator's loop tries data without waiting, so the watermark behind it is seen and makes room."""
    worker = Worker(backlog_limit_bytes=2000)
    state = worker.attach(store())
    writer = worker.runtime.writer()
    worker.append(state, rows(60))
    data, control = [rows_batch(Merge.APPEND, rows(50, ts=9000))], [8000]
    accepted = 0
    for _ in range(10):
        if not data:
            break
        try:
            state.index.insert(writer.append(TASK, state, data[0], timeout_ms=0))
        except OverloadError as full:
            assert full.reason == "backlog_full"
            writer.prune(TASK, state, control.pop(0))
        else:
            accepted += data.pop(0).num_rows
    assert accepted == 50
    assert control == []
    assert len(worker.rows(state)) == 50


def test_a_window_larger_than_the_backlog_is_told_at_once() -> None:
    """WS-T55"""
    worker = Worker(clock=SystemClock(), backlog_limit_bytes=2000, backlog_timeout_ms=60_000)
    state = worker.attach(store())
    writer = worker.runtime.writer()
    worker.append(state, rows(60))
    blocked = Beside(lambda: writer.append(TASK, state, rows_batch(Merge.APPEND, rows(60))))
    until(lambda: worker.parts.backlog.waiting == 1)
    assert writer.prune(TASK, state, 0).rows == 0
    writer.nothing_left_to_prune(TASK)
    with pytest.raises(OverloadError) as told:
        blocked.result()
    assert told.value.reason == "retention_exceeds_backlog"
    assert worker.parts.backlog.used == state.index.total_charge


@pytest.mark.parametrize("merge", [Merge.LAST, Merge.FOLD])
def test_rows_that_are_overwritten_do_not_fill_the_backlog(merge: Merge) -> None:
    """One thread appends and nobody prunes: what was merged away makes room for what comes."""
    worker = Worker(backlog_limit_bytes=8000)
    worker.parts.backlog.expect_jobs(1, 1)
    state = worker.attach(store(merge))
    for number in range(60):
        worker.append(state, [(b"k%d" % at, 1000, number) for at in range(30)])
    assert worker.parts.backlog.used == state.index.total_charge <= 8000
    assert len(worker.rows(state)) == 30
    with pytest.raises(OverloadError) as told:
        for number in range(60):
            worker.append(state, [(b"new%d" % (30 * number + at), 1000, 0) for at in range(30)])
    assert told.value.reason == "retention_exceeds_backlog"


def test_a_merge_of_somebody_else_is_waited_for_before_rows_are_refused() -> None:
    worker = Worker(clock=SystemClock(), backlog_limit_bytes=8000, backlog_timeout_ms=60_000)
    worker.parts.backlog.expect_jobs(1, 1)
    state = worker.attach(store(Merge.LAST))
    batch = rows_batch(Merge.LAST, [(b"k%d" % at, 1000, 1) for at in range(30)])
    while worker.parts.backlog.used < 6000:
        state.index.insert(worker.runtime.writer().append(TASK, state, batch))
    merging = compacting(worker.runtime, TASK, state, 1000)
    next(merging)  # has the bucket
    blocked = Beside(lambda: worker.runtime.writer().append(TASK, state, two(batch)))
    until(lambda: worker.parts.backlog.waiting == 1)
    worker.run(merging)
    state.index.insert(blocked.result())
    assert len(worker.rows(state)) == 60


def two(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows, and as many of other keys, so that there is no room for them."""
    others = pa.array([b"x" + key for key in batch.column("key").to_pylist()], pa.binary())
    return pa.Table.from_batches([batch, batch.set_column(0, "key", others)]).combine_chunks().to_batches()[0]


SMALL_BACKLOG = {"backlog_limit_bytes": 9000, "write_buffer": {"reserve_bytes": 0, "soft_max_bytes": 3000}}
SMALL_POOL = {
    "worker_total_bytes": 16_384,
    "max_tasks": 1,
    "max_inflight_maintenance": 1,
    "write_buffer": {"reserve_bytes": 16_384, "soft_max_bytes": 16_384},
    "base_runs": {"reserve_bytes": 0},
    "state_cache": {"reserve_bytes": 0},
}


@pytest.mark.parametrize(
    ("reason", "settings"),
    [
        ("backlog_full", SMALL_BACKLOG),
        ("retention_exceeds_backlog", SMALL_BACKLOG),
        ("worker_memory", SMALL_POOL),
        ("unavailable", SMALL_POOL),
    ],
)
@pytest.mark.parametrize("merge", list(Merge))
def test_an_append_that_is_refused_has_changed_nothing(
    merge: Merge, reason: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places may change on the way, where memory is relieved first; rows, numbers and budgets may not."""
    worker = Worker(**settings)
    state = worker.attach(store(merge))
    writer, attached = worker.runtime.writer(), worker.parts.tasks.get(TASK).stores[state.index.spec.name]

    def all_of_it() -> tuple[object, ...]:
        hot = sum(int(run.hot.run.nbytes) for run in entries(state) if run.hot is not None)
        assert worker.parts.pool.total == hot, (
            "the pool has what the index has, and nothing of the refused rows"
        )
        assert worker.parts.backlog.used == state.index.total_charge
        return state.index.data_version, state.index.total_charge, attached.next_seq, worker.rows(state)

    def fail(*arguments: object, **options: object) -> None:
        raise UnavailableError("the disk is away; try again later")

    with ExitStack() as held:
        if reason == "worker_memory":  # no slot for relief: nothing can be taken back
            held.enter_context(worker.runtime.scratch.permit(Scratch.MAINTENANCE))
        if reason == "unavailable":
            monkeypatch.setattr(worker.parts.backend, "put", fail)
        for number in range(40):
            before = all_of_it()
            batch = rows_batch(merge, [(b"k%d" % (at % 9), 1000 * number + at, at) for at in range(60)])
            if reason == "retention_exceeds_backlog":
                writer.nothing_left_to_prune(TASK)
            try:
                state.index.insert(writer.append(TASK, state, batch))
            except (OverloadError, UnavailableError) as error:
                assert getattr(error, "reason", "unavailable") == reason
                assert all_of_it() == before
                return
    raise AssertionError("nothing was refused")


def entries(state: PlainState) -> list[RunEntry]:
    return [run for bucket in state.index.query(EARLIEST, LATEST) for run in bucket.runs]


def test_a_stuck_consumer_brakes_the_writer_and_pruning_lets_it_through() -> None:
    worker = Worker(clock=SystemClock(), backlog_limit_bytes=20_000)
    state = worker.attach(store())
    writer = worker.runtime.writer()

    def ingest() -> int:
        for batch in range(40):
            state.index.insert(
                writer.append(TASK, state, rows_batch(Merge.APPEND, rows(100, ts=1000 * batch)))
            )
        return 40

    source = Beside(ingest)
    until(lambda: worker.parts.backlog.waiting == 1)
    assert worker.parts.backlog.used <= 20_000
    while not source.is_done:
        buckets = state.index.all_buckets()
        if worker.parts.backlog.waiting and buckets:
            writer.prune(TASK, state, buckets[0] + 1000)
            assert worker.parts.backlog.used <= 20_000
    assert source.result() == 40
    writer.prune(TASK, state, 10**9)
    assert (worker.parts.backlog.used, worker.parts.pool.total) == (0, 0)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("merge", list(Merge))
def test_after_pruning_everything_all_budgets_are_at_zero(merge: Merge, seed: int) -> None:
    """WS-T56"""
    chance = random.Random(seed)
    worker = Worker(write_buffer={"reserve_bytes": 0, "soft_max_bytes": 3000}, hot_bucket_count=1)
    state = worker.attach(store(merge))
    for _ in range(60):
        choice = chance.randrange(7)
        buckets = state.index.all_buckets() or [0]
        bucket = chance.choice(buckets)
        if choice <= 2:
            worker.append(
                state, [(b"k%d" % chance.randrange(9), chance.randrange(6000), n) for n in range(20)]
            )
        elif choice == 3:
            worker.run(compacting(worker.runtime, TASK, state, bucket, whole=chance.random() < 0.5))
        elif choice == 4:
            worker.run(dumping(worker.runtime, TASK, state, [bucket], evict=chance.random() < 0.5))
        elif choice == 5:
            worker.run(rehydrating(worker.runtime, TASK, state, bucket))
        else:
            worker.runtime.maintain(TASK, 10_000)
        assert worker.parts.backlog.used == state.index.total_charge
        assert worker.parts.pool.total == worker.hot_bytes()
    worker.runtime.writer().prune(TASK, state, 10**9)
    worker.run(deleting(worker.runtime, TASK))
    assert (worker.parts.backlog.used, worker.parts.pool.total) == (0, 0)
    assert worker.objects("packs") == []
    assert worker.runtime.leaks() == (0, 0, 0, 0)


def test_dropping_time_segments_gives_their_packs_back_whole() -> None:
    worker = Worker(hot_bucket_count=0)
    state = worker.attach(store(segment_ms=5000))
    for bucket in range(15):
        worker.append(state, rows(5, ts=1000 * bucket))
    worker.runtime.maintain(TASK, 10_000)
    assert len(worker.objects("packs")) == 3
    dropped = worker.runtime.writer().drop_segments(TASK, state, 12_000)
    assert dropped.rows == 50
    worker.run(deleting(worker.runtime, TASK))
    (left,) = worker.objects("packs")
    assert "/10000-" in left
    assert len(worker.rows(state)) == 25


def test_an_invalid_config_is_refused_before_the_backend_is_opened() -> None:
    opened = []
    with pytest.raises(InvalidError, match="worker_total_bytes"):
        WorkerStorageRuntime.open(
            StorageConfig.for_tests(worker_total_bytes=1), lambda: opened.append(1) or None
        )
    with pytest.raises(InvalidError, match="StorageConfig"):
        WorkerStorageRuntime.open({"worker_total_bytes": 1}, lambda: opened.append(1) or None)
    assert opened == []


def test_a_context_shows_the_facade_and_nothing_behind_it() -> None:
    """WS-INV-1"""
    worker = Worker()
    context = worker.runtime.context(TASK)
    state = store()
    context.attach(state)
    worker.append(state, rows(3))
    handle = context.state_handle("windows", BytesCodec())
    handle.put(b"k", b"v")
    assert worker.runtime.state_handle(TASK, "windows", BytesCodec()).get(b"k") == b"v"
    context.start_maintenance()
    context.stop_maintenance()
    assert context.maintain(1000)
    shown = {name for name in dir(context) if not name.startswith("_")}
    assert shown == {
        "attach", "maintain", "reader", "start_maintenance", "state_handle", "stop_maintenance", "task", "writer",
    }  # fmt: skip


def test_closing_reports_what_was_never_given_back() -> None:
    worker = Worker()
    state = worker.attach(store())
    worker.append(state, rows(30))
    worker.run(dumping(worker.runtime, TASK, state, [1000], evict=True))
    scan = worker.runtime.reader().scan(TASK, state)
    next(iter(scan))
    leaks = worker.runtime.close()
    assert leaks.leases == 1
    assert leaks.reader_permits == 0  # a scan has a permit only while it makes a batch
    scan.close()
    assert worker.runtime.leaks() == (0, 0, 0, 0)


def test_a_task_that_leaves_gives_everything_back_and_may_come_again() -> None:
    worker = Worker(max_tasks=1, hot_bucket_count=0)
    state = worker.attach(store())
    handle = worker.runtime.state_handle(TASK, "windows", BytesCodec())
    worker.append(state, rows(30))
    handle.put(b"k", b"v")
    token = worker.runtime.checkpoint(TASK)
    worker.runtime.detach(TASK)
    assert (worker.parts.backlog.used, worker.parts.pool.total) == (0, 0)
    worker.attach(store(), "another")
    worker.runtime.detach("another")
    worker.runtime.apply_checkpoint(TASK, token)
    assert len(worker.rows(worker.attach(store()))) == 30
    assert worker.runtime.state_handle(TASK, "windows", BytesCodec()).get(b"k") == b"v"


def test_one_store_can_be_given_up_alone() -> None:
    worker = Worker()
    kept, given_up = worker.attach(store()), worker.attach(store(name="other"))
    worker.append(kept, rows(5))
    worker.append(given_up, rows(5))
    worker.run(dumping(worker.runtime, TASK, given_up, [1000], evict=False))
    worker.runtime.detach(TASK, given_up)
    assert worker.parts.backlog.used == kept.index.total_charge
    assert (
        worker.parts.pool.used(TASK, Tenant.WRITE_BUFFER) == worker.parts.pool.total == kept.index.total_bytes
    )
    worker.run(deleting(worker.runtime, TASK))
    assert worker.objects("packs") == []
