"""Seals: round trip, growing checksums, and every change of a sealed file seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastcrc import crc32
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import CorruptError
from tidegate.files import Files
from tidegate.log.format.partition_files import offset_file
from tidegate.log.seals import (
    BLOCK_BYTES,
    BlockSums,
    FileSum,
    Seal,
    check_seals,
    mismatches,
    read_seal,
    sum_file,
    write_seal,
)

FILES = Files()


def sums_of(data: bytes) -> FileSum:
    """The plain twin: cut, then one CRC per piece."""
    pieces = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    return FileSum(len(data), b"".join(crc32.iscsi(piece).to_bytes(4, "big") for piece in pieces))


def sealed(folder: Path, log: bytes, index: bytes = b"\x00\x00\x00\x1c\x00\x00\x10\x49") -> Seal:
    (folder / f"{7:020d}.log").write_bytes(log)
    (folder / f"{7:020d}.index").write_bytes(index)
    seal = Seal(7, 116, 109, 109, 1000, 2000, 115, {".log": sums_of(log), ".index": sums_of(index)})
    write_seal(FILES, folder, seal)
    return seal


@given(st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=6), st.integers(0, 5))
def test_growing_checksums_equal_those_of_the_whole_whatever_the_pieces(
    sizes: list[int], resume_after: int
) -> None:
    data = b"".join(bytes([number + 1]) * size for number, size in enumerate(sizes))
    sums, position = BlockSums(), 0
    for number, size in enumerate(sizes):
        if number == resume_after:
            sums = BlockSums(sums.sum())  # closed cleanly and opened again
        sums.update(memoryview(data)[position : position + size])
        position += size
    assert sums.sum() == sums_of(data)


def test_a_seal_reads_back_as_it_was_written(tmp_path: Path) -> None:
    seal = sealed(tmp_path, bytes(range(256)) * 1000)
    assert read_seal(FILES, tmp_path, 7) == seal
    assert read_seal(FILES, tmp_path, 8) is None
    assert mismatches(FILES, tmp_path, seal) == []
    assert sum_file(FILES, tmp_path / f"{7:020d}.log", limit=70_000) == sums_of(
        (bytes(range(256)) * 1000)[:70_000]
    )


def test_any_flipped_bit_of_a_seal_is_seen(tmp_path: Path) -> None:
    sealed(tmp_path, b"x" * 100)
    path = offset_file(tmp_path, 7, ".seal")
    good = path.read_bytes()
    for position in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            path.write_bytes(bad)
            with pytest.raises(CorruptError, match=r"seal"):
                read_seal(FILES, tmp_path, 7)


@pytest.mark.parametrize("cut", [0, 1, 50, -1])
def test_a_cut_or_grown_seal_is_seen(tmp_path: Path, cut: int) -> None:
    sealed(tmp_path, b"x" * 100)
    path = offset_file(tmp_path, 7, ".seal")
    good = path.read_bytes()
    path.write_bytes(good[:cut])
    with pytest.raises(CorruptError):
        read_seal(FILES, tmp_path, 7)
    path.write_bytes(good + b"\n")
    with pytest.raises(CorruptError):
        read_seal(FILES, tmp_path, 7)


def test_a_seal_under_another_segments_name_is_refused(tmp_path: Path) -> None:
    sealed(tmp_path, b"x" * 100)
    offset_file(tmp_path, 7, ".seal").rename(offset_file(tmp_path, 8, ".seal"))
    with pytest.raises(CorruptError, match="foreign name"):
        read_seal(FILES, tmp_path, 8)


@pytest.mark.parametrize("position", [0, 12, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 9])
def test_a_change_in_a_sealed_file_is_found_in_its_block(tmp_path: Path, position: int) -> None:
    log = bytes(2 * BLOCK_BYTES + 10)
    seal = sealed(tmp_path, log)
    damaged = bytearray(log)
    damaged[position] ^= 4
    (tmp_path / f"{7:020d}.log").write_bytes(damaged)
    (found,) = mismatches(FILES, tmp_path, seal)
    assert found.suffix == ".log"
    assert found.position <= position < found.position + found.length


@pytest.mark.parametrize("length", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 9, BLOCK_BYTES + 11, 3 * BLOCK_BYTES])
def test_a_cut_or_grown_file_is_found(tmp_path: Path, length: int) -> None:
    log = bytes(BLOCK_BYTES + 10)
    seal = sealed(tmp_path, log)
    (tmp_path / f"{7:020d}.log").write_bytes(log[:length].ljust(length, b"\0"))
    assert any("sealed with" in found.message for found in mismatches(FILES, tmp_path, seal))


def test_a_missing_file_is_found(tmp_path: Path) -> None:
    seal = sealed(tmp_path, b"x")
    (tmp_path / f"{7:020d}.index").unlink()
    (found,) = mismatches(FILES, tmp_path, seal)
    assert (found.suffix, found.message) == (".index", f"{7:020d}.index is missing")


def test_a_whole_folder_is_checked_damaged_seals_included(tmp_path: Path) -> None:
    sealed(tmp_path, b"x" * 100)
    assert check_seals(FILES, tmp_path) == []
    (tmp_path / f"{7:020d}.log").write_bytes(b"y" * 100)
    offset_file(tmp_path, 500, ".seal").write_bytes(b"{}\n")
    first, second = check_seals(FILES, tmp_path)
    assert (first.path.name, first.suffix) == (f"{7:020d}.log", ".log")
    assert (second.path, second.suffix) == (offset_file(tmp_path, 500, ".seal"), ".seal")
