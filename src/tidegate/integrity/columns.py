"""The metadata of whole Arrow batches: a headers column into one row per record.

Owns the vector form of reading `header`; writing is `stamping`'s. `read_columns(batch.column("headers"))` gives
`IntegrityColumns`, whose structured rows the validating kernel takes as they are. Nothing raises for what a
header says: a record without `div` is UNMANAGED; one is MALFORMED when

- it has several `div` headers, or one that is null, not 40 bytes, or of another version;
- its chain or sequence is negative, or it is no control record and yet names a control type;
- it starts or ends a chain or a push and its `divc` is missing, repeated, of another version or length, or
  names an unknown checksum type.

Kinds and control types this release does not know are left to the validator (UNSUPPORTED).

Thread rule: values and pure functions; the kernels run without the interpreter lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.errors import InvalidError
from tidegate.integrity.header import CONTROL_HEADER_KEY, HEARTBEAT, RecordKind, Stamp
from tidegate.kernels.encoding import RecordSource
from tidegate.kernels.integrity_headers import MALFORMED, MANAGED, STAMP_ROW, UNMANAGED, read_stamps
from tidegate.log.format.encode import NO_DELTAS, record_source
from tidegate.log.format.records import GIVEN_HEADERS_TYPE, HEADERS_TYPE, RecordColumns

__all__ = [
    "MALFORMED",
    "MANAGED",
    "STAMP_ROW",
    "UNMANAGED",
    "IntegrityColumns",
    "control_payload",
    "int64s",
    "read_columns",
    "single",
    "source_of",
    "times_of",
    "without_control",
]

_NO_BINARY: Final = pa.array([], pa.binary())
_NO_TIMESTAMPS: Final = pa.array([], pa.int64())


@dataclass(frozen=True, slots=True)
class IntegrityColumns:
    """The metadata of a batch's records, in their order; where a record is not MANAGED only `state` counts."""

    rows: NDArray[Any]
    """Of `STAMP_ROW`, contiguous: what kernels take. `payload` is the place of `divc` among all the headers
    of the column, -1 without; `announced_type` is a chain's start's, `certified…` a chain's end's."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: slice | NDArray[Any]) -> IntegrityColumns:
        """Some of the records; a slice shares memory."""
        return IntegrityColumns(self.rows[chosen])

    @property
    def state(self) -> NDArray[np.uint8]:
        """UNMANAGED, MANAGED or MALFORMED."""
        return self._field("state")

    @property
    def kind(self) -> NDArray[np.uint8]:
        return self._field("kind")

    @property
    def control(self) -> NDArray[np.uint8]:
        return self._field("control")

    @property
    def flags(self) -> NDArray[np.uint8]:
        return self._field("flags")

    @property
    def guid_high(self) -> NDArray[np.uint64]:
        return self._field("guid_high")

    @property
    def guid_low(self) -> NDArray[np.uint64]:
        return self._field("guid_low")

    @property
    def chain(self) -> NDArray[np.int32]:
        return self._field("chain")

    @property
    def sequence(self) -> NDArray[np.int32]:
        return self._field("sequence")

    @property
    def timestamp(self) -> NDArray[np.int64]:
        return self._field("timestamp")

    @property
    def crc(self) -> NDArray[np.uint32]:
        return self._field("crc")

    @property
    def is_control(self) -> NDArray[np.bool_]:
        """The records that are Tidegate's own, heartbeats among them: consumers leave them out."""
        chosen: NDArray[np.bool_] = (self.state == MANAGED) & (self.kind == RecordKind.CONTROL)
        return chosen

    @property
    def is_heartbeat(self) -> NDArray[np.bool_]:
        chosen: NDArray[np.bool_] = (self.state == MANAGED) & ((self.flags & HEARTBEAT) != 0)
        return chosen

    def guid(self, row: int) -> bytes:
        """The producer of one record."""
        found = self.rows[row]
        return int(found["guid_high"]).to_bytes(8, "big") + int(found["guid_low"]).to_bytes(8, "big")

    def stamp(self, row: int) -> Stamp:
        """One record's metadata as the scalar twin takes it."""
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

    def _field(self, name: str) -> NDArray[Any]:
        return self.rows[name]


def read_columns(headers: pa.ListArray | pa.ChunkedArray) -> IntegrityColumns:
    """The metadata in a headers column."""
    column = single(headers)
    rows = np.zeros(len(column), STAMP_ROW)
    if len(column):
        read_stamps(source_of(headers=column), rows)
    return IntegrityColumns(rows)


def control_payload(headers: pa.ListArray | pa.ChunkedArray, row: int) -> bytes | None:
    """The `divc` bytes of one record, None without: where an end of push has its manifest."""
    for header in headers[row].as_py() or ():
        if header["key"] == CONTROL_HEADER_KEY:
            payload: bytes | None = header["value"]
            return payload
    return None


def without_control(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The records of a batch that are not Tidegate's own: what a consumer wants to see."""
    mask = read_columns(batch.column("headers")).is_control
    return batch.filter(pa.array(~mask)) if mask.any() else batch


def source_of(
    *,
    key: pa.Array = _NO_BINARY,
    value: pa.Array = _NO_BINARY,
    headers: pa.Array | None = None,
) -> RecordSource:
    """The buffers of some columns of records, for the kernels of this room."""
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
    """The log's time of each record, -1 without."""
    return int64s(batch, "timestamp")


def int64s(batch: pa.RecordBatch, name: str) -> NDArray[np.int64]:
    """A column as numbers; a null timestamp is -1."""
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
