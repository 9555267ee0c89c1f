"""The published example: one record of about 150 bytes every five seconds, and the files it makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from log_partitions import Place
from tidegate.clock import ManualClock
from tidegate.log.partition import PartitionLog
from tidegate.testing.batches import CANARY_CRCS, CANARY_START_MS, canary_batch, canary_timestamp

FIRST, SECOND = f"{0:020d}", f"{109:020d}"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, topic="__strimzi_canary", clock=ManualClock(CANARY_START_MS))


def run_canary(place: Place, count: int, **settings: int) -> PartitionLog:
    """Let the canary send `count` records, in its own time."""
    log = place.open(retention_ms=600_000, segment_bytes=16384, **settings)
    for number in range(count):
        place.clock.set_now_ms(canary_timestamp(number))
        info = log.append(bytearray(canary_batch(number, base_offset=0, leader_epoch=-1)))
        assert (info.first_offset, info.last_offset) == (number, number)
    return log


def test_a_segment_takes_109_records_and_the_listing_is_the_published_one(place: Place) -> None:
    log = run_canary(place, 112)
    assert [segment.base_offset for segment in log.segments] == [0, 109]
    assert {name: place.size(name) for name in place.names()} == {
        f"{FIRST}.index": 24,
        f"{FIRST}.log": 16314,
        f"{FIRST}.timeindex": 48,
        f"{SECOND}.index": 10485760,
        f"{SECOND}.log": 450,
        f"{SECOND}.snapshot": 10,
        f"{SECOND}.timeindex": 10485756,
        "leader-epoch-checkpoint": 8,
    }


def test_the_roll_comes_with_the_110th_record_not_before(place: Place) -> None:
    assert len(run_canary(place, 109).segments) == 1


def test_index_entries_are_the_published_ones(place: Place) -> None:
    log = run_canary(place, 110)
    indexes = log.segments[0]
    assert list(indexes.offsets) == [(28, 4169), (56, 8364), (84, 12564)]
    assert (
        place.folder / f"{FIRST}.index"
    ).read_bytes().hex() == "0000001c0000104900000038000020ac0000005400003114"
    assert list(indexes.times) == [(canary_timestamp(offset), offset) for offset in (28, 56, 84, 108)]


def test_while_the_segment_is_active_the_time_index_has_three_entries(place: Place) -> None:
    log = run_canary(place, 109)
    assert [entry.offset for entry in log.segments[0].times] == [28, 56, 84]


def test_checksums_are_the_published_ones(place: Place) -> None:
    log = run_canary(place, 109)
    crcs = {header.base_offset: header.crc for _, header in log.segments[0].batches()}
    assert {offset: crcs[offset] for offset in CANARY_CRCS} == {
        0: 2142666254,
        1: 1895373344,
        2: 1097825866,
        108: 1749984078,
    }
    sizes = [header.size for _, header in log.segments[0].batches()]
    assert (sizes.count(148), sizes.count(149), sizes.count(150), len(sizes)) == (3, 30, 76, 109)
    assert [position for position, _ in log.segments[0].batches()][-1] == 16164


def test_small_indexes_roll_at_offset_49(place: Place) -> None:
    log = run_canary(place, 79, index_interval_bytes=150, segment_index_bytes=300)
    rolled = f"{49:020d}"
    assert [segment.base_offset for segment in log.segments] == [0, 49]
    assert {name: place.size(name) for name in place.names()} == {
        f"{FIRST}.index": 192,
        f"{FIRST}.log": 7314,
        f"{FIRST}.timeindex": 288,
        f"{rolled}.index": 296,
        f"{rolled}.log": 4500,
        f"{rolled}.snapshot": 10,
        f"{rolled}.timeindex": 300,
        "leader-epoch-checkpoint": 8,
    }


def test_the_small_indexes_hold_24_entries_each_and_the_reserved_slot_stays_free(place: Place) -> None:
    log = run_canary(place, 50, index_interval_bytes=150, segment_index_bytes=300)
    indexes = log.segments[0]
    assert [entry.offset for entry in indexes.offsets] == list(range(2, 50, 2))
    assert [entry.offset for entry in indexes.times] == list(range(2, 50, 2))


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "after a crash"])
def test_reopening_finds_every_record_again(place: Place, clean: bool) -> None:
    log = place.reopen(run_canary(place, 130), clean=clean)
    assert log.log_end_offset == 130
    for offset in (0, 27, 28, 108, 109, 129):
        fetched = log.fetch(offset, max_bytes=1)
        assert fetched.data == canary_batch(offset)
        found = log.offset_for_timestamp(canary_timestamp(offset))
        assert found is not None
        assert found.offset == offset


def test_a_clean_close_leaves_the_canonical_folder(place: Place) -> None:
    assert run_canary(place, 112).close()
    assert {name: place.size(name) for name in place.names()} == {
        f"{FIRST}.index": 24,
        f"{FIRST}.log": 16314,
        f"{FIRST}.timeindex": 48,
        f"{SECOND}.index": 0,
        f"{SECOND}.log": 450,
        f"{SECOND}.snapshot": 10,
        f"{SECOND}.timeindex": 12,
        f"{112:020d}.snapshot": 10,
        "leader-epoch-checkpoint": 8,
    }
