"""The brake against a wall clock that leaps ahead."""

from __future__ import annotations

from tidegate.clock import ManualClock
from tidegate.log.cleaning.clock_brake import TOLERANCE_MS, ClockBrake, Look

INTERVAL_MS = 300_000
GO = Look(held=False, leap_ms=0)


def brake(clock: ManualClock) -> ClockBrake:
    return ClockBrake(clock, hold_ms=INTERVAL_MS)


def leap(clock: ManualClock, by_ms: int) -> None:
    clock.set_now_ms(clock.now_ms() + by_ms)


def test_clocks_that_agree_never_hold() -> None:
    clock = ManualClock()
    held = brake(clock)
    for _ in range(10):
        clock.advance(INTERVAL_MS)
        assert held.look() == GO


def test_long_but_honest_pause_does_not_hold() -> None:
    clock = ManualClock()
    held = brake(clock)
    clock.advance("30d")
    assert held.look() == GO


def test_leap_skips_exactly_one_check() -> None:
    clock = ManualClock()
    held = brake(clock)
    clock.advance(INTERVAL_MS)
    leap(clock, TOLERANCE_MS + 1)
    assert held.look() == Look(held=True, leap_ms=TOLERANCE_MS + 1)
    clock.advance(INTERVAL_MS)
    assert held.look() == GO


def test_leap_of_an_hour_is_tolerated() -> None:
    clock = ManualClock()
    held = brake(clock)
    leap(clock, TOLERANCE_MS)
    assert held.look() == GO


def test_looks_in_between_do_not_shorten_the_wait() -> None:
    clock = ManualClock()
    held = brake(clock)
    leap(clock, 10 * TOLERANCE_MS)
    assert held.look().held
    clock.advance(INTERVAL_MS - 1)
    assert held.look() == Look(held=True, leap_ms=0)
    clock.advance(1)
    assert held.look() == GO


def test_second_leap_starts_the_wait_anew() -> None:
    clock = ManualClock()
    held = brake(clock)
    leap(clock, 2 * TOLERANCE_MS)
    assert held.look().held
    clock.advance(INTERVAL_MS)
    leap(clock, 3 * TOLERANCE_MS)
    assert held.look() == Look(held=True, leap_ms=3 * TOLERANCE_MS)
    clock.advance(INTERVAL_MS)
    assert held.look() == GO


def test_clock_that_goes_back_does_not_hold() -> None:
    clock = ManualClock()
    held = brake(clock)
    leap(clock, -10 * TOLERANCE_MS)
    assert held.look() == GO
