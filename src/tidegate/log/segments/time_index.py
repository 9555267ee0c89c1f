"""`.timeindex`: from a timestamp to an offset at or before the first record that has it.

Entry, 12 bytes, big-endian: int64 largest timestamp of the log segment so far, int32 last offset of the
earliest batch holding that timestamp, minus the base offset. Timestamps grow strictly, offsets never fall.
The last slot is kept for the entry written when the log segment is rolled or closed, so the index is full
one entry early.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tidegate.errors import InvalidError
from tidegate.log.format.batch import NO_TIMESTAMP
from tidegate.log.segments.index_file import IndexFile


class TimestampOffset(NamedTuple):
    """No record before `offset` is younger than `timestamp` (epoch ms, -1 for none)."""

    timestamp: int
    offset: int


class TimeIndex(IndexFile[TimestampOffset]):
    """The sparse time index of one log segment."""

    layout = struct.Struct(">qi")
    offset_field = 1

    @property
    def is_full(self) -> bool:
        """True while one slot is left: that one is for the roll."""
        return self.entries >= self.max_entries - 1

    @property
    def last_entry(self) -> TimestampOffset:
        """The last entry, `(-1, base offset)` when there is none."""
        last = self._last_entry()
        return TimestampOffset(NO_TIMESTAMP, self.base_offset) if last is None else last

    def lookup(self, timestamp: int) -> TimestampOffset:
        """The last entry not younger than `timestamp`; `(-1, base offset)` when there is none."""
        with self._lock, self._opened_for_read() as file:
            self._look()
            found = 0 if file is None else self._count(file, 0, timestamp, inclusive=True)
            if file is None or found == 0:
                return TimestampOffset(NO_TIMESTAMP, self.base_offset)
            entry = self._read_entry(file, found - 1)
        if entry.offset < self.base_offset:
            raise self._corrupt(
                f"entry {found - 1} points at offset {entry.offset}, below the base {self.base_offset}",
                (found - 1) * self.entry_size,
                entry.offset,
            )
        return entry

    def maybe_append(self, timestamp: int, offset: int, *, skip_full_check: bool = False) -> bool:
        """Add an entry if `timestamp` is younger than the last one's; whether it was added.

        `skip_full_check` is for the roll, which may use the reserved slot.
        """
        with self._lock:
            if not skip_full_check and self.is_full:
                raise InvalidError(f"{self.path} is full ({self.entries} entries); roll a new log segment")
            last = self.last_entry
            if self._entries and offset < last.offset:
                raise InvalidError(
                    f"{self.path}: offset {offset} is below the last indexed offset {last.offset}"
                )
            if self._entries and timestamp < last.timestamp:
                raise InvalidError(
                    f"{self.path}: timestamp {timestamp} is below the last indexed timestamp {last.timestamp}"
                )
            if timestamp <= last.timestamp:
                return False
            self._append(timestamp, self._relative(offset), TimestampOffset(timestamp, offset))
            return True

    def sanity_check(self) -> None:
        super().sanity_check()
        with self._lock:
            if self.entries == 0:
                return
            first, last = self.entry(0), self.last_entry
            position = (self._entries - 1) * self.entry_size
            if last.timestamp < first.timestamp:
                raise self._corrupt(
                    f"the last timestamp {last.timestamp} is below the first, {first.timestamp}", position
                )
            if last.offset < self.base_offset:
                raise self._corrupt(
                    f"the last offset {last.offset} is below the base offset {self.base_offset}",
                    position,
                    last.offset,
                )

    def _decode(self, first: int, second: int) -> TimestampOffset:
        return TimestampOffset(first, self.base_offset + second)
