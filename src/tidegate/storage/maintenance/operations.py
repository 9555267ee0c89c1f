"""Maintenance operations are generators: each step does one phase and yields its name.

A driver decides how fast: `run_through` to the end, `Budgeted` until a deadline and on at the next call, a
seeded scheduler in tests in any interleaving. Closing a generator early is always safe: whatever it made and
did not publish is given back by its `finally` clauses, so there is nothing half done to find later.

`BucketLocks` keeps two operations off one bucket. Taking a lock never blocks: an operation that finds its
bucket busy gives way, and a checkpoint yields and tries again.

The order is always: scratch permit, then bucket. Whoever has a bucket waits for nothing any more, so those who
wait for it with a permit in hand (checkpoints) see it come free: no circle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Hashable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tidegate.clock import Clock
from tidegate.errors import OverloadError

Result = TypeVar("Result")
Operation = Generator[str, None, Result]

WAITING = "waiting"  # yielded while a permit or a bucket is busy: the driver may sleep
RESTING = "resting"  # yielded where nothing is held that others wait for: the driver may come back much later


def run_through(operation: Operation[Result], clock: Clock, *, timeout_ms: int) -> Result:
    """Drive to the end. Waits of the operation for others are bounded by `timeout_ms` each."""
    waited_since: int | None = None
    try:
        while True:
            phase = next(operation)
            if phase != WAITING:
                waited_since = None
                continue
            now = clock.monotonic_ms()
            waited_since = now if waited_since is None else waited_since
            if now - waited_since > timeout_ms:
                raise OverloadError(
                    f"maintenance waited {timeout_ms} ms for a permit or a bucket that is in use: close open "
                    "views, or raise max_inflight_maintenance",
                    reason="maintenance_blocked",
                )
            clock.sleep_ms(1)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    finally:
        operation.close()


class BucketLocks:
    """At most one maintenance operation per (task, store, bucket). Safe from any thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held: set[tuple[str, str, int]] = set()

    def try_lock(self, task: str, store: str, bucket: int) -> Callable[[], None] | None:
        """A function that unlocks, or None when somebody else is at work there."""
        name = (task, store, bucket)
        with self._guard:
            if name in self._held:
                return None
            self._held.add(name)

        def unlock() -> None:
            with self._guard:
                self._held.discard(name)

        return unlock

    def held(self, task: str | None = None) -> int:
        """How many buckets are being worked on (of one task)."""
        with self._guard:
            return sum(1 for name in self._held if task is None or name[0] == task)


class Undo:
    """Actions that run when an operation ends without having published: newest first, each once."""

    def __init__(self) -> None:
        self._actions: dict[Hashable, Callable[[], object]] = {}

    def push(self, action: Callable[[], object], name: Hashable = None) -> None:
        """Undo with `action`, unless it is withdrawn under its name before."""
        self._actions[object() if name is None else name] = action

    def withdraw(self, name: Hashable) -> None:
        """This one was published: it is not to be undone."""
        del self._actions[name]

    def forget(self) -> None:
        """Everything was published: nothing is to be undone."""
        self._actions.clear()

    def run(self) -> None:
        while self._actions:
            _, action = self._actions.popitem()
            action()


@contextmanager
def undoing() -> Iterator[Undo]:
    """Undo on every way out that did not call `forget`."""
    undo = Undo()
    try:
        yield undo
    finally:
        undo.run()
