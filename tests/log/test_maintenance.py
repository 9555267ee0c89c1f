"""The owner's chores in time: who ages what, when, and what happens when something goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidegate.clock import ManualClock, SystemClock
from tidegate.errors import CorruptError, TidegateWarning, UnavailableError
from tidegate.files import Effect, Files
from tidegate.log.checkpoints import (
    CLEANER_OFFSETS,
    HIGH_WATERMARKS,
    LOG_STARTS,
    RECOVERY_POINTS,
    read_offsets,
)
from tidegate.log.locks import owner_status
from tidegate.log.log import Log
from tidegate.log.maintenance import Housekeeping
from tidegate.log.partition import PartitionLog
from tidegate.log.retention import Reason
from tidegate.log.topic_config import BrokerConfig
from tidegate.randomness import SeededRandomness
from tidegate.scheduling import ManualScheduler, ThreadScheduler
from tidegate.testing.batches import Rec, build_batch

MINUTE_MS = 60_000
FAR_AHEAD_MS = 4_000_000_000_000


class House:
    """A log whose owner keeps it in order, on a manual clock."""

    def __init__(self, folder: Path, *, maintenance: bool = True, watch: Any = None, **log: Any) -> None:
        self.folder = folder / "log"
        self.clock = ManualClock(FAR_AHEAD_MS)  # files without a record age by their real times
        self.scheduler = ManualScheduler(self.clock)
        self.files = Files(watch)
        self.log = Log(
            self.folder,
            durability="os",
            maintenance=maintenance,
            recovery="kafka",
            files=self.files,
            clock=self.clock,
            randomness=SeededRandomness(5),
            scheduler=self.scheduler,
            **log,
        )

    def topic(self, name: str, **config: Any) -> PartitionLog:
        settings = {"segment.bytes": "500", "segment.index.bytes": "240", **config}
        self.log.create_topic(name, 1, settings)
        return self.log.partition(name, 0)

    def append(self, log: PartitionLog, count: int = 1, key: bytes = b"k") -> None:
        for _ in range(count):
            log.append(bytearray(build_batch([Rec(key, b"v" * 20, self.clock.now_ms())])))
            log.acknowledge(sync=False)

    def run_for(self, duration_ms: int, step_ms: int = 1000) -> list[str]:
        """Let time pass in steps, doing what is due; the names of what was done."""
        done: list[str] = []
        for _ in range(duration_ms // step_ms):
            self.clock.advance(step_ms)
            done += self.scheduler.run_due()
        return done

    def offsets(self, name: str) -> dict[tuple[str, int], int]:
        return dict(read_offsets(self.folder / name, files=self.files))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.log.close()


def test_retention_runs_after_the_initial_delay_and_then_every_interval(house: House) -> None:
    log = house.topic("orders", **{"retention.ms": "60000"})
    house.append(log, 12)
    assert "retention" not in house.run_for(29_000)
    assert house.run_for(1_000).count("retention") == 1
    assert log.log_start_offset == 0
    done = house.run_for(300_000)
    assert done.count("retention") == 1
    assert (log.log_start_offset, log.log_end_offset) == (12, 12)
    assert house.run_for(3_000_000, 10_000).count("retention") == 10


def test_compacted_partition_is_compacted_and_aged_by_the_cleaner(house: House) -> None:
    log = house.topic(
        "prices",
        **{"cleanup.policy": "compact,delete", "retention.ms": "3600000", "delete.retention.ms": "1"},
    )
    house.append(log, 30)
    log.roll()
    house.run_for(31_000)
    kept = [header.last_offset for segment in log.segments for _, header in segment.batches()]
    assert kept == [29]
    assert house.offsets(CLEANER_OFFSETS) == {("prices", 0): 30}
    house.run_for(3_700_000, 5_000)
    assert (log.log_start_offset, log.log_end_offset) == (30, 30)


def test_cleaner_goes_on_at_once_while_there_is_work_and_rests_when_there_is_none(house: House) -> None:
    for name in ("a", "b", "c"):
        log = house.topic(name, **{"cleanup.policy": "compact"})
        house.append(log, 20)
        log.roll()
    house.clock.advance(30_000)
    assert house.scheduler.run_due().count("compaction") == 4
    assert set(house.offsets(CLEANER_OFFSETS)) == {("a", 0), ("b", 0), ("c", 0)}
    assert house.run_for(30_000).count("compaction") == 2


def test_dirtiest_partition_is_compacted_first(house: House) -> None:
    dirty, cleaner = house.topic("dirty", **{"cleanup.policy": "compact"}), None
    cleaner = house.topic("cleaner", **{"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.1"})
    house.append(cleaner, 30)
    cleaner.roll()
    chores = chores_of(house)
    report = chores.compact_dirtiest()
    assert report is not None
    assert report.topic == "cleaner"
    for key in range(10):
        house.append(cleaner, 1, b"%d" % key)
    cleaner.roll()
    house.append(dirty, 30)
    dirty.roll()
    report = chores.compact_dirtiest()
    assert report is not None
    assert report.topic == "dirty"
    report = chores.compact_dirtiest()
    assert report is not None
    assert report.topic == "cleaner"
    assert chores.compact_dirtiest() is None


def chores_of(house: House, **broker: Any) -> Housekeeping:
    return Housekeeping(
        house.log,
        broker=BrokerConfig(**broker),
        files=house.files,
        clock=house.clock,
        randomness=SeededRandomness(2),
    )


@pytest.mark.parametrize(
    "checkpoint", [pytest.param(99, id="LS-C7-beyond-the-end"), pytest.param(2, id="LS-C7-below")]
)
def test_useless_checkpoint_is_rewritten_to_the_log_start(house: House, checkpoint: int) -> None:
    log = house.topic("t", **{"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1"})
    house.append(log, 20)
    log.delete_records_before(5)
    (house.folder / CLEANER_OFFSETS).write_text(f"0\n1\nt 0 {checkpoint}\n")
    assert chores_of(house).compact_dirtiest() is None
    assert house.offsets(CLEANER_OFFSETS) == {("t", 0): 5}


def test_checkpoints_are_written_at_their_periods(house: House) -> None:
    log = house.topic("orders")
    house.append(log, 3)
    log.flush()
    house.run_for(5_000)
    assert house.offsets(HIGH_WATERMARKS) == {("orders", 0): 3}
    house.append(log, 1)
    house.run_for(5_000)
    assert house.offsets(HIGH_WATERMARKS) == {("orders", 0): 4}
    log.delete_records_before(2)
    house.run_for(20_000)
    assert house.offsets(RECOVERY_POINTS) == {("orders", 0): 3}
    assert house.offsets(LOG_STARTS) == {("orders", 0): 2}
    log.flush()
    house.run_for(59_000)
    assert house.offsets(RECOVERY_POINTS) == {("orders", 0): 3}
    house.run_for(1_000)
    assert house.offsets(RECOVERY_POINTS) == {("orders", 0): 4}


def test_lines_of_other_partitions_stay_in_a_checkpoint(house: House) -> None:
    log = house.topic("orders")
    (house.folder / HIGH_WATERMARKS).write_text("0\n1\nelsewhere 3 77\n")
    house.append(log, 2)
    house.run_for(5_000)
    assert house.offsets(HIGH_WATERMARKS) == {("elsewhere", 3): 77, ("orders", 0): 2}


def test_silent_producers_are_forgotten(house: House) -> None:
    log = house.topic("orders")
    batch = build_batch(
        [Rec(None, b"v", house.clock.now_ms())], producer_id=7, producer_epoch=0, base_sequence=0
    )
    log.append(bytearray(batch))
    assert 7 in log.active_producers
    house.run_for(86_400_000 - MINUTE_MS, MINUTE_MS)
    assert 7 in log.active_producers
    house.run_for(660_000, MINUTE_MS)
    assert 7 not in log.active_producers


def test_flush_ms_bounds_how_long_records_stay_unsynced(house: House) -> None:
    lazy, eager = house.topic("lazy"), house.topic("eager", **{"flush.ms": "2000"})
    house.run_for(1_000, 100)
    house.append(lazy, 3)
    house.append(eager, 3)
    house.run_for(MINUTE_MS + 4_000, 100)
    assert eager.recovery_point == 3
    assert lazy.recovery_point == 0
    house.append(eager, 3)
    house.run_for(2_000, 100)
    assert eager.recovery_point == 6


# -- the clock -------------------------------------------------------------------------------------


def test_leap_of_the_clock_spares_one_check_and_warns(house: House) -> None:
    log = house.topic("orders", **{"retention.ms": "86400000"})
    house.append(log, 12)
    house.run_for(MINUTE_MS)
    house.clock.set_now_ms(house.clock.now_ms() + 7 * 86_400_000)
    with pytest.warns(TidegateWarning, match="jumped 7d ahead"):
        house.run_for(270_000)
    assert log.log_start_offset == 0
    house.run_for(300_000)
    assert log.log_start_offset == 12


def test_clock_set_right_in_time_saves_everything(house: House) -> None:
    log = house.topic("orders", **{"retention.ms": "86400000"})
    house.append(log, 12)
    house.run_for(MINUTE_MS)
    house.clock.set_now_ms(house.clock.now_ms() + 7 * 86_400_000)
    with pytest.warns(TidegateWarning, match="jumped"):
        house.run_for(270_000)
    house.clock.set_now_ms(house.clock.now_ms() - 7 * 86_400_000)
    house.run_for(3_000_000, 10_000)
    assert log.log_start_offset == 0


@pytest.mark.parametrize("is_open", [True, False])
def test_with_the_cleaner_off_compacted_topics_are_left_and_others_aged(
    tmp_path: Path, is_open: bool
) -> None:
    """As `tidegate log lifetime` says, whether a partition is open or not."""
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "server.properties").write_text("log.cleaner.enable=false\n")
    house = House(tmp_path)
    logs = {
        name: house.topic(name, **{"cleanup.policy": policy, "retention.ms": "60000"})
        for name, policy in (("prices", "compact,delete"), ("orders", "delete"))
    }
    for log in logs.values():
        house.append(log, 12)
        if not is_open:
            house.log.release(log.topic, 0)
    house.run_for(700_000, 10_000)
    assert {name: house.log.view(name, 0).bounds().log_start for name in logs} == {"prices": 0, "orders": 12}
    house.log.close()


# -- partitions that are not open --------------------------------------------------------------------


def test_idle_partitions_are_aged_and_closed_again(house: House) -> None:
    log = house.topic("orders", **{"retention.ms": "60000"})
    house.append(log, 12)
    house.log.release("orders", 0)
    house.run_for(30_000)
    assert house.log.open_partitions == []
    house.run_for(300_000)
    assert house.log.open_partitions == []
    assert house.log.view("orders", 0).bounds().log_start == 12


def test_idle_partition_is_not_opened_when_nothing_is_due(house: House) -> None:
    log = house.topic("orders")
    house.append(log, 12)
    house.log.release("orders", 0)
    before = {path.name: path.stat().st_mtime_ns for path in (house.folder / "orders-0").iterdir()}
    house.run_for(700_000, 10_000)
    assert {path.name: path.stat().st_mtime_ns for path in (house.folder / "orders-0").iterdir()} == before


def test_partition_of_another_writer_is_left_to_it(tmp_path: Path) -> None:
    writer = House(tmp_path, maintenance=False)
    log = writer.topic("orders", **{"retention.ms": "60000"})
    writer.append(log, 12)
    writer.clock.advance("1h")
    other = Log(tmp_path / "log", clock=writer.clock, scheduler=ManualScheduler(writer.clock))
    (outcome,) = Housekeeping(
        other, broker=BrokerConfig(), files=Files(), clock=writer.clock, randomness=SeededRandomness(1)
    ).clean_once()
    assert outcome.skipped is not None
    assert "another process" in outcome.skipped
    assert log.log_start_offset == 0
    other.close()
    writer.log.close()


# -- once, by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_open", [True, False])
def test_clean_once_tells_what_it_did_and_a_dry_run_what_it_would_do(tmp_path: Path, is_open: bool) -> None:
    house = House(tmp_path, maintenance=False)
    orders = house.topic("orders", **{"retention.ms": "60000"})
    prices = house.topic("prices", **{"cleanup.policy": "compact"})
    resting = house.topic("resting", **{"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1"})
    for log in (orders, prices, resting):
        house.append(log, 20)
        log.roll()
    house.clock.advance("2m")
    if not is_open:
        for name in ("orders", "prices", "resting"):
            house.log.release(name, 0)
    chores = chores_of(house)
    planned = chores.clean_once(dry_run=True)
    again = chores.clean_once(dry_run=True)
    assert planned == again
    assert [outcome.topic for outcome in planned] == ["orders", "prices", "resting"]
    done = chores.clean_once()
    for expected, outcome in zip(planned, done, strict=True):
        assert outcome.retention == expected.retention
        assert outcome.cleanable == expected.cleanable
        assert outcome.not_compacted_because == expected.not_compacted_because
    aged, compacted, rested = done
    assert {removal.reason for removal in aged.retention.removed} == {Reason.TIME}
    assert aged.not_compacted_because == "cleanup.policy has no compact"
    assert compacted.compaction is not None
    assert (compacted.compaction.records_before, compacted.compaction.records_after) == (20, 1)
    assert rested.compaction is None
    assert rested.not_compacted_because == "dirty ratio 1.00 is not above min.cleanable.dirty.ratio 1"
    assert [outcome.topic for outcome in chores.clean_once(topics=["prices"])] == ["prices"]
    house.log.close()


# -- when something goes wrong ---------------------------------------------------------------------


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[80] ^= 1
    path.write_bytes(data)


def test_damage_found_by_compaction_stops_the_scheduler_after_the_others_were_served(house: House) -> None:
    bad = house.topic("bad", **{"cleanup.policy": "compact"})
    good = house.topic("good", **{"retention.ms": "1000"})
    house.append(bad, 20)
    bad.roll()
    house.append(good, 20)
    damage(bad.segments[0].path)
    with pytest.raises(CorruptError):
        house.run_for(40_000)
    assert good.log_start_offset == 20
    house.run_for(600_000)  # not tried again: the partition stays uncompacted, the rest goes on
    assert bad.log_start_offset == 0


def test_full_disk_is_told_and_tried_again(tmp_path: Path) -> None:
    state = {"full": False}

    def watch(effect: Effect) -> None:
        if state["full"] and effect.kind == "create" and ".cleaned" in effect.path.name:
            raise OSError(28, "No space left on device")

    house = House(tmp_path, watch=watch)
    log = house.topic("prices", **{"cleanup.policy": "compact"})
    house.append(log, 20)
    log.roll()
    state["full"] = True
    with pytest.warns(TidegateWarning, match="will be tried again: .*disk is full"):
        house.run_for(40_000)
    state["full"] = False
    house.run_for(40_000)
    assert house.offsets(CLEANER_OFFSETS) == {("prices", 0): 20}
    house.log.close()


def test_error_that_never_went_away_is_raised_at_close(tmp_path: Path) -> None:
    def watch(effect: Effect) -> None:
        if effect.kind == "create" and ".cleaned" in effect.path.name:
            raise OSError(28, "No space left on device")

    house = House(tmp_path, watch=watch)
    log = house.topic("prices", **{"cleanup.policy": "compact"})
    house.append(log, 20)
    log.roll()
    with pytest.warns(TidegateWarning):
        house.run_for(40_000)
    with pytest.raises(UnavailableError, match="disk is full"):
        house.log.close()


def test_read_only_partition_is_left_alone_with_one_warning(tmp_path: Path) -> None:
    state = {"broken": False}

    def watch(effect: Effect) -> None:
        if state["broken"] and effect.kind == "sync":
            raise OSError(5, "Input/output error")

    house = House(tmp_path, watch=watch)
    log = house.topic("orders", **{"retention.ms": "1000"})
    house.append(log, 20)
    state["broken"] = True
    with pytest.raises(UnavailableError):
        log.flush()
    state["broken"] = False
    with pytest.warns(TidegateWarning, match="read-only") as told:
        house.run_for(700_000)
    assert len(told) == 1
    assert log.log_start_offset == 0


# -- who runs it -------------------------------------------------------------------------------------


def test_others_can_tell_whether_anybody_ages_the_log(tmp_path: Path) -> None:
    assert owner_status(tmp_path, files=Files()) is None
    house = House(tmp_path)
    status = owner_status(house.folder, files=Files())
    assert status is not None
    assert (status.running, status.interval_ms, status.last_run_ms) == (True, 300_000, None)
    house.run_for(30_000)
    status = owner_status(house.folder, files=Files())
    assert status is not None
    assert status.last_run_ms == house.clock.now_ms()
    house.log.close()
    status = owner_status(house.folder, files=Files())
    assert status is not None
    assert (status.running, status.interval_ms) == (False, 300_000)
    (house.folder / "tidegate.maintenance").write_bytes(b"{not json")
    status = owner_status(house.folder, files=Files())
    assert status is not None
    assert not status.running


def test_log_without_maintenance_is_never_aged(tmp_path: Path) -> None:
    house = House(tmp_path, maintenance=False)
    log = house.topic("orders", **{"retention.ms": "1"})
    house.append(log, 12)
    assert "retention" not in house.run_for(3_600_000, MINUTE_MS)
    assert log.log_start_offset == 0
    house.log.close()


def test_nothing_is_done_after_close(tmp_path: Path) -> None:
    house = House(tmp_path)
    log = house.topic("orders", **{"retention.ms": "1"})
    house.append(log, 12)
    house.log.close()
    house.run_for(3_600_000, MINUTE_MS)
    assert owner_status(house.folder, files=Files()) is not None


def test_background_thread_ages_and_compacts_while_the_log_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    (folder / "server.properties").write_text(
        "log.initial.task.delay.ms=1\nlog.retention.check.interval.ms=5\nlog.cleaner.backoff.ms=5\n"
    )
    clock = SystemClock()
    with Log(folder, durability="os", maintenance=True, scheduler=ThreadScheduler(clock)) as log:
        log.create_topic(
            "prices",
            1,
            {"cleanup.policy": "compact", "segment.bytes": "2000", "min.cleanable.dirty.ratio": "0.01"},
        )
        prices = log.partition("prices", 0)
        last = 0
        for number in range(600):
            batch = build_batch([Rec(b"%d" % (number % 10), b"%d" % number, clock.now_ms())])
            last = prices.append(bytearray(batch)).last_offset
            prices.acknowledge(sync=False)
            fetched = prices.fetch(last, max_bytes=10)
            assert fetched.data
        deadline_ms = clock.monotonic_ms() + 20_000
        while clock.monotonic_ms() < deadline_ms and sum(s.size for s in prices.segments) > 20_000:
            clock.sleep_ms(5)
        assert sum(segment.size for segment in prices.segments) <= 20_000
        assert prices.log_end_offset == last + 1
        log.scheduler.close()
