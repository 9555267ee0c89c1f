"""The file that tells readers elsewhere how far they may read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.files import Files
from tidegate.log.watermark import (
    SLOT_BYTES,
    WATERMARK_NAME,
    Watermark,
    WatermarkFile,
    newest,
    parse_slot,
    read_watermark,
)

OFFSETS = st.integers(0, 2**63 - 1)


def write(file: WatermarkFile, end: int) -> None:
    file.write(log_start=1, high_watermark=end, durable_end=end - 1, last_stable=end - 2)


@given(
    st.builds(
        Watermark,
        OFFSETS,
        OFFSETS,
        OFFSETS,
        OFFSETS,
        OFFSETS,
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**64 - 1),
    )
)
def test_a_slot_reads_back_what_was_written(mark: Watermark) -> None:
    assert len(mark.pack()) == SLOT_BYTES
    assert parse_slot(mark.pack()) == mark


def test_a_slot_has_the_documented_bytes() -> None:
    slot = Watermark(1, 2, 3, 4, 5, 6).pack()
    assert slot[:8] == b"TGATEWM1"
    assert [int.from_bytes(slot[at : at + 8], "big") for at in range(8, 48, 8)] == [1, 2, 3, 4, 5]
    assert slot[48:60] == (6).to_bytes(4, "big") + bytes(8)
    assert Watermark(1, 2, 3, 4, 5, 6, 7).pack()[52:60] == (7).to_bytes(8, "big")


def test_the_newest_valid_slot_counts(tmp_path: Path) -> None:
    files = Files()
    assert read_watermark(files, tmp_path) is None
    file = WatermarkFile(files, tmp_path)
    for end in (10, 20, 30):
        write(file, end)
        mark = read_watermark(files, tmp_path)
        assert mark is not None
        assert (mark.log_start, mark.high_watermark, mark.durable_end, mark.last_stable) == (
            1,
            end,
            end - 1,
            end - 2,
        )
    file.close()


def test_one_damaged_slot_costs_only_the_newest_value(tmp_path: Path) -> None:
    files = Files()
    file = WatermarkFile(files, tmp_path)
    write(file, 10)
    write(file, 20)
    file.close()
    path = tmp_path / WATERMARK_NAME
    stored = path.read_bytes()
    seen = set()
    for bit in range(len(stored) * 8):
        damaged = bytearray(stored)
        damaged[bit // 8] ^= 1 << bit % 8
        mark = newest(bytes(damaged))
        assert mark is not None
        seen.add(mark.high_watermark)
    assert seen == {10, 20}
    path.write_bytes(stored[:70])
    mark = read_watermark(files, tmp_path)
    assert mark is not None
    for rubbish in (b"", bytes(128), stored[:63]):
        path.write_bytes(rubbish)
        assert read_watermark(files, tmp_path) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_a_watermark_or_none(stored: bytes) -> None:
    assert newest(stored) is None or parse_slot(stored[:64]) or parse_slot(stored[64:128])


def test_numbering_goes_on_over_a_reopening(tmp_path: Path) -> None:
    files = Files()
    file = WatermarkFile(files, tmp_path)
    write(file, 10)
    file.close()
    first = read_watermark(files, tmp_path)
    file = WatermarkFile(files, tmp_path)
    write(file, 5)  # recovery may have cut the log: the newer slot counts, not the larger offset
    file.close()
    second = read_watermark(files, tmp_path)
    assert first is not None and second is not None
    assert second.sequence == first.sequence + 1
    assert second.high_watermark == 5
    assert second.generation != first.generation  # readers look at the folder again


@pytest.mark.parametrize("times", [1, 2])
def test_the_generation_is_odd_while_log_segments_change(tmp_path: Path, times: int) -> None:
    files = Files()
    file = WatermarkFile(files, tmp_path)
    write(file, 10)
    before = file.newest.generation
    for _ in range(times):
        file.begin_change()
    changing = read_watermark(files, tmp_path)
    assert changing is not None and changing.generation % 2 == 1
    write(file, 11)
    assert file.newest.generation % 2 == 1
    for _ in range(times):
        file.end_change()
    assert file.newest.generation == before + 2
    file.begin_change()
    file.close()  # the writer dies here
    file = WatermarkFile(files, tmp_path)
    write(file, 11)
    assert file.newest.generation % 2 == 0
    file.close()
