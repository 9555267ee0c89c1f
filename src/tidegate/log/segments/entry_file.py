"""A file of fixed-size entries and its one descriptor: opened when needed, given back when settled.

Owns: opening for reading and writing, syncing, renaming, deleting, reading whole entries in bounded chunks.
Does not know what an entry means nor how many of the file's bytes are valid; `IndexFile` (preallocated,
searched) and `TransactionIndex` (grows by append) do.

Invariants:
I1  a descriptor is held only between the first write and `release`, `close`, `delete` or the `sync` that
    follows settling; look-ups in a file nobody writes open it, read and close it again.
I2  a failed sync is final for this object: no later write or sync succeeds, also after the descriptor went.

Thread rule: every method may be called from any thread; `_lock` guards state and descriptor, `_sync_lock`
keeps a descriptor open during its fsync without holding up look-ups.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidegate.errors import CorruptError, InvalidError, UnavailableError
from tidegate.files import File, Files

CHUNK_ENTRIES = 4096


class EntryFile:
    """What the three indexes of a log segment share: a path, a descriptor, entries of `entry_size` bytes."""

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
        """How many entries are valid."""
        with self._lock:
            self._look()
            return self._entries

    @property
    def size_bytes(self) -> int:
        """Bytes of the valid entries."""
        return self.entries * self.entry_size

    @property
    def exists(self) -> bool:
        """Whether the file is on the disk; looking does not create it."""
        return self._files.exists(self.path)

    def sync(self) -> None:
        """What was written is on the disk when this returns; nothing to do when nothing was written."""
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
        """Give the descriptor back, changing nothing; the next write opens the file again."""
        with self._sync_lock, self._lock:
            self._drop_descriptor()
            self._settled = True

    def rename_to(self, path: Path) -> None:
        """Move the file, when there is one, and go on under the new name."""
        with self._lock:
            if self._files.exists(self.path):
                self._files.rename(self.path, path)
            self._set_path(path)

    def delete(self) -> bool:
        """Remove the file; whether there was one."""
        with self._sync_lock, self._lock:
            self._drop_descriptor()
            self._unsynced = False
            existed = self._files.exists(self.path)
            if existed:
                self._files.unlink(self.path, missing_ok=True)
            self._forget()
            return existed

    # -- for the kinds of index ------------------------------------------------------------------

    def _look(self) -> None:
        """Learn how many entries the file has; once, unless another process may be writing it."""
        raise NotImplementedError

    def _forget(self) -> None:
        """The file went away: drop whatever was remembered of it."""
        self._looked = False

    def _opened_for_write(self) -> File:
        """The held descriptor, opened (the file created) when there is none. Call with `_lock` held."""
        if self.read_only:
            raise InvalidError(f"{self.path} was opened for reading only")
        if self._failed:
            raise self._poisoned()
        if self._file is None:
            self._file = self._files.open(self.path, create=True)
        return self._file

    @contextmanager
    def _opened_for_read(self) -> Iterator[File | None]:
        """The held descriptor or a passing one; None when there is no file. Call with `_lock` held."""
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
        """(number of the first entry, bytes) chunk by chunk, on a descriptor of its own."""
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
