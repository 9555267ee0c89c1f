"""Storage as numbers: what is reported is counted, what is owned is read from its owner, polls show the change."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

from maintenance_steps import dumping
from tidegate.clock import ManualClock
from tidegate.metrics import Metrics
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import StoredRef, Tenant
from tidegate.storage.maintenance.retirement import BatchPins, BatchRetirementQueue, CheckpointHolds, PackUse
from tidegate.storage.memory.backlog import BacklogBudget
from tidegate.storage.memory.key_lru import KeyLru
from tidegate.storage.memory.pool import BaseRuns, WorkerMemoryPool, WriteBuffer
from tidegate.storage.metrics import PREFIX, StorageStats
from tidegate.storage.parts import TaskStorage
from tidegate.storage.scratch import Scratch, ScratchLimiter
from tidegate.storage.state import NamedValues
from workers import TASK, Worker, readings, store

T = ("t",)


def test_every_report_is_counted_for_its_task() -> None:
    metrics = Metrics()
    stats = StorageStats(metrics)
    stats.count("t", appended_rows=10, appended_bytes=1000, dump_seconds=1.5)
    stats.count("t", appended_rows=5)
    stats.count("u", appended_rows=1)
    stats.lost("t", "dump")
    stats.overloaded("t", "backlog_full")
    now = readings(metrics)
    assert now["appended_rows"] == {T: 15.0, ("u",): 1.0}
    assert (now["appended_bytes"][T], now["dump_seconds"][T]) == (1000, 1.5)
    assert now["lost"] == {("t", "dump"): 1} and now["overloads"] == {("t", "backlog_full"): 1}


def test_gauges_are_read_from_their_owners_when_somebody_looks() -> None:
    clock, metrics, config = ManualClock(), Metrics(), StorageConfig.for_tests()
    stats = StorageStats(metrics)
    pool = WorkerMemoryPool(config, clock)
    backlog = BacklogBudget(clock, limit_bytes=100, largest_bytes=100, timeout_ms=1)
    scratch = ScratchLimiter(clock, reader_slots=2, maintenance_slots=1, timeout_ms=1)
    buffer, pins = WriteBuffer(pool), BatchPins()
    retirement = BatchRetirementQueue(config, MemoryBackend(), pins, CheckpointHolds(), clock)
    parts: Any = SimpleNamespace(
        pool=pool, clock=clock, backlog=backlog, scratch=scratch, write_buffer=buffer, base_runs=BaseRuns(pool),
        pins=pins, retirement=retirement, use=PackUse(),
    )  # fmt: skip
    task = TaskStorage(parts, "t", KeyLru("t"), None, NamedValues("t", pool))  # type: ignore[arg-type]
    stats.watch_memory(parts)
    stats.watch_task(task)
    pool.reserve("t", Tenant.WRITE_BUFFER, 70)
    backlog.acquire(30)
    pins.pin("t", [StoredRef("p", 0)])
    retirement.retire("t", ["p", "q"])
    with scratch.permit(Scratch.READER):
        now = readings(metrics)
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
    assert set(now["waiting"].values()) == {0}


def test_a_task_that_left_the_worker_leaves_nothing_behind_but_what_was_counted() -> None:
    worker, task = Worker(), "leaving"  # no other test has a task of this name
    for turn in range(5):
        worker.append(worker.attach(store(), task), [(b"k", 1000, 1)], task)
        assert readings(worker.metrics)["open_leases"] == {(task,): 0.0}
        worker.runtime.detach(task)
        assert readings(worker.metrics)["appended_rows"] == {(task,): turn + 1.0}
        assert [
            sample
            for each, samples in worker.metrics.collect()
            for sample in samples
            if each.kind == "gauge" and sample.labels.get("task") == task
        ] == []
    gc.collect()
    # isinstance would follow weak proxies of other tests, and raise for those whose object is gone
    assert [each for each in gc.get_objects() if type(each) is KeyLru and each.task == task] == []


def test_workers_that_share_metrics_are_summed_and_one_that_is_closed_has_no_gauges() -> None:
    metrics = Metrics()
    one, other = Worker(metrics=metrics), Worker(metrics=metrics)
    for worker, task, rows in ((one, "a", 1), (other, "b", 3)):
        worker.append(worker.attach(store(), task), [(b"k", 1000, row) for row in range(rows)], task)
    for _ in range(2):  # asking changes nothing
        now = readings(metrics)
        assert now["pool_bytes"] == {(): one.parts.pool.total + other.parts.pool.total}
        assert now["backlog_bytes"] == {(): one.parts.backlog.used + other.parts.backlog.used}
        assert {task for task, _ in now["hot_bytes"]} == {"a", "b"}
    one.runtime.close()
    now = readings(metrics)
    assert now["pool_bytes"] == {(): other.parts.pool.total} and {task for task, _ in now["hot_bytes"]} == {
        "b"
    }
    other.runtime.close()
    gauges = [(each.name, samples) for each, samples in metrics.collect() if each.kind == "gauge"]
    assert gauges and all(samples == [] for _, samples in gauges)


def test_the_same_numbers_are_metrics_of_the_process() -> None:
    metrics = Metrics()
    StorageStats(metrics).count("t", dump_bytes=9)
    named = {(sample.name, sample.labels.get("task")): sample.value for sample in metrics.samples()}
    assert named[f"{PREFIX}dump_bytes_total", "t"] == 9
    StorageStats(metrics).count("t", dump_bytes=1)
    assert metrics.counter(f"{PREFIX}dump_bytes_total", "", ("task",)).value(task="t") == 10


def test_what_readers_take_from_packs_is_counted_and_hot_reads_are_not() -> None:
    worker = Worker()
    events = worker.attach(store())
    worker.append(events, [(b"k", 1000, 1), (b"k", 2000, 2)])
    worker.rows(events)
    assert worker.counter("loads") == 0
    worker.run(dumping(worker.runtime, TASK, events, [1000, 2000], evict=True))
    worker.rows(events, keys=[b"k"])
    assert worker.counter("loads") == 1
    assert worker.counter("loaded_runs") == 2
    stored = [run for start in (1000, 2000) for run in events.index.snapshot(start).runs]
    assert worker.counter("loaded_bytes") == sum(run.nbytes for run in stored)
