"""Record batches (magic 2) as plain bytes: read, write, check and patch the 61-byte header; read single records.

Loads neither Arrow nor numba, so append, fetch and recovery stay light. `decode` and `encode` handle many records.

All integers are big-endian and signed, except the checksum:

    0  int64  base offset            27  int64  base timestamp (the delete horizon when bit 6 is set)
    8  int32  length after this      35  int64  max timestamp (the append time when bit 3 is set)
   12  int32  leader epoch           43  int64  producer id, -1 for none
   16  int8   magic, 2               51  int16  producer epoch, -1 for none
   17  uint32 CRC-32C of 21…end      53  int32  base sequence, -1 for none
   21  int16  attributes             57  int32  record count
   23  int32  last offset delta      61  …      records, one compressed stream when bits 0-2 say so

attributes: bits 0-2 codec, 3 timestamp type, 4 transactional, 5 control, 6 delete horizon set.

A control batch holds one record, which consumers never see. A transaction marker is uncompressed, 78 bytes long:

    key                int16 version (0) | int16 type
    value of a marker  int16 version (0) | int32 coordinator epoch

Invariants:
B1  base offset and leader epoch lie before the checksummed bytes, so a leader can set both without
    recomputing the CRC.
B2  a stored length is used only after it was compared with the number of bytes present.

Thread rule: values and pure functions, except `stamp`, which writes to the bytearray it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple, TypeAlias

from fastcrc.crc32 import iscsi as crc32c

from tidegate.errors import CorruptError

Buffer: TypeAlias = "bytes | bytearray | memoryview"
HEADER_SIZE: Final = 61
LENGTH_OVERHEAD: Final = 12
SMALLEST_LENGTH: Final = HEADER_SIZE - LENGTH_OVERHEAD
MAGIC: Final = 2
NO_TIMESTAMP: Final = -1
NO_PRODUCER: Final = -1
NO_SEQUENCE: Final = -1
NO_LEADER_EPOCH: Final = -1
CRC_POSITION: Final = 17
ATTRIBUTES_POSITION: Final = 21
CODEC_MASK: Final = 0x07
LOG_APPEND_TIME_BIT: Final = 0x08
TRANSACTIONAL_BIT: Final = 0x10
CONTROL_BIT: Final = 0x20
DELETE_HORIZON_BIT: Final = 0x40
_USED_BITS: Final = CODEC_MASK | LOG_APPEND_TIME_BIT | TRANSACTIONAL_BIT | CONTROL_BIT | DELETE_HORIZON_BIT
MAX_SEQUENCE: Final = 2**31 - 1
HEADER_LAYOUT: Final = Struct(">qiibIhiqqqhii")
START_LAYOUT: Final = Struct(">qi4xb")
"""Base offset, length and magic: all that says where a batch ends."""
SPAN_LAYOUT: Final = Struct(">qi4xb6xi")
"""Base offset, length, magic and last offset delta: all that a search looks at."""


class Codec(IntEnum):
    """Compression codec of a batch; the value is stored in bits 0-2 of the attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4

    @property
    def label(self) -> str:
        """Kafka's lower-case name, as in `compression.type` and the dump."""
        return self.name.lower()


class TimestampType(IntEnum):
    """The clock that a batch's timestamps come from; the value is bit 3 of the attributes."""

    CREATE_TIME = 0
    LOG_APPEND_TIME = 1

    @property
    def label(self) -> str:
        """Kafka's name, as in `message.timestamp.type` and the dump."""
        return "LogAppendTime" if self else "CreateTime"


class BatchHeader(NamedTuple):
    """A batch header, field by field as stored; the properties interpret the fields."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    count: int  # type: ignore[assignment]  # a tuple's own `count` means nothing here

    @classmethod
    def parse(
        cls,
        buffer: Buffer,
        position: int = 0,
        *,
        newer_magic: bool = False,
        path: Path | str | None = None,
        file_position: int = 0,
    ) -> BatchHeader:
        """Parse the header at `position`. Raises `CorruptError` for fewer than 61 bytes, an impossibly small
        length, or another magic; the body is not looked at.

        `newer_magic` reads a magic above 2 as 2, as a broker does (the CRC does not cover that byte).
        """
        there = len(buffer) - position
        where = file_position + position
        if there < HEADER_SIZE:
            raise corrupt_batch(f"has {max(there, 0)} of its {HEADER_SIZE} header bytes", path, where)
        header = cls._make(HEADER_LAYOUT.unpack_from(buffer, position))
        if header.length < SMALLEST_LENGTH:
            raise corrupt_batch(
                f"has length {header.length}, below the smallest possible {SMALLEST_LENGTH}", path, where
            )
        if header.magic != MAGIC and not (newer_magic and header.magic > MAGIC):
            raise corrupt_batch(
                f"has magic {header.magic}; only {MAGIC} is read (let a broker rewrite older data)",
                path,
                where,
            )
        return header

    def pack(self) -> bytes:
        """Return the 61 bytes; the CRC is written as it is, not computed."""
        return HEADER_LAYOUT.pack(*self)

    @property
    def size(self) -> int:
        """Size of the whole batch in bytes, header included."""
        return self.length + LENGTH_OVERHEAD

    @property
    def last_offset(self) -> int:
        """Last offset, inclusive. Compaction keeps it, so it may be larger than the last record's offset."""
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        return self.last_offset + 1

    @property
    def last_sequence(self) -> int:
        if self.base_sequence == NO_SEQUENCE:
            return NO_SEQUENCE
        return next_sequence(self.base_sequence, self.last_offset_delta)

    @property
    def codec(self) -> Codec:
        code = self.attributes & CODEC_MASK
        if code > Codec.ZSTD:
            raise CorruptError(
                f"batch at offset {self.base_offset}: unknown compression codec {code}",
                offset=self.base_offset,
            )
        return Codec(code)

    @property
    def timestamp_type(self) -> TimestampType:
        return TimestampType(bool(self.attributes & LOG_APPEND_TIME_BIT))

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL_BIT)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL_BIT)

    @property
    def delete_horizon_ms(self) -> int | None:
        """When tombstones and markers of this batch may be removed; None while compaction has not decided."""
        return self.base_timestamp if self.attributes & DELETE_HORIZON_BIT else None

    @property
    def has_producer(self) -> bool:
        return self.producer_id > NO_PRODUCER


def batch_crc(buffer: Buffer, position: int, size: int) -> int:
    """Return the CRC-32C of the checksummed part of the batch of `size` bytes at `position`."""
    with memoryview(buffer) as view, view.toreadonly() as readable:  # fastcrc copies writable memory
        return int(crc32c(readable[position + ATTRIBUTES_POSITION : position + size]))


def iter_headers(buffer: Buffer, start: int = 0) -> Iterator[tuple[int, BatchHeader]]:
    """Yield position and header of each whole batch from `start` on; ends before a partial one without an error.

    Raises `CorruptError` at an invalid header (length, magic); CRCs are not checked.
    """
    position = start
    while len(buffer) - position >= HEADER_SIZE:
        header = BatchHeader.parse(buffer, position)
        if header.size > len(buffer) - position:
            return
        yield position, header
        position += header.size


def next_sequence(sequence: int, increment: int) -> int:
    """Return `sequence + increment`, wrapping from 2147483647 to 0."""
    return (sequence + increment) & MAX_SEQUENCE


def previous_sequence(sequence: int, decrement: int) -> int:
    """Return `sequence - decrement`, wrapping from 0 to 2147483647."""
    return (sequence - decrement) & MAX_SEQUENCE


def stamp(
    batch: bytearray,
    *,
    base_offset: int | None = None,
    leader_epoch: int | None = None,
    max_timestamp: int | None = None,
    timestamp_type: TimestampType | None = None,
) -> BatchHeader:
    """Set the fields that a leader decides, in place, and return the new header.

    The CRC is recomputed only when a checksummed field changes (B1). A new time clears the attribute bits that
    have no meaning, as a broker does.
    """
    before = BatchHeader.parse(batch)
    attributes = before.attributes
    is_new_time = max_timestamp not in (None, before.max_timestamp) or (
        timestamp_type not in (None, before.timestamp_type)
    )
    if is_new_time:
        kind = before.timestamp_type if timestamp_type is None else timestamp_type
        attributes = attributes & _USED_BITS & ~LOG_APPEND_TIME_BIT | (LOG_APPEND_TIME_BIT if kind else 0)
    header = before._replace(
        base_offset=before.base_offset if base_offset is None else base_offset,
        leader_epoch=before.leader_epoch if leader_epoch is None else leader_epoch,
        max_timestamp=before.max_timestamp if max_timestamp is None else max_timestamp,
        attributes=attributes,
    )
    batch[:HEADER_SIZE] = header.pack()
    if (header.attributes, header.max_timestamp) != (before.attributes, before.max_timestamp):
        header = header._replace(crc=batch_crc(batch, 0, header.size))
        batch[:HEADER_SIZE] = header.pack()
    return header


def corrupt_batch(
    what: str,
    path: Path | str | None,
    position: int,
    offset: int | None = None,
    kafka_name: str = "CORRUPT_MESSAGE",
) -> CorruptError:
    """Return the error about the batch at `position`; `what` is the predicate of the sentence."""
    place = f"position {position}" + (f" of {path}" if path is not None else "")
    named = "" if offset is None else f" (base offset {offset})"
    message = f"the batch at {place}{named} {what}"
    return CorruptError(message, path=path, position=position, offset=offset, kafka_name=kafka_name)


# --- single records


class OneRecord(NamedTuple):
    """A record as stored: deltas, and views of its bytes."""

    timestamp_delta: int
    offset_delta: int
    key: memoryview | None
    value: memoryview | None
    headers: list[tuple[memoryview, memoryview | None]]
    end: int
    """Position after the record."""


def read_record(body: Buffer, position: int = 0) -> OneRecord:
    """Return the record at `position`; `CorruptError` (`INVALID_RECORD`) names the wrong field."""
    view = memoryview(body)
    length, start = _varint(view, position, "its length")
    if not 0 <= length <= len(view) - start:
        raise malformed(f"it says it has {length} bytes, {len(view) - start} are there")
    record = view[start : start + length]
    if not record:
        raise malformed("it has no bytes")
    timestamp_delta, place = _varint(record, 1, "its timestamp delta", bits=64)
    offset_delta, place = _varint(record, place, "its offset delta")
    key, place = _field(record, place, "its key")
    value, place = _field(record, place, "its value")
    count, place = _varint(record, place, "its header count")
    if not 0 <= count <= len(record) - place:
        raise malformed(f"it says it has {count} headers in {len(record) - place} bytes")
    headers = []
    for number in range(count):
        name, place = _field(record, place, f"the key of header {number}")
        if name is None:
            raise malformed(f"header {number} has no key")
        datum, place = _field(record, place, f"the value of header {number}")
        headers.append((name, datum))
    if place != len(record):
        raise malformed(f"{len(record) - place} of its {length} bytes belong to no field")
    return OneRecord(timestamp_delta, offset_delta, key, value, headers, start + length)


def _field(record: memoryview, position: int, what: str) -> tuple[memoryview | None, int]:
    length, position = _varint(record, position, f"the length of {what}")
    if length == -1:
        return None, position
    if not 0 <= length <= len(record) - position:
        raise malformed(f"{what} says it has {length} bytes, {len(record) - position} are left")
    return record[position : position + length], position + length


def _varint(buffer: memoryview, position: int, what: str, bits: int = 32) -> tuple[int, int]:
    """Return the zig-zag varint at `position`, and the position after it."""
    value = 0
    for shift in range(0, bits, 7):
        if position >= len(buffer):
            raise malformed(f"the bytes end inside {what}")
        byte = buffer[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            value &= (1 << bits) - 1
            return (value >> 1) ^ -(value & 1), position
    raise malformed(f"{what} takes more than {bits // 7 + 1} bytes")


def malformed(what: str) -> CorruptError:
    return CorruptError(what, kafka_name="INVALID_RECORD")


# --- control records

MARKER_SIZE: Final = 78
_KEY = Struct(">hh")
_MARKER = Struct(">hi")


class ControlType(IntEnum):
    """The type of a control record; the value is stored in its key."""

    ABORT = 0
    COMMIT = 1
    LEADER_CHANGE = 2
    SNAPSHOT_HEADER = 3
    SNAPSHOT_FOOTER = 4
    KRAFT_VERSION = 5
    KRAFT_VOTERS = 6
    UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class ControlRecord:
    """A control record's type and, for a transaction marker, the epoch of its coordinator."""

    kind: ControlType
    version: int
    coordinator_epoch: int | None = None

    @property
    def ends_transaction(self) -> bool:
        return self.kind in (ControlType.ABORT, ControlType.COMMIT)


def parse_control(key: Buffer | None, value: Buffer | None) -> ControlRecord:
    """Parse a control record's key and value. A type of a later Kafka version is `UNKNOWN`."""
    if key is None or len(key) < _KEY.size:
        there = 0 if key is None else len(key)
        raise malformed(f"a control record's key has {there} bytes, not {_KEY.size}")
    version, code = _KEY.unpack_from(key)
    if version < 0:
        raise malformed(f"a control record's key has version {version}")
    kind = ControlType(code) if 0 <= code <= ControlType.KRAFT_VOTERS else ControlType.UNKNOWN
    if kind not in (ControlType.ABORT, ControlType.COMMIT):
        return ControlRecord(kind, version)
    if value is None or len(value) < _MARKER.size:
        there = 0 if value is None else len(value)
        raise malformed(f"a transaction marker's value has {there} bytes, not {_MARKER.size}")
    value_version, coordinator_epoch = _MARKER.unpack_from(value)
    if value_version < 0:
        raise malformed(f"a transaction marker's value has version {value_version}")
    return ControlRecord(kind, version, coordinator_epoch)


def read_control(buffer: Buffer, position: int = 0) -> ControlRecord:
    """Return the control record of the control batch at `position` (whose CRC the caller has checked)."""
    header = BatchHeader.parse(buffer, position)
    if not header.is_control or header.size > len(buffer) - position:
        raise CorruptError(
            f"no whole control batch at position {position}", position=position, offset=header.base_offset
        )
    body: Buffer = memoryview(buffer)[position + HEADER_SIZE : position + header.size]
    if header.codec is not Codec.NONE:
        from tidegate.log.format.compression import decompress

        body = decompress(header.codec, body, limit=1 << 20)
    try:
        record = read_record(body)
        return parse_control(record.key, record.value)
    except CorruptError as error:
        raise CorruptError(
            f"the control batch at position {position} (offset {header.base_offset}): {error}",
            position=position,
            offset=header.base_offset,
            kafka_name=error.kafka_name,
        ) from None


@dataclass(frozen=True, slots=True)
class RecordFacts:
    """Facts over all records of one batch."""

    count: int
    min_timestamp: int
    """The smallest timestamp that is not -1; -1 when no record has one."""
    max_timestamp: int
    max_timestamp_offset: int
    """Offset of the first record with the largest timestamp; counted from the base offset as stored."""
    null_keys: int
    consecutive: bool
    """Whether the offset deltas are 0, 1, 2, …"""
