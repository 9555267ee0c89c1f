"""The cleaner's checkpoint never speaks of records that are gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.clock import ManualClock
from tidegate.errors import TidegateWarning
from tidegate.files import Files
from tidegate.log.checkpoints import CLEANER_OFFSETS, CleanerCheckpoint, read_offsets
from tidegate.log.log import Log
from tidegate.log.maintenance import Housekeeping
from tidegate.log.partition import PartitionLog
from tidegate.log.topic_config import BrokerConfig
from tidegate.randomness import SeededRandomness
from tidegate.scheduling import ManualScheduler
from tidegate.testing.batches import Rec, build_batch


def checkpoint(folder: Path) -> CleanerCheckpoint:
    return CleanerCheckpoint(folder, files=Files(), clock=ManualClock())


def test_lines_are_kept_side_by_side(tmp_path: Path) -> None:
    kept = checkpoint(tmp_path)
    assert kept.get("a", 0) is None
    kept.put("a", 0, 10)
    kept.put("b", 3, 7)
    kept.put("a", 0, 12)
    assert dict(read_offsets(tmp_path / CLEANER_OFFSETS, files=Files())) == {("a", 0): 12, ("b", 3): 7}


@pytest.mark.parametrize(("log_end", "expected"), [(11, 10), (10, 10), (9, 9), (0, 0)])
def test_cut_lowers_a_line_that_lies_beyond_it(tmp_path: Path, log_end: int, expected: int) -> None:
    kept = checkpoint(tmp_path)
    kept.put("a", 0, 10)
    kept.lower("a", 0, log_end)
    kept.lower("never-compacted", 0, log_end)
    assert dict(read_offsets(tmp_path / CLEANER_OFFSETS, files=Files())) == {("a", 0): expected}


def test_damaged_file_counts_as_empty_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / CLEANER_OFFSETS).write_text("0\n5\nnonsense\n")
    with pytest.warns(TidegateWarning):
        assert checkpoint(tmp_path).get("a", 0) is None


def test_deleted_key_does_not_come_back_after_the_log_was_cut_and_grew_again(tmp_path: Path) -> None:
    clock = ManualClock(4_000_000_000_000)
    with Log(tmp_path / "log", durability="os", clock=clock, scheduler=ManualScheduler(clock)) as log:
        log.create_topic(
            "t",
            1,
            {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0", "delete.retention.ms": "1000"},
        )
        partition = log.partition("t", 0)
        chores = Housekeeping(
            log, broker=BrokerConfig(), files=Files(), clock=clock, randomness=SeededRandomness(1)
        )
        append(partition, clock, b"deleted", b"old value")
        for number in range(8):
            append(partition, clock, b"%d" % number, b"x")
        partition.roll()
        assert chores.compact_dirtiest() is not None
        partition.truncate_to(1)
        append(partition, clock, b"deleted", None)
        for number in range(12):
            append(partition, clock, b"%d" % number, b"y")
            partition.roll()
        for _ in range(4):
            chores.compact_dirtiest()
            clock.advance(2000)
            append(partition, clock, b"more", b"z")
            partition.roll()
        kept = [
            record
            for segment in partition.segments
            for record in records(segment.read_at(0, segment.size))
            if record[0] == b"deleted"
        ]
        assert (b"deleted", b"old value") not in kept


def append(log: PartitionLog, clock: ManualClock, key: bytes, value: bytes | None) -> None:
    log.append(bytearray(build_batch([Rec(key, value, clock.now_ms())])))
    log.acknowledge(sync=False)


def records(data: bytes) -> list[tuple[bytes | None, bytes | None]]:
    from tidegate.log.format.decode import decode

    table = decode(data, topic="t", partition=0)
    return list(zip(table.column("key").to_pylist(), table.column("value").to_pylist(), strict=True))
