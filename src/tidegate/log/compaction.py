"""Compact a partition: map the dirty keys, rewrite the log segments below, swap them in.

1  keyed records of [first dirty, first uncleanable) → key map, until it is full
2  all segments below the mapped end, in groups → `<first base>.log.cleaned` and its indexes
3  each group finished, synced and dated like its last source, then swapped for its sources

`compaction_plan` decides what is dirty, `compaction_filter` which records stay. Memory is bounded by the key map, one
piece of a segment (or one batch), and its decoded records.

G1  After `CleanedSegment.finish` every file has its exact size and is synced; nothing else is swapped in.
N2  Every batch's CRC is checked as it is read: damage stops the compaction and is never copied under a new CRC.
N4  A compaction that fails before its swap leaves the log unchanged and removes its own files; a crash during
    the swap is finished or undone by `recovery`.

Thread rule: one `Cleaner`, one thread. The partition may be appended to and read meanwhile; if it is
truncated or loses a source segment, the swap raises `ConflictError` and nothing has changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.clock import Clock
from tidegate.errors import ConflictError, CorruptError, InvalidError, TidegateError, verify_command
from tidegate.files import Bytes, Files
from tidegate.log.batch_file import BatchFile
from tidegate.log.compaction_filter import (
    DEFAULT_BYTES,
    DEFAULT_LOAD_FACTOR,
    CleanedTransactions,
    CleaningFilter,
    Kept,
    KeyMap,
    Rules,
    follow_transactions,
)
from tidegate.log.compaction_plan import MAX_RELATIVE_OFFSET, Cleanable, between, group_segments
from tidegate.log.format.batch import CONTROL_BIT, NO_TIMESTAMP, BatchHeader
from tidegate.log.format.decode import BatchTable, DecodeLimits, decode, scan_batches
from tidegate.log.format.partition_files import (
    CLEANED,
    INDEX,
    LOG,
    TIME_INDEX,
    TRANSACTION_INDEX,
    offset_file,
)
from tidegate.log.indexes import (
    AbortedTxn,
    OffsetIndex,
    OffsetPosition,
    TimeIndex,
    TimestampOffset,
    TransactionIndex,
)
from tidegate.log.segment import LogSegment
from tidegate.log.topic_config import TopicConfig
from tidegate.randomness import Randomness

if TYPE_CHECKING:
    from tidegate.log.partition import PartitionLog
    from tidegate.log.topic_config import BrokerConfig


Longs = NDArray[np.int64]


class CleanedSegment:
    """The replacement of one group of log segments; files left by an earlier attempt are removed first."""

    def __init__(self, folder: Path, base_offset: int, config: TopicConfig, *, files: Files) -> None:
        self.base_offset = base_offset
        self._files = files
        self._interval_bytes = config.index_interval_bytes
        self._index_bytes = config.segment_index_bytes
        self._paths = {
            kind: offset_file(folder, base_offset, kind, CLEANED)
            for kind in (LOG, INDEX, TIME_INDEX, TRANSACTION_INDEX)
        }
        self._remove_files()
        self._log = BatchFile(self._paths[LOG], files=files)
        self._transactions = TransactionIndex(self._paths[TRANSACTION_INDEX], base_offset, files=files)
        self._places: list[OffsetPosition] = []
        self._times: list[TimestampOffset] = []
        self._largest = TimestampOffset(NO_TIMESTAMP, base_offset)
        self._indexed_position = 0
        self._log.create()

    @property
    def size(self) -> int:
        return self._log.size

    def append(self, data: Bytes, sizes: Longs, last_offsets: Longs, max_timestamps: Longs) -> None:
        """Add consecutive batches: their bytes, and the size, last offset and largest timestamp of each."""
        self._require_room(int(last_offsets[0]), int(last_offsets[-1]))
        start = self._log.append(data)
        positions = start + np.cumsum(sizes) - sizes
        largest, holder = self._running_largest(max_timestamps, last_offsets)
        while True:
            # An entry is due at the first batch more than an interval after the last indexed one.
            due = self._indexed_position + self._interval_bytes
            batch = int(np.searchsorted(positions, due, side="right"))
            if batch == len(positions):
                break
            self._indexed_position = int(positions[batch])
            self._enter(int(last_offsets[batch]), TimestampOffset(int(largest[batch]), int(holder[batch])))
        self._largest = TimestampOffset(int(largest[-1]), int(holder[-1]))

    def add_aborted(self, transaction: AbortedTxn) -> None:
        self._transactions.append(transaction)

    def finish(self) -> None:
        """Add the last time-index entry, trim and sync all files (G1)."""
        self._enter_time(self._largest, slots=1)
        self._log.sync()
        self._log.close()
        relative = [(place.offset - self.base_offset, place.position) for place in self._places]
        self._write(INDEX, b"".join(OffsetIndex.layout.pack(*entry) for entry in relative))
        times = [(entry.timestamp, entry.offset - self.base_offset) for entry in self._times]
        self._write(TIME_INDEX, b"".join(TimeIndex.layout.pack(*entry) for entry in times))
        self._transactions.sync()
        self._transactions.release()

    def discard(self) -> None:
        """Remove all files of the replacement."""
        self._log.close()
        self._transactions.release()
        self._remove_files()

    def _remove_files(self) -> None:
        for path in self._paths.values():
            if self._files.exists(path):
                self._files.unlink(path, missing_ok=True)

    def _require_room(self, first: int, last: int) -> None:
        if not 0 <= first - self.base_offset <= last - self.base_offset <= MAX_RELATIVE_OFFSET:
            raise InvalidError(
                f"{self._log.path} cannot hold offsets {first} to {last}: they lie before its base or too far "
                f"behind it"
            )

    def _enter(self, last_offset: int, largest: TimestampOffset) -> None:
        if len(self._places) < self._index_bytes // OffsetIndex.layout.size:
            self._places.append(OffsetPosition(last_offset, self._indexed_position))
        self._enter_time(largest, slots=2)  # the last slot is for the entry of `finish`

    def _enter_time(self, largest: TimestampOffset, *, slots: int) -> None:
        """Add a time-index entry if the timestamp is larger than all before it."""
        known = self._times[-1].timestamp if self._times else NO_TIMESTAMP
        if (
            largest.timestamp > known
            and len(self._times) + slots <= self._index_bytes // TimeIndex.layout.size
        ):
            self._times.append(largest)

    def _write(self, kind: str, entries: bytes) -> None:
        with self._files.open(self._paths[kind], create=True) as file:
            if entries:
                file.write_at(0, entries)
            file.sync()

    def _running_largest(self, timestamps: Longs, last_offsets: Longs) -> tuple[Longs, Longs]:
        """Return for each batch the largest timestamp so far, and the last offset of the first batch that had it."""
        running: Longs = np.maximum(np.maximum.accumulate(timestamps), self._largest.timestamp)
        before = np.concatenate(([self._largest.timestamp], running[:-1]))
        newer = np.where(timestamps > before, np.arange(len(timestamps)), -1)
        holder = np.maximum.accumulate(newer)
        return running, np.where(holder < 0, self._largest.offset, last_offsets[holder])


SMALLEST_STRETCH_BYTES = 4 << 20
MAX_DECODED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class CleanerSettings:
    """The broker-level settings of compaction."""

    map_bytes: int = DEFAULT_BYTES
    map_load_factor: float = DEFAULT_LOAD_FACTOR
    stretch_bytes: int = SMALLEST_STRETCH_BYTES
    max_bytes_per_second: float = float("inf")
    limits: DecodeLimits = field(default_factory=lambda: DecodeLimits(max_total_bytes=MAX_DECODED_BYTES))

    @classmethod
    def of(cls, broker: BrokerConfig) -> CleanerSettings:
        return cls(
            map_bytes=broker.log_cleaner_dedupe_buffer_size // max(1, broker.log_cleaner_threads),
            map_load_factor=broker.log_cleaner_io_buffer_load_factor,
            stretch_bytes=max(SMALLEST_STRETCH_BYTES, broker.log_cleaner_io_buffer_size),
            max_bytes_per_second=broker.log_cleaner_io_max_bytes_per_second,
        )


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """The result of one compaction. Offsets [first_dirty, next_dirty) are clean now; the next one starts there."""

    topic: str
    partition: int
    first_dirty: int
    next_dirty: int
    segments_before: int
    segments_after: int
    bytes_before: int
    bytes_after: int
    records_before: int
    records_after: int
    keys: int
    map_full: bool
    elapsed_ms: int


@dataclass(slots=True)
class _Counts:
    bytes_before: int = 0
    bytes_after: int = 0
    records_before: int = 0
    records_after: int = 0


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Consecutive whole batches of one segment and their records, control records included."""

    buffer: bytes
    table: BatchTable
    records: pa.RecordBatch
    end: int


class Cleaner:
    """Compacts partitions, one after the other."""

    def __init__(
        self,
        *,
        files: Files,
        clock: Clock,
        randomness: Randomness,
        settings: CleanerSettings | None = None,
    ) -> None:
        self._files = files
        self._clock = clock
        self._randomness = randomness
        self._settings = settings or CleanerSettings()
        self._stopped = False

    def stop(self) -> None:
        """Make a compaction on another thread stop soon, with a `ConflictError`."""
        self._stopped = True

    def clean(self, log: PartitionLog, part: Cleanable) -> CompactionReport:
        """Compact `part` of the partition; the caller stores `next_dirty` as its cleaner checkpoint."""
        cuts = log.cuts
        started_ms = self._clock.monotonic_ms()
        now_ms = self._clock.now_ms()
        key_map, mapped_to = self._map_keys(log, part)
        segments = between(log.segments, 0, mapped_to + 1)
        groups = group_segments(
            segments,
            max_bytes=log.config.segment_bytes,
            max_index_bytes=log.config.segment_index_bytes,
            first_uncleanable=part.first_uncleanable,
        )
        rules = Rules(
            now_ms=now_ms,
            delete_retention_ms=log.config.delete_retention_ms,
            mapped_to=mapped_to,
            round_end=part.first_uncleanable,
            max_decompressed_bytes=self._settings.limits.max_decompressed_bytes,
        )
        counts = _Counts()
        transactions = CleanedTransactions()
        for group in groups:
            chosen = CleaningFilter(key_map, rules, dict(log.active_producers), transactions)
            self._clean_group(log, group, chosen, counts, cuts)
        return CompactionReport(
            topic=log.topic,
            partition=log.partition,
            first_dirty=part.first_dirty,
            next_dirty=max(mapped_to + 1, part.first_dirty),
            segments_before=len(segments),
            segments_after=len(groups),
            bytes_before=counts.bytes_before,
            bytes_after=counts.bytes_after,
            records_before=counts.records_before,
            records_after=counts.records_after,
            keys=key_map.entries,
            map_full=key_map.full,
            elapsed_ms=self._clock.monotonic_ms() - started_ms,
        )

    # -- 1: the map ------------------------------------------------------------------------------

    def _map_keys(self, log: PartitionLog, part: Cleanable) -> tuple[KeyMap, int]:
        """Return the key map and the last offset it covers; -1 when there is nothing to map."""
        key_map = KeyMap(
            self._randomness,
            memory_bytes=self._settings.map_bytes,
            load_factor=self._settings.map_load_factor,
        )
        start, stop = part.first_dirty, part.first_uncleanable
        dirty = between(log.segments, start, stop)
        tracked = CleanedTransactions()
        tracked.announce(log.collect_aborted(start, stop))
        mapped_to = -1
        for position, segment in enumerate(dirty):
            place = segment.locate(start) if segment.base_offset < start else None
            first = 0 if segment.base_offset >= start else segment.size if place is None else place.position
            for stretch in self._stretches(log, segment, first):
                mapped_to, fits = _map_stretch(key_map, tracked, stretch, start, mapped_to)
                if not fits:
                    return key_map, mapped_to
            # Missing offsets at a segment's end count as mapped, too; otherwise a gap would be compacted
            # again and again.
            mapped_to = (dirty[position + 1].base_offset if position + 1 < len(dirty) else stop) - 1
        return key_map, mapped_to

    # -- 2 and 3: the rewriting ------------------------------------------------------------------

    def _clean_group(
        self,
        log: PartitionLog,
        group: list[LogSegment],
        chosen: CleaningFilter,
        counts: _Counts,
        cuts: int,
    ) -> None:
        base_offset = group[0].base_offset
        cleaned = CleanedSegment(log.folder, base_offset, log.config, files=self._files)
        swapping = False
        try:
            for position, segment in enumerate(group):
                following = group[position + 1].base_offset if position + 1 < len(group) else None
                end = segment.read_next_offset() if following is None else following
                chosen.transactions.announce(log.collect_aborted(segment.base_offset, end))
                for stretch in self._stretches(log, segment, 0):
                    kept = chosen.filter(stretch.buffer, stretch.table, stretch.records)
                    self._write(cleaned, kept)
                    counts.records_before += kept.records_read
                    counts.records_after += kept.records_kept
                counts.bytes_before += segment.size
            cleaned.finish()
            replacement = LogSegment(
                log.folder,
                base_offset,
                log.config,
                files=self._files,
                clock=self._clock,
                randomness=self._randomness,
                suffix=CLEANED,
            )
            replacement.set_mtime_ms(group[-1].mtime_ms)
            counts.bytes_after += replacement.size
            with log.lock:
                there = {id(segment) for segment in log.segments}
                if log.cuts != cuts or not all(id(segment) in there for segment in group):
                    raise ConflictError(
                        f"{log.folder.name} was cut while it was compacted; nothing was changed, the next pass "
                        f"starts afresh"
                    )
                swapping = True
                log.replace_segments([replacement], group)
        except BaseException:
            if not swapping:  # during and after the swap, the files belong to the partition
                with suppress(TidegateError, OSError):  # the first error is the one to raise (N4)
                    cleaned.discard()
            raise

    def _write(self, cleaned: CleanedSegment, kept: Kept) -> None:
        if kept.data:
            cleaned.append(kept.data, kept.sizes, kept.last_offsets, kept.max_timestamps)
            self._spend(len(kept.data))
        for transaction in kept.aborted:
            cleaned.add_aborted(transaction)

    # -- reading ---------------------------------------------------------------------------------

    def _stretches(self, log: PartitionLog, segment: LogSegment, first: int) -> Iterator[_Stretch]:
        """Yield all batches of a segment from byte `first` on, checked and decoded, a bounded piece at a time."""
        position, size = first, segment.size
        with segment.reader() as file:
            while position < size:
                if self._stopped:
                    raise ConflictError(
                        f"the compaction of {log.folder.name} was stopped; nothing was changed"
                    )
                buffer = file.read_at(position, min(self._settings.stretch_bytes, size - position))
                table = scan_batches(buffer, path=segment.path, file_position=position)
                if len(table) == 0:
                    buffer = file.read_at(position, BatchHeader.parse(buffer).size)
                    table = scan_batches(buffer, path=segment.path, file_position=position)
                if len(table) == 0:
                    raise CorruptError(
                        f"{segment.path} ends inside the batch at {position}; look with "
                        f"{verify_command(log.folder)}: it is not compacted until it is whole",
                        path=segment.path,
                        position=position,
                    )
                stretch = self._decode(log, segment, buffer, table, position)
                yield stretch
                self._spend(stretch.end)
                position += stretch.end

    def _decode(
        self, log: PartitionLog, segment: LogSegment, buffer: bytes, table: BatchTable, position: int
    ) -> _Stretch:
        """Decode as many of the batches as fit the memory limit: all of them, else half, and so on."""
        while True:
            end = int(table.position[-1] + table.size[-1])
            try:
                records = decode(
                    memoryview(buffer)[:end],
                    topic=log.topic,
                    partition=log.partition,
                    control="include",
                    limits=self._settings.limits,
                    path=segment.path,
                    file_position=position,
                )
                return _Stretch(buffer, table, records, end)
            except InvalidError:
                if len(table) == 1:
                    raise
                table = table[: len(table) // 2]

    def _spend(self, count: int) -> None:
        """Sleep after each piece to keep to `log.cleaner.io.max.bytes.per.second`."""
        rest_ms = 1000 * count / self._settings.max_bytes_per_second
        if rest_ms >= 1:
            self._clock.sleep_ms(int(rest_ms))


def _map_stretch(
    key_map: KeyMap, tracked: CleanedTransactions, stretch: _Stretch, start: int, mapped_to: int
) -> tuple[int, bool]:
    """Put a piece's keys into the map; return the last offset it covers now, and whether all keys fitted."""
    table, records = stretch.table, stretch.records
    aborted, _ = follow_transactions(tracked, stretch.buffer, table)
    left_out = aborted | ((table.attributes & CONTROL_BIT) != 0)
    batch_of_row = np.repeat(np.arange(len(table)), table.count)
    offsets = records.column("offset").to_numpy()
    keys = records.column("key")
    mask = pc.is_valid(keys).to_numpy(zero_copy_only=False) & (offsets >= start) & ~left_out[batch_of_row]
    done = key_map.put(keys, offsets, mask)
    if done == len(mask):
        return max(mapped_to, int(table.last_offset[-1])), True
    # Full: batches before this one are mapped whole, this one up to the last record that was added.
    full_batch = int(batch_of_row[done])
    if full_batch > 0:
        mapped_to = max(mapped_to, int(table.last_offset[full_batch - 1]))
    went_in = np.flatnonzero(mask[:done])
    if len(went_in):
        mapped_to = max(mapped_to, int(offsets[went_in[-1]]))
    return mapped_to, False
