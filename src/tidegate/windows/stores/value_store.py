"""The interface of Kafka Streams' stores: byte values with a timestamp, a row at a time or in columns.

A row is (key, time, second number) → value, value's timestamp: for windows (start, sequence), for sessions (end,
start), for plain keys (0, 0). The clock is the store's own, the largest time it was given; a null value deletes. A put
that is dropped as expired is counted, and written to the changelog all the same, as in Kafka Streams.

Iterators show the store as of their opening, without time segments that were dropped since. They may pin storage
until they are closed or read to their end.

Thread rule: the task's thread; an iterator is used by one thread at a time.
"""

from __future__ import annotations

import logging
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from types import TracebackType
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypedDict, TypeVar, Unpack

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.durations import DurationLike, milliseconds
from tidegate.errors import InvalidError, TidegateWarning
from tidegate.metrics import Metrics
from tidegate.storage import Cursor, LoadedRanges, Merge, RangeRequest, RuntimeContext, StoreSpec, Time
from tidegate.windows.keys import DecodedKeys
from tidegate.windows.stores.segmented_store import (
    Position,
    PutResult,
    SegmentedStore,
    StoreState,
    WindowsState,
    keys_between,
)
from tidegate.windows.stores.segments import (
    LATEST,
    Compat,
    Expiry,
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


class TimestampedValue(NamedTuple):
    """A value and the timestamp of its record."""

    value: bytes
    timestamp: int


Value: TypeAlias = "bytes | TimestampedValue"
StoredRow: TypeAlias = "tuple[bytes, int, int, Value]"
"""Key, time, second number and value."""


class At(TypedDict, total=False):
    """Where a put's record lies; kept in the store's `position`."""

    offset: int
    partition: int
    topic: str


class AtEach(TypedDict, total=False):
    """Where the records of many puts lie."""

    offsets: NumberColumn | None
    partitions: NumberColumn
    topic: str


def each_at(at: At) -> AtEach:
    """Return one record's place as the column forms take it."""
    return {
        "offsets": at.get("offset"),
        "partitions": at.get("partition", 0),
        "topic": at.get("topic", ""),
    }


class Puts(NamedTuple):
    """Rows to put: keys, times, second numbers (None: all 0), values (null: deleted) and their timestamps."""

    keys: pa.BinaryArray
    times: Int64s
    seconds: Int64s | None
    values: pa.BinaryArray
    stamps: Int64s

    def take(self, rows: Int64s) -> Puts:
        """Return some of the rows, by position."""
        chosen, seconds = pa.array(rows), None if self.seconds is None else self.seconds[rows]
        keys, values = self.keys.take(chosen), self.values.take(chosen)
        return Puts(keys, self.times[rows], seconds, values, self.stamps[rows])

    def to_batch(self) -> pa.RecordBatch:
        """Return the rows in the store's columns."""
        columns = {"key": self.keys, "ts": pa.array(self.times)}
        if self.seconds is not None:
            columns["seq"] = pa.array(self.seconds)
        if self.values.null_count:
            columns["deleted"] = self.values.is_null()
        values = {"value": self.values, "value_ts": pa.array(self.stamps)}
        return pa.RecordBatch.from_pydict({**columns, **values})


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


def _value_column(values: ValueColumn, rows: int) -> pa.BinaryArray:
    """Return the values as one binary column; null deletes."""
    column = _binary("values", values)
    if len(column) != rows:
        raise InvalidError(f"{len(column)} values for {rows} keys")
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
MANY_TIMES = 64  # windows looked up together; beyond it one scan of all of them is cheaper


class ValueStore(SegmentedStore):
    """The base class; use `WindowStore`, `SessionStore` or `KeyValueStore`.

    A subclass says how a row's identity is encoded (`_identity`) and which columns it is shown with (`_columns`).
    """

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
        if isinstance(store, str):
            retention = 0 if retention is None else retention
            interval_ms = default_interval_ms(_retention(store, retention))
            if segment_interval is not None:
                interval_ms = milliseconds(segment_interval)
            Expiry(0, interval_ms)  # refuses an impossible interval before the spec does
            spec = StoreSpec(
                store, Merge.LAST, PAYLOAD, bucket_ms=default_bucket_ms(interval_ms), segment_ms=interval_ms
            )
            store = WindowsState(spec, forgets_clocks=self.compat.forgets_clocks)
        expiry, spec = None, store.index.spec
        if retention is not None:
            expiry = Expiry(_retention(spec.name, retention), spec.segment_ms, self.compat)
        super().__init__(context, store, expiry)

    @abstractmethod
    def _identity(self, keys: pa.BinaryArray, times: Int64s, seconds: Int64s | None) -> pa.BinaryArray:
        """Return each row's key and window as bytes."""

    @abstractmethod
    def _columns(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return stored rows with the columns that users see."""

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
        """The state of a store of byte values; `InvalidError` for one of other columns."""
        if not isinstance(self.state, WindowsState):
            raise InvalidError(
                f"store {self.name} holds the columns {self.index.spec.payload.names}, no byte values: use put_batch,"
                " fetch_batch and scan"
            )
        return self.state

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────

    def _put_all(
        self,
        keys: pa.BinaryArray,
        times: Int64s,
        seconds: Int64s | None,
        values: ValueColumn,
        value_ts: NumberColumn | None,
        at: AtEach,
    ) -> PutResult:
        """Put rows in their order, log them, and advance the position; values' timestamps default to the times."""
        stamps = times if value_ts is None else number_column("value_ts", value_ts, len(keys))
        puts = Puts(keys, times, seconds, _value_column(values, len(keys)), stamps)
        result = self._write(puts)
        self._log(puts)
        self._see(len(keys), **at)
        return result

    def _write(self, puts: Puts, *, restores: bool = False) -> PutResult:
        """Put rows in order, each judged by the store's time with it; where it restores, by that of the last row, and
        without counting expired ones."""
        if not len(puts.times):
            return PutResult(None, 0)
        state = self._values
        if self._expiry is None:
            return self.put_batch(puts.to_batch(), stream_time=0)
        if restores:
            stream_time: int | Int64s = max(state.observed_time, int(puts.times.max()))
        else:
            stream_time = self._expiry.own_time(puts.times, state.observed_time)
        result = self.put_batch(puts.to_batch(), stream_time=stream_time)
        state.observed_time = stream_time if isinstance(stream_time, int) else int(stream_time[-1])
        if result.dropped and not restores:
            self._count_dropped(result.dropped)
        return result

    def _log(self, puts: Puts) -> None:
        if self._changelog is not None and len(puts.times):
            self._changelog(self._identity(puts.keys, puts.times, puts.seconds), puts.values, puts.stamps)

    def _restore_records(
        self,
        decoded: DecodedKeys,
        times: Int64s,
        seconds: Int64s | None,
        values: ValueColumn,
        timestamps: NumberColumn,
        at: AtEach,
    ) -> None:
        """Restore records of a changelog; those without a key are skipped."""
        rows, offsets = len(times), at.get("offsets")
        seen = None if offsets is None else number_column("offsets", offsets, rows)
        keys = decoded.require_good(offsets=seen, topic=at.get("topic") or None).inner
        column, stamps = _value_column(values, rows), number_column("timestamps", timestamps, rows)
        puts = Puts(keys, times, seconds, column, stamps)
        self._write(puts.take(np.flatnonzero(decoded.good)) if keys.null_count else puts, restores=True)
        self._see(rows, **at)

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

    def _see(self, rows: int, **at: Unpack[AtEach]) -> None:
        offsets, partitions = at.get("offsets"), at.get("partitions", 0)
        if offsets is not None:
            where = (
                partitions if isinstance(partitions, int) else number_column("partitions", partitions, rows)
            )
            self.position.advance_batch(at.get("topic", ""), where, number_column("offsets", offsets, rows))

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    def batches(
        self,
        first: int = 0,
        last: int = LATEST,
        *,
        key_from: bytes | None = None,
        key_to: bytes | None = None,
    ) -> StoreIterator[pa.RecordBatch]:
        """Yield all rows with times (of sessions: ends) in a range, of all keys or those in a range, as batches."""
        scan = self._scan(self._span(first, last), key_from, key_to)
        return StoreIterator((self._columns(batch) for batch in scan), scan.close)

    def _span(self, first: int, last: int) -> Time | None:
        """Return the part of first … last (both included) that may be read; None if there is none."""
        first, last = max(first, self.first_readable_ts), min(last, LATEST)
        return Time(first, last) if first <= last else None

    def _load(self, keys: pa.BinaryArray | bytes, span: Time) -> LoadedRanges:
        reader = self._context.reader()
        return reader.load(reader.plan(self._context.task, self.state, (RangeRequest(keys, span),)))

    def _one(self, key: bytes, time: int, second: int | None = None) -> Value | None:
        """Return the value of one row; without a second number, there is at most one of this key and time."""
        span = self._span(time, time)
        if span is None:
            return None
        with self._load(key, span) as loaded:
            view = loaded.view()
            at = (0 if len(view) else None) if second is None else view.seek_eq(Cursor(time, second))
            if at is None:
                return None
            value, stamp = view.slice(at, at + 1, ("value", "value_ts")).columns
            return self._value(value[0].as_py(), stamp[0].as_py())

    def _rows_of_key(
        self, key: bytes, span: Time | None, *, forward: bool = True
    ) -> StoreIterator[StoredRow]:
        """Return one key's rows in the order of time, or in reverse; nothing is pinned afterwards."""
        batches = []
        one_key(key)
        if span is not None:
            with self._load(key, span) as loaded:
                batch = loaded.view().to_batch()
            batches = [batch if forward else _reverse(batch)]
        return self._rows(StoreIterator(iter(batches)), key)

    def _rows_of_keys(self, keys: pa.BinaryArray, span: Time | None) -> pa.RecordBatch:
        """Return columns key, ts, seq, value, value_ts of these keys, in the given order."""
        batches = []
        if span is not None and len(keys):
            with self._load(keys, span) as loaded:
                batches = [batch.select(_KEYED.names) for batch in loaded.batches()]
        return pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], _KEYED)

    def _scan(
        self, span: Time | None, key_from: bytes | None, key_to: bytes | None, *, forward: bool = True
    ) -> StoreIterator[pa.RecordBatch]:
        """Yield columns key, ts, seq, value, value_ts of the keys in a range; captured now, read on demand.

        Every key's rows come in the order of time, or in reverse.
        """
        if key_from is not None and key_to is not None and key_from > key_to:
            warnings.warn(
                f"store {self.name}: the range of keys from {key_from.hex()} to {key_to.hex()} is empty, because keys"
                " are compared as unsigned bytes; numbers below zero come after all others",
                TidegateWarning,
                stacklevel=4,
            )
            span = None
        if span is None:
            return StoreIterator(iter(()))
        width, scans = self._values.index.spec.bucket_ms, []
        parts = [span]
        if not forward:
            starts = reversed(self.bucket_starts(span.start, span.end))
            parts = [Time(max(each, span.start), min(each + width - 1, span.end)) for each in starts]
        try:
            for part in parts:
                scans.append(self.open_scan(part.start, part.end))
        except BaseException:
            for scan in scans:
                scan.close()
            raise

        def batches() -> Iterator[pa.RecordBatch]:
            for scan in scans:
                for batch in scan if forward else reversed([_reverse(each) for each in scan]):
                    kept = keys_between(batch, key_from, key_to)
                    if kept.num_rows:
                        yield kept

        def release() -> None:
            for scan in scans:
                scan.close()

        return StoreIterator(batches(), release)

    def _rows(
        self, batches: StoreIterator[pa.RecordBatch], key: bytes | None = None
    ) -> StoreIterator[StoredRow]:
        """Yield every row, without those of time segments dropped meanwhile; with `key`, all are of this key."""

        def rows() -> Iterator[StoredRow]:
            for batch in batches:
                columns = (batch.column(name).to_pylist() for name in _KEYED.names[1:])
                keys = batch.column("key").to_pylist() if key is None else repeat(key, batch.num_rows)
                for owner, ts, second, value, stamp in zip(keys, *columns, strict=True):
                    if not self._is_gone(ts):
                        yield owner, ts, second, self._value(value, stamp)

        return StoreIterator(rows(), batches.close)

    def _is_gone(self, ts: int) -> bool:
        if self._segments is None or self.compat is Compat.KAFKA_STREAMS_MEMORY:
            return False  # the latter's iterators keep the rows they were opened on
        return ts < self._segments.dropped_before_ts

    def _value(self, value: bytes, value_ts: int) -> Value:
        return TimestampedValue(value, value_ts) if self.is_timestamped else value

    def _aligned(self, keys: pa.BinaryArray, times: Int64s, seconds: Int64s | None = None) -> pa.RecordBatch:
        """Return value and value_ts of each of these rows, in their order; null where there is no such row."""
        pieces, distinct = [pa.RecordBatch.from_pylist([], _KEYED)], np.unique(times)
        if len(distinct) > MANY_TIMES:
            span = self._span(int(distinct[0]), int(distinct[-1]))
            pieces.append(self._rows_of_keys(pc.unique(keys), span))
            distinct = distinct[:0]
        for time in distinct.tolist():
            here = keys if len(distinct) == 1 else keys.filter(pa.array(times == time))
            pieces.append(self._rows_of_keys(pc.unique(here), self._span(time, time)))
        found = pa.concat_batches(pieces)
        there = self._identity(found["key"], found["ts"].to_numpy(), found["seq"].to_numpy())
        wanted = self._identity(keys, times, seconds)
        return found.select(PAYLOAD.names).take(pc.index_in(wanted, value_set=there))


def _reverse(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.take(pa.array(np.arange(batch.num_rows - 1, -1, -1)))


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
