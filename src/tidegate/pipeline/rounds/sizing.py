"""How many records a round reads: as many as take about as long as a round should, or a fixed number.

The first round takes a fraction of a second, so that users see something soon; after it the size follows what the
rounds before were able to do, by at most a factor of four at a time, so that one odd round neither starves nor floods
the next.

Thread rule: one master, one thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Final, TypeVar

STEP: Final = 4
LEAST: Final = 1000
MOST: Final = 32_000_000
FIRST_BYTES: Final = 64 << 20

Name = TypeVar("Name", bound=Hashable)


class RoundSizes:
    """The size of the next round."""

    def __init__(self, *, fixed: int | None, first: int, target_ms: int) -> None:
        self._fixed = fixed
        self._next = fixed or first
        self._target_ms = target_ms
        self._was_cut = False

    @property
    def records(self) -> int:
        """How many records the next round may read."""
        return self._next

    def begin_with(self, bytes_per_record: float | None) -> None:
        """Make the first round smaller where records are large."""
        if self._fixed is None and bytes_per_record:
            self._next = max(1, min(self._next, int(FIRST_BYTES / bytes_per_record)))

    def note(self, records: int, took_ms: int) -> None:
        """A round of so many records took so long."""
        if self._fixed is not None or records == 0:
            return
        # What a round costs without any record is not known apart; small rounds therefore look slower than
        # large ones are, and the size grows a step at a time until it is met.
        wanted = records * self._target_ms // max(1, took_ms)
        if records < self._next and took_ms < self._target_ms:
            return  # there was no more to read: it says nothing about larger rounds
        self._next = max(LEAST, min(MOST, self._next * STEP, max(wanted, self._next // STEP)))

    def cut(self) -> bool:
        """A round was too much: half of it next time; whether that is less than it was."""
        halved = max(1, self._next // 2)
        smaller, self._next = halved < self._next, halved
        self._fixed = None if self._fixed is None else min(self._fixed, halved)
        return smaller


def share_out(wanted: Mapping[Name, int], total: int) -> dict[Name, int]:
    """`total` among those who want some: all of them the same, what one leaves to the others."""
    shares: dict[Name, int] = {}
    left = total
    waiting = sorted(wanted.items(), key=lambda each: each[1])
    for place, (name, most) in enumerate(waiting):
        shares[name] = min(most, max(left, 0) // (len(waiting) - place))
        left -= shares[name]
    return shares
