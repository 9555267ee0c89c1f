"""A FIFO wait queue with timeouts.

Pool, backlog and scratch each have one `Line`. A thread that cannot be admitted at once joins its end, and only the
head is woken, so no thread overtakes and a release wakes one thread instead of all.

W1  no lost wake-up: a waiter holds the lock from its failed test until it sleeps, and a release holds the lock while
    waking.
W2  a thread that leaves the line, admitted or not, wakes the next head, so that room is not lost after a timeout.
W3  timeouts use the clock's monotonic milliseconds. On a `ManualClock` nothing sleeps: the time passes at once.

Safe from any thread. `admit`, `refuse` and the caller of `stir` run under the line's lock and must be short.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from tidegate.clock import Clock


class Line:
    """A lock, and the queue of threads that wait for the resource it guards."""

    def __init__(self, clock: Clock) -> None:
        self.lock = threading.Lock()
        self._clock = clock
        self._waiting: deque[threading.Condition] = deque()

    def __len__(self) -> int:
        """The number of waiting threads."""
        return len(self._waiting)

    def enter(
        self, admit: Callable[[], bool], timeout_ms: int, *, refuse: Callable[[], None] | None = None
    ) -> bool:
        """Wait, with the lock held, until `admit` returns True; False after the timeout.

        `admit` takes the resource when it returns True. `refuse` is called before every sleep and may raise to end a
        wait that can no longer succeed.
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
        """Wake the head; call it with the lock held whenever there may be more room."""
        if self._waiting:
            self._waiting[0].notify()

    def stir_all(self) -> None:
        """Wake all threads, with the lock held, after a change that may end any wait."""
        for each in self._waiting:
            each.notify()
