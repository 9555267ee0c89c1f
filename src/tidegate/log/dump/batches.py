"""Walking any `.log` file piece by piece, by the rules of Kafka's own file reader.

Owns where a batch begins and ends in a file of unknown health, for the tools that look at files: it accepts
magic 0 and 1 and headers that make no sense, where `batch` and `decode` refuse. Does not judge or decode.

    stop      17 bytes or fewer remain, or the declared size runs past the end
    corrupt   the declared length is below 14, the smallest message there ever was (also: a tail of zeros)
    magic     0 and 1 (or negative): a message, perhaps a compressed set of them; all others: a batch

Memory: one window, or one batch where that is larger.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from tidegate.errors import CorruptError
from tidegate.files import File
from tidegate.log.format.batch import (
    HEADER_LAYOUT,
    HEADER_SIZE,
    LENGTH_OVERHEAD,
    MAGIC,
    START_LAYOUT,
    BatchHeader,
)

if TYPE_CHECKING:
    from tidegate.log.format.decode import BatchTable

WINDOW_BYTES: Final = 4 << 20
UP_TO_MAGIC: Final = 17
SMALLEST_LENGTH: Final = 14


@dataclass(frozen=True, slots=True)
class BatchRun:
    """Consecutive batches with plausible headers; `table.position` counts within `data`.

    A batch with a higher magic is read as one of magic 2 (as Kafka does) and comes alone.
    """

    position: int
    data: memoryview
    table: BatchTable
    magic: int = MAGIC


@dataclass(frozen=True, slots=True)
class LegacyMessage:
    """One message of magic 0 or 1, possibly a compressed set of them."""

    position: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class OddBatch:
    """A batch by its length, but too short to hold a header."""

    position: int
    data: memoryview
    header: BatchHeader


Piece: TypeAlias = "BatchRun | LegacyMessage | OddBatch"


class BatchWalk:
    """Iterate over the pieces of `file` in [start, end); afterwards `position` is the end of the last one."""

    def __init__(self, file: File, start: int, end: int, *, window_bytes: int = WINDOW_BYTES) -> None:
        self.position = start
        self._file = file
        self._end = end
        self._window_bytes = window_bytes

    def __iter__(self) -> Iterator[Piece]:
        while (size := self._next_size()) is not None:
            data = self._read(max(size, self._window_bytes))
            for piece in self._pieces(data):
                self.position = piece.position + _length(piece)
                yield piece

    def _next_size(self) -> int | None:
        """Size of the batch at the position; None at the end of what can be walked."""
        remaining = self._end - self.position
        if remaining <= UP_TO_MAGIC:
            return None
        head = self._file.read_at(self.position, UP_TO_MAGIC)
        offset, length, _ = START_LAYOUT.unpack(head)
        if length < SMALLEST_LENGTH:
            zeros = not any(head)
            raise CorruptError(
                f"{self._file.path} at position {self.position}: "
                + (
                    "zeros, as a preallocated file has behind its last batch; the records end here"
                    if zeros
                    else f"length {length} (offset {offset}) is below the smallest possible {SMALLEST_LENGTH}"
                ),
                path=self._file.path,
                position=self.position,
                offset=None if zeros else offset,
            )
        size: int = length + LENGTH_OVERHEAD
        return size if size <= remaining else None

    def _read(self, size: int) -> memoryview:
        return memoryview(self._file.read_at(self.position, min(size, self._end - self.position)))

    def _pieces(self, data: memoryview) -> Iterator[Piece]:
        """The pieces that lie whole in the window, at least one."""
        from tidegate.log.format.decode import scan_batches

        at, start = 0, self.position
        while len(data) - at > UP_TO_MAGIC:
            _, length, magic = START_LAYOUT.unpack_from(data, at)
            size = length + LENGTH_OVERHEAD
            if length < SMALLEST_LENGTH or size > len(data) - at:
                return
            if magic < MAGIC:
                yield LegacyMessage(start + at, data[at : at + size])
            elif size < HEADER_SIZE:
                yield OddBatch(start + at, data[at : at + size], self._header_at(start + at))
            elif magic != MAGIC:
                yield _as_batch(start + at, data[at : at + size], magic)
            else:
                run = data[at:]
                table = scan_batches(run, strict=False)
                yield BatchRun(start + at, run[: table.end], table)
                size = table.end
            at += size

    def _header_at(self, position: int) -> BatchHeader:
        """Whatever the 61 bytes say."""
        data = self._file.read_at(position, HEADER_SIZE)
        if len(data) < HEADER_SIZE:
            raise CorruptError(
                f"{self._file.path} at position {position}: {len(data)} of {HEADER_SIZE} header bytes",
                path=self._file.path,
                position=position,
            )
        return BatchHeader(*HEADER_LAYOUT.unpack(data))


def _as_batch(position: int, data: memoryview, magic: int) -> BatchRun:
    from tidegate.log.format.decode import scan_batches

    copy = bytearray(data)
    copy[UP_TO_MAGIC - 1] = MAGIC
    return BatchRun(position, memoryview(bytes(copy)), scan_batches(copy), magic)


def _length(piece: Piece) -> int:
    return len(piece.data)
