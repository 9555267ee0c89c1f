"""The three indexes of one log segment as one thing: hints where in the `.log` to look.

Owns when index files are made, grown, trimmed, renamed and removed together. Entries and files are the indexes'
own (`offset_index`, `time_index`, `transaction_index`); when an entry is due is the segment's rule.

I1  a hint is not a promise: an index that is damaged or missing gives position 0, never an error;
I2  index files exist from the first append on, at full size, as a broker makes them; looking makes none.

Thread rule: none of its own: `segment` calls it holding its guard.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tidegate.errors import CorruptError
from tidegate.files import Files
from tidegate.log.segments.file_names import INDEX, INDEX_SUFFIXES, TIME_INDEX, TRANSACTION_INDEX, offset_file
from tidegate.log.segments.offset_index import OffsetIndex, OffsetPosition
from tidegate.log.segments.time_index import TimeIndex, TimestampOffset
from tidegate.log.segments.transaction_index import TransactionIndex


class OffsetsGoBackError(CorruptError):
    """The offsets of a log segment do not ascend. Caught by the loader, which does as a broker does."""


class SegmentIndexes:
    """`.index`, `.timeindex` and `.txnindex` beside one `.log`."""

    __slots__ = ("_folder", "is_prepared", "offsets", "times", "transactions")

    def __init__(
        self, folder: Path, base_offset: int, max_bytes: int, suffix: str, *, files: Files, read_only: bool
    ) -> None:
        def path(kind: str) -> Path:
            return offset_file(folder, base_offset, kind, suffix)

        self._folder = folder
        self.offsets = OffsetIndex(path(INDEX), base_offset, max_bytes, files=files, read_only=read_only)
        self.times = TimeIndex(path(TIME_INDEX), base_offset, max_bytes, files=files, read_only=read_only)
        self.transactions = TransactionIndex(
            path(TRANSACTION_INDEX), base_offset, files=files, read_only=read_only
        )
        self.is_prepared = False

    def __iter__(self) -> Iterator[OffsetIndex | TimeIndex | TransactionIndex]:
        yield self.offsets
        yield self.times
        yield self.transactions

    # -- hints (I1) ------------------------------------------------------------------------------

    def position_near(self, offset: int) -> int:
        """From which byte on to look for the batch holding `offset`."""
        try:
            return self.offsets.lookup(offset).position
        except CorruptError:
            return 0

    def offset_before(self, timestamp: int) -> int:
        """An offset before which nothing is as late as `timestamp`."""
        try:
            return self.times.lookup(timestamp).offset
        except CorruptError:
            return self.times.base_offset

    def upper_bound(self, start: int, position: int, size: int) -> int | None:
        """An indexed offset at or behind `size` bytes from `position`; None when the index ends before."""
        try:
            bound = self.offsets.upper_bound(OffsetPosition(start, position), size)
        except CorruptError:
            return None
        return None if bound is None else bound.offset

    # -- filling ---------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make both preallocated indexes, or grow them to full size, before the first append (I2)."""
        self.offsets.prepare()
        self.times.prepare()
        self.is_prepared = True

    def enter(self, last_offset: int, position: int, largest: TimestampOffset) -> None:
        """One entry each, the time index's only if it is news."""
        self.offsets.append(last_offset, position)
        self.times.maybe_append(largest.timestamp, largest.offset)

    def enter_again(self, last_offset: int, position: int, largest: TimestampOffset) -> None:
        """Like `enter`, while rebuilding: an index that is full stays as it is, since a sparser one is as good.

        `OffsetsGoBackError` when the log's offsets do not ascend.
        """
        if self.offsets.entries and last_offset <= self.offsets.last_offset:
            raise OffsetsGoBackError(
                f"{self.offsets.path}: offset {last_offset} comes after {self.offsets.last_offset} in the log",
                path=self.offsets.path,
                offset=last_offset,
            )
        if not self.offsets.is_full:
            self.offsets.append(last_offset, position)
        if not self.times.is_full:
            self.times.maybe_append(largest.timestamp, largest.offset)

    def grow(self, max_bytes: int) -> None:
        """Make room for more entries under another limit."""
        self.offsets.max_bytes = self.times.max_bytes = max_bytes
        self.prepare()

    def reset(self) -> None:
        """Drop all entries; recovery fills them in again."""
        for index in self:
            index.reset()
        self.is_prepared = True

    def truncate_to(self, offset: int) -> None:
        """Drop what is at or behind `offset`, and make room again."""
        for index in self:
            index.truncate_to(offset)
        self.prepare()

    def finish(self, largest: TimestampOffset) -> None:
        """The final time-index entry, for which a slot was kept, and exact file sizes."""
        self.times.maybe_append(largest.timestamp, largest.offset, skip_full_check=True)
        self.offsets.trim()
        self.times.trim()
        self.transactions.settle()
        self.is_prepared = False

    # -- files -----------------------------------------------------------------------------------

    def sync(self) -> None:
        for index in self:
            index.sync()

    def release(self) -> None:
        """Give descriptors back, changing nothing."""
        for index in self:
            index.release()

    def change_suffix(self, base_offset: int, suffix: str) -> None:
        """Files that do not exist are not made."""
        for index, kind in zip(self, INDEX_SUFFIXES, strict=True):
            index.rename_to(offset_file(self._folder, base_offset, kind, suffix))

    def delete(self) -> None:
        for index in self:
            index.delete()
