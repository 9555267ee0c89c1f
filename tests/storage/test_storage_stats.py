"""Storage as numbers: what is reported is counted, what is owned is read from its owner, polls show the change."""

from __future__ import annotations

import gc

import pytest

from tidegate.clock import ManualClock
from tidegate.metrics import Metrics
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import Tenant
from tidegate.storage.maintenance.retirement import BatchPins, BatchRetirementQueue, CheckpointHolds, PackUse
from tidegate.storage.memory.backlog import BacklogBudget
from tidegate.storage.memory.key_lru import KeyLru
from tidegate.storage.memory.pool import WorkerMemoryPool, WriteBuffer
from tidegate.storage.memory.scratch import Scratch, ScratchLimiter
from tidegate.storage.metrics import PREFIX, StorageStats
from tidegate.storage.state_cache import BytesCodec, StateCache
from workers import TASK, Worker, store

T = ("t",)


def test_every_report_is_counted_for_its_task() -> None:
    stats = StorageStats(Metrics())
    stats.appended("t", rows=10, nbytes=1000)
    stats.appended("u", rows=1, nbytes=1)
    stats.pruned("t", rows=4, nbytes=400)
    stats.loaded("t", runs=2, nbytes=50)
    stats.dumped("t", runs=3, nbytes=300, ms=1500)
    stats.compacted("t", runs=5, nbytes=60, ms=250)
    stats.rehydrated("t", runs=1, nbytes=7)
    stats.evicted("t", keys=9, nbytes=90, retried=1)
    stats.lost("t", "dump")
    stats.deleted("t", packs=2, failed=1)
    stats.checkpointed("t", packs=1, ms=100, nbytes=10)
    stats.restored("t", ms=2000)
    stats.overloaded("t", "backlog_full")
    stats.failed("t")
    now = stats.snapshot()
    assert now["appended_rows"] == {T: 10.0, ("u",): 1.0}
    expected = {
        "pruned_bytes": 400, "loads": 1, "loaded_runs": 2, "loaded_bytes": 50,
        "dump_calls": 1, "dump_runs": 3, "dump_bytes": 300,
        "dump_seconds": 1.5, "compact_published": 1, "compact_runs": 5, "compact_seconds": 0.25,
        "rehydrate_published": 1, "evicted_keys": 9, "eviction_retries": 1, "deleted_packs": 2, "failed_deletes": 1,
        "checkpoints": 1, "checkpoint_seconds": 0.1, "restore_seconds": 2, "maintenance_failures": 1,
    }  # fmt: skip
    assert {name: now[name][T] for name in expected} == expected
    assert now["lost"] == {("t", "dump"): 1} and now["overloads"] == {("t", "backlog_full"): 1}


@pytest.mark.parametrize(
    ("freed", "short", "counted"),
    [
        pytest.param(100, None, 0, id="WS-T46-reached"),
        pytest.param(60, None, 1, id="WS-T46-short"),
        (100, 1, 1),
    ],
)
def test_relief_that_did_not_reach_its_target_is_visible(freed: int, short: int | None, counted: int) -> None:
    stats = StorageStats(Metrics())
    stats.relieved("t", need=100, freed=freed, short=short)
    now = stats.snapshot()
    assert (now["pressure_runs"][T], now["pressure_freed_bytes"][T], now["pressure_short"][T]) == (
        1,
        freed,
        counted,
    )


def test_gauges_are_read_from_their_owners_when_somebody_looks() -> None:
    clock, stats, config = ManualClock(), StorageStats(Metrics()), StorageConfig.for_tests()
    pool = WorkerMemoryPool(config, clock)
    backlog = BacklogBudget(clock, limit_bytes=100, largest_bytes=100, timeout_ms=1)
    scratch = ScratchLimiter(clock, reader_slots=2, maintenance_slots=1, timeout_ms=1)
    buffer, pins = WriteBuffer(pool), BatchPins()
    retirement = BatchRetirementQueue(
        NoBackend(), pins, CheckpointHolds(), clock, backoff_ms=1, backoff_max_ms=1
    )
    state = StateCache("t", "op", BytesCodec(), NoShelf(), pool, clock, key_lru=KeyLru("t"))
    stats.watch_memory(pool, backlog, scratch, buffer)
    stats.watch_task("t", pins, retirement, PackUse(), lambda: [state])
    pool.reserve("t", Tenant.WRITE_BUFFER, 70)
    state.put(b"k", b"blob")
    backlog.acquire(30)
    pins.pin("t", ["p"])
    retirement.retire("t", ["p", "q"])
    with scratch.permit(Scratch.READER):
        now = stats.snapshot()
    assert now["hot_bytes"]["t", "write_buffer"] == 70 and now["hot_runs"]["t", "write_buffer"] == 0
    assert now["pool_bytes"][()] == pool.total and now["pool_limit_bytes"][()] == config.worker_total_bytes
    assert (now["backlog_bytes"][()], now["backlog_limit_bytes"][()]) == (30, 100)
    assert now["scratch_in_use"] == {("reader",): 1, ("maintenance",): 0}
    assert now["retired_packs"] == {
        ("t", "pinned"): 1,
        ("t", "held"): 0,
        ("t", "retrying"): 0,
        ("t", "ready"): 1,
    }
    assert now["open_leases"][T] == 1
    assert now["state_values"]["t", "op"] == now["state_dirty"]["t", "op"] == 1
    assert set(now["waiting"].values()) == {0}


def test_a_task_that_left_the_worker_leaves_nothing_behind_but_what_was_counted() -> None:
    worker, task = Worker(), "leaving"  # no other test has a task of this name
    for turn in range(5):
        worker.append(worker.attach(store(), task), [(b"k", 1000, 1)], task)
        assert worker.runtime.stats.snapshot()["open_leases"] == {(task,): 0.0}
        worker.runtime.detach(task)
        now = worker.runtime.stats.snapshot()
        assert now["appended_rows"] == {(task,): turn + 1.0}
        gauges = [each for each in worker.metrics.instruments() if each.kind == "gauge"]
        assert [
            sample for each in gauges for sample in each.samples() if sample.labels.get("task") == task
        ] == []
    gc.collect()
    # isinstance would follow weak proxies of other tests, and raise for those whose object is gone
    assert [each for each in gc.get_objects() if type(each) is KeyLru and each.task == task] == []


def test_the_same_numbers_are_metrics_of_the_process() -> None:
    metrics = Metrics()
    StorageStats(metrics).dumped("t", runs=1, nbytes=9, ms=0)
    named = {(sample.name, sample.labels.get("task")): sample.value for sample in metrics.samples()}
    assert named[f"{PREFIX}dump_bytes_total", "t"] == 9
    StorageStats(metrics).dumped("t", runs=1, nbytes=1, ms=0)
    assert metrics.counter(f"{PREFIX}dump_bytes_total", "", ("task",)).value(task="t") == 10


class NoBackend:
    def delete(self, name: str) -> None:
        raise AssertionError(name)


class NoShelf:
    def write(self, *arguments: object) -> None:
        raise AssertionError

    def read(self, *arguments: object) -> tuple[object, object]:
        raise AssertionError


def test_what_readers_take_from_packs_is_counted_and_hot_reads_are_not() -> None:
    worker = Worker()
    events = worker.attach(store())
    worker.append(events, [(b"k", 1000, 1), (b"k", 2000, 2)])
    worker.rows(events)
    assert worker.counter("loads") == 0
    worker.run(worker.runtime.dumping(TASK, events, [1000, 2000], evict=True))
    worker.rows(events, keys=[b"k"])
    assert worker.counter("loads") == 1
    assert worker.counter("loaded_runs") == 2
    stored = [run for start in (1000, 2000) for run in events.index.snapshot(start).runs]
    assert worker.counter("loaded_bytes") == sum(run.nbytes for run in stored)
