"""Compaction of real partitions: what is left in the log, its indexes and its producers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from log_partitions import CompactedPartition, compacting
from tidegate.errors import ConflictError, CorruptError, InvalidError
from tidegate.files import Effect
from tidegate.log.format.batch import BatchHeader
from tidegate.log.format.decode import DecodeLimits
from tidegate.log.producer_state import Origin
from tidegate.log.topic_config import BrokerConfig, TopicConfig
from tidegate.testing.batches import CodecName, Rec, build_batch

DAY_MS = 86_400_000


def row(number: str) -> pytest.MarkDecorator:
    """Names a test after the numbered behaviour it shows."""
    return pytest.mark.parametrize((), [pytest.param(id=number)])


@pytest.fixture
def world(tmp_path: Path) -> CompactedPartition:
    return CompactedPartition(tmp_path)


# -- keys ------------------------------------------------------------------------------------------


def test_latest_record_of_each_key_is_kept_at_its_offset(world: CompactedPartition) -> None:
    for number in range(100):
        world.append([number % 7])
    world.log.roll()
    report = world.clean()
    assert world.offsets() == list(range(93, 100))
    assert world.keys() == [number % 7 for number in range(93, 100)]
    assert (report.records_before, report.records_after, report.keys) == (100, 7, 7)
    assert report.next_dirty == 100
    assert report.bytes_after < report.bytes_before
    assert report.segments_before == report.segments_after == len(world.log.segments) - 1


def test_active_segment_is_not_touched(world: CompactedPartition) -> None:
    world.append([1])
    world.log.roll()
    world.append([1])
    world.append([1])
    assert world.clean().next_dirty == 1
    assert world.offsets() == [0, 1, 2]


def test_second_pass_without_news_changes_nothing(world: CompactedPartition) -> None:
    for number in range(60):
        world.append([number % 9, number % 4])
    world.log.roll()
    done = world.clean().next_dirty
    before = b"".join(segment.read_at(0, segment.size) for segment in world.log.segments)
    assert not world.part(done).eligible(0.0)
    world.clean(0)
    assert b"".join(segment.read_at(0, segment.size) for segment in world.log.segments) == before


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_codec_survives(world: CompactedPartition, codec: CodecName) -> None:
    for number in range(20):
        world.append([number % 3, 100 + number, number % 5], codec=codec)
    world.log.roll()
    before = {
        record["offset"]: (record["key"], record["value"], record["timestamp"])
        for record in world.records().to_pylist()
    }
    world.clean()
    after = world.records().to_pylist()
    assert {header.codec.label for header in world.headers()} <= {codec, "none"}
    latest = {key: offset for offset, (key, _, _) in before.items()}
    assert [record["offset"] for record in after] == sorted(latest.values())
    assert all((r["key"], r["value"], r["timestamp"]) == before[r["offset"]] for r in after)


@row("LS-C5")
def test_map_of_one_key_progresses_one_record_at_a_time(world: CompactedPartition) -> None:
    for key in (0, 0, 1, 1, 2, 2):
        world.append([key])
    world.log.roll()
    dirty, seen = 0, [world.offsets()]
    while dirty < 6:
        report = world.clean(dirty, map_bytes=48)
        assert report.next_dirty > dirty
        dirty = report.next_dirty
        seen.append(world.offsets())
    assert seen[-1] == [1, 3, 5]
    assert all(len(before) - len(after) <= 1 for before, after in itertools.pairwise(seen))


def test_full_map_stops_inside_a_batch_and_goes_on_there(world: CompactedPartition) -> None:
    world.append([1, 2, 3, 1, 2, 3])
    world.append([1, 2, 3])
    world.log.roll()
    report = world.clean(map_bytes=3 * 24)  # two keys at 0.9
    assert (report.map_full, report.next_dirty) == (True, 2)
    assert world.offsets() == list(range(9))
    report = world.clean(report.next_dirty, map_bytes=1000)
    assert world.offsets() == [6, 7, 8]


@row("LS-C6")
def test_records_without_a_key_are_dropped(world: CompactedPartition) -> None:
    world.log.update_config(TopicConfig(segment_bytes=2048, segment_index_bytes=4096))
    world.append([None, None])
    world.append([1, None, 2])
    world.append([None])
    world.log.update_config(world.config)
    world.log.roll()
    world.clean()
    assert (world.keys(), world.offsets()) == ([1, 2], [2, 4])


@row("LS-C10")
def test_gap_at_a_segments_end_does_not_stall(world: CompactedPartition) -> None:
    batch = build_batch([Rec(b"k", b"v", 1)], base_offset=9, leader_epoch=0)
    world.log.append(bytearray(batch), origin=Origin.REPLICATION)
    batch = build_batch([Rec(b"k", b"v", 1)], base_offset=11, leader_epoch=0)
    world.log.append(bytearray(batch), origin=Origin.REPLICATION)
    world.log.truncate_to(11)
    world.log.truncate_fully(0)
    for base in (0, 9):
        data = build_batch([Rec(b"k", b"v", 1)], base_offset=base, leader_epoch=0)
        world.log.append(bytearray(data), origin=Origin.REPLICATION)
    world.log.acknowledge(sync=False)
    assert world.log.log_end_offset == 10
    world.log.roll()
    active = world.log.active_segment.base_offset
    assert world.clean().next_dirty == active
    assert world.offsets() == [9]


def test_large_batch_is_read_whole_though_the_stretch_is_small(world: CompactedPartition) -> None:
    world.append(list(range(30)), values=[bytes(20)] * 30)
    world.append(list(range(10, 40)), values=[bytes(20)] * 30)
    world.log.roll()
    world.clean(stretch_bytes=100)
    assert world.keys() == list(range(10)) + list(range(10, 40))


# -- producers -------------------------------------------------------------------------------------


@row("LS-C1")
def test_sequences_survive_compaction_and_reopening(world: CompactedPartition) -> None:
    world.append([1, 2, 3], producer=1)
    world.append([3, 1, 4], producer=2)
    world.append([1, 4], producer=3)
    world.log.roll()
    world.clean()
    assert world.last_offsets() == [2, 5, 7]
    assert world.offsets() == [1, 3, 6, 7]
    assert world.last_sequences() == {1: 2, 2: 2, 3: 1}
    for clean in (True, False):
        world.reopen(clean=clean)
        assert world.append([1, 2, 3], producer=1, sequence=0) == (0, 2)
        assert world.append([1, 4], producer=3, sequence=0) == (6, 7)
        assert world.append([3, 1, 4], producer=2, sequence=0) == (3, 5)
    world.append([2], producer=4)
    world.log.roll()
    world.clean()
    assert world.last_sequences() == {1: 2, 2: 2, 3: 1, 4: 0}
    assert world.last_offsets() == [2, 5, 7, 8]
    assert world.offsets() == [3, 6, 7, 8]
    world.reopen(clean=False)
    assert world.append([1, 2, 3], producer=1, sequence=0) == (0, 2)


@row("LS-C2")
def test_last_batch_stays_empty_when_every_key_is_superseded(world: CompactedPartition) -> None:
    world.append([2, 3], producer=1)
    world.append([2, 3])
    world.log.roll()
    world.clean()
    first, second = world.headers()
    assert (first.last_offset, first.count, first.size) == (1, 0, 61)
    assert (second.last_offset, second.count) == (3, 2)
    world.append([2, 3])
    world.log.roll()
    world.clean(4)
    assert world.last_offsets() == [1, 5]
    world.clock.advance(BrokerConfig().producer_id_expiration_ms)
    world.log.remove_expired_producers(world.clock.now_ms())
    world.append([2, 3])
    world.log.roll()
    world.clean(6)
    assert world.last_offsets() == [7]


@row("LS-C3")
def test_only_last_batches_of_producers_stay(world: CompactedPartition) -> None:
    world.append([0])
    world.append([0], producer=1)
    world.append([0], producer=2)
    world.append([0], producer=3)
    world.append([1], producer=2)
    world.log.roll()
    world.clean()
    assert world.last_offsets() == [1, 3, 4]
    assert [header.count for header in world.headers()] == [0, 1, 1]
    assert world.offsets() == [3, 4]


# -- tombstones --------------------------------------------------------------------------------------


def test_tombstone_outlives_its_key_by_delete_retention(world: CompactedPartition) -> None:
    world.append([1])
    world.append([1], values=[None])
    world.append([2])
    world.log.roll()
    world.clean()
    assert world.keys() == [1, 2]
    (marked,) = [header for header in world.headers() if header.delete_horizon_ms is not None]
    assert marked.delete_horizon_ms == world.clock.now_ms() + DAY_MS
    world.clock.advance(DAY_MS - 1)
    world.append([3])
    world.log.roll()
    world.clean(3)
    assert world.keys() == [1, 2, 3]
    world.clock.advance(1)
    world.append([4])
    world.log.roll()
    world.clean(4)
    assert world.keys() == [2, 3, 4]


# -- transactions --------------------------------------------------------------------------------------


def test_aborted_records_go_whatever_their_keys(world: CompactedPartition) -> None:
    world.append([1, 2], producer=1, transactional=True)
    world.append([2, 3], producer=2, transactional=True)
    world.append([3, 4], producer=1, transactional=True)
    world.end("ABORT", 1)
    world.end("COMMIT", 2)
    world.append([2], producer=1, transactional=True)
    world.end("COMMIT", 1)
    aborted = world.aborted()
    assert len(aborted) == 1
    world.log.roll()
    world.clean()
    assert world.keys() == [3, 2]
    assert world.offsets() == [3, 6, 7, 8, 9]
    assert world.aborted() == aborted
    world.reopen(clean=False)
    assert world.offsets() == [3, 6, 7, 8, 9]


@row("LS-C4")
def test_commit_marker_goes_only_after_its_transaction_and_its_horizon(world: CompactedPartition) -> None:
    world.append([1], producer=1, transactional=True)
    world.append([2, 3], producer=1, transactional=True)
    world.end("COMMIT", 1)
    world.append([2], producer=1, transactional=True)
    world.end("COMMIT", 1)
    world.log.roll()
    dirty = world.clean().next_dirty
    assert (world.keys(), world.offsets()) == ([1, 3, 2], [0, 2, 3, 4, 5])
    world.append([1, 3], producer=1, transactional=True)
    world.end("COMMIT", 1)
    world.log.roll()
    world.clean(dirty)  # the data of the first transaction was still met, so its marker stays untouched
    assert world.offsets() == [3, 4, 5, 6, 7, 8]
    assert all(header.delete_horizon_ms is None for header in world.headers())
    world.clean(0)  # now it gets its horizon
    assert world.offsets() == [3, 4, 5, 6, 7, 8]
    assert world.headers()[0].delete_horizon_ms == world.clock.now_ms() + DAY_MS
    world.clean(0)  # same time: kept
    assert world.offsets() == [3, 4, 5, 6, 7, 8]
    world.clock.advance(DAY_MS)
    world.clean(0)
    assert world.offsets() == [4, 5, 6, 7, 8]


def test_abort_marker_and_its_index_entry_go_after_the_horizon(world: CompactedPartition) -> None:
    world.append([1], producer=1, transactional=True)
    world.end("ABORT", 1)
    world.append([2], producer=1, transactional=True)
    world.end("COMMIT", 1)
    world.log.roll()
    world.clean()
    assert (world.offsets(), len(world.aborted())) == ([1, 2, 3], 1)
    world.clean()
    assert (world.offsets(), len(world.aborted())) == ([1, 2, 3], 0)
    world.clock.advance(DAY_MS)
    world.clean()
    assert (world.keys(), world.offsets()) == ([2], [2, 3])


def test_aborted_transaction_across_segments_is_recognised_in_each(world: CompactedPartition) -> None:
    world.append([1, 2], producer=1, transactional=True)
    world.log.roll()
    world.append([3, 4], producer=1, transactional=True)
    world.log.roll()
    world.append([9])
    world.end("ABORT", 1)
    world.append([10])
    world.log.roll()
    world.clean()
    assert world.keys() == [9, 10]
    assert [(txn.first_offset, txn.last_offset) for txn in world.aborted()] == [(0, 5)]


def test_open_transaction_keeps_everything_from_its_segment_on(world: CompactedPartition) -> None:
    world.append([1])
    world.append([1])
    world.log.roll()
    world.append([1], producer=1, transactional=True)
    world.log.roll()
    world.append([1])
    world.append([1])
    world.log.roll()
    report = world.clean()
    assert report.next_dirty == 2
    assert world.offsets() == [1, 2, 3, 4]
    world.end("COMMIT", 1)
    world.log.roll()
    world.clean(2)
    assert world.offsets() == [4, 5]


@row("LS-C8")
def test_block_younger_than_the_minimum_lag_is_not_compacted(tmp_path: Path) -> None:
    world = CompactedPartition(tmp_path, compacting(min_compaction_lag_ms=3_600_000))
    for _ in range(2):
        for key in (1, 2):
            world.append([key])
    world.log.roll()
    edge = world.log.log_end_offset
    world.clock.advance("1h")
    for _ in range(2):
        for key in (1, 2):
            world.append([key])
    world.log.roll()
    assert world.part().first_uncleanable == edge
    world.clean()
    assert world.offsets() == [2, 3, 4, 5, 6, 7]


@row("LS-C9")
def test_small_segments_are_merged_up_to_segment_bytes(world: CompactedPartition) -> None:
    for number in range(60):
        world.append([number])
        if number % 3 == 2:
            world.log.roll()
    before = len(world.log.segments)
    report = world.clean()
    sizes = [segment.size for segment in world.log.segments[:-1]]
    assert len(world.log.segments) < before
    assert all(size <= 2048 for size in sizes)
    assert (report.segments_before, report.segments_after) == (before - 1, len(sizes))
    assert world.offsets() == list(range(60))


# -- files -------------------------------------------------------------------------------------------


def test_files_are_swapped_dated_and_old_ones_removed_after_the_delay(world: CompactedPartition) -> None:
    for number in range(20):
        world.append([number % 5])
        if number % 4 == 3:
            world.log.roll()
    last_source = world.log.segments[-2]
    world.files.set_mtime_ms(last_source.path, 1_600_000_000_000)
    bases = [segment.base_offset for segment in world.log.segments]
    world.clean()
    names = sorted(path.name for path in world.log.folder.iterdir())
    assert not [name for name in names if name.endswith((".cleaned", ".swap"))]
    assert f"{bases[1]:020d}.log.deleted" in names
    assert f"{bases[1]:020d}.snapshot" not in names
    assert f"{bases[-1]:020d}.snapshot" in names
    assert world.log.segments[0].mtime_ms == 1_600_000_000_000
    world.clock.advance("1m")
    world.scheduler.run_due()
    left = sorted(path.name for path in world.log.folder.iterdir())
    assert not [name for name in left if name.endswith(".deleted")]
    kept = {f"{segment.base_offset:020d}" for segment in world.log.segments}
    assert {name[:20] for name in left if name.endswith((".log", ".index", ".timeindex"))} == kept


def test_indexes_of_a_compacted_segment_find_every_offset_and_time(world: CompactedPartition) -> None:
    world.log.update_config(compacting(segment_bytes=100_000, index_interval_bytes=200))
    for number in range(300):
        world.clock.advance(10)
        world.append([number % 40, 1000 + number])
    world.log.roll()
    world.clean()
    segment = world.log.segments[0]
    segment.offsets.sanity_check()
    segment.times.sanity_check()
    starts = dict(segment.batches())
    entries = list(segment.offsets)
    assert len(entries) > 10
    assert all(starts[entry.position].last_offset == entry.offset for entry in entries)
    rows = world.records().to_pylist()
    for record in rows[::7]:
        found = world.log.fetch(record["offset"], max_bytes=1)
        assert BatchHeader.parse(found.data).last_offset >= record["offset"]
        time_ms = int(record["timestamp"].timestamp() * 1000)
        hit = world.log.offset_for_timestamp(time_ms)
        assert hit is not None
        assert hit.offset == min(r["offset"] for r in rows if r["timestamp"] >= record["timestamp"])
    largest = max(starts.values(), key=lambda header: header.max_timestamp)
    assert segment.times.last_entry.timestamp == largest.max_timestamp


def test_index_smaller_than_needed_stays_right(tmp_path: Path) -> None:
    config = TopicConfig(
        segment_bytes=20_000,
        segment_index_bytes=24,
        index_interval_bytes=100,
        cleanup_policy=frozenset({"compact"}),
    )
    world = CompactedPartition(tmp_path, config)
    for number in range(40):
        world.append([number])
    world.log.roll()
    world.log.update_config(
        TopicConfig(
            segment_bytes=20_000,
            segment_index_bytes=36,
            index_interval_bytes=0,
            cleanup_policy=frozenset({"compact"}),
        )
    )
    world.clean()
    assert world.offsets() == list(range(40))
    for offset in range(40):
        assert BatchHeader.parse(world.log.fetch(offset, max_bytes=1).data).base_offset == offset


def test_emptied_segment_leaves_a_log_that_reads_on(world: CompactedPartition) -> None:
    for _ in range(30):
        world.append([1])
    world.log.roll()
    world.append([1])
    world.log.roll()
    world.append([1])
    world.clean()
    assert world.offsets() == [30, 31]
    assert BatchHeader.parse(world.log.fetch(0, max_bytes=1000).data).last_offset == 30
    world.reopen(clean=False)
    assert world.offsets() == [30, 31]


def test_damaged_batch_stops_the_cleaning_and_changes_nothing(world: CompactedPartition) -> None:
    for number in range(30):
        world.append([number % 3])
    world.log.roll()
    source = world.log.segments[0]
    before = [(s.base_offset, s.read_at(0, s.size)) for s in world.log.segments]
    with world.files.open(source.path, write=True) as file:
        byte = file.read_at(200, 1)
        file.write_at(200, bytes([byte[0] ^ 1]))
    with pytest.raises(CorruptError) as caught:
        world.clean()
    assert caught.value.path == source.path
    assert [s.base_offset for s in world.log.segments] == [base for base, _ in before]
    assert world.names(".cleaned", ".swap") == []


def test_cut_during_a_cleaning_makes_it_a_conflict(tmp_path: Path) -> None:
    worlds: list[CompactedPartition] = []

    def cut(effect: Effect) -> None:
        if worlds and effect.kind == "create" and effect.path.name.endswith(".log.cleaned"):
            worlds.pop().log.truncate_to(3)

    world = CompactedPartition(tmp_path, watch=cut)
    for number in range(60):
        world.append([number % 3])
    world.log.roll()
    worlds.append(world)
    with pytest.raises(ConflictError, match="was cut while it was compacted"):
        world.clean()
    assert world.offsets() == [0, 1, 2]
    assert world.names(".cleaned", ".swap") == []


def test_failed_write_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    state = {"armed": False}

    def fail(effect: Effect) -> None:
        if state["armed"] and effect.kind == "write" and effect.path.name.endswith(".log.cleaned"):
            raise OSError(28, "No space left on device")

    world = CompactedPartition(tmp_path, watch=fail)
    for number in range(60):
        world.append([number % 3, 100 + number % 40])
    world.log.roll()
    state["armed"] = True
    with pytest.raises(Exception, match="disk is full"):
        world.clean()
    state["armed"] = False
    latest = {key: offset for offset, key in enumerate(k for n in range(60) for k in (n % 3, 100 + n % 40))}
    assert set(latest.values()) < set(world.offsets())
    assert world.names(".cleaned", ".swap") == []
    world.clean()
    assert world.offsets() == sorted(latest.values())


def test_batches_that_unfold_too_far_are_cleaned_a_few_at_a_time(world: CompactedPartition) -> None:
    for number in range(12):
        world.append([number, 100], values=[bytes(50_000), b"x"], codec="zstd")
    world.log.roll()
    limits = DecodeLimits(max_decompressed_bytes=60_000, max_total_bytes=120_000)
    world.clean(limits=limits)
    assert world.keys() == [*range(12), 100]


def test_bomb_stops_the_cleaning(world: CompactedPartition) -> None:
    world.append([1], values=[bytes(100_000)], codec="zstd")
    world.log.roll()
    limits = DecodeLimits(max_decompressed_bytes=10_000, max_total_bytes=10_000)
    with pytest.raises((CorruptError, InvalidError)):
        world.clean(limits=limits)


def test_throttled_cleaning_takes_its_time(world: CompactedPartition) -> None:
    for number in range(60):
        world.append([number])
    world.log.roll()
    size = sum(segment.size for segment in world.log.segments)
    before_ms = world.clock.monotonic_ms()
    world.clean(max_bytes_per_second=size)
    assert 1500 <= world.clock.monotonic_ms() - before_ms <= 3100  # read twice, written once


def test_reader_at_the_head_sees_all_records_before_and_after(world: CompactedPartition) -> None:
    seen = []
    for number in range(90):
        first, _ = world.append([number % 6])
        found = world.log.fetch(first, max_bytes=1)
        seen.append(BatchHeader.parse(found.data).base_offset)
        if number % 20 == 19:
            world.log.roll()
            world.clean()
    assert seen == list(range(90))
