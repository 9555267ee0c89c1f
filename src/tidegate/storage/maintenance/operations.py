"""Maintenance operations are generators: each step does one phase and yields its name.

The driver sets the pace: `run_through` runs to the end, `Budgeted` until a deadline and continues at the next call, a
seeded scheduler in tests in any interleaving. Closing a generator early is always safe: its `finally` clauses release
whatever it made and did not publish.

`BucketLocks` admits one operation per bucket. Locking never blocks: an operation that finds its bucket busy gives up,
and a checkpoint yields and tries again.

The lock order is scratch permit, then bucket. The holder of a bucket lock never waits, so an operation that waits for
the bucket with a permit (a checkpoint) always gets it: there is no deadlock.
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
    """Run the operation to its end and return its result. Each of its waits is bounded by `timeout_ms`."""
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
        """Return the unlock function, or None when the bucket is locked."""
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
        """The number of locked buckets (of one task)."""
        with self._guard:
            return sum(1 for name in self._held if task is None or name[0] == task)


class Undo:
    """Rollback actions of an operation that ends without having published: newest first, each once."""

    def __init__(self) -> None:
        self._actions: dict[Hashable, Callable[[], object]] = {}

    def push(self, action: Callable[[], object], name: Hashable = None) -> None:
        """Add a rollback action, which can be withdrawn by its name."""
        self._actions[object() if name is None else name] = action

    def withdraw(self, name: Hashable) -> None:
        """Remove the action of something that was published."""
        del self._actions[name]

    def forget(self) -> None:
        """Remove all actions, because everything was published."""
        self._actions.clear()

    def run(self) -> None:
        while self._actions:
            _, action = self._actions.popitem()
            action()


@contextmanager
def undoing() -> Iterator[Undo]:
    """Run the rollback actions at the end of the block, unless `forget` was called."""
    undo = Undo()
    try:
        yield undo
    finally:
        undo.run()
