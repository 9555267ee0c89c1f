"""What a record's checksum covers.

A record's checksum is the CRC-32 (IEEE, zlib's) of (ints are big-endian, a null key has length -1):

    kind i32 | key length i32 | key | schema i32, 0 | value      without schema and value if the value is null

of a control record, whose key ends in a nonce that is left out, followed by the rest of it, so that no byte
of a control record can change unseen:

    control type i32 | flags i32 | producer's clock i64 | `divc` length i32, -1 none | `divc`

of a data record whose flags say *headers only* (see `header`) followed by

    flags i32 | producer's clock i64

`kind` is the one the header claims, so that a changed kind is a wrong checksum. Left out are the producer's
numbering, which the sequence rules guard, and the nonce, because attempts that share a GUID differ in it alone
and must sum up alike.

A chain's checksum is the sum of its records', its end left out, modulo 2^64: by ADHASH2 of the checksums
above, by ADHASH of `field_sum`s, which cannot see two values that changed places; NONE is always 0.

Thread rule: pure functions; the kernels run without the interpreter lock.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.errors import InvalidError
from tidegate.integrity.columns import IntegrityColumns, single, source_of
from tidegate.integrity.header import ChecksumType, RecordKind, Stamp
from tidegate.kernels.record_checksum import field_sums, record_checksums

NONCE_BYTES: Final = 4
_INT: Final = struct.Struct(">i")
_SCHEMA: Final = _INT.pack(0)
_CONTROL: Final = struct.Struct(">iiq")
_HEADERS_ONLY: Final = struct.Struct(">iq")


def record_checksum(kind: int, key: bytes | None, value: bytes | None) -> int:
    """The checksum of one data record, in a chain with control records."""
    return zlib.crc32(_covered(kind, key, key, value))


def control_checksum(stamp: Stamp, key: bytes | None, value: bytes | None, payload: bytes | None) -> int:
    """The checksum of one control record; `payload` is its `divc`."""
    covered = _covered(stamp.kind, key, None if key is None else key[:-NONCE_BYTES], value)
    covered += _CONTROL.pack(stamp.control, stamp.flags, stamp.timestamp)
    return zlib.crc32(covered + _length(payload) + (payload or b""))


def checksum_of(stamp: Stamp, key: bytes | None, value: bytes | None, payload: bytes | None) -> int:
    """The checksum a record with this stamp should have, whatever its kind."""
    if stamp.kind == RecordKind.CONTROL:
        return control_checksum(stamp, key, value, payload)
    if stamp.is_headers_only:
        covered = _covered(stamp.kind, key, key, value)
        return zlib.crc32(covered + _HEADERS_ONLY.pack(stamp.flags, stamp.timestamp))
    return record_checksum(stamp.kind, key, value)


def field_sum(stamp: Stamp, key: bytes | None, value: bytes | None) -> int:
    """ADHASH's summand of one record: the sum of one CRC per field."""
    kind = zlib.crc32(_INT.pack(stamp.kind))
    if stamp.kind == RecordKind.CONTROL:
        return kind + zlib.crc32(_INT.pack(stamp.control))
    total = kind + zlib.crc32(key or b"")
    return total if value is None else total + zlib.crc32(_SCHEMA) + zlib.crc32(value)


def summand(checksum_type: int, stamp: Stamp, key: bytes | None, value: bytes | None) -> int:
    """What one record, not a chain's end, adds to its chain's checksum."""
    if checksum_type == ChecksumType.ADHASH2:
        return stamp.crc
    return field_sum(stamp, key, value) if checksum_type == ChecksumType.ADHASH else 0


def computed_checksums(
    batch: pa.RecordBatch, columns: IntegrityColumns, *, payloads: bool = True
) -> NDArray[np.uint32]:
    """The checksum each record should have, 0 where it is not managed; compare with `columns.crc`.

    With `payloads=False` only control records are computed and the others answer what their header says: the
    cheap mode, which reads no key and no value.
    """
    computed = np.empty(len(columns), np.uint32)
    if len(columns):
        headers = single(batch.column("headers"))
        _require_own(batch, columns, len(headers.values))
        source = source_of(key=batch.column("key"), value=batch.column("value"), headers=headers)
        record_checksums(source, columns.rows, payloads, computed)
    return computed


def computed_field_sums(batch: pa.RecordBatch, columns: IntegrityColumns) -> NDArray[np.uint64]:
    """ADHASH's summand of each record, 0 where it is not managed."""
    sums = np.empty(len(columns), np.uint64)
    if len(columns):
        _require_own(batch, columns, 2**31)
        field_sums(source_of(key=batch.column("key"), value=batch.column("value")), columns.rows, sums)
    return sums


def _require_own(batch: pa.RecordBatch, columns: IntegrityColumns, entries: int) -> None:
    """Kernels do not look where they step: the rows must have been read from this batch."""
    if batch.num_rows != len(columns) or int(columns.rows["payload"].max()) >= entries:
        raise InvalidError("the metadata was read from another batch; call read_columns on this one")


def _covered(kind: int, key: bytes | None, kept: bytes | None, value: bytes | None) -> bytes:
    covered = _INT.pack(kind) + _length(key) + (kept or b"")
    return covered if value is None else covered + _SCHEMA + value


def _length(field: bytes | None) -> bytes:
    return _INT.pack(-1 if field is None else len(field))
