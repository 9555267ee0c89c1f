"""How long each part of a round's work took, for whoever looks at a slow one.

Thread rule: one owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tidegate.clock import Clock


class Timings:
    """Milliseconds by name; parts that run several times add up."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.ms: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = self._clock.monotonic_ms()
        try:
            yield
        finally:
            self.ms[name] = self.ms.get(name, 0) + self._clock.monotonic_ms() - began

    def take(self, other: Timings) -> None:
        """Add what another one measured."""
        for name, ms in other.ms.items():
            self.ms[name] = self.ms.get(name, 0) + ms
