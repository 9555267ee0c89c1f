"""Read rows of a table by key, by keys, or all of them, without expired windows.

Keys of a topic need not lie in the partition that hashing would choose (the producing application decides), so every
partition is read. Bounds are on ts: the window start, or the session end; both ends inclusive.

Thread rules:

- reading: pure functions over a source that may be read from any thread.
- stored rows: from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import UnsupportedError
from tidegate.tables.rows import RAW_SCHEMA, StoredForm
from tidegate.tables.snapshot import EARLIEST, PartitionState, TableSource
from tidegate.windows.stores.segmented_store import keys_between

# --- reading

LATEST = 2**63 - 1


class KeyEnds(NamedTuple):
    """A range of key bytes, both ends inclusive, None for an open one."""

    low: bytes | None
    high: bytes | None


def rows_of_keys(source: TableSource, keys: pa.BinaryArray, first: int, last: int) -> list[pa.RecordBatch]:
    """Return the rows of these different keys, with one lookup in each partition."""
    found = []
    for state in source.partitions:
        numbers, rows = state.store.fetch_batch(keys, max(first, state.readable_from), last)
        if rows.num_rows:
            found.append(_raw(state, keys.take(pa.array(numbers)), rows))
    return found


def all_rows(
    source: TableSource,
    first: int = 0,
    last: int = LATEST,
    *,
    keys: KeyEnds | None = None,
    batch_rows: int = 1 << 16,
) -> Iterator[pa.RecordBatch]:
    """Yield every row in these bounds, in batches, in no defined order.

    All partitions are captured when the first batch is taken, so none of them has rows that are drained later.
    """
    scans = []
    with ExitStack() as opened:
        with source.cut:
            for state in source.partitions:
                earliest = max(first, state.readable_from)
                if earliest <= last:
                    scan = state.store.open_scan(earliest, last, batch_rows=batch_rows)
                    scans.append((state, opened.enter_context(scan)))
        for state, scan in scans:
            for batch in scan:
                rows = batch if keys is None else keys_between(batch, *keys)
                if rows.num_rows:
                    yield _raw(state, rows.column("key"), rows)


def _raw(state: PartitionState, keys: pa.Array, rows: pa.RecordBatch) -> pa.RecordBatch:
    columns = [rows.column(name) for name in ("ts", "seq", "value", "value_ts", "offset")]
    partition = pa.array(np.full(rows.num_rows, state.partition, np.int32))
    return pa.RecordBatch.from_arrays([keys, *columns, partition], schema=RAW_SCHEMA)


# --- stored rows


class StoredRows:
    """`RowSource` over a `TableSource`."""

    def __init__(self, source: TableSource) -> None:
        self.source = source
        self.kind = source.rules.shape.kind
        self.form = StoredForm(source.rules)

    def encoded(self, key: Any) -> bytes | None:
        return self.source.rules.key.encode(key)

    def find(self, keys: Sequence[bytes], first: int, last: int) -> list[pa.RecordBatch]:
        if self.kind == "key":
            first = last = 0
        end = LATEST if self.kind == "session" else last
        column = pa.array(keys, pa.binary())
        if len(keys) > 1:
            column = column.unique()
        return self._started(rows_of_keys(self.source, column, first, end), last)

    def scan(
        self, first: int, last: int, *, keys: KeyEnds | None = None, batch_rows: int = 1 << 16
    ) -> Iterator[pa.RecordBatch]:
        if self.kind == "key":
            first, last = EARLIEST, LATEST
        end = LATEST if self.kind == "session" else last
        found = all_rows(self.source, first, end, keys=keys, batch_rows=batch_rows)
        return (rows for batch in found for rows in self._started([batch], last) if rows.num_rows)

    def late(self) -> pa.Table:
        if self.kind == "key":
            raise UnsupportedError(f"table {self.form.name} has plain keys: no record is ever late for it")
        raise UnsupportedError(
            f"table {self.form.name} keeps no late records: records of windows that have expired are counted in "
            f"`counts.expired`, and lie in topic {self.source.rules.shape.topic}"
        )

    def dead_letters(self) -> pa.Table:
        return self.source.letters.read()

    def _started(self, batches: list[pa.RecordBatch], last: int) -> list[pa.RecordBatch]:
        """Of sessions, return those that start at `last` or before."""
        if self.kind != "session" or last == LATEST:
            return batches
        return [batch.filter(pc.less_equal(batch.column("seq"), last)) for batch in batches]
