"""Session windows: bursts of a key's records with no more than a gap between neighbours.

    session store   key = the record's key    ts = end of the session    seq = its start    payload: states

For every batch the sessions of its keys are read in one plan; one kernel joins records to sessions in order of arrival
(`kernels/windows.py`); sessions that grew or were joined are written under their new bounds, earlier ones as deleted.

A session is final once stream time has passed its end + gap + grace. A record is late if it would join a final
session, or lies before stream time − grace − gap and in no open session. `compat="kafka-streams"` keeps Kafka
Streams' rule: a session is joined while the store keeps it; a record that finds none begins one while that would end
at or after stream time − grace − gap. Thread rule: one operator belongs to its task's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tidegate.kernels.stream_time import GOOD
from tidegate.kernels.windows import merge_sessions
from tidegate.storage import Merge, RuntimeContext, StoreSpec
from tidegate.storage.runs.columns import int64_column, merge_need, merge_needs, window_words, words
from tidegate.windows.events import EventBatch, Int64s
from tidegate.windows.keys import Int32s
from tidegate.windows.kinds import Session
from tidegate.windows.operators.base import WindowRows
from tidegate.windows.operators.clock import Stamped
from tidegate.windows.operators.layout import StateLayout
from tidegate.windows.operators.merge_tree import place
from tidegate.windows.operators.windowed_operator import Taken, WindowedOperator, taken_by_key
from tidegate.windows.operators.windows import in_order
from tidegate.windows.stores.segments import Compat as StoreCompat
from tidegate.windows.stores.session_store import SessionStore


class _Found(NamedTuple):
    """Sessions of the store: the number of each one's key, ascending; bounds; states."""

    codes: Int32s
    start: Int64s
    end: Int64s
    states: list[pa.Array]


class _Merged(NamedTuple):
    """The sessions that changed, and the session of each record and found session."""

    key: Int32s
    start: Int64s
    end: Int64s
    record_groups: Int32s
    found_groups: Int32s
    gone: Int64s
    late_by: Int64s


class SessionOperator(WindowedOperator):
    """Aggregates of session windows, for every key of one task."""

    _kinds = (Session,)
    _kind: Session

    def _set_up(self, kind: Session, *, is_compat: bool) -> None:
        self._allowed = kind.gap_ms + kind.grace_ms
        self._stays_final = not is_compat
        self._kept = max(kind.retention_ms, self._allowed + 1) if self._stays_final else kind.retention_ms
        # A record that may begin a session is at close time at the earliest, and meets sessions at most a gap before.
        self._reach = self._allowed + kind.gap_ms + 1 if self._stays_final else self._kept

    def _spec(self, name: str, layout: StateLayout) -> StoreSpec:
        # A session that is deleted has no state: every column may be null.
        payload = pa.schema([each.with_nullable(True) for fold in self._folds.stored for each in fold.state])
        return StoreSpec(
            name, Merge.LAST, payload=payload, bucket_ms=layout.bucket_ms, segment_ms=layout.segment_ms
        )

    def _open_store(self, context: RuntimeContext, compat: StoreCompat) -> None:
        kept = max(self._kept, self._reach)
        self._store = SessionStore(context, self._state, retention=kept, compat=compat)

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, batch: EventBatch, stamped: Stamped) -> Taken:
        good = np.flatnonzero((stamped.verdicts == GOOD) | (stamped.verdicts == self._also))
        if not len(good):
            return taken_by_key(batch, good, np.empty(0, np.int64))
        events, judged = batch if len(good) == len(batch) else batch.take(good), stamped.judged[good]
        placed = by_key(events.key)
        oldest = max(int(events.ts.min()) - self._kind.gap_ms, int(judged.min()) - self._reach + 1)
        found = self._find(placed.keys, oldest)
        merged = self._merge(placed, np.ascontiguousarray(events.ts), judged, found)
        if not len(merged.key):
            return taken_by_key(batch, good, merged.late_by)
        states = self._states(placed.keys, events, merged, found)
        keys = placed.keys.take(pa.array(merged.key))
        gone_keys = placed.keys.take(pa.array(found.codes[merged.gone]))
        rows = self._stored(keys, merged, states, gone_keys, found)
        pieces: list[WindowRows] = []
        if self._sends_updates:
            if len(gone_keys):
                pieces.append(self._deleted(gone_keys, found.start[merged.gone], found.end[merged.gone]))
            pieces.append(self._rows(keys, merged.start, merged.end, states))

        def put(stream_time: int) -> list[WindowRows]:
            self._store.put_batch(rows, stream_time=stream_time)
            return pieces

        return taken_by_key(batch, good, merged.late_by, put)

    def _find(self, keys: pa.BinaryArray, oldest: int) -> _Found:
        """Return the keys' sessions that end at `oldest` or later: also those that begin much earlier."""
        numbers, rows = self._store.fetch_batch(keys, oldest)
        end, start, *states = rows.columns
        return _Found(numbers.astype(np.int32), words(start), words(end), states)

    def _merge(self, placed: _ByKey, ts: Int64s, judged: Int64s, found: _Found) -> _Merged:
        records, sessions, keys = len(ts), len(found.codes), len(placed.keys)
        bounds = np.searchsorted(found.codes, np.arange(keys + 1)).astype(np.int32)
        room = int((np.diff(bounds) + np.diff(placed.starts)).max())
        groups, gone = np.empty(sessions + records, np.int32), np.empty(sessions, np.uint8)
        late_by = np.empty(records, np.int64)
        start, end = np.empty(records, np.int64), np.empty(records, np.int64)
        key = np.empty(records, np.int32)
        parents = np.empty(sessions + records, np.int32)
        count = merge_sessions(
            placed.rows, placed.starts, ts, judged, bounds, found.start, found.end,
            self._kind.gap_ms, self._allowed, self._reach, int(self._stays_final),
            np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int32),
            parents, groups, gone, late_by, start, end, key,
        )  # fmt: skip
        return _Merged(
            key[:count],
            start[:count],
            end[:count],
            groups[sessions:],
            groups[:sessions],
            np.flatnonzero(gone),
            late_by,
        )

    def _states(
        self, keys: pa.BinaryArray, events: EventBatch, merged: _Merged, found: _Found
    ) -> list[pa.Array]:
        """Return the state of every session that changed: of its records, and of the sessions it replaces."""
        count, groups = len(merged.key), merged.record_groups
        if merged.late_by.any():
            taken = np.flatnonzero(groups >= 0)
            events, groups = events.take(taken), groups[taken]
        states = self._partial(events, groups, count)
        joined = np.flatnonzero(merged.found_groups >= 0)
        if not len(joined):
            return states
        chosen, into = pa.array(joined), merged.found_groups[joined]
        owners = np.concatenate([np.arange(count, dtype=np.int32), into])
        sizes = merge_needs(found.states)[joined]

        def largest() -> str:
            group = int(into[np.argmax(sizes)])
            key = keys[int(merged.key[group])].as_py()
            return f"operator {self.name}: " + window_words(
                key, int(merged.start[group]), int(merged.end[group])
            )

        need = int(sizes.sum()) + merge_need(states)
        with self._runtime.scratch.hold(need, largest):
            both = [
                pa.concat_arrays([fresh, old.take(chosen)])
                for fresh, old in zip(states, found.states, strict=True)
            ]
            return self._folds.merge(both, owners, count)

    def _stored(
        self,
        keys: pa.BinaryArray,
        merged: _Merged,
        states: Sequence[pa.Array],
        gone_keys: pa.BinaryArray,
        found: _Found,
    ) -> pa.RecordBatch:
        """Return the rows to store: replaced sessions as deleted, and those that changed."""
        spec, gone = self._state.index.spec, merged.gone
        deleted = np.zeros(len(gone) + len(keys), np.bool_)
        deleted[: len(gone)] = True
        columns = [
            pa.concat_arrays([gone_keys, keys]),
            int64_column(np.concatenate([found.end[gone], merged.end])),
            int64_column(np.concatenate([found.start[gone], merged.start])),
            pa.array(deleted),
            *(
                pa.concat_arrays([pa.nulls(len(gone), state.type), state]) if len(gone) else state
                for state in states
            ),
        ]
        names = ["key", "ts", "seq", "deleted", *spec.payload.names]
        return pa.RecordBatch.from_arrays(columns, names=names)

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────────

    def _rows(
        self, keys: pa.BinaryArray, start: Int64s, end: Int64s, states: Sequence[pa.Array]
    ) -> WindowRows:
        (counts, _, min_offset, max_offset), values = self._folds.finish(states, keys, start)
        return WindowRows(keys, start, end, end, values, counts, min_offset, max_offset)

    def _deleted(self, keys: pa.BinaryArray, start: Int64s, end: Int64s) -> WindowRows:
        """Return the replaced sessions as deleted rows."""
        rows, results = len(keys), self._folds.results
        values = pa.RecordBatch.from_arrays([pa.nulls(rows, each.type) for each in results], schema=results)
        none = np.full(rows, -1, np.int64)
        return WindowRows(
            keys, start, end, end, values, np.zeros(rows, np.int64), none, none, np.ones(rows, np.bool_)
        )

    def _between(self, first: int, last: int) -> Iterator[WindowRows]:
        width = self._store.index.spec.bucket_ms
        for bucket in self._store.bucket_starts(first, last):
            batches = list(self._store.scan(max(first, bucket), min(last, bucket + width - 1)))
            if batches:
                keys, end, start, *states = pa.concat_batches(batches).columns
                yield in_order(self._rows(keys, words(start), words(end), states))

    def _of_keys(self, keys: pa.BinaryArray, first: int, last: int) -> WindowRows:
        found = self._find(keys, first)
        chosen = np.flatnonzero(found.end <= last)
        rows = pa.array(chosen)
        states = [state.take(rows) for state in found.states]
        owners = keys.take(pa.array(found.codes[chosen]))
        return self._rows(owners, found.start[chosen], found.end[chosen], states)

    def _oldest(self) -> int:
        return max(0, self._state.stream_time - self._kept + 1)


class _ByKey(NamedTuple):
    """Rows grouped by key: the keys, the key number of each row, the rows in order."""

    keys: pa.BinaryArray
    codes: Int32s
    rows: Int32s
    starts: Int32s


def by_key(keys: pa.BinaryArray) -> _ByKey:
    """Group rows by key, each key's in order of arrival."""
    encoded = keys.dictionary_encode()
    codes = encoded.indices.to_numpy().astype(np.int32, copy=False)
    return _ByKey(encoded.dictionary, codes, *place(codes, len(encoded.dictionary)))
