"""One compaction of one partition: map the dirty keys, rewrite the log segments below, swap them in.

Owns the walk over the files and the order of things. What is dirty is `compaction`'s, which records stay is
`cleaning_filter`'s, what a key map holds is `key_map`'s, and the renames of the swap are the partition's
(`replace_segments`).

    1  keyed records of [first dirty, first uncleanable) → key map, until it is full
    2  all segments below the mapped end, in groups → `<first base>.log.cleaned` and its indexes
    3  each group finished, synced and dated like its last source, then swapped for its sources

Invariants:
N1  Nothing is read at or above the uncleanable offset, and nothing is swapped that was not synced.
N2  Every batch's CRC is checked as it is read: damage stops the cleaning, it is never copied under a new CRC.
N3  Memory is bounded by the key map, one stretch of batches (or one batch), and its decoded records.
N4  A cleaning that fails before its swap leaves the log as it was and removes its own files; one that dies
    in the swap is finished or undone by loading.

Thread rule: one cleaner, one thread. The partition may be appended to and read meanwhile; if it is truncated
or loses a source segment, the swap raises `ConflictError` and the cleaning has not happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.clock import Clock
from tidegate.errors import ConflictError, CorruptError, InvalidError, TidegateError, verify_command
from tidegate.files import Files
from tidegate.log.cleaning.cleaned_segment import CleanedSegment
from tidegate.log.cleaning.cleaned_transactions import CleanedTransactions
from tidegate.log.cleaning.cleaning_filter import CleaningFilter, Kept, LastBatch, Rules, follow_transactions
from tidegate.log.cleaning.compaction import Cleanable, between, group_segments
from tidegate.log.cleaning.key_map import DEFAULT_BYTES, DEFAULT_LOAD_FACTOR, KeyMap
from tidegate.log.format.batch import CONTROL_BIT, BatchHeader
from tidegate.log.format.decode import BatchTable, DecodeLimits, decode, scan_batches
from tidegate.log.segments.file_names import CLEANED
from tidegate.log.segments.segment import LogSegment
from tidegate.randomness import Randomness

if TYPE_CHECKING:
    from tidegate.log.partitions.partition import PartitionLog
    from tidegate.log.topics.topic_config import BrokerConfig

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
    """What one cleaning did. Offsets [first_dirty, next_dirty) are clean now; the next one starts there."""

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


class _CutWatch:
    """Knows whether the partition lost its end, or segments, since the cleaning began."""

    def __init__(self, log: PartitionLog) -> None:
        self._log = log
        self._cut = False

    def __enter__(self) -> _CutWatch:
        with self._log.lock:
            self._log.hooks.on_truncate.append(self._on_truncate)
        return self

    def __exit__(self, *_: object) -> None:
        with self._log.lock:
            self._log.hooks.on_truncate.remove(self._on_truncate)

    def require_uncut(self, sources: list[LogSegment]) -> None:
        """Raise if what was read is not what is there any more; call it under the partition's lock."""
        there = {id(segment) for segment in self._log.segments}
        if self._cut or not all(id(segment) in there for segment in sources):
            raise ConflictError(
                f"{self._log.folder.name} was cut while it was compacted; nothing was changed, the next pass "
                f"starts afresh"
            )

    def _on_truncate(self, _: LogSegment) -> None:
        self._cut = True


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
        """Make a cleaning that runs on another thread give up soon, with a `ConflictError`."""
        self._stopped = True

    def clean(self, log: PartitionLog, part: Cleanable) -> CompactionReport:
        """Compact `part` of the partition; the caller stores `next_dirty` as its cleaner checkpoint."""
        with _CutWatch(log) as watch:
            return self._clean(log, part, watch)

    def _clean(self, log: PartitionLog, part: Cleanable, watch: _CutWatch) -> CompactionReport:
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
            chosen = CleaningFilter(key_map, rules, last_batches(log), transactions)
            self._clean_group(log, group, chosen, counts, watch)
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
        """The map and the last offset it speaks for; -1 when there is nothing to map."""
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
            # Offsets missing at a segment's end are mapped too, or a gap would be visited for ever.
            mapped_to = (dirty[position + 1].base_offset if position + 1 < len(dirty) else stop) - 1
        return key_map, mapped_to

    # -- 2 and 3: the rewriting ------------------------------------------------------------------

    def _clean_group(
        self,
        log: PartitionLog,
        group: list[LogSegment],
        chosen: CleaningFilter,
        counts: _Counts,
        watch: _CutWatch,
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
                watch.require_uncut(group)
                swapping = True
                log.replace_segments([replacement], group)
        except BaseException:
            if not swapping:  # from there on, the files belong to the partition
                with suppress(TidegateError, OSError):  # the first error is the one to tell (N4)
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
        """All batches of a segment from byte `first` on, checked and decoded, a bounded piece at a time."""
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
        """As many of the batches as may be held decoded at once: half of them, and so on, if not all."""
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
        """Keep to `log.cleaner.io.max.bytes.per.second` by resting after each piece."""
        rest_ms = 1000 * count / self._settings.max_bytes_per_second
        if rest_ms >= 1:
            self._clock.sleep_ms(int(rest_ms))


def _map_stretch(
    key_map: KeyMap, tracked: CleanedTransactions, stretch: _Stretch, start: int, mapped_to: int
) -> tuple[int, bool]:
    """Put a stretch's keys into the map: the last offset it speaks for now, and whether all fitted."""
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
    # Full: the batches before this one are mapped whole, this one up to the last record that went in.
    full_batch = int(batch_of_row[done])
    if full_batch > 0:
        mapped_to = max(mapped_to, int(table.last_offset[full_batch - 1]))
    went_in = np.flatnonzero(mask[:done])
    if len(went_in):
        mapped_to = max(mapped_to, int(offsets[went_in[-1]]))
    return mapped_to, False


def last_batches(log: PartitionLog) -> dict[int, LastBatch]:
    """Where each active producer of the partition stands."""
    return {
        producer_id: LastBatch(entry.last_offset, entry.epoch)
        for producer_id, entry in log.active_producers.items()
    }
