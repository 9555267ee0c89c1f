"""The time index: its reserved slot, its silent refusals, look-up by timestamp, damage."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tidegate.errors import CorruptError, InvalidError
from tidegate.files import Files
from tidegate.log.indexes import TimeIndex, TimestampOffset

BASE = 45
NONE = TimestampOffset(-1, BASE)


def index_at(folder: Path, *, base: int = BASE, max_bytes: int = 30 * 12) -> TimeIndex:
    return TimeIndex(folder / f"{base:020d}.timeindex", base, max_bytes, files=Files())


def written(folder: Path, data: bytes) -> TimeIndex:
    index = index_at(folder)
    index.path.write_bytes(data)
    return index


def entries(*pairs: tuple[int, int]) -> bytes:
    return b"".join(struct.pack(">qi", timestamp, relative) for timestamp, relative in pairs)


@pytest.mark.parametrize("max_entries", [pytest.param(2, id="LS-T1-2"), pytest.param(30, id="LS-T1-30")])
def test_the_last_slot_is_kept_for_the_roll(tmp_path: Path, max_entries: int) -> None:
    index = index_at(tmp_path, max_bytes=max_entries * 12)
    for n in range(max_entries - 1):
        assert not index.is_full
        assert index.maybe_append(n * 10, BASE + n)
    assert index.is_full
    with pytest.raises(InvalidError, match="full"):
        index.maybe_append(10_000, BASE + 1000)
    with pytest.raises(InvalidError, match="below the last indexed offset"):
        index.maybe_append(10_000, BASE - 1, skip_full_check=True)
    assert index.maybe_append(10_000, BASE + 1000, skip_full_check=True)
    assert index.entries == max_entries
    assert not index.maybe_append(10_000, BASE + 1000, skip_full_check=True), "the same entry is no news"
    with pytest.raises(InvalidError, match="full"):
        index.maybe_append(10_001, BASE + 1001, skip_full_check=True)
    index.close()
    assert index.path.stat().st_size == max_entries * 12


def test_an_index_below_two_entries_is_permanently_full(tmp_path: Path) -> None:
    index = index_at(tmp_path, max_bytes=23)
    index.prepare()
    assert (index.max_entries, index.is_full) == (1, True)


@pytest.mark.parametrize(
    ("timestamp", "expected"),
    [
        pytest.param(9, (-1, 45), id="LS-T2-9"),
        pytest.param(25, (20, 65), id="LS-T2-25"),
        pytest.param(30, (30, 75), id="LS-T2-30"),
        pytest.param(2**62, (30, 75), id="LS-T2-behind"),
    ],
)
@pytest.mark.parametrize("reopened", [False, True])
def test_lookup_finds_the_last_entry_not_younger(
    tmp_path: Path, timestamp: int, expected: tuple[int, int], reopened: bool
) -> None:
    index = index_at(tmp_path)
    assert index.lookup(timestamp) == NONE
    for pair in ((10, 55), (20, 65), (30, 75)):
        index.maybe_append(*pair)
    if reopened:
        index.close()
        index = index_at(tmp_path)
    assert index.lookup(timestamp) == expected
    assert [index.entry(n) for n in range(3)] == [(10, 55), (20, 65), (30, 75)] == list(index)


@pytest.mark.parametrize(
    ("data", "what", "position"),
    [
        pytest.param(entries((100, 1), (50, 2)), "last timestamp 50 is below", 12, id="LS-T3-timestamp"),
        pytest.param(entries((100, 1), (150, -2)), "last offset 43 is below", 12, id="LS-T3-offset"),
        pytest.param(entries((100, 1)) + b"\0" * 7, "multiple of 12", 12, id="LS-T3-length"),
    ],
)
def test_the_sanity_check_refuses_what_cannot_be(
    tmp_path: Path, data: bytes, what: str, position: int
) -> None:
    index = written(tmp_path, data)
    with pytest.raises(CorruptError, match=what) as caught:
        index.sanity_check()
    assert (caught.value.path, caught.value.position) == (index.path, position)


@pytest.mark.parametrize("data", [b"", entries((0, 0)), entries((5, 3), (6, 3), (9, 7))])
def test_the_sanity_and_order_checks_accept_what_can_be(tmp_path: Path, data: bytes) -> None:
    index = written(tmp_path, data)
    index.sanity_check()
    assert list(index) == sorted(index)


def test_only_a_younger_timestamp_is_written(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    assert index.last_entry == NONE
    assert not index.maybe_append(-1, BASE), "records without timestamp leave the index empty"
    assert index.entries == 0
    assert index.maybe_append(0, BASE)
    assert not index.maybe_append(0, BASE + 5), "an equal timestamp keeps the earliest offset"
    assert index.maybe_append(7, BASE + 5)
    assert list(index) == [(0, BASE), (7, BASE + 5)]
    with pytest.raises(InvalidError, match="below the last indexed timestamp"):
        index.maybe_append(6, BASE + 6)
    with pytest.raises(InvalidError, match="below the last indexed offset"):
        index.maybe_append(8, BASE + 4)
    assert index.last_entry == (7, BASE + 5)


def test_an_offset_too_far_from_the_base_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="cannot hold"):
        index_at(tmp_path).maybe_append(5, BASE + 2**31)


@pytest.mark.parametrize(("offset", "left"), [(100, 4), (76, 3), (75, 2), (66, 2), (65, 1), (55, 0), (0, 0)])
def test_truncation_goes_by_offset_and_remembers_the_last_entry(
    tmp_path: Path, offset: int, left: int
) -> None:
    index = index_at(tmp_path)
    pairs = [(10, 55), (20, 65), (30, 75), (40, 99)]
    for pair in pairs:
        index.maybe_append(*pair)
    index.truncate_to(offset)
    assert list(index) == pairs[:left]
    assert index.last_entry == (pairs[left - 1] if left else NONE)
    assert index.path.stat().st_size == 360
    assert index.maybe_append(41, 99), "appending goes on"


@pytest.mark.parametrize(("max_bytes", "length"), [(300, 300), (10485760, 10485756), (35, 24)])
def test_preallocation_rounds_down_to_whole_entries(tmp_path: Path, max_bytes: int, length: int) -> None:
    index = index_at(tmp_path, max_bytes=max_bytes)
    index.prepare()
    assert index.path.stat().st_size == length


def test_the_bytes_are_timestamp_then_relative_offset(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    index.maybe_append(1639132508991, BASE + 28)
    index.close()
    assert index.path.read_bytes().hex() == "0000017da3e9333f0000001c"


def test_every_flipped_bit_gives_a_hint_or_a_typed_error(tmp_path: Path) -> None:
    data = entries((1000, 5), (2000, 15), (3000, 25))
    hints = 0
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        index = written(tmp_path, bytes(damaged))
        for timestamp in (0, 1000, 1500, 2500, 3000, 10**15):
            try:
                found = index.lookup(timestamp)
            except CorruptError:
                continue
            assert found.timestamp <= timestamp and found.offset >= BASE
            hints += 1
    assert hints > 0


@pytest.mark.parametrize("count", [0, 1, 2, 17, 29])
def test_a_read_only_index_does_not_count_the_zero_tail(tmp_path: Path, count: int) -> None:
    writer = index_at(tmp_path)
    writer.prepare()
    reader = TimeIndex(writer.path, BASE, 360, files=Files(), read_only=True)
    for n in range(1, count + 1):
        writer.maybe_append(n * 1000, BASE + n)
    assert reader.entries == count
    assert reader.last_entry == writer.last_entry
    assert reader.lookup(2**40) == writer.lookup(2**40)
