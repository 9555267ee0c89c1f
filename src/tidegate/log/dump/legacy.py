"""Messages of magic 0 and 1, as brokers before 0.11 wrote them: enough of the format to print them.

Nothing here is ever written; old data is only looked at.

    int64 offset | int32 size | uint32 crc | int8 magic | int8 attributes | (magic 1: int64 timestamp)
    | int32 key length (-1 null) key | int32 value length (-1 null) value

The CRC is the IEEE one, over magic … end. attributes: bits 0-2 codec, bit 3 timestamp type (magic 1). With a
codec the value is a compressed sequence of such messages; with magic 1 the inner offsets are relative and
the outer offset is the last inner one's, and a wrapper with LogAppendTime gives all inner ones its timestamp.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Final

from tidegate.errors import CorruptError
from tidegate.log.format.batch import CODEC_MASK, LENGTH_OVERHEAD, LOG_APPEND_TIME_BIT, Buffer, Codec

OUTER_SIZE: Final = {0: 14, 1: 22}  # crc … value length
_MAX_INNER_BYTES: Final = 64 << 20

_HEAD = Struct(">qiIbb")
_INT32 = Struct(">i")
_INT64 = Struct(">q")


@dataclass(frozen=True, slots=True)
class LegacyRecord:
    """One message. `timestamp_label` is Kafka's word for whose clock the timestamp is from."""

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
    """The message at the start of `data`, its compressed content (if any) left as `value`."""
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
    """The messages a compressed one holds, with absolute offsets; an uncompressed one is its own content."""
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
        LegacyRecord(
            offset=record.offset + shift,
            size=record.size,
            magic=record.magic,
            codec=record.codec,
            crc=record.crc,
            is_valid=record.is_valid,
            timestamp=message.timestamp if appended else record.timestamp,
            timestamp_label=message.timestamp_label,
            key=record.key,
            value=record.value,
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
    """Magic 0 producers hashed the LZ4 frame header with its magic number included; put the right byte in."""
    if len(frame) < 7:
        return frame
    descriptor = 2 + (8 if frame[4] & 0x08 else 0) + (4 if frame[4] & 0x01 else 0)
    at = 4 + descriptor
    return frame[:at] + bytes(((_xxh32(frame[4:at]) >> 8) & 0xFF,)) + frame[at + 1 :]


def _xxh32(data: bytes) -> int:
    """xxHash32 with seed 0, for fewer than 16 bytes (no frame descriptor has more)."""
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
