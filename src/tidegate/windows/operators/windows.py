"""Tumbling, hopping and unlimited windows: records are folded into panes, and windows are merged from panes.

    fold store   key = the record's key     ts = where the pane starts     seq = the first window that takes the records

`seq` is 0 for records that all windows of the pane accept. A record that came when some of its windows had closed is
folded under the start of the first open one, and a window reads only panes under its own start or an earlier one: so
results do not depend on batch boundaries; only intermediate updates do. With one pane per window nothing is merged;
otherwise windows overlap and are merged with a tree (`merge_tree`).

Thread rule: one operator belongs to its task's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import InvalidError
from tidegate.kernels.stream_time import GOOD
from tidegate.kernels.windows import assign_panes, list_hops, list_late, list_windows, reach_of_hops
from tidegate.storage import (
    Merge,
    MergedRows,
    RuntimeContext,
    StoreSpec,
    TouchedRows,
)
from tidegate.storage.runs.columns import (
    gather_keys,
    int64_column,
    is_word,
    list_bytes,
    merge_needs,
    numbers_column,
    window_words,
    words,
)
from tidegate.windows.events import EventBatch, Int64s
from tidegate.windows.keys import Bytes, Int32s
from tidegate.windows.kinds import LATEST, Hopping, Unlimited
from tidegate.windows.operators.base import LateLines, WindowRows, no_rows
from tidegate.windows.operators.clock import Stamped
from tidegate.windows.operators.layout import StateLayout
from tidegate.windows.operators.merge_tree import Stretches, merge_stretches, place_by_time
from tidegate.windows.operators.windowed_operator import Emit, Taken, WindowedOperator
from tidegate.windows.stores.segmented_store import Returning
from tidegate.windows.stores.segments import Compat as StoreCompat
from tidegate.windows.stores.window_store import WindowStore

# --- panes


class PaneRows(NamedTuple):
    """Panes with their merged states; rows of one key need not be adjacent."""

    keys: pa.BinaryArray
    ts: Int64s
    seq: Int64s
    states: list[pa.Array]


class _Assigned(NamedTuple):
    """The pane of every record of a batch; `first_start` is 0 where all windows of a record accept it."""

    taken: Bytes
    pane_start: Int64s
    first_start: Int64s
    accepted: int
    partly: int


CHUNK_BUCKETS = 4  # of window starts that are merged at once
_NONE, _ZERO = np.empty(0, np.int64), np.zeros(1, np.int32)


# --- the operator


class WindowOperator(WindowedOperator):
    """Aggregates of windows of one size, for every key of one task."""

    _kinds = (Hopping, Unlimited)
    _kind: Hopping | Unlimited
    _store: WindowStore

    def _set_up(self, kind: Hopping | Unlimited, *, is_compat: bool) -> None:
        if isinstance(kind, Hopping):
            self._step_ms = kind.advance_ms
        elif self._emit is Emit.CLOSE:
            raise InvalidError("an unlimited window never closes: emit on update")
        self._is_plain = isinstance(kind, Unlimited) or kind.pane_ms == kind.size_ms  # a window is one pane

    def _spec(self, name: str, layout: StateLayout) -> StoreSpec:
        widths = {"bucket_ms": layout.bucket_ms, "segment_ms": layout.segment_ms}
        return StoreSpec(name, Merge.FOLD, aggregates=self._folds.stored, **widths)

    def _open_store(self, context: RuntimeContext, compat: StoreCompat) -> None:
        kept = None if isinstance(self._kind, Unlimited) else self._kind.retention_ms
        self._store = WindowStore(context, self._state, retention=kept, compat=compat)

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, batch: EventBatch, stamped: Stamped) -> Taken:
        ts, count, kind = np.ascontiguousarray(batch.ts), len(batch), self._kind
        if isinstance(kind, Unlimited):
            is_good = (stamped.verdicts == GOOD) | (stamped.verdicts == self._also)
            taken = ((ts >= kind.start_ms) & is_good).astype(np.uint8)
            panes = _Assigned(
                taken, np.full(count, kind.start_ms), np.zeros(count, np.int64), int(taken.sum()), 0
            )
            put = partial(self._fold, batch, panes)
            return Taken(taken, np.zeros(count, np.int32), panes.accepted, 0, _no_lines, put)
        taken, late_windows = np.empty(count, np.uint8), np.empty(count, np.int32)
        pane_start, first_start = np.empty(count, np.int64), np.empty(count, np.int64)
        accepted, partly, closed = assign_panes(
            ts, stamped.judged, stamped.verdicts, self._also,
            kind.size_ms, kind.advance_ms, kind.pane_ms, kind.grace_ms,
            taken, pane_start, first_start, late_windows,
        )  # fmt: skip

        def late() -> LateLines:
            lines = LateLines(*(np.empty(closed, np.int64) for _ in range(3)))
            list_late(ts, stamped.judged, late_windows, kind.size_ms, kind.advance_ms, kind.grace_ms, *lines)
            return lines

        put = partial(self._fold, batch, _Assigned(taken, pane_start, first_start, accepted, partly))
        return Taken(taken, late_windows, accepted, closed, late, put)

    def _fold(self, batch: EventBatch, assigned: _Assigned, stream_time: int) -> list[WindowRows]:
        """Fold records into panes; return the windows that changed, if they are sent."""
        columns = {"key": batch.key, "ts": int64_column(assigned.pane_start)}
        if assigned.partly:
            columns["seq"] = int64_column(assigned.first_start)
        rows = pa.RecordBatch.from_pydict({**columns, **self._folds.inputs(batch)})
        if assigned.accepted < len(batch):
            rows = rows.take(pa.array(np.flatnonzero(assigned.taken)))
        returning: Returning | None = None
        if self._sends_updates:
            returning = "merged" if self._is_plain else "touched"
        result = self._store.put_batch(rows, stream_time=stream_time, returning=returning)
        if result.merged is not None:
            return [self._changed(result.merged)]
        return self._touched(result.touched) if result.touched else []

    def _not_taken(
        self, stamped: Stamped, is_gone: npt.NDArray[np.bool_], is_late: npt.NDArray[np.bool_]
    ) -> dict[str, npt.NDArray[np.bool_]]:
        found = super()._not_taken(stamped, is_gone, is_late)
        if isinstance(self._kind, Unlimited):
            found["before_start"] = is_gone & (stamped.verdicts == GOOD)
        return found

    # ── windows, by their starts ─────────────────────────────────────────────────────────────────────────────

    def _oldest(self) -> int:
        return self._store.first_readable_ts

    def _closing(self, closed: int, close: int) -> tuple[int, int]:
        size = 0 if isinstance(self._kind, Unlimited) else self._kind.size_ms
        return max(0, closed - size + 1), LATEST if close == LATEST else close - size

    def _changed(self, changed: MergedRows) -> WindowRows:
        """Return the windows of panes that just changed, each of one pane, with their whole content."""
        fresh, places = changed.rows, changed.places
        rows = self._rows(fresh.keys, fresh.ts, fresh.states)
        if not len(places):
            return rows
        merged = self._rows(gather_keys(fresh.keys, places), fresh.ts[places], changed.merged)
        return put_rows(rows, places, merged)

    def _touched(self, pieces: Sequence[TouchedRows]) -> list[WindowRows]:
        """Return the windows of panes that were just folded into, with their whole content."""
        return [self._cluster(cluster) for cluster in _clusters(pieces, self._hopping.size_ms)]

    def _cluster(self, pieces: Sequence[TouchedRows]) -> WindowRows:
        kind = self._hopping
        keys = pa.concat_arrays([piece.keys for piece in pieces]).dictionary_encode()
        ts = np.concatenate([piece.ts for piece in pieces])
        seq = np.concatenate([piece.seq for piece in pieces])
        first, last = self._first_start(int(ts.min())), int(ts.max()) // kind.advance_ms * kind.advance_ms
        counts = np.concatenate([piece.counts for piece in pieces])
        owners = np.repeat(keys.indices.to_numpy().astype(np.int32, copy=False), counts)
        rows, starts = place_by_time(owners, ts, len(keys.dictionary))
        wanted = self._covered(rows, starts, owners, ts, seq, first, last)
        codes, panes = self._panes_of(keys.dictionary, first, _end(last, kind.size_ms) - 1)
        return self._merged(keys.dictionary, codes, panes, first, last, wanted)

    def _between(self, first: int, last: int) -> Iterator[WindowRows]:
        """Yield every window that starts from `first` to `last`, ascending by (end, key), in pieces."""
        if self._is_plain:
            width = self._store.index.spec.bucket_ms
            for start in self._store.bucket_starts(first, last):
                found = self._scanned(max(first, start), min(last, _end(start, width) - 1))
                if found:
                    joined = _join(found)
                    rows = _there(self._rows(joined.keys, joined.ts, joined.states))
                    if len(rows):
                        yield in_order(rows)
            return
        size, step = self._hopping.size_ms, CHUNK_BUCKETS * self._store.index.spec.bucket_ms
        chunks: set[int] = set()
        for start in self._store.bucket_starts(first, _end(last, size) - 1):
            end = _end(start, self._store.index.spec.bucket_ms) - 1
            chunks.update(range(max(first, start - size + 1, 0) // step, min(last, end) // step + 1))
        for chunk in sorted(chunks):
            low, high = max(first, chunk * step, 0), min(last, _end(chunk * step, step) - 1)
            found = self._scanned(low, _end(high, size) - 1)
            if found:
                joined = _join(found)
                keys = joined.keys.dictionary_encode()
                codes = keys.indices.to_numpy().astype(np.int32, copy=False)
                rows = _there(self._merged(keys.dictionary, codes, joined, low, high, None))
                if len(rows):
                    yield in_order(rows)

    def _of_keys(self, keys: pa.BinaryArray, first: int, last: int) -> WindowRows:
        """Return the windows of these different keys that start from `first` to `last`, in no defined order."""
        if self._is_plain:
            _, panes = self._panes_of(keys, first, last)
            if not len(panes.ts):
                return no_rows(self._folds.results)
            return _there(self._rows(panes.keys, panes.ts, panes.states))
        codes, panes = self._panes_of(keys, first, _end(last, self._hopping.size_ms) - 1)
        if not len(panes.ts):
            return no_rows(self._folds.results)
        low, high = max(first, self._first_start(int(panes.ts.min()))), min(last, int(panes.ts.max()))
        return _there(self._merged(keys, codes, panes, low, high, None))

    def _panes_of(self, keys: pa.BinaryArray, first: int, last: int) -> tuple[Int32s, PaneRows]:
        """Return all panes of these different keys that start from `first` to `last`, and the number of each one's
        key."""
        numbers, rows = self._store.fetch_batch(keys, first, last)
        ts, seq, *states = rows.columns
        return numbers.astype(np.int32), PaneRows(keys.take(pa.array(numbers)), words(ts), words(seq), states)

    def _scanned(self, first: int, last: int) -> list[PaneRows]:
        """Return all panes that start from `first` to `last`; `OverloadError` if their lists are too large."""
        found, nbytes = list[PaneRows](), 0
        for batch in self._store.scan(first, last):
            keys, ts, seq, *states = batch.columns
            piece = PaneRows(keys, words(ts), words(seq), states)
            found.append(piece)
            nbytes += list_bytes(piece.states)
            self._runtime.scratch.check(nbytes, lambda: _largest(found))
        return found

    @property
    def _hopping(self) -> Hopping:
        if isinstance(self._kind, Unlimited):
            raise TypeError("an unlimited window has no panes")
        return self._kind

    def _first_start(self, ts: int) -> int:
        kind = self._hopping
        return max(0, ts - kind.size_ms + kind.advance_ms) // kind.advance_ms * kind.advance_ms

    def _covered(
        self, rows: Int32s, starts: Int32s, owners: Int32s, ts: Int64s, seq: Int64s, first: int, last: int
    ) -> Int64s:
        """Return the numbers of all windows from `first` to `last` that accept one of these panes, ascending."""
        size, advance = self._hopping.size_ms, self._hopping.advance_ms
        stride, first = self._stride(first, last), -(-first // advance) * advance
        bounds = (rows, starts, ts, seq, size, advance, first, last, stride)
        found = np.empty(list_hops(*bounds, _NONE), np.int64)
        list_hops(*bounds, found)
        partly = np.flatnonzero(seq)
        if not len(partly):
            return found
        late_ts, late_seq = ts[partly], seq[partly]
        pairs = list_windows(late_ts, late_seq, size, advance, first, last, _NONE, _NONE)
        panes, begins = np.empty(pairs, np.int64), np.empty(pairs, np.int64)
        list_windows(late_ts, late_seq, size, advance, first, last, panes, begins)
        numbers = owners[partly[panes]].astype(np.int64) * stride + (begins - first) // advance
        return np.union1d(found, numbers)

    def _stride(self, first: int, last: int) -> int:
        """Return how many windows start from `first` to `last`, at least one: the numbers each key has."""
        advance = self._hopping.advance_ms
        return max(1, (last - -(-first // advance) * advance) // advance + 1)

    def _merged(
        self,
        keys: pa.BinaryArray,
        codes: Int32s,
        panes: PaneRows,
        first: int,
        last: int,
        wanted: Int64s | None,
    ) -> WindowRows:
        """Merge windows from `first` to `last`, all or those with the numbers `wanted`, from all panes they can
        have."""
        size, advance, stride = self._hopping.size_ms, self._hopping.advance_ms, self._stride(first, last)
        first = -(-first // advance) * advance
        ts, seq = np.ascontiguousarray(panes.ts), np.ascontiguousarray(panes.seq)
        rows, starts = place_by_time(codes, ts, len(keys))
        if wanted is None:
            wanted = self._covered(rows, starts, codes, ts, seq, first, last)
        lows, highs = np.empty(len(wanted), np.int32), np.empty(len(wanted), np.int32)
        reach_of_hops(wanted, first, size, advance, stride, rows, starts, ts, lows, highs)
        begins = wanted % stride * advance + first
        away_before = np.concatenate([_ZERO, np.cumsum(seq[rows] > 0, dtype=np.int32)])
        windows = Stretches(begins, lows, highs, seq, away_before)

        def named(number: int) -> str:
            key = keys[int(wanted[number]) // stride].as_py()
            return window_words(key, int(begins[number]), int(begins[number]) + size)

        states = merge_stretches(self._folds, panes.states, rows, windows, self._runtime.scratch, named)
        return self._rows(keys.take(pa.array(wanted // stride)), begins, states)

    def _rows(self, keys: pa.BinaryArray, starts: Int64s, states: Sequence[pa.Array]) -> WindowRows:
        (counts, max_ts, min_offset, max_offset), values = self._folds.finish(states, keys, starts)
        if isinstance(self._kind, Unlimited):
            ends = np.full(len(starts), LATEST, np.int64)
        else:
            size = self._kind.size_ms
            ends = np.where(starts > LATEST - size, LATEST, np.minimum(starts, LATEST - size) + size)
        gone = counts == 0 if self._folds.retracts else None
        return WindowRows(keys, starts, ends, max_ts, values, counts, min_offset, max_offset, gone)


def _there(rows: WindowRows) -> WindowRows:
    """Remove windows without remaining rows."""
    if rows.deleted is None:
        return rows
    return replace(rows.take(np.flatnonzero(~rows.deleted)), deleted=None)


def in_order(rows: WindowRows) -> WindowRows:
    """Sort by (end, key)."""
    order = pc.array_sort_indices(rows.key).to_numpy().astype(np.int64)
    ends = rows.window_end[order]
    if len(ends) and ends.min() != ends.max():
        order = order[np.argsort(ends, kind="stable")]
    return rows.take(order)


def put_rows(rows: WindowRows, places: Int32s, others: WindowRows) -> WindowRows:
    """Return the rows with some replaced by others of the same key and window."""

    def put(mine: Any, theirs: Any) -> Any:
        changed = mine.copy()
        changed[places] = theirs
        return changed

    values = [
        _put(mine, places, theirs)
        for mine, theirs in zip(rows.values.columns, others.values.columns, strict=True)
    ]
    return replace(
        rows,
        ts=put(rows.ts, others.ts),
        values=pa.RecordBatch.from_arrays(values, schema=rows.values.schema) if values else rows.values,
        count=put(rows.count, others.count),
        min_offset=put(rows.min_offset, others.min_offset),
        max_offset=put(rows.max_offset, others.max_offset),
        deleted=None if rows.deleted is None else put(rows.deleted, others.deleted),
    )


def _put(mine: pa.Array, places: Int32s, theirs: pa.Array) -> pa.Array:
    if is_word(mine.type) and not mine.null_count and not theirs.null_count:
        changed = words(mine).copy()
        changed[places] = words(theirs)
        return numbers_column(mine.type, changed)
    if np.array_equal(places, np.arange(len(mine))):  # all are replaced: do not copy large lists
        return theirs
    chosen = np.arange(len(mine), dtype=np.int64)
    chosen[places] = len(mine) + np.arange(len(places))
    return pa.concat_arrays([mine, theirs]).take(pa.array(chosen))


def _clusters(pieces: Sequence[TouchedRows], size: int) -> list[list[TouchedRows]]:
    """Group pieces by ascending bucket, joined where a window can span two of them."""
    clusters: list[list[TouchedRows]] = []
    highest = 0
    for piece in pieces:
        if clusters and int(piece.ts.min()) - highest < size:
            clusters[-1].append(piece)
        else:
            clusters.append([piece])
        highest = max(highest, int(piece.ts.max()))
    return clusters


def _largest(pieces: Sequence[PaneRows]) -> str:
    """Return the pane with the longest lists."""
    piece = max(pieces, key=lambda each: list_bytes(each.states))
    row = int(np.argmax(merge_needs(piece.states)))
    return window_words(piece.keys[row].as_py(), int(piece.ts[row])) + " and others that end with it"


def _join(pieces: Sequence[PaneRows]) -> PaneRows:
    if len(pieces) == 1:
        return pieces[0]
    return PaneRows(
        pa.concat_arrays([piece.keys for piece in pieces]),
        np.concatenate([piece.ts for piece in pieces]),
        np.concatenate([piece.seq for piece in pieces]),
        [
            pa.concat_arrays(list(columns))
            for columns in zip(*(piece.states for piece in pieces), strict=True)
        ],
    )


def _end(start: int, size: int) -> int:
    return min(start + size, LATEST)


def _no_lines() -> LateLines:
    raise TypeError("an unlimited window closes to no record")
