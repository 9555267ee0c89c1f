"""The columnar store: rows of a `StoreSpec` by key and time, kept for a retention of stream time.

    put_batch     judge ──► append ──► insert ──► clean up        rows of expired time segments are not written
    advance, open clean up                                        `open` also after every restore
    fetch_batch   plan, load ──► rows                             cleans up nothing

`ts` of a row is the window's start (a session's end), `seq` the second half of its identity. The caller provides the
time: operators the least stream time of their inputs, tables the largest time they have seen. A refused put
(`OverloadError`) has changed nothing, and can be repeated. Storage takes rows and progress of one moment.

Thread rule: the task's thread writes; any thread reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import CorruptError, InvalidError
from tidegate.storage import (
    BATCH_ROWS,
    AppendBatch,
    BucketIndex,
    MergedRows,
    RangeRequest,
    RangeScan,
    RuntimeContext,
    SortedRows,
    StoreSpec,
    Time,
    TouchedRows,
    touched_rows,
)
from tidegate.storage.runs.columns import UInt64s, words
from tidegate.windows.stores.segments import LATEST, NOTHING_OBSERVED, Expiry, Flags, Int64s, TimeSegments

# --- positions

Offsets = Mapping[str, Mapping[int, int]]


class Position:
    """Topic → partition → largest offset seen."""

    __slots__ = ("_seen",)

    def __init__(self, seen: Offsets | None = None) -> None:
        self._seen: dict[str, dict[int, int]] = {}
        for topic, partitions in (seen or {}).items():
            for partition, offset in partitions.items():
                self.advance(topic, partition, offset)

    def advance(self, topic: str, partition: int, offset: int) -> None:
        """Record this offset; an older one changes nothing."""
        partitions = self._seen.setdefault(topic, {})
        if offset > partitions.get(partition, -1):
            partitions[partition] = offset

    def advance_batch(
        self, topic: str, partitions: int | npt.NDArray[np.integer], offsets: npt.NDArray[np.int64]
    ) -> None:
        """Record these offsets; `partitions` is one for all, or one for each."""
        if not len(offsets):
            return
        if isinstance(partitions, int):
            self.advance(topic, partitions, int(offsets.max()))
            return
        if len(partitions) != len(offsets):
            raise InvalidError(f"{len(partitions)} partitions for {len(offsets)} offsets")
        for partition in np.unique(partitions).tolist():
            self.advance(topic, partition, int(offsets[partitions == partition].max()))

    def offset(self, topic: str, partition: int) -> int:
        """Return the largest offset recorded; -1 if none was."""
        return self._seen.get(topic, {}).get(partition, -1)

    def covers(self, wanted: Position) -> bool:
        """Whether all the requested offsets are recorded."""
        return all(
            self.offset(topic, partition) >= offset
            for topic, partitions in wanted._seen.items()
            for partition, offset in partitions.items()
        )

    def to_dict(self) -> dict[str, dict[int, int]]:
        return {topic: dict(partitions) for topic, partitions in self._seen.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Position) and self._seen == other._seen

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Position({self._seen})"


# --- state

VERSION = 1


class _Extra(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    observed_time: int
    sequence: int
    logged_sequence: int
    dropped_records: int
    position: dict[str, dict[int, int]]


class StoreState(ABC):
    """A store's index, and its progress in the checkpoint; the store opens again after every restore."""

    def __init__(self, spec: StoreSpec) -> None:
        self._index = BucketIndex(spec)
        self._on_restored: Callable[[], None] | None = None

    @property
    def index(self) -> BucketIndex:
        return self._index

    @property
    @abstractmethod
    def stream_time(self) -> int:
        """The stream time of its rows; -1 before the first. A checkpoint restores it, too."""

    @abstractmethod
    def encode_progress(self) -> bytes:
        """Return the progress for the checkpoint."""

    @abstractmethod
    def restore_progress(self, data: bytes) -> None:
        """Restore what `encode_progress` returned, then call `restored`."""

    def when_restored(self, call: Callable[[], None]) -> None:
        """Set the store's callback for after every restore."""
        self._on_restored = call

    def restored(self) -> None:
        """Call the store."""
        if self._on_restored is not None:
            self._on_restored()


class RowsState(StoreState):
    """A state without progress; its stream time is another state's."""

    def __init__(self, spec: StoreSpec, clock: Callable[[], int] = lambda: NOTHING_OBSERVED) -> None:
        super().__init__(spec)
        self._clock = clock

    @property
    def stream_time(self) -> int:
        return self._clock()

    def encode_progress(self) -> bytes:
        return b""

    def restore_progress(self, data: bytes) -> None:
        self.restored()


class WindowsState(StoreState):
    """The state of a store that has its own clock: the largest time it was given."""

    def __init__(self, spec: StoreSpec, *, forgets_clocks: bool = False) -> None:
        super().__init__(spec)
        self._forgets_clocks = forgets_clocks
        self._reset()

    def _reset(self) -> None:
        self.observed_time = NOTHING_OBSERVED
        self.sequence = 0
        self.logged_sequence = 0
        self.dropped_records = 0
        self.position = Position()

    @property
    def stream_time(self) -> int:
        return self.observed_time

    def encode_progress(self) -> bytes:
        return msgspec.msgpack.encode(
            _Extra(
                VERSION,
                self.observed_time,
                self.sequence,
                self.logged_sequence,
                self.dropped_records,
                self.position.to_dict(),
            )
        )

    def restore_progress(self, data: bytes) -> None:
        self._reset()
        if data:
            extra = self._decode(data)
            self.dropped_records = extra.dropped_records
            self.position = Position(extra.position)
            if not self._forgets_clocks:
                self.observed_time = extra.observed_time
                self.sequence, self.logged_sequence = extra.sequence, extra.logged_sequence
        self.restored()

    def _decode(self, data: bytes) -> _Extra:
        name = self._index.spec.name
        try:
            extra = msgspec.msgpack.decode(data, type=_Extra)
        except msgspec.DecodeError as error:
            raise CorruptError(
                f"the checkpoint's clock and counters of store {name} cannot be read ({error}); go back to an older"
                " checkpoint",
                kafka_name=None,
            ) from None
        if extra.version != VERSION:
            raise CorruptError(
                f"the checkpoint's clock and counters of store {name} have version {extra.version}, this program"
                f" reads {VERSION}: use the program that wrote them, or a newer one",
                kafka_name=None,
            )
        return extra


# --- the store

Returning: TypeAlias = Literal["merged", "touched"]


class PutResult(NamedTuple):
    """Which rows of a put were accepted (None: all), and how many were dropped as expired."""

    accepts: Flags | None
    rows: int
    dropped: int = 0
    merged: MergedRows | None = None  # with returning="merged": the rows as they are now
    touched: Sequence[TouchedRows] = ()  # with returning="touched": which rows were written

    @property
    def accepted(self) -> Flags:
        return np.ones(self.rows, np.bool_) if self.accepts is None else self.accepts


class Fetched(NamedTuple):
    """Rows of the requested keys: the number of each one's key, and columns ts, seq, payload."""

    numbers: Int64s
    rows: pa.RecordBatch


class PreparedPut:
    """Rows that count towards the limits and are not visible yet: call `commit` or `undo`, once."""

    __slots__ = ("_parts", "_store", "_stream_time", "result")

    def __init__(
        self, store: SegmentedStore, parts: Sequence[AppendBatch], stream_time: int, result: PutResult
    ) -> None:
        self._store, self._parts, self._stream_time = store, parts, stream_time
        self.result = result

    def commit(self) -> PutResult:
        """Make the rows visible, then drop expired time segments."""
        self._store._insert(self._parts, self._stream_time)
        return self.result

    def undo(self) -> None:
        """Drop the rows, as if they had never been put."""
        self._store._undo(self._parts)


class SegmentedStore:
    """Rows in time segments. Use it as `WindowStore`, `SessionStore` or `KeyValueStore`."""

    _reads_laxly = False  # whether the time-ordered layout's extra millisecond applies

    def __init__(self, context: RuntimeContext, state: StoreState, expiry: Expiry | None) -> None:
        """Attach the state to the task and open the store. Without `expiry` no row expires."""
        self.state = state
        self._context = context
        self._expiry = expiry
        self._segments = None if expiry is None else TimeSegments(context, state, expiry)
        self._is_open = False
        state.when_restored(self._open)
        context.attach(state)
        if not self._is_open:
            self._open()

    def _open(self) -> None:
        """Find the existing time segments; called after every restore, with the checkpoint's stream time."""
        self._is_open = True
        if self._segments is not None:
            self._segments.open_existing(self.state.stream_time)

    @property
    def name(self) -> str:
        return self.state.index.spec.name

    @property
    def index(self) -> BucketIndex:
        return self.state.index

    @property
    def segments(self) -> TimeSegments:
        if self._segments is None:
            raise TypeError(f"store {self.name} keeps everything: it has no time segments")
        return self._segments

    @property
    def first_readable_ts(self) -> int:
        """The earliest time that is not expired for readers, at the state's stream time."""
        if self._expiry is None:
            return 0
        return self._expiry.first_readable_ts(self.state.stream_time, lax=self._reads_laxly)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────

    def put_batch(
        self,
        rows: pa.RecordBatch | SortedRows,
        *,
        stream_time: int | Int64s,
        returning: Returning | None = None,
    ) -> PutResult:
        """Write rows that are not expired at `stream_time`, one for all or one for each (ascending).

        Columns: `key`, `ts`, and by merge kind `seq`, `deleted`, payload or inputs. `SortedRows` have the hashes of
        their keys and their order with them. Rows that are accepted and expired by the end of the batch are not
        written. The last stream time is the one that the clean-up uses.

        `returning` is for fold stores: the result then has the rows written, "merged" with what was there before.
        """
        return self.prepare(rows, stream_time=stream_time, returning=returning).commit()

    def prepare(
        self,
        rows: pa.RecordBatch | SortedRows,
        *,
        stream_time: int | Int64s,
        returning: Returning | None = None,
    ) -> PreparedPut:
        """Do `put_batch` up to the point where rows become visible, for callers that put into several stores or
        none."""
        rows, last, result = self._judge(rows, stream_time)
        writer, task = self._context.writer(), self._context.task
        if isinstance(rows, SortedRows):
            parts = writer.append_sorted(task, self.state, rows) if len(rows.order) else []
        elif not rows.num_rows:
            parts = []
        elif returning == "merged":
            parts, merged = writer.append_merged(task, self.state, rows)
            result = result._replace(merged=merged)
        else:
            parts = writer.append(task, self.state, rows)
            if returning == "touched":
                result = result._replace(touched=touched_rows(parts))
        return PreparedPut(self, parts, last, result)

    def advance(self, stream_time: int) -> bool:
        """Advance time without a row; return whether that dropped anything."""
        return self._segments is not None and bool(self._segments.advance(stream_time))

    def _judge(
        self, rows: pa.RecordBatch | SortedRows, stream_time: int | Int64s
    ) -> tuple[pa.RecordBatch | SortedRows, int, PutResult]:
        """Return the rows to write, the stream time after them, and which were accepted."""
        is_sorted = isinstance(rows, SortedRows)
        count = len(rows.order) if isinstance(rows, SortedRows) else rows.num_rows
        if isinstance(stream_time, int):
            last = stream_time
        else:
            last = int(stream_time[-1]) if len(stream_time) else self.state.stream_time
        if self._expiry is None or not count:
            return rows, last, PutResult(None, count)
        times = words((rows.columns if isinstance(rows, SortedRows) else rows).column("ts"))
        if is_sorted and int(times.min()) < self._expiry.first_live_ts(last):
            times = times[rows.order]
        elif is_sorted:
            return rows, last, PutResult(None, count)
        accepts = self._expiry.judge(times, stream_time)
        if accepts is None:
            return rows, last, PutResult(None, count)
        written = accepts & (times >= self._expiry.first_live_ts(last))
        result = PutResult(accepts, count, count - int(np.count_nonzero(accepts)))
        if isinstance(rows, SortedRows):
            return rows._replace(lines=rows.lines[written], order=rows.order[written]), last, result
        return rows if written.all() else rows.filter(pa.array(written)), last, result

    def _insert(self, parts: Sequence[AppendBatch], stream_time: int) -> None:
        try:
            self.index.insert(parts)
        except BaseException:
            self._undo(parts)
            raise
        if self._segments is None:
            return
        if parts:
            self._segments.enter_segments((part.bucket for part in parts), stream_time)
        else:
            self._segments.advance(stream_time)

    def _undo(self, parts: Sequence[AppendBatch]) -> None:
        self._context.writer().undo(self._context.task, parts)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    def fetch_batch(
        self, keys: pa.BinaryArray, first: int, last: int = LATEST, *, hashes: UInt64s | None = None
    ) -> Fetched:
        """Return the rows of these different keys with times from `first` to `last`, in the order of `keys`, then by
        time.

        With `hashes` the keys ascend by them, and are joined in one pass: for very many keys, most of which have no
        rows. The caller chooses bounds that exclude expired rows.
        """
        reader, task, state = self._context.reader(), self._context.task, self.state
        if first > last or not len(keys) or not self.index.buckets(first, last):
            return Fetched(np.empty(0, np.int64), self._no_rows)
        bounds = Time(first, last)
        if hashes is not None:
            return Fetched(*reader.join(task, state, keys, hashes, bounds))
        wanted = keys[0].as_py() if len(keys) == 1 else keys  # a single key needs no table of runs
        with reader.load(reader.plan(task, state, [RangeRequest(wanted, bounds)])) as loaded:
            if len(keys) == 1:
                view = loaded.view()
                rows = view.to_batch().select(self._names) if len(view) else self._no_rows
                return Fetched(np.zeros(rows.num_rows, np.int64), rows)
            table = loaded.to_table(["key", *self._names])
            columns = [column.combine_chunks() for column in table.columns]
        numbers = pc.index_in(columns[0], keys).to_numpy().astype(np.int64)
        return Fetched(numbers, pa.RecordBatch.from_arrays(columns[1:], names=self._names))

    def scan(self, first: int, last: int = LATEST) -> Iterator[pa.RecordBatch]:
        """Yield every key's rows with times from `first` to `last`, by bucket: key, ts, seq, payload."""
        with self.open_scan(first, last) as scan:
            yield from scan

    def open_scan(
        self,
        first: int,
        last: int = LATEST,
        *,
        batch_rows: int = BATCH_ROWS,
        columns: Sequence[str] | None = None,
    ) -> RangeScan:
        """Capture the rows that `scan` yields, now; close the result. With `columns`, only they are built."""
        bounds = Time(first, last)
        return self._context.reader().scan(
            self._context.task, self.state, bounds, batch_rows=batch_rows, columns=columns
        )

    def bucket_starts(self, first: int, last: int = LATEST) -> list[int]:
        """Return the starts of the buckets that may hold rows from `first` to `last`, ascending."""
        return [bucket.start for bucket in self.index.buckets(first, last)]

    @property
    def _names(self) -> list[str]:
        return ["ts", "seq", *self.index.spec.payload.names]

    @cached_property
    def _no_rows(self) -> pa.RecordBatch:
        types = [pa.int64(), pa.int64(), *(each.type for each in self.index.spec.payload)]
        return pa.RecordBatch.from_arrays([pa.array([], each) for each in types], names=self._names)


def keys_between(batch: pa.RecordBatch, low: bytes | None, high: bytes | None) -> pa.RecordBatch:
    """Return the rows of keys from `low` to `high`, both included; None: an open end."""
    if low is not None:
        batch = batch.filter(pc.greater_equal(batch.column("key"), pa.scalar(low, pa.binary())))
    if high is not None:
        batch = batch.filter(pc.less_equal(batch.column("key"), pa.scalar(high, pa.binary())))
    return batch
