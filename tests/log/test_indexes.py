"""What offset and time index share, shown on the offset index: descriptors, damage, faults, other readers."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tidegate.errors import CorruptError, InvalidError, UnavailableError
from tidegate.files import Effect, Files
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


# -- descriptors ---------------------------------------------------------------------------------


def test_a_closed_index_holds_no_descriptor_and_reads_a_bounded_part(tmp_path: Path) -> None:
    filled(tmp_path, *((BASE + n + 1, n) for n in range(20000)), max_bytes=1 << 20).close()
    read: list[int] = []

    def watch(effect: Effect) -> None:
        if effect.kind == "read":
            read.append(effect.length)

    index = index_at(tmp_path, files=Files(watch))
    assert index.lookup(BASE + 5000) == (BASE + 5000, 4999)
    assert open_descriptors(index.path) == 0
    assert sum(read) < 20_000 and len(read) < 10


def test_a_rolled_index_gives_its_descriptor_back_after_its_sync(tmp_path: Path) -> None:
    index = filled(tmp_path, (50, 100))
    assert open_descriptors(index.path) == 1
    index.sync()
    assert open_descriptors(index.path) == 1, "the active one keeps it"
    index.trim()
    index.sync()
    assert open_descriptors(index.path) == 0
    assert index.lookup(55) == (50, 100)
    assert open_descriptors(index.path) == 0


def test_a_sync_after_close_still_reaches_the_disk(tmp_path: Path) -> None:
    kinds: list[str] = []
    index = index_at(tmp_path, files=Files(lambda effect: kinds.append(effect.kind)))
    index.append(50, 100)
    index.close()
    assert "sync" not in kinds
    index.sync()
    index.sync()
    assert kinds.count("sync") == 1
    assert open_descriptors(index.path) == 0


def test_an_entry_written_after_a_sync_needs_another(tmp_path: Path) -> None:
    kinds: list[str] = []
    index = index_at(tmp_path, files=Files(lambda effect: kinds.append(effect.kind)))
    index.prepare()
    for n in range(1, 4):
        index.sync()
        index.append(BASE + n, n)
    index.trim()
    index.sync()
    assert kinds.count("sync") == 4


def test_an_append_is_one_write(tmp_path: Path) -> None:
    effects: list[Effect] = []
    index = index_at(tmp_path, files=Files(effects.append))
    index.append(50, 100)
    effects.clear()
    index.append(51, 200)
    assert [(effect.kind, effect.position, effect.length) for effect in effects] == [("write", 8, 8)]


def test_renaming_and_deleting_follow_the_file(tmp_path: Path) -> None:
    index = filled(tmp_path, (50, 100))
    renamed = tmp_path / f"{index.path.name}.deleted"
    index.rename_to(renamed)
    assert index.path == renamed and index.lookup(55) == (50, 100)
    index.append(60, 200)
    assert index.delete() is True
    assert index.delete() is False
    assert not any(tmp_path.iterdir())
    assert (index.entries, index.lookup(99)) == (0, (BASE, 0))
    missing = index_at(tmp_path, base=7)
    missing.rename_to(tmp_path / "other")
    assert not any(tmp_path.iterdir())


# -- damage --------------------------------------------------------------------------------------


def test_a_file_of_broken_length_fails_the_sanity_check(tmp_path: Path) -> None:
    path = index_at(tmp_path).path
    path.write_bytes(struct.pack(">ii", 5, 100) + b"abc")
    index = index_at(tmp_path)
    assert index.entries == 1
    with pytest.raises(CorruptError, match="multiple of 8") as caught:
        index.sanity_check()
    assert (caught.value.path, caught.value.position) == (path, 8)


def test_growing_a_file_of_broken_length_drops_the_half_entry(tmp_path: Path) -> None:
    path = index_at(tmp_path).path
    path.write_bytes(struct.pack(">ii", 5, 100) + b"abc")
    index = index_at(tmp_path)
    index.prepare()
    assert path.read_bytes() == struct.pack(">ii", 5, 100) + bytes(232)


def test_a_last_offset_below_the_base_fails_the_sanity_check(tmp_path: Path) -> None:
    index_at(tmp_path).path.write_bytes(struct.pack(">iiii", 5, 100, -1, 200))
    with pytest.raises(CorruptError, match="below the base") as caught:
        index_at(tmp_path).sanity_check()
    assert caught.value.position == 8


@pytest.mark.parametrize("entry", [(5, -100), (-5, 100)])
def test_a_lookup_that_hits_an_impossible_entry_is_a_typed_error(
    tmp_path: Path, entry: tuple[int, int]
) -> None:
    index_at(tmp_path).path.write_bytes(struct.pack(">ii", *entry))
    with pytest.raises(CorruptError) as caught:
        index_at(tmp_path).lookup(60)
    assert caught.value.position == 0


def test_every_flipped_bit_gives_a_hint_or_a_typed_error(tmp_path: Path) -> None:
    path = index_at(tmp_path, base=0).path
    hints = 0
    for bit in range(len(SEED_ENTRIES) * 8):
        damaged = bytearray(SEED_ENTRIES)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        for offset in (0, 28, 50, 84, 108):
            try:
                found = index_at(tmp_path, base=0).lookup(offset)
            except CorruptError:
                continue
            assert 0 <= found.offset <= offset and found.position >= 0
            hints += 1
    assert hints > 0


def test_a_file_shortened_behind_our_back_is_a_typed_error(tmp_path: Path) -> None:
    index = filled(tmp_path, (50, 100), (60, 200))
    index.close()
    index.path.write_bytes(b"\0\0\0")
    with pytest.raises(CorruptError, match="shortened") as caught:
        index.lookup(60)
    assert caught.value.path == index.path


def test_a_file_that_disappeared_is_an_empty_hint(tmp_path: Path) -> None:
    index = filled(tmp_path, (50, 100))
    index.close()
    index.path.unlink()
    assert index.lookup(60) == (BASE, 0)
    assert index.upper_bound(OffsetPosition(BASE, 0), 1) is None
    with pytest.raises(CorruptError, match="disappeared"):
        index.entry(0)


# -- faults --------------------------------------------------------------------------------------


def failing(kind: str, times: int = 1) -> Callable[[Effect], None]:
    left = [times]

    def watch(effect: Effect) -> None:
        if effect.kind == kind and left[0]:
            left[0] -= 1
            raise UnavailableError(f"{kind} failed")

    return watch


def test_a_failed_append_leaves_the_index_as_it_was(tmp_path: Path) -> None:
    index = index_at(tmp_path, files=Files(failing("write")))
    index.prepare()
    with pytest.raises(UnavailableError):
        index.append(50, 100)
    assert index.entries == 0
    index.append(50, 100)
    index.close()
    assert index.path.read_bytes() == struct.pack(">ii", 5, 100)


def test_a_failed_preallocation_can_be_tried_again(tmp_path: Path) -> None:
    index = index_at(tmp_path, files=Files(failing("truncate")))
    with pytest.raises(UnavailableError):
        index.append(50, 100)
    index.append(50, 100)
    assert (index.entries, index.path.stat().st_size) == (1, 240)


def test_a_failed_sync_is_final(tmp_path: Path) -> None:
    index = index_at(tmp_path, files=Files(failing("sync")))
    index.append(50, 100)
    with pytest.raises(UnavailableError, match="sync failed"):
        index.sync()
    index.release()
    for again in (index.sync, lambda: index.append(60, 200), index.trim):
        with pytest.raises(UnavailableError, match="earlier sync failed"):
            again()
    index.close()
    assert index.lookup(55) == (50, 100)


def test_look_ups_while_another_thread_appends_never_see_half_an_entry(tmp_path: Path) -> None:
    index = index_at(tmp_path, max_bytes=1 << 20)
    index.prepare()
    done = threading.Event()
    wrong: list[OffsetPosition] = []

    def look() -> None:
        while not done.is_set():
            found = index.lookup(BASE + 100_000)
            if found.position != (found.offset - BASE) * 7:
                wrong.append(found)

    reader = threading.Thread(target=look)
    reader.start()
    for n in range(1, 3000):
        index.append(BASE + n, n * 7)
    done.set()
    reader.join(timeout=300)
    assert not reader.is_alive() and not wrong


# -- a reader in another process ---------------------------------------------------------------------


@pytest.mark.parametrize("entries", [0, 1, 2, 29, 30])
def test_a_read_only_index_does_not_count_the_zero_tail(tmp_path: Path, entries: int) -> None:
    writer = index_at(tmp_path)
    writer.prepare()
    reader = OffsetIndex(writer.path, BASE, 240, files=Files(), read_only=True)
    assert (reader.entries, reader.lookup(10**6)) == (0, (BASE, 0))
    for n in range(1, entries + 1):
        writer.append(BASE + n, n * 10)
    assert reader.entries == entries
    assert list(reader) == list(writer)
    assert reader.lookup(10**6) == writer.lookup(10**6)
    assert reader.last_offset == writer.last_offset
    writer.truncate_to(BASE + 2)
    assert reader.entries == min(entries, 1)
    with pytest.raises(InvalidError, match="reading only"):
        reader.append(10**6, 0)


def test_a_read_only_index_of_a_missing_file_is_empty_and_stays_missing(tmp_path: Path) -> None:
    reader = OffsetIndex(tmp_path / "x.index", 0, 240, files=Files(), read_only=True)
    assert (reader.entries, reader.lookup(5)) == (0, (0, 0))
    reader.close()
    assert not any(tmp_path.iterdir())
