"""Randomness as a port, so that any failure replays from its seed."""

from __future__ import annotations

import random
import uuid
from typing import Protocol


class Randomness(Protocol):
    """What a component may ask of chance."""

    def below(self, limit: int) -> int:
        """A uniform integer in [0, limit)."""
        ...

    def uuid(self) -> uuid.UUID: ...


class SystemRandomness:
    """The operating system's entropy."""

    def __init__(self) -> None:
        self._source: random.Random = random.SystemRandom()

    def below(self, limit: int) -> int:
        return self._source.randrange(limit)

    def uuid(self) -> uuid.UUID:
        return uuid.UUID(int=self._source.getrandbits(128), version=4)


class SeededRandomness(SystemRandomness):
    """The same sequence for the same seed, on every machine."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._source = random.Random(seed)
