"""When later work runs: by hand, or on one background thread that hides no error."""

from __future__ import annotations

import threading

import pytest

from tidegate.clock import ManualClock, SystemClock
from tidegate.scheduling import ManualScheduler, ThreadScheduler

WAIT_S = 300


def test_nothing_runs_before_it_is_due_and_due_things_run_in_order() -> None:
    clock, ran = ManualClock(), []
    scheduler = ManualScheduler(clock)
    scheduler.after(20, lambda: ran.append("late"), "late")
    scheduler.after(10, lambda: ran.append("early"), "early")
    assert scheduler.run_due() == []
    clock.advance(9)
    assert scheduler.run_due() == []
    clock.advance(1)
    assert scheduler.run_due() == ["early"]
    clock.advance(100)
    assert scheduler.run_due() == ["late"]
    assert ran == ["early", "late"]
    assert scheduler.next_due_ms() is None


def test_actions_due_at_the_same_time_run_in_the_order_they_were_given() -> None:
    clock = ManualClock()
    scheduler = ManualScheduler(clock)
    for name in "cab":
        scheduler.after(5, lambda: None, name)
    clock.advance(5)
    assert scheduler.run_due() == ["c", "a", "b"]


def test_a_repeating_action_keeps_its_rate_after_its_initial_delay() -> None:
    clock, at = ManualClock(), []
    scheduler = ManualScheduler(clock)
    scheduler.every(300, lambda: at.append(clock.monotonic_ms()), "check", initial_delay_ms=30)
    for _ in range(700):
        clock.advance(1)
        scheduler.run_due()
    assert at == [30, 330, 630]


def test_missed_turns_of_a_repeating_action_are_made_up() -> None:
    clock, turns = ManualClock(), []
    scheduler = ManualScheduler(clock)
    scheduler.every(10, lambda: turns.append(1), "tick", initial_delay_ms=10)
    clock.advance(35)
    assert scheduler.run_due() == ["tick"] * 3
    assert scheduler.next_due_ms() == 40


def test_a_jump_of_the_wall_clock_does_not_make_anything_due() -> None:
    clock = ManualClock()
    scheduler = ManualScheduler(clock)
    scheduler.after(10, lambda: None, "later")
    clock.set_now_ms(clock.now_ms() + 10**9)
    assert scheduler.run_due() == []


def test_a_cancelled_action_never_runs_again() -> None:
    clock, ran = ManualClock(), []
    scheduler = ManualScheduler(clock)
    once = scheduler.after(1, lambda: ran.append("once"), "once")
    often = scheduler.every(1, lambda: ran.append("often"), "often", initial_delay_ms=1)
    once.cancel()
    clock.advance(1)
    scheduler.run_due()
    often.cancel()
    clock.advance(10)
    scheduler.run_due()
    assert ran == ["often"]
    assert scheduler.next_due_ms() is None


def test_an_action_may_schedule_another_that_is_already_due() -> None:
    clock = ManualClock()
    scheduler = ManualScheduler(clock)
    scheduler.after(0, lambda: scheduler.after(0, lambda: None, "second"), "first")
    assert scheduler.run_due() == ["first", "second"]


def test_an_error_of_an_action_reaches_whoever_drives() -> None:
    clock = ManualClock()
    scheduler = ManualScheduler(clock)

    def fail() -> None:
        raise OSError("disk gone")

    scheduler.after(0, fail, "fail")
    with pytest.raises(OSError, match="disk gone"):
        scheduler.run_due()


def test_a_closed_manual_scheduler_runs_nothing() -> None:
    clock = ManualClock()
    scheduler = ManualScheduler(clock)
    scheduler.after(0, lambda: None, "never")
    scheduler.close()
    assert scheduler.run_due() == []


def test_the_thread_runs_one_off_and_repeating_actions() -> None:
    once, often = threading.Event(), threading.Semaphore(0)
    scheduler = ThreadScheduler(SystemClock())
    scheduler.after(1, once.set, "once")
    scheduler.every(1, often.release, "often")
    assert once.wait(WAIT_S)
    for _ in range(3):
        assert often.acquire(timeout=WAIT_S)
    scheduler.close()


def test_an_earlier_action_given_later_wakes_the_thread() -> None:
    ran = threading.Event()
    scheduler = ThreadScheduler(SystemClock())
    scheduler.after(3_600_000, lambda: None, "in an hour")
    scheduler.after(1, ran.set, "now")
    assert ran.wait(WAIT_S)
    scheduler.close()


def test_closing_does_not_wait_for_far_away_actions_and_runs_none_of_them() -> None:
    ran = threading.Event()
    scheduler = ThreadScheduler(SystemClock())
    scheduler.after(3_600_000, ran.set, "in an hour")
    scheduler.close()
    assert not ran.is_set()


def test_what_stopped_the_thread_is_raised_on_closing() -> None:
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise OSError("disk gone")

    scheduler = ThreadScheduler(SystemClock())
    scheduler.after(0, fail, "fail")
    assert failed.wait(WAIT_S)
    with pytest.raises(OSError, match="disk gone"):
        scheduler.close()
    assert isinstance(scheduler.error, OSError)
