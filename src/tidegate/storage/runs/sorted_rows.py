"""Rows that are sorted already become runs: no grouping, no sorting, each column gathered once.

For whoever sorted a batch by key to read with it and writes some of the same rows back. What comes in has columns
`key`, `ts` and the payload of a `last` store and ascends by (hash, key, ts); `seq` is 0 throughout.

Thread rule: pure.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.kernels.run_join import number_keys
from tidegate.storage.runs.assembling import (
    KeySource,
    assemble,
    gather,
    gather_numbers,
    int64_column,
    words,
)
from tidegate.storage.runs.hashing import Int32s, UInt64s, binary_parts
from tidegate.storage.runs.run import Int64s, Run
from tidegate.storage.spec import Merge, StoreSpec


def build_sorted_runs(spec: StoreSpec, rows: pa.RecordBatch, hashes: UInt64s, *, max_rows: int) -> list[Run]:
    """The runs of sorted rows by ascending bucket; rows that do not ascend, or twice have one identity, are refused."""
    if spec.merge is not Merge.LAST:
        raise InvalidError(f"store {spec.name}: sorted rows are for stores of kind last, not {spec.merge}")
    columns = {each.name: each.type for each in rows.schema}
    wanted = {"key": pa.binary(), "ts": pa.int64(), **{each.name: each.type for each in spec.payload}}
    if columns != wanted or len(hashes) != rows.num_rows:
        raise InvalidError(
            f"store {spec.name}: sorted rows have {columns}, wanted are {wanted} and a hash each"
        )
    if any(column.null_count for column in (rows.column("key"), rows.column("ts"))):
        raise InvalidError(f"store {spec.name}: keys and times of sorted rows cannot be null")
    if not rows.num_rows:
        return []
    parts, ts = binary_parts(rows.column("key")), words(rows.column("ts"))
    numbers = np.empty(len(ts), np.int32)
    count = number_keys(hashes, *parts, ts, numbers)
    if count < 0:
        raise InvalidError(f"store {spec.name}: row {-count - 1} does not ascend by (hash, key, ts)")
    payload = [rows.column(each.name) for each in spec.payload]
    source, runs = KeySource(hashes, *parts), []
    for bucket, chosen in _by_bucket(ts, spec.bucket_ms):
        own = numbers[chosen]
        firsts = np.ones(len(own), np.bool_)
        firsts[1:] = own[1:] != own[:-1]
        starts = np.append(np.flatnonzero(firsts), len(own)).astype(np.int32)

        def rows_between(start: int, stop: int, chosen: Int32s = chosen) -> pa.RecordBatch:
            part = chosen[start:stop]
            cursor = [gather_numbers(ts, part), int64_column(np.zeros(len(part), np.int64))]
            mark = pa.repeat(pa.scalar(False), len(part))
            return pa.RecordBatch.from_arrays(
                [*cursor, mark, *(gather(column, part) for column in payload)], schema=spec.rows
            )

        runs += assemble(bucket, source, chosen[starts[:-1]], starts, rows_between, max_rows)
    return runs


def _by_bucket(ts: Int64s, width: int) -> Iterator[tuple[int, Int32s]]:
    """Each bucket with its rows, in the order they have."""
    buckets = ts // width
    order = np.arange(len(ts), dtype=np.int32)
    if buckets.min() == buckets.max():
        yield int(buckets[0]) * width, order
        return
    buckets -= buckets.min()
    lowest = int(ts.min()) // width
    narrow = buckets.astype(np.uint16) if buckets.max() < 1 << 16 else buckets  # few numbers sort by counting
    order = np.argsort(narrow, kind="stable").astype(np.int32)
    ordered = buckets[order]
    ends = [*(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), len(ordered)]
    for first, stop in zip([0, *ends], ends, strict=False):
        yield (int(ordered[first]) + lowest) * width, order[first:stop]
