"""Damage beside the records after an unclean stop: it hides no acknowledged record and lets none be cut silently."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from tidegate.files import Files
from tidegate.log.access.embedded import Log
from tidegate.log.access.watermark import SLOT_BYTES, WATERMARK_NAME, is_certain, parse_slot, read_slots
from tidegate.log.verify.verify import verify

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
