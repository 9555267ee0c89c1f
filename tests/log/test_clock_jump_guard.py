"""The guard against a wall clock that jumps ahead."""

from __future__ import annotations

from tidegate.clock import ManualClock
from tidegate.log.maintenance import TOLERANCE_MS, ClockCheck, ClockJumpGuard

INTERVAL_MS = 300_000
GO = ClockCheck(suspended=False, jump_ms=0)


def guard_of(clock: ManualClock) -> ClockJumpGuard:
    return ClockJumpGuard(clock, hold_ms=INTERVAL_MS)


def leap(clock: ManualClock, by_ms: int) -> None:
    clock.set_now_ms(clock.now_ms() + by_ms)


def test_clocks_that_agree_never_hold() -> None:
    clock = ManualClock()
    guard = guard_of(clock)
    for _ in range(10):
        clock.advance(INTERVAL_MS)
        assert guard.check() == GO


def test_long_but_honest_pause_does_not_hold() -> None:
    clock = ManualClock()
    guard = guard_of(clock)
    clock.advance("30d")
    assert guard.check() == GO


def test_leap_skips_exactly_one_check() -> None:
    clock = ManualClock()
    guard = guard_of(clock)
    clock.advance(INTERVAL_MS)
    leap(clock, TOLERANCE_MS + 1)
    assert guard.check() == ClockCheck(suspended=True, jump_ms=TOLERANCE_MS + 1)
    clock.advance(INTERVAL_MS)
    assert guard.check() == GO


def test_leap_of_an_hour_is_tolerated() -> None:
    clock = ManualClock()
    guard = guard_of(clock)
    leap(clock, TOLERANCE_MS)
    assert guard.check() == GO


def test_looks_in_between_do_not_shorten_the_wait() -> None:
    clock = ManualClock()
    guard = guard_of(clock)
    leap(clock, 10 * TOLERANCE_MS)
    assert guard.check().suspended
    clock.advance(INTERVAL_MS - 1)
    assert guard.check() == ClockCheck(suspended=True, jump_ms=0)
    clock.advance(1)
    assert guard.check() == GO


def test_second_leap_starts_the_wait_anew() -> None:
    clock = ManualClock()
    guard = guard_of(clock)
    leap(clock, 2 * TOLERANCE_MS)
    assert guard.check().suspended
    clock.advance(INTERVAL_MS)
    leap(clock, 3 * TOLERANCE_MS)
    assert guard.check() == ClockCheck(suspended=True, jump_ms=3 * TOLERANCE_MS)
    clock.advance(INTERVAL_MS)
    assert guard.check() == GO


def test_clock_that_goes_back_does_not_hold() -> None:
    clock = ManualClock()
    guard = guard_of(clock)
    leap(clock, -10 * TOLERANCE_MS)
    assert guard.check() == GO
