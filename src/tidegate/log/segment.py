"""One log segment, a `.log` file of batches with its three indexes; and the ordered list of a partition's segments.

The index rule, for a batch at file position `p`: a larger maximum timestamp is remembered with the batch's last
offset; if more than `index.interval.bytes` were written since the last entry, then (last offset → p) enters the
offset index and the largest timestamp so far the time index. So the first batch is never indexed.

An offset index entry is proved or refuted by the batch at its position. A time index, a transaction index, and the
offset index as a bound cannot be proved that way, so `IndexTrust` compares each file with the segment's seal at its
first use. Without a seal the batch headers are read instead; a transaction index must then be in order.

S1  every offset o in the segment satisfies 0 ≤ o − base offset ≤ 2147483647;
S2  an append that fails leaves file, indexes and counters as they were;
S3  an index position that is wrong is ignored: the file is searched from its start, and sound batches
    after damage are found; an index that is damaged or missing gives position 0, never an error;
S4  a segment that is not written to holds no file descriptor;
S5  index files exist from the first append on, at full size, as a broker makes them; reading creates none.

Thread rule: one writer. Any thread may read: `_guard` makes an index look-up and the opening of the file one
step, so that a rename cannot come between them. `SegmentList` values are immutable.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from tidegate.clock import Clock
from tidegate.errors import CorruptError, InvalidError
from tidegate.files import Bytes, File, Files
from tidegate.log.batch_file import (
    WINDOW_BYTES,
    BatchFile,
    BatchPlace,
    find_around,
    find_offset,
    headers,
    sound_headers,
)
from tidegate.log.format.batch import HEADER_SIZE, NO_TIMESTAMP, BatchHeader
from tidegate.log.format.partition_files import (
    INDEX,
    INDEX_SUFFIXES,
    LOG,
    SEAL,
    TIME_INDEX,
    offset_file,
)
from tidegate.log.indexes import INT32_MAX as MAX_RELATIVE_OFFSET
from tidegate.log.indexes import (
    AbortedTxn,
    OffsetIndex,
    OffsetPosition,
    TimeIndex,
    TimestampOffset,
    TransactionIndex,
)
from tidegate.log.seals import Seal, read_seal, sum_file
from tidegate.log.topic_config import TopicConfig
from tidegate.randomness import Randomness, SeededRandomness

logger = logging.getLogger("tidegate.log")


class IndexTrust:
    """Decides by a log segment's seal which of its index files can be trusted."""

    def __init__(self, folder: Path, base_offset: int, *, files: Files) -> None:
        self._folder = folder
        self._base_offset = base_offset
        self._files = files
        self._seal: Seal | None = None
        self._is_seal_read = False
        self._sound: dict[str, bool] = {}
        self._are_transactions_sound = False

    def seal(self, size: int) -> Seal | None:
        """Return the segment's seal, if it is readable and was made for a `.log` of this size."""
        if not self._is_seal_read:
            try:
                self._seal = read_seal(self._files, self._folder, self._base_offset)
            except CorruptError as error:
                logger.warning("%s; the log segment's own batches are read instead", error)
            self._is_seal_read = True
        seal = self._seal
        return seal if seal is not None and seal.files[".log"].size == size else None

    def is_sound(self, index: OffsetIndex | TimeIndex, size: int) -> bool:
        """Return whether an index may be trusted without checking its entries against the log."""
        kind = index.path.suffix
        if kind not in self._sound:
            seal = self.seal(size)
            sound = seal is not None and sum_file(self._files, index.path) == seal.files.get(kind)
            if seal is not None and not sound:
                logger.warning("%s is damaged and not used; the log segment is walked instead", index.path)
            self._sound[kind] = sound
        return self._sound[kind]

    def require_sound(self, index: TransactionIndex, size: int) -> None:
        """Raise unless the transaction index may be trusted."""
        if self._are_transactions_sound:
            return
        seal = self.seal(size)
        if seal is None:
            index.sanity_check()
        elif sum_file(self._files, index.path) != seal.files.get(".txnindex"):
            raise CorruptError(
                f"{index.path} was changed since it was sealed, so aborted transactions cannot be told from "
                f"committed ones; remove it and the seal beside it and reopen the log to rebuild it",
                path=index.path,
            )
        self._are_transactions_sound = True


class OffsetsGoBackError(CorruptError):
    """The offsets of a log segment do not ascend. The loader catches it and acts as a broker does."""


class LogSegment:
    """Files `<base>.log/.index/.timeindex/.txnindex` of one folder; the constructor does not access the disk.

    With `read_only` the indexes belong to another process that may be writing; they are not changed.
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
        offsets, times, transactions = (
            offset_file(folder, base_offset, kind, suffix) for kind in INDEX_SUFFIXES
        )
        limit = config.segment_index_bytes
        self.offsets = OffsetIndex(offsets, base_offset, limit, files=files, read_only=read_only)
        self.times = TimeIndex(times, base_offset, limit, files=files, read_only=read_only)
        self.transactions = TransactionIndex(transactions, base_offset, files=files, read_only=read_only)
        self._indexes = (self.offsets, self.times, self.transactions)
        self._are_indexes_prepared = False
        self._trust = IndexTrust(folder, base_offset, files=files)
        self._since_entry = 0
        self._first_timestamp: int | None = None
        self._largest: TimestampOffset | None = None

    def create(self) -> LogSegment:
        """Create the (empty, perhaps preallocated) `.log`; index files follow with the first append."""
        self._log.create(self._preallocate_bytes)
        self._largest = TimestampOffset(NO_TIMESTAMP, self.base_offset)
        return self

    def __repr__(self) -> str:
        return f"LogSegment({self._log.path})"

    # -- state -----------------------------------------------------------------------------------

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
    def is_offset_index_full(self) -> bool:
        return self.offsets.is_full

    @property
    def is_time_index_full(self) -> bool:
        return self.times.is_full

    @property
    def offset_index_bytes(self) -> int:
        """Bytes in use, without preallocated ones."""
        return self.offsets.size_bytes

    @property
    def time_index_bytes(self) -> int:
        return self.times.size_bytes

    @property
    def largest(self) -> TimestampOffset:
        """The largest timestamp so far, and the last offset of the first batch that had it."""
        if self._largest is None:
            if (seal := self._trust.seal(self.size)) is not None:
                self._largest = TimestampOffset(seal.max_timestamp, seal.max_timestamp_offset)
            else:
                with self._guard:
                    self._largest = self.times.last_entry
        return self._largest

    @property
    def largest_timestamp(self) -> int:
        """The timestamp that retention uses: the largest record timestamp, or the file's mtime if there is none."""
        timestamp = self.largest.timestamp
        return timestamp if timestamp >= 0 else self.mtime_ms

    @property
    def seal(self) -> Seal | None:
        """The segment's seal, if it was made for a `.log` of this size."""
        return self._trust.seal(self.size)

    def is_older_than(self, timestamp: int) -> bool:
        """Return whether every record is known to be older than `timestamp`; False where only a full read can tell.

        The seal answers if there is one. Otherwise the time index is trusted as far as the log confirms it: its last
        entry matches its batch, and no sound batch after that one is newer.
        """
        if (seal := self.seal) is not None:
            return seal.max_timestamp < timestamp
        try:
            with self._guard:
                entry = self.times.last_entry
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
        """Return whether the segment's indexes can store the offset (S1)."""
        return 0 <= offset - self.base_offset <= MAX_RELATIVE_OFFSET

    # -- reading ---------------------------------------------------------------------------------

    def reader(self) -> File:
        """Return a descriptor of the `.log`; the caller closes it."""
        with self._guard:
            return self._log.reader()

    def read_at(self, position: int, length: int) -> bytes:
        with self.reader() as file:
            return file.read_at(position, length)

    def batches(
        self, start: int = 0, end: int | None = None, *, window: int = WINDOW_BYTES
    ) -> Iterator[tuple[int, BatchHeader]]:
        """Yield the position and header of each whole batch from byte `start` on."""
        with self.reader() as file:
            yield from headers(file, start, self.size if end is None else end, window=window)

    def open_near(self, offset: int) -> tuple[File, int]:
        """Return a descriptor of the `.log` and the position from which to search for `offset` (S3)."""
        with self._guard:
            return self._log.reader(), self._position_near(offset)

    def _position_near(self, offset: int) -> int:
        """Return the byte position from which to search for the batch that holds `offset`."""
        try:
            return self.offsets.lookup(offset).position
        except CorruptError:
            return 0

    def open_before(self, timestamp: int, from_offset: int) -> tuple[File, int, int]:
        """Return a descriptor, and position and offset from which to search for records at or after
        `timestamp` (S3).
        """
        from_offset = max(from_offset, self.base_offset)
        with self._guard:
            if self._believes(self.times):
                with suppress(CorruptError):  # the index is only a hint (S3)
                    from_offset = max(from_offset, self.times.lookup(timestamp).offset)
            file, hint = self._log.reader(), self._position_near(from_offset)
        try:
            place = self.locate_in(file, hint, from_offset, self.size)
        except BaseException:
            file.close()
            raise
        return file, self.size if place is None else place.position, from_offset

    def _believes(self, index: OffsetIndex | TimeIndex) -> bool:
        """Return whether an index may be used where the log cannot confirm its entries."""
        return self._are_indexes_prepared or self._trust.is_sound(index, self.size)

    def locate(self, offset: int, end: int | None = None) -> BatchPlace | None:
        """Return the first batch below byte `end` whose last offset is ≥ `offset`."""
        file, hint = self.open_near(offset)
        with file:
            return self.locate_in(file, hint, offset, self.size if end is None else end)

    def locate_in(
        self, file: File, hint: int, offset: int, end: int, *, bound: int | None = None
    ) -> BatchPlace | None:
        """Like `locate`, with the descriptor and hint of `open_near`; `bound` as in `find_offset`."""
        window = min(self.index_interval_bytes + HEADER_SIZE, WINDOW_BYTES)
        if 0 < hint < end:
            try:
                place = find_offset(file, hint, end, offset, window=window, bound=bound)
            except CorruptError:
                place = None
            # If the first batch begins beyond the offset, the hint may have skipped its predecessor.
            if place is not None and (place.position > hint or place.base_offset <= offset):
                return place
        try:
            return find_offset(file, 0, end, offset, window=window, bound=bound)
        except CorruptError:
            return find_around(file, end, offset, bound=bound)

    def read_next_offset(self) -> int:
        """Return the offset after the last batch; the base offset when there is none. Reads only the tail."""
        end, next_offset = self.size, self.base_offset
        last = self.offsets.last_offset
        file, hint = self.open_near(last)
        with file:
            place = self.locate_in(file, hint, last, end)
            if place is not None:
                for _, header in headers(file, place.position, end):
                    next_offset = header.next_offset
        return next_offset

    def upper_bound(self, start: int, position: int, size: int) -> int | None:
        """Return an indexed offset at least `size` bytes after `position`; None when the index ends before."""
        with self._guard, suppress(CorruptError):
            if self._believes(self.offsets):
                bound = self.offsets.upper_bound(OffsetPosition(start, position), size)
                return None if bound is None else bound.offset
        return None

    def collect_aborted(self, start: int, upper: int) -> tuple[list[AbortedTxn], bool]:
        """Return the aborted transactions ended here that overlap [start, upper), and if no later segment has any."""
        with self._guard:
            if not self._are_indexes_prepared:
                self._trust.require_sound(self.transactions, self.size)
            return self.transactions.collect_aborted(start, upper)

    # -- writing ---------------------------------------------------------------------------------

    def append(self, data: Bytes, header: BatchHeader) -> int:
        """Write one batch and apply the index rule to it; return its position (S1, S2)."""
        self._require_room(header.last_offset)
        largest = self._largest_with(header.max_timestamp, header.last_offset)
        position = self._log.append(data)
        if self._since_entry > self.index_interval_bytes:
            try:
                with self._guard:
                    self.offsets.append(header.last_offset, position)
                    self.times.maybe_append(largest.timestamp, largest.offset)
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
        if not self._are_indexes_prepared:
            with self._guard:
                self._prepare_indexes()

    def _prepare_indexes(self) -> None:
        """Create both preallocated indexes, or grow them to full size, before the first append (S5)."""
        self.offsets.prepare()
        self.times.prepare()
        self._are_indexes_prepared = True

    def _take_back(self, position: int, last_offset: int) -> None:
        """Undo an append whose index entries could not be written."""
        self._log.cut_back(position)
        with self._guard:
            self.offsets.truncate_to(last_offset)
            self.times.truncate_to(last_offset)

    def add_aborted(self, transaction: AbortedTxn) -> None:
        with self._guard:
            self.transactions.append(transaction)

    def drop_aborted(self, offset: int) -> None:
        """Drop aborted transactions whose marker is at or after `offset`."""
        with self._guard:
            self.transactions.truncate_to(offset)

    def grow_indexes(self, max_bytes: int) -> None:
        """Make room for more index entries, for a segment that becomes active again."""
        with self._guard:
            self.offsets.max_bytes = self.times.max_bytes = max_bytes
            self._prepare_indexes()

    # -- recovery and truncation -----------------------------------------------------------------

    def reset_indexes(self) -> None:
        """Empty all three indexes; `reindex` adds entries again."""
        with self._guard:
            for index in self._indexes:
                index.reset()
            self._are_indexes_prepared = True
        self._largest = TimestampOffset(NO_TIMESTAMP, self.base_offset)
        self._first_timestamp = None
        self._since_entry = 0

    def reindex(self, header: BatchHeader, position: int) -> None:
        """Apply the index rule to a batch in the file; call in ascending order after `reset_indexes`.

        A full index stays as it is, because a sparser one is still correct. `OffsetsGoBackError` when offsets do
        not ascend.
        """
        self._largest = self._largest_with(header.max_timestamp, header.last_offset)
        if self._since_entry > self.index_interval_bytes:
            with self._guard:
                if self.offsets.entries and header.last_offset <= self.offsets.last_offset:
                    raise OffsetsGoBackError(
                        f"{self.path}: offset {header.last_offset} comes after {self.offsets.last_offset}",
                        path=self.path,
                        offset=header.last_offset,
                    )
                if not self.offsets.is_full:
                    self.offsets.append(header.last_offset, position)
                if not self.times.is_full:
                    self.times.maybe_append(self._largest.timestamp, self._largest.offset)
            self._since_entry = 0
        self._since_entry += header.size

    def truncate_to(self, offset: int) -> int:
        """Remove every batch whose last offset is ≥ `offset`; return the number of bytes removed."""
        place = self.locate(offset)
        with self._guard:
            for index in self._indexes:
                index.truncate_to(offset)
            self._prepare_indexes()
        removed = 0 if place is None else self.cut_file(place.position)
        if self.size == 0:
            self.created_ms = self._clock.now_ms()
            self._first_timestamp = None
        self._since_entry = 0
        if self.largest.timestamp >= 0:
            self._largest = self._read_largest()
        return removed

    def cut_file(self, size: int) -> int:
        """Cut the `.log` to `size` bytes, whatever the indexes say; return the number of bytes removed."""
        removed = self.size - size
        self._log.truncate(size)
        return removed

    def _read_largest(self) -> TimestampOffset:
        """Return the largest timestamp from the time index's last entry and the batches after it."""
        with self._guard:
            largest = self.times.last_entry
            start = self._position_near(largest.offset)
        for _, header in self.batches(start):
            if header.max_timestamp > largest.timestamp:
                largest = TimestampOffset(header.max_timestamp, header.last_offset)
        return largest

    # -- lifecycle of the files ------------------------------------------------------------------

    def become_inactive(self) -> None:
        """Finish the segment: add the final time-index entry, trim the files, close descriptors.

        A segment that is written again, for example after recovery, counts from zero to its next index entry, as in
        a broker.
        """
        largest = self.largest
        self._since_entry = 0
        with self._guard:
            # A slot of the time index was kept for this entry.
            self.times.maybe_append(largest.timestamp, largest.offset, skip_full_check=True)
            self.offsets.trim()
            self.times.trim()
            self.transactions.settle()
            self._are_indexes_prepared = False
        self._log.trim()
        self.close()

    def sync_log(self) -> None:
        """Sync the `.log`; the indexes, which can be rebuilt, are not synced."""
        self._log.sync()

    def sync(self) -> None:
        """Sync all files of the segment."""
        self._log.sync()
        for index in self._indexes:
            index.sync()

    def close(self) -> None:
        """Close descriptors without changing the files (S4)."""
        self._log.close()
        with self._guard:
            for index in self._indexes:
                index.release()

    def change_suffix(self, suffix: str) -> None:
        """Rename all files, for example to `.deleted`.

        The seal is renamed first, so that it never lies next to another segment's files; then the `.log`: an index
        alone is ignored, a `.log` alone gets new indexes.
        """
        self.close()
        with self._guard:
            seal = offset_file(self.folder, self.base_offset, SEAL, self.suffix)
            if self._files.exists(seal):
                self._files.rename(seal, offset_file(self.folder, self.base_offset, SEAL, suffix))
            self._log.rename_to(offset_file(self.folder, self.base_offset, LOG, suffix))
            for index, kind in zip(self._indexes, INDEX_SUFFIXES, strict=True):
                index.rename_to(offset_file(self.folder, self.base_offset, kind, suffix))
            self.suffix = suffix

    def delete(self) -> None:
        """Unlink all files; missing ones are ignored."""
        self._files.unlink(offset_file(self.folder, self.base_offset, SEAL, self.suffix), missing_ok=True)
        self._log.delete()
        with self._guard:
            for index in self._indexes:
                index.delete()

    def set_mtime_ms(self, mtime_ms: int) -> None:
        """Set the files' mtime to that of their source: retention uses it for batches without timestamps."""
        for kind in (LOG, INDEX, TIME_INDEX):
            path = offset_file(self.folder, self.base_offset, kind, self.suffix)
            if self._files.exists(path):
                self._files.set_mtime_ms(path, mtime_ms)


_UNUSED_CHANCE = SeededRandomness(0)  # for the roll jitter of segments that are never rolled


def read_only_segment(
    folder: Path, base_offset: int, config: TopicConfig, *, files: Files, clock: Clock
) -> LogSegment:
    """Return a log segment that another process may be writing; nothing of it is changed."""
    return LogSegment(
        folder, base_offset, config, files=files, clock=clock, randomness=_UNUSED_CHANCE, read_only=True
    )


class SegmentList:
    """Immutable list of log segments, ordered by base offset."""

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
        """Total bytes of all `.log` files."""
        return sum(segment.size for segment in self.segments)

    def floor_index(self, offset: int) -> int:
        """Return the index of the segment that holds the offset; −1 when it lies before the first."""
        return bisect_right(self._bases, offset) - 1

    def floor(self, offset: int) -> LogSegment | None:
        index = self.floor_index(offset)
        return None if index < 0 else self.segments[index]

    def get(self, base_offset: int) -> LogSegment | None:
        """Return the segment with exactly this base offset."""
        index = bisect_left(self._bases, base_offset)
        return self.segments[index] if self._bases[index : index + 1] == [base_offset] else None

    def between(self, start: int, stop: int) -> tuple[LogSegment, ...]:
        """Return the segments from the one that holds `start` to the last with a base below `stop`.

        Empty unless `start` < `stop`. A `start` before the first segment begins with the first.
        """
        if stop <= start:
            return ()
        return self.segments[max(self.floor_index(start), 0) : bisect_left(self._bases, stop)]

    def next_base(self, base_offset: int) -> int | None:
        """Return the base offset of the segment after this one."""
        index = bisect_right(self._bases, base_offset)
        return self._bases[index] if index < len(self._bases) else None

    def appended(self, segment: LogSegment) -> SegmentList:
        """Return the list with one more segment, whose base is above all others."""
        return SegmentList((*self.segments, segment))

    def with_segments(self, added: Iterable[LogSegment]) -> SegmentList:
        """Return the list with `added` inserted; an added segment replaces one with the same base."""
        merged = {segment.base_offset: segment for segment in self.segments}
        merged.update((segment.base_offset, segment) for segment in added)
        return SegmentList(merged[base] for base in sorted(merged))

    def without(self, removed: Iterable[LogSegment]) -> SegmentList:
        """Return the list without these objects; a newer segment with the same base stays."""
        gone = {id(segment) for segment in removed}
        return SegmentList(segment for segment in self.segments if id(segment) not in gone)
