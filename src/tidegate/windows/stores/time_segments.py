"""The time segments of a store: which exist, and when one goes.

A time segment is all rows whose time lies in [id * interval, (id + 1) * interval). Storage holds them as groups of
buckets and never mixes two in one pack, so that dropping one gives back its memory, its backlog and, with the next
checkpoint that does not name it, its disk.

    put, restore ──► append ──► enter_segments ──► get_or_create_segment_if_live ──► cleanup_expired_segments
    advance      ──────────────────────────────────────────────────────────────────► cleanup_expired_segments
    open         ──► open_existing ────────────────────────────────────────────────► cleanup_expired_segments
    fetch, get, all, remove, checkpoint, close, the wall clock: none of them

Every store of operators and tables writes through here, so that the rule exists once.

T1  `get_or_create_segment_if_live` looks up first and cleans up second, also when it answers None.
T2  nothing but stream time makes a time segment old: an idle store keeps everything.
T3  a clean-up comes after the rows it is for were appended: a put that is refused has dropped nothing.

Thread rule: the task's thread.
"""

from __future__ import annotations

import calendar
import re
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from typing import NamedTuple

from tidegate.storage import BucketIndexState, RuntimeContext
from tidegate.windows.stores.expiry import EARLIEST, Expiry


class TimeSegment(NamedTuple):
    """One time segment: its number, its name, and the times that lie in it (`end_ts` not included)."""

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
        """The time segments that exist, ascending."""
        return list(self._ids)

    def get_segment(self, segment_id: int) -> TimeSegment | None:
        """The time segment, if it exists."""
        at = bisect_left(self._ids, segment_id)
        return self._segment(segment_id) if at < len(self._ids) and self._ids[at] == segment_id else None

    def segment_for_timestamp(self, ts: int) -> TimeSegment | None:
        return self.get_segment(self.segment_id(ts))

    def segments(self, from_ts: int, to_ts: int, *, forward: bool = True) -> list[TimeSegment]:
        """Those that exist and may hold rows from `from_ts` to `to_ts`, both included."""
        first = bisect_left(self._ids, self.segment_id(from_ts))
        found = [
            self._segment(each) for each in self._ids[first : bisect_right(self._ids, self.segment_id(to_ts))]
        ]
        return found if forward else found[::-1]

    def enter_segments(self, starts: Iterable[int], stream_time: int) -> None:
        """Note the time segments that rows were just appended to, by their buckets, and drop expired ones."""
        for segment_id in dict.fromkeys(self.segment_id(start) for start in starts):
            self.get_or_create_segment_if_live(segment_id, stream_time)

    def advance(self, stream_time: int) -> list[int]:
        """Let time pass without a row: drop the time segments that are expired now; which they were."""
        return self.cleanup_expired_segments(stream_time)

    def get_or_create_segment_if_live(self, segment_id: int, stream_time: int) -> TimeSegment | None:
        """The time segment to write to, made if need be; None when it is too old. Drops those that are (T1)."""
        segment = None
        if segment_id >= self._expiry.first_live_segment(stream_time):
            segment = self.get_segment(segment_id)
            if segment is None:
                insort(self._ids, segment_id)
                segment = self._segment(segment_id)
        self.cleanup_expired_segments(stream_time)
        return segment

    def cleanup_expired_segments(self, stream_time: int) -> list[int]:
        """Drop every time segment before the first live one; which they were."""
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
        """Find the time segments that the rows in storage lie in, and drop those that are expired."""
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
    """Where the time segment begins that Kafka Streams calls this folder; None when it is no time segment of `store`.

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
