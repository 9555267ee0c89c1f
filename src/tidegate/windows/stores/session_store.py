"""A session store: rows of keys in sessions, kept for a retention of stream time, on the worker's storage.

Operators and tables put and fetch batches of any columns (`segmented_store`). A store of byte values also has the
calls of Kafka Streams' session store, with the same meaning, each with a form for columns. A session's time is its
end: by it rows are kept, dropped and read. Both ends of a session belong to it.

    find_sessions(key, earliest_end, latest_start)     end >= earliest_end and start <= latest_start

`remove` deletes one session and advances the clock, but drops no time segment; `put` of None deletes with all
effects of a put.

Rules of time: `segments`. Bytes of the changelog: `keys`, session format. Thread rule: the task's thread.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import InvalidError
from tidegate.storage import Cursor, RangeRequest
from tidegate.windows.keys import KeyFormat, SessionWindow, Windowed, decode_keys, encode_keys
from tidegate.windows.stores.segmented_store import PutResult
from tidegate.windows.stores.segments import LATEST, Compat, Int64s
from tidegate.windows.stores.value_store import (
    KeyColumn,
    NumberColumn,
    StoreIterator,
    Value,
    ValueColumn,
    ValueStore,
    key_column,
    number_column,
    one_key,
    times_column,
    value_column,
    value_rows,
)

ROWS = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("window_start", pa.int64(), nullable=False),
        pa.field("window_end", pa.int64(), nullable=False),
        pa.field("value", pa.binary()),
        pa.field("value_ts", pa.int64(), nullable=False),
    ]
)

SessionRow = tuple[Windowed[bytes], Value]


class SessionStore(ValueStore):
    """Values by key and session."""

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────

    def put(
        self,
        session: Windowed[bytes],
        value: bytes | None,
        *,
        value_ts: int | None = None,
        offset: int | None = None,
        partition: int = 0,
        topic: str = "",
    ) -> bool:
        """Set the value of a session; None deletes it. Returns False if it is expired, and dropped.

        `value_ts` is the timestamp of the record (default: the session's end).
        """
        window = _session(session)
        result = self.put_all(
            [one_key(session.key)],
            [window.start],
            [window.end],
            [value],
            value_ts=value_ts,
            offsets=offset,
            partitions=partition,
            topic=topic,
        )
        return bool(result.accepted[0])

    def put_all(
        self,
        keys: KeyColumn,
        starts: NumberColumn,
        ends: NumberColumn,
        values: ValueColumn,
        *,
        value_ts: NumberColumn | None = None,
        offsets: NumberColumn | None = None,
        partitions: NumberColumn = 0,
        topic: str = "",
    ) -> PutResult:
        """Put rows in their order, as if one by one."""
        inner, first, last = _sessions(keys, starts, ends)
        column = value_column(values, len(inner))
        stamps = last if value_ts is None else number_column("value_ts", value_ts, len(inner))
        result = self._write(inner, last, first, column, stamps)
        self._log(inner, first, last, column, stamps)
        self._see(topic, partitions, offsets, len(inner))
        return result

    def remove(self, session: Windowed[bytes], *, value_ts: int | None = None) -> None:
        """Delete a session if it exists. Advances the clock to its end, but drops nothing."""
        window = _session(session)
        self.remove_batch([one_key(session.key)], [window.start], [window.end], value_ts=value_ts)

    def remove_batch(
        self,
        keys: KeyColumn,
        starts: NumberColumn,
        ends: NumberColumn,
        *,
        value_ts: NumberColumn | None = None,
    ) -> None:
        """Do `remove` for every row."""
        inner, first, last = _sessions(keys, starts, ends)
        rows = len(inner)
        if not rows:
            return
        stamps = last if value_ts is None else number_column("value_ts", value_ts, rows)
        nothing = pa.nulls(rows, pa.binary())
        exists = np.isin(last // self.segment_interval_ms, self.segments.ids)
        deleted = value_rows(inner, last, first, nothing, stamps, exists)
        writer, task = self._context.writer(), self._context.task
        self.index.insert(writer.append(task, self.state, deleted) if deleted.num_rows else [])
        self._values.observed_time = max(self._values.observed_time, int(last.max()))
        self._log(inner, first, last, nothing, stamps)

    def _log(self, keys: pa.Array, starts: Int64s, ends: Int64s, values: pa.Array, stamps: Int64s) -> None:
        if self._changelog is not None and len(starts):
            self._changelog(encode_keys(keys, starts, KeyFormat.SESSION, end=ends), values, stamps)

    def restore_batch(
        self,
        keys: pa.Array,
        values: ValueColumn,
        timestamps: NumberColumn,
        *,
        offsets: NumberColumn | None = None,
        partitions: NumberColumn = 0,
        topic: str = "",
    ) -> None:
        """Restore records of this store's changelog. Sessions that are expired by its end are left out and not
        counted."""
        rows = len(keys)
        seen = None if offsets is None else number_column("offsets", offsets, rows)
        decoded = decode_keys(keys, KeyFormat.SESSION).require_good(offsets=seen, topic=topic or None)
        self._restore_records(decoded, decoded.end, decoded.start, values, timestamps)
        self._see(topic, partitions, seen, rows)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    def fetch_session(self, key: bytes, start: int, end: int) -> Value | None:
        """Return the value of exactly this session."""
        one_key(key)
        span = self._span(end, end)
        if span is None:
            return None
        reader = self._context.reader()
        with reader.load(reader.plan(self._context.task, self.state, (RangeRequest(key, span),))) as loaded:
            view = loaded.view()
            at = view.seek_eq(Cursor(end, start))
            if at is None:
                return None
            row = view.slice(at, at + 1, ("value", "value_ts"))
            return self._value(row.column(0)[0].as_py(), row.column(1)[0].as_py())

    def find_sessions(self, key: bytes, earliest_end: int, latest_start: int) -> StoreIterator[SessionRow]:
        """Yield a key's sessions that end at or after `earliest_end` and start at or before `latest_start`."""
        return self._find_key(key, earliest_end, latest_start, forward=True)

    def backward_find_sessions(
        self, key: bytes, earliest_end: int, latest_start: int
    ) -> StoreIterator[SessionRow]:
        return self._find_key(key, earliest_end, latest_start, forward=False)

    def find_sessions_range(
        self, key_from: bytes | None, key_to: bytes | None, earliest_end: int, latest_start: int
    ) -> StoreIterator[SessionRow]:
        """Do `find_sessions` for all keys in a range."""
        return self._find_range(key_from, key_to, earliest_end, latest_start, forward=True)

    def backward_find_sessions_range(
        self, key_from: bytes | None, key_to: bytes | None, earliest_end: int, latest_start: int
    ) -> StoreIterator[SessionRow]:
        return self._find_range(key_from, key_to, earliest_end, latest_start, forward=False)

    def find_sessions_by_end(self, earliest_end: int, latest_end: int) -> StoreIterator[SessionRow]:
        """Yield all keys' sessions that end in a range; Kafka Streams' default session store has no such call."""
        if self.compat is Compat.KAFKA_STREAMS:
            raise InvalidError(
                f"store {self.name}: Kafka Streams' default session store cannot find sessions by their end; open the"
                " store with another compat"
            )
        rows = self._each(self._scan(self._span(earliest_end, latest_end)))
        return StoreIterator((_row(*each) for each in rows), rows.close)

    def fetch(self, key: bytes) -> StoreIterator[SessionRow]:
        """Yield all sessions of a key."""
        return self._find_key(key, 0, LATEST, forward=True)

    def backward_fetch(self, key: bytes) -> StoreIterator[SessionRow]:
        return self._find_key(key, 0, LATEST, forward=False)

    def fetch_range(self, key_from: bytes | None, key_to: bytes | None) -> StoreIterator[SessionRow]:
        """Yield all sessions of the keys in a range."""
        return self._find_range(key_from, key_to, 0, LATEST, forward=True)

    def backward_fetch_range(self, key_from: bytes | None, key_to: bytes | None) -> StoreIterator[SessionRow]:
        return self._find_range(key_from, key_to, 0, LATEST, forward=False)

    def fetch_keys(
        self, keys: KeyColumn, earliest_end: int = 0, latest_start: int = LATEST
    ) -> pa.RecordBatch:
        """Do `find_sessions` for all these keys, key after key in the given order, each by session end."""
        rows = self._keys_rows(key_column(keys), self._span(earliest_end, LATEST))
        return _columns(_started(rows, latest_start))

    def get_batch(self, keys: KeyColumn, starts: NumberColumn, ends: NumberColumn) -> pa.RecordBatch:
        """Return value and value_ts of each of these sessions, null where it does not exist."""
        inner, first, last = _sessions(keys, starts, ends)
        wanted = encode_keys(inner, first, KeyFormat.SESSION, end=last)
        return self._aligned(inner, last, wanted, KeyFormat.SESSION)

    def batches(
        self,
        earliest_end: int = 0,
        latest_end: int = LATEST,
        *,
        key_from: bytes | None = None,
        key_to: bytes | None = None,
    ) -> StoreIterator[pa.RecordBatch]:
        """Yield all sessions that end in a range, as batches."""
        scan = self._scan(self._span(earliest_end, latest_end), key_from, key_to)
        return StoreIterator((_columns(batch) for batch in scan), scan.close)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    def _find_key(
        self, key: bytes, earliest_end: int, latest_start: int, *, forward: bool
    ) -> StoreIterator[SessionRow]:
        batch = _started(self._key_rows(one_key(key), self._span(earliest_end, LATEST)), latest_start)
        columns = [column.to_pylist() for column in batch.columns]
        rows = zip(*(columns if forward else [column[::-1] for column in columns]), strict=True)
        return StoreIterator(
            _row(key, end, start, self._value(value, value_ts))
            for end, start, value, value_ts in rows
            if not self._is_gone(end)
        )

    def _find_range(
        self,
        key_from: bytes | None,
        key_to: bytes | None,
        earliest_end: int,
        latest_start: int,
        *,
        forward: bool,
    ) -> StoreIterator[SessionRow]:
        rows = self._each(self._scan(self._span(earliest_end, LATEST), key_from, key_to, forward=forward))
        found = (_row(key, end, start, value) for key, end, start, value in rows if start <= latest_start)
        return StoreIterator(found, rows.close)


def _session(session: Windowed[bytes]) -> SessionWindow:
    if not isinstance(session, Windowed) or not isinstance(session.window, SessionWindow):
        raise TypeError(f"a key in a session window is needed, not {session!r}")
    return session.window


def _sessions(keys: KeyColumn, starts: NumberColumn, ends: NumberColumn) -> tuple[pa.Array, Int64s, Int64s]:
    inner = key_column(keys)
    first, last = times_column("starts", starts, len(inner)), times_column("ends", ends, len(inner))
    if len(inner) and bool((last < first).any()):
        row = int(np.argmax(last < first))
        raise InvalidError(f"row {row}: a session cannot end at {last[row]}, before its start {first[row]}")
    return inner, first, last


def _started(rows: pa.RecordBatch, latest_start: int) -> pa.RecordBatch:
    if latest_start >= LATEST or not rows.num_rows:
        return rows
    return rows.filter(pc.less_equal(rows.column("seq"), latest_start))


def _columns(rows: pa.RecordBatch) -> pa.RecordBatch:
    columns = [rows.column(name) for name in ("key", "seq", "ts", "value", "value_ts")]
    return pa.RecordBatch.from_arrays(columns, schema=ROWS)


def _row(key: bytes, end: int, start: int, value: Value) -> SessionRow:
    return Windowed(key, SessionWindow(start, end)), value
