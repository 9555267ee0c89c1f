"""Rows of a committed table as Arrow batches for Spark.

R1  all tasks of one read show one commit: the plan carries the commit itself, not "the last".
R2  only columns that are asked for are read, and only they are decoded.
R3  memory: one batch of `batch_rows`, and what storage holds to read one bucket.
R4  a moment that Spark cannot hold is null.

Does not know pyspark. Thread rule: pure functions over a snapshot of one's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.clock import SystemClock
from tidegate.errors import CommitGoneError
from tidegate.spark.tables.options import TableOptions
from tidegate.spark.tables.plan import LARGEST_MS, LATEST, TIMESTAMP, RowBounds, rules_of
from tidegate.storage import Time
from tidegate.storage.backends.base import MissingObjectError
from tidegate.tables.commits import CommitList
from tidegate.tables.options import TableRules, TableShape
from tidegate.tables.queries import rows_of_keys
from tidegate.tables.snapshot import EARLIEST, TableSource, stored_snapshot, task_of

KEYS_AT_ONCE: Final = 1024
_TIMES: Final = frozenset({"window_start", "window_end", "timestamp"})


def read_rows(
    options: TableOptions, commits: CommitList, partition: int, bounds: RowBounds, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The rows of one partition, in exactly `schema`."""
    rules, commit = rules_of(commits.shape, options), commits.commits[0]
    with options.opened() as backend:
        try:
            snapshot = stored_snapshot(backend, rules, commit, clock=SystemClock())
            try:
                states = [state for state in snapshot.source.partitions if state.partition == partition]
                source = replace(snapshot.source, partitions=states)
                for raw in _raw_rows(source, bounds, schema.names, options.batch_rows):
                    yield _finished(raw, rules, partition, schema)
            finally:
                snapshot.close()
        except MissingObjectError as error:
            raise CommitGoneError(
                f"commit {commit.number} of table {commits.shape.name} is no longer there: its builder has made "
                f"several newer ones while Spark read this one ({error.name} is gone); read the table again"
            ) from error


def _raw_rows(
    source: TableSource, bounds: RowBounds, names: Sequence[str], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    first, last = _ts_bounds(source.rules.shape, bounds)
    wants_seq = source.rules.shape.kind == "session"
    found: Iterator[pa.RecordBatch]
    if bounds.keys is not None:
        found = (
            raw.slice(start, batch_rows)
            for key in range(0, len(bounds.keys), KEYS_AT_ONCE)
            for raw in rows_of_keys(source, bounds.keys[key : key + KEYS_AT_ONCE], first, last)
            for start in range(0, raw.num_rows, batch_rows)
        )
    else:
        found = _scanned(source, first, last, _stored_names(names, wants_seq), batch_rows)
    for raw in found:
        rows = _started(raw, bounds) if wants_seq else raw
        if rows.num_rows:
            yield rows


def _scanned(
    source: TableSource, first: int, last: int, names: Sequence[str], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    for state in source.partitions:
        earliest = max(first, state.readable_from)
        if earliest <= last:
            with source.runtime.reader().scan(
                task_of(state.shape), state, Time(earliest, last), batch_rows=batch_rows, columns=names
            ) as scan:
                for batch in scan:
                    for start in range(0, batch.num_rows, batch_rows):
                        yield batch.slice(start, batch_rows)


def _stored_names(names: Sequence[str], wants_seq: bool) -> list[str]:
    """What is read of storage (R2); `ts` always, so that a batch knows how many rows it has."""
    stored = {"ts"} | ({"seq"} if wants_seq else set())
    stored |= {name for name in ("key", "value", "offset") if name in names}
    stored |= {"value_ts"} if "timestamp" in names else set()
    return [name for name in ("key", "ts", "seq", "value", "value_ts", "offset") if name in stored]


def _ts_bounds(shape: TableShape, bounds: RowBounds) -> tuple[int, int]:
    """Bounds of the stored ts: the start of a window, the end of a session, 0 for plain keys."""
    if shape.kind == "key":
        return EARLIEST, LATEST
    if shape.kind == "session":
        return bounds.end_from, bounds.end_to
    first, last = bounds.start_from, bounds.start_to
    if bounds.end_from > 0:
        first = max(first, bounds.end_from - shape.size_ms)
    if bounds.end_to < LATEST:
        last = min(last, bounds.end_to - shape.size_ms)
    return max(first, 0), last


def _started(raw: pa.RecordBatch, bounds: RowBounds) -> pa.RecordBatch:
    if bounds.start_from <= 0 and bounds.start_to == LATEST:
        return raw
    starts = raw.column("seq")
    return raw.filter(
        pc.and_(pc.greater_equal(starts, bounds.start_from), pc.less_equal(starts, bounds.start_to))
    )


def _finished(raw: pa.RecordBatch, rules: TableRules, partition: int, schema: pa.Schema) -> pa.RecordBatch:
    arrays = []
    for field in schema:
        column = _column(raw, rules, partition, field.name)
        if field.name in _TIMES:
            column = as_timestamps(column)
        arrays.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(raw: pa.RecordBatch, rules: TableRules, partition: int, name: str) -> pa.Array:
    shape = rules.shape
    if name == "key":
        return rules.key.decode_column(raw.column("key")).require_good()
    if name == "value":
        return rules.value.decode_column(raw.column("value")).require_good()
    if name == "timestamp":
        times = raw.column("value_ts")
        return pc.if_else(pc.less(times, 0), pa.scalar(None, pa.int64()), times)
    if name == "partition":
        return pa.array(np.full(raw.num_rows, partition, np.int32))
    if name == "window_start":
        return raw.column("seq" if shape.kind == "session" else "ts")
    if name == "window_end":
        ts = raw.column("ts")
        return ts if shape.kind == "session" else _ends(ts, shape.size_ms)
    return raw.column(name)


def _ends(starts: pa.Array, size_ms: int) -> pa.Array:
    numbers = starts.to_numpy()
    return pa.array(
        np.where(numbers > LATEST - size_ms, LATEST, numbers + np.minimum(size_ms, LATEST - numbers))
    )


def as_timestamps(milliseconds: pa.Array) -> pa.Array:
    """Epoch milliseconds as Spark's timestamps; null where they cannot hold them."""
    newest: Any = pc.max(milliseconds).as_py()
    if newest is not None and newest > LARGEST_MS:
        holds = pc.less_equal(milliseconds, LARGEST_MS)
        milliseconds = pc.if_else(holds, milliseconds, pa.scalar(None, pa.int64()))
    return milliseconds.cast(pa.timestamp("ms", tz="UTC")).cast(TIMESTAMP)
