"""`.index`: from an offset to the byte position of a batch at or before it.

Entry, 8 bytes, big-endian: int32 last offset of the indexed batch minus the base offset of the log segment,
int32 position of that batch's first byte in the `.log`. Offsets and positions grow strictly.
When an entry is due is the log segment's rule; what the file does is `IndexFile`'s.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tidegate.errors import InvalidError
from tidegate.files import File
from tidegate.log.segments.index_file import INT32_MAX, IndexFile


class OffsetPosition(NamedTuple):
    """A batch whose last offset is `offset` starts at byte `position`."""

    offset: int
    position: int


class OffsetIndex(IndexFile[OffsetPosition]):
    """The sparse offset index of one log segment."""

    layout = struct.Struct(">ii")
    offset_field = 0

    @property
    def last_offset(self) -> int:
        """The offset of the last entry, the base offset when there is none."""
        last = self._last_entry()
        return self.base_offset if last is None else last.offset

    def lookup(self, offset: int) -> OffsetPosition:
        """The last entry not behind `offset`, else `(base offset, 0)`: where to start scanning."""
        with self._lock, self._opened_for_read() as file:
            self._look()
            if file is not None:
                found = self._count(file, 0, offset - self.base_offset, inclusive=True)
                if found:
                    return self._usable(file, found - 1)
            return OffsetPosition(self.base_offset, 0)

    def upper_bound(self, start: OffsetPosition, size: int) -> OffsetPosition | None:
        """The first entry at or behind `size` bytes from `start`, None when the index ends before."""
        with self._lock, self._opened_for_read() as file:
            self._look()
            if file is not None:
                found = self._count(file, 1, start.position + size, inclusive=False)
                if found < self._entries:
                    return self._usable(file, found)
            return None

    def append(self, offset: int, position: int) -> None:
        """Add an entry; `offset` must be greater than the last one's."""
        with self._lock:
            if self.is_full:
                raise InvalidError(f"{self.path} is full ({self._entries} entries); roll a new log segment")
            if self._entries and offset <= self.last_offset:
                raise InvalidError(
                    f"{self.path}: offset {offset} is not above the last indexed one, {self.last_offset}"
                )
            if not 0 <= position <= INT32_MAX:
                raise InvalidError(f"{self.path}: position {position} does not fit an index entry")
            self._append(self._relative(offset), position, OffsetPosition(offset, position))

    def sanity_check(self) -> None:
        super().sanity_check()
        with self._lock:
            if self.entries and self.last_offset < self.base_offset:
                raise self._corrupt(
                    f"the last offset {self.last_offset} is below the base offset {self.base_offset}",
                    (self._entries - 1) * self.entry_size,
                    self.last_offset,
                )

    def _decode(self, first: int, second: int) -> OffsetPosition:
        return OffsetPosition(self.base_offset + first, second)

    def _usable(self, file: File, number: int) -> OffsetPosition:
        entry = self._read_entry(file, number)
        if entry.position < 0 or entry.offset < self.base_offset:
            raise self._corrupt(
                f"entry {number} says offset {entry.offset} is at position {entry.position}",
                number * self.entry_size,
                entry.offset,
            )
        return entry
