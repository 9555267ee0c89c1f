"""The interface of Kafka Streams' window and session stores: byte values with a timestamp, by row or in columns.

A row is (key, time, second number) → value, value's timestamp: for windows (start, sequence), for sessions (end,
start). The clock is the store's own, the largest time it was given; a null value deletes. Reads return what the
rules of `segments` allow, and change nothing. Every put goes through `put_batch` of `segmented_store`.

A put that is dropped as expired is counted, and written to the changelog all the same, as in Kafka Streams.

Iterators show the store as of their opening, without time segments that were dropped since. They may pin storage
until they are closed or read to their end.

Thread rule: the task's thread; an iterator is used by one thread at a time.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.durations import DurationLike, milliseconds
from tidegate.errors import InvalidError, TidegateWarning
from tidegate.metrics import Metrics
from tidegate.storage import Merge, RangeRequest, RuntimeContext, StoreSpec, Time
from tidegate.windows.keys import DecodedKeys, KeyFormat, encode_keys
from tidegate.windows.stores.segmented_store import (
    Position,
    PutResult,
    SegmentedStore,
    StoreState,
    WindowsState,
)
from tidegate.windows.stores.segments import (
    LATEST,
    Compat,
    Expiry,
    Flags,
    Int64s,
    default_bucket_ms,
    default_interval_ms,
)

# --- columns, values and iterators

Row = TypeVar("Row")
KeyColumn: TypeAlias = "pa.Array | pa.ChunkedArray | Sequence[bytes]"
ValueColumn: TypeAlias = "pa.Array | pa.ChunkedArray | Sequence[bytes | None]"
NumberColumn: TypeAlias = "npt.NDArray[np.signedinteger] | pa.Array | Sequence[int] | int"
PAYLOAD = pa.schema(
    [pa.field("value", pa.binary(), nullable=True), pa.field("value_ts", pa.int64(), nullable=False)]
)
NO_NUMBERS = np.empty(0, np.int64)


class TimestampedValue(NamedTuple):
    """A value and the timestamp of its record."""

    value: bytes
    timestamp: int


Value: TypeAlias = "bytes | TimestampedValue"


class Changelog(Protocol):
    """Receives every put, also dropped ones: columns of keys, values (null: deleted), timestamps."""

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
        except BaseException:  # the end, or an error: nothing more is read
            self.close()
            raise

    def __enter__(self) -> StoreIterator[Row]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release what it holds; closing again does nothing."""
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
    """Yield columns key, ts, seq, value, value_ts of rows inside the bounds; captured now, read on demand.

    Every key's rows come in the order of time, or in reverse.
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
    """Return the key after checking that it is one."""
    if not isinstance(key, bytes):
        raise InvalidError(f"a key is needed, as bytes; this is {type(key).__name__}")
    return key


def key_column(keys: KeyColumn) -> pa.BinaryArray:
    """Return the keys as one binary column without nulls."""
    column = _binary("keys", keys)
    if column.null_count:
        raise InvalidError(f"{column.null_count} of {len(column)} keys are null; every row needs a key")
    return column


def value_column(values: ValueColumn, rows: int) -> pa.BinaryArray:
    """Return the values as one binary column; null deletes."""
    column = _binary("values", values)
    if len(column) != rows:
        raise InvalidError(f"{len(column)} values for {rows} keys")
    return column


def number_column(what: str, numbers: NumberColumn, rows: int) -> Int64s:
    """Return the numbers as int64; one number stands for all rows."""
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
    """Return window bounds after checking that they are 0 or later."""
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


# --- the store

logger = logging.getLogger("tidegate.windows")
_KEYED = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("ts", pa.int64(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        *PAYLOAD,
    ]
)
_UNKEYED = pa.schema(list(_KEYED)[1:])
MANY_TIMES = 64  # windows looked up together; beyond it one scan of all of them is cheaper


class ValueStore(SegmentedStore):
    """The base class; use `WindowStore` or `SessionStore`."""

    def __init__(
        self,
        context: RuntimeContext,
        store: str | StoreState,
        *,
        retention: int | DurationLike | None,
        segment_interval: int | DurationLike | None = None,
        timestamped: bool = False,
        compat: Compat | str = Compat.TIDEGATE,
        changelog: Changelog | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """Open a store of byte values under a name, or one over a state of any columns.

        A store with a state of its own is written and read in batches; its time segments are those of the state's
        spec. Without a retention it keeps everything.
        """
        self.compat = _compat(compat)
        self.is_timestamped = timestamped
        self._changelog = changelog
        self._dropped = (metrics or Metrics()).counter(
            "tidegate_windows_dropped_records_total",
            "puts into time segments that are gone",
            ("task", "store"),
        )
        state = store
        if isinstance(state, str):
            retention_ms = _retention(state, 0 if retention is None else retention)
            interval_ms = default_interval_ms(retention_ms)
            if segment_interval is not None:
                interval_ms = milliseconds(segment_interval)
            expiry = Expiry(retention_ms, interval_ms, self.compat)
            spec = StoreSpec(
                state, Merge.LAST, PAYLOAD, bucket_ms=default_bucket_ms(interval_ms), segment_ms=interval_ms
            )
            state = WindowsState(spec, forgets_clocks=self.compat.forgets_clocks)
            super().__init__(context, state, expiry)
        elif retention is None:
            super().__init__(context, state, None)
        else:
            spec = state.index.spec
            kept = Expiry(_retention(spec.name, retention), spec.segment_ms, self.compat)
            super().__init__(context, state, kept)

    # ── looking at it ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def observed_time(self) -> int:
        """The largest window start (session end) it was given; -1 before the first."""
        return self.state.stream_time

    @property
    def position(self) -> Position:
        """The largest offsets processed."""
        return self._values.position

    @property
    def dropped_records(self) -> int:
        """The number of puts that were dropped as expired."""
        return self._values.dropped_records

    @property
    def expiry(self) -> Expiry:
        if self._expiry is None:
            raise TypeError(f"store {self.name} keeps everything")
        return self._expiry

    @property
    def retention_ms(self) -> int:
        return self.expiry.retention_ms

    @property
    def segment_interval_ms(self) -> int:
        return self.expiry.interval_ms

    @property
    def logging(self) -> bool:
        """Whether puts are written to a changelog."""
        return self._changelog is not None

    @property
    def _values(self) -> WindowsState:
        return values_state(self.state)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────

    def _write(
        self, keys: pa.Array, times: Int64s, seconds: Int64s | None, values: pa.Array, value_ts: Int64s
    ) -> PutResult:
        """Put rows in order, each judged by the store's time with it."""
        if not len(times):
            return PutResult(None, 0)
        state = self._values
        stream_time = self.expiry.own_time(times, state.observed_time)
        result = self.put_batch(value_rows(keys, times, seconds, values, value_ts), stream_time=stream_time)
        state.observed_time = stream_time if isinstance(stream_time, int) else int(stream_time[-1])
        if result.dropped:
            self._count_dropped(result.dropped)
        return result

    def _restore(
        self, keys: pa.Array, times: Int64s, seconds: Int64s | None, values: pa.Array, value_ts: Int64s
    ) -> None:
        """Restore rows of a changelog: time is that of the end of the batch, and rows that are expired by then are
        left out."""
        if not len(times):
            return
        after = max(self._values.observed_time, int(times.max()))
        self.put_batch(value_rows(keys, times, seconds, values, value_ts), stream_time=after)
        self._values.observed_time = after

    def _restore_records(
        self,
        decoded: DecodedKeys,
        times: Int64s,
        seconds: Int64s | None,
        values: ValueColumn,
        timestamps: NumberColumn,
    ) -> None:
        """Decode and restore records of a changelog; those without a key are skipped."""
        keys, rows = decoded.inner, len(times)
        column, stamps = value_column(values, rows), number_column("timestamps", timestamps, rows)
        if keys.null_count:
            good = np.flatnonzero(decoded.good)
            chosen = pa.array(good)
            keys, column, times, stamps = keys.take(chosen), column.take(chosen), times[good], stamps[good]
            seconds = None if seconds is None else seconds[good]
        self._restore(keys, times, seconds, column, stamps)

    def _count_dropped(self, dropped: int) -> None:
        before, now = self.dropped_records, self.dropped_records + dropped
        self._values.dropped_records = now
        self._dropped.add(dropped, task=self._context.task, store=self.name)
        if now.bit_length() > before.bit_length():  # log at 1, 2, 4, 8, … to limit messages
            logger.warning(
                "task %s, store %s: %d puts so far were dropped, because their time segments are gone"
                " (observed time %d, retention %d ms)",
                self._context.task,
                self.name,
                now,
                self.observed_time,
                self.retention_ms,
            )

    def _see(self, topic: str, partitions: NumberColumn, offsets: NumberColumn | None, rows: int) -> None:
        if offsets is None:
            return
        seen = number_column("offsets", offsets, rows)
        where = partitions if isinstance(partitions, int) else number_column("partitions", partitions, rows)
        self.position.advance_batch(topic, where, seen)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    def _span(self, first: int, last: int) -> Time | None:
        """Return the part of first … last (both included) that may be read; None if there is none."""
        first, last = max(first, self.first_readable_ts), min(last, LATEST)
        return Time(first, last) if first <= last else None

    def _key_rows(self, key: bytes, span: Time | None) -> pa.RecordBatch:
        """Return columns ts, seq, value, value_ts of one key, in the order of time; nothing is pinned afterwards."""
        if span is None:
            return _no_rows(_UNKEYED)
        reader = self._context.reader()
        with reader.load(reader.plan(self._context.task, self.state, (RangeRequest(key, span),))) as loaded:
            return loaded.view().to_batch()

    def _keys_rows(self, keys: pa.Array, span: Time | None) -> pa.RecordBatch:
        """Return columns key, ts, seq, value, value_ts of these keys, in the given order."""
        batches = []
        if span is not None and len(keys):
            reader = self._context.reader()
            plan = reader.plan(self._context.task, self.state, (RangeRequest(keys, span),))
            with reader.load(plan) as loaded:
                batches = [batch.select(_KEYED.names) for batch in loaded.batches()]
        if not batches:
            return _no_rows(_KEYED)
        return batches[0] if len(batches) == 1 else pa.concat_batches(batches)

    def _scan(
        self,
        span: Time | None,
        key_from: bytes | None = None,
        key_to: bytes | None = None,
        *,
        forward: bool = True,
    ) -> StoreIterator[pa.RecordBatch]:
        if key_from is not None and key_to is not None and key_from > key_to:
            warnings.warn(
                f"store {self.name}: the range of keys from {key_from.hex()} to {key_to.hex()} is empty, because keys"
                " are compared as unsigned bytes; numbers below zero come after all others",
                TidegateWarning,
                stacklevel=3,
            )
            span = None
        if span is None:
            return StoreIterator(iter(()))
        return scan_batches(
            self._context, self._values, span, key_from=key_from, key_to=key_to, forward=forward
        )

    def _each(self, batches: StoreIterator[pa.RecordBatch]) -> StoreIterator[tuple[bytes, int, int, Value]]:
        """Yield (key, time, second number, value) of every row, without rows of time segments dropped meanwhile."""

        def rows() -> Iterator[tuple[bytes, int, int, Value]]:
            for batch in batches:
                columns = (batch.column(name).to_pylist() for name in _KEYED.names)
                for key, ts, second, value, value_ts in zip(*columns, strict=True):
                    if not self._is_gone(ts):
                        yield key, ts, second, self._value(value, value_ts)

        return StoreIterator(rows(), batches.close)

    def _is_gone(self, ts: int) -> bool:
        if self.compat is Compat.KAFKA_STREAMS_MEMORY:  # its iterators keep the rows they were opened on
            return False
        return ts < self.segments.dropped_before_ts

    def _value(self, value: bytes, value_ts: int) -> Value:
        return TimestampedValue(value, value_ts) if self.is_timestamped else value

    def _aligned(
        self, keys: pa.Array, times: Int64s, wanted: pa.Array, key_format: KeyFormat
    ) -> pa.RecordBatch:
        """Return value and value_ts for each windowed key in `wanted`, in its order; null where there is no such
        row."""
        pieces = [_no_rows(_KEYED)]
        distinct = np.unique(times)
        if len(distinct) > MANY_TIMES:
            span = self._span(int(distinct[0]), int(distinct[-1]))
            pieces.append(self._keys_rows(pc.unique(keys), span))
            distinct = distinct[:0]
        for time in distinct.tolist():
            here = keys if len(distinct) == 1 else keys.filter(pa.array(times == time))
            pieces.append(self._keys_rows(pc.unique(here), self._span(time, time)))
        found = pa.concat_batches(pieces)
        ts, seq = found.column("ts").to_numpy(), found.column("seq").to_numpy()
        is_session = key_format is KeyFormat.SESSION
        there = encode_keys(
            found.column("key"), seq if is_session else ts, key_format, end=ts if is_session else None
        )
        return found.select(PAYLOAD.names).take(pc.index_in(wanted, value_set=there))


def values_state(state: StoreState) -> WindowsState:
    """Return the state of a store of byte values; `InvalidError` for one of other columns."""
    if not isinstance(state, WindowsState):
        raise InvalidError(
            f"store {state.index.spec.name} holds the columns {state.index.spec.payload.names}, no byte values: use"
            " put_batch, fetch_batch and scan"
        )
    return state


def value_rows(
    keys: pa.Array,
    times: Int64s,
    seconds: Int64s | None,
    values: pa.Array,
    value_ts: Int64s,
    kept: Flags | None = None,
) -> pa.RecordBatch:
    """Return rows in the store's columns; `kept` selects some."""
    columns = {"key": keys, "ts": pa.array(times)}
    if seconds is not None:
        columns["seq"] = pa.array(seconds)
    if values.null_count:
        columns["deleted"] = values.is_null()
    columns |= {"value": values, "value_ts": pa.array(value_ts)}
    rows = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    return rows if kept is None or kept.all() else rows.filter(pa.array(kept))


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], each.type) for each in schema], schema=schema)


def _compat(given: Compat | str) -> Compat:
    try:
        return Compat(given)
    except ValueError:
        known = ", ".join(each.value for each in Compat)
        raise InvalidError(f"compat is {given!r}; it is one of {known}") from None


def _retention(name: str, retention: int | DurationLike) -> int:
    if isinstance(retention, int) and retention < 0:
        raise InvalidError(f"store {name}: a retention of {retention} ms is not possible; give 0 or more")
    return milliseconds(retention)
