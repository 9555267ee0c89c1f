"""A log segment in the making: the `.cleaned` files compaction writes before it swaps them in.

Owns the four files `<base>.log.cleaned`, `.index.cleaned`, `.timeindex.cleaned` and, when a transaction was
aborted, `.txnindex.cleaned`. Batches come many at a time as columns, so the index rule (see `segment`) is
applied here to arrays, with one Python step for each entry and none for each batch; both indexes are held in
memory, where they are at most twice `segment.index.bytes`, and written once.

Invariants:
G1  After `finish` every file is at its exact size and on the disk.
G2  An index that is full gets no more entries. Indexes are sparse anyway, so look-ups stay right.

Thread rule: one cleaning, one segment in the making.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tidegate.errors import InvalidError
from tidegate.files import Bytes, Files
from tidegate.log.cleaning.compaction import MAX_RELATIVE_OFFSET
from tidegate.log.format.batch import NO_TIMESTAMP
from tidegate.log.segments.batch_file import BatchFile
from tidegate.log.segments.file_names import CLEANED, INDEX, LOG, TIME_INDEX, TRANSACTION_INDEX, offset_file
from tidegate.log.segments.offset_index import OffsetIndex, OffsetPosition
from tidegate.log.segments.time_index import TimeIndex, TimestampOffset
from tidegate.log.segments.transaction_index import AbortedTxn, TransactionIndex
from tidegate.log.topics.topic_config import TopicConfig

Longs = NDArray[np.int64]


class CleanedSegment:
    """The replacement of one group of log segments; leftovers of an earlier attempt are removed first."""

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
        """Add consecutive batches: their bytes, and for each its size, last offset and largest timestamp."""
        self._require_room(int(last_offsets[0]), int(last_offsets[-1]))
        start = self._log.append(data)
        positions = start + np.cumsum(sizes) - sizes
        largest, holder = self._running_largest(max_timestamps, last_offsets)
        while True:
            # An entry is due at the first batch more than an interval behind the last indexed one.
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
        """The last time-index entry; then everything at its final size and on the disk (G1)."""
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
        """Give up: nothing of it stays."""
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
        """Only a timestamp larger than all before it is worth an entry."""
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
        """For each batch the largest timestamp up to it, and the last offset of the first batch with that."""
        running: Longs = np.maximum(np.maximum.accumulate(timestamps), self._largest.timestamp)
        before = np.concatenate(([self._largest.timestamp], running[:-1]))
        newer = np.where(timestamps > before, np.arange(len(timestamps)), -1)
        holder = np.maximum.accumulate(newer)
        return running, np.where(holder < 0, self._largest.offset, last_offsets[holder])
