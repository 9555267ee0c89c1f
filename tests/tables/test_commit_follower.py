"""A newer commit is restored beside the one that is read: looks keep what they have, and nothing is left open."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.clock import ManualClock
from tidegate.errors import CommitGoneError, CorruptError, InvalidError, UnavailableError
from tidegate.tables.commits import LOOK_AGAIN_MS, CommitFollower


@dataclass(eq=False)
class View:
    commit: int
    shape: int
    is_closed: bool = False

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


@dataclass
class Made:
    """A table whose commits are numbers, and the follower of it."""

    views: list[View] = field(default_factory=list)
    commit: int | None = None
    shape: int = 0
    kept: int = 0
    fails: Callable[[View | None], None] = lambda _: None
    name: str = "t"

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        self.follower: CommitFollower[tuple[int, int], View] = CommitFollower(self, self.clock)

    def newest(self) -> tuple[int, int] | None:
        return None if self.commit is None else (self.shape, self.commit)

    def open(self, commit: tuple[int, int]) -> View:
        self.fails(None)
        self.views.append(View(commit[1], commit[0]))
        return self.views[-1]

    def fits(self, view: View, commit: tuple[int, int]) -> bool:
        return view.shape == commit[0]

    def show(self, view: View, commit: tuple[int, int]) -> None:
        assert not view.is_closed and view.shape == commit[0]
        view.commit = -1
        self.fails(view)
        view.commit = commit[1]

    def gone(self, commit: tuple[int, int]) -> str:
        return "" if commit[1] >= self.kept else f"commit {commit[1]} is gone"

    def move(self, commit: int) -> None:
        self.commit = commit
        self.follower.refresh()

    def replace(self, commit: int) -> None:
        self.shape += 1
        self.move(commit)

    @property
    def shown(self) -> int:
        with self.follower.pinned() as view:
            return view.commit

    @property
    def open_views(self) -> list[View]:
        return [each for each in self.views if not each.is_closed]


def test_two_snapshots_take_turns() -> None:
    made = Made()
    assert made.follower.current is None
    for commit in range(1, 8):
        made.move(commit)
        assert made.shown == commit
    assert len(made.views) == 2
    made.follower.close()
    assert not made.open_views


def test_a_failed_swap_leaves_what_was_shown() -> None:
    made = Made()
    made.move(1)
    made.move(2)

    def fail(_: View | None) -> None:
        raise OSError("gone")

    made.fails = fail
    with pytest.raises(OSError, match="gone"):
        made.move(3)
    assert made.shown == 2
    made.fails = lambda _: None
    made.move(4)
    assert made.shown == 4 and len(made.open_views) == 2
    made.fails = fail
    with pytest.raises(OSError, match="gone"):
        made.replace(5)
    assert made.shown == 4


def test_a_newer_commit_is_looked_for_ten_times_a_second() -> None:
    made = Made()
    made.move(1)
    made.commit = 2
    assert made.shown == 1
    made.clock.advance(LOOK_AGAIN_MS)
    assert made.shown == 2
    with made.follower.pinned(refresh=True) as view:
        assert view.commit == 2


def test_without_a_commit_it_says_so_and_after_the_end_too() -> None:
    made = Made()
    with pytest.raises(UnavailableError, match="table t has no commit yet"):
        made.follower.refresh()
    made.move(1)
    made.follower.close()
    made.follower.close()
    with pytest.raises(InvalidError, match="table t is closed"):
        made.follower.refresh()


def test_what_is_missing_of_a_commit_that_is_not_kept_is_told_from_damage() -> None:
    made = Made()
    made.move(1)
    with pytest.raises(CorruptError, match="half a file"), made.follower.pinned():
        raise CorruptError("half a file")
    made.kept = 2
    with pytest.raises(CommitGoneError, match="commit 1 is gone"), made.follower.pinned():
        raise CorruptError("no file")


def test_a_commit_that_is_collected_while_it_is_opened_is_passed_over() -> None:
    made = Made()

    def collected(_: View | None) -> None:
        if made.commit == 1:
            made.commit = 2
            raise CorruptError("no file")

    made.fails = collected
    made.move(1)
    assert made.shown == 2

    def always(_: View | None) -> None:
        made.commit = (made.commit or 0) + 1
        raise CorruptError("no file")

    made.fails = always
    with pytest.raises(UnavailableError, match="commits faster than it can be opened"):
        made.move(7)

    def damaged(_: View | None) -> None:
        raise CorruptError("half a file")

    made.fails = damaged
    with pytest.raises(CorruptError, match="half a file"):
        made.follower.refresh()


@given(st.lists(st.one_of(st.sampled_from(["move", "replace", "look"]), st.integers(0, 5)), max_size=60))
def test_looks_that_overlap_moves_see_one_commit(steps: list[object]) -> None:
    """D1 and D3, however looks and moves lie: a number ends the look of that place among those that last."""
    made, commit, other = Made(), 1, list[View]()
    made.move(commit)
    looks = []
    for step in steps:
        if step == "move":
            commit += 1
            made.move(commit)
            assert made.follower.current not in other, "what was replaced never comes back"
        elif step == "replace":
            commit += 1
            other += made.open_views
            made.replace(commit)
            assert {id(each) for each in other if not each.is_closed} == {id(view) for _, view, _ in looks}
        elif step == "look":
            look = made.follower.pinned()
            looks.append((look, look.__enter__(), commit))
        elif looks:
            look, _, _ = looks.pop(int(str(step)) % len(looks))
            look.__exit__(None, None, None)
        for _, view, began in looks:
            assert view.commit == began and not view.is_closed
        assert len(made.open_views) <= 2 + len(looks)
    for look, _, _ in looks:
        look.__exit__(None, None, None)
    assert len(made.open_views) <= 2
    with made.follower.pinned() as shown:
        assert shown.commit == commit


def test_threads_look_while_another_moves() -> None:
    made, ended, wrong = Made(), threading.Event(), list[str]()
    made.move(0)

    def look() -> None:
        last = 0
        while not ended.is_set():
            with made.follower.pinned() as view:
                commit = view.commit
                if commit < last or view.is_closed or view.commit != commit:
                    wrong.append(f"{commit} after {last}")
                last = commit

    threads = [threading.Thread(target=look) for _ in range(3)]
    for each in threads:
        each.start()
    for commit in range(1, 2000):
        made.move(commit)
    ended.set()
    for each in threads:
        each.join(300)
    assert not wrong and len(made.open_views) <= 2
