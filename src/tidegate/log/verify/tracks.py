"""What the sequence check remembers: batches as sent, open gaps, one track per producer.

Plain values of `verify_producers`; kept apart so that the rules there read on their own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tidegate.log.format.decode import BatchTable
    from tidegate.log.verify.parsing import CheckedRun

MODULO: Final = 2**31
CACHED_BATCHES: Final = 5


class Sent(NamedTuple):
    """A batch as remembered: where it is, its numbers, and what tells its records from others."""

    first: int
    last: int
    offset: int
    last_offset: int
    path: Path
    position: int
    size: int
    records: int
    base_timestamp: int
    max_timestamp: int

    @property
    def likeness(self) -> tuple[int, int, int, int]:
        return self.base_timestamp, self.max_timestamp, self.records, self.size


@dataclass(slots=True)
class Gap:
    """Numbers [first, first + count) not seen between the offsets `after` and `offset`; reported at the end
    unless they turn up."""

    first: int
    count: int
    path: Path
    position: int
    offset: int
    after: int
    because: str


@dataclass(slots=True)
class ProducerTrack:
    """What is known of one producer at one point of the log."""

    producer_id: int
    epoch: int
    last: int
    recent: deque[Sent] = field(default_factory=lambda: deque(maxlen=CACHED_BATCHES))
    before_bump: tuple[Sent, ...] = ()
    since_change: int = 0
    fresh: bool = True
    gaps: list[Gap] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.producer_id}/{self.epoch}"

    @property
    def last_offset(self) -> int:
        return self.recent[-1].last_offset if self.recent else -1


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """The header fields the check looks at, for chosen rows of a table."""

    epoch: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    offset: NDArray[np.int64]
    last_offset: NDArray[np.int64]
    position: NDArray[np.int64]
    size: NDArray[np.int64]
    count: NDArray[np.int64]
    base_timestamp: NDArray[np.int64]
    max_timestamp: NDArray[np.int64]
    numbered: NDArray[np.bool_]

    @classmethod
    def of(cls, table: BatchTable, rows: NDArray[np.int64], numbered: NDArray[np.bool_]) -> BatchColumns:
        first = table.base_sequence[rows].astype(np.int64)
        return cls(
            table.producer_epoch[rows].astype(np.int64),
            first,
            (first + table.last_offset_delta[rows]) % MODULO,
            table.base_offset[rows],
            table.last_offset[rows],
            table.position[rows],
            table.size[rows],
            table.count[rows].astype(np.int64),
            table.base_timestamp[rows],
            table.max_timestamp[rows],
            numbered[rows],
        )

    def where(self, chosen: NDArray[np.bool_] | slice) -> BatchColumns:
        return BatchColumns(*(getattr(self, name)[chosen] for name in self.__slots__))

    def __len__(self) -> int:
        return len(self.epoch)

    def sent(self, row: int, run: CheckedRun, path: Path) -> Sent:
        return Sent(
            int(self.first[row]),
            int(self.last[row]),
            int(self.offset[row]),
            int(self.last_offset[row]),
            path,
            run.position + int(self.position[row]),
            int(self.size[row]),
            int(self.count[row]),
            int(self.base_timestamp[row]),
            int(self.max_timestamp[row]),
        )
