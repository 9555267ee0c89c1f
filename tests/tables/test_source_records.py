"""Which records made a number: offsets kept of a window are read again, and what is gone is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidegate.clock import ManualClock
from tidegate.log.access.embedded import Log
from tidegate.tables.queries.source_records import OffsetRange, of_key_between, source_records
from tidegate.testing.tables import Said, write_records


@pytest.fixture
def log(tmp_path: Path) -> Any:
    with Log(tmp_path / "log", durability="os", clock=ManualClock()) as opened:
        for partition in range(2):
            said = [Said(b"k%d" % (n % 3), b"v", n * 10) for n in range(30)]
            write_records(opened, "events", said, partition=partition, partitions=2)
        yield opened


def test_the_records_are_found_in_their_partitions(log: Any) -> None:
    ranges = {0: OffsetRange(3, 3, 9), 1: OffsetRange(1, 12, 12)}
    first, second = source_records(log, "events", ranges, of_key_between(b"k0", 0, 500))
    assert (first.offsets, first.missing) == ((3, 6, 9), 0)
    assert second.offsets == (12,)
    assert first.line() == "partition 0: 3 of 3 records, offsets 3, 6, 9"


def test_records_outside_the_times_are_not_meant(log: Any) -> None:
    (found,) = source_records(log, "events", {0: OffsetRange(2, 0, 29)}, of_key_between(b"k1", 100, 160))
    assert found.offsets == (10, 13, 16)


def test_what_aged_out_is_counted(log: Any) -> None:
    log.partition("events", 0).delete_records_before(7)
    (found,) = source_records(log, "events", {0: OffsetRange(3, 3, 9)}, of_key_between(b"k0", 0, 500))
    assert (found.offsets, found.missing, found.aged_out) == ((9,), 2, True)
    assert found.line() == "partition 0: 1 of 3 records, offsets 9; 2 aged out: the topic starts at 7"
    log.partition("events", 0).delete_records_before(20)
    (found,) = source_records(log, "events", {0: OffsetRange(3, 3, 9)}, of_key_between(b"k0", 0, 500))
    assert (found.offsets, found.missing) == ((), 3)


def test_what_was_compacted_away_is_counted(log: Any) -> None:
    (found,) = source_records(log, "events", {1: OffsetRange(9, 3, 9)}, of_key_between(b"k0", 0, 500))
    assert not found.aged_out
    assert "6 no longer in the topic" in found.line()
    (many,) = source_records(log, "events", {1: OffsetRange(10, 0, 29)}, of_key_between(b"k0", 0, 500))
    assert many.line().endswith("offsets 0, 3, 6, 9, 12, 15, 18, 21 … 27")
