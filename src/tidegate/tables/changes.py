"""Subscriptions to a table's changes: new and old value of each window.

A subscription gets every change that is drained after it began, in the order of the topic. Reading old values costs
a lookup in the table for each batch, so it is done only while there are subscribers.

H1  a deletion of a window the table does not have, and a record that was not stored, are no changes.
H2  between two changes of one window nothing is left out: the old value is the one the change before made.
H3  a subscriber that falls behind by more than its limit gets `OverloadError` and nothing more; it never slows the
    table down.

Thread rule: `before` and `publish` are the draining thread's; a subscription is read by one thread of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.clock import Clock, SystemClock
from tidegate.durations import DurationLike, milliseconds
from tidegate.errors import OverloadError
from tidegate.tables.options import TableRules
from tidegate.tables.rows import window_of
from tidegate.tables.snapshot import PartitionState
from tidegate.windows.keys import SessionWindow, TimeWindow

MOST_WAITING: Final = 1_000_000
CHANGE_NAMES: Final = ["key", "ts", "seq", "new", "old", "timestamp", "offset", "partition"]
_CHANGING: Final = ("key", "ts", "seq", "value", "value_ts", "offset")


@dataclass(frozen=True, slots=True)
class Change:
    """A window's value changed; `new` None is a deletion, `old` None a window that did not exist."""

    key: Any
    window: TimeWindow | SessionWindow | None
    new: Any
    old: Any
    timestamp: int
    partition: int
    offset: int


class Subscription:
    """The changes of a table since the subscription began; close it."""

    def __init__(self, hub: ChangeHub, rules: TableRules, clock: Clock, limit_rows: int) -> None:
        self._hub = hub
        self._rules = rules
        self._clock = clock
        self._limit_rows = limit_rows
        self._waiting: deque[pa.RecordBatch] = deque()
        self._rows = 0
        self._changed = threading.Condition()
        self._closed = self._overrun = False

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, timeout: int | DurationLike = 0) -> list[Change]:
        """Return the changes that are waiting, or those that arrive within the time; empty if none did."""
        return [change for batch in self.take_batches(timeout) for change in _decoded(self._rules, batch)]

    def take_batches(self, timeout: int | DurationLike = 0) -> list[pa.RecordBatch]:
        """Return the same as Arrow batches, with raw keys and values."""
        with self._changed:
            if not self._waiting and not self._closed and not self._overrun:
                wait_ms = milliseconds(timeout)
                if wait_ms:
                    self._clock.wait_ms(self._changed, wait_ms)
            taken = list(self._waiting)
            self._waiting.clear()
            self._rows = 0
            if not taken and self._overrun:
                raise OverloadError(
                    f"this subscription fell behind by more than {self._limit_rows} changes and was ended; take them "
                    "more often, or read the table and subscribe again",
                    reason="slow_subscriber",
                )
            return taken

    def __iter__(self) -> Iterator[Change]:
        """Yield changes until the subscription or the table is closed."""
        while True:
            changes = self.take(200)
            yield from changes
            if not changes and self._closed:
                return

    def close(self) -> None:
        self._hub.leave(self)
        self.end()

    def end(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def give(self, batch: pa.RecordBatch) -> None:
        with self._changed:
            if self._closed or self._overrun:
                return
            if self._rows and self._rows + batch.num_rows > self._limit_rows:
                self._overrun = True
            else:
                self._waiting.append(batch)
                self._rows += batch.num_rows
            self._changed.notify_all()


class ChangeHub:
    """The subscribers of one table."""

    def __init__(self, rules: TableRules, clock: Clock | None = None) -> None:
        self._rules = rules
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._listeners: list[Subscription] = []

    def subscribe(self, limit_rows: int = MOST_WAITING) -> Subscription:
        subscription = Subscription(self, self._rules, self._clock, limit_rows)
        with self._lock:
            self._listeners.append(subscription)
        return subscription

    def leave(self, subscription: Subscription) -> None:
        with self._lock:
            if subscription in self._listeners:
                self._listeners.remove(subscription)

    def before(self, state: PartitionState, rows: pa.RecordBatch) -> pa.RecordBatch | None:
        """Return the changes that these rows will make; call it before they are written."""
        if not self._listeners or rows.num_rows == 0:
            return None
        return changes_of(state, rows)

    def publish(self, changed: pa.RecordBatch | None) -> None:
        if changed is None or changed.num_rows == 0:
            return
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.give(changed)

    def close(self) -> None:
        with self._lock:
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.end()


def changes_of(state: PartitionState, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return new and old value of every row, in the order of the topic."""
    stored = _stored(state, rows)
    known = stored.num_rows
    both = pa.concat_arrays([stored.column("key"), rows.column("key")])
    codes = pc.dictionary_encode(both).indices.to_numpy()
    ts = np.concatenate([stored.column("ts").to_numpy(), rows.column("ts").to_numpy()])
    seq = np.concatenate([stored.column("seq").to_numpy(), rows.column("seq").to_numpy()])
    values = pa.concat_arrays([stored.column("value"), rows.column("value")])
    # Equal windows are adjacent, stored row first, then in topic order: the previous row is the old value.
    order = np.lexsort((np.arange(len(ts)), seq, ts, codes))
    windows = np.stack([codes, ts, seq])[:, order]
    is_same = (windows[:, 1:] == windows[:, :-1]).all(axis=0)
    before = np.full(len(order), -1, np.int64)
    before[order[1:]] = np.where(is_same, order[:-1], -1)
    before = before[known:]
    old = values.take(pa.array(before, mask=before < 0))
    key, start, second, new, stamp, offset = (rows.column(name) for name in _CHANGING)
    partition = pa.array(np.full(rows.num_rows, state.partition, np.int32))
    changed = [key, start, second, new, old, stamp, offset, partition]
    is_change = pc.or_(new.is_valid(), old.is_valid())
    return pa.RecordBatch.from_arrays(changed, names=CHANGE_NAMES).filter(is_change)


def _stored(state: PartitionState, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return key, ts, seq and value of the stored rows that these rows may replace."""
    ts = rows.column("ts").to_numpy()
    keys = rows.column("key").unique()
    numbers, found = state.store.fetch_batch(keys, max(int(ts.min()), state.live_from), int(ts.max()))
    names = ("ts", "seq", "value")
    columns = [keys.take(pa.array(numbers)), *(found.column(name) for name in names)]
    return pa.RecordBatch.from_arrays(columns, names=["key", *names])


def _decoded(rules: TableRules, batch: pa.RecordBatch) -> Iterator[Change]:
    for row in batch.to_pylist():
        yield Change(
            rules.key.decode(row["key"]),
            window_of(rules.shape, row["ts"], row["seq"]),
            rules.value.decode(row["new"]),
            rules.value.decode(row["old"]),
            row["timestamp"],
            row["partition"],
            row["offset"],
        )
