"""Values with the timestamp of the record they come from: `timestamp i64, raw`, big-endian, one value or a column.

Window stores of Kafka Streams' aggregations keep values like this. Their changelog does not: there the value is
raw and the timestamp is the record's own. A null value is a deletion and has no timestamp; a value of no bytes is
a value, and takes eight.

Thread rule: pure functions.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import CorruptError, InvalidError
from tidegate.kernels.windowed_keys import join_timestamps, split_timestamps
from tidegate.windows.keys.binary_columns import binary_column, make_binary, room_for

Int64s = npt.NDArray[np.int64]
PREFIX_BYTES = 8


def join_timestamp(value: bytes | None, timestamp: int) -> bytes | None:
    """What a timestamped store keeps for a changelog record's value and timestamp."""
    return None if value is None else struct.pack(">q", timestamp) + value


def split_timestamp(stored: bytes | None) -> tuple[bytes | None, int]:
    """The raw value and its timestamp; (None, -1) for a deletion."""
    if stored is None:
        return None, -1
    if len(stored) < PREFIX_BYTES:
        raise CorruptError(
            f"a timestamped value of {len(stored)} bytes has no timestamp; 8 bytes are the least"
        )
    return stored[PREFIX_BYTES:], int.from_bytes(stored[:PREFIX_BYTES], "big", signed=True)


def join_timestamp_column(values: pa.Array | pa.ChunkedArray, timestamps: Int64s) -> pa.BinaryArray:
    """`join_timestamp` for a whole column."""
    column = binary_column(values)
    rows = len(column.present)
    numbers = np.ascontiguousarray(timestamps, np.int64)
    if len(numbers) != rows:
        raise InvalidError(f"{len(numbers)} timestamps for {rows} values")
    room = room_for(column.total_bytes + PREFIX_BYTES * rows, "a column of timestamped values")
    ends, content = np.empty(rows + 1, np.int32), np.empty(room, np.uint8)
    join_timestamps(column.content, column.bounds, column.present, numbers, ends, content)
    return make_binary(ends, content[: ends[-1]], column.present)


def split_timestamp_column(stored: pa.Array | pa.ChunkedArray) -> tuple[pa.BinaryArray, Int64s]:
    """`split_timestamp` for a whole column."""
    column = binary_column(stored)
    rows = len(column.present)
    ends, content = np.empty(rows + 1, np.int32), np.empty(column.total_bytes, np.uint8)
    timestamps = np.empty(rows, np.int64)
    short = split_timestamps(column.content, column.bounds, column.present, ends, content, timestamps)
    if short >= 0:
        raise CorruptError(f"row {short}: a timestamped value below 8 bytes has no timestamp")
    return make_binary(ends, content[: ends[-1]], column.present), timestamps
