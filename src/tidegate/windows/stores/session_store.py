"""A session store: rows of keys in sessions, kept for a retention of stream time, on the worker's storage.

Operators and tables put and fetch batches of any columns (`segmented_store`). A store of byte values also has the
calls of Kafka Streams' session store, with the same meaning, each with a form for columns. A session's time is its
end: by it rows are kept, dropped and read. Both ends of a session belong to it.

    find_sessions(key, earliest_end, latest_start)     end >= earliest_end and start <= latest_start

`remove` deletes one session and advances the clock, but drops no time segment; `put` of None deletes with all
effects of a put. Bytes of the changelog: `keys`, session format. Thread rule: the task's thread.
"""

from __future__ import annotations

from typing import Unpack

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import InvalidError
from tidegate.windows.keys import KeyFormat, SessionWindow, Windowed, decode_keys, encode_keys
from tidegate.windows.stores.segmented_store import PutResult
from tidegate.windows.stores.segments import LATEST, Compat, Int64s
from tidegate.windows.stores.value_store import (
    PAYLOAD,
    At,
    AtEach,
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
    number_column,
    one_key,
    times_column,
)

ROWS = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("window_start", pa.int64(), nullable=False),
        pa.field("window_end", pa.int64(), nullable=False),
        *PAYLOAD,
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
        **at: Unpack[At],
    ) -> bool:
        """Set the value of a session; None deletes it. Returns False if it is expired, and dropped.

        `value_ts` is the timestamp of the record (default: the session's end).
        """
        window, key = _session(session), [one_key(session.key)]
        result = self.put_all(key, [window.start], [window.end], [value], value_ts=value_ts, **each_at(at))
        return bool(result.accepted[0])

    def put_all(
        self,
        keys: KeyColumn,
        starts: NumberColumn,
        ends: NumberColumn,
        values: ValueColumn,
        *,
        value_ts: NumberColumn | None = None,
        **at: Unpack[AtEach],
    ) -> PutResult:
        """Put rows in their order, as if one by one."""
        inner, first, last = _sessions(keys, starts, ends)
        return self._put_all(inner, last, first, values, value_ts, at)

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
        puts = Puts(inner, last, first, pa.nulls(rows, pa.binary()), stamps)
        exists = np.isin(last // self.segment_interval_ms, self.segments.ids)
        deleted = puts.to_batch().filter(pa.array(exists))
        writer, task = self._context.writer(), self._context.task
        self.index.insert(writer.append(task, self.state, deleted) if deleted.num_rows else [])
        self._values.observed_time = max(self._values.observed_time, int(last.max()))
        self._log(puts)

    def restore_batch(
        self, keys: pa.Array, values: ValueColumn, timestamps: NumberColumn, **at: Unpack[AtEach]
    ) -> None:
        """Restore records of this store's changelog. Sessions that are expired by its end are left out and not
        counted."""
        decoded = decode_keys(keys, KeyFormat.SESSION)
        self._restore_records(decoded, decoded.end, decoded.start, values, timestamps, at)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    def fetch_session(self, key: bytes, start: int, end: int) -> Value | None:
        """Return the value of exactly this session."""
        return self._one(one_key(key), end, start)

    def find_sessions(self, key: bytes, earliest_end: int, latest_start: int) -> StoreIterator[SessionRow]:
        """Yield a key's sessions that end at or after `earliest_end` and start at or before `latest_start`."""
        return _started(self._rows_of_key(key, self._span(earliest_end, LATEST)), latest_start)

    def backward_find_sessions(
        self, key: bytes, earliest_end: int, latest_start: int
    ) -> StoreIterator[SessionRow]:
        return _started(self._rows_of_key(key, self._span(earliest_end, LATEST), forward=False), latest_start)

    def find_sessions_range(
        self, key_from: bytes | None, key_to: bytes | None, earliest_end: int, latest_start: int
    ) -> StoreIterator[SessionRow]:
        """Do `find_sessions` for all keys in a range."""
        return _started(
            self._rows(self._scan(self._span(earliest_end, LATEST), key_from, key_to)), latest_start
        )

    def backward_find_sessions_range(
        self, key_from: bytes | None, key_to: bytes | None, earliest_end: int, latest_start: int
    ) -> StoreIterator[SessionRow]:
        scan = self._scan(self._span(earliest_end, LATEST), key_from, key_to, forward=False)
        return _started(self._rows(scan), latest_start)

    def find_sessions_by_end(self, earliest_end: int, latest_end: int) -> StoreIterator[SessionRow]:
        """Yield all keys' sessions that end in a range; Kafka Streams' default session store has no such call."""
        if self.compat is Compat.KAFKA_STREAMS:
            raise InvalidError(
                f"store {self.name}: Kafka Streams' default session store cannot find sessions by their end; open the"
                " store with another compat"
            )
        return _started(self._rows(self._scan(self._span(earliest_end, latest_end), None, None)))

    def fetch(self, key: bytes) -> StoreIterator[SessionRow]:
        """Yield all sessions of a key."""
        return self.find_sessions(key, 0, LATEST)

    def backward_fetch(self, key: bytes) -> StoreIterator[SessionRow]:
        return self.backward_find_sessions(key, 0, LATEST)

    def fetch_range(self, key_from: bytes | None, key_to: bytes | None) -> StoreIterator[SessionRow]:
        """Yield all sessions of the keys in a range."""
        return self.find_sessions_range(key_from, key_to, 0, LATEST)

    def backward_fetch_range(self, key_from: bytes | None, key_to: bytes | None) -> StoreIterator[SessionRow]:
        return self.backward_find_sessions_range(key_from, key_to, 0, LATEST)

    def fetch_keys(
        self, keys: KeyColumn, earliest_end: int = 0, latest_start: int = LATEST
    ) -> pa.RecordBatch:
        """Do `find_sessions` for all these keys, key after key in the given order, each by session end."""
        rows = self._rows_of_keys(key_column(keys), self._span(earliest_end, LATEST))
        return self._columns(rows.filter(pc.less_equal(rows.column("seq"), latest_start)))

    def get_batch(self, keys: KeyColumn, starts: NumberColumn, ends: NumberColumn) -> pa.RecordBatch:
        """Return value and value_ts of each of these sessions, null where it does not exist."""
        inner, first, last = _sessions(keys, starts, ends)
        return self._aligned(inner, last, first)

    def _identity(self, keys: pa.BinaryArray, times: Int64s, seconds: Int64s | None) -> pa.BinaryArray:
        return encode_keys(keys, times if seconds is None else seconds, KeyFormat.SESSION, end=times)

    def _columns(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = [rows.column(name) for name in ("key", "seq", "ts", *PAYLOAD.names)]
        return pa.RecordBatch.from_arrays(columns, schema=ROWS)


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


def _started(rows: StoreIterator[StoredRow], latest_start: int = LATEST) -> StoreIterator[SessionRow]:
    """Yield the sessions that start at `latest_start` or before."""
    found = (
        (Windowed(key, SessionWindow(start, end)), value)
        for key, end, start, value in rows
        if start <= latest_start
    )
    return StoreIterator(found, rows.close)
