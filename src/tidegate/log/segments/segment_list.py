"""The log segments of one partition, in order, as an immutable value.

Every change makes a new list, so a reader that took one keeps a consistent picture while the log goes on.
Base offsets are unique and ascending; an offset belongs to the last segment whose base is not above it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from tidegate.log.segments.segment import LogSegment


class SegmentList:
    """Log segments by base offset."""

    __slots__ = ("_bases", "segments")

    def __init__(self, segments: Iterable[LogSegment] = ()) -> None:
        self.segments = tuple(segments)
        self._bases = [segment.base_offset for segment in self.segments]

    def __len__(self) -> int:
        return len(self.segments)

    def __iter__(self) -> Iterator[LogSegment]:
        return iter(self.segments)

    @property
    def bases(self) -> tuple[int, ...]:
        return tuple(self._bases)

    @property
    def first(self) -> LogSegment:
        return self.segments[0]

    @property
    def last(self) -> LogSegment:
        return self.segments[-1]

    @property
    def size(self) -> int:
        """Bytes of all `.log` files together."""
        return sum(segment.size for segment in self.segments)

    def floor_index(self, offset: int) -> int:
        """The number of the segment the offset belongs to; −1 when it lies before the first."""
        return bisect_right(self._bases, offset) - 1

    def floor(self, offset: int) -> LogSegment | None:
        index = self.floor_index(offset)
        return None if index < 0 else self.segments[index]

    def get(self, base_offset: int) -> LogSegment | None:
        """The segment with exactly this base."""
        index = bisect_left(self._bases, base_offset)
        return self.segments[index] if self._bases[index : index + 1] == [base_offset] else None

    def between(self, start: int, stop: int) -> tuple[LogSegment, ...]:
        """From the segment `start` belongs to, to the last whose base is below `stop`; none unless `start` is."""
        if stop <= start:
            return ()
        return self.segments[max(self.floor_index(start), 0) : bisect_left(self._bases, stop)]

    def next_base(self, base_offset: int) -> int | None:
        """The base of the segment after this one."""
        index = bisect_right(self._bases, base_offset)
        return self._bases[index] if index < len(self._bases) else None

    def appended(self, segment: LogSegment) -> SegmentList:
        """With one more, whose base is above all others."""
        return SegmentList((*self.segments, segment))

    def with_segments(self, added: Iterable[LogSegment]) -> SegmentList:
        """With `added` in their places; one with a base that is taken replaces the other."""
        merged = {segment.base_offset: segment for segment in self.segments}
        merged.update((segment.base_offset, segment) for segment in added)
        return SegmentList(merged[base] for base in sorted(merged))

    def without(self, removed: Iterable[LogSegment]) -> SegmentList:
        """Without these very segments; a newer one with the same base stays."""
        gone = {id(segment) for segment in removed}
        return SegmentList(segment for segment in self.segments if id(segment) not in gone)
