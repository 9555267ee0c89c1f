"""Rows whose order is known already become runs: no grouping, no sorting, each value copied once.

For whoever sorted a batch by key to read with it and writes some of the same rows back. Keys come apart from rows:
different keys that ascend by (hash, bytes), and for each row to write, in order, the number of its key and where its
ts and payload lie. Stores are of kind `last`; `seq` is 0 throughout.

Thread rule: pure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.kernels.run_merge import count_buckets, divide_rows, first_disorder, list_starts
from tidegate.storage.runs.assembling import (
    KeySource,
    assemble,
    even_width,
    gather,
    gather_numbers,
    int64_column,
    words,
)
from tidegate.storage.runs.hashing import Int32s, UInt64s, binary_parts
from tidegate.storage.runs.run import Int64s, Run
from tidegate.storage.spec import Merge, StoreSpec

LOWEST_TS = -(2**63)
MOST_BUCKETS = 1 << 16  # that are counted at once


class SortedRows(NamedTuple):
    """Row i to write is row `order[i]` of `columns` (ts, payload) under the key `lines[i]`."""

    keys: pa.BinaryArray
    hashes: UInt64s
    columns: pa.RecordBatch
    lines: Int32s
    order: Int32s

    @property
    def nbytes(self) -> int:
        """About what the runs of these rows take."""
        of_keys = (self.keys.nbytes + self.hashes.nbytes) / max(1, len(self.keys))
        of_rows = self.columns.nbytes / max(1, self.columns.num_rows)
        return int((of_keys + of_rows) * len(self.order))

    def slice(self, start: int, stop: int) -> SortedRows:
        return self._replace(lines=self.lines[start:stop], order=self.order[start:stop])


def build_sorted_runs(spec: StoreSpec, rows: SortedRows, *, max_rows: int) -> list[Run]:
    """The runs of sorted rows by ascending bucket; rows that do not ascend, or twice have one identity, are refused."""
    _check(spec, rows)
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


def _check(spec: StoreSpec, rows: SortedRows) -> None:
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
    """Each bucket with its lines and rows, in the order they have."""
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
