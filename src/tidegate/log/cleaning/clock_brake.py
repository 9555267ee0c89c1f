"""A brake against a wall clock that leaps: one wrong hour must not age out everything.

Time retention takes the active log segment too, so a clock set a week ahead, even for a moment, would delete
a whole log. Monotonic time cannot leap; the brake compares how far both clocks went between two looks.

Rule: when the wall clock ran ahead of monotonic time by more than an hour between two looks, work that goes
by the wall clock is held until both clocks have agreed for one check interval. So exactly one check is
skipped, and two checks vouch for the new time; another leap starts the wait anew. A clock that goes back
harms nothing.

Thread rule: one brake, one thread.
"""

from __future__ import annotations

from typing import NamedTuple

from tidegate.clock import Clock

TOLERANCE_MS = 3_600_000


class Look(NamedTuple):
    """`held`: wait with such work. `leap_ms`: how far the clock leapt since the last look, or 0."""

    held: bool
    leap_ms: int


class ClockBrake:
    """Look before every piece of work that goes by the wall clock."""

    def __init__(self, clock: Clock, *, hold_ms: int, tolerance_ms: int = TOLERANCE_MS) -> None:
        self._clock = clock
        self._hold_ms = hold_ms
        self._tolerance_ms = tolerance_ms
        self._wall_ms = clock.now_ms()
        self._monotonic_ms = clock.monotonic_ms()
        self._held_until_ms: int | None = None

    def look(self) -> Look:
        wall_ms, monotonic_ms = self._clock.now_ms(), self._clock.monotonic_ms()
        ahead_ms = (wall_ms - self._wall_ms) - (monotonic_ms - self._monotonic_ms)
        self._wall_ms, self._monotonic_ms = wall_ms, monotonic_ms
        if ahead_ms > self._tolerance_ms:
            self._held_until_ms = monotonic_ms + self._hold_ms
            return Look(True, ahead_ms)
        if self._held_until_ms is not None and monotonic_ms < self._held_until_ms:
            return Look(True, 0)
        self._held_until_ms = None
        return Look(False, 0)
