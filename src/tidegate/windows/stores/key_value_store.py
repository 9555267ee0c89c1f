"""A key-value store: the last row of every key, kept until it is deleted, on the worker's storage.

All rows lie in one bucket at time 0; there is no clock and nothing expires. Tables put and fetch batches of any
columns (`segmented_store`); the rest applies to stores of byte values. Ranges of keys include both ends, compared as
unsigned bytes; None leaves an end open. `range` and `all` return rows in the order of the key's bytes, the reverse
forms in reverse, and hold the result in memory; `batches` streams, in no order. The changelog receives the raw keys.

Thread rule: the task's thread.
"""

from __future__ import annotations

from typing import Unpack

import numpy as np
import pyarrow as pa

from tidegate.storage import Merge, RuntimeContext, StoreSpec
from tidegate.windows.stores.segmented_store import StoreState, WindowsState
from tidegate.windows.stores.segments import Int64s
from tidegate.windows.stores.value_store import (
    PAYLOAD,
    At,
    AtEach,
    Changelog,
    KeyColumn,
    NumberColumn,
    StoreIterator,
    Value,
    ValueColumn,
    ValueStore,
    each_at,
    key_column,
    one_key,
)

ROWS = pa.schema([pa.field("key", pa.binary(), nullable=False), *PAYLOAD])


class KeyValueStore(ValueStore):
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
        if isinstance(store, str):
            store = WindowsState(StoreSpec(store, Merge.LAST, PAYLOAD))
        super().__init__(context, store, retention=None, timestamped=timestamped, changelog=changelog)

    @property
    def approximate_entries(self) -> int:
        """Rows in storage; overwritten and deleted ones count until compaction."""
        return self.index.total_rows

    def put(self, key: bytes, value: bytes | None, *, value_ts: int = 0, **at: Unpack[At]) -> None:
        """Set a key's value; None deletes it."""
        self.put_all([one_key(key)], [value], value_ts=value_ts, **each_at(at))

    def delete(self, key: bytes, *, value_ts: int = 0) -> None:
        """Delete a key; a missing key is no error."""
        self.put(key, None, value_ts=value_ts)

    def put_all(
        self, keys: KeyColumn, values: ValueColumn, *, value_ts: NumberColumn = 0, **at: Unpack[AtEach]
    ) -> None:
        """Put rows in their order."""
        inner = key_column(keys)
        self._put_all(inner, np.zeros(len(inner), np.int64), None, values, value_ts, at)

    restore_batch = put_all
    """Records of a changelog; give the store no changelog of its own while it restores."""

    def get(self, key: bytes) -> Value | None:
        """Return the value of a key, None if it has none."""
        return self._one(one_key(key), 0)

    def get_batch(self, keys: KeyColumn) -> pa.RecordBatch:
        """Return value and value_ts of each key, in their order; null where a key has none."""
        inner = key_column(keys)
        return self._aligned(inner, np.zeros(len(inner), np.int64))

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

    def _between(
        self, key_from: bytes | None, key_to: bytes | None, order: str
    ) -> StoreIterator[tuple[bytes, Value]]:
        with self._scan(self._span(0, 0), key_from, key_to) as batches:
            found = [batch.select(ROWS.names) for batch in batches]
        columns = pa.Table.from_batches(found, ROWS).sort_by([("key", order)]).columns
        rows = zip(*(column.to_pylist() for column in columns), strict=True)
        return StoreIterator((key, self._value(value, stamp)) for key, value, stamp in rows)

    def _identity(self, keys: pa.BinaryArray, times: Int64s, seconds: Int64s | None) -> pa.BinaryArray:
        return keys

    def _columns(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.select(ROWS.names)
