"""Damage beside the records after an unclean stop: it hides no acknowledged record and lets none be cut silently."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from tidegate.errors import CorruptError
from tidegate.files import Files
from tidegate.log.format.batch import iter_headers
from tidegate.log.log import Log
from tidegate.log.verify.verify import verify
from tidegate.log.watermark import SLOT_BYTES, WATERMARK_NAME, is_certain, parse_slot, read_slots

RECORDS, STEP = 60, 10


def rows(first: int, last: int) -> pa.Table:
    numbers = range(first, last)
    return pa.table(
        {"value": [b"%d" % number for number in numbers], "timestamp": [1000 + number for number in numbers]}
    )


def stored(log: Log, **settings: object) -> list[int]:
    return [int(value) for value in log.reader("t", **settings).read_all().column("value").to_pylist()]  # type: ignore[arg-type]


def unclean(tmp_path: Path, **config: str) -> Path:
    """A log whose writer died after `RECORDS` acknowledged records."""
    with Log(tmp_path / "alive") as log:
        log.create_topic("t", config=config)
        writer = log.writer("t", batch_records=5)
        for first in range(0, RECORDS, STEP):
            writer.write(rows(first, first + STEP))
        shutil.copytree(tmp_path / "alive", tmp_path / "log")
    return tmp_path / "log"


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


# -- the watermark -------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [*range(3, 128, 12), 70, 127])
def test_a_damaged_watermark_hides_no_acknowledged_record(tmp_path: Path, position: int) -> None:
    path = unclean(tmp_path)
    flip(path / "t-0" / WATERMARK_NAME, position)
    with Log(path, read_only=True) as log:
        assert stored(log) == list(range(RECORDS))
    report = verify("t", log=path)
    assert [finding.path.name for finding in report.general.kept] == [WATERMARK_NAME]
    with Log(path) as log:
        log.writer("t").write(rows(RECORDS, RECORDS + 1))
        slots = read_slots(Files(), path / "t-0")
        assert slots is not None and is_certain(slots)
        assert stored(log) == list(range(RECORDS + 1))
    assert verify("t", log=path).general.kept == []


@pytest.mark.parametrize("content", [b"", bytes(128), b"rubbish" * 30])
def test_a_watermark_file_without_a_value_hides_nothing(tmp_path: Path, content: bytes) -> None:
    path = unclean(tmp_path)
    (path / "t-0" / WATERMARK_NAME).write_bytes(content)
    with Log(path, read_only=True) as log:
        assert stored(log) == list(range(RECORDS))
    with Log(path) as log:
        log.writer("t").write(rows(RECORDS, RECORDS + 1))
        assert stored(log) == list(range(RECORDS + 1))


def test_an_acknowledged_tail_is_not_cut_silently_beside_a_damaged_watermark(tmp_path: Path) -> None:
    """The valid slot says less was durable than was: what recovery cuts is kept beside the log."""
    path = unclean(tmp_path)
    mark = path / "t-0" / WATERMARK_NAME
    slots = mark.read_bytes()
    newer = max((0, SLOT_BYTES), key=lambda at: parse_slot(slots[at : at + SLOT_BYTES]).sequence)  # type: ignore[union-attr]
    flip(mark, newer + 30)
    segment = path / "t-0" / f"{0:020d}.log"
    flip(segment, segment.stat().st_size - 3)
    with Log(path) as log:
        log.writer("t").write(rows(RECORDS, RECORDS + 1))
        assert stored(log) == [*range(RECORDS - 5), RECORDS]
    assert len(list((path / "t-0").glob("*.cut"))) == 1


# -- looking up a time ---------------------------------------------------------------------------


def closed(path: Path, *, sealed: bool) -> Path:
    """Some log segments, closed cleanly; without seals and marks they are as a broker leaves them."""
    with Log(path) as log:
        log.create_topic("t", config={"segment.bytes": "400", "index.interval.bytes": "100"})
        log.writer("t", batch_records=3).write(rows(0, RECORDS))
    if not sealed:
        for name in [*(path / "t-0").glob("*.seal"), path / "t-0" / "tidegate.closed"]:
            name.unlink()
    return path


def require_right_or_detected(path: Path) -> int:
    """Every time has its own record's offset, or is refused; how many were refused."""
    refused = 0
    with Log(path, read_only=True) as log:
        for number in range(0, RECORDS, 4):
            try:
                assert log.offset_for_time("t", 0, 1000 + number) == number
            except CorruptError:
                refused += 1
    return refused


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("at", [41, 42])  # the two lowest bytes of a header's largest timestamp
def test_a_changed_largest_timestamp_moves_no_look_up(tmp_path: Path, sealed: bool, at: int) -> None:
    path = closed(tmp_path / "log", sealed=sealed)
    assert require_right_or_detected(path) == 0
    refused = 0
    for segment in sorted((path / "t-0").glob("*.log")):
        content = segment.read_bytes()
        for position, _ in iter_headers(content):
            for bit in (0x04, 0x80):
                damaged = bytearray(content)
                damaged[position + at] ^= bit
                segment.write_bytes(bytes(damaged))
                refused += require_right_or_detected(path)
        segment.write_bytes(content)
    assert refused > 0


@pytest.mark.parametrize("sealed", [True, False])
def test_a_flip_in_a_time_index_moves_no_look_up(tmp_path: Path, sealed: bool) -> None:
    path = closed(tmp_path / "log", sealed=sealed)
    for index in sorted((path / "t-0").glob("*.timeindex")):
        content = index.read_bytes()
        for position in range(0, len(content), 5):
            index.write_bytes(
                content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :]
            )
            assert require_right_or_detected(path) == 0
        for length in range(0, len(content), 12):
            index.write_bytes(content[:length])
            assert require_right_or_detected(path) == 0
        index.write_bytes(content)


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("number", [1, 2])
def test_a_replaced_or_missing_segment_moves_no_look_up(tmp_path: Path, sealed: bool, number: int) -> None:
    path = closed(tmp_path / "log", sealed=sealed)
    segments = sorted((path / "t-0").glob("*.log"))
    content, other = segments[number].read_bytes(), segments[number - 1].read_bytes()
    for replaced in (other, other[: len(content)].ljust(len(content), b"\0"), bytes(len(content)), b""):
        segments[number].write_bytes(replaced)
        assert require_right_or_detected(path) > 0
    for file in (path / "t-0").glob(f"{segments[number].stem}.*"):
        file.unlink()
    assert require_right_or_detected(path) > 0


def test_what_retention_took_from_the_beginning_is_no_damage_to_a_look_up(tmp_path: Path) -> None:
    path = closed(tmp_path / "log", sealed=True)
    with Log(path) as log:
        log.partition("t", 0).delete_records_before(25)
    first = min((path / "t-0").glob("*.log"))
    for file in (path / "t-0").glob(f"{first.stem}.*"):
        file.unlink()  # below the log start: retention may remove it at any time
    with Log(path, read_only=True) as log:
        assert [log.offset_for_time("t", 0, 1000 + number) for number in (0, 24, 25, 40)] == [25, 25, 25, 40]


# -- a clean stop --------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [2, 40, 10**9], ids=["two bytes", "a batch", "everything"])
def test_nothing_is_written_behind_a_zeroed_tail_of_a_log_that_was_closed_cleanly(
    tmp_path: Path, zeros: int
) -> None:
    """A power failure can keep a file's length and lose its bytes; marks and sizes agree then."""
    path = tmp_path / "log"
    with Log(path) as log:
        log.create_topic("t")
        log.writer("t", batch_records=5).write(rows(0, RECORDS))
    segment = path / "t-0" / f"{0:020d}.log"
    content = segment.read_bytes()
    kept = max(0, len(content) - zeros)
    segment.write_bytes(content[:kept] + bytes(len(content) - kept))
    before = segment.read_bytes()
    with Log(path) as log, pytest.raises(CorruptError, match="read-only"):
        log.writer("t").write(rows(RECORDS, RECORDS + 1))
    assert segment.read_bytes() == before
    with Log(path, read_only=True) as log, pytest.raises(CorruptError):  # and readers are told, too
        stored(log)
