"""Windows the slow way: one record at a time, in plain Python, with every window's records in a list.

The vector operators must give the same results. Each class follows the algorithm of Kafka Streams for its kind of
window; where Kafka Streams' own bookkeeping loses something, the class states the rule that Tidegate keeps.

After some records, an oracle has:

    windows   (key, start, end) → the records of every window that is or was open, final ones too
    rows      everything emitted, in order: on update a row for each change, on close each window once
    late      a line for each record and window that had closed before the record came

`KafkaSlidingOracle` follows the store look-ups of Kafka Streams' sliding windows, and so the order in which Kafka
Streams writes them. It agrees with `SlidingOracle` as long as no record meets a window that has closed.

Thread rule: for tests, one thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

from tidegate.windows.kinds import LATEST, Hopping, Session, Sliding, Unlimited, WindowKind

UPDATE, CLOSE = "update", "close"
Window: TypeAlias = tuple[bytes, int, int]  # key, start, end


def ms(length: int | str | None) -> Any:
    """Milliseconds that a test computed, as a duration; what is one already stays as it is."""
    if not isinstance(length, int):
        return length
    return f"{length}ms" if length >= 0 else timedelta(milliseconds=length)


class Record(NamedTuple):
    """An event as it is read."""

    key: bytes | None
    ts: int
    value: int | None
    offset: int
    partition: int = 0


class Row(NamedTuple):
    """What is known of a window when it is emitted; no records: it ceased to exist."""

    key: bytes
    start: int
    end: int
    ts: int
    records: tuple[Record, ...]

    @property
    def window(self) -> Window:
        return self.key, self.start, self.end

    @property
    def is_deleted(self) -> bool:
        return not self.records


class LateLine(NamedTuple):
    """A record that a window did not take, and how much more grace would have let it in."""

    offset: int
    window_start: int
    how_late_ms: int


@dataclass
class Clock:
    """The stream time of each partition, and the least of them, which never falls."""

    times: dict[int, int] = field(default_factory=dict)
    floor: int = -1

    def meet(self, partition: int) -> None:
        """A partition is known from its first record on, whatever that is worth."""
        self.times.setdefault(partition, -1)

    def judge(self, record: Record) -> int:
        """The stream time this record is judged with, itself included."""
        self.times[record.partition] = max(self.times[record.partition], record.ts)
        self.floor = max(self.floor, min(self.times.values()))
        return max(self.times[record.partition], self.floor)


class WindowOracle:
    """What all kinds have in common."""

    def __init__(self, emit: str = UPDATE) -> None:
        self.emit = emit
        self.clock = Clock()
        self.windows: dict[Window, list[Record]] = {}
        self.rows: list[Row] = []
        self.late: list[LateLine] = []
        self.skipped = 0
        self._final: set[Window] = set()

    def process(self, record: Record) -> None:
        """The next record of the stream."""
        self.clock.meet(record.partition)
        if record.key is None or record.ts < 0:
            self.skipped += 1
            return
        self._take(record.key, record, self.clock.judge(record))
        if self.emit == CLOSE:
            self._emit_closed(self.clock.floor)

    def run(self, records: Iterable[Record]) -> WindowOracle:
        for record in records:
            self.process(record)
        return self

    def finish(self) -> None:
        """The input ends: every window is final."""
        if self.emit == CLOSE:
            self._emit_closed(LATEST)

    @property
    def table(self) -> dict[Window, tuple[int, tuple[Record, ...]]]:
        """What a reader of `rows` knows at the end: of every window its last timestamp and records."""
        known: dict[Window, tuple[int, tuple[Record, ...]]] = {}
        for row in self.rows:
            if row.is_deleted:
                known.pop(row.window, None)
            else:
                known[row.window] = (row.ts, row.records)
        return known

    # ── for kinds ────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, key: bytes, record: Record, judged: int) -> None:
        raise NotImplementedError

    def _is_closed(self, end: int, stream_time: int) -> bool:
        raise NotImplementedError

    def _time_of(self, window: Window) -> int:
        """The timestamp a window is emitted with: the latest of its records'."""
        return max(record.ts for record in self.windows[window])

    def _changed(self, window: Window) -> None:
        if self.emit == UPDATE:
            self.rows.append(Row(*window, self._time_of(window), tuple(self.windows[window])))

    def _emit_closed(self, stream_time: int) -> None:
        done = [
            window
            for window in self.windows
            if window not in self._final
            and (stream_time == LATEST or self._is_closed(window[2], stream_time))
        ]
        for window in sorted(done, key=lambda each: (each[2], each[0])):
            self._final.add(window)
            self.rows.append(Row(*window, self._time_of(window), tuple(self.windows[window])))


class TimeWindowOracle(WindowOracle):
    """Tumbling, hopping and unlimited windows: a record goes into each of its windows that is still open."""

    def __init__(self, kind: Hopping | Unlimited, emit: str = UPDATE) -> None:
        super().__init__(emit)
        self.kind = kind

    def _take(self, key: bytes, record: Record, judged: int) -> None:
        if isinstance(self.kind, Unlimited):
            if record.ts >= self.kind.start_ms:
                self._put((key, self.kind.start_ms, LATEST), record)
            return
        close = judged - self.kind.grace_ms
        for start in self.kind.starts(record.ts):
            end = self.kind.end_of(start)
            if end > close:
                self._put((key, start, end), record)
            else:
                self.late.append(LateLine(record.offset, start, close - end + 1))

    def _put(self, window: Window, record: Record) -> None:
        self.windows.setdefault(window, []).append(record)
        self._changed(window)

    def _is_closed(self, end: int, stream_time: int) -> bool:
        return isinstance(self.kind, Hopping) and end <= stream_time - self.kind.grace_ms


class SessionOracle(WindowOracle):
    """Sessions: a record joins every session within the gap, and joins them to each other.

    A session is final once stream time has passed its end + gap + grace, and stays as it is. Two records are late: one
    that would join a final session, and one from before stream time - gap - grace that lies in no open session.
    """

    def __init__(self, kind: Session, emit: str = UPDATE) -> None:
        super().__init__(emit)
        self.kind = kind
        self.live: dict[bytes, list[Window]] = {}

    def _take(self, key: bytes, record: Record, judged: int) -> None:
        gap, close = self.kind.gap_ms, self.kind.close_time(judged)
        found = [
            each
            for each in self.live.get(key, [])
            if each[2] >= record.ts - gap and each[1] <= record.ts + gap
        ]
        final = [end for _, _, end in found if end < close]
        is_inside = any(its_start <= record.ts <= its_end for _, its_start, its_end in found)
        if record.ts < close and (final or not is_inside):
            self.late.append(LateLine(record.offset, record.ts, close - record.ts))
            return
        if final:
            self.late.append(LateLine(record.offset, record.ts, close - min(final)))
            return
        start = min([record.ts, *(each[1] for each in found)])
        end = max([record.ts, *(each[2] for each in found)])
        merged = (key, start, end)
        records = [each for window in found for each in self.windows[window]]
        if (start, end) != (record.ts, record.ts):
            for window in sorted(found, key=lambda each: each[2]):
                self._remove(key, window)
        elif found:
            self.live[key].remove(merged)  # the same moment again: the session is overwritten, not moved
        self.windows[merged] = [*records, record]
        self.live.setdefault(key, []).append(merged)
        self._changed(merged)

    def _remove(self, key: bytes, window: Window) -> None:
        self.live[key].remove(window)
        del self.windows[window]
        if self.emit == UPDATE:
            self.rows.append(Row(*window, window[2], ()))

    def _time_of(self, window: Window) -> int:
        return window[2]

    def _is_closed(self, end: int, stream_time: int) -> bool:
        return end < self.kind.close_time(stream_time)


class SlidingOracle(WindowOracle):
    """Sliding windows by their definition.

    A record taken makes a window that ends with it (the first ends no earlier than `difference`), and one that
    starts right after it; of the latter only those that hold a record exist. A window holds the records inside it
    that came while it was open. Kafka Streams derives windows from neighbouring ones and so forgets a record all
    of whose windows of that moment had closed, though later ones could hold it; here they do.
    """

    def __init__(self, kind: Sliding, emit: str = UPDATE) -> None:
        super().__init__(emit)
        self.kind = kind
        self.taken: dict[bytes, list[tuple[Record, int]]] = {}  # with the close time each was judged with

    def _take(self, key: bytes, record: Record, judged: int) -> None:
        width, close = self.kind.difference_ms, judged - self.kind.grace_ms
        if record.ts + width < close:
            self.late.append(LateLine(record.offset, record.ts, close - record.ts - width))
            return
        self.taken.setdefault(key, []).append((record, close))
        for end in sorted(self._ends(key)):
            window = (key, end - width, end)
            records = [
                each
                for each, its_close in self.taken[key]
                if end - width <= each.ts <= end and its_close <= end
            ]
            if records and records != self.windows.get(window):
                self.windows[window] = records
                self._changed(window)

    def _ends(self, key: bytes) -> set[int]:
        """Where windows of the key end, if they hold a record."""
        width = self.kind.difference_ms
        ends = {each.ts + 1 + width for each, _ in self.taken[key]}
        return ends | {max(each.ts, width) for each, close in self.taken[key] if max(each.ts, width) >= close}

    def _is_closed(self, end: int, stream_time: int) -> bool:
        return end < stream_time - self.kind.grace_ms


def oracle_of(kind: WindowKind, emit: str = UPDATE) -> WindowOracle:
    """The oracle of a kind of window."""
    if isinstance(kind, Session):
        return SessionOracle(kind, emit)
    if isinstance(kind, Sliding):
        return SlidingOracle(kind, emit)
    return TimeWindowOracle(kind, emit)


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
