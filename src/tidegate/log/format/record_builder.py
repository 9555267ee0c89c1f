"""Growing column buffers that kernels fill with decoded records and that become Arrow arrays.

Memory comes from Arrow's pool, so that `pyarrow.total_allocated_bytes()` counts decoded records and pages are
reused from one read to the next. A column's first size is estimated from the bytes that are about to be decoded;
later sizes extrapolate from the share that is done, so the columns of a steady topic grow once or not at all.

Invariants:
M1  capacity depends on the bytes present: at most twice what was needed, or `SPARE_BYTES` beyond it.
M2  unused memory of a column returns to the pool when it is finished.

Thread rule: one builder, one thread.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.errors import InvalidError
from tidegate.kernels.record_batch import (
    DONE,
    FULL_HEADER_KEYS,
    FULL_HEADER_VALUES,
    FULL_HEADERS,
    FULL_KEYS,
    FULL_RECORDS,
    FULL_VALUES,
    MALFORMED,
    PROGRESS_ROW,
    BinaryArrays,
    Progress,
    RecordArrays,
    decode_records,
)
from tidegate.log.format.records import HEADER_TYPE, HEADERS_TYPE, RECORD_SCHEMA, TIMESTAMP_TYPE

LARGEST_COLUMN: Final = 2**31 - 1  # Arrow's 32-bit offsets
SPARE_BYTES: Final = 64 << 20
SMALLEST_GROWTH: Final = 4 << 10
SMALLEST_RECORD: Final = 7  # bytes


class Growing:
    """A growing buffer of `dtype` with a numpy view. It starts empty; new elements are set to `fill` if given."""

    def __init__(self, dtype: type[np.generic], fill: int | None = None) -> None:
        self._buffer = pa.allocate_buffer(0, resizable=True)
        self._dtype = np.dtype(dtype)
        self._fill = fill
        self.array: NDArray[Any] = np.frombuffer(self._buffer, dtype)

    def reserve(self, length: int, spare: int = 0) -> None:
        """Ensure capacity for `length` elements; when it grows, also for `spare` more where M1 allows."""
        held = len(self.array)
        if length > held:
            length = max(length, min(spare, max(2 * length, length + SPARE_BYTES // self._dtype.itemsize)))
            self._resize(length, shrink=False)
            if self._fill is not None:
                self.array[held:] = self._fill

    def finish(self, length: int) -> pa.Buffer:
        """Return the buffer, shrunk to its first `length` elements."""
        self._resize(length, shrink=len(self.array) > length + length // 8)
        return self._buffer

    def _resize(self, length: int, *, shrink: bool) -> None:
        del self.array  # it would point at memory that may move
        self._buffer.resize(length * self._dtype.itemsize, shrink_to_fit=shrink)
        self.array = np.frombuffer(self._buffer, self._dtype)


def _ends() -> Growing:
    """Return the buffer of value ends: the first is 0, the kernel writes every other one before reading it."""
    ends = Growing(np.int32)
    ends.reserve(1)
    ends.array[0] = 0
    return ends


class BinaryColumn:
    """The three buffers of an Arrow binary column."""

    def __init__(self) -> None:
        self.ends = _ends()
        self.valid = Growing(np.uint8, fill=0xFF)
        self.content = Growing(np.uint8)

    def reserve(self, rows: int, spare: int = 0) -> None:
        self.ends.reserve(rows + 1, spare + 1)
        self.valid.reserve((len(self.ends.array) + 6) // 8)

    def arrays(self) -> BinaryArrays:
        return BinaryArrays(self.ends.array, self.valid.array, self.content.array)

    def finish(self, rows: int) -> pa.BinaryArray:
        content = self.content.finish(int(self.ends.array[rows]))
        valid, nulls = finish_bitmap(self.valid, rows)
        return pa.Array.from_buffers(pa.binary(), rows, [valid, self.ends.finish(rows + 1), content], nulls)


def finish_bitmap(bitmap: Growing, rows: int) -> tuple[pa.Buffer | None, int]:
    """Return the bitmap of `rows` values (None when none is null) and the number of nulls."""
    size = (rows + 7) // 8
    nulls = 8 * size - int(np.bitwise_count(bitmap.array[:size]).sum(dtype=np.int64))
    return (bitmap.finish(size) if nulls else None), nulls


class RecordBuilder:
    """Arrow columns of records that are filled run after run."""

    def __init__(self) -> None:
        self._offset, self._timestamp = Growing(np.int64), Growing(np.int64)
        self._timestamp_valid = Growing(np.uint8, fill=0xFF)
        self._key, self._value = BinaryColumn(), BinaryColumn()
        self._header_ends = _ends()
        self._header_key, self._header_value = BinaryColumn(), BinaryColumn()
        self._content_columns = {
            FULL_KEYS: self._key,
            FULL_VALUES: self._value,
            FULL_HEADER_KEYS: self._header_key,
            FULL_HEADER_VALUES: self._header_value,
        }
        self._progress = np.zeros(1, PROGRESS_ROW)
        self._arrays: RecordArrays | None = None

    @property
    def progress(self) -> Progress:
        return Progress._make(self._progress[0].item())

    def add(
        self, source: NDArray[np.uint8], rows: NDArray[Any], size: int, done: float, start: int, stop: int
    ) -> bool:
        """Decode the records of the batches `rows`, `size` bytes of them; return whether all are valid.

        `done` is the share of all bytes that is decoded after this call. When a record is malformed, `progress` says
        which one, and the builder must not be used any more.
        """
        progress = self._progress[0]
        progress["batch"] = progress["record"] = 0
        records = int(progress["records"])
        claimed = int(rows["count"].sum(dtype=np.int64))
        self._reserve_records(records + min(claimed, size // SMALLEST_RECORD), done)
        # most bytes are usually values; the other columns grow when they need to
        self._reserve_content(self._value, int(self._value.ends.array[records]) + size, done)
        while True:
            status = decode_records(source, rows, start, stop, self._progress, self._all_arrays())
            if status in (DONE, MALFORMED):
                return bool(status == DONE)
            self._grow(status, int(progress["wanted"]), done)

    def finish(self, topic: str, partition: int) -> pa.RecordBatch:
        """Return the records so far as Arrow; the builder is empty afterwards."""
        records, self._arrays = self.progress.records, None
        stamp_valid, stampless = finish_bitmap(self._timestamp_valid, records)
        stamps = [stamp_valid, self._timestamp.finish(records)]
        lists = [None, self._header_ends.finish(records + 1)]
        columns = [
            pa.DictionaryArray.from_arrays(_constant(0, records), _dictionary(topic), safe=False),
            _constant(partition, records),
            pa.Array.from_buffers(pa.int64(), records, [None, self._offset.finish(records)], 0),
            pa.Array.from_buffers(TIMESTAMP_TYPE, records, stamps, stampless),
            self._key.finish(records),
            self._value.finish(records),
            pa.Array.from_buffers(HEADERS_TYPE, records, lists, 0, children=[self._finish_headers()]),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)

    def _finish_headers(self) -> pa.StructArray:
        headers = self.progress.headers
        if headers == 0:
            return _NO_HEADERS
        names = header_names(self._header_key.finish(headers))
        return pa.StructArray.from_arrays(
            [names, self._header_value.finish(headers)], fields=list(HEADER_TYPE)
        )

    def _reserve_records(self, records: int, done: float) -> None:
        if records <= len(self._offset.array):
            return
        self._offset.reserve(records, int(records / done))
        room = len(self._offset.array)  # the other columns follow, so that one number is the capacity of all
        self._timestamp.reserve(room)
        self._timestamp_valid.reserve((room + 7) // 8)
        self._key.reserve(room)
        self._value.reserve(room)
        self._header_ends.reserve(room + 1)
        self._arrays = None

    def _reserve_content(self, column: BinaryColumn, size: int, done: float) -> None:
        if size <= len(column.content.array):
            return
        if size > LARGEST_COLUMN:
            raise InvalidError(
                f"these batches decode to {size} bytes in one column, more than an Arrow array holds; "
                f"read fewer bytes at a time, or decode them in pieces"
            )
        column.content.reserve(size, min(int(size / done), LARGEST_COLUMN))
        self._arrays = None

    def _grow(self, status: int, wanted: int, done: float) -> None:
        """Double the column that was full, so that it grows rarely."""
        wanted = max(wanted, min(2 * wanted, LARGEST_COLUMN), SMALLEST_GROWTH)
        if status == FULL_RECORDS:
            self._reserve_records(wanted, done)
        elif status == FULL_HEADERS:
            self._header_key.reserve(wanted, int(wanted / done))
            self._header_value.reserve(len(self._header_key.ends.array) - 1)
            self._arrays = None
        else:
            self._reserve_content(self._content_columns[status], wanted, done)

    def _all_arrays(self) -> RecordArrays:
        if self._arrays is not None:
            return self._arrays
        self._arrays = RecordArrays(
            self._offset.array,
            self._timestamp.array,
            self._timestamp_valid.array,
            self._key.arrays(),
            self._value.arrays(),
            self._header_ends.array,
            self._header_key.arrays(),
            self._header_value.arrays(),
        )
        return self._arrays


_NO_HEADERS: Final = pa.array([], HEADER_TYPE)


@lru_cache(maxsize=1024)
def _dictionary(topic: str) -> pa.StringArray:
    return pa.array([topic], pa.string())


def _constant(number: int, rows: int) -> pa.Int32Array:
    column = np.zeros(rows, np.int32) if number == 0 else np.full(rows, number, np.int32)
    return pa.Array.from_buffers(pa.int32(), rows, [None, pa.py_buffer(column)], 0)


def header_names(names: pa.BinaryArray) -> pa.StringArray:
    """Return header keys as text. Bytes that are not UTF-8 become U+FFFD, as in Java: they are a client's
    mistake, not damage, and must not hide the record.
    """
    try:
        return names.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([name.decode("utf-8", "replace") for name in names.to_pylist()], pa.string())
