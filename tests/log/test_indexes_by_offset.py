"""The offset index: look-up, bounds, preallocation, truncation, damage, and the descriptors it holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidegate.errors import InvalidError
from tidegate.files import Files
from tidegate.log.indexes import OffsetIndex, OffsetPosition

BASE = 45
SEED_ENTRIES = bytes.fromhex("0000001c00001049 00000038000020ac 0000005400003114")


def index_at(
    folder: Path, *, base: int = BASE, max_bytes: int = 240, files: Files | None = None
) -> OffsetIndex:
    return OffsetIndex(folder / f"{base:020d}.index", base, max_bytes, files=files or Files())


def filled(folder: Path, *entries: tuple[int, int], base: int = BASE, max_bytes: int = 240) -> OffsetIndex:
    index = index_at(folder, base=base, max_bytes=max_bytes)
    for offset, position in entries:
        index.append(offset, position)
    return index


def open_descriptors(path: Path) -> int:
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(link) and os.path.realpath(link) == str(path.resolve()) for link in links)


@pytest.mark.parametrize(
    ("entries", "offset", "expected"),
    [
        pytest.param([], 92, (BASE, 0), id="LS-O1-empty"),
        pytest.param([(50, 100), (60, 200)], 49, (BASE, 0), id="LS-O1-below-first"),
        pytest.param([(50, 100), (60, 200)], BASE - 10, (BASE, 0), id="LS-O1-below-base"),
        pytest.param([(50, 100), (60, 200)], 55, (50, 100), id="LS-O1-between"),
        pytest.param([(50, 100), (60, 200)], 60, (60, 200), id="LS-O1-exact"),
        pytest.param([(50, 100), (60, 200)], 2**40, (60, 200), id="LS-O1-behind-last"),
    ],
)
def test_lookup_finds_the_last_entry_not_behind_the_offset(
    tmp_path: Path, entries: list[tuple[int, int]], offset: int, expected: tuple[int, int]
) -> None:
    assert filled(tmp_path, *entries).lookup(offset) == OffsetPosition(*expected)


@pytest.mark.parametrize("reopened", [False, True])
def test_lookup_is_right_in_an_index_larger_than_its_warm_end(tmp_path: Path, reopened: bool) -> None:
    entries = [(BASE + 3 * n + 3, 100 * n) for n in range(5000)]
    index = filled(tmp_path, *entries, max_bytes=1 << 20)
    if reopened:
        index.close()
        index = index_at(tmp_path)
    for n in (0, 1, 2, 975, 976, 977, 2500, 3974, 3975, 3976, 3977, 4998, 4999):
        offset, position = entries[n]
        before = OffsetPosition(*entries[n - 1]) if n else OffsetPosition(BASE, 0)
        assert index.lookup(offset) == (offset, position)
        assert index.lookup(offset + 2) == (offset, position)
        assert index.lookup(offset - 1) == before


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("full", id="LS-O2-full"),
        pytest.param("equal", id="LS-O2-equal"),
        pytest.param("smaller", id="LS-O2-smaller"),
    ],
)
def test_append_refuses_a_full_index_and_offsets_that_do_not_grow(tmp_path: Path, fault: str) -> None:
    index = filled(tmp_path, (51, 0), (52, 1), max_bytes=16 if fault == "full" else 240)
    assert index.is_full is (fault == "full")
    offset = {"full": 53, "equal": 52, "smaller": 51}[fault]
    with pytest.raises(InvalidError, match="full" if fault == "full" else "above the last"):
        index.append(offset, 2)
    assert list(index) == [(51, 0), (52, 1)]


@pytest.mark.parametrize(
    ("truncate", "last", "entries"),
    [
        pytest.param(12, 9, 9, id="LS-O3-12"),
        pytest.param(10, 9, 9, id="LS-O3-10"),
        pytest.param(9, 8, 8, id="LS-O3-9"),
        pytest.param(5, 4, 4, id="LS-O3-5"),
        pytest.param(None, 0, 0, id="LS-O3-all"),
    ],
)
@pytest.mark.parametrize("reopened", [False, True])
def test_truncation_drops_entries_at_and_behind_the_offset(
    tmp_path: Path, truncate: int | None, last: int, entries: int, reopened: bool
) -> None:
    index = filled(tmp_path, *((n, n) for n in range(1, 10)), base=0)
    if reopened:
        index.close()
        index = index_at(tmp_path, base=0)
    length = index.length
    if truncate is None:
        index.truncate()
    else:
        index.truncate_to(truncate)
    assert (index.last_offset, index.entries, index.length) == (last, entries, length)
    assert index.path.read_bytes()[8 * entries :] == bytes(length - 8 * entries)
    index.resize(240)
    index.append(last + 1, 7)
    assert index.lookup(last + 1) == (last + 1, 7)


def test_truncation_to_the_offset_of_an_entry_removes_that_entry(tmp_path: Path) -> None:
    index = filled(tmp_path, *((n, n) for n in range(1, 11)), base=0)
    index.truncate_to(10)
    assert index.last_offset == 9


@pytest.mark.parametrize(
    ("start", "size", "expected"),
    [
        pytest.param((0, 0), 5, (1, 10), id="LS-O4-before-second"),
        pytest.param((0, 0), 10, (1, 10), id="LS-O4-exact"),
        pytest.param((0, 0), 11, (2, 23), id="LS-O4-behind-second"),
        pytest.param((0, 0), 23, (2, 23), id="LS-O4-exact-third"),
        pytest.param((0, 0), 37, (3, 37), id="LS-O4-exact-last"),
        pytest.param((0, 0), 38, None, id="LS-O4-behind-last"),
        pytest.param((1, 10), 27, (3, 37), id="LS-O4-from-second"),
        pytest.param((2, 23), 100, None, id="LS-O4-far-behind"),
    ],
)
def test_upper_bound_is_the_first_entry_at_or_behind_the_end_of_a_fetch(
    tmp_path: Path, start: tuple[int, int], size: int, expected: tuple[int, int] | None
) -> None:
    index = filled(tmp_path, (0, 0), (1, 10), (2, 23), (3, 37), base=0)
    assert index.upper_bound(OffsetPosition(*start), size) == expected


def test_upper_bound_of_an_empty_or_missing_index_is_none(tmp_path: Path) -> None:
    assert index_at(tmp_path).upper_bound(OffsetPosition(BASE, 0), 5) is None
    assert not index_at(tmp_path).exists


@pytest.mark.parametrize(
    "reopened", [pytest.param(False, id="LS-O5"), pytest.param(True, id="LS-O5-reopened")]
)
def test_an_entry_at_the_base_offset_is_sane(tmp_path: Path, reopened: bool) -> None:
    index = filled(tmp_path, (BASE, 1))
    if reopened:
        index.close()
        index = index_at(tmp_path)
    index.sanity_check()
    assert list(index) == sorted(index)


def test_entries_have_the_bytes_of_the_published_segment(tmp_path: Path) -> None:
    index = filled(tmp_path, (28, 4169), (56, 8364), (84, 12564), base=0)
    index.close()
    assert index.path.read_bytes() == SEED_ENTRIES
    assert list(index_at(tmp_path, base=0)) == [(28, 4169), (56, 8364), (84, 12564)]


@pytest.mark.parametrize(("max_bytes", "length"), [(300, 296), (10485760, 10485760), (8, 8), (15, 8)])
def test_a_new_index_is_preallocated_with_zeros_on_first_use(
    tmp_path: Path, max_bytes: int, length: int
) -> None:
    index = index_at(tmp_path, max_bytes=max_bytes)
    assert (index.entries, index.max_entries, index.is_full) == (0, length // 8, False)
    assert not index.exists, "looking must not create the file"
    index.prepare()
    assert index.path.stat().st_size == length == index.length
    assert not any(index.path.read_bytes()[:4096])
    assert index.path.stat().st_blocks * 512 <= 4096, "preallocation is sparse"
    index.close()
    assert index.path.stat().st_size == 0


def test_an_index_too_small_for_one_entry_cannot_be_created(tmp_path: Path) -> None:
    index = index_at(tmp_path, max_bytes=7)
    for use in (index.prepare, index.reset):
        with pytest.raises(InvalidError, match="less than one entry") as caught:
            use()
        assert caught.value.kafka_name == "INVALID_CONFIG"
    with pytest.raises(InvalidError, match="full"):
        index.append(BASE, 0)
    assert not index.exists


def test_opening_an_untrimmed_file_counts_every_entry_as_valid(tmp_path: Path) -> None:
    index = filled(tmp_path, (50, 100))
    index.release()
    reopened = index_at(tmp_path)
    assert (reopened.entries, reopened.max_entries, reopened.is_full) == (30, 30, True)


def test_a_trimmed_index_is_full_until_it_is_resized(tmp_path: Path) -> None:
    filled(tmp_path, (50, 100), (60, 200)).close()
    index = index_at(tmp_path)
    assert (index.entries, index.is_full) == (2, True)
    assert index.resize(240) is True
    assert index.resize(247) is False
    assert (index.entries, index.is_full, index.last_offset) == (2, False, 60)
    index.append(61, 300)
    index.trim()
    assert index.path.stat().st_size == 24
    index.prepare()
    assert (index.path.stat().st_size, index.entries) == (240, 3)


def test_resizing_below_the_entries_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="2 entries"):
        filled(tmp_path, (50, 100), (60, 200)).resize(15)


def test_an_index_resized_to_nothing_is_full(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    index.resize(0)
    assert (index.is_full, index.path.stat().st_size) == (True, 0)


def test_reset_empties_and_preallocates_anew(tmp_path: Path) -> None:
    filled(tmp_path, (50, 100)).close()
    index = index_at(tmp_path)
    index.reset()
    assert (index.entries, index.path.stat().st_size) == (0, 240)
    assert not any(index.path.read_bytes())


def test_closing_trims_also_after_the_descriptor_was_given_back(tmp_path: Path) -> None:
    index = filled(tmp_path, (50, 100))
    index.release()
    index.close()
    assert index.path.stat().st_size == 8
    assert open_descriptors(index.path) == 0


def test_trimming_a_missing_index_leaves_an_empty_file(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    index.trim()
    assert index.path.read_bytes() == b""


def test_closing_an_index_that_was_only_read_changes_nothing(tmp_path: Path) -> None:
    filled(tmp_path, (50, 100)).release()
    index = index_at(tmp_path)
    index.lookup(55)
    index.close()
    assert index.path.stat().st_size == 240
    missing = index_at(tmp_path, base=7)
    missing.close()
    assert not missing.exists


@pytest.mark.parametrize("offset", [BASE - 1, BASE + 2**31])
def test_an_offset_too_far_from_the_base_is_refused(tmp_path: Path, offset: int) -> None:
    with pytest.raises(InvalidError, match="cannot hold"):
        index_at(tmp_path).append(offset, 0)


@pytest.mark.parametrize("position", [-1, 2**31])
def test_a_position_that_does_not_fit_is_refused(tmp_path: Path, position: int) -> None:
    with pytest.raises(InvalidError, match="position"):
        index_at(tmp_path).append(BASE, position)


def test_the_largest_offset_and_position_fit(tmp_path: Path) -> None:
    filled(tmp_path, (BASE + 2**31 - 1, 2**31 - 1)).close()
    assert index_at(tmp_path).lookup(2**40) == (BASE + 2**31 - 1, 2**31 - 1)


def test_entry_numbers_are_checked(tmp_path: Path) -> None:
    index = filled(tmp_path, (50, 100))
    assert index.entry(0) == (50, 100)
    for number in (-1, 1):
        with pytest.raises(InvalidError, match="1 entries"):
            index.entry(number)
