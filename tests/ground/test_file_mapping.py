"""Files.map: a regular file as read-only memory, watched, refused where opening is refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pyarrow as pa
import pytest

from tidegate.errors import InvalidError, UnavailableError
from tidegate.files import Effect, Files
from tidegate.testing.faults import FailAt


def test_a_mapped_file_has_its_bytes_and_starts_at_a_page(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(256)) * 40)
    mapped = Files().map(tmp_path / "a")
    assert mapped.to_pybytes() == bytes(range(256)) * 40
    assert mapped.address % 4096 == 0
    assert not mapped.is_mutable


def test_an_empty_file_maps_to_no_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert Files().map(tmp_path / "a").size == 0


def test_mapped_bytes_outlive_the_file_and_take_no_memory_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    before = pa.total_allocated_bytes()
    mapped = Files().map(tmp_path / "a")
    piece = mapped.slice(50_000, 10)
    del mapped
    (tmp_path / "a").unlink()
    assert piece.to_pybytes() == b"x" * 10
    assert pa.total_allocated_bytes() == before


def test_mapping_is_an_effect_that_is_watched_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    seen: list[Effect] = []
    Files(watch=seen.append).map(tmp_path / "a")
    assert [(effect.kind, effect.length, effect.mutates) for effect in seen] == [
        ("open", 0, False),
        ("map", 5, False),
    ]


def test_a_failing_map_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    files = Files(watch=FailAt(1, errno.ENOMEM, kinds={"map"}))
    with pytest.raises(UnavailableError, match=f"could not map {tmp_path / 'a'}"):
        files.map(tmp_path / "a")


def test_links_folders_and_pipes_are_not_mapped(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "."):
        with pytest.raises((InvalidError, UnavailableError)):
            Files().map(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        Files().map(tmp_path / "absent")


def test_no_descriptor_is_left_when_the_last_user_is_gone(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        Files().map(tmp_path / "a")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_makes_a_second_name_or_says_that_it_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    Files().link(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"1"
    with pytest.raises(FileExistsError):
        Files().link(tmp_path / "a", tmp_path / "b")
