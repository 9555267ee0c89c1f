"""The `.log` file of one log segment: consecutive record batches and nothing else.

`BatchFile` keeps the file's logical size, appends, undoes failed appends, and truncates. Only bytes below the logical
size are ever read: a preallocated file ends in zeros, a failed append may have left part of a batch. `walk`,
`headers` and `sound_headers` step from batch to batch. `next_sound_batch` and `find_around` find sound batches after
damage by their header (magic 2, a length that fits) and their CRC. Memory is bounded by the window and one batch.

G1  an append that fails leaves the logical size and every byte below it as they were; the bytes it wrote are
    cut off before the next byte is written;
G2  a reader has a descriptor of its own, so closing or renaming the writer's file does not disturb it, and a
    file that no thread writes or reads has no descriptor open.

Thread rule: one writer; `reader()` and the walking functions may be used by any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from fastcrc.crc32 import iscsi as crc32c

from tidegate.errors import CorruptError, TidegateError, verify_command
from tidegate.files import Bytes, File, Files
from tidegate.log.format.batch import (
    ATTRIBUTES_POSITION,
    HEADER_SIZE,
    LENGTH_OVERHEAD,
    MAGIC,
    SMALLEST_LENGTH,
    SPAN_LAYOUT,
    BatchHeader,
    batch_crc,
    corrupt_batch,
)

WINDOW_BYTES: Final = 64 * 1024
CHECK_BYTES: Final = 1024 * 1024


class BatchFile:
    """One `.log` file; nothing is opened before it is needed."""

    __slots__ = ("_files", "_padded", "_size", "_syncing", "_torn", "_writer", "path")

    def __init__(self, path: Path, *, files: Files) -> None:
        self.path = path
        self._files = files
        self._writer: File | None = None
        self._size: int | None = None
        self._padded = False  # ends in preallocated zeros
        self._torn = False  # may end in part of a failed append
        self._syncing = threading.Lock()  # a descriptor is not closed while its sync runs

    @property
    def size(self) -> int:
        """Logical size in bytes; read from the file system once."""
        if self._size is None:
            found = self._files.stat(self.path)
            self._size = 0 if found is None else found.size
        return self._size

    @property
    def mtime_ms(self) -> int:
        """Time of the file's last change; 0 when there is no file."""
        found = self._files.stat(self.path)
        return 0 if found is None else found.mtime_ms

    def create(self, preallocate_bytes: int = 0) -> None:
        """Create the empty file; zeros up to `preallocate_bytes` do not count as content."""
        writer = self._open_writer()
        self._size = 0
        if preallocate_bytes:
            self._padded = True
            writer.truncate(preallocate_bytes)

    def append(self, data: Bytes) -> int:
        """Write after the last byte; return the position (G1)."""
        position = self.size
        writer = self._writer if self._writer is not None else self._open_writer()
        if self._torn:
            self.truncate(position)
        try:
            writer.write_at(position, data)
        except BaseException:
            self.cut_back(position)
            raise
        self._size = position + len(data)
        return position

    def cut_back(self, size: int) -> None:
        """Undo appends from `size` on. If the disk refuses, the next append or `trim` repeats the cut; bytes beyond
        the logical size are never read (G1).
        """
        self._size = size
        self._torn = True
        with suppress(TidegateError, OSError):
            self.truncate(size)

    def truncate(self, size: int) -> None:
        """Cut to `size` bytes, or raise; the logical size follows."""
        self._open_writer().truncate(size)
        self._size = size
        self._padded = self._torn = False

    def trim(self) -> None:
        """Make the file exactly as long as its content."""
        if self._padded or self._torn:
            self.truncate(self.size)

    def sync(self) -> None:
        """Sync all content. A file without an open writer is opened for it and closed."""
        with self._syncing:
            if self._writer is not None:
                self._writer.sync()
                return
            with self._files.open(self.path, write=True) as file:
                file.sync()

    def reader(self) -> File:
        """Return a separate descriptor; the caller closes it (G2)."""
        return self._files.open(self.path)

    def read_at(self, position: int, length: int) -> bytes:
        with self.reader() as file:
            return file.read_at(position, length)

    def close(self) -> None:
        """Close the writer's descriptor; a later write opens a new one."""
        with self._syncing:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def rename_to(self, path: Path) -> None:
        self._files.rename(self.path, path)
        self.path = path
        if self._writer is not None:
            self._writer.path = path

    def delete(self) -> None:
        self.close()
        self._files.unlink(self.path, missing_ok=True)

    def _open_writer(self) -> File:
        if self._writer is None:
            size = self.size
            self._writer = self._files.open(self.path, create=True)
            self._size = size
        return self._writer


class BatchPlace(NamedTuple):
    """The place of a batch in its file."""

    position: int
    size: int
    base_offset: int
    last_offset: int


def find_offset(
    file: File, start: int, end: int, offset: int, *, window: int, bound: int | None = None
) -> BatchPlace | None:
    """Return the first whole batch from `start` on whose last offset is ≥ `offset`.

    `bound`: whole batches with offsets below it are known to fill the file up to `end`. A batch that exceeds
    either is damage and raises `CorruptError`.
    """
    walked = start
    for place in walk(file, start, end, window=window):
        if bound is not None and place.last_offset >= bound:
            break
        if place.last_offset >= offset:
            return place
        walked = place.position + place.size
    if bound is not None and walked < end:
        raise CorruptError(
            f"{file.path} holds no sound batch at position {walked}",
            path=file.path,
            position=walked,
        )
    return None


def walk(file: File, start: int, end: int, *, window: int = WINDOW_BYTES) -> Iterator[BatchPlace]:
    """Yield each whole batch in [start, end), from its first 27 bytes; ends before a partial one without an error."""
    for position, buffer, at in _windows(file, start, end, window):
        base, length, magic, delta = SPAN_LAYOUT.unpack_from(buffer, at)
        if length < SMALLEST_LENGTH or magic < MAGIC:
            _parsed(file, buffer, at, position)  # raises with the reason
        if length + LENGTH_OVERHEAD <= end - position:
            yield BatchPlace(position, length + LENGTH_OVERHEAD, base, base + delta)


def headers(
    file: File, start: int, end: int, *, window: int = WINDOW_BYTES
) -> Iterator[tuple[int, BatchHeader]]:
    """Yield position and header of each whole batch in [start, end); CRCs are not checked."""
    for position, buffer, at in _windows(file, start, end, window):
        header = _parsed(file, buffer, at, position)
        if header.size <= end - position:
            yield position, header


def sound_headers(file: File, start: int, end: int) -> Iterator[tuple[int, BatchHeader]]:
    """Yield position and header of each batch in [start, end) whose bytes match its CRC.

    Raises `CorruptError` at the first place that is not a whole, sound batch, with its `position`. Memory
    stays bounded whatever lengths the file claims.
    """
    position, buffer, first = start, b"", start
    while position < end:
        at = position - first
        if at + HEADER_SIZE > len(buffer):
            buffer, first, at = file.read_at(position, min(CHECK_BYTES, end - position)), position, 0
        header = _parsed(file, buffer, at, position)
        if header.size > end - position:
            what = f"says it has {header.size} bytes, {end - position} are there"
            raise corrupt_batch(what, file.path, position, header.base_offset)
        if at + header.size > len(buffer) and header.size <= CHECK_BYTES:
            buffer, first, at = file.read_at(position, min(CHECK_BYTES, end - position)), position, 0
        crc = (
            batch_crc(buffer, at, header.size)
            if at + header.size <= len(buffer)
            else _crc_of_file(file, position + ATTRIBUTES_POSITION, position + header.size)
        )
        if crc != header.crc:
            what = f"has stored CRC {header.crc} but its bytes give {crc}"
            raise corrupt_batch(what, file.path, position, header.base_offset)
        yield position, header
        position += header.size


def _crc_of_file(file: File, start: int, end: int) -> int:
    crc = 0
    for position in range(start, end, CHECK_BYTES):
        crc = int(crc32c(file.read_at(position, min(CHECK_BYTES, end - position)), crc))
    return crc


def _parsed(file: File, buffer: bytes, at: int, position: int) -> BatchHeader:
    """Parse the header at `at`. A magic above 2 is accepted, as in a broker; its records cannot be read."""
    return BatchHeader.parse(buffer, at, newer_magic=True, path=file.path, file_position=position - at)


def _windows(file: File, start: int, end: int, window: int) -> Iterator[tuple[int, bytes, int]]:
    """Yield (position, buffer, index in the buffer) of each batch start that has a whole header before `end`."""
    position, buffer, first = start, b"", start
    window = max(window, HEADER_SIZE)
    while end - position >= HEADER_SIZE:
        at = position - first
        if at + HEADER_SIZE > len(buffer):
            buffer, first, at = file.read_at(position, min(window, end - position)), position, 0
            if len(buffer) < HEADER_SIZE:
                raise CorruptError(
                    f"{file.path} ends at {position + len(buffer)} though {end} bytes belong to it; "
                    f"another program has cut it: restore it, or reopen the log to recover it",
                    path=file.path,
                    position=position,
                )
        yield position, buffer, at
        position += SPAN_LAYOUT.unpack_from(buffer, at)[1] + LENGTH_OVERHEAD


RESYNC_BYTES: Final = 1 << 20
_MAGIC_AT: Final = 16
_MAGIC_BYTE: Final = bytes([MAGIC])


def next_sound_batch(
    file: File, position: int, end: int, *, min_offset: int = 0, below: int | None = None
) -> tuple[int, BatchHeader] | None:
    """Return the first batch at or after byte `position` with a right CRC and offsets in [`min_offset`, `below`)."""
    for candidate in _candidates(file, position, end, min_offset):
        with suppress(CorruptError):
            found = next(sound_headers(file, candidate, end))
            if below is None or found[1].last_offset < below:
                return found
    return None


def is_zero(file: File, start: int, end: int) -> bool:
    """Return whether these bytes are only the zeros of preallocation."""
    return not any(
        file.read_at(position, min(CHECK_BYTES, end - position)).strip(b"\0")
        for position in range(start, end, CHECK_BYTES)
    )


def sound_batches(file: File, position: int, end: int) -> Iterator[tuple[int, BatchHeader]]:
    """Yield position and header of every sound batch from byte `position` on, whatever lies between them."""
    while (found := next_sound_batch(file, position, end)) is not None:
        try:
            yield from sound_headers(file, found[0], end)
            return
        except CorruptError as damage:
            position = damage.position if damage.position is not None else end


def find_around(file: File, end: int, offset: int, *, bound: int | None = None) -> BatchPlace | None:
    """Like `find_offset` in a damaged file: return the first batch that reaches `offset`, whatever precedes it.

    A batch counts when its CRC matches and its base offset, which the CRC does not cover, ascends and stays below
    `bound`. If bytes without such a batch lie right before the result, and the result begins beyond the offset,
    those bytes may hold the wanted record: that raises and never skips it silently.
    """
    sound_end, expected = 0, 0
    for position, header in sound_batches(file, 0, end):
        if header.base_offset < expected or (bound is not None and header.last_offset >= bound):
            continue
        if header.last_offset >= offset:
            if header.base_offset <= offset or position == sound_end:
                return BatchPlace(position, header.size, header.base_offset, header.last_offset)
            raise _damaged(file, sound_end, offset, f"reading can go on at {header.base_offset}")
        sound_end, expected = position + header.size, header.next_offset
    if sound_end < end:
        raise _damaged(file, sound_end, offset, "nothing sound follows")
    return None


def _damaged(file: File, position: int, offset: int, resume: str) -> CorruptError:
    return CorruptError(
        f"{file.path} is damaged at position {position}, where offset {offset} may have been; {resume} "
        f"({verify_command(file.path.parent)} shows the extent)",
        path=file.path,
        position=position,
        offset=offset,
    )


def _candidates(file: File, position: int, end: int, min_offset: int) -> Iterator[int]:
    """Yield byte positions that pass every cheap test for the start of a batch."""
    while end - position >= HEADER_SIZE:
        window = file.read_at(position, min(RESYNC_BYTES, end - position))
        last_start = len(window) - HEADER_SIZE
        if last_start < 0:
            return
        found = window.find(_MAGIC_BYTE, _MAGIC_AT)
        while 0 <= found - _MAGIC_AT <= last_start:
            at = found - _MAGIC_AT
            if _is_plausible(window, at, end - position - at, min_offset):
                yield position + at
            found = window.find(_MAGIC_BYTE, found + 1)
        position += last_start + 1


def _is_plausible(window: bytes, at: int, room: int, min_offset: int) -> bool:
    try:
        header = BatchHeader.parse(window, at)
    except CorruptError:
        return False
    return (
        HEADER_SIZE <= header.size <= room
        and header.base_offset >= min_offset
        and header.last_offset_delta >= 0
        and header.count >= 0
    )
