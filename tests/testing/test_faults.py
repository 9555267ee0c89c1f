"""The watchers that make files fail: that they fail what they say, when they say, and nothing else."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import pytest

from tidegate.errors import UnavailableError
from tidegate.files import Files
from tidegate.testing.faults import (
    Chain,
    CrashAt,
    EffectCounter,
    FailAt,
    FailSync,
    ShortDisk,
    SimulatedCrash,
    count_effects,
    dying_process,
)


def two_writes(folder: Path, files: Files) -> None:
    with files.open(folder / "a", create=True) as file:
        file.write_at(0, b"first ")
        file.sync()
        file.write_at(6, b"second")
        file.sync()
    files.sync_folder(folder)


def test_mutating_effects_are_counted_in_order_and_looks_are_not(tmp_path: Path) -> None:
    counter = EffectCounter()
    files = Files(watch=counter)
    two_writes(tmp_path, files)
    assert files.read(tmp_path / "a") == b"first second"
    kinds = [name.split()[0] for name in counter.names]
    assert kinds == ["create", "write", "sync", "write", "sync", "sync_folder"]
    assert counter.names[1] == "write a"


def test_effects_of_a_script_can_be_counted_by_kind(tmp_path: Path) -> None:
    assert count_effects(lambda files: two_writes(tmp_path, files), {"write"}) == 2


@pytest.mark.parametrize(("n", "left"), [(1, None), (2, b""), (4, b"first "), (6, b"first second")])
def test_a_crash_leaves_exactly_what_was_written_before_it(
    tmp_path: Path, n: int, left: bytes | None
) -> None:
    crash = CrashAt(n)
    with pytest.raises(SimulatedCrash):
        two_writes(tmp_path, Files(watch=crash))
    path = tmp_path / "a"
    assert (path.read_bytes() if path.exists() else None) == left
    assert crash.died_at is not None


def test_a_crash_may_tear_a_write_at_any_byte(tmp_path: Path) -> None:
    with pytest.raises(SimulatedCrash):
        two_writes(tmp_path, Files(watch=CrashAt(4, torn_bytes=2)))
    assert (tmp_path / "a").read_bytes() == b"first se"


def test_a_dead_process_has_no_further_effects_not_even_looks(tmp_path: Path) -> None:
    files = Files(watch=CrashAt(1))
    with pytest.raises(SimulatedCrash):
        two_writes(tmp_path, files)
    with pytest.raises(SimulatedCrash):
        files.list(tmp_path)


def test_a_crash_is_not_an_exception_that_clean_up_code_could_swallow(tmp_path: Path) -> None:
    with pytest.raises(SimulatedCrash), contextlib.suppress(Exception):
        Files(watch=CrashAt(2)).publish(tmp_path / "a", b"x")
    assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"]


def test_the_locks_of_a_dead_process_are_free_again(tmp_path: Path) -> None:
    with dying_process(CrashAt(1)) as files:
        whole = files.lock(tmp_path / "whole")
        record = files.lock(tmp_path / "record", posix=True)
        two_writes(tmp_path, files)
        pytest.fail("it should be dead")
    Files().lock(tmp_path / "whole").release()
    Files().lock(tmp_path / "record", posix=True).release()
    assert not whole.held and not record.held


def test_other_errors_than_death_are_raised(tmp_path: Path) -> None:
    with pytest.raises((UnavailableError, OSError)), dying_process(FailAt(1)) as files:
        two_writes(tmp_path, files)


def test_one_effect_fails_once_and_the_next_attempt_passes(tmp_path: Path) -> None:
    fault = FailAt(2, errno.ENOSPC)
    files = Files(watch=fault)
    with pytest.raises((UnavailableError, OSError)):
        two_writes(tmp_path, files)
    two_writes(tmp_path, files)
    assert fault.fired == 1
    assert (tmp_path / "a").read_bytes() == b"first second"


def test_a_persistent_fault_lasts_until_it_is_lifted(tmp_path: Path) -> None:
    fault = FailAt(2, persistent=True)
    files = Files(watch=fault)
    for _ in range(3):
        with pytest.raises((UnavailableError, OSError)):
            two_writes(tmp_path, files)
    fault.lift()
    two_writes(tmp_path, files)
    assert fault.fired == 3


def test_the_nth_sync_fails_and_poisons_its_file(tmp_path: Path) -> None:
    files = Files(watch=FailSync(1))
    with files.open(tmp_path / "a", create=True) as file:
        file.write_at(0, b"x")
        with pytest.raises((UnavailableError, OSError)):
            file.sync()
        with pytest.raises(UnavailableError, match="earlier sync failed"):
            file.write_at(1, b"y")


def test_a_short_disk_cuts_the_write_that_does_not_fit(tmp_path: Path) -> None:
    files = Files(watch=ShortDisk(8))
    with pytest.raises((UnavailableError, OSError)):
        two_writes(tmp_path, files)
    assert (tmp_path / "a").read_bytes() == b"first se"


def test_overwriting_costs_no_space_and_unlinking_gives_it_back(tmp_path: Path) -> None:
    disk = ShortDisk(10)
    files = Files(watch=disk)
    with files.open(tmp_path / "a", create=True) as file:
        for _ in range(5):
            file.write_at(0, b"12345678")
        with pytest.raises((UnavailableError, OSError)):
            file.write_at(8, b"abc")
    assert disk.budget_bytes == 0
    files.unlink(tmp_path / "a")
    assert disk.budget_bytes == 10
    files.publish(tmp_path / "b", b"0123456789")


def test_chained_watchers_are_asked_in_order(tmp_path: Path) -> None:
    before, after = EffectCounter(), EffectCounter()
    with pytest.raises(SimulatedCrash):
        two_writes(tmp_path, Files(watch=Chain(before, CrashAt(3), after)))
    assert (before.count, after.count) == (3, 2)
