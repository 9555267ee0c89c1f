"""Cutting the end, dropping the start, swapping segments in; what hooks hear, and what failures leave."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from log_partitions import START_MS, Place, one_record, records
from tidegate.errors import ConflictError, InvalidError, TidegateError, UnavailableError
from tidegate.files import Files
from tidegate.log.fetch import Isolation
from tidegate.log.format.partition_files import CLEANED
from tidegate.log.partition import PartitionLog
from tidegate.log.segment import LogSegment
from tidegate.randomness import SeededRandomness
from tidegate.testing.faults import CrashAt, EffectCounter, FailAt, SimulatedCrash, count_effects


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def filled(place: Place, count: int, **settings: Any) -> PartitionLog:
    log = place.open(**settings)
    for offset in range(count):
        log.append(one_record(timestamp=START_MS + offset), leader_epoch=offset // 5)
    log.acknowledge(sync=True)
    return log


def stored(log: PartitionLog) -> list[int]:
    return [header.base_offset for segment in log.segments for _, header in segment.batches()]


def bases(log: PartitionLog) -> list[int]:
    return [segment.base_offset for segment in log.segments]


def epochs(log: PartitionLog) -> list[tuple[int, int]]:
    return [tuple(entry) for entry in log._epochs.entries]


# -- cutting the end -----------------------------------------------------------------------------


@pytest.mark.parametrize("offset", range(13))
def test_truncating_keeps_exactly_what_lies_before(place: Place, offset: int) -> None:
    log = filled(place, 12, segment_bytes=300, index_interval_bytes=80)
    assert bases(log) == [0, 4, 8]
    assert log.truncate_to(offset) is (offset < 12)
    assert stored(log) == list(range(offset))
    assert log.log_end_offset == log.high_watermark == log.recovery_point == offset
    assert log.active_segment.base_offset == max(base for base in (0, 4, 8) if base <= offset)
    assert epochs(log) == [entry for entry in [(0, 0), (1, 5), (2, 10)] if entry[1] < offset]
    info = log.append(one_record(timestamp=START_MS), leader_epoch=7)
    assert info.first_offset == offset
    log = place.reopen(log, clean=False, recovery_point=0)
    assert stored(log) == list(range(offset + 1))


def test_truncating_inside_a_batch_takes_the_whole_batch_and_the_log_ends_where_asked(place: Place) -> None:
    log = place.open()
    log.append(records(5))
    log.append(records(5))
    log.truncate_to(7)
    assert stored(log) == [0]
    assert log.log_end_offset == 7
    assert log.append(one_record()).first_offset == 7


def test_truncating_before_the_first_segment_restarts_the_log_there(place: Place) -> None:
    log = place.open(log_start=50)
    log.append(one_record())
    log.truncate_to(30)
    assert (bases(log), log.log_start_offset, log.log_end_offset) == ([30], 30, 30)


def test_truncating_lowers_the_log_start_too(place: Place) -> None:
    log = filled(place, 10)
    log.delete_records_before(8)
    log.truncate_to(6)
    assert (log.log_start_offset, log.log_end_offset, log.high_watermark) == (6, 6, 6)


def test_a_negative_offset_is_refused(place: Place) -> None:
    with pytest.raises(InvalidError):
        filled(place, 3).truncate_to(-1)


def test_truncating_fully_starts_anew(place: Place) -> None:
    log = filled(place, 12, segment_bytes=300)
    log.truncate_fully(4)
    assert (bases(log), stored(log), epochs(log)) == ([4], [], [])
    assert (log.log_start_offset, log.log_end_offset, log.high_watermark, log.recovery_point) == (4, 4, 4, 4)
    log.append(one_record())
    place.clock.advance("61s")
    place.scheduler.run_due()
    log = place.reopen(log)
    assert (stored(log), place.names(".deleted")) == ([4], [])


def test_truncating_forgets_the_producers_of_what_went(place: Place) -> None:
    log = place.open(segment_bytes=160)
    for sequence in range(6):
        log.append(one_record(timestamp=START_MS, producer_id=1, producer_epoch=0, base_sequence=sequence))
    log.truncate_to(3)
    assert log.active_producers[1].last_sequence == 2
    assert (
        log.append(
            one_record(timestamp=START_MS, producer_id=1, producer_epoch=0, base_sequence=3)
        ).first_offset
        == 3
    )


def test_an_open_transaction_that_is_cut_off_is_forgotten(place: Place) -> None:
    log = place.open()
    log.append(one_record(timestamp=START_MS))
    log.append(
        one_record(timestamp=START_MS, producer_id=1, producer_epoch=0, base_sequence=0, transactional=True)
    )
    log.acknowledge(sync=False)
    assert log.last_stable_offset == 1
    log.truncate_to(1)
    log.append(one_record(timestamp=START_MS))
    log.acknowledge(sync=False)
    assert log.last_stable_offset == 2


def test_a_truncated_segment_can_fill_and_roll_again(place: Place) -> None:
    log = filled(place, 8, segment_bytes=300, index_interval_bytes=80)
    log.truncate_to(5)
    for _ in range(10):
        log.append(one_record(timestamp=START_MS + 50))
    assert stored(log) == list(range(15))
    log.acknowledge(sync=False)
    for offset in range(15):
        assert int.from_bytes(log.fetch(offset, max_bytes=1).data[:8]) == offset


# -- dropping the start --------------------------------------------------------------------------


def test_deleting_segments_moves_the_start_and_unlinks_after_the_delay(place: Place) -> None:
    log = filled(place, 12, segment_bytes=300)
    removed: list[tuple[int, str]] = []
    log.hooks.on_segment_removed.append(lambda segment, reason: removed.append((segment.base_offset, reason)))
    assert log.delete_segments(log.segments[:2], reason="time") == 2
    assert (bases(log), log.log_start_offset) == ([8], 8)
    assert epochs(log) == [(1, 8), (2, 10)]
    assert removed == [(0, "time"), (4, "time")]
    assert len(place.names(".deleted")) == 7  # .log, .index, .timeindex twice, and the snapshot at 4
    place.clock.advance(59_999)
    place.scheduler.run_due()
    assert len(place.names(".deleted")) == 7
    place.clock.advance(1)
    place.scheduler.run_due()
    assert place.names(".deleted") == []


def test_deleting_every_segment_leaves_an_empty_one_at_the_end(place: Place) -> None:
    log = filled(place, 5)
    assert log.delete_segments(log.segments, reason="time") == 1
    assert (bases(log), log.log_start_offset, log.log_end_offset) == ([5], 5, 5)
    assert log.delete_segments(log.segments, reason="time") == 0
    assert bases(log) == [5]
    assert log.append(one_record()).first_offset == 5


def test_a_segment_that_left_already_is_not_deleted_twice(place: Place) -> None:
    log = filled(place, 12, segment_bytes=300)
    first = log.segments[:1]
    assert log.delete_segments(first, reason="size") == 1
    assert log.delete_segments(first, reason="size") == 0


def test_a_reader_in_the_middle_of_a_deleted_segment_is_told(place: Place) -> None:
    log = filled(place, 12, segment_bytes=300)
    view = log.view
    log.delete_segments(log.segments[:1], reason="time")
    with pytest.raises(InvalidError, match="4 to 12"):
        log.fetch(2, max_bytes=100)
    assert view.segments.first.read_at(0, 72)  # the file is there until the delay is over


def test_closing_leaves_deleted_files_to_the_next_start(place: Place) -> None:
    log = filled(place, 12, segment_bytes=300)
    log.delete_segments(log.segments[:1], reason="time")
    log.close()
    assert place.names(".deleted")
    place.clock.advance("2m")
    place.scheduler.run_due()
    assert place.names(".deleted")
    place.open()
    assert not place.names(".deleted")


def test_the_progress_hook_hears_of_watermark_and_start(place: Place) -> None:
    log = place.open()
    heard: list[tuple[int, int, int]] = []
    log.hooks.on_acknowledged.append(lambda *progress: heard.append(progress))
    log.append(records(3))
    log.acknowledge(sync=False)
    log.append(records(2))
    log.acknowledge(sync=True)
    log.delete_records_before(4)
    log.truncate_to(4)
    assert heard == [(3, 0, 0), (5, 0, 5), (5, 4, 5), (4, 4, 4)]


def test_disk_full_does_not_stop_retention(place: Place) -> None:
    fault = FailAt(10**9, errno.ENOSPC, kinds={"write", "create", "rename"}, persistent=True)
    place.files = Files(watch=fault)
    log = filled(place, 12, segment_bytes=300)
    fault.n = 0
    assert log.delete_segments(log.segments[:2], reason="time") == 2
    assert (bases(log), log.read_only_reason) == ([8], None)
    place.clock.advance("61s")
    place.scheduler.run_due()
    assert not [name for name in place.names() if name.startswith((f"{0:020d}.log", f"{4:020d}.log"))]
    fault.lift()
    assert log.append(one_record()).first_offset == 12


# -- swapping ------------------------------------------------------------------------------------


def compacted(place: Place, log: PartitionLog, sources: tuple[LogSegment, ...], keep: set[int]) -> LogSegment:
    new = LogSegment(
        place.folder,
        sources[0].base_offset,
        log.config,
        files=place.files,
        clock=place.clock,
        randomness=SeededRandomness(0),
        suffix=CLEANED,
    ).create()
    for segment in sources:
        for position, header in segment.batches():
            if header.base_offset in keep:
                new.append(segment.read_at(position, header.size), header)
    new.become_inactive()
    new.sync()
    return new


def test_a_swap_replaces_segments_and_readers_follow(place: Place) -> None:
    log = filled(place, 12, segment_bytes=300)
    names: list[str] = []
    log.hooks.on_segments_changing.append(lambda: names.append("changing"))
    log.hooks.on_segments_changed.append(lambda: names.append("changed"))
    log.hooks.on_segment_added.append(lambda segment: names.append(f"added {segment.base_offset}"))
    log.hooks.on_segment_removed.append(
        lambda segment, reason: names.append(f"{reason} {segment.base_offset}")
    )
    old = log.segments[:2]
    view = log.view
    log.replace_segments([compacted(place, log, old, {2, 7})], old)
    assert names == ["changing", "changed", "compaction 0", "compaction 4", "added 0"]
    assert stored(log) == [2, 7, 8, 9, 10, 11]
    assert [int.from_bytes(log.fetch(at, max_bytes=1).data[:8]) for at in (0, 3, 8)] == [2, 7, 8]
    assert len(log.fetch(0, max_bytes=10_000).data) == 144
    assert view.segments.first.read_at(72, 8) == (1).to_bytes(
        8
    )  # who took the old view still has the old file
    assert [name for name in place.names() if name.endswith((".cleaned", ".swap"))] == []
    assert f"{4:020d}.snapshot" not in place.names(".snapshot")
    place.clock.advance("61s")
    place.scheduler.run_due()
    log = place.reopen(log)
    assert stored(log) == [2, 7, 8, 9, 10, 11]


def test_a_swap_of_segments_that_left_meanwhile_is_a_conflict_and_changes_nothing(place: Place) -> None:
    log = filled(place, 12, segment_bytes=300)
    old = log.segments[:2]
    new = compacted(place, log, old, {2})
    log.delete_segments(log.segments[:1], reason="time")
    with pytest.raises(ConflictError, match="clean again"):
        log.replace_segments([new], old)
    assert stored(log) == list(range(4, 12))
    assert place.names(".cleaned")


def test_a_swap_syncs_the_new_names_before_an_old_file_goes_and_again_at_the_end(place: Place) -> None:
    counter = EffectCounter()
    place.files = Files(watch=counter)
    log = filled(place, 12, segment_bytes=300)
    old = log.segments[:2]
    new = compacted(place, log, old, {2, 7})
    counter.names.clear()
    log.replace_segments([new], old)
    kinds = [name.split()[0] for name in counter.names]
    # .cleaned → .swap (3 files), old → .deleted (2 × 3 files and the snapshot at 4), .swap → final (3)
    assert kinds == ["rename"] * 3 + ["sync_folder"] + ["rename"] * 10 + ["sync_folder"]


def swap_script(folder: Path, files: Files) -> tuple[Place, PartitionLog]:
    place = Place(folder, files=files)
    log = filled(place, 12, segment_bytes=300)
    old = log.segments[:2]
    log.replace_segments([compacted(place, log, old, {2, 7})], old)
    return place, log


def test_a_crash_anywhere_in_a_swap_leaves_the_old_or_the_new_log(tmp_path: Path) -> None:
    before = count_effects(
        lambda files: filled(Place(tmp_path / "before", files=files), 12, segment_bytes=300)
    )
    after = count_effects(lambda files: swap_script(tmp_path / "after", files))
    outcomes = set()
    for n in range(before + 1, after + 1):
        place = Place(tmp_path / f"crash-{n}")
        with pytest.raises(SimulatedCrash):
            swap_script(place.root, Files(watch=CrashAt(n)))
        log = place.open(clean=False, segment_bytes=300)
        outcomes.add(tuple(stored(log)))
        assert log.log_end_offset == 12
        assert not [name for name in place.names() if name.endswith((".cleaned", ".swap", ".deleted"))]
    assert outcomes == {tuple(range(12)), (2, 7, 8, 9, 10, 11)}


@pytest.mark.parametrize("kind", ["rename", "sync_folder"])
def test_a_failure_in_a_swap_leaves_a_readable_log(tmp_path: Path, kind: str) -> None:
    read_only = 0
    for n in range(1, 20):
        fault = FailAt(10**9, kinds={kind})
        place = Place(tmp_path / f"{kind}-{n}", files=Files(watch=fault))
        log = filled(place, 12, segment_bytes=300)
        old = log.segments[:2]
        new = compacted(place, log, old, {2, 7})
        fault.n = fault._counter.count + n
        try:
            log.replace_segments([new], old)
        except TidegateError:
            read_only += log.read_only_reason is not None
            assert len(stored(log)) in (12, 6)
            assert log.fetch(8, max_bytes=1).data
            if log.read_only_reason is None:
                log.append(one_record())
            log.close()
        else:
            assert fault.fired == 0
            break
        place.files = Files()
        log = place.open(clean=False)
        assert stored(log)[:12] in ([*range(12)], [2, 7, *range(8, 12)], [2, 7, *range(8, 13)])
    assert read_only > 0


# -- half-way ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 12))
def test_a_cut_that_stops_half_way_makes_the_log_read_only_and_reopening_mends_it(
    tmp_path: Path, n: int
) -> None:
    fault = FailAt(10**9)
    place = Place(tmp_path, files=Files(watch=fault))
    log = filled(place, 12, segment_bytes=300)
    fault.n = fault._counter.count + n
    try:
        log.truncate_to(6)
    except UnavailableError:
        assert log.read_only_reason is not None
        with pytest.raises(UnavailableError, match="reopen"):
            log.append(one_record())
        assert log.close() is False
    else:
        log.close()
    place.files = Files()
    log = place.open(clean=False)
    assert stored(log) == list(range(len(stored(log))))
    assert len(stored(log)) >= 6
    log.truncate_to(6)
    assert stored(log) == list(range(6))
    assert log.fetch(0, max_bytes=1, isolation=Isolation.LOG_END).data


def test_expired_producers_are_forgotten(place: Place) -> None:
    log = place.open()
    log.append(one_record(timestamp=START_MS, producer_id=1, producer_epoch=0, base_sequence=4))
    assert log.remove_expired_producers(START_MS + 86_399_999) == 0
    assert log.remove_expired_producers(START_MS + 86_400_000) == 1
    assert not log.active_producers
