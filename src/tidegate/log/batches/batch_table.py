"""The headers of many consecutive batches at once, as numpy columns.

Owns the vector form of what `batch.py` does one by one: find the batches of a buffer, read their headers,
check their CRCs. The records behind the headers are `decode`'s.

Thread rule: values and pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from fastcrc.crc32 import iscsi as crc32c
from numpy.typing import NDArray

from tidegate.errors import CorruptError
from tidegate.kernels.headers import BAD_LENGTH, BAD_MAGIC, HEADER_ROW, count_batches, read_headers
from tidegate.log.batches.batch import (
    ATTRIBUTES_POSITION,
    CODEC_MASK,
    CONTROL_BIT,
    LENGTH_OVERHEAD,
    MAGIC,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Buffer,
)

ByteArray: TypeAlias = NDArray[np.uint8]
Flags: TypeAlias = NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)

_HEADER_FIELDS = tuple(name for name in HEADER_ROW.fields or () if name != "position")


class _Column(Generic[Scalar]):
    """One column of a table's rows."""

    def __init__(self, kind: type[Scalar]) -> None:
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, table: BatchTable, owner: type) -> NDArray[Scalar]:
        column: NDArray[Scalar] = table.rows[self._name]
        return column


@dataclass(frozen=True, slots=True)
class BatchTable:
    """One row for each whole batch found, in order. `rows` is the structured array behind the columns."""

    rows: NDArray[Any]
    end: int
    """Position after the last whole batch."""
    fault: CorruptError | None = None
    """Why the scan ended at `end`, when not for want of bytes."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: Flags | slice) -> BatchTable:
        """The chosen rows, as a table of their own."""
        return BatchTable(self.rows[chosen], self.end, self.fault)

    def header(self, index: int) -> BatchHeader:
        """The header of one row."""
        row = self.rows[index]
        return BatchHeader(**{name: int(row[name]) for name in _HEADER_FIELDS}, magic=MAGIC)

    position = _Column(np.int64)
    base_offset = _Column(np.int64)
    length = _Column(np.int32)
    leader_epoch = _Column(np.int32)
    crc = _Column(np.uint32)
    attributes = _Column(np.int16)
    last_offset_delta = _Column(np.int32)
    base_timestamp = _Column(np.int64)
    max_timestamp = _Column(np.int64)
    producer_id = _Column(np.int64)
    producer_epoch = _Column(np.int16)
    base_sequence = _Column(np.int32)
    count = _Column(np.int32)

    @property
    def size(self) -> NDArray[np.int64]:
        """Bytes of each whole batch."""
        return self.length + np.int64(LENGTH_OVERHEAD)

    @property
    def last_offset(self) -> NDArray[np.int64]:
        """Inclusive; a base offset near the end of the numbers would wrap (`decode` refuses those)."""
        return self.base_offset + self.last_offset_delta

    @property
    def codec(self) -> NDArray[np.int16]:
        """The codec's number, 5 to 7 being none that exists."""
        return self.attributes & np.int16(CODEC_MASK)

    def _has(self, bit: int) -> Flags:
        return (self.attributes & np.int16(bit)).astype(np.bool_)

    @property
    def is_control(self) -> Flags:
        return self._has(CONTROL_BIT)

    @property
    def is_transactional(self) -> Flags:
        return self._has(TRANSACTIONAL_BIT)


def byte_array(buffer: Buffer | ByteArray) -> ByteArray:
    """Any bytes as a read-only numpy array over the same memory."""
    array = np.frombuffer(buffer, np.uint8)
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


def scan_batches(
    buffer: Buffer | ByteArray,
    start: int = 0,
    stop: int | None = None,
    *,
    strict: bool = True,
    path: Path | str | None = None,
    file_position: int = 0,
) -> BatchTable:
    """The headers of the whole batches in `buffer[start:stop]`, ending before a partial one.

    At a header that cannot be one it raises, or with `strict=False` ends there and keeps it as `fault`.
    """
    source = byte_array(buffer)
    stop = len(source) if stop is None else min(stop, len(source))
    batches, end, reason = count_batches(source, max(start, 0), stop)
    rows = np.empty(batches, HEADER_ROW)
    read_headers(source, max(start, 0), rows)
    if reason not in (BAD_LENGTH, BAD_MAGIC):
        return BatchTable(rows, end)
    try:
        BatchHeader.parse(source.data, end, path=path, file_position=file_position)
    except CorruptError as error:
        if strict:
            raise
        return BatchTable(rows, end, error)
    raise CorruptError(f"the bytes at position {file_position + end} changed while they were read", path=path)


def check_crcs(buffer: Buffer | ByteArray, table: BatchTable) -> Flags:
    """Which batches of the table have the CRC they claim."""
    return np.equal(computed_crcs(buffer, table), table.crc)


def computed_crcs(buffer: Buffer | ByteArray, table: BatchTable) -> NDArray[np.uint32]:
    """The CRC-32C of each batch's checksummed part."""
    view = byte_array(buffer).data  # read-only, or fastcrc would copy it
    starts = (table.position + ATTRIBUTES_POSITION).tolist()
    stops = (table.position + table.size).tolist()
    return np.fromiter(
        (crc32c(view[start:stop]) for start, stop in zip(starts, stops, strict=True)), np.uint32, len(table)
    )
