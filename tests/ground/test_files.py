"""The file system port: atomic publishing, final sync failures, refused oddities, named errors, locks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.errors import ConflictError, InvalidError, UnavailableError
from tidegate.files import MUTATIONS, Effect, File, Files
from tidegate.testing.faults import (
    CrashAt,
    EffectCounter,
    FailAt,
    FailSync,
    Recorder,
    ShortDisk,
    SimulatedCrash,
    count_effects,
    crash_states,
)


@pytest.fixture
def files() -> Files:
    return Files()


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


# -- reading and writing -------------------------------------------------------------------------


def test_bytes_are_written_and_read_by_position(files: Files, tmp_path: Path) -> None:
    with files.open(tmp_path / "a", create=True) as file:
        file.write_at(0, b"hello world")
        file.write_at(6, bytearray(b"W"))
        file.write_at(13, memoryview(b"!"))
        assert file.size() == 14
        assert file.read_at(0, 100) == b"hello World\0\0!"
        assert file.read_at(6, 5) == b"World"
        assert file.read_at(14, 5) == b""
        buffer = bytearray(4)
        assert file.read_into(12, memoryview(buffer)) == 2
        assert bytes(buffer) == b"\0!\0\0"


def test_truncating_cuts_and_extends(files: Files, tmp_path: Path) -> None:
    with files.open(tmp_path / "a", create=True) as file:
        file.write_at(0, b"12345")
        file.truncate(2)
        file.truncate(4)
    assert (tmp_path / "a").read_bytes() == b"12\0\0"


def test_a_file_opened_for_reading_refuses_to_be_changed(files: Files, tmp_path: Path) -> None:
    files.publish(tmp_path / "a", b"x")
    with files.open(tmp_path / "a") as file:
        for change in (lambda: file.write_at(0, b"y"), lambda: file.truncate(0), file.sync):
            with pytest.raises(InvalidError, match="reading only"):
                change()


def test_a_closed_file_says_so(files: Files, tmp_path: Path) -> None:
    file = files.open(tmp_path / "a", create=True)
    file.close()
    file.close()
    with pytest.raises(InvalidError, match="is closed"):
        file.read_at(0, 1)


def test_opening_does_not_create_unless_asked(files: Files, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.open(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        files.open(tmp_path / "a", write=True)
    assert list(tmp_path.iterdir()) == []


def test_a_file_above_the_limit_is_not_read(files: Files, tmp_path: Path) -> None:
    files.publish(tmp_path / "a", b"12345")
    assert files.read(tmp_path / "a", limit=5) == b"12345"
    with pytest.raises(InvalidError, match="5 bytes, more than the 4"):
        files.read(tmp_path / "a", limit=4)


def test_files_leave_no_descriptor_behind(files: Files, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        files.publish(tmp_path / "a", b"x")
        files.read(tmp_path / "a")
        files.lock(tmp_path / "lock").release()
        files.lock(tmp_path / "record", posix=True).release()
        files.open(tmp_path / "a")  # dropped without closing
    assert len(os.listdir("/proc/self/fd")) == before


# -- looking -------------------------------------------------------------------------------------


def test_listing_is_sorted(files: Files, tmp_path: Path) -> None:
    for name in ("b", "a", "C"):
        files.publish(tmp_path / name, b"")
    assert files.list(tmp_path) == ["C", "a", "b"]


def test_stat_tells_files_folders_and_links_apart(files: Files, tmp_path: Path) -> None:
    files.publish(tmp_path / "a", b"123")
    files.set_mtime_ms(tmp_path / "a", 1_639_132_508_991)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    info = files.stat(tmp_path / "a")
    assert info is not None
    assert (info.size, info.mtime_ms, info.is_file, info.is_folder) == (3, 1_639_132_508_991, True, False)
    folder, link = files.stat(tmp_path), files.stat(tmp_path / "link")
    assert folder is not None and folder.is_folder and not folder.is_file
    assert link is not None and not link.is_file and not link.is_folder
    assert files.stat(tmp_path / "nothing") is None
    assert files.exists(tmp_path / "a") and not files.exists(tmp_path / "nothing")


# -- F1: publishing ------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["ordered", "weak"])
def test_F1_a_published_file_is_old_or_new_in_every_crash_state(tmp_path: Path, model: str) -> None:
    (tmp_path / "x").write_bytes(b"old" * 300)
    recorder = Recorder(tmp_path)
    Files(watch=recorder).publish(tmp_path / "x", b"new" * 400)
    recorder.mark("published")
    found = set()
    for state in crash_states(recorder.recording, model=model):  # type: ignore[arg-type]
        assert state.tree["x"] in (b"old" * 300, b"new" * 400), state.story
        assert "published" not in state.marks or state.tree["x"] == b"new" * 400, state.story
        found.add(state.tree["x"])
    assert len(found) == 2


def test_F1_dying_at_any_effect_of_publishing_leaves_old_or_new(tmp_path: Path) -> None:
    steps = count_effects(lambda files: files.publish(tmp_path / "x", b"start"))
    assert steps == 5
    for n in range(1, steps + 1):
        path = tmp_path / str(n) / "x"
        path.parent.mkdir()
        path.write_bytes(b"old")
        with pytest.raises(SimulatedCrash):
            Files(watch=CrashAt(n)).publish(path, b"new")
        assert path.read_bytes() == (b"new" if n == steps else b"old")


def test_a_leftover_temporary_of_a_dead_process_does_not_leak_into_the_file(tmp_path: Path) -> None:
    with pytest.raises(SimulatedCrash):
        Files(watch=CrashAt(4)).publish(tmp_path / "x", b"long long long")
    assert len(list(tmp_path.iterdir())) == 1
    Files().publish(tmp_path / "x", b"short")  # same process number, same serial: the same temporary name
    assert (tmp_path / "x").read_bytes() == b"short"


@pytest.mark.parametrize("n", range(1, 5))
def test_failing_to_publish_leaves_the_old_file_and_no_litter(tmp_path: Path, n: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(UnavailableError):
        Files(watch=FailAt(n, errno.ENOSPC)).publish(path, b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"x": b"old"}


def test_publishing_without_sync_still_replaces_atomically(tmp_path: Path) -> None:
    counter = EffectCounter()
    Files(watch=counter).publish(tmp_path / "x", b"new", sync=False)
    assert [name.split()[0] for name in counter.names] == ["create", "write", "rename"]


def test_only_the_first_publisher_of_a_new_name_wins(files: Files, tmp_path: Path) -> None:
    files.publish_new(tmp_path / "x", b"first")
    with pytest.raises(ConflictError, match="exists already"):
        files.publish_new(tmp_path / "x", b"second")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"x": b"first"}


@pytest.mark.parametrize("model", ["ordered", "weak"])
def test_a_new_name_is_absent_or_whole_in_every_crash_state(tmp_path: Path, model: str) -> None:
    recorder = Recorder(tmp_path)
    Files(watch=recorder).publish_new(tmp_path / "x", b"new" * 400)
    recorder.mark("published")
    for state in crash_states(recorder.recording, model=model):  # type: ignore[arg-type]
        allowed = (b"new" * 400,) if "published" in state.marks else (None, b"new" * 400)
        assert state.tree.get("x") in allowed, state.story


def test_folders_are_made_with_their_parents_and_survive_power_loss(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    files = Files(watch=recorder)
    files.mkdir(tmp_path / "a" / "b")
    files.mkdir(tmp_path / "a" / "b")
    recorder.mark("made")
    last = [state for state in crash_states(recorder.recording, model="weak") if state.marks]
    assert last and all(state.tree == {"a": None, "a/b": None} for state in last)
    files.rmdir(tmp_path / "a" / "b")
    assert files.list(tmp_path / "a") == []


# -- F2: a failed sync is final --------------------------------------------------------------------


def test_F2_a_failed_sync_poisons_the_file_for_good(tmp_path: Path) -> None:
    with Files(watch=FailSync(1)).open(tmp_path / "a", create=True) as file:
        file.write_at(0, b"x")
        with pytest.raises(UnavailableError):
            file.sync()
        for change in (lambda: file.write_at(0, b"y"), lambda: file.truncate(0), file.sync):
            with pytest.raises(UnavailableError, match="earlier sync failed"):
                change()
        assert file.read_at(0, 1) == b"x"


def test_F2_other_files_are_not_poisoned(tmp_path: Path) -> None:
    files = Files(watch=FailSync(1))
    one, two = files.open(tmp_path / "a", create=True), files.open(tmp_path / "b", create=True)
    with pytest.raises(UnavailableError):
        one.sync()
    two.write_at(0, b"fine")
    two.sync()


# -- F3: odd files ---------------------------------------------------------------------------------


def _symlink(path: Path) -> None:
    target = path.with_name("target")
    target.write_bytes(b"secret")
    path.symlink_to(target)


def _hard_link(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"backup")
    path.hardlink_to(other)


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(_symlink, id="symlink"),
        pytest.param(lambda path: os.mkfifo(path), id="fifo"),
        pytest.param(lambda path: path.mkdir(), id="folder"),
        pytest.param(lambda path: path.symlink_to("nowhere"), id="dangling-symlink"),
    ],
)
@pytest.mark.parametrize("write", [False, True])
def test_F3_nothing_but_a_regular_file_is_opened(files: Files, tmp_path: Path, plant, write: bool) -> None:  # type: ignore[no-untyped-def]
    plant(tmp_path / "x")
    with pytest.raises((InvalidError, UnavailableError)) as caught:
        files.open(tmp_path / "x", write=write)
    assert str(tmp_path / "x") in str(caught.value)


def test_F3_creating_through_a_dangling_link_is_refused(files: Files, tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to(tmp_path / "outside")
    with pytest.raises(InvalidError, match="symbolic link"):
        files.open(tmp_path / "x", create=True)
    assert not (tmp_path / "outside").exists()


def test_F3_a_file_with_a_second_hard_link_is_read_but_not_written(files: Files, tmp_path: Path) -> None:
    _hard_link(tmp_path / "x")
    assert files.read(tmp_path / "x") == b"backup"
    with pytest.raises(InvalidError, match="2 hard links"):
        files.open(tmp_path / "x", write=True)
    files.publish(tmp_path / "x", b"new")  # replaces the name, leaves the other copy alone
    assert (tmp_path / "other").read_bytes() == b"backup"


@pytest.mark.parametrize("posix", [False, True])
def test_F3_a_lock_does_not_follow_a_link(files: Files, tmp_path: Path, posix: bool) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "outside")
    with pytest.raises(InvalidError, match="symbolic link"):
        files.lock(tmp_path / "lock", posix=posix)
    assert not (tmp_path / "outside").exists()


# -- F4: errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EIO, "check it"),
        (errno.EACCES, "permission"),
        (errno.EROFS, "read-only"),
        (errno.EDQUOT, "quota"),
    ],
)
@pytest.mark.parametrize("kind", sorted(MUTATIONS - {"rmdir", "mtime", "link", "truncate", "mkdir"}))
def test_F4_every_effect_names_its_file_and_the_remedy(
    tmp_path: Path, kind: str, number: int, remedy: str
) -> None:
    (tmp_path / "x").write_bytes(b"old")
    files = Files(watch=FailAt(1, number, kinds={kind}))
    with pytest.raises(UnavailableError, match=remedy) as caught:
        files.publish(tmp_path / "x", b"new")
        files.unlink(tmp_path / "x")
    assert str(tmp_path) in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


def test_F4_a_full_disk_is_named_and_passes_once_space_is_back(tmp_path: Path) -> None:
    disk = ShortDisk(3)
    files = Files(watch=disk)
    with pytest.raises(UnavailableError, match="disk is full"):
        files.publish(tmp_path / "x", b"12345")
    disk.add(10)
    files.publish(tmp_path / "x", b"12345")
    assert (tmp_path / "x").read_bytes() == b"12345"


def test_F4_a_missing_file_stays_a_file_not_found_error(files: Files, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for use in (files.read, files.unlink, files.rmdir, files.list):
        with pytest.raises(FileNotFoundError):
            use(missing)
    with pytest.raises(FileNotFoundError):
        files.rename(missing, tmp_path / "x")
    files.unlink(missing, missing_ok=True)


def test_a_watcher_sees_data_positions_and_targets(tmp_path: Path) -> None:
    seen: list[Effect] = []
    files = Files(watch=seen.append)
    files.publish(tmp_path / "x", b"content")
    files.set_mtime_ms(tmp_path / "x", 5000)
    kinds = [effect.kind for effect in seen]
    assert kinds == ["create", "write", "sync", "rename", "sync_folder", "mtime"]
    write, rename = seen[1], seen[3]
    assert (write.position, write.length, bytes(write.data or b"")) == (0, 7, b"content")
    assert rename.target == tmp_path / "x"
    assert all(effect.mutates for effect in seen)
    files.read(tmp_path / "x")
    assert not any(effect.mutates for effect in seen[6:])


# -- locks -----------------------------------------------------------------------------------------

LOCK = """
import sys
from pathlib import Path
from tidegate.files import Files
from tidegate.errors import ConflictError
try:
    Files().lock(Path(sys.argv[1]), shared=sys.argv[2] == "True", posix=sys.argv[3] == "True")
    print("taken")
except ConflictError as error:
    print("refused", error)
"""


@pytest.mark.parametrize("posix", [False, True], ids=["whole-file", "record"])
@pytest.mark.parametrize(
    ("held_shared", "asked_shared", "outcome"),
    [(False, False, "refused"), (False, True, "refused"), (True, False, "refused"), (True, True, "taken")],
)
def test_a_lock_excludes_other_processes(
    files: Files, tmp_path: Path, posix: bool, held_shared: bool, asked_shared: bool, outcome: str
) -> None:
    lock = files.lock(tmp_path / "lock", shared=held_shared, posix=posix)
    assert run_python(LOCK, tmp_path / "lock", asked_shared, posix).stdout.startswith(outcome)
    lock.release()
    assert not lock.held
    assert run_python(LOCK, tmp_path / "lock", asked_shared, posix).stdout.startswith("taken")


@pytest.mark.parametrize("posix", [False, True], ids=["whole-file", "record"])
def test_a_lock_excludes_a_second_owner_in_this_process(files: Files, tmp_path: Path, posix: bool) -> None:
    with files.lock(tmp_path / "lock", posix=posix) as lock:
        assert lock.held
        with pytest.raises(ConflictError):
            files.lock(tmp_path / "lock", posix=posix)
        with pytest.raises(ConflictError):
            Files().lock(tmp_path / "lock", posix=posix, shared=True)
    files.lock(tmp_path / "lock", posix=posix).release()


@pytest.mark.parametrize("posix", [False, True], ids=["whole-file", "record"])
def test_a_shared_lock_lasts_until_its_last_holder_lets_go(files: Files, tmp_path: Path, posix: bool) -> None:
    one = files.lock(tmp_path / "lock", shared=True, posix=posix)
    two = files.lock(tmp_path / "lock", shared=True, posix=posix)
    one.release()
    one.release()
    assert run_python(LOCK, tmp_path / "lock", False, posix).stdout.startswith("refused")
    two.release()
    assert run_python(LOCK, tmp_path / "lock", False, posix).stdout.startswith("taken")


def test_the_lock_of_a_dead_owner_blocks_nobody(files: Files, tmp_path: Path) -> None:
    for posix in (False, True):
        assert run_python(LOCK, tmp_path / "lock", False, posix).stdout.startswith("taken")
        files.lock(tmp_path / "lock", posix=posix).release()


def test_the_lock_file_stays_when_the_lock_is_released(files: Files, tmp_path: Path) -> None:
    files.lock(tmp_path / "lock").release()
    assert (tmp_path / "lock").exists()


def test_a_lock_is_not_created_where_only_a_look_was_meant(files: Files, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.lock(tmp_path / "lock", create=False)


@pytest.mark.parametrize("posix", [False, True], ids=["whole-file", "record"])
def test_a_forked_child_neither_holds_nor_releases_its_parents_lock(tmp_path: Path, posix: bool) -> None:
    code = """
import os, sys
from pathlib import Path
from tidegate.files import Files
lock = Files().lock(Path(sys.argv[1]), posix=sys.argv[2] == "True")
child = os.fork()
if child == 0:
    held = lock.held
    lock.release()
    os._exit(1 if held else 0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), lock.held, flush=True)
input()
"""
    command = [sys.executable, "-c", code, str(tmp_path / "lock"), str(posix)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline().split() == ["0", "True"]
        assert run_python(LOCK, tmp_path / "lock", False, posix).stdout.startswith("refused")
    finally:
        owner.communicate("\n", timeout=600)


def test_a_file_is_usable_as_a_context_and_by_position_from_several_readers(
    files: Files, tmp_path: Path
) -> None:
    files.publish(tmp_path / "x", b"0123456789")
    with files.open(tmp_path / "x") as one, files.open(tmp_path / "x") as two:
        assert isinstance(one, File)
        assert (one.read_at(5, 2), two.read_at(0, 2), one.read_at(0, 2)) == (b"56", b"01", b"01")


def test_a_file_cut_short_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    """A broker cuts its preallocated indexes to size when it rolls a segment; half of one is no content."""
    path = tmp_path / "index"
    path.write_bytes(b"x" * 100)

    def cut(effect: Effect) -> None:
        if effect.kind == "read" and path.stat().st_size == 100:
            path.write_bytes(b"abc")

    assert Files(watch=cut).read(path) == b"abc"
    sizes = iter([90, 80, 70, 60, 50, 40])
    path.write_bytes(b"x" * 100)
    Files(watch=lambda effect: os.truncate(path, next(sizes)) if effect.kind == "read" else None).read(path)
    assert next(sizes) == 40, "bounded"
