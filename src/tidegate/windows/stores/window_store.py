"""A window store: rows of keys in time windows, kept for a retention of stream time, on the worker's storage.

Operators and tables put and fetch batches of any columns (`segmented_store`). A store of byte values also has the
calls of Kafka Streams' window store, with the same meaning, each with a form for columns. The `start` of a put is
the window's start. Ranges of starts include both ends; ranges of keys are compared as unsigned bytes, and None
leaves an end open. Rows come in the order of time for each key; the order of keys is not defined.

A store that retains duplicates numbers its puts, so that none replaces another; there a null value does nothing.
Bytes of the changelog: `keys`, changelog format, a numbering of its own when duplicates are retained. Every put
becomes a run of its own in storage, so put many rows at once. Thread rule: the task's thread.
"""

from __future__ import annotations

from typing import Unpack, overload

import numpy as np
import pyarrow as pa

from tidegate.durations import DurationLike, milliseconds
from tidegate.errors import InvalidError
from tidegate.metrics import Metrics
from tidegate.storage import RuntimeContext
from tidegate.windows.keys import (
    LENIENT,
    STRICT,
    KeyFormat,
    TimeWindow,
    Windowed,
    decode_keys,
    encode_keys,
    window_end,
)
from tidegate.windows.stores.segmented_store import PutResult, StoreState
from tidegate.windows.stores.segments import LATEST, Compat, Int64s
from tidegate.windows.stores.value_store import (
    PAYLOAD,
    At,
    AtEach,
    Changelog,
    KeyColumn,
    NumberColumn,
    Puts,
    StoredRow,
    StoreIterator,
    Value,
    ValueColumn,
    ValueStore,
    each_at,
    key_column,
    one_key,
    times_column,
)

LARGEST_SEQUENCE = 0x7FFFFFFF
ROWS = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("window_start", pa.int64(), nullable=False),
        pa.field("window_end", pa.int64(), nullable=False),
        pa.field("sequence", pa.int32(), nullable=False),
        *PAYLOAD,
    ]
)

KeyedRow = tuple[Windowed[bytes], Value]


class WindowStore(ValueStore):
    """Values by key and window start."""

    _reads_laxly = True

    def __init__(
        self,
        context: RuntimeContext,
        store: str | StoreState,
        *,
        retention: int | DurationLike | None,
        window_size: int | DurationLike = 1,
        segment_interval: int | DurationLike | None = None,
        retain_duplicates: bool = False,
        timestamped: bool = False,
        compat: Compat | str = Compat.TIDEGATE,
        changelog: Changelog | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """Open the store; `store` and `retention` are those of `ValueStore`. Byte values need the size of windows."""
        self.window_size_ms = milliseconds(window_size)
        self.retains_duplicates = retain_duplicates
        if isinstance(store, str) and not 0 < self.window_size_ms <= milliseconds(retention or 0):
            raise InvalidError(
                f"store {store}: windows of {self.window_size_ms} ms with a retention of "
                f"{milliseconds(retention or 0)} ms; a"
                " window is longer than 0 ms and kept at least as long as it is"
            )
        super().__init__(
            context,
            store,
            retention=retention,
            segment_interval=segment_interval,
            timestamped=timestamped,
            compat=compat,
            changelog=changelog,
            metrics=metrics,
        )

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────

    def put(
        self,
        key: bytes,
        value: bytes | None,
        start: int,
        *,
        value_ts: int | None = None,
        **at: Unpack[At],
    ) -> bool:
        """Set the value of a key in the window that starts there; None deletes. Returns False if it is expired, and
        dropped.

        `value_ts` is the timestamp of the record (default: the start).
        """
        result = self.put_all([one_key(key)], [start], [value], value_ts=value_ts, **each_at(at))
        return bool(result.accepted[0])

    def put_all(
        self,
        keys: KeyColumn,
        starts: NumberColumn,
        values: ValueColumn,
        *,
        value_ts: NumberColumn | None = None,
        **at: Unpack[AtEach],
    ) -> PutResult:
        """Put rows in their order, as if one by one."""
        inner = key_column(keys)
        return self._put_all(inner, times_column("starts", starts, len(inner)), None, values, value_ts, at)

    def _write(self, puts: Puts, *, restores: bool = False) -> PutResult:
        if restores or not self.retains_duplicates:
            return super()._write(puts, restores=restores)
        # deleting does nothing here: it changes neither the clock nor the counter
        real = np.flatnonzero(puts.values.is_valid().to_numpy(zero_copy_only=False))
        numbers = _numbers(self._values.sequence, len(real))
        result = super()._write(puts.take(real)._replace(seconds=numbers))
        if len(numbers):
            self._values.sequence = int(numbers[-1])
        accepted = np.ones(len(puts.times), np.bool_)
        accepted[real] = result.accepted
        return PutResult(accepted, len(accepted), result.dropped)

    def _log(self, puts: Puts) -> None:
        if self._changelog is None or not len(puts.times):
            return
        numbers = None
        if self.retains_duplicates:
            numbered = _numbers(self._values.logged_sequence, len(puts.times))
            self._values.logged_sequence = int(numbered[-1])
            numbers = numbered.astype(np.int32)
        keys = encode_keys(puts.keys, puts.times, KeyFormat.CHANGELOG, sequence=numbers)
        self._changelog(keys, puts.values, puts.stamps)

    def restore_batch(
        self, keys: pa.Array, values: ValueColumn, timestamps: NumberColumn, **at: Unpack[AtEach]
    ) -> None:
        """Restore records of this store's changelog. Windows that are expired by its end are left out and not
        counted."""
        decoded = decode_keys(
            keys,
            KeyFormat.CHANGELOG,
            size_ms=self.window_size_ms,
            checks=LENIENT if self.retains_duplicates else STRICT,
        )
        numbers = decoded.sequence.astype(np.int64) if self.retains_duplicates else None
        self._restore_records(decoded, decoded.start, numbers, values, timestamps, at)
        if numbers is not None and decoded.good.any() and not self.compat.forgets_clocks:
            largest = int(numbers[decoded.good].max())  # no later put may replace a restored row
            self._values.sequence = max(self._values.sequence, largest)
            self._values.logged_sequence = max(self._values.logged_sequence, largest)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    @overload
    def fetch(self, key: bytes, first: int) -> Value | None: ...

    @overload
    def fetch(self, key: bytes, first: int, last: int) -> StoreIterator[tuple[int, Value]]: ...

    def fetch(
        self, key: bytes, first: int, last: int | None = None
    ) -> Value | StoreIterator[tuple[int, Value]] | None:
        """Return the value in the window that starts at `first`; with `last`, (start, value) of all that start in
        the range."""
        if last is not None:
            return _starts(self._rows_of_key(key, self._span(first, last)))
        self._refuse_duplicates()
        return self._one(one_key(key), first)

    def backward_fetch(self, key: bytes, first: int, last: int) -> StoreIterator[tuple[int, Value]]:
        """Do `fetch` of a range, latest first."""
        return _starts(self._rows_of_key(key, self._span(first, last), forward=False))

    def fetch_range(
        self, key_from: bytes | None, key_to: bytes | None, first: int, last: int
    ) -> StoreIterator[KeyedRow]:
        """Yield (windowed key, value) of the keys in a range, in windows that start in a range."""
        return self._windowed(self._rows(self._scan(self._span(first, last), key_from, key_to)))

    def backward_fetch_range(
        self, key_from: bytes | None, key_to: bytes | None, first: int, last: int
    ) -> StoreIterator[KeyedRow]:
        scan = self._scan(self._span(first, last), key_from, key_to, forward=False)
        return self._windowed(self._rows(scan))

    def fetch_all(self, first: int, last: int) -> StoreIterator[KeyedRow]:
        """Yield every key in windows that start in a range."""
        return self.fetch_range(None, None, first, last)

    def backward_fetch_all(self, first: int, last: int) -> StoreIterator[KeyedRow]:
        return self.backward_fetch_range(None, None, first, last)

    def all(self) -> StoreIterator[KeyedRow]:
        """Yield everything that may be read."""
        return self.fetch_all(0, LATEST)

    def backward_all(self) -> StoreIterator[KeyedRow]:
        return self.backward_fetch_all(0, LATEST)

    def fetch_keys(self, keys: KeyColumn, first: int, last: int) -> pa.RecordBatch:
        """Return rows of all these keys in windows that start in a range, in the given order of keys, then by time."""
        return self._columns(self._rows_of_keys(key_column(keys), self._span(first, last)))

    def get_batch(self, keys: KeyColumn, starts: NumberColumn) -> pa.RecordBatch:
        """Return value and value_ts of each key in the window that starts there, null where there is none."""
        self._refuse_duplicates()
        inner = key_column(keys)
        return self._aligned(inner, times_column("starts", starts, len(inner)))

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    def _refuse_duplicates(self) -> None:
        if self.retains_duplicates:
            raise InvalidError(
                f"store {self.name} retains duplicates: one window of a key has many values; fetch(key, start, start)"
                " gives all of them"
            )

    def _windowed(self, rows: StoreIterator[StoredRow]) -> StoreIterator[KeyedRow]:
        size = self.window_size_ms
        windowed = (
            (Windowed(key, TimeWindow(start, window_end(start, size)), sequence), value)
            for key, start, sequence, value in rows
        )
        return StoreIterator(windowed, rows.close)

    def _identity(self, keys: pa.BinaryArray, times: Int64s, seconds: Int64s | None) -> pa.BinaryArray:
        return encode_keys(keys, times, KeyFormat.TOPIC)

    def _columns(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        start = rows.column("ts").to_numpy()
        end = np.where(start > LATEST - self.window_size_ms, LATEST, start + self.window_size_ms)
        sequence = rows.column("seq").cast(pa.int32())
        return pa.RecordBatch.from_arrays(
            [rows.column("key"), rows.column("ts"), pa.array(end), sequence, *rows.columns[3:]], schema=ROWS
        )


def _starts(rows: StoreIterator[StoredRow]) -> StoreIterator[tuple[int, Value]]:
    return StoreIterator(((start, value) for _, start, _, value in rows), rows.close)


def _numbers(last: int, count: int) -> Int64s:
    """Return the next numbers of retained duplicates: from 1 up, and after the largest from 0 again."""
    return (last + 1 + np.arange(count, dtype=np.int64)) & LARGEST_SEQUENCE
