"""Rows as they arrive become runs: grouped by bucket and key, sorted by cursor, merged by kind inside the batch.

What comes in is one record batch with the columns `key` (binary), `ts` (int64, ms), maybe `seq` (int64), for
`last` maybe `deleted` (bool), and the payload (for `fold`: the aggregates' inputs). What comes out has each
identity once: for `append` every row is its own, `last` keeps the last of a batch, `fold` makes one state.

Cost: a pass over the rows with one look-up each, and a sort of one number for each distinct key. Rows are sorted
only where a key has several cursors that do not ascend already. Keys that were chosen to share a hash cost one sort
of the batch's keys.

Thread rule: pure, but for a table that each thread keeps for its next batch; the loops run without the interpreter
lock.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import local
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import InvalidError
from tidegate.kernels.group_order import place_groups, settle_hashes
from tidegate.kernels.grouping import (
    CROWDED,
    EMPTY,
    GROUP_WORDS,
    group_rows,
    mark_identities,
    move_groups,
    number_rows,
    place_rows,
    sort_cursors,
)
from tidegate.storage.runs.assembling import (
    NO_NUMBERS,
    KeySource,
    assemble,
    gather,
    gather_numbers,
    int64_column,
    own_slice,
    words,
)
from tidegate.storage.runs.hashing import Int32s, UInt64s, binary_parts, hash_parts
from tidegate.storage.runs.run import Int64s, Run
from tidegate.storage.spec import Merge, StoreSpec

LOWEST_TS = -(2**63)
MOST_SLOTS = 1 << 19  # of a table of groups to begin with, and of one that is kept
MOST_STEPS = 256  # from a row's slot to its group; by chance it is never half as far
SPREAD = np.uint64(0xC2B2AE3D27D4EB4F)
MOST_BUCKETS = 1 << 16  # that are counted, and how far apart the first and the last of them may be
LONGEST = 1 << 62
MARK_BITS = 44  # of a mark for bucket and row; what is left for the hash tells nearly all keys apart
BucketPart = tuple[int, int, int]  # a bucket that has groups, and its part of them in order, from and up to
RowsBetween = Callable[[int, int], pa.RecordBatch]


def build_runs(
    spec: StoreSpec,
    rows: pa.RecordBatch,
    *,
    first_seq: int | None,
    max_rows: int,
    hashes: UInt64s | None = None,
) -> list[Run]:
    """The runs of a batch by ascending bucket; a bucket of more than `max_rows` rows is several, disjoint.

    `append` numbers rows from `first_seq` on, in the order they came (None: a `seq` column does). `hashes` are
    the keys' hashes where the caller has them already.
    """
    if max_rows < 1:
        raise InvalidError(f"store {spec.name}: max_rows is {max_rows}; a run needs at least one row")
    if not rows.num_rows:
        return []
    batch = _check(spec, rows, first_seq)
    parts = binary_parts(batch.key)
    keys = KeySource(hash_parts(parts) if hashes is None else hashes, *parts)
    grouped = _group(keys, batch, spec.bucket_ms)
    if spec.merge is Merge.APPEND:
        placed, starts = grouped.place_rows(batch.ts, batch.seq)
        rows_between = _numbered(spec, batch, rows, placed, first_seq)
    else:
        numbers, lasts, starts = grouped.number_identities(batch.ts, batch.seq)
        if spec.merge is Merge.LAST:
            rows_between = _overwritten(spec, batch, rows, lasts)
        else:
            rows_between = _folded(spec, batch, rows, numbers, lasts)
    lines = grouped.lines
    runs: list[Run] = []
    for bucket, first, stop in grouped.buckets:
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


class _Grouped(NamedTuple):
    """Of each row its group; groups are in order of (bucket, hash, key)."""

    groups: Int32s
    lines: Int32s
    """Of each group in order, its first row."""
    places: Int32s
    """Of each group, where it stands in order."""
    buckets: list[BucketPart]
    is_mixed: bool
    """Whether a group has rows of different cursors."""

    def place_rows(self, ts: Int64s, seq: Int64s) -> tuple[Int32s, Int32s]:
        """Rows by group and cursor, and where each group's start."""
        count = len(self.lines)
        placed, starts = np.empty(len(ts), np.int32), np.empty(count + 1, np.int32)
        counts = np.bincount(self.groups, minlength=count).astype(np.int32)
        order = self.groups[self.lines]
        place_rows(order, counts, self.groups, np.empty(count, np.int32), starts, placed)
        if self.is_mixed:
            sort_cursors(placed, starts, ts, seq, np.empty(len(ts), np.int32))
        return placed, starts

    def number_identities(self, ts: Int64s, seq: Int64s) -> tuple[Int32s, Int32s, Int32s]:
        """Of each row its identity, of each identity the last row, and where each group's identities start."""
        count = len(self.lines)
        numbers = np.empty(len(ts), np.int32)
        if not self.is_mixed:
            lasts = np.empty(count, np.int32)
            number_rows(self.places, self.groups, numbers, lasts)
            return numbers, lasts, np.arange(count + 1, dtype=np.int32)
        placed, starts = self.place_rows(ts, seq)
        lasts, identity_starts = np.empty(len(ts), np.int32), np.empty(count + 1, np.int32)
        identities = mark_identities(placed, starts, ts, seq, numbers, lasts, identity_starts)
        return numbers, lasts[:identities], identity_starts


def _group(keys: KeySource, batch: _Batch, width: int) -> _Grouped:
    """The groups of rows whose keys are the lines of `keys`."""
    ts, count = batch.ts, len(batch.ts)
    start = batch.lowest - batch.lowest % width
    length = int(ts.max()) - start
    number = length // width + 1
    bucket_bits, row_bits = (number - 1).bit_length(), (count - 1).bit_length()
    is_counted = length < LONGEST and number <= min(MOST_BUCKETS, 4 * count + 64)
    if is_counted and bucket_bits + row_bits <= MARK_BITS:
        found = _group_by(keys, batch, width, (start, bucket_bits, row_bits), MOST_STEPS)
        if found.is_whole:
            lines, places = np.empty(len(found.marks), np.int32), np.empty(len(found.marks), np.int32)
            ends = np.zeros(number, np.int64)
            found.marks.sort()
            if place_groups(
                keys.data, keys.bounds, keys.hashes, found.marks, row_bits, bucket_bits,
                found.groups, lines, places, ends,
            ):  # fmt: skip
                return _Grouped(found.groups, lines, places, _parts(start, width, ends), found.is_mixed)
    else:
        found = _group_by(keys, batch, width, (0, 0, row_bits), MOST_STEPS)
    if not found.is_whole:  # keys were chosen so that their hashes meet; numbers from sorting do not
        numbered = keys._replace(hashes=_key_numbers(keys) * SPREAD)
        found = _group_by(numbered, batch, width, (0, 0, row_bits), count)
    firsts = (found.marks & np.uint64((1 << row_bits) - 1)).astype(np.int32)
    return _Grouped(found.groups, *_order_by_comparing(keys, found.groups, firsts, ts, width), found.is_mixed)


class _Groups(NamedTuple):
    """As `_Grouped`, in no order but with marks; not whole when a row was further from its slot than it may be."""

    groups: Int32s
    marks: UInt64s
    is_mixed: bool
    is_whole: bool


def _group_by(
    keys: KeySource, batch: _Batch, width: int, marking: tuple[int, int, int], most_steps: int
) -> _Groups:
    count = len(batch.ts)
    groups, progress = np.empty(count, np.int32), np.zeros(3, np.int64)
    found, marks = np.empty(GROUP_WORDS * count, np.int64), np.empty(count, np.uint64)
    table = _empty_table(min(MOST_SLOTS, 1 << (2 * count - 1).bit_length()))
    while (
        done := group_rows(
            keys.data, keys.bounds, keys.hashes, batch.ts, batch.seq, width, *marking,
            table, most_steps, progress, groups, found, marks,
        )
    ) < count and done != CROWDED:  # fmt: skip
        number = int(progress[1])
        expected = min(number * count // int(progress[0]), count)  # if rows go on as they began
        table = _empty_table(max(1 << (2 * expected - 1).bit_length(), 2 * len(table)))
        move_groups(keys.hashes, found, number, width, table)
    return _Groups(groups, marks[: int(progress[1])], bool(progress[2]), done != CROWDED)


def _key_numbers(keys: KeySource) -> UInt64s:
    """A number for each distinct key, equal for equal keys."""
    count = len(keys.bounds) - 1
    buffers = [None, pa.py_buffer(keys.bounds), pa.py_buffer(keys.data)]
    column = pa.Array.from_buffers(pa.binary(), count, buffers)
    order = pc.sort_indices(column)
    ordered = column.take(order)
    is_new = pc.not_equal(ordered.slice(1), ordered.slice(0, count - 1)).to_numpy(zero_copy_only=False)
    numbers = np.zeros(count, np.uint64)
    numbers[order.to_numpy()[1:]] = np.cumsum(is_new, dtype=np.uint64)
    return numbers


class _Kept(local):
    """A thread's table: large enough that asking for fresh memory each time would show."""

    table: Int64s = np.empty(0, np.int64)


_kept = _Kept()


def _empty_table(slots: int) -> Int64s:
    if slots > MOST_SLOTS:
        return np.full(slots, EMPTY, np.int64)
    if len(_kept.table) < slots:
        _kept.table = np.empty(slots, np.int64)
    table = _kept.table[:slots]
    table.fill(EMPTY)
    return table


def _parts(start: int, width: int, ends: Int64s) -> list[BucketPart]:
    parts, first = [], 0
    for index in np.flatnonzero(ends).tolist():
        stop = int(ends[index])
        parts.append((start + index * width, first, stop))
        first = stop
    return parts


def _order_by_comparing(
    keys: KeySource, groups: Int32s, lines: Int32s, ts: Int64s, width: int
) -> tuple[Int32s, Int32s, list[BucketPart]]:
    """For groups that lie far apart in time, or that have one hash, by their first rows."""
    moments = ts[lines]
    buckets = moments - moments % width
    order = np.lexsort((keys.hashes[lines], buckets))
    ordered, buckets = lines[order], buckets[order]
    settle_hashes(keys.data, keys.bounds, keys.hashes, buckets, ordered)
    places = np.empty(len(ordered), np.int32)
    places[groups[ordered]] = np.arange(len(ordered), dtype=np.int32)
    ends = [*(np.flatnonzero(buckets[1:] != buckets[:-1]) + 1).tolist(), len(buckets)]
    return ordered, places, [(int(buckets[a]), a, b) for a, b in zip([0, *ends], ends, strict=False)]


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
    spec: StoreSpec, batch: _Batch, rows: pa.RecordBatch, numbers: Int32s, lasts: Int32s
) -> RowsBetween:
    states = [
        state for aggregate in spec.aggregates for state in aggregate.partial(rows, numbers, len(lasts))
    ]

    def rows_between(start: int, stop: int) -> pa.RecordBatch:
        columns = _cursor_columns(batch, lasts[start:stop])
        columns += [own_slice(state, start, stop) for state in states]
        return pa.RecordBatch.from_arrays(columns, schema=spec.rows)

    return rows_between
