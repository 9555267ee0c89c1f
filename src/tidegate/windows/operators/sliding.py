"""Sliding windows: one for every different set of a key's records that lie within a difference of each other.

    window store   key = the record's key    ts = event time    payload: `first_end`, and states, of this one record

An accepted record creates the window that ends with it, [time − difference, time], and the window that starts right
after it, if that holds a record; none starts before the epoch. A window holds the records inside it that came while
it was open: `first_end` of a record is the earliest end of a window that takes it. A kernel finds the windows that
changed, and since these overlap they are merged with a tree (`merge_tree`).

Kafka Streams forgets a record that arrives when all windows it has at that moment have closed, though windows that are
made later should hold it. Here they do. Thread rule: one operator belongs to its task's thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tidegate.kernels.stream_time import GOOD
from tidegate.kernels.windows import find_windows
from tidegate.storage import Merge, RuntimeContext, StoreSpec
from tidegate.storage.runs.columns import int64_column, window_words, words
from tidegate.windows.events import EventBatch, Int64s
from tidegate.windows.keys import Bytes, Int32s
from tidegate.windows.kinds import LATEST, Sliding
from tidegate.windows.operators.base import WindowRows, no_rows
from tidegate.windows.operators.clock import Stamped
from tidegate.windows.operators.layout import StateLayout
from tidegate.windows.operators.merge_tree import Stretches, merge_stretches, place_by_time
from tidegate.windows.operators.windowed_operator import Taken, WindowedOperator, taken_by_key
from tidegate.windows.operators.windows import in_order
from tidegate.windows.stores.segments import Compat as StoreCompat
from tidegate.windows.stores.window_store import WindowStore

FIRST_END = "first_end"
CHUNK_BUCKETS = 4  # of window ends that are merged at once
_NO_NUMBERS, _NO_NODES = np.empty(0, np.int64), np.empty(0, np.int32)
_NO_FLAGS = np.empty(0, np.uint8)
_INT32 = pa.int32()


class _Records(NamedTuple):
    """Records of some keys: the number of each one's key, time, first end, and its states."""

    codes: Int32s
    ts: Int64s
    first_end: Int64s
    states: list[pa.Array]


class SlidingOperator(WindowedOperator):
    """Aggregates of sliding windows, for every key of one task."""

    _kinds = (Sliding,)
    _kind: Sliding
    _store: WindowStore

    def _set_up(self, kind: Sliding, *, is_compat: bool) -> None:
        self._width = kind.difference_ms

    def _spec(self, name: str, layout: StateLayout) -> StoreSpec:
        states = [each for fold in self._folds.stored for each in fold.state]
        payload = pa.schema([pa.field(FIRST_END, pa.int64(), nullable=False), *states])
        return StoreSpec(
            name, Merge.APPEND, payload=payload, bucket_ms=layout.bucket_ms, segment_ms=layout.segment_ms
        )

    def _open_store(self, context: RuntimeContext, compat: StoreCompat) -> None:
        # Records of kept windows, and the records right before them.
        self._store = WindowStore(
            context, self._state, retention=min(self._kind.retention_ms + 1, LATEST), compat=compat
        )

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, batch: EventBatch, stamped: Stamped) -> Taken:
        good = np.flatnonzero((stamped.verdicts == GOOD) | (stamped.verdicts == self._also))
        events = batch if len(good) == len(batch) else batch.take(good)
        close = stamped.judged[good] - self._kind.grace_ms
        late_by = np.maximum(close - self._width - events.ts, 0)
        if late_by.any():
            taken = np.flatnonzero(late_by == 0)
            events, close = events.take(taken), close[taken]
        if not len(events):
            return taken_by_key(batch, good, late_by)
        count = len(events)
        first_end = np.maximum(np.maximum(events.ts, self._width), close)
        states = self._partial(events, np.arange(count, dtype=np.int32), count)
        encoded = events.key.dictionary_encode()
        codes = encoded.indices.to_numpy().astype(np.int32, copy=False)
        fresh = _Records(codes, np.ascontiguousarray(events.ts), first_end, states)
        pieces: list[WindowRows] = []
        if self._sends_updates:
            older = self._near(encoded.dictionary, int(events.ts.min()), int(events.ts.max()))
            is_new = np.zeros(len(older.codes) + count, np.uint8)
            is_new[len(older.codes) :] = 1
            pieces = self._windows(encoded.dictionary, _join(older, fresh), is_new, 0, LATEST)
        columns = [events.key, int64_column(fresh.ts), int64_column(first_end), *states]
        names = ["key", "ts", *self._state.index.spec.payload.names]
        rows = pa.RecordBatch.from_arrays(columns, names=names)

        def put(stream_time: int) -> list[WindowRows]:
            self._store.put_batch(rows, stream_time=stream_time)
            return pieces

        return taken_by_key(batch, good, late_by, put)

    def _near(self, keys: pa.BinaryArray, first: int, last: int) -> _Records:
        """Return the keys' records that can be in a window with records from `first` to `last`, or create one."""
        last = min(last, LATEST - self._width - 1) + self._width + 1
        numbers, rows = self._store.fetch_batch(keys, first - self._width, last)
        ts, _, first_end, *states = rows.columns
        return _Records(numbers.astype(np.int32), words(ts), words(first_end), states)

    # ── windows ──────────────────────────────────────────────────────────────────────────────────────────────

    def _windows(
        self, keys: pa.BinaryArray, records: _Records, is_new: Bytes, earliest: int, latest: int
    ) -> list[WindowRows]:
        """Return the windows that new records changed; without flags, all that end from `earliest` to `latest`."""
        count = len(records.codes)
        rows, starts = place_by_time(records.codes, records.ts, len(keys))
        new_before, away_before = np.empty(count + 1, np.int32), np.empty(count + 1, np.int32)
        owner, end = np.empty(2 * count, np.int32), np.empty(2 * count, np.int64)
        low, high = np.empty(2 * count, np.int32), np.empty(2 * count, np.int32)
        made = find_windows(
            rows, starts, records.ts, records.first_end, is_new, self._width, earliest, latest,
            new_before, away_before, owner, end, low, high,
        )  # fmt: skip
        if not made:
            return []
        owner, end, low, high = owner[:made], end[:made], low[:made], high[:made]
        windows = Stretches(end, low, high, records.first_end, away_before)

        def named(number: int) -> str:
            last = int(end[number])
            return window_words(keys[int(owner[number])].as_py(), last - self._width, last)

        merged = merge_stretches(self._folds, records.states, rows, windows, self._runtime.scratch, named)
        owners, begin = keys.take(pa.array(owner)), end - self._width
        (counts, max_ts, min_offset, max_offset), values = self._folds.finish(merged, owners, begin)
        return [WindowRows(owners, begin, end, max_ts, values, counts, min_offset, max_offset)]

    def _between(self, first: int, last: int) -> Iterator[WindowRows]:
        step = max(CHUNK_BUCKETS * self._state.index.spec.bucket_ms, self._width)
        for chunk in self._chunks(first, last, step):
            low, high = max(first, chunk * step), min(last, chunk * step + step - 1)
            batches = list(self._store.scan(low - self._width - 1, high))
            if not batches:
                continue
            keys, ts, _, first_end, *states = pa.concat_batches(batches).columns
            encoded = keys.dictionary_encode()
            codes = encoded.indices.to_numpy().astype(np.int32, copy=False)
            records = _Records(codes, words(ts), words(first_end), states)
            for rows in self._windows(encoded.dictionary, records, _NO_FLAGS, low, high):
                yield in_order(rows)

    def _of_keys(self, keys: pa.BinaryArray, first: int, last: int) -> WindowRows:
        records = self._near(keys, max(0, first - 1), last)
        if not len(records.codes):
            return no_rows(self._folds.results)
        pieces = self._windows(keys, records, _NO_FLAGS, first, last)
        return pieces[0] if pieces else no_rows(self._folds.results)

    def _chunks(self, first: int, last: int, step: int) -> list[int]:
        """Return the numbers of ranges in which windows that end from `first` to `last` may end."""
        width, found = self._store.index.spec.bucket_ms, set[int]()
        for start in self._store.bucket_starts(first - self._width - 1, last):
            low = max(first, start)
            high = min(last, start + width + self._width)
            found.update(range(low // step, high // step + 1))
        return sorted(found)

    def _oldest(self) -> int:
        reach = self._store.expiry.reach_ms
        return max(0, self._state.stream_time - self._kind.retention_ms + reach + self._width)


def _join(older: _Records, fresh: _Records) -> _Records:
    if not len(older.codes):
        return fresh
    return _Records(
        np.concatenate([older.codes, fresh.codes]),
        np.concatenate([older.ts, fresh.ts]),
        np.concatenate([older.first_end, fresh.first_end]),
        [pa.concat_arrays([old, new]) for old, new in zip(older.states, fresh.states, strict=True)],
    )
