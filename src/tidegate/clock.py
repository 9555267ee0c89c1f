"""Time as a port: nothing else in Tidegate may ask the operating system what time it is.

`now_ms` is wall-clock time in epoch milliseconds and may jump; `monotonic_ms` never goes back and is only
good for differences.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from tidegate.durations import DurationLike, duration_ms


class Clock(Protocol):
    """What a component may know about time."""

    def now_ms(self) -> int: ...

    def monotonic_ms(self) -> int: ...

    def sleep_ms(self, duration_ms: int) -> None: ...

    def wait_ms(self, condition: threading.Condition, duration_ms: int) -> None:
        """Sleep on a held condition until it is notified or the time is over."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def sleep_ms(self, duration_ms: int) -> None:
        time.sleep(max(0, duration_ms) / 1000)

    def wait_ms(self, condition: threading.Condition, duration_ms: int) -> None:
        condition.wait(max(0, duration_ms) / 1000)


class ManualClock:
    """A clock that moves only when told to. `sleep_ms` advances it, so bounded waits end at once.

    Safe to share between threads.
    """

    def __init__(self, now_ms: int = 1_767_225_600_000) -> None:  # 2026-01-01T00:00:00Z
        self._lock = threading.Lock()
        self._now_ms = now_ms
        self._monotonic_ms = 0

    def now_ms(self) -> int:
        with self._lock:
            return self._now_ms

    def monotonic_ms(self) -> int:
        with self._lock:
            return self._monotonic_ms

    def sleep_ms(self, duration_ms: int) -> None:
        self.advance(max(0, duration_ms))

    def wait_ms(self, condition: threading.Condition, duration_ms: int) -> None:
        """Let the whole time pass at once, with the condition free meanwhile."""
        condition.release()
        try:
            self.sleep_ms(duration_ms)
        finally:
            condition.acquire()

    def advance(self, by: int | DurationLike) -> None:
        """Let time pass, on both clocks; a number is milliseconds, as everywhere in a clock."""
        step = by if isinstance(by, int) else duration_ms(by)
        with self._lock:
            self._now_ms += step
            self._monotonic_ms += step

    def set_now_ms(self, now_ms: int) -> None:
        """Make the wall clock jump, forwards or back; monotonic time does not move."""
        with self._lock:
            self._now_ms = now_ms
