"""Read, check and write the integrity metadata of whole Arrow batches.

`read_columns(batch.column("headers"))` returns `IntegrityColumns`, the input of the validating kernel. Header contents
never raise: a record without `div` is UNMANAGED; one is MALFORMED when

- it has several `div` headers, or one that is null, not 40 bytes, or of another version;
- its chain or sequence is negative, or it names a control type without being a control record;
- it starts or ends a chain or a push and its `divc` is missing, repeated, of another version or length, or
  names an unknown checksum type.

Kinds and control types this release does not know are left to the validator (UNSUPPORTED).

A record's checksum is the CRC-32 (IEEE, zlib's) of (ints are big-endian, a null key has length -1)

    kind i32 | key length i32 | key | schema i32, 0 | value      without schema and value if the value is null

with `kind` from the header. For a data record whose flags say *headers only* (see `header`) there follows `flags i32 |
producer's clock i64`. For a control record the nonce at the end of the key is left out, because attempts that share a
GUID differ only in it, and there follows

    control type i32 | flags i32 | producer's clock i64 | `divc` length i32, -1 none | `divc`

The sequence rules check the producer's numbering. A chain's checksum is the sum over its records without the end,
modulo 2^64: of the checksums above (ADHASH2), or of `field_sum`s (ADHASH), which cannot detect that two values were
exchanged. NONE is always 0.

`stamp_rows` builds the headers of rows to write: existing headers stay in front, an existing `div` or `divc` is
replaced. `sender.Chains` assigns the numbers.

Thread rule: values and pure functions; the kernels run without the interpreter lock.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.errors import InvalidError
from tidegate.integrity.header import (
    CONTROL_HEADER_KEY,
    CONTROL_VALUE,
    HEADER_BYTES,
    HEADER_KEY,
    HEARTBEAT,
    ORIGIN_HEADER_KEY,
    ChainOrigin,
    ControlKey,
    RecordKind,
    Stamp,
)
from tidegate.kernels.integrity import (
    MANAGED,
    STAMP_ROW,
    HeaderArrays,
    field_sums,
    measure_headers,
    merge_headers,
    read_stamps,
    record_checksums,
    stamp_records,
)
from tidegate.kernels.record_encoding import RecordSource
from tidegate.log.format.encode import NO_DELTAS, record_source
from tidegate.log.format.records import GIVEN_HEADERS_TYPE, HEADER_TYPE, HEADERS_TYPE, RecordColumns

# -- reading metadata ------------------------------------------------------------------------------

_NO_BINARY: Final = pa.array([], pa.binary())
_NO_TIMESTAMPS: Final = pa.array([], pa.int64())


Number = TypeVar("Number", bound=np.generic)


class _Field(Generic[Number]):
    """A field of the rows, as an array."""

    def __init__(self, _kind: type[Number]) -> None:
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, columns: IntegrityColumns, owner: type | None = None) -> NDArray[Number]:
        return columns.rows[self._name]


@dataclass(frozen=True, slots=True)
class IntegrityColumns:
    """The metadata of a batch's records, in batch order; where a record is not MANAGED only `state` is valid."""

    rows: NDArray[Any]
    """Contiguous rows of `STAMP_ROW`, the input of the kernels. `payload` is the index of `divc` among all the headers
    of the column, -1 without; `announced_type` is set by a start of chain, `certified…` by an end of chain."""
    state = _Field(np.uint8)  # UNMANAGED, MANAGED or MALFORMED
    kind = _Field(np.uint8)
    control = _Field(np.uint8)
    flags = _Field(np.uint8)
    guid_high = _Field(np.uint64)
    guid_low = _Field(np.uint64)
    chain = _Field(np.int32)
    sequence = _Field(np.int32)
    timestamp = _Field(np.int64)
    crc = _Field(np.uint32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: slice | NDArray[Any]) -> IntegrityColumns:
        """The chosen records; a slice shares memory."""
        return IntegrityColumns(self.rows[chosen])

    @property
    def is_control(self) -> NDArray[np.bool_]:
        """Mask of Tidegate's own records, heartbeats included, which consumers skip."""
        chosen: NDArray[np.bool_] = (self.state == MANAGED) & (self.kind == RecordKind.CONTROL)
        return chosen

    @property
    def is_heartbeat(self) -> NDArray[np.bool_]:
        chosen: NDArray[np.bool_] = (self.state == MANAGED) & ((self.flags & HEARTBEAT) != 0)
        return chosen

    def guid(self, row: int) -> bytes:
        """The producer GUID of one record."""
        found = self.rows[row]
        return int(found["guid_high"]).to_bytes(8, "big") + int(found["guid_low"]).to_bytes(8, "big")

    def stamp(self, row: int) -> Stamp:
        """One record's metadata as a `Stamp`."""
        found = self.rows[row]
        return Stamp(
            kind=int(found["kind"]),
            control=int(found["control"]),
            flags=int(found["flags"]),
            guid=self.guid(row),
            chain=int(found["chain"]),
            sequence=int(found["sequence"]),
            timestamp=int(found["timestamp"]),
            crc=int(found["crc"]),
        )


def read_columns(headers: pa.ListArray | pa.ChunkedArray) -> IntegrityColumns:
    """Decode the metadata of a headers column."""
    column = single(headers)
    rows = np.zeros(len(column), STAMP_ROW)
    if len(column):
        read_stamps(source_of(headers=column), rows)
    return IntegrityColumns(rows)


def control_payload(headers: pa.ListArray | pa.ChunkedArray, row: int) -> bytes | None:
    """The `divc` bytes of one record, None without one; an end of push stores its manifest there."""
    for header in headers[row].as_py() or ():
        if header["key"] == CONTROL_HEADER_KEY:
            payload: bytes | None = header["value"]
            return payload
    return None


def without_control(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The records of a batch without Tidegate's own control records."""
    mask = read_columns(batch.column("headers")).is_control
    return batch.filter(pa.array(~mask)) if mask.any() else batch


def source_of(
    *,
    key: pa.Array = _NO_BINARY,
    value: pa.Array = _NO_BINARY,
    headers: pa.Array | None = None,
) -> RecordSource:
    """The buffers of the record columns as kernels take them."""
    return record_source(RecordColumns(key, value, _NO_TIMESTAMPS, headers), NO_DELTAS, None)


def single(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A headers column as one array of lists of {key, value}."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        raise InvalidError("column 'headers' holds 2 GiB or more; validate the table in smaller pieces")
    if column.type.equals(HEADERS_TYPE):
        return column
    try:
        return column.cast(GIVEN_HEADERS_TYPE)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        raise InvalidError(f"column 'headers' is {column.type}; records have {HEADERS_TYPE}") from None


def times_of(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """The log timestamp of each record, -1 without one."""
    return int64s(batch, "timestamp")


def int64s(batch: pa.RecordBatch, name: str) -> NDArray[np.int64]:
    """A column as an int64 array; a null timestamp is -1."""
    column = batch.column(name)
    if pa.types.is_timestamp(column.type):
        if column.type.unit != "ms":
            column = column.cast(pa.timestamp("ms", column.type.tz), safe=False)
        column = column.view(pa.int64())
    elif column.type != pa.int64():
        column = column.cast(pa.int64())
    if column.null_count:
        column = column.fill_null(-1)
    numbers: NDArray[np.int64] = column.to_numpy(zero_copy_only=True)
    return numbers


# -- checksums -------------------------------------------------------------------------------------

NONCE_BYTES: Final = 4
_INT: Final = struct.Struct(">i")
_SCHEMA: Final = _INT.pack(0)
_CONTROL: Final = struct.Struct(">iiq")
_HEADERS_ONLY: Final = struct.Struct(">iq")


def checksum_of(stamp: Stamp, key: bytes | None, value: bytes | None, payload: bytes | None = None) -> int:
    """The checksum a record with this stamp should have, for any kind; `payload` is a control record's `divc`."""
    is_control = stamp.kind == RecordKind.CONTROL
    kept = key[:-NONCE_BYTES] if is_control and key is not None else key
    covered = _INT.pack(stamp.kind) + _length(key) + (kept or b"")
    if value is not None:
        covered += _SCHEMA + value
    if is_control:
        covered += _CONTROL.pack(stamp.control, stamp.flags, stamp.timestamp)
        covered += _length(payload) + (payload or b"")
    elif stamp.is_headers_only:
        covered += _HEADERS_ONLY.pack(stamp.flags, stamp.timestamp)
    return zlib.crc32(covered)


def field_sum(stamp: Stamp, key: bytes | None, value: bytes | None) -> int:
    """The ADHASH summand of one record: the sum of one CRC per field."""
    kind = zlib.crc32(_INT.pack(stamp.kind))
    if stamp.kind == RecordKind.CONTROL:
        return kind + zlib.crc32(_INT.pack(stamp.control))
    total = kind + zlib.crc32(key or b"")
    return total if value is None else total + zlib.crc32(_SCHEMA) + zlib.crc32(value)


def computed_checksums(
    batch: pa.RecordBatch, columns: IntegrityColumns, *, payloads: bool = True
) -> NDArray[np.uint32]:
    """The checksum each record should have, 0 where it is not managed; compare with `columns.crc`.

    With `payloads=False` only control records are computed; for data records the checksum of the header is returned,
    and no key and no value is read.
    """
    computed = np.empty(len(columns), np.uint32)
    if len(columns):
        headers = single(batch.column("headers"))
        _require_own(batch, columns, len(headers.values))
        source = source_of(key=batch.column("key"), value=batch.column("value"), headers=headers)
        record_checksums(source, columns.rows, payloads, computed)
    return computed


def computed_field_sums(batch: pa.RecordBatch, columns: IntegrityColumns) -> NDArray[np.uint64]:
    """The ADHASH summand of each record, 0 where it is not managed."""
    sums = np.empty(len(columns), np.uint64)
    if len(columns):
        _require_own(batch, columns, 2**31)
        field_sums(source_of(key=batch.column("key"), value=batch.column("value")), columns.rows, sums)
    return sums


def _require_own(batch: pa.RecordBatch, columns: IntegrityColumns, entries: int) -> None:
    """Raise unless the rows were read from this batch: kernels do not check bounds."""
    if batch.num_rows != len(columns) or int(columns.rows["payload"].max()) >= entries:
        raise InvalidError("the metadata was read from another batch; call read_columns on this one")


def _length(field: bytes | None) -> bytes:
    return _INT.pack(-1 if field is None else len(field))


# -- writing metadata ------------------------------------------------------------------------------

LARGEST_COLUMN: Final = 2**31 - 1
MOST_ROWS: Final = 1 << 20
"""Limit of one `stamp_rows` call, to bound the memory of the new headers."""
_NAME: Final = np.frombuffer(HEADER_KEY.encode(), np.uint8)


class Stamped(NamedTuple):
    """Result of `stamp_rows`: the headers of the rows before `stop`, and their contribution to their chain."""

    stop: int
    headers: pa.ListArray
    checksum: int
    used_bytes: int


def stamp_rows(
    source: RecordSource, start: int, stop: int, *, first: Stamp, checksum_type: int, max_bytes: int
) -> Stamped:
    """Number and check-sum rows from `start`, as many as have at most `max_bytes` of keys and values.

    `first` is the stamp of the first row; kind and checksum of each row are its own.
    """
    stop = min(stop, start + MOST_ROWS)
    stamps = _memory((stop - start) * HEADER_BYTES, np.uint8)
    template = np.frombuffer(first.to_bytes(), np.uint8)
    answer = np.zeros(4, np.int64)
    stamp_records(source, start, stop, max_bytes, template, first.sequence, checksum_type, stamps, answer)
    stop, checksum, used_bytes, reserved = answer.tolist()
    if reserved >= 0:
        raise InvalidError(
            f"the key of row {reserved} is reserved for Tidegate's own control records, so nothing was "
            f"written; leave control records out when you copy a topic (integrity.columns.without_control)",
            kafka_name="INVALID_RECORD",
        )
    stamps = stamps[: (stop - start) * HEADER_BYTES]
    return Stamped(stop, _headers(source, start, stop, stamps), checksum % 2**64, used_bytes)


def control_row(
    stamp: Stamp,
    payload: bytes | None,
    *,
    nonce: int = 0,
    key: bytes | None = None,
    origin: ChainOrigin | None = None,
) -> tuple[Stamp, RecordColumns]:
    """One control record ready to write, and its stamp with the checksum; `key` replaces that of its position."""
    if key is None:
        key = ControlKey(stamp.guid, stamp.chain, stamp.sequence, nonce).to_bytes()
    stamp = stamp._replace(crc=checksum_of(stamp, key, CONTROL_VALUE, payload))
    headers = [{"key": HEADER_KEY, "value": stamp.to_bytes()}]
    if payload is not None:
        headers.append({"key": CONTROL_HEADER_KEY, "value": payload})
    if origin is not None:
        headers.append({"key": ORIGIN_HEADER_KEY, "value": origin.to_bytes()})
    return stamp, RecordColumns(
        key=pa.array([key], pa.binary()),
        value=pa.array([CONTROL_VALUE], pa.binary()),
        timestamp=pa.array([stamp.timestamp], pa.int64()),
        headers=pa.array([headers], HEADERS_TYPE),
    )


def joined(pieces: list[RecordColumns]) -> RecordColumns:
    """Concatenate the pieces into one copy."""
    headers = [piece.headers for piece in pieces]
    return RecordColumns(
        key=pa.concat_arrays([piece.key for piece in pieces]),
        value=pa.concat_arrays([piece.value for piece in pieces]),
        timestamp=pa.concat_arrays([piece.timestamp for piece in pieces]),
        headers=pa.concat_arrays([column for column in headers if column is not None]),
    )


# -- headers columns -----------------------------------------------------------------------------


def _headers(source: RecordSource, start: int, stop: int, stamps: NDArray[np.uint8]) -> pa.ListArray:
    rows = stop - start
    if len(source.header_ends) == 0 or source.header_ends[start] == source.header_ends[stop]:
        counts = _counted(rows)
        key = _binary(counts * len(_NAME), _names(rows), None)
        return _list(counts, key, _binary(counts * HEADER_BYTES, stamps, None))
    return _merged(source, start, stop, stamps)


def _merged(source: RecordSource, start: int, stop: int, stamps: NDArray[np.uint8]) -> pa.ListArray:
    answer = np.zeros(4, np.int64)
    measure_headers(source, start, stop, answer)
    entries, key_bytes, value_bytes, nulls = answer.tolist()
    rows = stop - start
    entries, key_bytes = entries + rows, key_bytes + rows * len(_NAME)
    value_bytes += rows * HEADER_BYTES
    if max(entries, key_bytes, value_bytes) > LARGEST_COLUMN:
        raise InvalidError(
            "the headers of this table take 2 GiB or more with Tidegate's own; write it in smaller pieces"
        )
    into = HeaderArrays(
        ends=_ends(rows),
        key_ends=_ends(entries),
        key_content=_memory(key_bytes, np.uint8),
        value_ends=_ends(entries),
        value_valid=np.zeros((entries + 7) // 8 if nulls else 0, np.uint8),
        value_content=_memory(value_bytes, np.uint8),
    )
    fresh = stamps.view()
    fresh.flags.writeable = False
    if not merge_headers(source, start, stop, _NAME, fresh, into):
        raise InvalidError("the headers of this table changed while they were read; Arrow columns must not")
    valid = pa.py_buffer(into.value_valid) if nulls else None
    value = _binary(into.value_ends, into.value_content, valid)
    return _list(into.ends, _binary(into.key_ends, into.key_content, None), value)


def _list(ends: NDArray[np.int32], key: pa.Array, value: pa.Array) -> pa.ListArray:
    entries = pa.StructArray.from_arrays([key.view(pa.string()), value], fields=list(HEADER_TYPE))
    return pa.Array.from_buffers(HEADERS_TYPE, len(ends) - 1, [None, pa.py_buffer(ends)], children=[entries])


def _binary(ends: NDArray[np.int32], content: NDArray[np.uint8], validity: pa.Buffer | None) -> pa.Array:
    buffers = [validity, pa.py_buffer(ends), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.binary(), len(ends) - 1, buffers)


def _counted(rows: int) -> NDArray[np.int32]:
    return np.arange(rows + 1, dtype=np.int32)


def _ends(rows: int) -> NDArray[np.int32]:
    ends = _memory(rows + 1, np.int32)
    ends[0] = 0
    return ends


def _names(rows: int) -> NDArray[np.uint8]:
    return _name_block(1 << max(rows - 1, 0).bit_length())[: rows * len(_NAME)]


@lru_cache(maxsize=2)
def _name_block(rows: int) -> NDArray[np.uint8]:
    return np.tile(_NAME, rows)


def _memory(length: int, dtype: type[np.generic]) -> NDArray[Any]:
    """An array allocated from Arrow's memory pool, which reuses pages."""
    return np.frombuffer(pa.allocate_buffer(length * np.dtype(dtype).itemsize), dtype)
