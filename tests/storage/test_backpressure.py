"""A slow consumer slows its source, and nothing else happens: no growth, no hang, no loss.

Real threads, the real clock, and a bound on every wait: a test that would hang fails instead.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from storage_oracles import batch_of, scan_all
from tidegate.clock import SystemClock
from tidegate.errors import OverloadError
from tidegate.files import Files
from tidegate.randomness import SeededRandomness
from tidegate.scheduling import ThreadScheduler
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import BucketIndex, PlainState
from tidegate.storage.runtime import WorkerStorageRuntime
from tidegate.storage.spec import Merge, StoreSpec

TASK = "job/window/0"
LIMIT = 64 << 10
ROWS = 100
PATIENCE_S = 300
SPEC = StoreSpec("events", Merge.APPEND, pa.schema([("value", pa.int64())]), bucket_ms=1000)


@pytest.fixture(params=["memory", "folder"])
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WorkerStorageRuntime]:
    clock = SystemClock()
    backend = (
        MemoryBackend() if request.param == "memory" else FolderBackend(tmp_path, files=Files(), clock=clock)
    )
    scheduler = ThreadScheduler(clock)
    opened = WorkerStorageRuntime.open(
        StorageConfig.for_tests(backlog_limit_bytes=LIMIT, backlog_timeout_ms=PATIENCE_S * 1000),
        backend,
        clock=clock,
        scheduler=scheduler,
        randomness=SeededRandomness(1),
    )
    yield opened
    opened.close()
    scheduler.close()


def attached(runtime: WorkerStorageRuntime, task: str = TASK) -> PlainState:
    state = PlainState(BucketIndex(SPEC))
    runtime.attach(task, state)
    return state


def batch(number: int) -> pa.RecordBatch:
    """All rows of second `number`."""
    return batch_of(
        SPEC, [{"key": b"k%d" % (row % 7), "ts": number * 1000 + row, "value": row} for row in range(ROWS)]
    )


def in_thread(action: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, failed


def until(fact: Callable[[], bool]) -> None:
    """Wait for another thread to get somewhere; bounded."""
    tick = threading.Event()
    for _ in range(PATIENCE_S * 200):
        if fact():
            return
        tick.wait(0.005)
    raise AssertionError("did not happen in time")


def test_a_stuck_consumer_brakes_the_writer_at_the_budget_and_a_freed_one_lets_all_through(
    runtime: WorkerStorageRuntime,
) -> None:
    """WS-T54: the writer waits at the limit; pruning on another thread frees it; nothing is lost; all ends at zero."""
    state = attached(runtime)
    runtime.start(TASK)
    writer, reader, total = runtime.writer(), runtime.reader(), 60
    written, seen = [], []

    def produce() -> None:
        for number in range(total):
            state.index.insert(writer.append(TASK, state, batch(number)))
            written.append(number)

    thread, failed = in_thread(produce)
    until(lambda: runtime.backlog.waiting == 1)
    stuck_at = len(written)
    assert 0 < stuck_at < total
    assert runtime.backlog.used <= LIMIT
    assert runtime.pool.total <= LIMIT + 4096, "memory is bounded with the backlog"

    while len(seen) < total * ROWS:  # the consumer wakes up: reads what is there, then prunes it
        done = len(written)
        table = scan_all(reader, TASK, state)
        rows = [ts for ts in table.column("ts").to_pylist() if ts < done * 1000]
        seen += rows
        if rows:
            writer.prune(TASK, state, done * 1000)
        assert runtime.backlog.used <= LIMIT
        assert not failed, failed
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and not failed
    assert sorted(seen) == sorted(number * 1000 + row for number in range(total) for row in range(ROWS))
    runtime.stop(TASK)
    assert runtime.backlog.used == 0
    assert runtime.pool.total == 0


def test_a_watermark_overtakes_blocked_data(runtime: WorkerStorageRuntime) -> None:
    """WS-T54: the loop that prunes is not the one that waits: control messages have a lane of their own."""
    state = attached(runtime)
    writer = runtime.writer()
    watermarks: queue.Queue[int | None] = queue.Queue()

    def control() -> None:
        while (watermark := watermarks.get()) is not None:
            writer.prune(TASK, state, watermark)

    lane, lane_failed = in_thread(control)

    def data() -> None:
        for number in range(40):
            state.index.insert(writer.append(TASK, state, batch(number)))

    loop, failed = in_thread(data)
    until(lambda: runtime.backlog.waiting == 1)
    for second in range(1, 41):
        watermarks.put(second * 1000)
        until(lambda: not loop.is_alive() or runtime.backlog.waiting == 1 or bool(failed))
    watermarks.put(None)
    loop.join(PATIENCE_S)
    lane.join(PATIENCE_S)
    assert not failed and not lane_failed and not loop.is_alive()
    writer.prune(TASK, state, 10**9)
    assert runtime.backlog.used == 0


def test_a_window_larger_than_the_budget_is_told_and_not_waited_for(runtime: WorkerStorageRuntime) -> None:
    """WS-T55: everything is processed, nothing can be pruned: the writer gets the reason at once."""
    state = attached(runtime)
    writer = runtime.writer()

    def produce() -> None:
        for number in range(60):
            state.index.insert(writer.append(TASK, state, batch(number)))

    thread, failed = in_thread(produce)
    until(lambda: runtime.backlog.waiting == 1)
    writer.nothing_left_to_prune(TASK)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert [type(error) for error in failed] == [OverloadError]
    assert failed[0].reason == "retention_exceeds_backlog"
    assert "backlog_limit_bytes" in str(failed[0])
    writer.prune(TASK, state, 10**9)
    assert runtime.backlog.used == 0


def test_a_wait_that_is_too_long_ends_with_a_reason_and_accepts_nothing(
    runtime: WorkerStorageRuntime,
) -> None:
    """WS-T55: without a word from the consumer the wait is bounded; the rows can be appended again later."""
    state = attached(runtime)
    writer = runtime.writer()
    with pytest.raises(OverloadError) as caught:
        for number in range(60):
            state.index.insert(writer.append(TASK, state, batch(number), timeout_ms=20))
    assert caught.value.reason == "backlog_full"
    rows, used = state.index.total_rows, runtime.backlog.used
    assert used == state.index.total_charge and rows % ROWS == 0
    writer.prune(TASK, state, 2000)
    again = rows // ROWS
    state.index.insert(writer.append(TASK, state, batch(again), timeout_ms=20))
    assert state.index.total_rows == rows - 2 * ROWS + ROWS
    writer.prune(TASK, state, 10**9)
    assert runtime.backlog.used == runtime.pool.total == 0


def test_a_long_run_that_prunes_behind_itself_stays_bounded(runtime: WorkerStorageRuntime) -> None:
    """WS-T91: lateness unset means none, so old data goes; backlog, memory and disk follow the window, not the run."""
    state = attached(runtime)
    writer, most = runtime.writer(), 0
    for number in range(300):
        state.index.insert(writer.append(TASK, state, batch(number), timeout_ms=0))
        writer.prune(TASK, state, (number - 4) * 1000)
        if number % 10 == 0:
            runtime.maintain(TASK, 50)
        if number % 50 == 49:
            token = runtime.checkpoint(TASK)
            runtime.release_checkpoint(TASK, token)
        most = max(most, runtime.backlog.used)
    assert most <= LIMIT
    assert state.index.total_rows == 5 * ROWS
    writer.prune(TASK, state, 10**9)
    assert runtime.backlog.used == runtime.pool.total == 0


def test_tasks_share_the_budget_first_come_first_served(runtime: WorkerStorageRuntime) -> None:
    """A task that waits is served before one that comes later, whoever pruned."""
    writer = runtime.writer()
    states = {f"job/window/{number}": attached(runtime, f"job/window/{number}") for number in range(3)}
    first, *others = states
    filled = 0
    with pytest.raises(OverloadError):
        while True:
            states[first].index.insert(writer.append(first, states[first], batch(filled), timeout_ms=0))
            filled += 1
    order: list[str] = []
    threads = []
    for waiting, task in enumerate(others, 1):

        def produce(task: str = task) -> None:
            states[task].index.insert(writer.append(task, states[task], batch(0)))
            order.append(task)

        threads.append(in_thread(produce))
        until(lambda waiting=waiting: runtime.backlog.waiting == waiting)
    for second in range(1, filled + 1):
        writer.prune(first, states[first], second * 1000)
        until(lambda second=second: len(order) >= min(second, len(others)))
    for thread, failed in threads:
        thread.join(PATIENCE_S)
        assert not failed and not thread.is_alive()
    assert order == others
