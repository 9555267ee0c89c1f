"""A newer commit is restored beside the one that is read: looks keep what they have, and nothing is left open."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.tables.building.sides import Sides


@dataclass(eq=False)
class View:
    commit: int
    is_closed: bool = False

    def show(self, commit: int) -> None:
        assert not self.is_closed
        self.commit = commit

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


@dataclass
class Made:
    sides: Sides[View] = field(default_factory=Sides)
    views: list[View] = field(default_factory=list)

    def move(self, commit: int) -> None:
        self.sides.move(lambda: self.opened(commit), lambda view: view.show(commit))

    def replace(self, commit: int) -> None:
        self.sides.replace(lambda: self.opened(commit))

    def opened(self, commit: int) -> View:
        self.views.append(View(commit))
        return self.views[-1]

    @property
    def open(self) -> list[View]:
        return [each for each in self.views if not each.is_closed]


def test_two_snapshots_take_turns() -> None:
    made = Made()
    assert made.sides.shown is None
    for commit in range(1, 8):
        made.move(commit)
        with made.sides.held() as shown:
            assert shown.commit == commit
    assert len(made.views) == 2
    made.sides.close()
    assert not made.open


def test_a_failed_move_leaves_what_was_shown() -> None:
    made = Made()
    made.move(1)
    made.move(2)

    def fail(view: View) -> None:
        view.commit = -1
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        made.sides.move(lambda: made.opened(3), fail)
    with made.sides.held() as shown:
        assert shown.commit == 2
    made.move(4)
    with made.sides.held() as shown:
        assert shown.commit == 4
    assert len(made.open) == 2

    def refuse() -> View:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        made.sides.replace(refuse)
    with made.sides.held() as shown:
        assert shown.commit == 4


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
            assert made.sides.shown not in other, "what was replaced never comes back"
        elif step == "replace":
            commit += 1
            other += made.open
            made.replace(commit)
            assert {id(each) for each in other if not each.is_closed} == {id(view) for _, view, _ in looks}
        elif step == "look":
            look = made.sides.held()
            looks.append((look, look.__enter__(), commit))
        elif looks:
            look, _, _ = looks.pop(int(str(step)) % len(looks))
            look.__exit__(None, None, None)
        for _, view, began in looks:
            assert view.commit == began and not view.is_closed
        assert len(made.open) <= 2 + len(looks)
    for look, _, _ in looks:
        look.__exit__(None, None, None)
    assert len(made.open) <= 2
    with made.sides.held() as shown:
        assert shown.commit == commit


def test_threads_look_while_another_moves() -> None:
    made, ended, wrong = Made(), threading.Event(), list[str]()
    made.move(0)

    def look() -> None:
        last = 0
        while not ended.is_set():
            with made.sides.held() as view:
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
    assert not wrong and len(made.open) <= 2
