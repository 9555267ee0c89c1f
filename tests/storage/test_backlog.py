"""The backlog: first come first served, no lost wake-up, no hang, and exactly what was accepted and not pruned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threads import Beside, until
from tidegate.clock import Clock, ManualClock, SystemClock
from tidegate.errors import InternalError, InvalidError, OverloadError
from tidegate.storage.memory.backlog import BacklogBudget

NEVER_MS = 600_000  # longer than any test waits: who needs it is found hanging


def backlog_of(clock: Clock | None = None, **changes: Any) -> BacklogBudget:
    limits = {"limit_bytes": 100, "largest_bytes": 1000, "timeout_ms": NEVER_MS} | changes
    return BacklogBudget(clock or ManualClock(), **limits)


def fits(backlog: BacklogBudget, nbytes: int, *, task: str = "") -> bool:
    """Take room if there is some now."""
    try:
        backlog.acquire(nbytes, 0, task=task)
    except OverloadError:
        return False
    return True


@pytest.mark.parametrize("sizes", [pytest.param([90, 80, 70, 60, 55], id="WS-T51")])
def test_waiters_proceed_in_the_order_they_came_as_room_is_made(sizes: list[int]) -> None:
    """Sizes fall, and no two fit together: were it not for the line, a later and smaller one could go first."""
    backlog = backlog_of(SystemClock())
    backlog.acquire(50, task="slow")
    served: list[int] = []

    def take(nbytes: int) -> None:
        backlog.acquire(nbytes, task="fast")
        served.append(nbytes)

    waiters = []
    for number, nbytes in enumerate(sizes):
        waiters.append(Beside(lambda nbytes=nbytes: take(nbytes)))
        until(lambda number=number: backlog.waiting == number + 1)
    assert not fits(backlog, 1, task="late"), "nobody overtakes those who wait, though there is room"
    backlog.release(50, task="slow")
    for number, nbytes in enumerate(sizes):
        until(lambda number=number: len(served) > number)
        assert served == sizes[: number + 1]
        backlog.release(nbytes, task="fast")
    for waiter in waiters:
        waiter.result()
    assert backlog.waits == len(sizes) + 1, "the late one waited too, for no time"
    assert backlog.waiting == backlog.used == 0


def test_room_for_the_second_does_not_help_it_past_a_large_first() -> None:
    """WS-T51: no starvation of large requests."""
    backlog = backlog_of(SystemClock())
    backlog.acquire(90)
    large = Beside(lambda: backlog.acquire(80))
    until(lambda: backlog.waiting == 1)
    small = Beside(lambda: backlog.acquire(10))
    until(lambda: backlog.waiting == 2)
    backlog.release(40)
    assert backlog.waiting == 2 and backlog.used == 50
    backlog.release(40)
    large.result()
    small.result()
    assert backlog.used == 100


@pytest.mark.parametrize("races", [pytest.param(1000, id="WS-T52")])
def test_a_release_between_the_test_and_the_sleep_of_a_waiter_is_never_lost(races: int) -> None:
    """Taker and giver meet at every point of each other; a lost wake-up would end in a timeout."""
    backlog = backlog_of(SystemClock(), limit_bytes=10)
    backlog.acquire(10)
    start = threading.Barrier(2)

    def take() -> None:
        for _ in range(races):
            start.wait()
            backlog.acquire(10)

    taker = Beside(take)
    for _ in range(races):
        start.wait()
        backlog.release(10)
        # the taker has it, or is about to: either way it comes out with it
    taker.result()
    assert backlog.used == 10 and backlog.waiting == 0


class MeddlingClock(SystemClock):
    """Lets another thread act at the moment between a waiter's failed test and its sleep."""

    def __init__(self) -> None:
        self.meddler: Beside[None] | None = None
        self.act: Callable[[], None] | None = None

    def monotonic_ms(self) -> int:
        act, self.act = self.act, None
        if act is not None:
            self.meddler = Beside(act)
            threading.Event().wait(0.05)  # time enough to slip in, were the lock not held
        return super().monotonic_ms()


def test_a_release_at_the_worst_moment_wakes_the_waiter() -> None:
    """WS-T52, aimed: the release comes right after the waiter found no room."""
    clock = MeddlingClock()
    backlog = backlog_of(clock)
    backlog.acquire(100)
    clock.act = lambda: backlog.release(100)
    Beside(lambda: backlog.acquire(70)).result()
    assert clock.meddler is not None
    clock.meddler.result()
    assert backlog.used == 70


def test_the_one_who_gives_up_hands_the_room_on() -> None:
    """WS-T52: room made for a head that timed out goes to the next in line, not to nobody."""
    backlog = backlog_of(SystemClock())
    backlog.acquire(50)
    head = Beside(lambda: backlog.acquire(90, timeout_ms=200))
    until(lambda: backlog.waiting == 1)
    second = Beside(lambda: backlog.acquire(50))
    with pytest.raises(OverloadError):
        head.result()
    second.result()
    assert backlog.used == 100


@pytest.mark.parametrize("nbytes", [pytest.param(101, id="WS-T53"), pytest.param(1000, id="WS-T53-largest")])
def test_more_than_the_limit_is_admitted_alone(nbytes: int) -> None:
    backlog = backlog_of(SystemClock())
    backlog.acquire(1, task="other")
    large = Beside(lambda: backlog.acquire(nbytes, task="t"))
    until(lambda: backlog.waiting == 1)
    assert backlog.used == 1
    backlog.release(1, task="other")
    large.result()
    assert backlog.used == nbytes
    assert not fits(backlog, 1)
    backlog.release(nbytes, task="t")
    assert fits(backlog, 100)


def test_more_than_memory_can_ever_hold_is_refused_at_once() -> None:
    backlog = backlog_of()
    with pytest.raises(InvalidError, match="memory_ceiling_bytes"):
        backlog.acquire(1001, task="t")
    assert backlog.used == 0


@pytest.mark.parametrize(
    "others", [pytest.param(0, id="WS-T55"), pytest.param(1, id="WS-T55-another-task-may-prune")]
)
def test_when_nobody_can_ever_prune_the_waiter_is_told_why(others: int) -> None:
    clock = ManualClock()
    backlog = backlog_of(clock)
    backlog.acquire(60, task="window")
    if others:
        backlog.acquire(30, task="other")
    backlog.nothing_left_to_prune("window")
    with pytest.raises(OverloadError) as caught:
        backlog.acquire(50, task="window")
    if others:
        assert caught.value.reason == "backlog_full" and clock.monotonic_ms() == NEVER_MS
    else:
        assert caught.value.reason == "retention_exceeds_backlog" and clock.monotonic_ms() == 0
        assert "backlog_limit_bytes" in str(caught.value) and "retention" in str(caught.value)


@pytest.mark.parametrize(
    "progress", [pytest.param("release", id="WS-T55-release"), pytest.param("acquire", id="WS-T55-acquire")]
)
def test_progress_takes_the_word_back(progress: str) -> None:
    backlog = backlog_of(ManualClock())
    backlog.acquire(60, task="window")
    backlog.nothing_left_to_prune("window")
    if progress == "release":
        backlog.release(1, task="window")
    else:
        backlog.acquire(1, task="window")
    with pytest.raises(OverloadError) as caught:
        backlog.acquire(99, task="window")
    assert caught.value.reason == "backlog_full"


def test_the_word_reaches_those_who_wait_already() -> None:
    """WS-T55: declared by another thread while two wait; both end at once, long before their timeout."""
    backlog = backlog_of(SystemClock())
    backlog.acquire(100, task="window")
    waiters = [Beside(lambda: backlog.acquire(10, task="window")) for _ in range(2)]
    until(lambda: backlog.waiting == 2)
    backlog.nothing_left_to_prune("window")
    for waiter in waiters:
        with pytest.raises(OverloadError) as caught:
            waiter.result()
        assert caught.value.reason == "retention_exceeds_backlog"
    assert backlog.waiting == 0 and backlog.used == 100


def test_when_all_who_could_make_room_wait_themselves_they_are_told_at_once() -> None:
    """Three jobs on two threads: one waits while the other works; when that one waits too, nobody is left."""
    backlog = backlog_of(SystemClock())
    backlog.expect_jobs(2, 3)
    backlog.acquire(60, task="a")
    backlog.acquire(40, task="b")
    first = Beside(lambda: backlog.acquire(10, task="a"))
    until(lambda: backlog.waiting == 1)
    backlog.job_done()  # b's thread goes on with the third job
    assert backlog.waiting == 1 and not first.is_done
    with pytest.raises(OverloadError) as caught:
        backlog.acquire(10, task="c")
    assert caught.value.reason == "retention_exceeds_backlog"
    backlog.job_done()  # and fails: the first is the only one left
    with pytest.raises(OverloadError) as caught:
        first.result()
    assert caught.value.reason == "retention_exceeds_backlog"
    assert backlog.waiting == 0 and backlog.used == 100


def test_room_that_a_failed_job_gives_back_is_for_those_who_wait() -> None:
    backlog = backlog_of(SystemClock())
    backlog.expect_jobs(2, 2)
    backlog.acquire(60, task="a")
    backlog.acquire(40, task="b")
    first = Beside(lambda: backlog.acquire(10, task="a"))
    until(lambda: backlog.waiting == 1)
    with pytest.raises(OverloadError):
        backlog.acquire(10, task="b")
    backlog.drop("b")
    backlog.job_done()
    first.result()
    assert backlog.used == 70


def test_a_wait_is_bounded_by_the_clock_and_says_what_to_do() -> None:
    clock = ManualClock()
    backlog = backlog_of(clock, timeout_ms=5000)
    backlog.acquire(100)
    with pytest.raises(OverloadError, match="raise backlog_limit_bytes") as caught:
        backlog.acquire(1)
    assert caught.value.reason == "backlog_full"
    assert (clock.monotonic_ms(), backlog.used, backlog.waiting) == (5000, 100, 0)


def test_a_waiter_holds_no_lock_that_others_need() -> None:
    """WS-INV-16: while one waits, everybody else reads, forces, releases and is told things."""
    backlog = backlog_of(SystemClock())
    backlog.acquire(100, task="a")
    waiter = Beside(lambda: backlog.acquire(50, task="b"))
    until(lambda: backlog.waiting == 1)
    backlog.force(10, task="c")
    assert (backlog.used, backlog.used_by("c")) == (110, 10)
    backlog.release(60, task="a")
    waiter.result()
    assert backlog.used == 100


@pytest.mark.parametrize(
    ("task", "nbytes"),
    [
        pytest.param("a", 11, id="WS-INV-14-too-much"),
        pytest.param("b", 1, id="WS-INV-14-another-task"),
        pytest.param("a", -1, id="WS-INV-14-negative"),
    ],
)
def test_an_over_release_raises_and_changes_nothing(task: str, nbytes: int) -> None:
    backlog = backlog_of()
    backlog.acquire(10, task="a")
    backlog.acquire(10, task="c")
    with pytest.raises(InternalError, match=f"task '{task}'" if nbytes > 0 else "never negative"):
        backlog.release(nbytes, task=task)
    assert backlog.used == 20


def test_nothing_costs_nothing_even_when_full() -> None:
    backlog = backlog_of()
    backlog.acquire(100)
    backlog.acquire(0)
    backlog.release(0, task="unknown")
    assert fits(backlog, 0) and backlog.used == 100


def test_restored_rows_are_charged_without_waiting_and_a_dropped_task_gives_all_back() -> None:
    backlog = backlog_of(SystemClock())
    backlog.force(150, task="restored")
    waiter = Beside(lambda: backlog.acquire(5, task="other"))
    until(lambda: backlog.waiting == 1)
    assert backlog.drop("restored") == 150
    waiter.result()
    assert backlog.used == backlog.used_by("other") == 5


STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 130), st.integers(0, 3)), max_size=60)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_used_is_what_was_taken_and_not_given_back(steps: list[tuple[str, int, int]]) -> None:
    """WS-INV-14 against a plain dict."""
    backlog = backlog_of()
    model: dict[str, int] = {}
    for task, nbytes, action in steps:
        held, used = model.get(task, 0), sum(model.values())
        if action == 0:
            expected = nbytes == 0 or used == 0 or used + nbytes <= 100
            assert fits(backlog, nbytes, task=task) == expected
            model[task] = held + nbytes if expected else held
        elif action == 1:
            backlog.force(nbytes, task=task)
            model[task] = held + nbytes
        elif action == 2 and nbytes <= held:
            backlog.release(nbytes, task=task)
            model[task] = held - nbytes
        elif action == 3 and nbytes < 20:
            assert backlog.drop(task) == held
            model[task] = 0
        assert backlog.used == sum(model.values())
        assert all(backlog.used_by(task) == value for task, value in model.items())
