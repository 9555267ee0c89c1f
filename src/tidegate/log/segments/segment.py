"""One log segment: a `.log` file of batches and the three indexes beside it.

Owns Kafka's index rule, the segment's largest timestamp, cutting, and what happens to the files when a
segment is rolled, closed, renamed or removed. It does not decide when to roll (`rolling`), which segment an
offset belongs to (`partition`), or what a broken batch means (`loading`).

The index rule, for a batch at file position `p`: a larger maximum timestamp is remembered with the batch's
last offset; if more than `index.interval.bytes` (strictly) were written since the last entry, then
(last offset → p) enters the offset index and the largest timestamp so far the time index. So the first batch
is never indexed, and a reopened segment starts counting at zero.

Invariants:
S1  every offset o in the segment satisfies 0 ≤ o − base offset ≤ 2147483647;
S2  an append that fails leaves file, indexes and counters as they were;
S3  a position an index names that turns out not to be right is ignored: the file is searched from its start,
    and what lies behind damage is found all the same;
S4  a segment that is not written to holds no file descriptor.

Thread rule: one writer. Any thread may read: `_guard` makes an index look-up and the opening of the file one
step, so that a rename cannot come between them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from tidegate.clock import Clock
from tidegate.errors import CorruptError, InvalidError
from tidegate.files import Bytes, File, Files
from tidegate.log.format.batch import HEADER_SIZE, NO_TIMESTAMP, BatchHeader
from tidegate.log.segments.batch_file import (
    WINDOW_BYTES,
    BatchFile,
    BatchPlace,
    find_offset,
    headers,
    sound_headers,
)
from tidegate.log.segments.file_names import INDEX, LOG, SEAL, TIME_INDEX, offset_file
from tidegate.log.segments.index_file import INT32_MAX as MAX_RELATIVE_OFFSET
from tidegate.log.segments.index_trust import IndexTrust
from tidegate.log.segments.offset_index import OffsetIndex
from tidegate.log.segments.resync import find_around
from tidegate.log.segments.seals import Seal
from tidegate.log.segments.segment_indexes import SegmentIndexes
from tidegate.log.segments.time_index import TimeIndex, TimestampOffset
from tidegate.log.segments.transaction_index import AbortedTxn
from tidegate.log.topics.topic_config import TopicConfig
from tidegate.randomness import Randomness


class LogSegment:
    """Files `<base>.log/.index/.timeindex/.txnindex` of one folder; making one touches nothing on disk.

    With `read_only` the indexes are those of another process that may be writing: nothing here changes them.
    """

    def __init__(
        self,
        folder: Path,
        base_offset: int,
        config: TopicConfig,
        *,
        files: Files,
        clock: Clock,
        randomness: Randomness,
        suffix: str = "",
        read_only: bool = False,
    ) -> None:
        self.folder = folder
        self.base_offset = base_offset
        self.suffix = suffix
        self.index_interval_bytes = config.index_interval_bytes
        jitter_ms = min(config.segment_jitter_ms, config.segment_ms)
        self.roll_jitter_ms = randomness.below(jitter_ms) if jitter_ms else 0
        self.created_ms = clock.now_ms()
        self._preallocate_bytes = config.segment_bytes if config.preallocate else 0
        self._clock = clock
        self._files = files
        self._guard = threading.Lock()
        self._log = BatchFile(offset_file(folder, base_offset, LOG, suffix), files=files)
        self._indexes = SegmentIndexes(
            folder, base_offset, config.segment_index_bytes, suffix, files=files, read_only=read_only
        )
        self._trust = IndexTrust(folder, base_offset, files=files)
        self._since_entry = 0
        self._first_timestamp: int | None = None
        self._largest: TimestampOffset | None = None

    def create(self) -> LogSegment:
        """Make the (empty, perhaps preallocated) `.log` now; index files follow with the first append."""
        self._log.create(self._preallocate_bytes)
        self._largest = TimestampOffset(NO_TIMESTAMP, self.base_offset)
        return self

    def __repr__(self) -> str:
        return f"LogSegment({self._log.path})"

    # -- looking ---------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        return self._log.path

    @property
    def size(self) -> int:
        return self._log.size

    @property
    def mtime_ms(self) -> int:
        return self._log.mtime_ms

    @property
    def indexes(self) -> SegmentIndexes:
        return self._indexes

    @property
    def is_offset_index_full(self) -> bool:
        return self._indexes.offsets.is_full

    @property
    def is_time_index_full(self) -> bool:
        return self._indexes.times.is_full

    @property
    def offset_index_bytes(self) -> int:
        """Bytes in use, not bytes preallocated."""
        return self._indexes.offsets.size_bytes

    @property
    def time_index_bytes(self) -> int:
        return self._indexes.times.size_bytes

    @property
    def largest(self) -> TimestampOffset:
        """The largest timestamp so far and the last offset of the first batch that had it."""
        if self._largest is None:
            if (seal := self._trust.seal(self.size)) is not None:
                self._largest = TimestampOffset(seal.max_timestamp, seal.max_timestamp_offset)
            else:
                with self._guard:
                    self._largest = self._indexes.times.last_entry
        return self._largest

    @property
    def largest_timestamp(self) -> int:
        """What retention goes by: the largest record timestamp, or the file's when no record has one."""
        timestamp = self.largest.timestamp
        return timestamp if timestamp >= 0 else self.mtime_ms

    @property
    def seal(self) -> Seal | None:
        """The segment's seal, if it speaks of a `.log` of this size."""
        return self._trust.seal(self.size)

    def is_older_than(self, timestamp: int) -> bool:
        """Whether it is known that no record is as new as `timestamp`; False where only a walk can tell.

        The seal knows. Without one the time index is believed as far as the log confirms it: its last entry is
        that of its batch, and the sound batches behind that one are not newer.
        """
        if (seal := self.seal) is not None:
            return seal.max_timestamp < timestamp
        try:
            with self._guard:
                entry = self._indexes.times.last_entry
            if not 0 <= entry.timestamp < timestamp:
                return False
            file, hint = self.open_near(entry.offset)
            with file:
                place = self.locate_in(file, hint, entry.offset, self.size)
                if place is None or place.base_offset > entry.offset:
                    return False
                times = [header.max_timestamp for _, header in sound_headers(file, place.position, self.size)]
        except CorruptError:
            return False
        return times[0] == entry.timestamp and max(times) < timestamp

    @property
    def first_timestamp(self) -> int:
        """Largest timestamp of the first batch; −1 when it has none or there is no batch."""
        if self._first_timestamp is None:
            first = next(self.batches(window=HEADER_SIZE), None)
            if first is None:
                return NO_TIMESTAMP
            self._first_timestamp = first[1].max_timestamp
        return self._first_timestamp

    def holds(self, offset: int) -> bool:
        """Whether the offset can be stored in this segment's indexes (S1)."""
        return 0 <= offset - self.base_offset <= MAX_RELATIVE_OFFSET

    # -- reading ---------------------------------------------------------------------------------

    def reader(self) -> File:
        """A descriptor of the `.log`, to be closed by the caller."""
        with self._guard:
            return self._log.reader()

    def read_at(self, position: int, length: int) -> bytes:
        with self.reader() as file:
            return file.read_at(position, length)

    def batches(
        self, start: int = 0, end: int | None = None, *, window: int = WINDOW_BYTES
    ) -> Iterator[tuple[int, BatchHeader]]:
        """Position and header of each whole batch from byte `start` on."""
        with self.reader() as file:
            yield from headers(file, start, self.size if end is None else end, window=window)

    def open_near(self, offset: int) -> tuple[File, int]:
        """A descriptor of the `.log` and the position from which to search for `offset` (S3)."""
        with self._guard:
            return self._log.reader(), self._indexes.position_near(offset)

    def open_before(self, timestamp: int, from_offset: int) -> tuple[File, int, int]:
        """A descriptor, and the position and offset from which to search for a record at or after
        `timestamp` (S3)."""
        from_offset = max(from_offset, self.base_offset)
        with self._guard:
            if self._believes(self._indexes.times):
                from_offset = max(from_offset, self._indexes.offset_before(timestamp))
            file, hint = self._log.reader(), self._indexes.position_near(from_offset)
        try:
            place = self.locate_in(file, hint, from_offset, self.size)
        except BaseException:
            file.close()
            raise
        return file, self.size if place is None else place.position, from_offset

    def _believes(self, index: OffsetIndex | TimeIndex) -> bool:
        """Whether an index may be used where nothing proves it right."""
        return self._indexes.is_prepared or self._trust.is_sound(index, self.size)

    def locate(self, offset: int, end: int | None = None) -> BatchPlace | None:
        """The first batch whose last offset is ≥ `offset`, looked for below byte `end`."""
        file, hint = self.open_near(offset)
        with file:
            return self.locate_in(file, hint, offset, self.size if end is None else end)

    def locate_in(
        self, file: File, hint: int, offset: int, end: int, *, bound: int | None = None
    ) -> BatchPlace | None:
        """`locate` with the descriptor and hint of `open_near`; `bound` as in `find_offset`."""
        window = min(self.index_interval_bytes + HEADER_SIZE, WINDOW_BYTES)
        if 0 < hint < end:
            try:
                place = find_offset(file, hint, end, offset, window=window, bound=bound)
            except CorruptError:
                place = None
            # A first batch that begins beyond the offset may have a predecessor the hint jumped over.
            if place is not None and (place.position > hint or place.base_offset <= offset):
                return place
        try:
            return find_offset(file, 0, end, offset, window=window, bound=bound)
        except CorruptError:
            return find_around(file, end, offset, bound=bound)

    def read_next_offset(self) -> int:
        """The offset after the last batch; the base offset when there is none. Reads the tail only."""
        end, next_offset = self.size, self.base_offset
        last = self._indexes.offsets.last_offset
        file, hint = self.open_near(last)
        with file:
            place = self.locate_in(file, hint, last, end)
            if place is not None:
                for _, header in headers(file, place.position, end):
                    next_offset = header.next_offset
        return next_offset

    def upper_bound(self, start: int, position: int, size: int) -> int | None:
        """An indexed offset at or behind `size` bytes from `position`; None when the index ends before."""
        with self._guard:
            if not self._believes(self._indexes.offsets):
                return None
            return self._indexes.upper_bound(start, position, size)

    def collect_aborted(self, start: int, upper: int) -> tuple[list[AbortedTxn], bool]:
        """Aborted transactions that ended here and touch [start, upper); whether no later segment has any."""
        with self._guard:
            if not self._indexes.is_prepared:
                self._trust.require_sound(self._indexes.transactions, self.size)
            found = self._indexes.transactions.collect_aborted(start, upper)
        return found.aborted, found.complete

    # -- writing ---------------------------------------------------------------------------------

    def append(self, data: Bytes, header: BatchHeader) -> int:
        """Write one batch and apply the index rule to it; the position it went to (S1, S2)."""
        self._require_room(header.last_offset)
        largest = self._largest_with(header.max_timestamp, header.last_offset)
        position = self._log.append(data)
        if self._since_entry > self.index_interval_bytes:
            try:
                with self._guard:
                    self._indexes.enter(header.last_offset, position, largest)
            except BaseException:
                self._take_back(position, header.last_offset)
                raise
            self._since_entry = 0
        if position == 0:
            self._first_timestamp = header.max_timestamp
        self._largest = largest
        self._since_entry += header.size
        return position

    def _largest_with(self, timestamp: int, last_offset: int) -> TimestampOffset:
        largest = self.largest
        return TimestampOffset(timestamp, last_offset) if timestamp > largest.timestamp else largest

    def _require_room(self, last_offset: int) -> None:
        if not self.holds(last_offset):
            raise InvalidError(
                f"offset {last_offset} does not fit {self.path}, whose offsets are {self.base_offset} to "
                f"{self.base_offset + MAX_RELATIVE_OFFSET}; roll a new log segment first"
            )
        if not self._indexes.is_prepared:
            with self._guard:
                self._indexes.prepare()

    def _take_back(self, position: int, last_offset: int) -> None:
        """Undo an append whose index entries could not be written."""
        self._log.cut_back(position)
        with self._guard:
            self._indexes.offsets.truncate_to(last_offset)
            self._indexes.times.truncate_to(last_offset)

    def add_aborted(self, transaction: AbortedTxn) -> None:
        with self._guard:
            self._indexes.transactions.append(transaction)

    def drop_aborted(self, offset: int) -> None:
        """Take back aborted transactions whose marker is at or behind `offset`."""
        with self._guard:
            self._indexes.transactions.truncate_to(offset)

    def grow_indexes(self, max_bytes: int) -> None:
        """Room for more entries, as a segment that becomes active again needs it."""
        with self._guard:
            self._indexes.grow(max_bytes)

    # -- recovering and cutting ------------------------------------------------------------------

    def reset_indexes(self) -> None:
        """Empty all three indexes; `reindex` fills them again."""
        with self._guard:
            self._indexes.reset()
        self._largest = TimestampOffset(NO_TIMESTAMP, self.base_offset)
        self._first_timestamp = None
        self._since_entry = 0

    def reindex(self, header: BatchHeader, position: int) -> None:
        """Apply the index rule to a batch that is in the file already; ascending, after `reset_indexes`."""
        self._largest = self._largest_with(header.max_timestamp, header.last_offset)
        if self._since_entry > self.index_interval_bytes:
            with self._guard:
                self._indexes.enter_again(header.last_offset, position, self._largest)
            self._since_entry = 0
        self._since_entry += header.size

    def truncate_to(self, offset: int) -> int:
        """Remove every batch whose last offset is ≥ `offset`; how many bytes went."""
        place = self.locate(offset)
        with self._guard:
            self._indexes.truncate_to(offset)
        removed = 0 if place is None else self.cut_file(place.position)
        if self.size == 0:
            self.created_ms = self._clock.now_ms()
            self._first_timestamp = None
        self._since_entry = 0
        if self.largest.timestamp >= 0:
            self._largest = self._read_largest()
        return removed

    def cut_file(self, size: int) -> int:
        """Cut the `.log` to `size` bytes, whatever the indexes say; how many bytes went."""
        removed = self.size - size
        self._log.truncate(size)
        return removed

    def _read_largest(self) -> TimestampOffset:
        """From the time index's last entry, then from the batches after it."""
        with self._guard:
            largest = self._indexes.times.last_entry
            start = self._indexes.position_near(largest.offset)
        for _, header in self.batches(start):
            if header.max_timestamp > largest.timestamp:
                largest = TimestampOffset(header.max_timestamp, header.last_offset)
        return largest

    # -- life of the files -----------------------------------------------------------------------

    def become_inactive(self) -> None:
        """Finish the segment: final time-index entry, exact file sizes, nothing open.

        One that is written to again, after recovery say, counts from zero to its next index entry, as a broker does.
        """
        largest = self.largest
        self._since_entry = 0
        with self._guard:
            self._indexes.finish(largest)
        self._log.trim()
        self.close()

    def sync_log(self) -> None:
        """The batches are on the disk when this returns; the indexes, which can be rebuilt, may not be."""
        self._log.sync()

    def sync(self) -> None:
        """All files of the segment are on the disk when this returns."""
        self._log.sync()
        self._indexes.sync()

    def close(self) -> None:
        """Close descriptors; change nothing (S4)."""
        self._log.close()
        with self._guard:
            self._indexes.release()

    def change_suffix(self, suffix: str) -> None:
        """Rename all files, e.g. to `.deleted`.

        The seal goes first, so that it never stands beside another segment's files; then the `.log`: an index
        alone means nothing, a `.log` alone gets new indexes.
        """
        self.close()
        with self._guard:
            seal = offset_file(self.folder, self.base_offset, SEAL, self.suffix)
            if self._files.exists(seal):
                self._files.rename(seal, offset_file(self.folder, self.base_offset, SEAL, suffix))
            self._log.rename_to(offset_file(self.folder, self.base_offset, LOG, suffix))
            self._indexes.change_suffix(self.base_offset, suffix)
            self.suffix = suffix

    def delete(self) -> None:
        """Unlink all files; those that are gone already are fine."""
        self._files.unlink(offset_file(self.folder, self.base_offset, SEAL, self.suffix), missing_ok=True)
        self._log.delete()
        with self._guard:
            self._indexes.delete()

    def set_mtime_ms(self, mtime_ms: int) -> None:
        """Date the files as their source was: retention of batches without timestamps goes by it."""
        for kind in (LOG, INDEX, TIME_INDEX):
            path = offset_file(self.folder, self.base_offset, kind, self.suffix)
            if self._files.exists(path):
                self._files.set_mtime_ms(path, mtime_ms)
