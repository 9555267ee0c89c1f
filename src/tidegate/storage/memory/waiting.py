"""Waiting in line: first come, first served, for at most so long.

Pool, backlog and scratch each have one `Line`. Whoever cannot be admitted at once joins its end and only the
head is ever woken, so nobody overtakes and a release wakes one thread instead of all.

W1  no lost wake-up: a waiter holds the lock from its failed test until the moment it sleeps, and whoever makes
    room holds the lock while waking.
W2  whoever leaves the line, admitted or not, wakes the next head: room made for one that gave up is not lost.
W3  time is the clock's: the bound is counted in its monotonic milliseconds. On a `ManualClock` nothing sleeps:
    the time passes at once, as every bounded wait does on that clock.

Safe from any thread. `admit`, `refuse` and the caller of `stir` run under the line's lock and must be short.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from tidegate.clock import Clock


class Line:
    """One lock, and the threads that wait for what it guards."""

    def __init__(self, clock: Clock) -> None:
        self.lock = threading.Lock()
        self._clock = clock
        self._waiting: deque[threading.Condition] = deque()

    def __len__(self) -> int:
        """How many wait now."""
        return len(self._waiting)

    def enter(
        self, admit: Callable[[], bool], timeout_ms: int, *, refuse: Callable[[], None] | None = None
    ) -> bool:
        """Wait, with the lock held, until `admit` says yes; False when the time is over.

        `admit` takes what it asks for when it answers True. `refuse` is asked before every sleep and may raise
        to end a wait that has become hopeless.
        """
        if not self._waiting and admit():
            return True
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        mine = threading.Condition(self.lock)
        self._waiting.append(mine)
        try:
            while True:
                if self._waiting[0] is mine and admit():
                    return True
                if refuse is not None:
                    refuse()
                left_ms = deadline_ms - self._clock.monotonic_ms()
                if left_ms <= 0:
                    return False
                self._clock.wait_ms(mine, left_ms)
        finally:
            self._waiting.remove(mine)
            self.stir()

    def stir(self) -> None:
        """Wake the head of the line; call it with the lock held whenever there may be more room."""
        if self._waiting:
            self._waiting[0].notify()

    def stir_all(self) -> None:
        """Wake everybody, with the lock held: something changed that ends waits out of turn."""
        for each in self._waiting:
            each.notify()
