"""A folder backend whose process dies, whose disk fails and whose power is cut: old or new, never between."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from tidegate.errors import CorruptError, UnavailableError
from tidegate.files import Files
from tidegate.randomness import SeededRandomness
from tidegate.storage.backends.folder import FolderBackend
from tidegate.testing.faults import (
    CrashAt,
    FailAt,
    Recorder,
    ShortDisk,
    count_effects,
    crash_states,
    dying_process,
)

PARTS = [b"head" * 16, b"x" * 300_000, b"tail"]
WHOLE = b"".join(PARTS)


def open_folder(root: Path, files: Files, seed: int = 1) -> FolderBackend:
    return FolderBackend(root, files=files, randomness=SeededRandomness(seed))


def script(root: Path) -> Callable[[Files], None]:
    """Everything that changes a folder: its making, puts in new and known folders, publishes, a delete."""

    def run(files: Files) -> None:
        backend = open_folder(root, files)
        backend.put("a/packs/s/1.pack", PARTS)
        backend.put("a/packs/s/2.pack", PARTS)
        version = backend.publish("a/current", b"one", expected=None)
        backend.publish("a/current", b"two", expected=version)
        backend.delete("a/packs/s/1.pack")

    return run


def check(root: Path) -> tuple[list[str], bytes | None]:
    """What is there is whole; temporaries can be removed, and all of the script can be done again."""
    backend = open_folder(root, Files(), seed=2)
    names = sorted(each.name for each in backend.list(""))
    objects = [name for name in names if name.endswith(".pack")]
    for name in objects:
        assert backend.read(name).to_pybytes() == WHOLE, name
    published = backend.read_published("a/current")
    assert published is None or published[0] in (b"one", b"two")
    for name in names:
        if name.endswith(".tmp"):
            backend.delete(name)
    assert not [each.name for each in backend.list("") if each.name.endswith(".tmp")]
    backend.put("a/packs/s/1.pack", PARTS)
    backend.publish("a/current", b"again", expected=None if published is None else published[1])
    return objects, None if published is None else published[0]


@pytest.mark.parametrize("torn_bytes", [0, 100])
def test_a_process_killed_before_every_effect_leaves_only_whole_objects(
    tmp_path: Path, torn_bytes: int
) -> None:
    effects = count_effects(script(tmp_path / "count"))
    assert effects > 30
    seen = set()
    for n in range(1, effects + 1):
        root = tmp_path / f"{n}"
        with dying_process(CrashAt(n, torn_bytes=torn_bytes)) as files:
            script(root)(files)
        objects, published = check(root)
        seen.add((tuple(objects), published))
    assert len(seen) >= 5  # nothing, one, two objects, the first and the second publish


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EMFILE], ids=["EIO", "ENOSPC", "EMFILE"])
def test_every_effect_failing_once_is_a_typed_error_and_can_be_tried_again(tmp_path: Path, code: int) -> None:
    effects = count_effects(script(tmp_path / "count"))
    for n in range(1, effects + 1):
        root = tmp_path / f"{code}-{n}"
        fault = FailAt(n, code)
        with pytest.raises(UnavailableError):
            script(root)(Files(watch=fault))
        assert fault.fired == 1
        check(root)


def test_the_same_backend_goes_on_after_every_failed_effect(tmp_path: Path) -> None:
    def work(backend: FolderBackend) -> None:
        backend.put("t/packs/s/1.pack", PARTS)
        found = backend.read_published("t/current")
        backend.publish("t/current", b"x", expected=None if found is None else found[1])

    n, done = 1, False
    while not done:
        root = tmp_path / f"{n}"
        FolderBackend(root)
        fault = FailAt(n, errno.ENOSPC)
        backend = FolderBackend(root, files=Files(watch=fault))
        try:
            work(backend)
            done = fault.fired == 0
        except UnavailableError:
            work(backend)
        assert backend.read("t/packs/s/1.pack").to_pybytes() == WHOLE
        n += 1
    assert n > 15


def test_a_full_disk_refuses_the_put_and_goes_on_when_there_is_room_again(tmp_path: Path) -> None:
    disk = ShortDisk(400_000)
    backend = FolderBackend(tmp_path, files=Files(watch=disk))
    backend.put("t/1.pack", PARTS)
    with pytest.raises(UnavailableError, match="disk is full"):
        backend.put("t/2.pack", PARTS)
    assert [each.name for each in backend.list("")] == ["t/1.pack"]
    backend.delete("t/1.pack")
    backend.put("t/2.pack", PARTS)
    assert backend.read("t/2.pack").to_pybytes() == WHOLE


@pytest.mark.parametrize("model", ["ordered", "weak"])
def test_after_a_power_cut_what_was_acknowledged_is_there_and_whole(tmp_path: Path, model: str) -> None:
    recorder = Recorder(tmp_path / "disk")
    files = Files(watch=recorder)
    backend = open_folder(tmp_path / "disk", files)
    recorder.mark("opened")
    backend.put("a/packs/s/1.pack", [b"one" * 100, b"1"])
    recorder.mark("put")
    version = backend.publish("a/current", b"one", expected=None)
    recorder.mark("published one")
    backend.publish("a/current", b"two", expected=version)
    recorder.mark("published two")
    states = 0
    for state in crash_states(recorder.recording, model=model):  # type: ignore[arg-type]
        states += 1
        root = tmp_path / f"state-{states}"
        state.write_to(root)
        reopened = open_folder(root, Files(), seed=3)
        if "put" in state.marks:
            assert reopened.read("a/packs/s/1.pack").to_pybytes() == b"one" * 100 + b"1", state.story
        published = reopened.read_published("a/current")
        allowed = [b"one"] if "published one" in state.marks else [None, b"one"]
        allowed = [b"two"] if "published two" in state.marks else [*allowed, b"two"]
        assert (published[0] if published else None) in allowed, state.story
        for each in reopened.list(""):
            if each.name.endswith(".pack"):
                assert reopened.read(each.name).to_pybytes() == b"one" * 100 + b"1", state.story
    assert states > 20


def test_a_died_put_is_never_served_under_its_name(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "disk")
    backend = open_folder(tmp_path / "disk", Files(watch=recorder))
    backend.put("t/1.pack", [b"abc" * 100])
    for number, state in enumerate(crash_states(recorder.recording, model="weak")):
        root = tmp_path / f"state-{number}"
        state.write_to(root)
        try:
            found = open_folder(root, Files()).read("t/1.pack").to_pybytes()
        except CorruptError:
            continue
        assert found == b"abc" * 100, state.story


@pytest.mark.parametrize("kind", ["list", "map"])
def test_a_failed_look_is_unavailable_and_not_absent(tmp_path: Path, kind: str) -> None:
    FolderBackend(tmp_path).put("t/a", [b"x"])
    broken = FolderBackend(tmp_path, files=Files(watch=FailAt(1, errno.EACCES, kinds={kind})))
    with pytest.raises(UnavailableError, match="permission denied"):
        broken.read("t/a") if kind == "map" else list(broken.list(""))
