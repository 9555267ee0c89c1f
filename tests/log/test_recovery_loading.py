"""Opening a partition folder after a clean stop or a crash: rows L1 to L8, and what opening costs."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from log_partitions import START_MS, Place, one_record
from tidegate.errors import ConflictError, CorruptError, InvalidError
from tidegate.files import Effect, Files
from tidegate.log.checkpoints import LeaderEpochs, TopicId
from tidegate.log.fetch import Isolation
from tidegate.log.format.partition_files import CLEANED, SWAP
from tidegate.log.partition import PartitionLog
from tidegate.log.producer_state import Origin
from tidegate.log.recovery import KafkaRecovery
from tidegate.log.segment import LogSegment
from tidegate.randomness import SeededRandomness
from tidegate.testing.batches import Rec, build_batch
from tidegate.testing.faults import CrashAt, SimulatedCrash, count_effects


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def filled(place: Place, count: int, **settings: Any) -> PartitionLog:
    log = place.open(**settings)
    for offset in range(count):
        log.append(one_record(timestamp=1000 + offset * 10, key=b"k"))
    return log


def stored(log: PartitionLog) -> list[int]:
    return [header.base_offset for segment in log.segments for _, header in segment.batches()]


def bases(log: PartitionLog) -> list[int]:
    return [segment.base_offset for segment in log.segments]


def check_all_reads(log: PartitionLog, count: int) -> None:
    """Every offset and every timestamp is found."""
    for offset in range(count):
        fetched = log.fetch(offset, max_bytes=1, isolation=Isolation.LOG_END)
        assert int.from_bytes(fetched.data[:8]) == offset
        found = log.offset_for_timestamp(1000 + offset * 10)
        assert found is not None
        assert found.offset == offset


# -- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "clean", [pytest.param(True, id="LS-L1-clean"), pytest.param(False, id="LS-L1-unclean")]
)
def test_reopening_finds_the_same_log(place: Place, clean: bool) -> None:
    log = filled(place, 100, segment_bytes=7 * 80, index_interval_bytes=200)
    log.flush()
    filled_to = log.recovery_point
    log.append(one_record(timestamp=5000))
    last_entries = [segment.offsets.last_offset for segment in log.segments]
    segments = bases(log)
    log = place.reopen(log, clean=clean, recovery_point=filled_to)
    assert log.log_end_offset == 101
    assert bases(log) == segments
    assert [segment.offsets.last_offset for segment in log.segments] == last_entries
    assert log.active_segment.times.last_entry == (5000, 100)
    assert log.recovery_point == (101 if clean else filled_to)
    log.flush()
    assert log.recovery_point == 101
    check_all_reads(log, 100)


def delete_indexes(folder: Path) -> None:
    for path in folder.glob("*index"):
        path.unlink()


def two_junk_bytes(folder: Path) -> None:
    for path in folder.glob("*index"):
        path.write_bytes(b"  ")


@pytest.mark.parametrize(
    "damage",
    [pytest.param(delete_indexes, id="LS-L2-deleted"), pytest.param(two_junk_bytes, id="LS-L2-junk")],
)
def test_lost_indexes_are_rebuilt(place: Place, damage: Callable[[Path], None]) -> None:
    log = filled(place, 60, segment_bytes=600, index_interval_bytes=100)
    honest = {name: (place.folder / name).read_bytes() for name in place.names("index")[:4]}
    log.close(clean=False)
    damage(place.folder)
    log = place.open(clean=False)
    check_all_reads(log, 60)
    log.close()
    assert {name: (place.folder / name).read_bytes() for name in honest} == honest


@pytest.mark.parametrize("offset", [pytest.param(5, id="LS-L3")])
def test_orphaned_indexes_are_deleted(place: Place, offset: int) -> None:
    place.open().close()
    for kind in (".index", ".timeindex", ".txnindex"):
        (place.folder / f"{offset:020d}{kind}").write_bytes(b"12345678")
    place.open()
    assert not [name for name in place.names() if name.startswith(f"{offset:020d}")]


@pytest.mark.parametrize(
    "kind", [pytest.param(".log", id="LS-L4"), pytest.param(".snapshot", id="LS-L4-snapshot")]
)
def test_deleted_leftovers_go(place: Place, kind: str) -> None:
    log = filled(place, 3)
    log.close()
    (place.folder / f"{7:020d}{kind}.deleted").write_bytes(b"x")
    (place.folder / "leader-epoch-checkpoint.17-0.tmp").write_bytes(b"x")
    (place.folder / f"{7:020d}.checkpoint.deleted").write_bytes(b"not ours")
    log = place.open()
    assert place.names(".deleted") == [f"{7:020d}.checkpoint.deleted"]
    assert place.names(".tmp") == []
    assert stored(log) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(8), ids=[f"LS-L5-{seed}" for seed in range(8)])
def test_junk_at_the_end_is_cut_and_every_record_kept(place: Place, seed: int) -> None:
    log = filled(place, 30, segment_bytes=1000, index_interval_bytes=100)
    log.close(clean=False)
    chance = random.Random(seed)
    with (place.folder / place.names(".log")[-1]).open("ab") as file:
        file.write(chance.randbytes(chance.randrange(1, 200)))
    with (place.folder / place.names(".index")[-1]).open("ab") as file:
        file.write(chance.randbytes(chance.randrange(1, 200)))
    log = place.open(clean=False)
    assert stored(log) == list(range(30))
    check_all_reads(log, 30)
    log.append(one_record(timestamp=9000))
    assert log.log_end_offset == 31


@pytest.mark.parametrize("log_start", [pytest.param(4, id="LS-L6")])
def test_a_log_that_ends_before_its_start_begins_anew_there(place: Place, log_start: int) -> None:
    log = filled(place, 6, segment_bytes=160)
    assert bases(log) == [0, 2, 4]
    log.close(clean=False)
    path = place.folder / f"{2:020d}.log"
    path.write_bytes(b"\xff" * path.stat().st_size)
    log = place.open(clean=False, log_start=log_start)
    assert (bases(log), log.log_start_offset, log.log_end_offset) == ([4], 4, 4)
    assert log.append(one_record()).first_offset == 4


SWAP_STAGES = [
    pytest.param("cleaned", "undone", id="LS-L7-cleaned-only"),
    pytest.param("half", "undone", id="LS-L7-part-swap"),
    pytest.param("swap", "done", id="LS-L7-all-swap"),
    pytest.param("old-gone", "done", id="LS-L7-swap-and-deleted"),
    pytest.param("part-final", "done", id="LS-L7-part-final"),
]


@pytest.mark.parametrize(("stage", "outcome"), SWAP_STAGES)
@pytest.mark.parametrize("clean", [True, False], ids=["clean", "unclean"])
def test_an_interrupted_swap_is_undone_or_completed(
    place: Place, stage: str, outcome: str, clean: bool
) -> None:
    log = filled(place, 9, segment_bytes=250)
    assert bases(log) == [0, 3, 6]
    new = compacted(place, log, keep=(1, 5))
    log.close(clean=clean)
    rename_for_stage(place.folder, new, stage)
    log = place.open(clean=clean)
    assert stored(log) == ([1, 5, 6, 7, 8] if outcome == "done" else list(range(9)))
    assert not [name for name in place.names() if name.endswith((CLEANED, SWAP, ".deleted"))]
    assert log.log_end_offset == 9
    assert log.fetch(0, max_bytes=1).data


def compacted(place: Place, log: PartitionLog, keep: tuple[int, ...]) -> LogSegment:
    """A finished `.cleaned` replacement of the first two segments with some of their batches."""
    new = LogSegment(
        place.folder,
        0,
        log.config,
        files=place.files,
        clock=place.clock,
        randomness=SeededRandomness(0),
        suffix=CLEANED,
    ).create()
    for segment in log.segments[:2]:
        for position, header in segment.batches():
            if header.base_offset in keep:
                new.append(segment.read_at(position, header.size), header)
    new.become_inactive()
    new.sync()
    return new


def rename_for_stage(folder: Path, new: LogSegment, stage: str) -> None:
    first = f"{0:020d}"
    if stage == "half":
        (folder / f"{first}.log.cleaned").rename(folder / f"{first}.log.swap")
    if stage in ("swap", "old-gone", "part-final"):
        new.change_suffix(SWAP)
    if stage in ("old-gone", "part-final"):
        for path in [*folder.glob(f"{first}.*[gx]"), *folder.glob(f"{3:020d}.*[gx]")]:
            path.rename(f"{path}.deleted")
    if stage == "part-final":
        (folder / f"{first}.log.swap").rename(folder / f"{first}.log")


@pytest.mark.parametrize("clean", [pytest.param(True, id="LS-L8"), pytest.param(False, id="LS-L8-unclean")])
def test_stray_snapshots_go_but_the_one_at_the_end_stays(place: Place, clean: bool) -> None:
    log = place.open()
    for sequence in range(4):
        log.append(one_record(timestamp=START_MS, producer_id=1, producer_epoch=0, base_sequence=sequence))
        if sequence < 2:
            log.roll()
    log.close()
    assert place.names(".snapshot") == [f"{offset:020d}.snapshot" for offset in (1, 2, 4)]
    shutil.copy(place.folder / f"{2:020d}.snapshot", place.folder / f"{3:020d}.snapshot")
    log = place.open(clean=clean, recovery_point=4)
    assert place.names(".snapshot") == [f"{offset:020d}.snapshot" for offset in (1, 2, 4)]
    assert log.append(one_record(timestamp=1, producer_id=1, producer_epoch=0, base_sequence=3)).duplicate


def test_a_clean_stop_without_snapshots_starts_with_no_producers_and_empty_snapshots(place: Place) -> None:
    log = place.open(segment_bytes=160)
    for sequence in range(7):
        log.append(one_record(timestamp=START_MS, producer_id=1, producer_epoch=0, base_sequence=sequence))
    assert bases(log) == [0, 2, 4, 6]
    log.close()
    for name in place.names(".snapshot"):
        (place.folder / name).unlink()
    log = place.open()
    assert not log.active_producers
    assert {name: place.size(name) for name in place.names(".snapshot")} == {
        f"{offset:020d}.snapshot": 10 for offset in (4, 6, 7)
    }
    log.close(clean=False)
    for name in place.names(".snapshot"):
        (place.folder / name).unlink()
    assert place.open(clean=False).active_producers[1].last_sequence == 6


# -- beyond the table ----------------------------------------------------------------------------


def test_a_first_opening_makes_one_empty_segment_at_the_log_start(place: Place) -> None:
    log = place.open(log_start=42)
    assert (bases(log), log.log_start_offset, log.log_end_offset, log.high_watermark) == ([42], 42, 42, 42)
    assert log.append(one_record()).first_offset == 42


@pytest.mark.parametrize("kind", [".index", ".timeindex"])
def test_a_missing_index_after_a_clean_stop(place: Place, kind: str) -> None:
    log = filled(place, 20, segment_bytes=600, index_interval_bytes=100)
    log.close()
    (place.folder / f"{0:020d}{kind}").unlink()
    log = place.open()
    if kind == ".index":
        assert log.segments[0].offsets.entries > 0
    else:
        assert place.size(f"{0:020d}.timeindex") == 0  # made empty, not rebuilt: the file's time stands in
        assert log.segments[0].largest_timestamp == log.segments[0].mtime_ms
    for offset in range(20):
        assert int.from_bytes(log.fetch(offset, max_bytes=1).data[:8]) == offset


def test_an_impossible_transaction_index_is_rebuilt(place: Place) -> None:
    log = filled(place, 10, segment_bytes=400)
    log.close()
    (place.folder / f"{5:020d}.txnindex").write_bytes(b"\0" * 34)
    log = place.open()
    assert place.size(f"{5:020d}.txnindex") == 0
    assert stored(log) == list(range(10))


def test_only_segments_from_the_recovery_point_on_are_recovered(place: Place) -> None:
    log = filled(place, 12, segment_bytes=330)
    assert bases(log) == [0, 4, 8]
    log.close(clean=False)
    recovered: list[int] = []

    class Watched(KafkaRecovery):
        def recover(self, segment: LogSegment, *rest: Any) -> int:
            recovered.append(segment.base_offset)
            return super().recover(segment, *rest)

    place.open(clean=False, recovery_point=6, recovery=Watched(place.files)).close(clean=False)
    assert recovered == [4, 8]
    recovered.clear()
    place.open(clean=False, recovery_point=12, recovery=Watched(place.files)).close(clean=False)
    assert recovered == [8]


def test_segments_behind_a_cut_one_are_dropped(place: Place) -> None:
    log = filled(place, 12, segment_bytes=330)
    log.close(clean=False)
    path = place.folder / f"{4:020d}.log"
    content = bytearray(path.read_bytes())
    content[2 * 73 + 65] ^= 1
    path.write_bytes(content)
    log = place.open(clean=False)
    assert stored(log) == [0, 1, 2, 3, 4, 5]
    assert bases(log) == [0, 4]
    assert place.names(".deleted")


@pytest.mark.parametrize(
    "settings",
    [
        {"index_interval_bytes": 1, "segment_index_bytes": 48},
        {"index_interval_bytes": 1, "segment_index_bytes": 24},
        {"index_interval_bytes": 0, "segment_index_bytes": 160},
    ],
)
def test_an_index_too_small_for_the_log_is_rebuilt_sparser_and_costs_nothing(
    place: Place, settings: dict[str, int]
) -> None:
    log = filled(place, 60)
    log.close(clean=False)
    log = place.open(clean=False, **settings)
    assert stored(log) == list(range(60))
    check_all_reads(log, 60)
    assert log.active_segment.largest == (1590, 59)
    assert log.append(one_record(timestamp=9999)).first_offset == 60
    log = place.reopen(log)
    assert stored(log) == list(range(61))


@pytest.mark.parametrize("clean", [True, False])
def test_an_index_setting_that_cannot_work_is_refused_and_costs_nothing(place: Place, clean: bool) -> None:
    filled(place, 20).close(clean=clean)
    with pytest.raises(InvalidError, match=r"segment\.index\.bytes"):
        place.open(clean=clean, segment_index_bytes=8).append(one_record())
    log = place.open(clean=False, segment_index_bytes=1000)
    assert stored(log) == list(range(20))


def test_offsets_that_go_back_empty_the_segment(place: Place) -> None:
    log = place.open(index_interval_bytes=0)
    for offset in (0, 1, 2):
        log.append(one_record(base_offset=offset), origin=Origin.REPLICATION)
    log.close(clean=False)
    path = place.folder / f"{0:020d}.log"
    first, second, third = (path.read_bytes()[at : at + 72] for at in (0, 72, 144))
    path.write_bytes(first + third + second)
    log = place.open(clean=False)
    assert (stored(log), log.log_end_offset) == ([], 0)


def test_an_offset_that_does_not_fit_its_segment_splits_it(place: Place) -> None:
    log = filled(place, 4)
    log.close(clean=False)
    path = place.folder / f"{0:020d}.log"
    content = bytearray(path.read_bytes())
    content[3 * 73 : 3 * 73 + 8] = (2**40).to_bytes(8)
    path.write_bytes(content)
    log = place.open(clean=False)
    assert bases(log) == [0, 2**40]
    assert stored(log) == [0, 1, 2, 2**40]
    assert log.log_end_offset == 2**40 + 1


def test_a_damaged_epoch_checkpoint_is_rebuilt_from_the_log(place: Place) -> None:
    log = place.open()
    for epoch in (0, 0, 3, 3, 4):
        log.append(one_record(), leader_epoch=epoch)
    log.close()
    path = place.folder / "leader-epoch-checkpoint"
    honest = path.read_bytes()
    path.write_bytes(b"0\nnonsense\n")
    place.open()
    assert path.read_bytes() == honest


def test_epochs_beyond_the_log_are_forgotten(place: Place) -> None:
    log = place.open()
    for epoch in (0, 2, 3):
        log.append(one_record(), leader_epoch=epoch)
    log.close(clean=False)
    os.truncate(place.folder / f"{0:020d}.log", 100)
    log = place.open(clean=False)
    epochs = LeaderEpochs(place.folder / "leader-epoch-checkpoint", files=Files())
    assert [tuple(entry) for entry in epochs.entries] == [(0, 0)]


def test_a_preallocated_file_is_found_at_its_content_after_a_crash(place: Place) -> None:
    log = filled(place, 5, preallocate=True, segment_bytes=100_000)
    assert place.size(f"{0:020d}.log") == 100_000
    log = place.reopen(log, clean=False)
    assert stored(log) == list(range(5))
    assert place.size(f"{0:020d}.log") == 5 * 73


def test_the_last_segment_gets_room_for_more_index_entries(place: Place) -> None:
    log = filled(place, 10, index_interval_bytes=0)
    log = place.reopen(log)
    assert place.size(f"{0:020d}.index") == 10 << 20
    assert not log.active_segment.is_offset_index_full
    log.append(one_record(timestamp=9999))
    assert bases(log) == [0]


def test_transactions_survive_a_crash(place: Place) -> None:
    log = place.open(segment_bytes=300)
    for sequence in range(6):
        log.append(
            one_record(
                timestamp=1, producer_id=1, producer_epoch=0, base_sequence=sequence, transactional=True
            )
        )
        log.append(one_record(timestamp=1))
    log = place.reopen(log, clean=False, recovery_point=0)
    assert log.last_stable_offset == 0
    assert log.active_producers[1].last_sequence == 5


def test_a_foreign_topic_id_is_refused(place: Place) -> None:
    ours, other = TopicId.random(SeededRandomness(1)), TopicId.random(SeededRandomness(2))
    options = {
        "broker": place.broker, "files": place.files, "clock": place.clock, "randomness": SeededRandomness(0),
        "scheduler": place.scheduler, "clean": True, "recovery": "kafka",
    }  # fmt: skip
    log = PartitionLog.open(place.folder, place.config, topic_id=ours, **options)
    assert log.topic_id == ours
    log.close()
    assert PartitionLog.open(place.folder, place.config, **options).topic_id == ours
    with pytest.raises(ConflictError):
        PartitionLog.open(place.folder, place.config, topic_id=other, **options)


def test_an_unknown_recovery_is_refused(place: Place) -> None:
    with pytest.raises(InvalidError, match="'safe' or 'kafka'"):
        place.open(recovery="hope")


def test_a_name_no_segment_has_is_named(place: Place) -> None:
    place.open().close()
    (place.folder / "notes.cleaned").write_bytes(b"")
    with pytest.raises(CorruptError, match=r"notes\.cleaned"):
        place.open()


def test_a_read_only_verdict_of_the_recovery_refuses_changes_and_serves_reads(place: Place) -> None:
    filled(place, 3).close()

    class Careful(KafkaRecovery):
        read_only = "a bit flipped at position 17; restore the file, then `tidegate log reseal`"

    log = place.open(recovery=Careful(place.files))
    assert log.read_only_reason == Careful.read_only
    assert log.fetch(0, max_bytes=10).data
    with pytest.raises(CorruptError, match="position 17"):
        log.append(one_record())
    assert log.close() is False


def test_known_facts_of_the_last_segment_spare_reading_it(place: Place) -> None:
    filled(place, 3).close()
    reads: list[str] = []

    class Sealed(KafkaRecovery):
        def known_end(self, segment: LogSegment) -> int | None:
            return 3

    place.files = Files(watch=lambda effect: _note_segment_read(effect, reads))
    log = place.open(recovery=Sealed(place.files))
    assert (log.log_end_offset, reads) == (3, [])


def _note_segment_read(effect: Effect, reads: list[str]) -> None:
    if effect.kind == "read" and effect.path.suffix != ".snapshot" and effect.path.name[:20].isdigit():
        reads.append(f"{effect.kind} {effect.path.name}")


def test_ten_thousand_segments_open_without_reading_one(place: Place) -> None:
    """Only the tail of the last segment is looked at after a clean stop."""
    log = place.open()
    log.append(one_record(timestamp=1))
    log.close()
    first = f"{0:020d}"
    for number in range(1, 10_000):
        for kind in (".log", ".index", ".timeindex"):
            os.link(place.folder / f"{first}{kind}", place.folder / f"{number:020d}{kind}")
    last = f"{9_999:020d}"
    for kind in (".log", ".index", ".timeindex"):
        (place.folder / f"{last}{kind}").unlink()
        (place.folder / f"{last}{kind}").write_bytes(b"")
    (place.folder / f"{1:020d}.snapshot").rename(place.folder / f"{last}.snapshot")
    touched: list[str] = []

    def watch(effect: Effect) -> None:
        if effect.kind in ("read", "open", "create") and effect.path.name[:20].isdigit():
            touched.append(effect.path.name)

    place.files = Files(watch=watch)
    descriptors = len(os.listdir("/proc/self/fd"))
    log = place.open()
    assert len(log.segments) == 10_000
    assert {name[:20] for name in touched} <= {last}
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 3


# -- crashes while opening -----------------------------------------------------------------------


def test_recovery_can_crash_anywhere_and_start_again(tmp_path: Path) -> None:
    origin = Place(tmp_path / "origin")
    log = filled(origin, 20, segment_bytes=400, index_interval_bytes=100)
    log.append(one_record(timestamp=START_MS, producer_id=1, producer_epoch=0, base_sequence=0))
    log.close(clean=False)
    with (origin.folder / origin.names(".log")[-1]).open("ab") as file:
        file.write(b"torn")
    (origin.folder / f"{99:020d}.index").write_bytes(b"")
    (origin.folder / f"{98:020d}.log.cleaned").write_bytes(b"")

    def open_copy(files: Files, name: str) -> PartitionLog:
        copy = Place(tmp_path / name, files=files, config=origin.config)
        shutil.copytree(origin.root, copy.root, dirs_exist_ok=True)
        return copy.open(clean=False)

    expected = stored(open_copy(Files(), "straight"))
    effects = count_effects(lambda files: open_copy(files, "counted"))
    assert effects > 30
    for n in range(1, effects + 1):
        with pytest.raises(SimulatedCrash):
            open_copy(Files(watch=CrashAt(n)), f"crash-{n}")
        again = Place(tmp_path / f"crash-{n}", config=origin.config)
        log = again.open(clean=False)
        assert stored(log) == expected
        assert (log.log_end_offset, log.active_producers[1].last_sequence) == (21, 0)
        shutil.rmtree(again.root)


def test_index_entries_after_an_unclean_stop_are_counted_from_zero(place: Place) -> None:
    """As a broker counts: what was written before the stop says nothing about the next entry."""
    settings = {"index_interval_bytes": 100}
    log = place.open(**settings)
    for number in range(3):
        log.append(build_batch([Rec(value=b"x", timestamp=number)]))
    log.close(clean=False)
    log = place.open(clean=False, **settings)
    for number in range(3, 8):
        log.append(build_batch([Rec(value=b"x", timestamp=number)]))
    size = log.active_segment.size // 8
    index = log.active_segment.offsets
    found = [tuple(index.entry(number)) for number in range(index.entries)]
    assert found == [(2, 2 * size), (5, 5 * size), (7, 7 * size)]


def test_between_an_offset_and_itself_lies_no_log_segment(place: Place) -> None:
    log = place.open(segment_bytes=100)
    for number in range(4):
        log.append(build_batch([Rec(value=b"x" * 30, timestamp=number)]))
    segments = log.view.segments
    assert len(segments) >= 3
    assert segments.between(1, 1) == segments.between(2, 2) == segments.between(3, 1) == ()
    assert [segment.base_offset for segment in segments.between(0, 2)] == [0, 1]
