"""What closing leaves behind, and what opening believes of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from tidegate.errors import TidegateWarning
from tidegate.files import Effect, Files
from tidegate.log.catalog import TopicPartition
from tidegate.log.checkpoints import (
    CLEAN_SHUTDOWN,
    CLOSED_NAME,
    HIGH_WATERMARKS,
    LOG_STARTS,
    RECOVERY_POINTS,
    forget_closed,
    last_segment_base,
    mark_closed,
    merge_checkpoints,
    read_checkpoint,
    read_offsets,
    was_closed_cleanly,
    write_offsets,
)
from tidegate.log.log import Log
from tidegate.log.producer_state import Origin
from tidegate.testing.batches import Rec, build_batch

A, B = TopicPartition("a", 0), TopicPartition("b", 1)


def partition(path: Path) -> Path:
    path.mkdir()
    for base in (0, 109):
        (path / f"{base:020d}.log").write_bytes(b"x" * 10)
        (path / f"{base:020d}.index").write_bytes(b"")
    return path


def test_a_partition_is_clean_while_nothing_changed_since(tmp_path: Path) -> None:
    files, folder = Files(), partition(tmp_path / "a-0")
    assert not was_closed_cleanly(files, folder)
    mark_closed(files, folder)
    assert was_closed_cleanly(files, folder)
    (folder / "00000000000000000000.log").write_bytes(b"yyy")  # not the last: seals watch those
    assert was_closed_cleanly(files, folder)
    forget_closed(files, folder)
    assert not was_closed_cleanly(files, folder)
    forget_closed(files, folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("00000000000000000109.log", b"x" * 11),  # a broker appended
        ("00000000000000000109.index", bytes(8)),  # a broker died with a preallocated index
        ("00000000000000000109.timeindex", b""),
        ("00000000000000000218.log", b""),  # a broker rolled
    ],
)
def test_a_partition_another_program_wrote_to_is_not(tmp_path: Path, name: str, content: bytes) -> None:
    files, folder = Files(), partition(tmp_path / "a-0")
    mark_closed(files, folder)
    (folder / name).write_bytes(content)
    assert not was_closed_cleanly(files, folder)


def test_a_damaged_mark_is_no_mark(tmp_path: Path) -> None:
    files, folder = Files(), partition(tmp_path / "a-0")
    mark_closed(files, folder)
    stored = (folder / CLOSED_NAME).read_bytes()
    for bit in range(len(stored) * 8):
        damaged = bytearray(stored)
        damaged[bit // 8] ^= 1 << bit % 8
        (folder / CLOSED_NAME).write_bytes(damaged)
        assert not was_closed_cleanly(files, folder)


def test_asking_reads_no_log_segment(tmp_path: Path) -> None:
    folder = partition(tmp_path / "a-0")
    mark_closed(Files(), folder)
    seen: list[Effect] = []
    assert was_closed_cleanly(Files(seen.append), folder)
    assert not [effect for effect in seen if effect.kind in ("open", "read") and ".log" in effect.path.name]


def test_the_last_log_segment_is_found_by_name(tmp_path: Path) -> None:
    folder = partition(tmp_path / "a-0")
    (folder / "00000000000000000999.log.deleted").touch()
    assert last_segment_base(Files(), folder) == 109
    (tmp_path / "b-0").mkdir()
    assert last_segment_base(Files(), tmp_path / "b-0") is None


def test_merging_keeps_the_lines_of_others(tmp_path: Path) -> None:
    files = Files()
    write_offsets(tmp_path / RECOVERY_POINTS, {A: 1, B: 2}, files=files)
    write_offsets(tmp_path / LOG_STARTS, {A: 1, B: 2}, files=files)
    merge_checkpoints(files, tmp_path, {A: {RECOVERY_POINTS: 10, HIGH_WATERMARKS: 10, LOG_STARTS: None}})
    assert read_offsets(tmp_path / RECOVERY_POINTS, files=files) == {A: 10, B: 2}
    assert read_offsets(tmp_path / LOG_STARTS, files=files) == {B: 2}
    merge_checkpoints(files, tmp_path, {A: {RECOVERY_POINTS: 10, HIGH_WATERMARKS: 10, LOG_STARTS: 7}})
    assert read_offsets(tmp_path / LOG_STARTS, files=files) == {A: 7, B: 2}


def test_a_damaged_checkpoint_is_told_and_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / RECOVERY_POINTS).write_bytes(b"7\nrubbish\n")
    with pytest.warns(TidegateWarning, match="going on without it"):
        assert read_checkpoint(Files(), tmp_path / RECOVERY_POINTS) == {}


def test_the_folders_marker_stands_only_while_every_partition_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Log(path, durability="os") as log:
        log.create_topic("a", 2)
        log.writer("a").write(pa.table({"value": [b"x"]}), partition=0)
        assert not (path / CLEAN_SHUTDOWN).exists()
    assert (path / CLEAN_SHUTDOWN).read_bytes() == b'{"version":0,"brokerEpoch":-1}'
    first, second = Log(path, durability="os"), Log(path, durability="os")
    first.partition("a", 0)
    assert not (path / CLEAN_SHUTDOWN).exists()
    second.partition("a", 1)
    first.close()
    assert not (path / CLEAN_SHUTDOWN).exists()  # the other one is still open
    second.close()
    assert (path / CLEAN_SHUTDOWN).exists()


def test_a_clean_reopening_of_ten_thousand_log_segments_reads_the_tail_of_the_last_one_only(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    with Log(path, durability="os") as log:
        log.create_topic("many", 1, {"segment.bytes": "100"})
        log.writer("many", batch_records=1).write(pa.table({"value": [b"x"] * 3}))
        late = build_batch([Rec(value=b"late", timestamp=1)], base_offset=20_000, leader_epoch=0)
        log.partition("many", 0).append(late, origin=Origin.REPLICATION)
        log.partition("many", 0).acknowledge(sync=False)
    folder = path / "many-0"
    for base in range(100, 10_100):  # what lies between is a copy of the second one, under later names
        for suffix in ("log", "index", "timeindex"):
            shutil.copyfile(folder / f"{1:020d}.{suffix}", folder / f"{base:020d}.{suffix}")
    seen: list[Effect] = []
    with Log(path, files=Files(seen.append), durability="os") as log:
        partition = log.partition("many", 0)
        assert len(partition.segments) >= 10_000
        assert partition.log_end_offset == 20_001
        looked_at = [
            effect for effect in seen if effect.kind in ("open", "read") and effect.path.suffix == ".log"
        ]
        assert {effect.path.stem for effect in looked_at} == {f"{20_000:020d}"}  # its tail: is it as sealed?
        assert sum(effect.length for effect in looked_at) <= 65_536


def test_only_a_log_start_inside_its_first_segment_has_a_line(tmp_path: Path) -> None:
    with Log(tmp_path / "log") as log:
        log.create_topic("t")
        partition = log.partition("t", 0)
        for value in (b"a", b"b"):
            partition.append(bytearray(build_batch([Rec(None, value)])))
        partition.acknowledge(sync=True)
        assert partition.checkpoint_lines()[LOG_STARTS] is None  # the name of the file says it
        log.delete_records("t", 0, 1)
        assert partition.checkpoint_lines()[LOG_STARTS] == 1
