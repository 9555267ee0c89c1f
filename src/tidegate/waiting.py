"""Waiting, for a bounded time, while somebody else is in the way.

A lock of ours tells at once who has it (`ConflictError`). Who knows that the other one will let go soon (another
attempt at the same work, a delivery, the driver) asks again here instead of giving up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from tidegate.clock import Clock
from tidegate.errors import ConflictError

PAUSE_MS: Final = 20
Taken = TypeVar("Taken")


def waiting(clock: Clock, timeout_ms: int, take: Callable[[], Taken], *, pause_ms: int = PAUSE_MS) -> Taken:
    """`take()`, again and again while it says `ConflictError`, for at most so long; then that error is the answer."""
    deadline_ms = clock.monotonic_ms() + timeout_ms
    while True:
        try:
            return take()
        except ConflictError:
            if clock.monotonic_ms() >= deadline_ms:
                raise
            clock.sleep_ms(pause_ms)
