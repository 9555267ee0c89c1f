"""Which log segments retention takes: the rules on small values, and on real partitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.clock import ManualClock
from tidegate.errors import OffsetOutOfRangeError
from tidegate.files import Files
from tidegate.log.checkpoints import LEADER_EPOCHS, LeaderEpochs
from tidegate.log.maintenance import PartitionSnapshot
from tidegate.log.partition import PartitionLog
from tidegate.log.retention import (
    Bounds,
    Reason,
    RetentionReport,
    apply_retention,
    breaching_size,
    breaching_start_offset,
    breaching_time,
    plan_retention,
)
from tidegate.log.topic_config import BrokerConfig, TopicConfig
from tidegate.randomness import SeededRandomness
from tidegate.scheduling import ManualScheduler
from tidegate.testing.batches import Rec, build_batch


def row(number: str) -> pytest.MarkDecorator:
    """Names a test after the numbered behaviour it shows."""
    return pytest.mark.parametrize((), [pytest.param(id=number)])


# -- the rules on small values ---------------------------------------------------------------------


@dataclass(frozen=True)
class Aged:
    base_offset: int
    size: int = 100
    largest_timestamp: int = 0


FIVE = [Aged(base) for base in range(0, 50, 10)]


def bounds(start: int = 0, watermark: int = 50, end: int = 50) -> Bounds:
    return Bounds(start, watermark, end)


@pytest.mark.parametrize(
    ("log_start", "expected"), [(0, 0), (9, 0), (10, 1), (11, 1), (20, 2), (39, 3), (40, 4), (50, 4)]
)
def test_segments_wholly_below_the_log_start_go(log_start: int, expected: int) -> None:
    assert breaching_start_offset(FIVE, bounds(log_start)) == expected


@pytest.mark.parametrize(
    ("retention_bytes", "expected"),
    [(-1, 0), (501, 0), (500, 0), (401, 0), (400, 1), (399, 1), (100, 4), (99, 4), (0, 5)],
)
def test_size_rule_leaves_at_least_retention_bytes(retention_bytes: int, expected: int) -> None:
    assert breaching_size(FIVE, bounds(), retention_bytes) == expected


@pytest.mark.parametrize(("now_ms", "expected"), [(1000, 0), (1001, 5)])
def test_time_rule_is_strict(now_ms: int, expected: int) -> None:
    assert breaching_time(FIVE, bounds(), 1000, now_ms) == expected


def test_negative_retention_is_none() -> None:
    assert breaching_time(FIVE, bounds(), -1, 10**15) == 0


def test_young_segment_keeps_everything_after_it() -> None:
    segments = [Aged(0), Aged(10, largest_timestamp=10**9), Aged(20), Aged(30)]
    assert breaching_time(segments, bounds(end=40), 1000, 5000) == 1


def test_last_segment_without_bytes_is_never_taken() -> None:
    segments = [Aged(0), Aged(10, size=0)]
    assert breaching_time(segments, bounds(watermark=10, end=10), 1000, 5000) == 1
    assert breaching_size(segments, bounds(watermark=10, end=10), 0) == 1


@pytest.mark.parametrize(("watermark", "expected"), [(0, 0), (9, 0), (10, 1), (49, 4), (50, 5)])
def test_high_watermark_must_have_reached_a_segments_end(watermark: int, expected: int) -> None:
    assert breaching_time(FIVE, bounds(watermark=watermark), 1000, 10**9) == expected


def test_plan_names_the_rule_that_took_each_segment() -> None:
    config = TopicConfig(retention_bytes=200, retention_ms=1000)
    removals = plan_retention(FIVE, bounds(start=15), config, 500)
    assert [(removal.base_offset, removal.next_offset, removal.reason) for removal in removals] == [
        (0, 10, Reason.START_OFFSET),
        (10, 20, Reason.SIZE),
        (20, 30, Reason.SIZE),
    ]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50), st.integers(0, 100)), min_size=1, max_size=8),
    st.data(),
)
def test_plan_equals_a_naive_simulation(drawn: list[tuple[int, int, int]], data: st.DataObject) -> None:
    segments, base = [], 0
    for width, size, timestamp in drawn:
        segments.append(Aged(base, size, timestamp))
        base += width
    end = base if segments[-1].size else segments[-1].base_offset
    watermark = data.draw(st.integers(0, end))
    start = data.draw(st.integers(0, watermark))
    config = TopicConfig(
        retention_bytes=data.draw(st.integers(-1, 200)),
        retention_ms=data.draw(st.integers(-1, 120)),
        cleanup_policy=data.draw(
            st.sampled_from([frozenset({"delete"}), frozenset({"compact"}), frozenset({"compact", "delete"})])
        ),
    )
    now_ms = data.draw(st.integers(0, 250))

    alive = list(segments)
    gone: list[tuple[int, Reason]] = []

    def end_of(position: int) -> int:
        return alive[position + 1].base_offset if position + 1 < len(alive) else end

    def take(reason: Reason, matches: Callable[[Aged], bool]) -> None:
        while alive and watermark >= end_of(0) and matches(alive[0]):
            if len(alive) == 1 and alive[0].size == 0:
                return
            gone.append((alive[0].base_offset, reason))
            del alive[0]

    take(Reason.START_OFFSET, lambda _: len(alive) > 1 and alive[1].base_offset <= start)
    if "delete" in config.cleanup_policy:
        if config.retention_bytes >= 0:
            take(
                Reason.SIZE,
                lambda oldest: sum(s.size for s in alive) - oldest.size >= config.retention_bytes,
            )
        if config.retention_ms >= 0:
            take(Reason.TIME, lambda oldest: now_ms - oldest.largest_timestamp > config.retention_ms)
    removals = plan_retention(segments, Bounds(start, watermark, end), config, now_ms)
    assert [(removal.base_offset, removal.reason) for removal in removals] == gone


# -- on real partitions ------------------------------------------------------------------------------

BATCH_BYTES = 72  # one record of four value bytes, no key


class World:
    """A partition on a manual clock; high watermark at the log end unless told otherwise."""

    def __init__(self, folder: Path, config: TopicConfig) -> None:
        self.clock = ManualClock()
        self.scheduler = ManualScheduler(self.clock)
        self.log = PartitionLog.open(
            folder / "topic-0",
            config,
            broker=BrokerConfig(),
            files=Files(),
            clock=self.clock,
            randomness=SeededRandomness(1),
            scheduler=self.scheduler,
            clean=False,
            recovery="kafka",
        )

    def append(self, count: int, *, timestamp: int | None = None, epoch: int = 0) -> None:
        for _ in range(count):
            moment = self.clock.now_ms() if timestamp is None else timestamp
            batch = build_batch([Rec(None, b"test", moment)])
            assert len(batch) == BATCH_BYTES
            self.log.append(bytearray(batch), leader_epoch=epoch)

    def retain(self) -> RetentionReport:
        return apply_retention(self.log, self.clock.now_ms())

    def bases(self) -> list[int]:
        return [segment.base_offset for segment in self.log.segments]


def five_per_segment(**settings: object) -> TopicConfig:
    return TopicConfig(segment_bytes=5 * BATCH_BYTES, file_delete_delay_ms=1000, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("watermark", "bases"),
    [
        pytest.param(0, [0, 5, 10], id="LS-U10-nothing-replicated"),
        pytest.param(4, [0, 5, 10], id="LS-U10-inside-the-first"),
        pytest.param(7, [5, 10], id="LS-U10-inside-the-second"),
        pytest.param(10, [10], id="LS-U10-two-whole-ones"),
        pytest.param(15, [15], id="LS-U10-everything"),
    ],
)
def test_time_retention_stops_at_the_high_watermark(tmp_path: Path, watermark: int, bases: list[int]) -> None:
    world = World(tmp_path, five_per_segment(retention_ms=1000))
    world.append(15)
    world.log.update_high_watermark(watermark)
    world.clock.advance(1001)
    report = world.retain()
    assert world.bases() == bases
    assert world.log.log_start_offset == bases[0] == report.log_start_after
    assert report.rolled == (watermark == 15)
    assert world.log.log_end_offset == 15


@pytest.mark.parametrize(
    ("records", "segments"),
    [pytest.param(10, 2, id="LS-U11-ten"), pytest.param(15, 3, id="LS-U11-fifteen")],
)
def test_size_retention_keeps_what_was_asked_for(tmp_path: Path, records: int, segments: int) -> None:
    world = World(tmp_path, five_per_segment(retention_bytes=records * BATCH_BYTES, retention_ms=-1))
    world.append(15)
    world.log.acknowledge(sync=False)
    report = world.retain()
    assert len(world.bases()) == segments
    assert {removal.reason for removal in report.removed} <= {Reason.SIZE}


@row("LS-U12")
def test_start_offset_and_time_breaches_go_in_one_run(tmp_path: Path) -> None:
    world = World(tmp_path, TopicConfig(retention_ms=900, segment_bytes=BATCH_BYTES))
    for ahead in (100, 0, 100):
        world.append(1, timestamp=world.clock.now_ms() + ahead)
    world.log.acknowledge(sync=False)
    world.log.delete_records_before(1)
    world.clock.advance(901)
    report = world.retain()
    assert [(removal.base_offset, removal.reason) for removal in report.removed] == [
        (0, Reason.START_OFFSET),
        (1, Reason.TIME),
    ]
    assert world.retain().removed == ()


@pytest.mark.parametrize(
    ("offset", "segments"),
    [
        pytest.param(1, 3, id="LS-U13-one"),
        pytest.param(6, 2, id="LS-U13-six"),
        pytest.param(15, 1, id="LS-U13-fifteen"),
    ],
)
def test_deleting_records_moves_the_start_exactly(tmp_path: Path, offset: int, segments: int) -> None:
    world = World(tmp_path, five_per_segment(retention_ms=-1))
    world.append(15)
    world.log.acknowledge(sync=False)
    assert world.log.delete_records_before(offset) == offset
    world.retain()
    assert (len(world.bases()), world.log.log_start_offset) == (segments, offset)


@row("LS-U14")
def test_compacted_partition_ages_by_start_offset_only(tmp_path: Path) -> None:
    config = TopicConfig(
        segment_bytes=5 * 73, retention_ms=10, retention_bytes=0, cleanup_policy=frozenset({"compact"})
    )
    world = World(tmp_path, config)
    for _ in range(15):
        world.log.append(bytearray(build_batch([Rec(b"k", b"test", world.clock.now_ms())])))
    world.log.acknowledge(sync=False)
    world.clock.advance(10**9)
    assert world.retain().removed == ()
    world.log.delete_records_before(7)
    assert [removal.reason for removal in world.retain().removed] == [Reason.START_OFFSET]
    assert world.bases() == [5, 10]


@row("LS-U15")
def test_epochs_follow_the_log_start(tmp_path: Path) -> None:
    world = World(tmp_path, five_per_segment(retention_bytes=10 * BATCH_BYTES, retention_ms=-1))
    for epoch in range(3):
        world.append(5, epoch=epoch)
    world.log.acknowledge(sync=False)
    assert entries(world.log) == [(0, 0), (1, 5), (2, 10)]
    world.retain()
    assert entries(world.log) == [(1, 5), (2, 10)]

    middle = World(tmp_path / "middle", five_per_segment(retention_bytes=10 * BATCH_BYTES, retention_ms=-1))
    for epoch, count in ((0, 3), (1, 7), (2, 5)):
        middle.append(count, epoch=epoch)
    middle.log.acknowledge(sync=False)
    assert entries(middle.log) == [(0, 0), (1, 3), (2, 10)]
    middle.retain()
    assert entries(middle.log) == [(1, 5), (2, 10)]


def entries(log: PartitionLog) -> list[tuple[int, int]]:
    checkpoint = LeaderEpochs(log.folder / LEADER_EPOCHS, files=Files())
    return [(entry.epoch, entry.start_offset) for entry in checkpoint.entries]


@row("LS-U16")
def test_log_start_cannot_pass_the_high_watermark(tmp_path: Path) -> None:
    world = World(tmp_path, five_per_segment())
    world.append(15)
    world.log.update_high_watermark(7)
    with pytest.raises(OffsetOutOfRangeError):
        world.log.delete_records_before(8)
    assert world.log.delete_records_before(7) == 7


def test_deleted_files_are_renamed_at_once_and_unlinked_after_the_delay(tmp_path: Path) -> None:
    world = World(tmp_path, five_per_segment(retention_ms=1000))
    world.append(10)
    world.log.acknowledge(sync=False)
    world.clock.advance(1001)
    world.append(5)
    world.log.acknowledge(sync=False)
    world.retain()
    assert world.bases() == [10]
    with pytest.raises(OffsetOutOfRangeError):
        world.log.fetch(0, max_bytes=1000)
    names = {path.name for path in world.log.folder.iterdir()}
    for base in (0, 5):
        for kind in (".log", ".index", ".timeindex"):
            assert f"{base:020d}{kind}.deleted" in names
            assert f"{base:020d}{kind}" not in names
    assert "00000000000000000005.snapshot.deleted" in names
    world.clock.advance(999)
    world.scheduler.run_due()
    assert any(path.name.endswith(".deleted") for path in world.log.folder.iterdir())
    world.clock.advance(1)
    world.scheduler.run_due()
    assert not any(path.name.endswith(".deleted") for path in world.log.folder.iterdir())


def test_dry_run_says_the_same_and_changes_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, five_per_segment(retention_ms=1000))
    world.append(15)
    world.log.acknowledge(sync=False)
    world.clock.advance(1001)
    before = sorted(path.name for path in world.log.folder.iterdir())
    planned = PartitionSnapshot.from_open(world.log).retention(world.clock.now_ms())
    assert sorted(path.name for path in world.log.folder.iterdir()) == before
    assert world.bases() == [0, 5, 10]
    assert planned == world.retain()
    assert planned.removed_bytes == 15 * BATCH_BYTES


def test_batches_without_timestamps_age_by_the_files_time(tmp_path: Path) -> None:
    world = World(tmp_path, five_per_segment(retention_ms=1000))
    world.append(10, timestamp=-1)
    world.log.acknowledge(sync=False)
    first, second = world.log.segments
    Files().set_mtime_ms(first.path, world.clock.now_ms() - 1001)
    Files().set_mtime_ms(second.path, world.clock.now_ms())
    assert [removal.base_offset for removal in world.retain().removed] == [0]


def test_records_stay_readable_from_the_new_start_after_reopening(tmp_path: Path) -> None:
    world = World(tmp_path, five_per_segment(retention_bytes=10 * BATCH_BYTES, retention_ms=-1))
    world.append(15)
    world.log.acknowledge(sync=False)
    world.retain()
    world.log.close()
    again = World(tmp_path, five_per_segment())
    assert (again.log.log_start_offset, again.log.log_end_offset) == (5, 15)
