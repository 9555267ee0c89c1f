"""Merge the runs of a bucket into runs that do not overlap, by kind; select keys or rows of a run as a run.

A merge first works on the directories: lines of all runs are sorted and joined by key. Then each key's rows are taken
in order of arrival, and sorted where their cursors do not ascend. Rows of one identity are merged by kind: `append` has
none, `last` keeps the latest, `fold` merges states.

Runs overlap when their ranges of (hash, key, ts, seq) do. Runs that do not overlap are copied only with `join`.

Thread rule: pure; the loops run without the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.kernels.run_merge import (
    choose_lines,
    drop_rows,
    expand_lines,
    join_lines,
    merge_lines,
    settle_keys,
)
from tidegate.kernels.sorting import mark_identities, sort_cursors
from tidegate.storage.runs.columns import (
    Int32s,
    KeySource,
    UInt64s,
    assemble,
    binary_parts,
    gather,
    keys_between,
    list_bytes,
    make_run,
    merge_need,
    merge_needs,
    numbers_column,
    own_slice,
    window_words,
    words,
)
from tidegate.storage.runs.run import DIRECTORY, Int64s, Run
from tidegate.storage.scratch import COPIES, ScratchLimiter
from tidegate.storage.spec import Merge, StoreSpec

Identity = tuple[int, bytes, int, int]
MOST_ROWS = 2**31 - 1
DELETED = 2  # the index of the tombstone column among the rows' columns


def merge_runs(
    spec: StoreSpec,
    runs: Sequence[Run],
    *,
    max_rows: int,
    drop_tombstones: bool = False,
    join: bool = False,
    scratch: ScratchLimiter | None = None,
) -> list[Run]:
    """Merge `runs`, given in order of arrival, into runs ascending by (hash, key, ts, seq).

    Runs that overlap none of the others come back as they are, without a copy; with `join`, neighbours become
    one as long as they have at most `max_rows` rows together. Runs of more rows are cut. `drop_tombstones` is
    for merges that include the oldest run of the bucket: nothing is left then that a tombstone could hide.
    `scratch` is asked for the memory of each merge; `OverloadError` names the key and time that has most of it.
    """
    if max_rows < 1:
        raise InvalidError(f"store {spec.name}: max_rows is {max_rows}; a run needs at least one row")
    buckets = {run.bucket for run in runs}
    if len(buckets) > 1:
        raise InvalidError(f"store {spec.name}: runs of the buckets {sorted(buckets)} cannot be merged")
    merged: list[Run] = []
    for cluster in _clusters([run for run in runs if run.row_count], max_rows if join else 0):
        if len(cluster) > 1 or (drop_tombstones and _has_tombstones(spec, cluster[0])):
            if scratch is None:
                merged += _merge(spec, cluster, max_rows, drop_tombstones)
                continue
            with scratch.hold(merge_bytes(cluster), partial(_largest, spec, cluster)):
                merged += _merge(spec, cluster, max_rows, drop_tombstones)
        else:
            merged += _cut(cluster[0], max_rows)
    return merged


def merge_bytes(runs: Sequence[Run]) -> int:
    """The memory that merging the runs needs besides them."""
    lists = [merge_need(run.rows.columns) - COPIES * list_bytes(run.rows.columns) for run in runs]
    return COPIES * sum(run.nbytes for run in runs) + sum(lists)


def _largest(spec: StoreSpec, runs: Sequence[Run]) -> str:
    """The key and window with the most bytes to merge, as text."""
    run = max(runs, key=lambda each: each.nbytes)
    row = int(np.argmax(merge_needs(run.rows.columns)))
    line = int(np.searchsorted(run.starts, row, side="right")) - 1
    return f"store {spec.name}: {len(runs)} pieces of " + window_words(
        run.keys[line].as_py(), int(run.ts[row])
    )


def select_keys(run: Run, hashes: UInt64s, *, keep: bool) -> Run | None:
    """Select the rows of keys with (`keep`) or without one of these ascending hashes; None when nothing is left.

    Keys that share a hash are selected together. Returns the run itself when all of it stays, otherwise a copy.
    """
    lines, starts = np.empty(run.key_count, np.int32), np.empty(run.key_count + 1, np.int32)
    chosen_hashes = np.ascontiguousarray(hashes, np.uint64)
    keys, rows = choose_lines(run.hashes, run.starts, chosen_hashes, int(keep), lines, starts)
    if not keys:
        return None
    if keys == run.key_count:
        return run
    chosen = np.empty(rows, np.int32)
    expand_lines(lines[:keys], run.starts, chosen)
    columns = [gather(column, chosen) for column in run.rows.columns]
    kept = pa.RecordBatch.from_arrays(columns, schema=run.rows.schema)
    source = KeySource(run.hashes, *binary_parts(run.keys))
    return make_run(run.bucket, source, lines[:keys], starts[: keys + 1], kept)


def slice_rows(run: Run, start: int, stop: int) -> Run:
    """Rows `start` to `stop` of a run as a run, at least one; they share the run's memory."""
    if not 0 <= start < stop <= run.row_count:
        raise InvalidError(f"rows {start} to {stop} of a run of {run.row_count}: nothing there")
    if stop - start == run.row_count:
        return run
    low, high = keys_between(run.starts, start, stop)
    first_rows = np.maximum(run.starts[low:high] - start, 0).astype(np.int32)
    directory = run.directory.slice(low, high - low)
    columns = [directory.column(0), directory.column(1), numbers_column(pa.int32(), first_rows)]
    return Run(
        run.bucket,
        pa.RecordBatch.from_arrays(columns, schema=DIRECTORY),
        run.rows.slice(start, stop - start),
    )


def _cut(run: Run, max_rows: int) -> list[Run]:
    return [
        slice_rows(run, start, min(start + max_rows, run.row_count))
        for start in range(0, run.row_count, max_rows)
    ]


def _edges(run: Run) -> tuple[Identity, Identity]:
    """The first and the last identity of a run."""
    lowest = (int(run.hashes[0]), run.keys[0].as_py(), int(run.ts[0]), int(run.seq[0]))
    highest = (int(run.hashes[-1]), run.keys[-1].as_py(), int(run.ts[-1]), int(run.seq[-1]))
    return lowest, highest


def _clusters(runs: list[Run], joined_rows: int) -> list[list[Run]]:
    """Group overlapping runs, ascending; adjacent ones too while they have at most `joined_rows` rows.

    Inside a cluster runs stay in order of arrival.
    """
    if len(runs) < 2:
        return [[run] for run in runs]
    edges = [_edges(run) for run in runs]
    clusters: list[list[int]] = []
    highest = edges[0][1]
    rows = 0
    for number in sorted(range(len(runs)), key=lambda number: edges[number][0]):
        lowest, last = edges[number]
        rows += runs[number].row_count
        if clusters and (lowest <= highest or rows <= joined_rows):
            clusters[-1].append(number)
            highest = max(highest, last)
        else:
            clusters.append([number])
            highest, rows = last, runs[number].row_count
    return [[runs[number] for number in sorted(cluster)] for cluster in clusters]


def _has_tombstones(spec: StoreSpec, run: Run) -> bool:
    return spec.merge is Merge.LAST and run.rows.column(DELETED).true_count > 0


class _Joined(NamedTuple):
    """All lines and rows of several runs, concatenated, and their merged order."""

    keys: KeySource
    columns: list[pa.Array]
    lines: Int32s
    starts: Int32s
    rows: Int32s


def _join(runs: Sequence[Run]) -> _Joined:
    total = sum(run.row_count for run in runs)
    if total > MOST_ROWS:
        raise InvalidError(f"{len(runs)} runs have {total} rows together; merge fewer at a time")
    hashes = np.concatenate([run.hashes for run in runs])
    keys = KeySource(hashes, *binary_parts(_behind_each_other([run.keys for run in runs])))
    first_rows = np.cumsum([0, *(run.row_count for run in runs)])
    shifted = [run.starts[:-1] + np.int32(first) for run, first in zip(runs, first_rows, strict=False)]
    row_starts = np.concatenate([*shifted, first_rows[-1:].astype(np.int32)])
    order, repeats = _order_lines(keys, np.cumsum([0, *(run.key_count for run in runs)]))
    lines, starts = np.empty(len(hashes), np.int32), np.empty(len(hashes) + 1, np.int32)
    rows = np.empty(total, np.int32)
    count = join_lines(order, repeats, row_starts, lines, starts, rows)
    places = range(runs[0].rows.num_columns)
    columns = [_behind_each_other([run.rows.column(place) for run in runs]) for place in places]
    return _Joined(keys, columns, lines[:count], starts[: count + 1], rows)


def _behind_each_other(columns: list[pa.Array]) -> pa.Array:
    try:
        return pa.concat_arrays(columns)
    except pa.ArrowInvalid as error:  # offsets of 32 bits end at 2 GiB
        raise InvalidError(
            f"{len(columns)} runs are too large together ({error}); merge fewer at a time"
        ) from error


def _order_lines(keys: KeySource, run_starts: Int64s) -> tuple[Int32s, npt.NDArray[np.uint8]]:
    """Sort the lines of several directories by (hash, key, run), and flag those with the key of the previous line."""
    count = len(keys.hashes)
    orders = np.empty(count, np.int32), np.empty(count, np.int32)
    hashes = keys.hashes.copy(), np.empty(count, np.uint64)
    turn = merge_lines(hashes[0], orders[0], run_starts, hashes[1], orders[1])
    repeats = np.empty(count, np.uint8)
    settle_keys(orders[turn], hashes[turn], keys.data, keys.bounds, repeats)
    return orders[turn], repeats


def _merge(spec: StoreSpec, runs: Sequence[Run], max_rows: int, drop_tombstones: bool) -> list[Run]:
    keys, columns, lines, starts, rows = _join(runs)
    ts, seq = words(columns[0]), words(columns[1])
    scratch = np.empty(len(rows), np.int32)
    sort_cursors(rows, starts, ts, seq, scratch)
    if spec.merge is Merge.APPEND:
        return assemble(runs[0].bucket, keys, lines, starts, _taken(spec, columns, rows), max_rows)
    numbers, identity_starts = np.empty(len(rows), np.int32), np.empty(len(starts), np.int32)
    count = mark_identities(rows, starts, ts, seq, numbers, scratch, identity_starts)
    lasts, starts = scratch[:count], identity_starts
    if spec.merge is Merge.LAST:
        if drop_tombstones:
            is_deleted = columns[DELETED].to_numpy(zero_copy_only=False)
            kept, key_count = drop_rows(lasts, starts, lines, len(lines), is_deleted)
            if not kept:
                return []
            lasts, starts, lines = lasts[:kept], starts[: key_count + 1], lines[:key_count]
        rows_between = _taken(spec, columns, lasts)
    else:
        rows_between = _folded(spec, columns, numbers, lasts)
    return assemble(runs[0].bucket, keys, lines, starts, rows_between, max_rows)


def _taken(spec: StoreSpec, columns: list[pa.Array], rows: Int32s) -> Callable[[int, int], pa.RecordBatch]:
    def rows_between(start: int, stop: int) -> pa.RecordBatch:
        part = rows[start:stop]
        return pa.RecordBatch.from_arrays([gather(column, part) for column in columns], schema=spec.rows)

    return rows_between


def _folded(
    spec: StoreSpec, columns: list[pa.Array], numbers: Int32s, lasts: Int32s
) -> Callable[[int, int], pa.RecordBatch]:
    states = spec.fold(columns[2:], numbers, len(lasts))

    def rows_between(start: int, stop: int) -> pa.RecordBatch:
        part = lasts[start:stop]
        cursor = [gather(columns[0], part), gather(columns[1], part)]
        merged = [own_slice(state, start, stop) for state in states]
        return pa.RecordBatch.from_arrays([*cursor, *merged], schema=spec.rows)

    return rows_between
