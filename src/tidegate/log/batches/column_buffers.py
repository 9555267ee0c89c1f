"""The buffers behind Arrow columns, as the read-only arrays the encoding kernels take.

Owns what is easy to get wrong about Arrow's memory: slices share their parent's buffers and begin at an
offset, validity is a bitmap that may be missing, an empty array may have no buffers at all, a null list may
still span entries. Nothing is copied unless timestamps or header lists are null.

Thread rule: pure functions; the arrays borrow the columns' memory and keep it alive.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.kernels.encoding import BinarySource, RecordSource
from tidegate.log.batches.batch import NO_TIMESTAMP
from tidegate.log.batches.records import RecordColumns


def _fixed(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


NO_DELTAS: Final = _fixed(np.empty(0, np.int64))
_NO_ENDS: Final = _fixed(np.zeros(0, np.int32))
_ONE_END: Final = _fixed(np.zeros(1, np.int32))
_NO_BYTES: Final = _fixed(np.zeros(0, np.uint8))
_NO_BINARY: Final = BinarySource(_ONE_END, _NO_BYTES, _NO_BYTES, 0)


def record_source(columns: RecordColumns, deltas: NDArray[np.int64], now_ms: int | None) -> RecordSource:
    """The columns' buffers. Null timestamps become `now_ms`, or none without it; `deltas` is passed on."""
    header_ends, header_key, header_value = _headers(columns.headers)
    return RecordSource(
        timestamp=_timestamps(columns.timestamp, now_ms),
        deltas=_fixed(deltas[:]),
        key=_binary(columns.key),
        value=_binary(columns.value),
        header_ends=header_ends,
        header_key=header_key,
        header_value=header_value,
    )


def _timestamps(column: pa.Int64Array, now_ms: int | None) -> NDArray[np.int64]:
    if column.null_count:
        column = pc.fill_null(column, NO_TIMESTAMP if now_ms is None else now_ms)
    return _view(column.buffers()[1], np.int64, column.offset, len(column))


def _headers(column: pa.ListArray | None) -> tuple[NDArray[np.int32], BinarySource, BinarySource]:
    if column is None or len(column) == 0:
        return _NO_ENDS, _NO_BINARY, _NO_BINARY
    if column.null_count:
        counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
        ends = _fixed(np.concatenate([_ONE_END, np.cumsum(counts, dtype=np.int32)]))
        entries = column.flatten()
    else:
        ends = _view(column.buffers()[1], np.int32, column.offset, len(column) + 1)
        entries = column.values
    return ends, _binary(entries.field("key")), _binary(entries.field("value"))


def _binary(column: pa.BinaryArray | pa.StringArray) -> BinarySource:
    if len(column) == 0:
        return _NO_BINARY
    valid, ends, content = column.buffers()
    return BinarySource(
        ends=_view(ends, np.int32, column.offset, len(column) + 1),
        content=_view(content),
        valid=_view(valid) if column.null_count else _NO_BYTES,
        skip=column.offset,
    )


def _view(
    buffer: pa.Buffer | None, dtype: type[np.generic] = np.uint8, start: int = 0, length: int | None = None
) -> NDArray[Any]:
    if buffer is None:
        return _fixed(np.zeros(length or 0, dtype))
    array = np.frombuffer(buffer, dtype)
    return _fixed(array[start:] if length is None else array[start : start + length])
