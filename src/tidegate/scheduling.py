"""When later work runs, as a port: background threads in a server, by hand in tests and short commands.

A component hands over small actions; it never starts a thread itself. An action that raises stops the
scheduler and the error is raised to whoever drives or closes it: maintenance errors are never discarded.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tidegate.clock import Clock
from tidegate.errors import InternalError


@dataclass(slots=True)
class Scheduled:
    """One future action; `cancel()` makes it never run (again)."""

    name: str
    action: Callable[[], None]
    every_ms: int | None = None
    cancelled: bool = field(default=False)

    def cancel(self) -> None:
        self.cancelled = True


class Scheduler(Protocol):
    def after(self, delay_ms: int, action: Callable[[], None], name: str) -> Scheduled: ...

    def every(
        self, interval_ms: int, action: Callable[[], None], name: str, *, initial_delay_ms: int = 0
    ) -> Scheduled: ...

    def close(self) -> None: ...


class ManualScheduler:
    """Runs due actions, in order of due time, only when `run_due` is called.

    Due times are on the clock's monotonic time. Not safe for use from several threads.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[int, int, Scheduled]] = []
        self._serial = itertools.count()

    def after(self, delay_ms: int, action: Callable[[], None], name: str) -> Scheduled:
        return self._push(self._clock.monotonic_ms() + delay_ms, Scheduled(name, action))

    def every(
        self, interval_ms: int, action: Callable[[], None], name: str, *, initial_delay_ms: int = 0
    ) -> Scheduled:
        return self._push(
            self._clock.monotonic_ms() + initial_delay_ms, Scheduled(name, action, max(1, interval_ms))
        )

    def next_due_ms(self) -> int | None:
        """Monotonic time of the next action, None when there is none."""
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def run_due(self) -> list[str]:
        """Run everything that is due now; the names of what ran."""
        ran: list[str] = []
        while (due := self.next_due_ms()) is not None and due <= self._clock.monotonic_ms():
            entry = self.pop()
            entry.action()
            ran.append(entry.name)
        return ran

    def pop(self) -> Scheduled:
        """Take the next action out, putting a repeating one back for its next turn."""
        due_ms, _, entry = heapq.heappop(self._heap)
        if entry.every_ms is not None:
            self._push(due_ms + entry.every_ms, entry)
        return entry

    def close(self) -> None:
        self._heap.clear()

    def _push(self, due_ms: int, entry: Scheduled) -> Scheduled:
        heapq.heappush(self._heap, (due_ms, next(self._serial), entry))
        return entry


class ThreadScheduler:
    """Runs actions on one daemon thread of its own; `close` waits for it and raises what it met."""

    def __init__(self, clock: Clock, name: str = "tidegate-maintenance") -> None:
        self._clock = clock
        self._inner = ManualScheduler(clock)
        self._changed = threading.Condition()
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def error(self) -> BaseException | None:
        """What stopped the thread, if anything did."""
        return self._error

    def after(self, delay_ms: int, action: Callable[[], None], name: str) -> Scheduled:
        with self._changed:
            entry = self._inner.after(delay_ms, action, name)
            self._changed.notify()
            return entry

    def every(
        self, interval_ms: int, action: Callable[[], None], name: str, *, initial_delay_ms: int = 0
    ) -> Scheduled:
        with self._changed:
            entry = self._inner.every(interval_ms, action, name, initial_delay_ms=initial_delay_ms)
            self._changed.notify()
            return entry

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=30)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (entry := self._next()) is not None:
                entry.action()
        except BaseException as error:  # noqa: BLE001 - kept for close(): a thread's edge must lose nothing
            self._error = error

    def _next(self) -> Scheduled | None:
        with self._changed:
            while not self._closing:
                due = self._inner.next_due_ms()
                wait_ms = None if due is None else due - self._clock.monotonic_ms()
                if wait_ms is not None and wait_ms <= 0:
                    return self._inner.pop()
                self._changed.wait(None if wait_ms is None else wait_ms / 1000)
            return None


class NoScheduler:
    """For what never does anything in the background: being asked to is a mistake, and no thread is kept."""

    def after(self, delay_ms: int, action: Callable[[], None], name: str) -> Scheduled:
        raise InternalError(f"{name}: nothing is done in the background here")

    def every(
        self, interval_ms: int, action: Callable[[], None], name: str, *, initial_delay_ms: int = 0
    ) -> Scheduled:
        raise InternalError(f"{name}: nothing is done in the background here")

    def close(self) -> None:
        """Nothing was begun."""
