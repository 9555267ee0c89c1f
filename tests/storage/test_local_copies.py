"""Copies of remote objects: mapped, bounded, verified before the first use, fetched again when damaged."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pyarrow as pa
import pytest

from storage_oracles import write_pack
from tidegate.errors import CorruptError, InvalidError, UnavailableError
from tidegate.files import Files
from tidegate.randomness import SeededRandomness, SystemRandomness
from tidegate.storage.backends.objects import LocalCopies, ObjectsBackend
from tidegate.storage.backends.sealed import pack_name
from tidegate.storage.pack import PackCache
from tidegate.storage.runs.build import build_runs
from tidegate.storage.spec import Merge, StoreSpec
from tidegate.testing.faults import FailAt

store_module = pytest.importorskip("obstore.store")


def copies(folder: Path, limit_bytes: int = 1 << 20, files: Files | None = None) -> LocalCopies:
    return LocalCopies(folder, limit_bytes=limit_bytes, files=files or Files(), randomness=SystemRandomness())


def test_a_copy_is_mapped_and_found_again_by_the_next_process(tmp_path: Path) -> None:
    first = copies(tmp_path)
    assert first.get("t/a") is None
    added = first.add("t/a", [b"abc", b"def"])
    assert added.to_pybytes() == b"abcdef"
    again = copies(tmp_path).get("t/a")
    assert again is not None
    assert again.to_pybytes() == b"abcdef"
    assert again.address % 64 == 0


def test_every_damage_to_a_copy_of_another_process_is_found(tmp_path: Path) -> None:
    copies(tmp_path).add("t/a", [b"abcdef" * 10])
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    damages = [content[:length] for length in range(len(content))]
    damages += [content + bytes(extra) for extra in range(1, 65)]
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        damages.append(bytes(changed))
    for damage in damages:
        path.write_bytes(damage)
        assert copies(tmp_path).get("t/a") is None
        assert not path.exists()


def test_a_copy_under_another_objects_name_is_not_taken(tmp_path: Path) -> None:
    folder = copies(tmp_path)
    folder.add("t/a", [b"a"])
    (path,) = tmp_path.iterdir()
    folder.add("t/b", [b"b"])
    (other,) = set(tmp_path.iterdir()) - {path}
    other.write_bytes(path.read_bytes())
    assert copies(tmp_path).get("t/b") is None


def test_copies_used_longest_ago_make_room(tmp_path: Path) -> None:
    folder = copies(tmp_path, limit_bytes=3500)
    held = {name: folder.add(name, [name.encode() * 500]) for name in ("t/1", "t/2")}
    assert folder.get("t/1") is not None
    folder.add("t/3", [b"t/3" * 500])
    assert folder.get("t/2") is None
    assert folder.get("t/1") is not None
    assert folder.used_bytes <= 3500
    assert held["t/2"].to_pybytes() == b"t/2" * 500
    alone = folder.add("t/huge", [b"x" * 10_000])
    assert alone.size == 10_000
    assert len(list(tmp_path.iterdir())) == 1


def test_copies_of_earlier_processes_count_against_the_limit(tmp_path: Path) -> None:
    first = copies(tmp_path)
    for number in range(5):
        first.add(f"t/{number}", [bytes(1000)])
    second = copies(tmp_path, limit_bytes=2500)
    second.add("t/new", [bytes(1000)])
    assert second.used_bytes <= 2500
    assert len(list(tmp_path.iterdir())) == 2


def test_a_failed_download_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> object:
        yield b"abc"
        raise UnavailableError("connection lost")

    folder = copies(tmp_path)
    with pytest.raises(UnavailableError, match="connection lost"):
        folder.add("t/a", broken())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    full = copies(tmp_path, files=Files(watch=FailAt(2, errno.ENOSPC, kinds={"write"})))
    with pytest.raises(UnavailableError, match="disk is full"):
        full.add("t/a", [b"abc", b"def"])
    assert list(tmp_path.iterdir()) == []


def test_a_limit_must_be_above_zero(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="above 0"):
        copies(tmp_path, limit_bytes=0)


def test_a_cleared_cache_costs_a_download_and_no_error(tmp_path: Path) -> None:
    backend = ObjectsBackend(store_module.MemoryStore(), where="memory", cache=tmp_path / "cache")
    content = os.urandom(1 << 20)
    backend.put("t/a", [content])
    assert backend.read("t/a").to_pybytes() == content
    (copy,) = (tmp_path / "cache").rglob("*.copy")
    copy.unlink()
    copy.parent.rmdir()
    assert backend.read("t/a").to_pybytes() == content
    assert len(list((tmp_path / "cache").rglob("*.copy"))) == 1


def test_a_slot_damaged_in_the_local_copy_is_read_from_the_store_again(tmp_path: Path) -> None:
    store = store_module.MemoryStore()
    spec = StoreSpec("s", Merge.APPEND, pa.schema([("v", pa.int64())]))
    rows = pa.record_batch(
        {
            "key": pa.array([b"k%d" % (i % 100) for i in range(60_000)], pa.binary()),
            "ts": pa.array(range(60_000), pa.int64()),
            "v": pa.array(range(60_000), pa.int64()),
        }
    )
    (run,) = build_runs(spec, rows, first_seq=0, max_rows=1 << 20)
    backend = ObjectsBackend(store, where="memory", cache=tmp_path, randomness=SeededRandomness(1))
    name = pack_name("t", "s", 0, "u")
    (ref,) = write_pack(backend, "t", spec, 0, [run], name)
    backend.read(name)
    (copy,) = tmp_path.rglob("*.copy")
    damaged = bytearray(copy.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    copy.write_bytes(bytes(damaged))  # behind the backend's back, which has already verified this copy
    cache = PackCache(backend)
    assert cache.load("t", spec, ref).rows.equals(run.rows)

    import obstore

    content = bytearray(obstore.get(store, name).bytes())
    content[len(content) // 2] ^= 1
    obstore.put(store, name, bytes(content))
    fresh = ObjectsBackend(store, where="memory", cache=tmp_path / "fresh")
    with pytest.raises(CorruptError, match="slot 0"):
        PackCache(fresh).load("t", spec, ref)
