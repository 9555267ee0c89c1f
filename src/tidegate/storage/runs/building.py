"""Rows as they arrive become runs: grouped by bucket and key, sorted by cursor, merged by kind inside the batch.

What comes in is one record batch with the columns `key` (binary), `ts` (int64, ms), maybe `seq` (int64), for
`last` maybe `deleted` (bool), and the payload (for `fold`: the aggregates' inputs). What comes out has each
identity once: for `append` every row is its own, `last` keeps the last of a batch, `fold` makes one state.

Cost: a sort of one number for each row (`ordering.py`), and every column read once in that order. Rows are compared
only where a key has several, and their cursors sorted only where they do not ascend already.

Thread rule: pure; the loops run without the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.storage.runs.assembling import (
    NO_NUMBERS,
    KeySource,
    assemble,
    even_width,
    gather,
    gather_keys,
    gather_numbers,
    gather_places,
    int64_column,
    is_word,
    own_slice,
    words,
)
from tidegate.storage.runs.hashing import Int32s, UInt64s, binary_parts, hash_parts
from tidegate.storage.runs.ordering import Identities, order_rows
from tidegate.storage.runs.run import Int64s, Run
from tidegate.storage.spec import Merge, StoreSpec

LOWEST_TS = -(2**63)
RowsBetween = Callable[[int, int], pa.RecordBatch]


class FoldedRows(NamedTuple):
    """What the runs of a folded batch hold, all of it in one piece, row by row in the order of the runs."""

    keys: pa.BinaryArray
    ts: Int64s
    seq: Int64s
    """No elements where all are 0."""
    states: list[pa.Array]


def build_runs(
    spec: StoreSpec,
    rows: pa.RecordBatch,
    *,
    first_seq: int | None,
    max_rows: int,
    hashes: UInt64s | None = None,
    whole: list[FoldedRows] | None = None,
) -> list[Run]:
    """The runs of a batch by ascending bucket; a bucket of more than `max_rows` rows is several, disjoint.

    `append` numbers rows from `first_seq` on, in the order they came (None: a `seq` column does). `hashes` are
    the keys' hashes where the caller has them already. `whole` gets what was folded, for who goes on with it.
    """
    if max_rows < 1:
        raise InvalidError(f"store {spec.name}: max_rows is {max_rows}; a run needs at least one row")
    if not rows.num_rows:
        return []
    batch = _check(spec, rows, first_seq)
    parts = binary_parts(batch.key)
    keys = KeySource(hash_parts(parts) if hashes is None else hashes, *parts, even_width(parts.bounds))
    ordered = order_rows(keys, batch.ts, batch.seq, spec.bucket_ms)
    starts, lines = ordered.starts, gather_places(ordered.rows, ordered.starts[:-1])
    if spec.merge is Merge.APPEND:
        rows_between = _numbered(spec, batch, rows, ordered.rows, first_seq)
    else:
        identities = ordered.identities()
        starts = identities.starts
        if spec.merge is Merge.LAST:
            rows_between = _overwritten(spec, batch, rows, ordered.rows[identities.firsts[1:] - 1])
        else:
            folded = _folded(spec, rows, ordered.rows, identities)
            rows_between = _slices(spec, *folded)
            if whole is not None:
                firsts = gather_places(ordered.rows, identities.firsts[:-1])
                whole.append(FoldedRows(gather_keys(batch.key, firsts), *folded))
    runs: list[Run] = []
    for bucket, first, stop in ordered.buckets:
        runs += assemble(bucket, keys, lines[first:stop], starts[first : stop + 1], rows_between, max_rows)
    return runs


class _Batch(NamedTuple):
    """The columns every kind has; `seq` has no elements when rows are numbered as they come or all are 0."""

    key: pa.Array
    ts: Int64s
    seq: Int64s
    lowest: int


def _check(spec: StoreSpec, rows: pa.RecordBatch, first_seq: int | None) -> _Batch:
    """Refuse a batch that does not fit the store, naming the column."""
    names = rows.schema.names
    has_seq = "seq" in names
    if spec.merge is Merge.APPEND and has_seq is (first_seq is not None):
        raise InvalidError(
            f"store {spec.name}: number appended rows by first_seq or by a `seq` column, one of the two"
        )
    if spec.merge is not Merge.APPEND and first_seq is not None:
        raise InvalidError(
            f"store {spec.name}: rows of kind {spec.merge} are not numbered; leave first_seq out"
        )
    for name in ("key", "ts", *(("seq",) if has_seq else ())):
        _column(spec, rows, name, None if name == "key" else pa.int64(), nullable=False)
    if spec.merge is not Merge.FOLD:
        for field in spec.payload:
            _column(spec, rows, field.name, field.type, nullable=field.nullable)
    key = rows.column("key")
    if not (pa.types.is_binary(key.type) or pa.types.is_large_binary(key.type)):
        raise InvalidError(f"store {spec.name}: column key is {key.type}; encode keys to binary")
    ts = words(rows.column("ts"))
    lowest = int(ts.min())
    if spec.bucket_of(lowest) < LOWEST_TS:
        raise InvalidError(
            f"store {spec.name}: ts {lowest} lies in a bucket that starts before 64-bit time does"
        )
    return _Batch(key, ts, words(rows.column("seq")) if has_seq else NO_NUMBERS, lowest)


def _column(
    spec: StoreSpec, rows: pa.RecordBatch, name: str, type_: pa.DataType | None, *, nullable: bool
) -> pa.Array:
    place = rows.schema.get_field_index(name)
    if place < 0:
        raise InvalidError(
            f"store {spec.name}: no single column {name!r} among {rows.schema.names}; a batch needs exactly one"
        )
    column = rows.column(place)
    if type_ is not None and column.type != type_:
        raise InvalidError(
            f"store {spec.name}: column {name} is {column.type}, the store holds {type_}; cast it"
        )
    if not nullable and column.null_count:
        raise InvalidError(
            f"store {spec.name}: column {name} has {column.null_count} nulls; fill or drop them"
        )
    return column


def _numbered(
    spec: StoreSpec, batch: _Batch, rows: pa.RecordBatch, placed: Int32s, first_seq: int | None
) -> RowsBetween:
    payload = [rows.column(name) for name in spec.payload.names]

    def rows_between(start: int, stop: int) -> pa.RecordBatch:
        part = placed[start:stop]
        if first_seq is None:
            seq = gather_numbers(batch.seq, part)
        else:
            seq = int64_column(part + np.int64(first_seq))
        columns = [gather_numbers(batch.ts, part), seq, *(gather(column, part) for column in payload)]
        return pa.RecordBatch.from_arrays(columns, schema=spec.rows)

    return rows_between


def _cursor_columns(batch: _Batch, part: Int32s) -> list[pa.Array]:
    seq = gather_numbers(batch.seq, part) if len(batch.seq) else int64_column(np.zeros(len(part), np.int64))
    return [gather_numbers(batch.ts, part), seq]


def _overwritten(spec: StoreSpec, batch: _Batch, rows: pa.RecordBatch, lasts: Int32s) -> RowsBetween:
    if "deleted" in rows.schema.names:
        deleted = _column(spec, rows, "deleted", pa.bool_(), nullable=False)
    else:
        deleted = pa.repeat(pa.scalar(False), rows.num_rows)
    payload = [deleted, *(rows.column(name) for name in spec.payload.names)]

    def rows_between(start: int, stop: int) -> pa.RecordBatch:
        part = lasts[start:stop]
        columns = [*_cursor_columns(batch, part), *(gather(column, part) for column in payload)]
        return pa.RecordBatch.from_arrays(columns, schema=spec.rows)

    return rows_between


def _folded(
    spec: StoreSpec, rows: pa.RecordBatch, ordered: Int32s, identities: Identities
) -> tuple[Int64s, Int64s, list[pa.Array]]:
    """Cursors and states of identities. What aggregates read is put in order first where that is quick: they then go
    from front to back, too."""
    count, numbers = len(identities.firsts) - 1, identities.numbers
    names = dict.fromkeys(name for aggregate in spec.aggregates for name in aggregate.inputs)
    read = {name: rows.column(name) for name in names if rows.schema.get_field_index(name) >= 0}
    if read and all(is_word(column.type) and not column.null_count for column in read.values()):
        columns = [gather(column, ordered) for column in read.values()]
        rows = pa.RecordBatch.from_arrays(columns, names=list(read))
    else:
        by_row = np.empty(len(ordered), np.int32)
        by_row[ordered] = numbers
        numbers = by_row
    states = [state for aggregate in spec.aggregates for state in aggregate.partial(rows, numbers, count)]
    if count == len(identities.ts):
        return identities.ts, identities.seq, states
    firsts = identities.firsts[:-1]
    seq = words(gather_numbers(identities.seq, firsts)) if len(identities.seq) else NO_NUMBERS
    return words(gather_numbers(identities.ts, firsts)), seq, states


def _slices(spec: StoreSpec, ts: Int64s, seq: Int64s, states: list[pa.Array]) -> RowsBetween:
    def rows_between(start: int, stop: int) -> pa.RecordBatch:
        own_seq = seq[start:stop].copy() if len(seq) else np.zeros(stop - start, np.int64)
        columns = [int64_column(ts[start:stop].copy()), int64_column(own_seq)]
        columns += [own_slice(state, start, stop) for state in states]
        return pa.RecordBatch.from_arrays(columns, schema=spec.rows)

    return rows_between
