"""When a window may be written, when it may be read, and which time segments are still there. Pure arithmetic.

A store keeps windows for `retention_ms` of *observed time*, the largest window start (session end) it was given.
Three rules follow, each with its own edge:

    put     loose: accepted while its time segment is live          segment_id(ts) >= segment_id(observed - retention)
    read    strict, to the millisecond                              ts >= observed - retention + 1
    disk    whole time segments, dropped when the last is too old   segment_id < segment_id(observed - retention)

Between the first two lies a zone where a put is taken and never seen. Division truncates toward zero, as in Java, so
the time segment 0 reaches from -(interval - 1) to interval - 1.

`Compat` names whose edges apply. Ours differ from Kafka Streams' in what a restart remembers, and in nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from tidegate.errors import InvalidError

Int64s = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

LATEST: Final = 2**63 - 1
EARLIEST: Final = -(2**63)
NOTHING_OBSERVED: Final = -1
LEAST_INTERVAL_MS: Final = 60_000


class Compat(StrEnum):
    """Whose rules a store keeps where they differ."""

    TIDEGATE = "tidegate"
    KAFKA_STREAMS = "kafka-streams"  # a restart forgets the observed time and the counter of duplicates
    KAFKA_STREAMS_MEMORY = "kafka-streams/memory"  # besides, a put is judged as strictly as a read
    KAFKA_STREAMS_TIME_ORDERED = (
        "kafka-streams/time-ordered"  # besides, reads reach one millisecond further back
    )

    @property
    def forgets_clocks(self) -> bool:
        return self is not Compat.TIDEGATE


def divide(number: int, by: int) -> int:
    """The quotient, truncated toward zero."""
    return -(-number // by) if number < 0 else number // by


def default_interval_ms(retention_ms: int) -> int:
    """How much time one time segment covers when nothing is said about it."""
    return max(retention_ms // 2, LEAST_INTERVAL_MS)


def default_bucket_ms(interval_ms: int) -> int:
    """How finely storage divides a time segment: eighths, unless they would be shorter than a minute."""
    eighth, rest = divmod(interval_ms, 8)
    return eighth if rest == 0 and eighth >= LEAST_INTERVAL_MS else interval_ms


@dataclass(frozen=True, slots=True)
class Expiry:
    """The three rules of one store."""

    retention_ms: int
    interval_ms: int
    compat: Compat = Compat.TIDEGATE

    def __post_init__(self) -> None:
        if not 0 <= self.retention_ms <= LATEST:
            raise InvalidError(f"a retention of {self.retention_ms} ms is not possible; give 0 or more")
        if not 1 <= self.interval_ms <= LATEST:
            raise InvalidError(
                f"a time segment of {self.interval_ms} ms is not possible; give at least 1 ms, or leave it out"
            )

    def segment_id(self, ts: int) -> int:
        """The number of the time segment that `ts` lies in."""
        return divide(ts, self.interval_ms)

    def first_live_segment(self, observed_time: int) -> int:
        """The first time segment that is kept."""
        return divide(observed_time - self.retention_ms, self.interval_ms)

    def first_live_ts(self, stream_time: int) -> int:
        """Where the first time segment that is kept begins; until one is dropped, all times are live."""
        first = self.first_live_segment(stream_time)
        return first * self.interval_ms if first > 0 else EARLIEST

    def first_writable_ts(self, stream_time: int) -> int:
        """The earliest window that a put may change."""
        if self.compat is Compat.KAFKA_STREAMS_MEMORY:
            return stream_time - self.retention_ms + 1
        return self.first_live_ts(stream_time)

    @property
    def reach_ms(self) -> int:
        """0 for window stores of the time-ordered layout, which read one millisecond further back than others."""
        return 0 if self.compat is Compat.KAFKA_STREAMS_TIME_ORDERED else 1

    def first_readable_ts(self, observed_time: int, *, lax: bool = True) -> int:
        """The earliest window that a read answers. Only window stores of the time-ordered layout are `lax`."""
        return max(0, observed_time - self.retention_ms + (self.reach_ms if lax else 1))

    def own_time(self, times: Int64s, observed_time: int) -> int | Int64s:
        """The stream time of a store that has no clock but its rows: for each the largest time up to and with it.

        One number, that of the last row, where no row can have expired by then: `judge` answers the same for both.
        """
        after = max(observed_time, int(times.max()))
        if int(times.min()) >= self.first_writable_ts(after):
            return after
        running: Int64s = np.maximum(np.maximum.accumulate(times), observed_time)
        return running

    def judge(self, times: Int64s, stream_time: int | Int64s) -> Flags | None:
        """Which of these rows may be written, each at its stream time; None: all."""
        if not isinstance(stream_time, int):
            horizon = stream_time - self.retention_ms
            if self.compat is Compat.KAFKA_STREAMS_MEMORY:
                return times > horizon
            return (times // self.interval_ms >= horizon // self.interval_ms) | (horizon < self.interval_ms)
        first = self.first_writable_ts(stream_time)
        return None if int(times.min()) >= first else times >= first
