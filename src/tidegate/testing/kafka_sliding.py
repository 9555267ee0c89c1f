"""Sliding windows as Kafka Streams keeps them: each new window is derived from the windows the store already has.

`SlidingOracle` says what windows are; this says how Kafka Streams gets there, store look-up by store look-up, and so
in which order it writes them. The two agree as long as no record meets a window that has closed.

Thread rule: for tests, one thread.
"""

from __future__ import annotations

from tidegate.testing.windows import UPDATE, LateLine, Record, WindowOracle
from tidegate.windows.kinds import Sliding


class KafkaSlidingOracle(WindowOracle):
    """A store of windows by key and start; every record looks at those around it."""

    def __init__(self, kind: Sliding, emit: str = UPDATE) -> None:
        super().__init__(emit)
        self.kind = kind
        self.width = kind.difference_ms

    def _take(self, key: bytes, record: Record, judged: int) -> None:
        close = judged - self.kind.grace_ms
        if record.ts + self.width < close:
            self.late.append(LateLine(record.offset, record.ts, close - record.ts - self.width))
        elif record.ts < self.width:
            self._take_early(key, record, close)
        else:
            self._take_later(key, record, close)

    def _take_later(self, key: bytes, record: Record, close: int) -> None:
        """A record whose left window starts at or after the epoch."""
        at = record.ts
        starts = self._starts(key, max(0, at - 2 * self.width), at + 1)
        before: list[Record] | None = None  # of the last window that ends before the record
        around: list[Record] | None = None  # of the last one with the record strictly inside, before it came
        previous: int | None = None
        for start in reversed(starts):
            records = list(self.windows[key, start, start + self.width])
            latest = max(each.ts for each in records)
            if start + self.width >= at and start <= at:
                self._update(key, start, record, close)
            if start + self.width < at:
                before, previous = records, latest if previous is None else previous
                break
            if start + self.width == at:
                previous = latest if latest < at else None
            elif start <= at and around is None:
                around = records
        self._after_previous(key, starts, previous, record, close)
        if at - self.width not in starts:
            reaches = previous is not None and previous >= at - self.width
            self.windows.pop(
                (key, at - self.width, at), None
            )  # written as the one after the previous: once more
            self._update(key, at - self.width, record, close, base=before if reaches else None)
        self._after_this(key, starts, around, at)

    def _take_early(self, key: bytes, record: Record, close: int) -> None:
        """A record whose left window would start before the epoch: it goes into the one at the epoch."""
        at = record.ts
        starts = self._starts(key, 0, at + 1)
        around: list[Record] | None = None
        previous: int | None = None
        for start in starts:
            records = self.windows[key, start, start + self.width]
            if start == 0:
                latest = max(each.ts for each in records)
                previous = latest if latest < at else None
            elif start <= at:
                around = list(records)
                self._update(key, start, record, close)
        if around is None and 0 in starts:
            first = self.windows[key, 0, self.width]
            around = list(first) if max(each.ts for each in first) > at else None
        self._after_this(key, starts, around, at)
        self._after_previous(key, starts, previous, record, close)
        self._update(key, 0, record, close)

    def _after_previous(
        self, key: bytes, starts: list[int], previous: int | None, record: Record, close: int
    ) -> None:
        """The right window of the record before, if this one is the first in it."""
        if previous is not None and previous + 1 not in starts and previous + 1 + self.width >= record.ts:
            self._update(key, previous + 1, record, close)

    def _after_this(self, key: bytes, starts: list[int], around: list[Record] | None, at: int) -> None:
        """The right window of this record, if it holds one."""
        if at + 1 not in starts and around and max(each.ts for each in around) > at:
            window = (key, at + 1, at + 1 + self.width)
            self.windows[window] = around
            self._changed(window)

    def _update(
        self, key: bytes, start: int, record: Record, close: int, base: list[Record] | None = None
    ) -> None:
        window = (key, start, start + self.width)
        if window[2] < close:
            self.late.append(LateLine(record.offset, start, close - window[2]))
            return
        self.windows[window] = [*self.windows.get(window, base or []), record]
        self._changed(window)

    def _starts(self, key: bytes, first: int, last: int) -> list[int]:
        return sorted(start for owner, start, _ in self.windows if owner == key and first <= start <= last)

    def _is_closed(self, end: int, stream_time: int) -> bool:
        return end < stream_time - self.kind.grace_ms
