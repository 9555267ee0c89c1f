"""Which records of a topic made a number: the offsets kept of a window, read again, and only those.

A window made here keeps how many records of each source partition it holds, and their lowest and highest offset
(`WindowRows.count`, `min_offset`, `max_offset`; behind a change of keys `windows.aggregates.sources`). Between the two
lie records of other keys and windows as well, so the caller says which are meant: by key, by time, by what its
expressions make of a record. Records that are gone are counted, not guessed.

Thread rule: pure but for reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import OffsetOutOfRangeError

Matches: TypeAlias = Callable[[pa.RecordBatch], npt.NDArray[np.bool_]]


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """`count` records of a partition, the first at `low` and the last at `high`."""

    count: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class SourceRecords:
    """What was found again of one partition's share."""

    partition: int
    expected: OffsetRange
    offsets: tuple[int, ...]
    first_offset: int  # of the topic, now

    @property
    def missing(self) -> int:
        """How many of the records are not there any more."""
        return max(0, self.expected.count - len(self.offsets))

    @property
    def aged_out(self) -> bool:
        """Whether the topic has dropped offsets of the range."""
        return self.expected.low < self.first_offset

    def line(self) -> str:
        """In words."""
        told = f"partition {self.partition}: {len(self.offsets)} of {self.expected.count} records"
        if self.offsets:
            told += f", offsets {_shortened(self.offsets)}"
        if self.missing:
            why = (
                f"aged out: the topic starts at {self.first_offset}"
                if self.aged_out
                else "no longer in the topic (compacted away)"
            )
            told += f"; {self.missing} {why}"
        return told


def source_records(
    log: Any,
    topic: str,
    ranges: Mapping[int, OffsetRange],
    matches: Matches,
    *,
    isolation: str = "read_uncommitted",
) -> list[SourceRecords]:
    """The records of these ranges that `matches` marks, partition by partition."""
    found = []
    for number, expected in sorted(ranges.items()):
        with log.reader(topic, [number], start="earliest", isolation=isolation) as probe:
            first, end = probe.positions()[number], probe.end_offsets()[number]
        start, stop = max(expected.low, first), min(expected.high + 1, end)
        offsets = [] if start >= stop else _marked(log, topic, number, start, stop, matches, isolation)
        found.append(SourceRecords(number, expected, tuple(offsets), first))
    return found


def of_key_between(key: bytes, first_ts: int, last_ts: int) -> Matches:
    """Records of this very key with a timestamp from one to the other, both included."""
    wanted = pa.scalar(key, pa.binary())

    def marked(batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        mine = pc.fill_null(pc.equal(batch.column("key"), wanted), False).to_numpy(zero_copy_only=False)
        times = pc.fill_null(batch.column("timestamp").view(pa.int64()), -1).to_numpy()
        kept: npt.NDArray[np.bool_] = mine & (times >= first_ts) & (times <= last_ts)
        return kept

    return marked


def _marked(
    log: Any, topic: str, number: int, start: int, stop: int, matches: Matches, isolation: str
) -> list[int]:
    def batches() -> Iterator[pa.RecordBatch]:
        with log.reader(
            topic, [number], start={number: start}, stop={number: stop}, isolation=isolation
        ) as reader:
            yield from reader

    offsets: list[int] = []
    try:
        for batch in batches():
            offsets += batch.column("offset").to_numpy()[matches(batch)].tolist()
    except OffsetOutOfRangeError:
        pass  # they went while they were read: `missing` says so
    return offsets


def _shortened(offsets: tuple[int, ...], shown: int = 8) -> str:
    named = ", ".join(str(offset) for offset in offsets[:shown])
    return named if len(offsets) <= shown else f"{named} … {offsets[-1]}"
