"""Read batches and records of any `.log` file for the dump, column by column.

`BatchWalk` finds where batches begin and end in a file of unknown health. It accepts magic 0 and 1 and
invalid headers, which `format.batch` and `format.decode` refuse. It neither checks nor decodes.

    stop      17 bytes or fewer remain, or the declared size runs past the end
    corrupt   the declared length is below 14, the smallest message of any format (also: a tail of zeros)
    magic     0 and 1 (or negative): a message, perhaps a compressed set of them; all others: a batch

Messages of magic 0 and 1, as brokers before 0.11 wrote them, are only read, never written:

    int64 offset | int32 size | uint32 crc | int8 magic | int8 attributes | (magic 1: int64 timestamp)
    | int32 key length (-1 null) key | int32 value length (-1 null) value

Their CRC is the IEEE one, over magic … end. attributes: bits 0-2 codec, bit 3 timestamp type (magic 1). With
a codec the value is a compressed sequence of such messages. With magic 1 the inner offsets are relative, the
outer offset is that of the last inner message, and a wrapper with LogAppendTime gives all inner ones its
timestamp.

`RecordColumns` holds the decoded records of a run of batches. Memory: one window, or one batch where that is
larger.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from tidegate.errors import CorruptError
from tidegate.files import File
from tidegate.log.format.batch import (
    CODEC_MASK,
    HEADER_LAYOUT,
    HEADER_SIZE,
    LENGTH_OVERHEAD,
    LOG_APPEND_TIME_BIT,
    MAGIC,
    START_LAYOUT,
    BatchHeader,
    Buffer,
    Codec,
    read_record,
)

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from tidegate.log.format.decode import BatchTable


WINDOW_BYTES: Final = 4 << 20
UP_TO_MAGIC: Final = 17
SMALLEST_LENGTH: Final = 14


@dataclass(frozen=True, slots=True)
class BatchRun:
    """Consecutive batches with plausible headers; `table.position` is relative to `data`.

    A batch with a higher magic is read as one of magic 2 (as Kafka does) and forms a run of its own.
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
    """A batch whose length is too short for a header."""

    position: int
    data: memoryview
    header: BatchHeader


Piece: TypeAlias = "BatchRun | LegacyMessage | OddBatch"


class BatchWalk:
    """Iterates over the pieces of `file` in [start, end); afterwards `position` is the end of the last one."""

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
        """Return the size of the batch at the position; None at the end of what can be walked."""
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
        """Yield the pieces that lie wholly in the window, at least one."""
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
        """Return the header at this position without checking it."""
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


# -- legacy ----------------------------------------------------------------------------------------

OUTER_SIZE: Final = {0: 14, 1: 22}  # crc … value length
_MAX_INNER_BYTES: Final = 64 << 20
_HEAD = Struct(">qiIbb")
_INT32 = Struct(">i")
_INT64 = Struct(">q")


@dataclass(frozen=True, slots=True)
class LegacyRecord:
    """One message. `timestamp_label` is Kafka's word for the clock that the timestamp is from."""

    offset: int
    size: int
    magic: int
    codec: Codec
    crc: int
    is_valid: bool
    timestamp: int
    timestamp_label: str
    key: bytes | None
    value: bytes | None


def read_message(data: Buffer, *, path: Path, position: int) -> LegacyRecord:
    """Return the message at the start of `data`, its compressed content (if any) left as `value`."""
    if len(data) < LENGTH_OVERHEAD + OUTER_SIZE[0]:
        raise _corrupt("is too short for a message", path, position)
    offset, length, crc, magic, attributes = _HEAD.unpack_from(data)
    if magic not in OUTER_SIZE:
        raise _corrupt(f"has magic {magic} inside a magic 0 or 1 message", path, position)
    size = length + LENGTH_OVERHEAD
    if length < OUTER_SIZE[magic] or size > len(data):
        raise _corrupt(f"says it has {length} bytes", path, position)
    at = _HEAD.size
    timestamp, label = -1, "NoTimestampType"
    if magic == 1:
        (timestamp,) = _INT64.unpack_from(data, at)
        label = "LogAppendTime" if attributes & LOG_APPEND_TIME_BIT else "CreateTime"
        at += 8
    key, at = _sized(data, at, size, path, position)
    value, at = _sized(data, at, size, path, position)
    code = attributes & CODEC_MASK
    if code > Codec.LZ4:
        raise _corrupt(f"has compression codec {code}, unknown for magic {magic}", path, position)
    computed = zlib.crc32(bytes(data[16:size]))
    return LegacyRecord(offset, size, magic, Codec(code), crc, computed == crc, timestamp, label, key, value)


def inner_records(message: LegacyRecord, *, path: Path, position: int) -> list[LegacyRecord]:
    """Return the messages in a compressed one, with absolute offsets; an uncompressed one is its own content."""
    if message.codec is Codec.NONE:
        return [message]
    if message.value is None:
        raise _corrupt("is compressed but has no value", path, position)
    content = _decompress(message, path, position)
    inner: list[LegacyRecord] = []
    at = 0
    while at < len(content):
        record = read_message(content[at:], path=path, position=position)
        if record.codec is not Codec.NONE:
            raise _corrupt("holds a compressed message inside a compressed one", path, position)
        inner.append(record)
        at += record.size
    if not inner:
        raise _corrupt("is a compressed set without messages", path, position)
    shift = message.offset - inner[-1].offset if message.magic == 1 else 0
    appended = message.timestamp_label == "LogAppendTime"
    return [
        replace(
            record,
            offset=record.offset + shift,
            timestamp=message.timestamp if appended else record.timestamp,
            timestamp_label=message.timestamp_label,
        )
        for record in inner
    ]


def _decompress(message: LegacyRecord, path: Path, position: int) -> memoryview:
    from tidegate.log.format.compression import decompress

    value = message.value or b""
    if message.codec is Codec.LZ4 and message.magic == 0:
        value = _repair_frame_checksum(value)
    try:
        return memoryview(decompress(message.codec, value, limit=_MAX_INNER_BYTES))
    except CorruptError as error:
        raise _corrupt(str(error), path, position) from None


def _repair_frame_checksum(frame: bytes) -> bytes:
    """Return the frame with the right header checksum: magic 0 producers included the magic number in the hash."""
    if len(frame) < 7:
        return frame
    descriptor = 2 + (8 if frame[4] & 0x08 else 0) + (4 if frame[4] & 0x01 else 0)
    at = 4 + descriptor
    return frame[:at] + bytes(((_xxh32(frame[4:at]) >> 8) & 0xFF,)) + frame[at + 1 :]


def _xxh32(data: bytes) -> int:
    """Return xxHash32 with seed 0, for fewer than 16 bytes (no frame descriptor has more)."""
    value = 374761393 + len(data)
    whole = len(data) // 4 * 4
    for at in range(0, whole, 4):
        lane = int.from_bytes(data[at : at + 4], "little")
        value = _rotate(value + lane * 3266489917, 17) * 668265263
    for byte in data[whole:]:
        value = _rotate(value + byte * 374761393, 11) * 2654435761
    for shift, factor in ((15, 2246822519), (13, 3266489917), (16, 1)):
        value &= 0xFFFFFFFF
        value = (value ^ (value >> shift)) * factor
    return value & 0xFFFFFFFF


def _rotate(value: int, by: int) -> int:
    value &= 0xFFFFFFFF
    return (value << by | value >> (32 - by)) & 0xFFFFFFFF


def _sized(data: Buffer, at: int, end: int, path: Path, position: int) -> tuple[bytes | None, int]:
    if at + 4 > end:
        raise _corrupt("ends inside a length", path, position)
    (length,) = _INT32.unpack_from(data, at)
    at += 4
    if length == -1:
        return None, at
    if length < 0 or length > end - at:
        raise _corrupt(f"holds a field of {length} bytes, {end - at} are there", path, position)
    return bytes(data[at : at + length]), at + length


def _corrupt(what: str, path: Path, position: int) -> CorruptError:
    return CorruptError(f"{path}: the message at position {position} {what}", path=path, position=position)


# -- records ---------------------------------------------------------------------------------------

_EVERY_OFFSET = -(2**63)
_MAX_SEQUENCE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """Records of consecutive batches; those of batch b are `starts[b]` … `starts[b + 1]`.

    `header_keys` is None when no record has headers.
    """

    starts: NDArray[np.int64]
    offsets: NDArray[np.int64]
    timestamps: pa.Array
    key_sizes: pa.Array
    value_sizes: pa.Array
    sequences: NDArray[np.int64]
    header_keys: pa.ListArray | None
    batch: pa.RecordBatch

    def __len__(self) -> int:
        return len(self.offsets)

    def text_column(self, name: str) -> pa.Array:
        """Return the `key` or `value` column as text; bytes that are not UTF-8 become U+FFFD, as in Java."""
        import pyarrow as pa

        column = self.batch.column(name)
        try:
            return column.cast(pa.large_binary()).cast(pa.large_string())
        except pa.ArrowInvalid:
            return pa.array([java_text(value) for value in column.to_pylist()], pa.large_string())

    def bytes_of(self, name: str) -> list[bytes | None]:
        column: list[bytes | None] = self.batch.column(name).to_pylist()
        return column


def read_records(run: BatchRun, path: Path) -> RecordColumns:
    """Decode a run; CRCs are not checked, a malformed record is a `CorruptError`."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    from tidegate.log.format.decode import decode

    table = run.table
    batch = decode(
        run.data,
        topic="",
        partition=0,
        from_offset=_EVERY_OFFSET,
        check_crcs=False,
        control="include",
        any_offsets=True,
        path=path,
        file_position=run.position,
    )
    counts = table.count.astype(np.int64)
    starts = np.concatenate(([0], np.cumsum(counts)))
    if starts[-1] != batch.num_rows:
        raise CorruptError(
            f"{path} from position {run.position}: {batch.num_rows} records, not {starts[-1]} as announced",
            path=path,
            position=run.position,
        )
    offsets = batch.column("offset").to_numpy()
    first = np.repeat(table.base_sequence.astype(np.int64), counts)
    sequence = first + (offsets - np.repeat(table.base_offset, counts))
    sequence = np.where(sequence > _MAX_SEQUENCE, sequence - (_MAX_SEQUENCE + 1), sequence)
    timestamps = pc.fill_null(batch.column("timestamp").cast(pa.int64()), -1)
    return RecordColumns(
        starts=starts,
        offsets=offsets,
        timestamps=timestamps,
        key_sizes=pc.fill_null(pc.binary_length(batch.column("key")), -1),
        value_sizes=pc.fill_null(pc.binary_length(batch.column("value")), -1),
        sequences=np.where(first >= 0, sequence, -1),
        header_keys=_header_keys(batch.column("headers")),
        batch=batch,
    )


def readable_part(run: BatchRun) -> BatchRun | None:
    """Return the records of a single batch before the malformed one, as a batch.

    Return None when not even the first record, or the compressed data, can be read. For printing only: its CRC
    is wrong.
    """
    from tidegate.log.format.compression import decompress
    from tidegate.log.format.decode import DEFAULT_LIMITS, scan_batches

    header = BatchHeader.parse(run.data)
    count = end = 0
    try:
        packed = run.data[HEADER_SIZE : header.size]
        body = decompress(header.codec, packed, limit=DEFAULT_LIMITS.max_decompressed_bytes)
        while count < header.count and end < len(body):
            end = read_record(body, end).end
            count += 1
    except CorruptError:
        pass
    if count == 0:
        return None
    plain = header._replace(
        count=count,
        attributes=header.attributes & ~CODEC_MASK,
        length=HEADER_SIZE + end - LENGTH_OVERHEAD,
    )
    data = memoryview(plain.pack() + bytes(body[:end]))
    return BatchRun(run.position, data, scan_batches(data))


def _header_keys(column: Any) -> Any:
    import pyarrow as pa

    flat = column.flatten()
    if len(flat) == 0:
        return None
    offsets = column.offsets.to_numpy()
    return pa.ListArray.from_arrays(pa.array(offsets - offsets[0], pa.int32()), flat.field("key"))


def java_text(value: bytes | None) -> str | None:
    """Decode UTF-8 as Java does: the bytes of a surrogate become one replacement character, not several."""
    if value is None:
        return None
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return re.sub(rb"\xed[\xa0-\xbf][\x80-\xbf]?", b"\xef\xbf\xbd", value).decode("utf-8", "replace")
