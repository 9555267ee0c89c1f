"""Seals through the life of a partition, and what they are good for: hints that cannot lie."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from log_partitions import Place, one_record
from tidegate.clock import ManualClock
from tidegate.errors import CorruptError
from tidegate.files import Effect, Files
from tidegate.log.fetch import Isolation
from tidegate.log.format.partition_files import offset_file
from tidegate.log.log import Log
from tidegate.log.partition import PartitionLog
from tidegate.log.producer_state import Origin
from tidegate.log.recovery import SafeRecovery
from tidegate.log.sealer import Sealer, seal_as_found
from tidegate.log.seals import check_seals, read_seal
from tidegate.testing.batches import end_transaction_batch

SIZE = 72
FILES = Files()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def sealed_log(place: Place, count: int = 10, **settings: int) -> PartitionLog:
    """Records of ascending time, three to a log segment, the writer still at work."""
    log = place.open(**({"segment_bytes": 3 * SIZE, "index_interval_bytes": 0} | settings))
    Sealer(log, place.files)
    for offset in range(count):
        log.append(one_record(timestamp=1000 + 10 * offset))
    return log


def sealed_bases(place: Place) -> list[int]:
    return [int(name[:20]) for name in place.names(".seal")]


def test_finished_segments_are_sealed_and_the_active_one_is_not(place: Place) -> None:
    sealed_log(place)
    assert sealed_bases(place) == [0, 3, 6]
    assert check_seals(FILES, place.folder) == []
    seal = read_seal(FILES, place.folder, 3)
    assert seal is not None
    assert (seal.next_offset, seal.records, seal.batches) == (6, 3, 3)
    assert (seal.first_timestamp, seal.max_timestamp, seal.max_timestamp_offset) == (1030, 1050, 5)


def test_a_clean_close_seals_the_last_one_and_opening_for_writing_breaks_that_seal(place: Place) -> None:
    sealed_log(place).close()
    assert sealed_bases(place) == [0, 3, 6, 9]
    assert check_seals(FILES, place.folder) == []
    log = place.open(recovery=SafeRecovery(FILES))
    assert log.log_end_offset == 10
    Sealer(log, place.files)
    assert sealed_bases(place) == [0, 3, 6]
    for _ in range(4):
        log.append(one_record(timestamp=5000))
    log.close()
    assert check_seals(FILES, place.folder) == []


def test_a_cleanly_closed_log_is_opened_without_reading_a_segment(place: Place) -> None:
    sealed_log(place, 300).close()
    seen: list[Effect] = []
    place.files = Files(watch=seen.append)
    log = place.open(recovery=SafeRecovery(place.files))
    assert log.log_end_offset == 300
    assert len(log.segments) == 100
    assert not [effect for effect in seen if effect.kind in ("open", "read") and effect.path.suffix == ".log"]


def test_seals_leave_with_their_segments(place: Place) -> None:
    log = sealed_log(place)
    log.update_high_watermark(10)
    log.delete_segments(log.segments[:2], reason="time")
    assert sealed_bases(place) == [6]
    log.truncate_to(7)
    assert sealed_bases(place) == []
    log.append(one_record())
    log.append(one_record())
    log.append(one_record())
    assert sealed_bases(place) == [6]
    assert check_seals(FILES, place.folder) == []


def test_a_seal_without_its_segment_is_cleared_away(place: Place) -> None:
    sealed_log(place).close()
    offset_file(place.folder, 77, ".seal").write_bytes(b"leftover")
    Sealer(place.open(), place.files)
    assert sealed_bases(place) == [0, 3, 6]


def test_what_another_program_changed_can_be_accepted(place: Place) -> None:
    log = sealed_log(place)
    log.close()
    path = place.folder / f"{3:020d}.log"
    content = bytearray(path.read_bytes())
    content[12] ^= 1  # the leader epoch, which no CRC covers
    path.write_bytes(content)
    assert [found.path for found in check_seals(FILES, place.folder)] == [path]
    log = place.open()
    seal_as_found(FILES, place.folder, log.segments[1])
    assert path not in [found.path for found in check_seals(FILES, place.folder)]


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
def test_no_flipped_bit_of_an_index_changes_an_answer(place: Place, suffix: str) -> None:
    """R-8: with a clean marker and a seal, every look-up by offset and by time is right or says why not."""
    log = sealed_log(place, segment_bytes=10 * SIZE)
    log.roll()
    log.close()
    path = place.folder / f"{0:020d}{suffix}"
    good = path.read_bytes()
    assert len(good) >= 8 * 8
    for bit in range(len(good) * 8):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        log = place.open(recovery=SafeRecovery(FILES))
        for offset in range(10):
            data = log.fetch(offset, max_bytes=1, isolation=Isolation.LOG_END).data
            assert int.from_bytes(data[:8]) == offset
            found = log.offset_for_timestamp(1000 + 10 * offset)
            assert found is not None
            assert found.offset == offset
        log.close(clean=False)
        path.write_bytes(good)


def test_a_changed_transaction_index_is_an_error_not_an_answer(place: Place) -> None:
    log = place.open(segment_bytes=400)
    Sealer(log, place.files)
    for sequence in range(2):
        log.append(one_record(producer_id=7, producer_epoch=0, base_sequence=sequence, transactional=True))
    marker = end_transaction_batch("ABORT", producer_id=7, producer_epoch=0)
    log.append(bytearray(marker), origin=Origin.COORDINATOR)
    log.roll()
    log.append(one_record())
    log.update_high_watermark(log.log_end_offset)
    fetch = {"max_bytes": 1000, "isolation": Isolation.TXN_COMMITTED}
    assert [aborted.producer_id for aborted in log.fetch(0, **fetch).aborted] == [7]  # type: ignore[arg-type]
    log.close()
    path = place.folder / f"{0:020d}.txnindex"
    bad = bytearray(path.read_bytes())
    bad[9] ^= 1  # the producer id: another producer's records would be hidden, this one's shown
    path.write_bytes(bad)
    log = place.open(recovery=SafeRecovery(FILES))
    with pytest.raises(CorruptError, match="txnindex was changed"):
        log.fetch(0, **fetch)  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
def test_a_damaged_index_of_the_active_segment_is_rebuilt_at_opening(tmp_path: Path, suffix: str) -> None:
    with Log(tmp_path, clock=ManualClock()) as log:
        log.create_topic("orders", config={"index.interval.bytes": 1})
        stamps = pa.array(range(1000, 1100, 10), pa.int64()).cast(pa.timestamp("ms", "UTC"))
        log.writer("orders", batch_records=1).write(pa.table({"value": [b"x"] * 10, "timestamp": stamps}))
    path = tmp_path / "orders-0" / f"{0:020d}{suffix}"
    good = path.read_bytes()
    for bit in range(0, len(good) * 8, 7):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with Log(tmp_path, clock=ManualClock()) as log:
            partition = log.partition("orders", 0)
            found = [partition.offset_for_timestamp(1000 + 10 * offset) for offset in range(10)]
            assert [place.offset for place in found if place] == list(range(10))
        assert path.read_bytes() == good
