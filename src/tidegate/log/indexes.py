"""The three index files of a log segment: `.index`, `.timeindex` and `.txnindex`, all big-endian.

    .index      8 bytes    int32 last offset of the indexed batch - base offset of the log segment,
                           int32 position of that batch in the `.log`; both grow strictly
    .timeindex  12 bytes   int64 largest timestamp so far, int32 last offset of the earliest batch holding it -
                           base offset; timestamps grow strictly, offsets never fall; the last slot is kept for
                           the entry written at the roll, so the index is full one entry early
    .txnindex   34 bytes   int16 version 0, int64 producer id, int64 first offset of an aborted transaction, int64
                           last offset (the abort marker's, grows strictly), int64 last stable offset then

`.index` and `.timeindex` are preallocated while the log segment is active, zero after the last entry, and trimmed
afterwards. Opening an existing file counts every whole entry as valid, as a broker does. `.txnindex` grows by
appending; bytes after its last whole entry are a torn append, which the next one overwrites.

I1  a descriptor is held only between the first write and `release`, `delete` or the `sync` that follows settling;
I2  a failed sync is final for the object: no later write or sync succeeds;
I3  entries are valid in [0, `entries`); an append is one write after them, counted after it succeeded;
I4  bytes after the last entry are zero in every file that Tidegate made, so that a reader in another process
    (`read_only=True`) can find the end of a file that is being written;
I5  a look-up returns an entry whose key is not greater than the target, whatever the bytes are; a damaged
    index costs a longer scan or a `CorruptError`, never an exception of another kind.

Thread rule: every method may be called from any thread; `_lock` guards state and descriptor, `_sync_lock`
keeps a descriptor open during its fsync without blocking look-ups.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from tidegate.errors import CorruptError, InvalidError, UnavailableError
from tidegate.files import File, Files
from tidegate.log.format.batch import NO_TIMESTAMP

CHUNK_ENTRIES = 4096


class EntryFile:
    """Base class of the three indexes: a path, a descriptor, entries of `entry_size` bytes."""

    def __init__(self, path: Path, entry_size: int, *, files: Files, read_only: bool = False) -> None:
        self.path = path
        self.entry_size = entry_size
        self.read_only = read_only
        self._files = files
        self._lock = threading.RLock()
        self._sync_lock = threading.Lock()
        self._file: File | None = None
        self._unsynced = False
        self._settled = False
        self._failed = False
        self._looked = False
        self._entries = 0

    @property
    def entries(self) -> int:
        """Number of valid entries."""
        with self._lock:
            self._look()
            return self._entries

    @property
    def size_bytes(self) -> int:
        """Bytes of the valid entries."""
        return self.entries * self.entry_size

    @property
    def exists(self) -> bool:
        """Return whether the file is on disk; does not create it."""
        return self._files.exists(self.path)

    def sync(self) -> None:
        """Sync what was written; does nothing when nothing was written."""
        with self._sync_lock:
            with self._lock:
                if self._failed:
                    raise self._poisoned()
                if not self._unsynced:
                    self._release_if_settled()
                    return
                file = self._opened_for_write()
                self._unsynced = False
            try:
                file.sync()
            except BaseException:
                self._failed = True
                raise
            with self._lock:
                self._release_if_settled()

    def release(self) -> None:
        """Close the descriptor without changing the file; the next write opens it again."""
        with self._sync_lock, self._lock:
            self._drop_descriptor()
            self._settled = True

    def rename_to(self, path: Path) -> None:
        """Rename the file, if there is one; later calls use the new name."""
        with self._lock:
            if self._files.exists(self.path):
                self._files.rename(self.path, path)
            self._set_path(path)

    def delete(self) -> bool:
        """Remove the file; return whether there was one."""
        with self._sync_lock, self._lock:
            self._drop_descriptor()
            self._unsynced = False
            existed = self._files.exists(self.path)
            if existed:
                self._files.unlink(self.path, missing_ok=True)
            self._forget()
            return existed

    # -- helpers for subclasses ------------------------------------------------------------------

    def _look(self) -> None:
        """Read how many entries the file has: once, or every time if another process may be writing it."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Drop cached state after the file was removed."""
        self._looked = False

    def _opened_for_write(self) -> File:
        """Return the held descriptor; open it, and create the file, if there is none. Call with `_lock` held."""
        if self.read_only:
            raise InvalidError(f"{self.path} was opened for reading only")
        if self._failed:
            raise self._poisoned()
        if self._file is None:
            self._file = self._files.open(self.path, create=True)
        return self._file

    @contextmanager
    def _opened_for_read(self) -> Iterator[File | None]:
        """Yield the held descriptor or a temporary one; None when there is no file. Call with `_lock` held."""
        if self._file is not None:
            yield self._file
            return
        try:
            file = self._files.open(self.path)
        except FileNotFoundError:
            yield None
            return
        with file:
            yield file

    def _read_entries(self, file: File, first: int, count: int) -> bytes:
        data = file.read_at(first * self.entry_size, count * self.entry_size)
        if len(data) != count * self.entry_size:
            position = first * self.entry_size + len(data)
            raise CorruptError(
                f"{self.path} ends at byte {position}, before the end of entry {first + count - 1}: "
                f"another program shortened it; reopen the log to rebuild it",
                path=self.path,
                position=position,
                kafka_name=None,
            )
        return data

    def _chunks(self, entries: int) -> Iterator[tuple[int, bytes]]:
        """Yield (number of the first entry, bytes) chunk by chunk, on a separate descriptor."""
        if entries == 0:
            return
        try:
            file = self._files.open(self.path)
        except FileNotFoundError:
            return
        with file:
            for first in range(0, entries, CHUNK_ENTRIES):
                yield first, self._read_entries(file, first, min(CHUNK_ENTRIES, entries - first))

    def _drop_descriptor(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _release_if_settled(self) -> None:
        if self._settled and not self._unsynced:
            self._drop_descriptor()

    def _set_path(self, path: Path) -> None:
        self.path = path
        if self._file is not None:
            self._file.path = path

    def _poisoned(self) -> UnavailableError:
        return UnavailableError(
            f"{self.path}: an earlier sync failed, so the disk's content is unknown; close and reopen the log"
        )

    def _corrupt(self, what: str, position: int, offset: int | None = None) -> CorruptError:
        return CorruptError(
            f"{self.path} is corrupt at byte {position}: {what}; recovering its log segment rebuilds it",
            path=self.path,
            position=position,
            offset=offset,
            kafka_name=None,
        )


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

    # -- sizes -----------------------------------------------------------------------------------

    @property
    def max_entries(self) -> int:
        """How many entries fit the file at its current length (a trimmed file is full until it is resized)."""
        with self._lock:
            self._look()
            return (self.max_bytes if self._missing else self._length) // self.entry_size

    @property
    def length(self) -> int:
        """Length of the file, including preallocated bytes."""
        with self._lock:
            self._look()
            return self._length

    @property
    def is_full(self) -> bool:
        return self.entries >= self.max_entries

    def entry(self, number: int) -> Entry:
        """Return the entry with this number, counted from 0."""
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
        """Yield the entries that exist at the start of the iteration, in order and in bounded memory."""
        for _, chunk in self._chunks(self.entries):
            for fields in self.layout.iter_unpack(chunk):
                yield self._decode(*fields)

    # -- changing --------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make room for appending: create the file if there is none, grow it to full size if it is shorter."""
        with self._lock:
            self._look()
            if self._missing or self._length < self.max_bytes // self.entry_size * self.entry_size:
                self._check_capacity()
                self.resize(self.max_bytes)

    def truncate_to(self, offset: int) -> None:
        """Drop every entry at or after `offset`."""
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
        """Drop all entries; the length of the file does not change."""
        self._keep(0)

    def trim(self) -> None:
        """Cut the file to its valid entries (creating an empty file if there is none) and mark it settled."""
        with self._lock:
            self._look()
            self.resize(self._entries * self.entry_size)
            self._settled = True

    def resize(self, max_bytes: int) -> bool:
        """Resize the file to as many entries as fit `max_bytes`; return whether that changed anything."""
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
                # Half an entry at the end of a damaged file must not remain after the last whole one (I4).
                self._set_length(file, self._entries * self.entry_size)
            self._set_length(file, length)
            self._missing = False
            return True

    def reset(self) -> None:
        """Drop all entries and preallocate the file again, before a rebuild."""
        with self._lock:
            self._check_capacity()
            self.truncate()
            self.resize(self.max_bytes)

    def close(self) -> None:
        """Trim the file if it was created or resized here, and close its descriptor."""
        with self._sync_lock, self._lock:
            try:
                if self._grown_here and not self._failed:
                    self.trim()
            finally:
                self._drop_descriptor()

    def sanity_check(self) -> None:
        """Check, as a broker does, that the file holds whole entries and the last one is plausible."""
        with self._lock:
            self._look()
            if self._length % self.entry_size != 0:
                raise self._corrupt(
                    f"{self._length} bytes are not a multiple of {self.entry_size}",
                    self._length - self._length % self.entry_size,
                )

    def _decode(self, first: int, second: int) -> Entry:
        """Return the entry with the two stored numbers."""
        raise NotImplementedError

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
            # Cut, then grow again: bytes after the last entry must be zero (I4).
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
        """Return the number of entries before the zero tail of a file that is being written (I4)."""
        zero = bytes(self.entry_size)
        with self._opened_for_read() as file:
            if file is None or self._entries == 0:
                return 0
            low, high = 0, self._entries
            probe = high - 1
            while low < high:
                # A short read means that the file was trimmed meanwhile, so nothing is written there either.
                data = file.read_at(probe * self.entry_size, self.entry_size)
                if len(data) < self.entry_size or data == zero:
                    high = probe
                else:
                    low = probe + 1
                probe = (low + high) // 2
            return low

    def _count(self, file: File, field: int, target: int, *, inclusive: bool) -> int:
        """Return how many leading entries have a `field` below `target` (or equal, when `inclusive`).

        Call with `_lock` held and the entries counted. The end of the file is read first, in one read, because most
        look-ups are near the end. The entry before the result was compared itself, so I5 holds for any bytes.
        """
        limit = target + 1 if inclusive else target
        low, high = 0, self._entries
        warm = WARM_BYTES // self.entry_size
        while True:
            first = max(low, high - warm)
            block = self._read_entries(file, first, high - first)
            if first == low or self._field(block, 0, field) < limit:
                return first + bisect_left(
                    range(high - first), limit, key=lambda number: self._field(block, number, field)
                )
            # The result lies in [low, first]: bisect with single probes until one block holds it.
            high = first
            while high - low > warm:
                middle = (low + high) // 2
                if self._field(self._read_entries(file, middle, 1), 0, field) < limit:
                    low = middle + 1
                else:
                    high = middle

    def _field(self, block: bytes, number: int, field: int) -> int:
        value: int = self.layout.unpack_from(block, number * self.entry_size)[field]
        return value

    def _read_entry(self, file: File, number: int) -> Entry:
        return self._decode(*self.layout.unpack(self._read_entries(file, number, 1)))


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
        """The offset of the last entry; the base offset when there is none."""
        last = self._last_entry()
        return self.base_offset if last is None else last.offset

    def lookup(self, offset: int) -> OffsetPosition:
        """Return the last entry with an offset ≤ `offset`, else `(base offset, 0)`: the position to scan from."""
        with self._lock, self._opened_for_read() as file:
            self._look()
            if file is not None:
                found = self._count(file, 0, offset - self.base_offset, inclusive=True)
                if found:
                    return self._usable(file, found - 1)
            return OffsetPosition(self.base_offset, 0)

    def upper_bound(self, start: OffsetPosition, size: int) -> OffsetPosition | None:
        """Return the first entry at least `size` bytes after `start`; None when the index ends before."""
        with self._lock, self._opened_for_read() as file:
            self._look()
            if file is not None:
                found = self._count(file, 1, start.position + size, inclusive=False)
                if found < self._entries:
                    return self._usable(file, found)
            return None

    def append(self, offset: int, position: int) -> None:
        """Add an entry; `offset` must be greater than that of the last entry."""
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


class TimestampOffset(NamedTuple):
    """No record before `offset` is newer than `timestamp` (epoch ms, -1 for none)."""

    timestamp: int
    offset: int


class TimeIndex(IndexFile[TimestampOffset]):
    """The sparse time index of one log segment."""

    layout = struct.Struct(">qi")
    offset_field = 1

    @property
    def is_full(self) -> bool:
        """True while only one slot is left, which is reserved for the roll."""
        return self.entries >= self.max_entries - 1

    @property
    def last_entry(self) -> TimestampOffset:
        """The last entry; `(-1, base offset)` when there is none."""
        last = self._last_entry()
        return TimestampOffset(NO_TIMESTAMP, self.base_offset) if last is None else last

    def lookup(self, timestamp: int) -> TimestampOffset:
        """Return the last entry with a timestamp ≤ `timestamp`; `(-1, base offset)` when there is none."""
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
        """Add an entry if `timestamp` is larger than that of the last one; return whether it was added.

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


VERSION = 0
_LAYOUT = struct.Struct(">hqqqq")


class AbortedTxn(NamedTuple):
    """One aborted transaction; `last_offset` is its abort marker's, the range is inclusive."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class TransactionIndex(EntryFile):
    """The aborted transactions of one log segment."""

    def __init__(self, path: Path, base_offset: int, *, files: Files, read_only: bool = False) -> None:
        super().__init__(path, _LAYOUT.size, files=files, read_only=read_only)
        self.base_offset = base_offset
        self._torn_bytes = 0
        self._last_offset: int | None = None

    @property
    def last_offset(self) -> int | None:
        """The last entry's marker offset; None when there is no entry."""
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
        """Yield all entries in order, in bounded memory."""
        for first, chunk in self._chunks(self.entries):
            for number, fields in enumerate(_LAYOUT.iter_unpack(chunk), first):
                yield self._decode(fields, number)

    def append(self, aborted: AbortedTxn) -> None:
        """Add an aborted transaction; its last offset must be greater than that of the last entry."""
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

    def collect_aborted(self, start: int, upper: int) -> tuple[list[AbortedTxn], bool]:
        """Return the transactions that overlap [start, upper), and whether later log segments cannot hold more."""
        found: list[AbortedTxn] = []
        for aborted in self:
            if aborted.last_offset >= start and aborted.first_offset < upper:
                found.append(aborted)
            if aborted.last_stable_offset >= upper:
                return found, True
        return found, False

    def truncate_to(self, offset: int) -> None:
        """Drop every transaction whose marker is at or after `offset`."""
        with self._lock:
            for number, aborted in enumerate(self):
                if aborted.last_offset >= offset:
                    self._cut(number)
                    return

    def reset(self) -> None:
        """Drop all entries; does not create a file."""
        with self._lock:
            self._look()
            if self._entries or self._torn_bytes:
                self._cut(0)

    def settle(self) -> None:
        """Mark the index as finished: the next `sync` closes the descriptor."""
        with self._lock:
            self._settled = True

    def close(self) -> None:
        """Close the descriptor."""
        self.release()

    def sanity_check(self) -> None:
        """Check for whole entries of version 0, with ascending markers in this log segment."""
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
