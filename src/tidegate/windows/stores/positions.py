"""How far a store has come in its sources: the largest offset seen of every topic and partition.

A position only grows. A put that was dropped as expired counts as seen: whoever waits for an offset waits for the
store to have dealt with it, not for a row.

Thread rule: one owner; `snapshot` gives others a value of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tidegate.errors import InvalidError

Offsets = Mapping[str, Mapping[int, int]]


class Position:
    """Topic → partition → largest offset seen."""

    __slots__ = ("_seen",)

    def __init__(self, seen: Offsets | None = None) -> None:
        self._seen: dict[str, dict[int, int]] = {}
        for topic, partitions in (seen or {}).items():
            for partition, offset in partitions.items():
                self.advance(topic, partition, offset)

    def advance(self, topic: str, partition: int, offset: int) -> None:
        """This offset was seen; an older one changes nothing."""
        partitions = self._seen.setdefault(topic, {})
        if offset > partitions.get(partition, -1):
            partitions[partition] = offset

    def advance_batch(
        self, topic: str, partitions: int | npt.NDArray[np.integer], offsets: npt.NDArray[np.int64]
    ) -> None:
        """All these offsets were seen; `partitions` is one for all, or one for each."""
        if not len(offsets):
            return
        if isinstance(partitions, int):
            self.advance(topic, partitions, int(offsets.max()))
            return
        if len(partitions) != len(offsets):
            raise InvalidError(f"{len(partitions)} partitions for {len(offsets)} offsets")
        numbers, owners = np.unique(partitions, return_inverse=True)
        largest = np.full(len(numbers), -1, np.int64)
        np.maximum.at(largest, owners, offsets)
        for partition, offset in zip(numbers.tolist(), largest.tolist(), strict=True):
            self.advance(topic, partition, offset)

    def merge(self, other: Position) -> None:
        """All that the other has seen was seen."""
        for topic, partitions in other._seen.items():
            for partition, offset in partitions.items():
                self.advance(topic, partition, offset)

    def offset(self, topic: str, partition: int) -> int:
        """The largest offset seen there; -1 when none was."""
        return self._seen.get(topic, {}).get(partition, -1)

    def covers(self, wanted: Position) -> bool:
        """Whether everything that is wanted was seen."""
        return all(
            self.offset(topic, partition) >= offset
            for topic, partitions in wanted._seen.items()
            for partition, offset in partitions.items()
        )

    def snapshot(self) -> Position:
        return Position(self._seen)

    def to_dict(self) -> dict[str, dict[int, int]]:
        return {topic: dict(partitions) for topic, partitions in self._seen.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Position) and self._seen == other._seen

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Position({self._seen})"
