"""A key-value store: the last row of every key, kept until it is deleted, on the worker's storage.

Tables put and fetch batches of any columns (`segmented_store`); the rest applies to stores of byte values.

All rows lie in one bucket at time 0; there is no clock and nothing expires. A null value deletes. Ranges of keys
include both ends, compared as unsigned bytes; None leaves an end open. `range` and `all` return rows in the order of
the key's bytes, the reverse forms in reverse, and hold the result in memory; `batches` streams, in no order.

The changelog receives the raw keys. Thread rule: the task's thread.
"""

from __future__ import annotations

import warnings
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import TidegateWarning
from tidegate.storage import Merge, RangeRequest, RuntimeContext, StoreSpec, Time
from tidegate.windows.stores.segmented_store import Position, SegmentedStore, StoreState, WindowsState
from tidegate.windows.stores.value_store import (
    PAYLOAD,
    Changelog,
    KeyColumn,
    NumberColumn,
    StoreIterator,
    TimestampedValue,
    Value,
    ValueColumn,
    key_column,
    number_column,
    one_key,
    scan_batches,
    value_column,
    value_rows,
    values_state,
)

HERE = Time(0, 0)
ROWS = pa.schema([pa.field("key", pa.binary(), nullable=False), *PAYLOAD])


class KeyValueStore(SegmentedStore):
    """Rows by key: all at time 0, and nothing expires."""

    def __init__(
        self,
        context: RuntimeContext,
        store: str | StoreState,
        *,
        timestamped: bool = False,
        changelog: Changelog | None = None,
    ) -> None:
        """Open a store of byte values under a name, or one over a state of any columns."""
        self.is_timestamped = timestamped
        self._changelog = changelog
        state = store
        if isinstance(state, str):
            state = WindowsState(StoreSpec(state, Merge.LAST, PAYLOAD))
        super().__init__(context, state, None)

    @property
    def position(self) -> Position:
        """The largest offsets processed."""
        return self._values.position

    @property
    def logging(self) -> bool:
        """Whether puts are written to a changelog."""
        return self._changelog is not None

    @property
    def approximate_entries(self) -> int:
        """Rows in storage; overwritten and deleted ones count until compaction."""
        return self.index.total_rows

    @property
    def _values(self) -> WindowsState:
        return values_state(self.state)

    def put(
        self,
        key: bytes,
        value: bytes | None,
        *,
        value_ts: int = 0,
        offset: int | None = None,
        partition: int = 0,
        topic: str = "",
    ) -> None:
        """Set a key's value; None deletes it."""
        self.put_all(
            [one_key(key)], [value], value_ts=value_ts, offsets=offset, partitions=partition, topic=topic
        )

    def delete(self, key: bytes, *, value_ts: int = 0) -> None:
        """Delete a key; a missing key is no error."""
        self.put(key, None, value_ts=value_ts)

    def put_all(
        self,
        keys: KeyColumn,
        values: ValueColumn,
        *,
        value_ts: NumberColumn = 0,
        offsets: NumberColumn | None = None,
        partitions: NumberColumn = 0,
        topic: str = "",
    ) -> None:
        """Put rows in their order."""
        inner = key_column(keys)
        rows = len(inner)
        column, stamps = value_column(values, rows), number_column("value_ts", value_ts, rows)
        if rows:
            nowhen = np.zeros(rows, np.int64)
            self.put_batch(value_rows(inner, nowhen, None, column, stamps), stream_time=0)
            if self._changelog is not None:
                self._changelog(inner, column, stamps)
        if offsets is not None:
            where = (
                partitions if isinstance(partitions, int) else number_column("partitions", partitions, rows)
            )
            self.position.advance_batch(topic, where, number_column("offsets", offsets, rows))

    restore_batch = put_all
    """Records of a changelog; give the store no changelog of its own while it restores."""

    def get(self, key: bytes) -> Value | None:
        """Return the value of a key, None if it has none."""
        reader = self._context.reader()
        request = RangeRequest(one_key(key), HERE)
        with reader.load(reader.plan(self._context.task, self.state, (request,))) as loaded:
            for batch in loaded.view().batches(("value", "value_ts")):
                return self._value(batch.column(0)[0].as_py(), batch.column(1)[0].as_py())
        return None

    def get_batch(self, keys: KeyColumn) -> pa.RecordBatch:
        """Return value and value_ts of each key, in their order; null where a key has none."""
        inner = key_column(keys)
        batches = [pa.RecordBatch.from_arrays([pa.array([], each.type) for each in ROWS], schema=ROWS)]
        if len(inner):
            reader = self._context.reader()
            request = RangeRequest(pc.unique(inner), HERE)
            with reader.load(reader.plan(self._context.task, self.state, (request,))) as loaded:
                batches += [batch.select(ROWS.names) for batch in loaded.batches()]
        found = pa.concat_batches(batches)
        return found.select(PAYLOAD.names).take(pc.index_in(inner, value_set=found.column("key")))

    def range(self, key_from: bytes | None, key_to: bytes | None) -> StoreIterator[tuple[bytes, Value]]:
        """Return (key, value) of the keys in the range, ascending."""
        return self._between(key_from, key_to, "ascending")

    def reverse_range(
        self, key_from: bytes | None, key_to: bytes | None
    ) -> StoreIterator[tuple[bytes, Value]]:
        """Return `range`, the largest key first."""
        return self._between(key_from, key_to, "descending")

    def all(self) -> StoreIterator[tuple[bytes, Value]]:
        """Return every key and its value, ascending."""
        return self.range(None, None)

    def reverse_all(self) -> StoreIterator[tuple[bytes, Value]]:
        """Return `all`, the largest key first."""
        return self.reverse_range(None, None)

    def batches(
        self, *, key_from: bytes | None = None, key_to: bytes | None = None
    ) -> StoreIterator[pa.RecordBatch]:
        """Yield the keys in the range and their values, as batches of key, value, value_ts."""
        scan = scan_batches(self._context, self._values, HERE, key_from=key_from, key_to=key_to)
        return StoreIterator((batch.select(ROWS.names) for batch in scan), scan.close)

    def _between(
        self, key_from: bytes | None, key_to: bytes | None, order: Literal["ascending", "descending"]
    ) -> StoreIterator[tuple[bytes, Value]]:
        if key_from is not None and key_to is not None and key_from > key_to:
            warnings.warn(
                f"store {self.name}: the range of keys from {key_from.hex()} to {key_to.hex()} is empty, because keys"
                " are compared as unsigned bytes",
                TidegateWarning,
                stacklevel=3,
            )
            return StoreIterator(iter(()))
        with self.batches(key_from=key_from, key_to=key_to) as batches:
            found = pa.Table.from_batches(list(batches), ROWS).sort_by([("key", order)])
        columns = [column.to_pylist() for column in found.columns]
        return StoreIterator(
            (key, self._value(value, stamp)) for key, value, stamp in zip(*columns, strict=True)
        )

    def _value(self, value: bytes, stamp: int) -> Value:
        return TimestampedValue(value, stamp) if self.is_timestamped else value
