"""Control batches: the one record in them that speaks to the log itself, such as a transaction's end.

Owns the key and value of control records, the making of transaction markers and the reading of any control
batch, all on plain bytes (recovery and the producer state use it before numba is worth loading). It does
not decide what a marker does: the producer state does.

    key                int16 version (0) | int16 type
    value of a marker  int16 version (0) | int32 coordinator epoch

A marker batch is transactional and control, has one record, no sequence and no compression: 78 bytes.
Control records take an offset and are never shown to consumers.

Thread rule: values and pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Final

from tidegate.errors import CorruptError
from tidegate.log.batches.batch import (
    HEADER_SIZE,
    BatchHeader,
    Buffer,
    Codec,
)
from tidegate.log.batches.one_record import malformed, read_record

MARKER_SIZE: Final = 78

_KEY = Struct(">hh")
_MARKER = Struct(">hi")


class ControlType(IntEnum):
    """What a control record says; the value is stored in its key."""

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
    """What a control record with this key and value says. A type from the future is `UNKNOWN`."""
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
    """The control record of the control batch at `position` (whose CRC the caller has checked)."""
    header = BatchHeader.parse(buffer, position)
    if not header.is_control or header.size > len(buffer) - position:
        raise CorruptError(
            f"no whole control batch at position {position}", position=position, offset=header.base_offset
        )
    body: Buffer = memoryview(buffer)[position + HEADER_SIZE : position + header.size]
    if header.codec is not Codec.NONE:
        from tidegate.log.batches.codecs import decompress

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
