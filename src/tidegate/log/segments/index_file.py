"""A preallocated, sorted index of one log segment: what `.index` and `.timeindex` have in common.

Owns: creation with zeros up to the configured size, the number of valid entries, binary search by
position, truncation, trimming. Does not know what the two numbers of an entry mean (`OffsetIndex`,
`TimeIndex`) nor when an entry is due (`LogSegment`).

Bytes: entries without header or checksum. While the log segment is active the file is
`floor(max_bytes / entry_size) * entry_size` bytes long and zero behind the last entry; trimmed, its length
is exact. Opening an existing file counts every whole entry as valid, as a broker does; so an index must be
trimmed before its folder is called clean.

Invariants:
I1  entries are valid in [0, `entries`); an append is one write behind them, counted after it succeeded.
I2  bytes behind the last entry are zero in every file this code made, so that a reader in another
    process (`read_only=True`) can find the end of a file that is being written.
I3  a look-up returns an entry whose key is not greater than the target, whatever the bytes are; a damaged
    index costs a longer scan or a `CorruptError`, never an exception of another kind.

A missing file reads as empty: the index is a hint, and looking must not create files.
Thread rule: as `EntryFile`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, TypeVar

from tidegate.errors import InvalidError
from tidegate.files import File, Files
from tidegate.log.segments.entry_file import EntryFile

INT32_MAX = 2**31 - 1
WARM_BYTES = 8192

Entry = TypeVar("Entry", bound="tuple[int, int]")


class IndexFile(EntryFile, Generic[Entry]):
    """A sorted file of fixed-size entries with a size limit. `max_bytes` is `segment.index.bytes`."""

    layout: struct.Struct
    offset_field: int

    def __init__(
        self, path: Path, base_offset: int, max_bytes: int, *, files: Files, read_only: bool = False
    ) -> None:
        super().__init__(path, self.layout.size, files=files, read_only=read_only)
        self.base_offset = base_offset
        self.max_bytes = max_bytes
        self._missing = True
        self._length = 0
        self._grown_here = False
        self._last: Entry | None = None

    # -- how much there is -----------------------------------------------------------------------

    @property
    def max_entries(self) -> int:
        """How many entries fit the file as long as it is now (a trimmed one is full until resized)."""
        with self._lock:
            self._look()
            return (self.max_bytes if self._missing else self._length) // self.entry_size

    @property
    def length(self) -> int:
        """Length of the file, including what is preallocated."""
        with self._lock:
            self._look()
            return self._length

    @property
    def is_full(self) -> bool:
        return self.entries >= self.max_entries

    def entry(self, number: int) -> Entry:
        """The entry with this number, from 0."""
        with self._lock:
            self._look()
            if not 0 <= number < self._entries:
                raise InvalidError(f"{self.path} has {self._entries} entries, so none with number {number}")
            with self._opened_for_read() as file:
                if file is None:
                    raise self._corrupt("the file disappeared", number * self.entry_size)
                return self._read_entry(file, number)

    def __len__(self) -> int:
        return self.entries

    def __iter__(self) -> Iterator[Entry]:
        """All entries in order, in bounded memory, as many as were there when it started."""
        for _, chunk in self._chunks(self.entries):
            for fields in self.layout.iter_unpack(chunk):
                yield self._decode(*fields)

    # -- changing --------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make room for appending: create the file if there is none, grow it to full size if shorter."""
        with self._lock:
            self._look()
            if self._missing or self._length < self.max_bytes // self.entry_size * self.entry_size:
                self._check_capacity()
                self.resize(self.max_bytes)

    def truncate_to(self, offset: int) -> None:
        """Drop every entry at or behind `offset`."""
        with self._lock:
            self._look()
            with self._opened_for_read() as file:
                keep = (
                    0
                    if file is None
                    else self._count(file, self.offset_field, offset - self.base_offset, inclusive=False)
                )
            self._keep(keep)

    def truncate(self) -> None:
        """Drop all entries; the length of the file stays."""
        self._keep(0)

    def trim(self) -> None:
        """Cut the file to its valid entries (an empty file is made if there is none) and call it settled."""
        with self._lock:
            self._look()
            self.resize(self._entries * self.entry_size)
            self._settled = True

    def resize(self, max_bytes: int) -> bool:
        """Make the file hold as many entries as fit `max_bytes`; whether that changed anything."""
        length = max_bytes // self.entry_size * self.entry_size
        with self._lock:
            self._look()
            if length < self._entries * self.entry_size:
                raise InvalidError(
                    f"{self.path} holds {self._entries} entries, more than fit {max_bytes} bytes; truncate it"
                )
            if not self._missing and length == self._length:
                return False
            file = self._opened_for_write()
            if self._length % self.entry_size:
                # Half an entry at the end of a damaged file must not stay behind the last whole one (I2).
                self._set_length(file, self._entries * self.entry_size)
            self._set_length(file, length)
            self._missing = False
            return True

    def reset(self) -> None:
        """Drop all entries and preallocate the file anew, as before rebuilding it."""
        with self._lock:
            self._check_capacity()
            self.truncate()
            self.resize(self.max_bytes)

    def close(self) -> None:
        """Trim the file if it was created or resized here, and give its descriptor back."""
        with self._sync_lock, self._lock:
            try:
                if self._grown_here and not self._failed:
                    self.trim()
            finally:
                self._drop_descriptor()

    def sanity_check(self) -> None:
        """The quick check a broker makes: the length is whole entries and the last entry is plausible."""
        with self._lock:
            self._look()
            if self._length % self.entry_size != 0:
                raise self._corrupt(
                    f"{self._length} bytes are not a multiple of {self.entry_size}",
                    self._length - self._length % self.entry_size,
                )

    # -- what the two kinds differ in ------------------------------------------------------------

    def _decode(self, first: int, second: int) -> Entry:
        """The two stored numbers as a value."""
        raise NotImplementedError

    # -- inside ----------------------------------------------------------------------------------

    def _relative(self, offset: int) -> int:
        relative = offset - self.base_offset
        if not 0 <= relative <= INT32_MAX:
            raise InvalidError(
                f"offset {offset} is {relative} from the base {self.base_offset} of {self.path}, "
                f"which an index entry cannot hold (0 … {INT32_MAX}); roll a new log segment"
            )
        return relative

    def _append(self, first: int, second: int, entry: Entry) -> None:
        with self._lock:
            file = self._writable()
            if self._entries >= self._length // self.entry_size:
                raise InvalidError(f"{self.path} is full ({self._entries} entries); roll a new log segment")
            file.write_at(self._entries * self.entry_size, self.layout.pack(first, second))
            self._unsynced, self._settled = True, False
            self._entries += 1
            self._last = entry

    def _last_entry(self) -> Entry | None:
        with self._lock:
            self._look()
            if self._entries == 0:
                return None
            if self._last is None or self.read_only:
                self._last = self.entry(self._entries - 1)
            return self._last

    def _keep(self, entries: int) -> None:
        with self._lock:
            self._look()
            if entries >= self._entries:
                return
            file = self._opened_for_write()
            length = self._length
            # Cut, then grow again: what lies behind the last entry must be zero (I2).
            self._last = None
            self._entries = entries
            self._set_length(file, entries * self.entry_size)
            self._set_length(file, length)

    def _set_length(self, file: File, length: int) -> None:
        file.truncate(length)
        self._length = length
        self._grown_here = True
        self._unsynced, self._settled = True, False

    def _writable(self) -> File:
        self._look()
        if self._missing:
            self._check_capacity()
            self.resize(self.max_bytes)
        return self._opened_for_write()

    def _check_capacity(self) -> None:
        if self.max_bytes < self.entry_size:
            raise InvalidError(
                f"{self.path} cannot be created: segment.index.bytes={self.max_bytes} is less than one entry "
                f"of {self.entry_size} bytes; set it to 24 or more",
                kafka_name="INVALID_CONFIG",
            )

    def _look(self) -> None:
        if self._looked and not self.read_only:
            return
        found = self._files.stat(self.path)
        self._missing = found is None
        self._length = 0 if found is None else found.size
        self._entries = self._length // self.entry_size
        self._last = None
        if self.read_only:
            self._entries = self._written_entries()
        self._looked = True

    def _forget(self) -> None:
        self._looked = self._grown_here = False

    def _written_entries(self) -> int:
        """Entries before the zero tail of a file that is being written (I2)."""
        zero = bytes(self.entry_size)
        with self._opened_for_read() as file:
            if file is None or self._entries == 0:
                return 0
            low, high = 0, self._entries
            probe = high - 1
            while low < high:
                # A short read means that the file was trimmed meanwhile: nothing written there either.
                data = file.read_at(probe * self.entry_size, self.entry_size)
                if len(data) < self.entry_size or data == zero:
                    high = probe
                else:
                    low = probe + 1
                probe = (low + high) // 2
            return low

    def _count(self, file: File, field: int, target: int, *, inclusive: bool) -> int:
        """How many leading entries have a `field` below `target` (or equal, when `inclusive`).

        Call with `_lock` held and the file looked at. The end of the file comes first, in one read: most
        look-ups are near the end. The entry before the answer was compared itself, so I3 holds in any bytes.
        """
        limit = target + 1 if inclusive else target
        low, high = 0, self._entries
        warm = WARM_BYTES // self.entry_size
        while True:
            first = max(low, high - warm)
            block = self._read_entries(file, first, high - first)
            if first == low or self._field(block, 0, field) < limit:
                return first + self._count_in(block, high - first, field, limit)
            # The answer lies in [low, first]: narrow by single probes until one block holds it.
            high = first
            while high - low > warm:
                middle = (low + high) // 2
                if self._field(self._read_entries(file, middle, 1), 0, field) < limit:
                    low = middle + 1
                else:
                    high = middle

    def _count_in(self, block: bytes, entries: int, field: int, limit: int) -> int:
        low, high = 0, entries
        while low < high:
            middle = (low + high) // 2
            if self._field(block, middle, field) < limit:
                low = middle + 1
            else:
                high = middle
        return low

    def _field(self, block: bytes, number: int, field: int) -> int:
        value: int = self.layout.unpack_from(block, number * self.entry_size)[field]
        return value

    def _read_entry(self, file: File, number: int) -> Entry:
        return self._decode(*self.layout.unpack(self._read_entries(file, number, 1)))
