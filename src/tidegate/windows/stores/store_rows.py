"""What goes into the stores and comes out of them: checked columns, values with a timestamp, iterators over rows.

Iterators show the store as it was when they were opened, but for time segments that were dropped since: those rows
are skipped. They may hold on to storage until they are closed or read to their end.

Thread rule: one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import InvalidError
from tidegate.storage import RuntimeContext, Time
from tidegate.windows.stores.expiry import Int64s
from tidegate.windows.stores.state import WindowsState

Row = TypeVar("Row")
KeyColumn: TypeAlias = "pa.Array | pa.ChunkedArray | Sequence[bytes]"
ValueColumn: TypeAlias = "pa.Array | pa.ChunkedArray | Sequence[bytes | None]"
NumberColumn: TypeAlias = "npt.NDArray[np.signedinteger] | pa.Array | Sequence[int] | int"

PAYLOAD = pa.schema(
    [pa.field("value", pa.binary(), nullable=True), pa.field("value_ts", pa.int64(), nullable=False)]
)
NO_NUMBERS = np.empty(0, np.int64)


class TimestampedValue(NamedTuple):
    """A value and the timestamp of the record it comes from."""

    value: bytes
    timestamp: int


Value: TypeAlias = "bytes | TimestampedValue"


class Changelog(Protocol):
    """Who is told of every put, also of dropped ones: a column each of keys, values (null: deleted), timestamps."""

    def __call__(self, keys: pa.BinaryArray, values: pa.BinaryArray, timestamps: Int64s, /) -> None: ...


class StoreIterator(Generic[Row]):
    """Rows, one at a time; close it, best with `with`."""

    __slots__ = ("_release", "_rows")

    def __init__(self, rows: Iterator[Row], release: Callable[[], None] | None = None) -> None:
        self._rows: Iterator[Row] = rows
        self._release = release

    def __iter__(self) -> StoreIterator[Row]:
        return self

    def __next__(self) -> Row:
        try:
            return next(self._rows)
        except BaseException:  # the end, or an error: nothing more will be read
            self.close()
            raise

    def __enter__(self) -> StoreIterator[Row]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what it holds; closing again does nothing."""
        release, self._release = self._release, None
        self._rows = iter(())
        if release is not None:
            release()


def scan_batches(
    context: RuntimeContext,
    state: WindowsState,
    span: Time,
    *,
    key_from: bytes | None = None,
    key_to: bytes | None = None,
    forward: bool = True,
) -> StoreIterator[pa.RecordBatch]:
    """Columns key, ts, seq, value, value_ts of rows inside the bounds; captured now, read as asked for.

    Every key's rows come in the order of time, or against it.
    """
    reader, width = context.reader(), state.index.spec.bucket_ms
    if forward:
        scans = [reader.scan(context.task, state, span)]
    else:
        found = [bucket.start for bucket in state.index.buckets(span.start, span.end)]
        scans = []
        try:
            for start in reversed(found):
                part = Time(max(start, span.start), min(start + width - 1, span.end))
                scans.append(reader.scan(context.task, state, part))
        except BaseException:
            for scan in scans:
                scan.close()
            raise

    def batches() -> Iterator[pa.RecordBatch]:
        for scan in scans:
            for batch in scan if forward else reversed([_reverse(each) for each in scan]):
                kept = _keys_between(batch, key_from, key_to)
                if kept.num_rows:
                    yield kept

    def release() -> None:
        for scan in scans:
            scan.close()

    return StoreIterator(batches(), release)


def _reverse(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.take(pa.array(np.arange(batch.num_rows - 1, -1, -1)))


def _keys_between(batch: pa.RecordBatch, key_from: bytes | None, key_to: bytes | None) -> pa.RecordBatch:
    keys = batch.column(0)
    if key_from is not None:
        batch = batch.filter(pc.greater_equal(keys, pa.scalar(key_from, pa.binary())))
        keys = batch.column(0)
    if key_to is not None:
        batch = batch.filter(pc.less_equal(keys, pa.scalar(key_to, pa.binary())))
    return batch


# ── columns handed in ────────────────────────────────────────────────────────────────────────────────────────


def one_key(key: bytes | None) -> bytes:
    """The key, if it is one."""
    if not isinstance(key, bytes):
        raise InvalidError(f"a key is needed, as bytes; this is {type(key).__name__}")
    return key


def key_column(keys: KeyColumn) -> pa.BinaryArray:
    """The keys as one binary column without nulls."""
    column = _binary("keys", keys)
    if column.null_count:
        raise InvalidError(f"{column.null_count} of {len(column)} keys are null; every row needs a key")
    return column


def value_column(values: ValueColumn, rows: int) -> pa.BinaryArray:
    """The values as one binary column; null deletes."""
    column = _binary("values", values)
    if len(column) != rows:
        raise InvalidError(f"{len(column)} values for {rows} keys")
    return column


def number_column(what: str, numbers: NumberColumn, rows: int) -> Int64s:
    """The numbers as int64; one number stands for all rows."""
    if isinstance(numbers, int):
        return np.full(rows, numbers, np.int64)
    if isinstance(numbers, pa.Array):
        if numbers.null_count:
            raise InvalidError(f"{numbers.null_count} of the {what} are null")
        numbers = numbers.to_numpy(zero_copy_only=False)
    column = np.asarray(numbers, None if len(numbers) else np.int64)
    if not np.issubdtype(column.dtype, np.signedinteger):
        raise InvalidError(f"{what} are {column.dtype}, not whole numbers")
    if len(column) != rows:
        raise InvalidError(f"{len(column)} {what} for {rows} keys")
    return column.astype(np.int64, copy=False)


def times_column(what: str, numbers: NumberColumn, rows: int) -> Int64s:
    """Window bounds: 0 or later."""
    column = number_column(what, numbers, rows)
    if rows and (least := int(column.min())) < 0:
        raise InvalidError(f"{what}: a window cannot lie at {least}, before the epoch")
    return column


def _binary(what: str, given: KeyColumn | ValueColumn) -> pa.BinaryArray:
    column = given
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if not isinstance(column, pa.Array):
        try:
            column = pa.array(column, pa.binary())
        except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
            raise InvalidError(f"{what} must be bytes: {error}") from None
    if column.type != pa.binary():
        if not (pa.types.is_large_binary(column.type) or pa.types.is_string(column.type)):
            raise InvalidError(f"{what} are {column.type}; encode them to binary")
        column = column.cast(pa.binary())
    return column
