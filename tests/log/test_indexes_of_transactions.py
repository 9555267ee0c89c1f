"""The index of aborted transactions: collecting for a fetch, truncation, order, damage."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tidegate.errors import CorruptError, InvalidError, UnavailableError
from tidegate.files import Effect, Files
from tidegate.log.indexes import AbortedTxn, TransactionIndex

FOUR = [
    AbortedTxn(0, 0, 10, 11),
    AbortedTxn(1, 5, 15, 13),
    AbortedTxn(2, 18, 35, 25),
    AbortedTxn(3, 32, 50, 40),
]


def index_at(folder: Path, *, base: int = 0, files: Files | None = None) -> TransactionIndex:
    return TransactionIndex(folder / f"{base:020d}.txnindex", base, files=files or Files())


def filled(folder: Path, *, reopened: bool = False) -> TransactionIndex:
    index = index_at(folder)
    for aborted in FOUR:
        index.append(aborted)
    if reopened:
        index.close()
        index = index_at(folder)
    return index


@pytest.mark.parametrize(
    ("start", "upper", "found", "complete"),
    [
        pytest.param(0, 100, FOUR, False, id="LS-X1-0-100"),
        pytest.param(0, 32, FOUR[:3], True, id="LS-X1-0-32"),
        pytest.param(0, 35, FOUR, True, id="LS-X1-0-35"),
        pytest.param(11, 35, FOUR[1:], True, id="LS-X1-11-35"),
        pytest.param(20, 41, FOUR[2:], False, id="LS-X1-20-41"),
        pytest.param(33, 40, FOUR[2:], True, id="LS-X1-stable-at-upper"),
        pytest.param(15, 32, FOUR[1:3], True, id="LS-X1-marker-at-start"),
    ],
)
@pytest.mark.parametrize("reopened", [False, True])
def test_aborted_transactions_of_a_fetch_are_collected(
    tmp_path: Path, start: int, upper: int, found: list[AbortedTxn], complete: bool, reopened: bool
) -> None:
    index = filled(tmp_path, reopened=reopened)
    assert index.collect_aborted(start, upper) == (found, complete)


@pytest.mark.parametrize(
    ("offset", "left"),
    [
        pytest.param(51, 4, id="LS-X2-51"),
        pytest.param(50, 3, id="LS-X2-50"),
        pytest.param(16, 2, id="LS-X2-16"),
        pytest.param(0, 0, id="LS-X2-0"),
    ],
)
@pytest.mark.parametrize("reopened", [False, True])
def test_truncation_drops_markers_at_and_behind_the_offset(
    tmp_path: Path, offset: int, left: int, reopened: bool
) -> None:
    index = filled(tmp_path, reopened=reopened)
    index.truncate_to(offset)
    assert list(index) == FOUR[:left]
    assert index.last_offset == (FOUR[left - 1].last_offset if left else None)
    assert index.path.stat().st_size == left * 34
    for aborted in FOUR[left:]:
        index.append(aborted)
    assert list(index) == FOUR


@pytest.mark.parametrize(
    "last_offset", [pytest.param(50, id="LS-X2-equal"), pytest.param(49, id="LS-X2-less")]
)
@pytest.mark.parametrize("reopened", [False, True])
def test_a_marker_that_does_not_grow_is_refused(tmp_path: Path, last_offset: int, reopened: bool) -> None:
    index = filled(tmp_path, reopened=reopened)
    with pytest.raises(InvalidError, match="cannot follow the one at 50"):
        index.append(AbortedTxn(4, 40, last_offset, 60))
    assert len(index) == 4


def test_the_file_appears_with_the_first_entry_and_has_exactly_its_bytes(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    assert (list(index), index.entries, index.last_offset) == ([], 0, None)
    assert index.collect_aborted(0, 100) == ([], False)
    index.truncate_to(0)
    index.reset()
    index.sync()
    assert not index.exists
    index.append(AbortedTxn(23423, 75, 106, 100))
    assert index.path.read_bytes() == struct.pack(">hqqqq", 0, 23423, 75, 106, 100)
    index.reset()
    assert index.path.read_bytes() == b""
    assert index.last_offset is None


def test_a_marker_below_the_base_fails_the_sanity_check(tmp_path: Path) -> None:
    filled(tmp_path).close()
    index_at(tmp_path).sanity_check()
    (tmp_path / f"{100:020d}.txnindex").write_bytes((tmp_path / f"{0:020d}.txnindex").read_bytes())
    with pytest.raises(CorruptError, match="not greater than 99") as caught:
        index_at(tmp_path, base=100).sanity_check()
    assert (caught.value.position, caught.value.offset) == (0, 10)


def test_markers_out_of_order_fail_the_sanity_check(tmp_path: Path) -> None:
    path = index_at(tmp_path).path
    path.write_bytes(struct.pack(">hqqqq", 0, 1, 1, 5, 6) + struct.pack(">hqqqq", 0, 1, 1, 5, 6))
    with pytest.raises(CorruptError) as caught:
        index_at(tmp_path).sanity_check()
    assert caught.value.position == 34


@pytest.mark.parametrize("version", [1, -1, 256])
def test_an_unknown_version_is_a_typed_error(tmp_path: Path, version: int) -> None:
    path = index_at(tmp_path).path
    path.write_bytes(struct.pack(">hqqqq", 0, 1, 1, 5, 6) + struct.pack(">hqqqq", version, 2, 7, 9, 6))
    index = index_at(tmp_path)
    for read in (lambda: list(index), lambda: index.collect_aborted(0, 100), lambda: index.last_offset):
        with pytest.raises(CorruptError, match=f"version {version}") as caught:
            read()
        assert (caught.value.path, caught.value.position) == (path, 34)


def test_a_torn_last_entry_is_ignored_reported_and_written_over(tmp_path: Path) -> None:
    filled(tmp_path).close()
    path = index_at(tmp_path).path
    path.write_bytes(path.read_bytes() + b"\0" * 33)
    index = index_at(tmp_path)
    assert list(index) == FOUR
    with pytest.raises(CorruptError, match="33 bytes are left") as caught:
        index.sanity_check()
    assert caught.value.position == 4 * 34
    fifth = AbortedTxn(4, 51, 60, 61)
    index.append(fifth)
    assert list(index_at(tmp_path)) == [*FOUR, fifth]
    index.sanity_check()


def test_a_failed_append_is_not_counted_and_can_be_tried_again(tmp_path: Path) -> None:
    torn = [True]

    def watch(effect: Effect) -> None:
        if effect.kind == "write" and torn.pop() if torn else False:
            raise UnavailableError("no space")

    index = index_at(tmp_path, files=Files(watch))
    with pytest.raises(UnavailableError):
        index.append(FOUR[0])
    assert (index.entries, index.last_offset) == (0, None)
    index.append(FOUR[0])
    assert list(index) == FOUR[:1]


def test_renaming_and_deleting_follow_the_file(tmp_path: Path) -> None:
    index = filled(tmp_path)
    index.rename_to(tmp_path / "x.deleted")
    assert list(index) == FOUR
    assert index.delete()
    assert (list(index), any(tmp_path.iterdir())) == ([], False)


def test_a_read_only_index_follows_a_growing_file(tmp_path: Path) -> None:
    writer = index_at(tmp_path)
    reader = TransactionIndex(writer.path, 0, files=Files(), read_only=True)
    for count, aborted in enumerate(FOUR, 1):
        writer.append(aborted)
        assert list(reader) == FOUR[:count]
    with pytest.raises(InvalidError, match="reading only"):
        reader.append(AbortedTxn(9, 90, 99, 100))
