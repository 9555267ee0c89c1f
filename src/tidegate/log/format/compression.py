"""Compress and decompress a batch's records in Kafka's framings, with bounded memory.

Implements the four framings; cramjam implements the algorithms. It does not know records or batches.

    gzip    RFC 1952
    snappy  82 "SNAPPY" 00 | int32 1 | int32 1 | { int32 length, one raw snappy block of ≤ 32 KiB of data }*
            read without that magic too, as one raw block (what Java's reader falls back to)
    lz4     LZ4 frame of independent blocks (brokers refuse linked ones) of ≤ 64 KiB, no checksums but the
            header's: 04224d18 60 40 82 | { uint32 length, little-endian, top bit: stored plain; block }* | 0
    zstd    frames without a content size (they are streamed)

Invariants:
C1  memory depends on the output, never on a length that the input states: a stream decompresses into a buffer of
    fixed size, grown step by step up to the limit; a decompression bomb stops at the limit, not after it.
C2  any input gives bytes or `CorruptError`, in time linear in input plus limit.

Thread rule: pure functions; an `Unpacker` belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final

import cramjam
import numpy as np

from tidegate.errors import CorruptError, InvalidError
from tidegate.log.format.batch import Buffer, Codec

XERIAL_MAGIC: Final = b"\x82SNAPPY\0"
XERIAL_HEADER: Final = XERIAL_MAGIC + b"\0\0\0\1" * 2
SNAPPY_BLOCK_BYTES: Final = 32 << 10

LZ4_HEADER: Final = bytes.fromhex("04224d18 60 40 82")
LZ4_BLOCK_BYTES: Final = 64 << 10
LZ4_STORED_PLAIN: Final = 1 << 31

# Kafka's `compression.<codec>.level`: smallest, largest, default.
LEVELS: Final[dict[Codec, tuple[int, int, int]]] = {
    Codec.GZIP: (1, 9, -1),
    Codec.LZ4: (1, 17, 9),
    Codec.ZSTD: (-131072, 22, 3),
}

FIRST_GUESS: Final = 8  # times the compressed size
GROWTH: Final = 4
SMALLEST_GUESS: Final = 4 << 10

_INT32 = Struct(">i")
_LITTLE_UINT32 = Struct("<I")
_TWO_LITTLE_UINT32S = Struct("<II")


def compress(codec: Codec, data: Buffer, *, level: int | None = None) -> Buffer:
    """Return `data` compressed; `level` as in Kafka's configuration, its default when None."""
    level = _checked_level(codec, level)
    match codec:
        case Codec.NONE:
            return data
        case Codec.GZIP:
            return memoryview(cramjam.gzip.compress(data, level=6 if level == -1 else level))
        case Codec.SNAPPY:
            return _compress_snappy(data)
        case Codec.LZ4:
            return _compress_lz4(data, level)
        case Codec.ZSTD:
            return memoryview(cramjam.zstd.compress(data, level=level))


def decompress(codec: Codec, data: Buffer, *, limit: int) -> memoryview:
    """Return what `compress` was given. `CorruptError` when the bytes are bad or hold more than `limit` bytes."""
    return Unpacker(limit).unpack(codec, data)


class Unpacker:
    """Decompresses batches one after the other into the same memory, which grows to the largest of them.

    The result of `unpack` is valid until the next call. One thread only. `memory` is the initial buffer; passing
    one avoids allocating new pages.
    """

    def __init__(self, limit: int, memory: memoryview | None = None) -> None:
        self.limit = limit
        self._room = memoryview(bytearray()) if memory is None else memory[:limit]

    def unpack(self, codec: Codec, data: Buffer) -> memoryview:
        """Return `data` decompressed. `CorruptError` when the bytes are bad or hold more than the limit."""
        match codec:
            case Codec.NONE:
                if len(data) > self.limit:
                    raise _too_large(codec, self.limit)
                return memoryview(data)
            case Codec.GZIP:
                return self._stream(codec, cramjam.gzip.decompress_into, data)
            case Codec.SNAPPY:
                return self._snappy(memoryview(data))
            case Codec.LZ4:
                return self._stream(codec, _decompress_lz4_into, data)
            case Codec.ZSTD:
                return self._stream(codec, cramjam.zstd.decompress_into, data)

    def _stream(self, codec: Codec, decompress_into: Callable[[Any, Any], int], data: Buffer) -> memoryview:
        """Decompress into the current buffer; if that fails, into larger ones up to the limit (C1).

        cramjam distinguishes "full" from "corrupt" only in its wording, so both are retried. That costs at most a
        third more work, because every attempt stops at the end of its buffer.
        """
        self._make_room(min(self.limit, max(FIRST_GUESS * len(data), SMALLEST_GUESS)))
        while True:
            try:
                return self._room[: decompress_into(data, self._room)]
            except cramjam.DecompressionError as error:
                if len(self._room) >= self.limit:
                    raise CorruptError(
                        f"{codec.label} data does not decompress into at most {self.limit} bytes: {error}"
                    ) from None
            self._make_room(min(self.limit, GROWTH * len(self._room)))

    def _snappy(self, view: memoryview) -> memoryview:
        framed = bytes(view[: len(XERIAL_MAGIC)]) == XERIAL_MAGIC
        blocks = _xerial_blocks(view) if framed else [view]
        position = 0
        try:
            sizes = [cramjam.snappy.decompress_raw_len(block) for block in blocks]
            if sum(sizes) > self.limit:
                raise _too_large(Codec.SNAPPY, self.limit)
            self._make_room(sum(sizes))
            for block, size in zip(blocks, sizes, strict=True):
                position += cramjam.snappy.decompress_raw_into(block, self._room[position : position + size])
        except cramjam.DecompressionError as error:
            raise CorruptError(f"snappy data does not decompress: {error}") from None
        return self._room[:position]

    def _make_room(self, size: int) -> None:
        if size > len(self._room):
            self._room = memoryview(bytearray())  # free the old memory before allocating the new
            self._room = np.empty(size, np.uint8).data  # pages cost nothing until they are written


def _checked_level(codec: Codec, level: int | None) -> int:
    if codec not in LEVELS:
        return 0
    smallest, largest, default = LEVELS[codec]
    if level is None or level == default:
        return default
    if not smallest <= level <= largest:
        raise InvalidError(
            f"{codec.label} has no level {level}; use {smallest} to {largest}, or {default} for the default",
            kafka_name="INVALID_CONFIG",
        )
    return level


def _compress_snappy(data: Buffer) -> bytes:
    view = memoryview(data)
    pieces: list[Buffer] = [XERIAL_HEADER]
    for start in range(0, len(view), SNAPPY_BLOCK_BYTES):
        block = memoryview(cramjam.snappy.compress_raw(view[start : start + SNAPPY_BLOCK_BYTES]))
        pieces += (_INT32.pack(len(block)), block)
    return b"".join(pieces)


def _compress_lz4(data: Buffer, level: int) -> Buffer:
    """Compress to an LZ4 frame: Kafka's default level, 9, is LZ4's fast mode, any other its high-compression mode."""
    if level != LEVELS[Codec.LZ4][2]:
        # cramjam has that mode only for whole frames, which then carry a checksum for every block
        frame = cramjam.lz4.Compressor(level=max(level, 3), content_checksum=False, block_linked=False)
        frame.compress(bytes(data))  # it accepts only bytes
        return memoryview(frame.finish())
    view = memoryview(data)
    pieces: list[Buffer] = [LZ4_HEADER]
    for start in range(0, len(view), LZ4_BLOCK_BYTES):
        plain = view[start : start + LZ4_BLOCK_BYTES]
        block = memoryview(cramjam.lz4.compress_block(plain, store_size=False))
        if len(block) < len(plain):
            pieces += (_LITTLE_UINT32.pack(len(block)), block)
        else:
            pieces += (_LITTLE_UINT32.pack(len(plain) | LZ4_STORED_PLAIN), plain)
    pieces.append(_LITTLE_UINT32.pack(0))
    return b"".join(pieces)


def _decompress_lz4_into(data: Buffer, room: memoryview) -> int:
    """Decompress `data` to the start of `room`; return how many bytes. `DecompressionError` when it fails.

    Frames of Java's clients and of `compress` are decompressed block by block, straight into place: cramjam's
    frame reader copies every block once more, which takes a sixth of its time. cramjam's reader handles all other
    frames, and reports frames with an invalid layout.
    """
    view = memoryview(data)
    blocks = _lz4_blocks(view, len(room) // LZ4_BLOCK_BYTES)
    if blocks is None:
        written: int = cramjam.lz4.decompress_into(data, room)
        return written
    filled = 0
    for start, stop, stored_plain in blocks:
        if stored_plain:
            room[filled : filled + stop - start] = view[start:stop]
            filled += stop - start
        else:
            target = room[filled : filled + LZ4_BLOCK_BYTES]
            filled += cramjam.lz4.decompress_block_into(view[start:stop], target, output_len=LZ4_BLOCK_BYTES)
    return filled


def _lz4_blocks(view: memoryview, most: int) -> list[tuple[int, int, bool]] | None:
    """Return (start, end, is stored plain) of the blocks of one frame that begins with `LZ4_HEADER`.

    Return None for anything else: another header, more than `most` blocks, a block that is empty, too long or
    truncated, bytes after the frame. Also None when a block begins with what could be a size: even when told that
    there is none, cramjam tries one on a block that does not decompress, and might return other bytes.
    """
    if bytes(view[: len(LZ4_HEADER)]) != LZ4_HEADER:
        return None
    position, last = len(LZ4_HEADER), len(view) - _LITTLE_UINT32.size
    blocks: list[tuple[int, int, bool]] = []
    while position + _LITTLE_UINT32.size <= last and len(blocks) < most:
        head, begins = _TWO_LITTLE_UINT32S.unpack_from(view, position)
        length, stored_plain = head & ~LZ4_STORED_PLAIN, head >= LZ4_STORED_PLAIN
        position += _LITTLE_UINT32.size
        if not 0 < length <= min(LZ4_BLOCK_BYTES, last - position):
            return None
        if begins <= LZ4_BLOCK_BYTES and not stored_plain:
            return None
        blocks.append((position, position + length, stored_plain))
        position += length
    if position != last or _LITTLE_UINT32.unpack_from(view, last)[0] != 0:
        return None
    return blocks


def _xerial_blocks(view: memoryview) -> list[memoryview]:
    blocks, position = [], len(XERIAL_HEADER)  # the two versions are not read: some writers swap their bytes
    while position < len(view):
        there = len(view) - position - _INT32.size
        length = _INT32.unpack_from(view, position)[0] if there >= 0 else -1
        if length < 0 or length > there:
            raise CorruptError(f"snappy data ends inside its block at {position} of {len(view)} bytes")
        position += _INT32.size
        blocks.append(view[position : position + length])
        position += length
    return blocks


def _too_large(codec: Codec, limit: int) -> CorruptError:
    return CorruptError(
        f"{codec.label} data holds more than {limit} bytes; raise the limit if that is expected"
    )
