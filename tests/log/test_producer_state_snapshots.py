"""Producer snapshots: golden bytes, damage, and the files of a folder."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from fastcrc.crc32 import iscsi as crc32c

from tidegate.errors import CorruptError
from tidegate.files import Files
from tidegate.log.format.partition_files import SNAPSHOT, offset_file, offsets_of
from tidegate.log.producer_state import (
    BatchMetadata,
    ProducerEntry,
    SnapshotFiles,
    decode_snapshot,
    encode_snapshot,
    read_snapshot,
    write_snapshot,
)

FILES = Files()
EMPTY = bytes.fromhex("000148674bc700000000")
ONE = bytes.fromhex(
    "0001 e41ea7f5 00000001 0000000000000001 0002 00000005 0000000000000014 00000004"
    "0000017da3f172d0 ffffffff ffffffffffffffff"
)
TIMESTAMP = 1639133049552
ONE_ENTRY = ProducerEntry(1, 2, -1, TIMESTAMP, None, (BatchMetadata(5, 20, 4, TIMESTAMP),))
MARKER_ONLY = ProducerEntry(98323, 99, 100, TIMESTAMP)
IN_TRANSACTION = ProducerEntry(7, 0, 3, 1005, 0, (BatchMetadata(6, 101, 1, 1005),))


@pytest.mark.parametrize(
    ("entries", "data"),
    [pytest.param([], EMPTY, id="LS-1.9-empty"), pytest.param([ONE_ENTRY], ONE, id="LS-1.9-one-producer")],
)
def test_snapshots_have_the_published_bytes(entries: list[ProducerEntry], data: bytes) -> None:
    assert encode_snapshot(entries) == data
    assert decode_snapshot(data) == entries


def test_what_a_snapshot_can_hold_survives_a_round_trip() -> None:
    entries = [ONE_ENTRY, IN_TRANSACTION, MARKER_ONLY]
    data = encode_snapshot(reversed(entries))
    assert len(data) == 10 + 3 * 46
    assert decode_snapshot(data) == entries


def test_only_the_last_batch_of_a_producer_is_stored() -> None:
    batches = tuple(BatchMetadata(n, n, 0, 1000 + n) for n in range(5))
    entry = ProducerEntry(1, 0, -1, 1004, None, batches)
    assert decode_snapshot(encode_snapshot([entry])) == [ProducerEntry(1, 0, -1, 1004, None, batches[-1:])]


def test_a_batch_whose_sequences_wrapped_knows_its_first_one() -> None:
    batch = BatchMetadata(9, 2020, 20, 0)
    assert (batch.first_sequence, batch.first_offset) == (2**31 - 11, 2000)


def test_every_flipped_bit_is_noticed() -> None:
    for bit in range(len(ONE) * 8):
        damaged = bytearray(ONE)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError):
            decode_snapshot(bytes(damaged))


def test_every_cut_and_any_extension_is_noticed() -> None:
    for length in range(len(ONE)):
        with pytest.raises(CorruptError) as caught:
            decode_snapshot(ONE[:length], path=Path("x.snapshot"))
        assert caught.value.path == Path("x.snapshot")
        assert caught.value.position is not None and caught.value.position <= length
    for extra in (b"\0", bytes(46)):
        with pytest.raises(CorruptError):
            decode_snapshot(ONE + extra)


@pytest.mark.parametrize("version", [0, 2, -1])
def test_another_version_is_rejected_even_with_a_good_checksum(version: int) -> None:
    with pytest.raises(CorruptError, match=f"version {version}"):
        decode_snapshot(struct.pack(">h", version) + ONE[2:])


@pytest.mark.parametrize("count", [-1, 0, 2, 2**31 - 1])
def test_a_count_that_does_not_match_the_bytes_is_rejected_even_with_a_good_checksum(count: int) -> None:
    body = struct.pack(">i", count) + ONE[10:]
    with pytest.raises(CorruptError, match="do not fill"):
        decode_snapshot(struct.pack(">hI", 1, crc32c(body)) + body)


def test_file_names_carry_the_offset(tmp_path: Path) -> None:
    assert offset_file(tmp_path, 109, SNAPSHOT).name == "00000000000000000109.snapshot"
    others = (
        "109.snapshot",
        "00000000000000000109.snapshot.deleted",
        "0000000000000000010x.snapshot",
        "x",
    )
    assert offsets_of(["00000000000000000109.snapshot", *others], SNAPSHOT) == [109]


def test_writing_replaces_a_longer_file(tmp_path: Path) -> None:
    path = offset_file(tmp_path, 5, SNAPSHOT)
    write_snapshot(path, [ONE_ENTRY, MARKER_ONLY], files=FILES)
    write_snapshot(path, [ONE_ENTRY], files=FILES, sync=False)
    assert path.read_bytes() == ONE
    assert read_snapshot(path, files=FILES) == [ONE_ENTRY]


def test_an_absurdly_long_file_is_not_read(tmp_path: Path) -> None:
    path = offset_file(tmp_path, 5, SNAPSHOT)
    with path.open("wb") as file:
        file.truncate(1 << 31)
    with pytest.raises(CorruptError, match="more than"):
        read_snapshot(path, files=FILES)


def test_the_files_of_a_folder_are_listed_written_marked_and_removed(tmp_path: Path) -> None:
    (tmp_path / "00000000000000000007.snapshot.deleted").write_bytes(EMPTY)
    (tmp_path / "00000000000000000000.log").write_bytes(b"")
    snapshots = SnapshotFiles(tmp_path, files=FILES)
    assert (snapshots.offsets, snapshots.latest) == ((), None)
    for offset in (30, 10, 20, 10):
        snapshots.write(offset, [ONE_ENTRY], sync=False)
    assert (snapshots.offsets, snapshots.latest) == ((10, 20, 30), 30)
    assert snapshots.read(20) == [ONE_ENTRY]
    assert snapshots.mark_deleted(10) == tmp_path / "00000000000000000010.snapshot.deleted"
    assert snapshots.mark_deleted(10) is None
    snapshots.path(20).unlink()
    assert snapshots.mark_deleted(20) is None, "gone already"
    snapshots.remove(11)
    snapshots.remove(30)
    assert snapshots.offsets == () == SnapshotFiles(tmp_path, files=FILES).offsets
    assert SnapshotFiles(tmp_path / "missing", files=FILES).offsets == ()
