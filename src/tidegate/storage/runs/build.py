"""Build runs from incoming rows: group by bucket and key, sort by cursor, merge by kind within the batch.

Input is one record batch with the columns `key` (binary), `ts` (int64, ms), optionally `seq` (int64), for `last`
optionally `deleted` (bool), and the payload (for `fold`: the aggregates' inputs). Output has each identity once: with
`append` every row is an identity of its own, `last` keeps the last row of a batch, `fold` makes one state.

Cost: a sort of one number per row (`order_rows`), and one read of every column in that order. Rows are compared only
where a key has several, and their cursors sorted only where they do not ascend already.

`build_sorted_runs` is for callers that sorted a batch by key to read with it, and write some of the same rows back: it
neither groups nor sorts, and copies each value once.

Thread rule: pure; the loops run without the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.kernels.run_merge import count_buckets, divide_rows, first_disorder, gather_words, list_starts
from tidegate.kernels.sorting import arrange_rows, mark_rows, number_places, sort_cursors
from tidegate.storage.runs.columns import (
    NO_NUMBERS,
    Int32s,
    KeySource,
    UInt64s,
    assemble,
    binary_parts,
    even_width,
    gather,
    gather_keys,
    gather_numbers,
    gather_places,
    hash_parts,
    int64_column,
    is_word,
    own_slice,
    sorted_marks,
    words,
)
from tidegate.storage.runs.run import Int64s, Run
from tidegate.storage.spec import Merge, StoreSpec

# -- order of rows -----------------------------------------------------------------------------------

LONGEST = 1 << 62
MOST_BUCKETS = 1 << 16  # that are numbered one after the other, and how far apart first and last may then be
BucketPart = tuple[int, int, int]  # a bucket with keys, and its range of them in order


class Identities(NamedTuple):
    """The identities of ordered rows: each row's identity, the first row of each, and their common values."""

    numbers: Int32s
    firsts: Int32s
    """One more than identities: where the last one's rows end."""
    starts: Int32s
    """Where the identities of each key start, and one more."""
    ts: Int64s
    """Of each row, in order."""
    seq: Int64s


class OrderedRows(NamedTuple):
    """Rows ordered by bucket, hash, key, ts, seq, then arrival."""

    rows: Int32s
    starts: Int32s
    """Where the rows of each (bucket, key) start, and one more."""
    buckets: list[BucketPart]
    ts: Int64s
    seq: Int64s
    """Cursors as rows came; no `seq` when rows are numbered as they came, or all have one."""

    def identities(self) -> Identities:
        rows, count = self.rows, len(self.rows)
        ts, seq = np.empty(count, np.int64), NO_NUMBERS
        gather_words(self.ts, rows, ts)
        if len(self.seq):
            seq = np.empty(count, np.int64)
            gather_words(self.seq, rows, seq)
        numbers, firsts = np.empty(count, np.int32), np.empty(count + 1, np.int32)
        starts = np.empty(len(self.starts), np.int32)
        found = number_places(ts, seq, self.starts, np.empty(count, np.uint8), numbers, firsts, starts)
        return Identities(numbers, firsts[: found + 1], starts, ts, seq)


def order_rows(keys: KeySource, ts: Int64s, seq: Int64s, width: int) -> OrderedRows:
    """The order of rows whose keys are the lines of `keys`; at least one."""
    lowest, highest = int(ts.min()) // width, int(ts.max()) // width
    if highest - lowest < min(MOST_BUCKETS, 4 * len(ts) + 64) and highest * width - lowest * width < LONGEST:
        numbered = _arranged(keys, ts, width, lowest * width, highest - lowest + 1)
        rows, starts, counts = numbered
        present = np.flatnonzero(counts)
        buckets = [(lowest + number) * width for number in present.tolist()]
    else:  # far apart: number buckets by rank
        own, numbers = np.unique(ts // width, return_inverse=True)
        rows, starts, counts = _arranged(keys, numbers.astype(np.int64), 1, 0, len(own))
        present = np.flatnonzero(counts)
        buckets = [int(each) * width for each in own.tolist()]
    sort_cursors(rows, starts, ts, seq, np.empty(len(ts), np.int32))
    ends = np.searchsorted(starts, np.cumsum(counts[present])).tolist()
    parts = list(zip(buckets, [0, *ends], ends, strict=False))
    return OrderedRows(rows, starts, parts, ts, seq)


def _arranged(
    keys: KeySource, ts: Int64s, width: int, lowest: int, buckets: int
) -> tuple[Int32s, Int32s, Int64s]:
    """Order rows by bucket and key; returns the order, the start of each key, and the rows per bucket."""
    count = len(ts)
    marks, counts = np.empty(count, np.uint64), np.zeros(buckets, np.int64)
    row_bits = max(count - 1, 1).bit_length()
    bucket_bits = (buckets - 1).bit_length()
    mark_rows(keys.hashes, ts, width, lowest, bucket_bits, row_bits, marks, counts)
    marks = sorted_marks(marks, bucket_bits, row_bits)
    rows, starts = np.empty(count, np.int32), np.empty(count + 1, np.int32)
    found = arrange_rows(marks, row_bits, keys.data, keys.bounds, keys.hashes, rows, starts)
    return rows, starts[: found + 1], counts


# -- rows in any order -------------------------------------------------------------------------------

LOWEST_TS = -(2**63)
RowsBetween = Callable[[int, int], pa.RecordBatch]


class FoldedRows(NamedTuple):
    """The rows of a folded batch's runs as one piece, in the order of the runs."""

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
    """Build the runs of a batch by ascending bucket; a bucket of more than `max_rows` rows gets several, disjoint ones.

    `append` numbers rows from `first_seq` on, in the order they came (None: a `seq` column does). `hashes` are
    the keys' hashes where the caller has them already. `whole` gets what was folded, for the caller's own use.
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


def _check(spec: StoreSpec, rows: pa.RecordBatch, first_seq: int | None) -> _Batch:
    """Raise for a batch that does not fit the store, naming the column."""
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
    return _Batch(key, ts, words(rows.column("seq")) if has_seq else NO_NUMBERS)


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


# -- sorted rows -------------------------------------------------------------------------------------


class SortedRows(NamedTuple):
    """Row i to write is row `order[i]` of `columns` (ts, payload) under the key `lines[i]`; `seq` is 0.

    Keys are distinct and ascend by (hash, bytes).
    """

    keys: pa.BinaryArray
    hashes: UInt64s
    columns: pa.RecordBatch
    lines: Int32s
    order: Int32s

    @property
    def nbytes(self) -> int:
        """An estimate of the bytes of the runs of these rows."""
        of_keys = (self.keys.nbytes + self.hashes.nbytes) / max(1, len(self.keys))
        of_rows = self.columns.nbytes / max(1, self.columns.num_rows)
        return int((of_keys + of_rows) * len(self.order))

    def slice(self, start: int, stop: int) -> SortedRows:
        return self._replace(lines=self.lines[start:stop], order=self.order[start:stop])


def build_sorted_runs(spec: StoreSpec, rows: SortedRows, *, max_rows: int) -> list[Run]:
    """Build the runs of sorted rows by ascending bucket; raises for unsorted rows and repeated identities."""
    _check_sorted(spec, rows)
    if not len(rows.order):
        return []
    parts, width = binary_parts(rows.keys), spec.bucket_ms
    keys = KeySource(rows.hashes, *parts, even_width(parts.bounds))
    ts = words(rows.columns.column("ts"))
    line = first_disorder(rows.hashes, *parts)
    if line < len(rows.keys):
        raise InvalidError(f"store {spec.name}: key {line} does not ascend by (hash, key)")
    lowest, highest = int(ts.min()) // width, int(ts.max()) // width
    if lowest * width < LOWEST_TS:
        raise InvalidError(
            f"store {spec.name}: ts {ts.min()} lies in a bucket that starts before 64-bit time does"
        )
    runs: list[Run] = []
    payload = [rows.columns.column(each.name) for each in spec.payload]
    for bucket, lines, order in _by_bucket(spec, rows, ts, lowest, highest):
        starts = np.empty(len(lines) + 1, np.int32)
        starts = starts[: list_starts(lines, starts) + 1]
        firsts = lines if len(starts) > len(lines) else lines[starts[:-1]]

        def rows_between(start: int, stop: int, order: Int32s = order) -> pa.RecordBatch:
            part = order[start:stop]
            cursor = [gather_numbers(ts, part), int64_column(np.zeros(len(part), np.int64))]
            mark = pa.repeat(pa.scalar(False), len(part))
            return pa.RecordBatch.from_arrays(
                [*cursor, mark, *(gather(column, part) for column in payload)], schema=spec.rows
            )

        runs += assemble(bucket, keys, firsts, starts, rows_between, max_rows)
    return runs


def _check_sorted(spec: StoreSpec, rows: SortedRows) -> None:
    if spec.merge is not Merge.LAST:
        raise InvalidError(f"store {spec.name}: sorted rows are for stores of kind last, not {spec.merge}")
    columns = {each.name: each.type for each in rows.columns.schema}
    wanted = {"ts": pa.int64(), **{each.name: each.type for each in spec.payload}}
    if columns != wanted or rows.keys.type != pa.binary() or len(rows.hashes) != len(rows.keys):
        raise InvalidError(
            f"store {spec.name}: sorted rows have {columns}, wanted are {wanted}, keys and a hash each"
        )
    if rows.keys.null_count or rows.columns.column("ts").null_count:
        raise InvalidError(f"store {spec.name}: keys and times of sorted rows cannot be null")
    if len(rows.lines) != len(rows.order) or not (
        _are_below(rows.lines, len(rows.keys)) and _are_below(rows.order, rows.columns.num_rows)
    ):
        raise InvalidError(f"store {spec.name}: sorted rows name a key and a row of those that are there")


def _are_below(numbers: Int32s, limit: int) -> bool:
    return not len(numbers) or (int(numbers.min()) >= 0 and int(numbers.max()) < limit)


def _by_bucket(
    spec: StoreSpec, rows: SortedRows, ts: Int64s, lowest: int, highest: int
) -> list[tuple[int, Int32s, Int32s]]:
    """Each bucket with its lines and rows, in order."""
    lines, order, width = rows.lines, rows.order, spec.bucket_ms
    if highest - lowest >= MOST_BUCKETS:
        return _by_distant_bucket(spec, rows, ts)
    numbers, counts = np.empty(len(order), np.int32), np.zeros(highest - lowest + 1, np.int64)
    done = count_buckets(lines, order, ts, width, lowest * width, numbers, counts)
    if done < len(order):
        raise InvalidError(f"store {spec.name}: row {done} does not ascend by (hash, key, ts)")
    present = np.flatnonzero(counts).tolist()
    if len(present) > 1:
        ends = np.cumsum(counts)
        by_lines, by_order = np.empty(len(order), np.int32), np.empty(len(order), np.int32)
        divide_rows(lines, order, numbers, ends - counts, by_lines, by_order)
        lines, order = by_lines, by_order
    found, first = [], 0
    for number in present:
        stop = first + int(counts[number])
        found.append(((lowest + number) * width, lines[first:stop], order[first:stop]))
        first = stop
    return found


def _by_distant_bucket(spec: StoreSpec, rows: SortedRows, ts: Int64s) -> list[tuple[int, Int32s, Int32s]]:
    lines, order, times = rows.lines, rows.order, ts[rows.order]
    falls = (lines[1:] < lines[:-1]) | ((lines[1:] == lines[:-1]) & (times[1:] <= times[:-1]))
    if falls.any():
        raise InvalidError(
            f"store {spec.name}: row {int(np.argmax(falls)) + 1} does not ascend by (hash, key, ts)"
        )
    buckets = times // spec.bucket_ms
    in_order = np.argsort(buckets, kind="stable")
    ordered = buckets[in_order]
    ends = [*(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), len(ordered)]
    return [
        (int(ordered[first]) * spec.bucket_ms, lines[in_order[first:stop]], order[in_order[first:stop]])
        for first, stop in zip([0, *ends], ends, strict=False)
    ]
