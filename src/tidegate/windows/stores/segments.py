"""The rules for when a window may be written and read, and the time segments of a store.

A store keeps windows for `retention_ms` of *observed time*, the largest window start (session end) it was given:

    put     loose: accepted while its time segment is live          segment_id(ts) >= segment_id(observed - retention)
    read    strict, to the millisecond                              ts >= observed - retention + 1
    disk    whole time segments, dropped when the last is too old   segment_id < segment_id(observed - retention)

A time segment has all rows whose time lies in [id * interval, (id + 1) * interval); division truncates toward zero, as
in Java. Only stream time makes one old. A clean-up comes after the rows that cause it were appended.

Thread rule: `Expiry` is a value; `TimeSegments` belongs to the task's thread.
"""

from __future__ import annotations

import calendar
import re
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tidegate.errors import InvalidError
from tidegate.storage import BucketIndexState, RuntimeContext

# --- rules of time

Int64s = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
LATEST: Final = 2**63 - 1
EARLIEST: Final = -(2**63)
NOTHING_OBSERVED: Final = -1
LEAST_INTERVAL_MS: Final = 60_000


class Compat(StrEnum):
    """The rules that a store follows, Tidegate's or those of Kafka Streams."""

    TIDEGATE = "tidegate"
    KAFKA_STREAMS = "kafka-streams"  # a restart forgets the observed time and the counter of duplicates
    KAFKA_STREAMS_MEMORY = "kafka-streams/memory"  # in addition, a put is judged as strictly as a read
    KAFKA_STREAMS_TIME_ORDERED = (
        "kafka-streams/time-ordered"  # in addition, reads reach one millisecond further back
    )

    @property
    def forgets_clocks(self) -> bool:
        return self is not Compat.TIDEGATE


def divide(number: int, by: int) -> int:
    """Return the quotient, truncated toward zero."""
    return -(-number // by) if number < 0 else number // by


def default_interval_ms(retention_ms: int) -> int:
    """Return the default width of a time segment."""
    return max(retention_ms // 2, LEAST_INTERVAL_MS)


def default_bucket_ms(interval_ms: int) -> int:
    """Return the default width of storage's buckets: eighths of a time segment, but at least a minute."""
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
        """Return the number of the time segment of `ts`."""
        return divide(ts, self.interval_ms)

    def first_live_segment(self, observed_time: int) -> int:
        """Return the first time segment that is kept."""
        return divide(observed_time - self.retention_ms, self.interval_ms)

    def first_live_ts(self, stream_time: int) -> int:
        """Return the start of the first time segment that is kept; until one is dropped, all times are live."""
        first = self.first_live_segment(stream_time)
        return first * self.interval_ms if first > 0 else EARLIEST

    def first_writable_ts(self, stream_time: int) -> int:
        """Return the earliest window that a put may change."""
        if self.compat is Compat.KAFKA_STREAMS_MEMORY:
            return stream_time - self.retention_ms + 1
        return self.first_live_ts(stream_time)

    @property
    def reach_ms(self) -> int:
        """0 for window stores of the time-ordered layout, which read one millisecond further back than others."""
        return 0 if self.compat is Compat.KAFKA_STREAMS_TIME_ORDERED else 1

    def first_readable_ts(self, observed_time: int, *, lax: bool = True) -> int:
        """Return the earliest window that a read returns. Only window stores of the time-ordered layout are `lax`."""
        return max(0, observed_time - self.retention_ms + (self.reach_ms if lax else 1))

    def own_time(self, times: Int64s, observed_time: int) -> int | Int64s:
        """Return the stream time of a store whose clock are its rows: for each the largest time up to and with it.

        It is one number, that of the last row, if no row can have expired by then: `judge` returns the same for
        both.
        """
        after = max(observed_time, int(times.max()))
        if int(times.min()) >= self.first_writable_ts(after):
            return after
        running: Int64s = np.maximum(np.maximum.accumulate(times), observed_time)
        return running

    def judge(self, times: Int64s, stream_time: int | Int64s) -> Flags | None:
        """Return which of these rows may be written, each at its stream time; None: all."""
        if not isinstance(stream_time, int):
            horizon = stream_time - self.retention_ms
            if self.compat is Compat.KAFKA_STREAMS_MEMORY:
                return times > horizon
            return (times // self.interval_ms >= horizon // self.interval_ms) | (horizon < self.interval_ms)
        first = self.first_writable_ts(stream_time)
        return None if int(times.min()) >= first else times >= first


# --- time segments


class TimeSegment(NamedTuple):
    """One time segment: its number, its name, and its range of times (`end_ts` not included)."""

    id: int
    name: str
    start_ts: int
    end_ts: int


class TimeSegments:
    """The time segments of one store."""

    def __init__(self, context: RuntimeContext, state: BucketIndexState, expiry: Expiry) -> None:
        self._context = context
        self._state = state
        self._expiry = expiry
        self._name = state.index.spec.name
        self._ids: list[int] = []
        self.dropped_before_ts = EARLIEST
        """No row before this is left; iterators that were opened earlier skip what is."""

    def segment_id(self, ts: int) -> int:
        return self._expiry.segment_id(ts)

    def segment_name(self, segment_id: int) -> str:
        return f"{self._name}.{segment_id * self._expiry.interval_ms}"

    @property
    def ids(self) -> list[int]:
        """The existing time segments, ascending."""
        return list(self._ids)

    def get_segment(self, segment_id: int) -> TimeSegment | None:
        """Return the time segment, if it exists."""
        at = bisect_left(self._ids, segment_id)
        return self._segment(segment_id) if at < len(self._ids) and self._ids[at] == segment_id else None

    def segment_for_timestamp(self, ts: int) -> TimeSegment | None:
        return self.get_segment(self.segment_id(ts))

    def segments(self, from_ts: int, to_ts: int, *, forward: bool = True) -> list[TimeSegment]:
        """Return those that exist and may hold rows from `from_ts` to `to_ts`, both included."""
        first = bisect_left(self._ids, self.segment_id(from_ts))
        found = [
            self._segment(each) for each in self._ids[first : bisect_right(self._ids, self.segment_id(to_ts))]
        ]
        return found if forward else found[::-1]

    def enter_segments(self, starts: Iterable[int], stream_time: int) -> None:
        """Record the time segments of rows that were just appended, by their buckets, and drop expired ones."""
        for segment_id in dict.fromkeys(self.segment_id(start) for start in starts):
            self.get_or_create_segment_if_live(segment_id, stream_time)

    def advance(self, stream_time: int) -> list[int]:
        """Advance time without a row: drop expired time segments and return them."""
        return self.cleanup_expired_segments(stream_time)

    def get_or_create_segment_if_live(self, segment_id: int, stream_time: int) -> TimeSegment | None:
        """Return the time segment to write to, created if needed; None if it is expired. Drops expired ones."""
        segment = None
        if segment_id >= self._expiry.first_live_segment(stream_time):
            segment = self.get_segment(segment_id)
            if segment is None:
                insort(self._ids, segment_id)
                segment = self._segment(segment_id)
        self.cleanup_expired_segments(stream_time)
        return segment

    def cleanup_expired_segments(self, stream_time: int) -> list[int]:
        """Drop every time segment before the first live one, and return them."""
        first_live = self._expiry.first_live_segment(stream_time)
        if first_live <= 0:
            return []
        gone = self._ids[: bisect_left(self._ids, first_live)]
        if gone:
            del self._ids[: len(gone)]
            cutoff = first_live * self._expiry.interval_ms
            self._context.writer().drop_segments(self._context.task, self._state, cutoff)
            self.dropped_before_ts = max(self.dropped_before_ts, cutoff)
        return gone

    def open_existing(self, stream_time: int) -> None:
        """Find the time segments of the rows in storage, and drop those that are expired."""
        starts = self._state.index.all_buckets()
        self._ids = sorted({self.segment_id(start) for start in starts})
        self.dropped_before_ts = EARLIEST
        self.cleanup_expired_segments(stream_time)

    def close(self) -> None:
        """Forget which time segments exist; their rows stay in storage."""
        self._ids = []

    def _segment(self, segment_id: int) -> TimeSegment:
        start = segment_id * self._expiry.interval_ms
        return TimeSegment(segment_id, self.segment_name(segment_id), start, start + self._expiry.interval_ms)


def segment_start_of(folder: str, store: str) -> int | None:
    """Return the start of the time segment that Kafka Streams stores in this folder; None if it is none of `store`.

    Three spellings are in use: `store.60000` now, `store:60000` and `store-197001010001` (UTC) before.
    """
    rest = folder.removeprefix(store)
    if rest == folder:
        return None
    if match := re.fullmatch(r"[.:](-?\d+)", rest):
        return int(match[1])
    if re.fullmatch(r"-\d{12}", rest):
        try:
            return calendar.timegm(time.strptime(rest, "-%Y%m%d%H%M")) * 1000
        except ValueError:
            return None
    return None
