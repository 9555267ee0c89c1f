"""What a power cut may leave: the enumeration must find the broken protocols and pass the sound ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tidegate.errors import InvalidError
from tidegate.files import Files
from tidegate.testing.crash_states import CrashState, Model, Recorder, Recording, crash_states

OLD, NEW = b"old" * 400, b"new" * 500
Protocol = Callable[[Files, Path], None]


def replace_well(files: Files, folder: Path) -> None:
    files.publish(folder / "x", NEW)


def replace_without_file_sync(files: Files, folder: Path) -> None:
    with files.open(folder / "x.tmp", create=True) as file:
        file.write_at(0, NEW)
    files.rename(folder / "x.tmp", folder / "x")
    files.sync_folder(folder)


def replace_without_folder_sync(files: Files, folder: Path) -> None:
    with files.open(folder / "x.tmp", create=True) as file:
        file.write_at(0, NEW)
        file.sync()
    files.rename(folder / "x.tmp", folder / "x")


def replace_in_place(files: Files, folder: Path) -> None:
    with files.open(folder / "x", write=True) as file:
        file.write_at(0, NEW)
        file.sync()


def remove_before_publishing(files: Files, folder: Path) -> None:
    files.unlink(folder / "x")
    files.publish(folder / "x", NEW)


def record(folder: Path, protocol: Protocol) -> Recording:
    (folder / "x").write_bytes(OLD)
    recorder = Recorder(folder)
    protocol(Files(watch=recorder), folder)
    recorder.mark("replaced")
    return recorder.recording


def bad(states: list[CrashState]) -> list[CrashState]:
    """The promise of a replacement: old or new at any time, and new once it was said to be done."""
    allowed = {False: (OLD, NEW), True: (NEW,)}
    return [state for state in states if state.tree.get("x") not in allowed["replaced" in state.marks]]


@pytest.mark.parametrize("model", ["ordered", "weak"])
def test_a_sound_replacement_has_no_bad_state(tmp_path: Path, model: Model) -> None:
    states = list(crash_states(record(tmp_path, replace_well), model=model))
    assert len(states) >= 10
    assert bad(states) == []


@pytest.mark.parametrize("model", ["ordered", "weak"])
@pytest.mark.parametrize(
    "protocol",
    [replace_without_file_sync, replace_without_folder_sync, replace_in_place, remove_before_publishing],
)
def test_each_broken_replacement_is_found_out(tmp_path: Path, protocol: Protocol, model: Model) -> None:
    assert bad(list(crash_states(record(tmp_path, protocol), model=model)))


@pytest.mark.parametrize("model", ["ordered", "weak"])
def test_every_barrier_of_a_replacement_is_needed_in_the_weak_model(tmp_path: Path, model: Model) -> None:
    recording = record(tmp_path, replace_well)
    barriers = recording.barriers()
    assert [recording.describe(at).split()[0] for at in barriers] == ["sync", "sync"]
    needed = [at for at in barriers if bad(list(crash_states(recording.without(at), model=model)))]
    assert needed == barriers


def test_a_name_published_before_its_content_is_safe_only_in_the_ordered_model(tmp_path: Path) -> None:
    """Two files, one folder sync for both, none between: the pointer may survive what it points to."""

    def publish_both(files: Files, folder: Path) -> None:
        files.publish(folder / "run", b"content", sync=False)
        with files.open(folder / "run", write=True) as file:
            file.sync()
        files.publish(folder / "x", NEW)

    recording = record(tmp_path, publish_both)

    def dangling(model: Model) -> int:
        states = crash_states(recording, model=model)
        return sum(state.tree["x"] == NEW and state.tree.get("run") != b"content" for state in states)

    assert dangling("ordered") == 0
    assert dangling("weak") > 0


def test_an_unsynced_append_may_be_kept_lost_torn_or_zeros(tmp_path: Path) -> None:
    def append(files: Files, folder: Path) -> None:
        with files.open(folder / "x", write=True) as file:
            file.write_at(len(OLD), NEW)

    found = {state.tree["x"][len(OLD) :] for state in crash_states(record(tmp_path, append), model="weak")}
    assert {b"", NEW, bytes(len(NEW)), NEW[:1], NEW[:-1]} <= found
    assert any(0 < len(tail) < len(NEW) and (len(OLD) + len(tail)) % 512 == 0 for tail in found)


def test_a_file_keeps_its_identity_through_renames_while_it_is_open(tmp_path: Path) -> None:
    def rename_then_write(files: Files, folder: Path) -> None:
        with files.open(folder / "x", write=True) as file:
            files.rename(folder / "x", folder / "y")
            file.write_at(0, NEW)
            file.sync()
        files.sync_folder(folder)

    last = list(crash_states(record(tmp_path, rename_then_write)))[-1]
    assert last.tree == {"y": NEW}


def test_a_renamed_folder_takes_its_files_along(tmp_path: Path) -> None:
    (tmp_path / "topic-0").mkdir()
    (tmp_path / "topic-0" / "0.log").write_bytes(b"bytes")

    def delete_topic(files: Files, folder: Path) -> None:
        files.rename(folder / "topic-0", folder / "topic-0.gone-delete")

    trees = [state.tree for state in crash_states(record(tmp_path, delete_topic))]
    assert {"x": OLD, "topic-0": None, "topic-0/0.log": b"bytes"} in trees
    assert {"x": OLD, "topic-0.gone-delete": None, "topic-0.gone-delete/0.log": b"bytes"} in trees


def test_marks_tell_what_had_been_promised(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    files = Files(watch=recorder)
    recorder.mark("started")
    files.publish(tmp_path / "a", b"1")
    recorder.mark("a is safe")
    files.publish(tmp_path / "b", b"2")
    for state in crash_states(recorder.recording):
        if "a is safe" in state.marks:
            assert state.tree["a"] == b"1", state.story
    assert {state.marks for state in crash_states(recorder.recording)} == {
        (),
        ("started",),
        ("started", "a is safe"),
    } - {()}


def test_a_state_can_be_laid_out_in_a_folder(tmp_path: Path) -> None:
    state = CrashState(0, {"p-0": None, "p-0/0.log": b"bytes", "x": b""}, (), "")
    folder = state.write_to(tmp_path / "out")
    assert (folder / "p-0" / "0.log").read_bytes() == b"bytes"
    assert (folder / "x").read_bytes() == b""


def test_the_number_of_states_stays_linear_where_a_product_would_explode(tmp_path: Path) -> None:
    def many_files(files: Files, folder: Path) -> None:
        for number in range(12):
            with files.open(folder / f"f{number}", create=True) as file:
                file.write_at(0, NEW)

    assert len(list(crash_states(record(tmp_path, many_files), model="weak"))) < 8_000


def test_only_the_asked_points_are_enumerated(tmp_path: Path) -> None:
    recording = record(tmp_path, replace_well)
    assert {state.after for state in crash_states(recording, points=[0])} == {0}


def test_a_sync_to_leave_out_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="not a sync"):
        record(tmp_path, replace_well).without(0)
