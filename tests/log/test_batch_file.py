"""Finding the next sound batch: behind any damage, never a look-alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.files import Files
from tidegate.log.batch_file import RESYNC_BYTES, next_sound_batch
from tidegate.testing.batches import Rec, build_batch

FILES = Files()


def batch(offset: int, value: bytes = b"v" * 40) -> bytes:
    return bytes(build_batch([Rec(value=value)], base_offset=offset))


def search(path: Path, content: bytes, position: int, **limits: int) -> int | None:
    path.write_bytes(content)
    with FILES.open(path) as file:
        found = next_sound_batch(file, position, len(content), **limits)
    return None if found is None else found[0]


def test_every_flipped_bit_of_a_header_is_walked_around(tmp_path: Path) -> None:
    batches = [batch(offset) for offset in range(3)]
    size = len(batches[0])
    for bit in range(61 * 8):
        damaged = bytearray(batches[1])
        damaged[bit // 8] ^= 1 << (bit % 8)
        content = batches[0] + bytes(damaged) + batches[2]
        assert search(tmp_path / "log", content, size + 1) == 2 * size


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=0, max_size=300), st.binary(max_size=30))
def test_junk_of_any_kind_and_length_is_skipped(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, tail: bytes
) -> None:
    path = tmp_path_factory.mktemp("resync") / "log"
    content = junk + batch(7) + tail
    assert search(path, content, 0) == len(junk)


def test_a_batch_inside_a_record_is_found_only_when_its_offset_could_be_next(tmp_path: Path) -> None:
    """A topic may carry log bytes as values; the offsets of those are lower than where the log is."""
    inner = batch(3)
    outer = bytearray(batch(1000, value=inner))
    outer[20] ^= 1  # the CRC
    content = bytes(outer) + batch(1001)
    assert search(tmp_path / "log", content, 0, min_offset=1000) == len(outer)


def test_batches_across_a_window_border_are_found(tmp_path: Path) -> None:
    for shift in (-70, -61, -30, -16, -1, 0, 1):
        junk = b"\x00" * (RESYNC_BYTES + shift)
        assert search(tmp_path / "log", junk + batch(5), 0) == len(junk)


def test_nothing_sound_is_none(tmp_path: Path) -> None:
    assert search(tmp_path / "log", b"", 0) is None
    assert search(tmp_path / "log", b"\x02" * 5000, 0) is None
    assert search(tmp_path / "log", batch(5)[:-1], 0) is None
