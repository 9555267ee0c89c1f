"""`.txnindex`: the aborted transactions that ended in one log segment.

Entry, 34 bytes, big-endian: int16 version 0, int64 producer id, int64 first offset of the transaction, int64
last offset (the abort marker's), int64 last stable offset when it was aborted. Last offsets grow strictly.

The file is made by the first entry and grows by appending; it is never preallocated. Bytes behind the last
whole entry are a torn append: reading ignores them, the next append writes over them, `sanity_check` objects.
Thread rule: as `EntryFile`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tidegate.errors import InvalidError
from tidegate.files import Files
from tidegate.log.segments.entry_file import EntryFile

VERSION = 0
_LAYOUT = struct.Struct(">hqqqq")


class AbortedTxn(NamedTuple):
    """One aborted transaction; `last_offset` is its abort marker's, the range is inclusive."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class AbortedSearch(NamedTuple):
    """What a log segment knows of a fetch range; unless `complete`, the next one must be asked too."""

    aborted: list[AbortedTxn]
    complete: bool


class TransactionIndex(EntryFile):
    """The aborted transactions of one log segment."""

    def __init__(self, path: Path, base_offset: int, *, files: Files, read_only: bool = False) -> None:
        super().__init__(path, _LAYOUT.size, files=files, read_only=read_only)
        self.base_offset = base_offset
        self._torn_bytes = 0
        self._last_offset: int | None = None

    @property
    def last_offset(self) -> int | None:
        """The last entry's marker offset, None when there is no entry."""
        with self._lock:
            self._look()
            if self._last_offset is None and self._entries:
                with self._opened_for_read() as file:
                    if file is not None:
                        number = self._entries - 1
                        data = self._read_entries(file, number, 1)
                        self._last_offset = self._decode(_LAYOUT.unpack(data), number).last_offset
            return self._last_offset

    def __len__(self) -> int:
        return self.entries

    def __iter__(self) -> Iterator[AbortedTxn]:
        """All entries in order, in bounded memory."""
        for first, chunk in self._chunks(self.entries):
            for number, fields in enumerate(_LAYOUT.iter_unpack(chunk), first):
                yield self._decode(fields, number)

    def append(self, aborted: AbortedTxn) -> None:
        """Add an aborted transaction; its last offset must be greater than the last one's."""
        with self._lock:
            last = self.last_offset
            if last is not None and aborted.last_offset <= last:
                raise InvalidError(
                    f"{self.path}: an abort marker at {aborted.last_offset} cannot follow the one at {last}"
                )
            file = self._opened_for_write()
            file.write_at(self._entries * self.entry_size, _LAYOUT.pack(VERSION, *aborted))
            self._unsynced, self._settled = True, False
            self._entries += 1
            self._torn_bytes = 0
            self._last_offset = aborted.last_offset

    def collect_aborted(self, start: int, upper: int) -> AbortedSearch:
        """The transactions that touch [start, upper), and whether later log segments cannot hold more."""
        found: list[AbortedTxn] = []
        for aborted in self:
            if aborted.last_offset >= start and aborted.first_offset < upper:
                found.append(aborted)
            if aborted.last_stable_offset >= upper:
                return AbortedSearch(found, complete=True)
        return AbortedSearch(found, complete=False)

    def truncate_to(self, offset: int) -> None:
        """Drop every transaction whose marker is at or behind `offset`."""
        with self._lock:
            for number, aborted in enumerate(self):
                if aborted.last_offset >= offset:
                    self._cut(number)
                    return

    def reset(self) -> None:
        """Drop all entries; no file is made for it."""
        with self._lock:
            self._look()
            if self._entries or self._torn_bytes:
                self._cut(0)

    def settle(self) -> None:
        """No more entries are expected: the next `sync` gives the descriptor back."""
        with self._lock:
            self._settled = True

    def close(self) -> None:
        """Give the descriptor back."""
        self.release()

    def sanity_check(self) -> None:
        """Whole entries of version 0, markers in this log segment and growing."""
        with self._lock:
            self._look()
            if self._torn_bytes:
                raise self._corrupt(
                    f"{self._torn_bytes} bytes are left after the last whole entry", self.size_bytes
                )
            previous = self.base_offset - 1
            for number, aborted in enumerate(self):
                if aborted.last_offset <= previous:
                    raise self._corrupt(
                        f"the abort marker's offset {aborted.last_offset} is not greater than {previous}",
                        number * self.entry_size,
                        aborted.last_offset,
                    )
                previous = aborted.last_offset

    def _cut(self, entries: int) -> None:
        file = self._opened_for_write()
        self._last_offset = None
        file.truncate(entries * self.entry_size)
        self._unsynced = True
        self._entries, self._torn_bytes = entries, 0

    def _decode(self, fields: tuple[int, ...], number: int) -> AbortedTxn:
        version, producer_id, first_offset, last_offset, last_stable_offset = fields
        if version != VERSION:
            raise self._corrupt(
                f"entry {number} has version {version}, only {VERSION} is known", number * self.entry_size
            )
        return AbortedTxn(producer_id, first_offset, last_offset, last_stable_offset)

    def _look(self) -> None:
        if self._looked and not self.read_only:
            return
        found = self._files.stat(self.path)
        self._entries, self._torn_bytes = divmod(0 if found is None else found.size, self.entry_size)
        self._last_offset = None
        self._looked = True
