"""Group commit, and a failed sync being final (R-3)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from log_partitions import Place, one_record
from tidegate.errors import UnavailableError
from tidegate.files import Effect, Files
from tidegate.log.fetch import Isolation, LogPoint
from tidegate.log.group_commit import GroupCommit
from tidegate.log.log import Log
from tidegate.log.producer_state import SnapshotFiles
from tidegate.testing.faults import EffectCounter, FailSync


class SlowDisk:
    """A sync that waits to be let go, and says what it covered."""

    def __init__(self) -> None:
        self.end = 0
        self.syncs = 0
        self.started = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def sync(self) -> LogPoint:
        covered = self.end
        self.syncs += 1
        self.started.release()
        self.go.acquire(timeout=300)
        return LogPoint(covered)


def run(*targets: int, commit: GroupCommit) -> tuple[list[threading.Thread], list[int]]:
    reached: list[int] = []
    threads = [
        threading.Thread(target=lambda target=target: reached.append(commit.reach(target).offset))
        for target in targets
    ]
    for thread in threads:
        thread.start()
    return threads, reached


def test_callers_that_arrive_during_a_sync_share_the_next_one() -> None:
    disk = SlowDisk()
    commit = GroupCommit(LogPoint(0), disk.sync, where="orders-0")
    disk.end = 1
    first, reached_first = run(1, commit=commit)
    disk.started.acquire(timeout=300)
    disk.end = 5
    others, reached = run(2, 3, 4, 5, commit=commit)
    disk.go.release()
    disk.started.acquire(timeout=300)
    disk.go.release()
    for thread in first + others:
        thread.join(300)
        assert not thread.is_alive()
    assert reached_first == [1]
    assert reached == [5, 5, 5, 5]
    assert disk.syncs == 2


def test_what_is_durable_already_costs_no_sync() -> None:
    disk = SlowDisk()
    commit = GroupCommit(LogPoint(7), disk.sync, where="orders-0")
    assert commit.reach(7).offset == 7
    assert disk.syncs == 0


def test_a_cut_during_a_sync_is_not_undone_by_it() -> None:
    disk = SlowDisk()
    commit = GroupCommit(LogPoint(0), disk.sync, where="orders-0")
    disk.end = 9
    threads, _ = run(3, commit=commit)
    disk.started.acquire(timeout=300)
    commit.lower(LogPoint(2))
    disk.end = 4
    disk.go.release(2)
    threads[0].join(300)
    assert commit.durable.offset == 4


def test_waiters_hear_of_a_failed_sync_and_nobody_tries_again() -> None:
    started, go = threading.Event(), threading.Event()
    calls = []

    def failing() -> LogPoint:
        calls.append(1)
        started.set()
        go.wait(30)
        raise UnavailableError("could not sync: the disk reported an error")

    commit = GroupCommit(LogPoint(0), failing, where="orders-0")
    errors: list[str] = []

    def reach() -> None:
        try:
            commit.reach(1)
        except UnavailableError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=reach) for _ in range(4)]
    threads[0].start()
    started.wait(30)
    for thread in threads[1:]:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert len(errors) == 4
    assert len(calls) == 1
    assert sum("read-only since a failed sync" in error for error in errors) == 3


# -- on a real partition -------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 6))
def test_a_failed_sync_makes_the_partition_read_only_until_it_is_reopened(tmp_path: Path, n: int) -> None:
    fault = FailSync(10**9)
    place = Place(tmp_path, files=Files(watch=fault))
    log = place.open(segment_bytes=200)
    log.append(one_record())
    assert log.acknowledge(sync=True) == 1
    fault.n = fault._counter.count + n
    for _ in range(6):
        log.append(one_record())
    with pytest.raises(UnavailableError):
        while True:
            log.acknowledge(sync=True)
            log.append(one_record())
    shown = log.high_watermark
    uses: list[Callable[[], object]] = [
        lambda: log.append(one_record()),
        lambda: log.acknowledge(sync=True),
        lambda: log.acknowledge(sync=False),
        lambda: log.truncate_to(0),
        log.roll,
        log.flush,
    ]
    for use in uses:
        with pytest.raises(UnavailableError, match="close and reopen"):
            use()
    assert log.high_watermark == shown
    assert log.fetch(0, max_bytes=100, isolation=Isolation.HIGH_WATERMARK).data
    assert log.close() is False
    place.files = Files()
    log = place.open(clean=False)
    assert log.log_end_offset >= shown
    log.append(one_record())
    assert log.acknowledge(sync=True) == log.log_end_offset


def test_an_acknowledgement_syncs_batches_and_new_names_and_no_more(tmp_path: Path) -> None:
    counter = EffectCounter({"sync", "sync_folder"})
    place = Place(tmp_path, files=Files(watch=counter))
    log = place.open(segment_bytes=200)
    log.append(one_record())
    counter.names.clear()
    log.acknowledge(sync=True)
    assert counter.names == [f"sync {0:020d}.log", "sync_folder orders-0"]
    log.append(one_record())
    counter.names.clear()
    log.acknowledge(sync=True)
    assert counter.names == [f"sync {0:020d}.log"]
    counter.names.clear()
    log.acknowledge(sync=True)
    assert counter.names == []
    log.append(one_record())
    counter.names.clear()
    log.acknowledge(sync=True)
    first, second = f"{0:020d}", f"{2:020d}"
    assert counter.names == [
        f"sync {first}.log", f"sync {first}.index", f"sync {first}.timeindex", f"sync {second}.log",
        f"sync {second}.snapshot", "sync_folder orders-0",
    ]  # fmt: skip


def test_a_rolled_segment_reaches_the_disk_without_an_acknowledgement(tmp_path: Path) -> None:
    place = Place(tmp_path)
    log = place.open(segment_bytes=200)
    for _ in range(5):
        log.append(one_record())
    assert log.recovery_point == 0
    assert place.scheduler.run_due() == ["flush-log"]
    assert log.recovery_point >= 4
    assert log.high_watermark == 0


def test_recovery_begins_at_a_rolled_segment_until_its_indexes_are_on_the_disk_too(tmp_path: Path) -> None:
    place = Place(tmp_path)
    log = place.open(segment_bytes=200)
    for _ in range(2):
        log.append(one_record())
    log.acknowledge(sync=True)
    assert log.recovery_point == 2
    log.roll()
    assert (log.recovery_point, log.acknowledge(sync=True)) == (0, 2)
    place.scheduler.run_due()
    assert log.recovery_point == 2


def test_concurrent_writers_share_syncs(tmp_path: Path) -> None:
    syncs: list[str] = []

    def watch(effect: Effect) -> None:
        if effect.kind == "sync":
            syncs.append(effect.path.name)

    place = Place(tmp_path, files=Files(watch=watch))
    log = place.open()

    def write() -> None:
        for _ in range(25):
            info = log.append(one_record())
            assert log.acknowledge(sync=True) > info.last_offset

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert log.recovery_point == log.high_watermark == 100
    assert 1 <= len([name for name in syncs if name.endswith(".log")]) <= 100


def test_a_snapshot_that_leaves_with_its_segment_while_it_is_synced_is_no_failed_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention and compaction rename snapshots while a writer syncs: one that was seen may be gone when opened."""
    asked, exists = [], Files.exists

    def gone(_: SnapshotFiles, base: int) -> Path:
        asked.append(base)
        return tmp_path / "gone.snapshot"

    monkeypatch.setattr(SnapshotFiles, "existing_path", gone)
    monkeypatch.setattr(
        Files, "exists", lambda self, path: path.name == "gone.snapshot" or exists(self, path)
    )
    with Log(tmp_path / "log") as log:
        log.create_topic("t", 1, {"segment.bytes": "1KiB"})
        with log.writer("t", producer_id=7) as writer:
            for number in range(20):
                writer.write(pa.table({"value": [b"%0200d" % number]}))
        assert log.reader("t").read_all().num_rows == 20
    assert asked
