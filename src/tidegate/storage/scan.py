"""Scan every key's rows, bucket by bucket, in batches of bounded size.

A scan reads one snapshot: all its buckets are captured, and their packs pinned, when it is created. Rows are ordered by
bucket, then (hash, key, ts, seq), and merged by kind. A bucket too large for one batch is split between keys (all runs
at the same hash), and a key too large by itself is split by time; a bucket of one run is split anywhere. Each bucket is
released after it was read, so a scan keeps alive at most the runs that were hot when it began, one batch, and one
bucket's open runs.

Between two batches a scan holds its packs but no scratch permit, so a slow consumer blocks no other reader. Without the
column `key`, a bucket of one run is not split: its columns are returned without a copy.

Thread rule: one thread at a time; closing is safe from any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from types import TracebackType
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.storage.index import Bucket, RunEntry
from tidegate.storage.lookup import RunLoader
from tidegate.storage.ranges import Holding, columns_of, keyed_schema
from tidegate.storage.runs.columns import row_keys
from tidegate.storage.runs.merge import merge_bytes, merge_runs, slice_rows
from tidegate.storage.runs.run import Run
from tidegate.storage.scratch import ScratchLimiter
from tidegate.storage.spec import Merge, StoreSpec

BATCH_ROWS = 1 << 16
NO_LIMIT = 2**31 - 1


class Part(NamedTuple):
    """Keys [first, stop) of a run's directory."""

    run: Run
    first: int
    stop: int

    @property
    def rows(self) -> int:
        return int(self.run.starts[self.stop] - self.run.starts[self.first])


def scan_buckets(
    spec: StoreSpec,
    buckets: Iterator[Bucket],
    load: RunLoader,
    first_ts: int,
    last_ts: int,
    batch_rows: int,
    columns: Sequence[str],
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of these buckets inside the bounds (both inclusive), about `batch_rows` at a time."""
    schema = columns_of(keyed_schema(spec.visible), columns)
    for bucket in _brought(buckets, load, first_ts, last_ts):
        entries = _inside(bucket, first_ts, last_ts)
        cut = any(entry.min_ts < first_ts or entry.max_ts > last_ts for entry in entries)
        stored = load.all([entry for entry in entries if not entry.is_hot])
        runs = [entry.hot_run or next(stored) for entry in entries]
        for run, first, stop in _pieces(spec, runs, batch_rows, "key" in schema.names, load.scratch):
            if first < stop:
                batch, rows = _batch(schema, run, first, stop), run.rows.slice(first, stop - first)
                if cut:
                    ts = rows.column(0)
                    inside = pc.and_(pc.greater_equal(ts, first_ts), pc.less_equal(ts, last_ts))
                    batch, rows = batch.filter(inside), rows.filter(inside)
                if spec.merge is Merge.LAST and rows.column(2).true_count:
                    batch = batch.filter(pc.invert(rows.column(2)))
                if batch.num_rows:
                    yield batch


def _brought(buckets: Iterator[Bucket], load: RunLoader, first_ts: int, last_ts: int) -> Iterator[Bucket]:
    """The buckets in order; on a remote backend the packs of the next few are prefetched together."""
    while window := list(islice(buckets, load.ahead)):
        if load.ahead > 1:
            inside = [run for bucket in window for run in _inside(bucket, first_ts, last_ts)]
            load.bring(run for run in inside if not run.is_hot)
        window.reverse()
        while window:
            yield window.pop()


def _inside(bucket: Bucket, first_ts: int, last_ts: int) -> list[RunEntry]:
    return [run for run in bucket.runs if run.max_ts >= first_ts and run.min_ts <= last_ts]


def _pieces(
    spec: StoreSpec, runs: Sequence[Run], limit: int, with_keys: bool, scratch: ScratchLimiter
) -> Iterator[tuple[Run, int, int]]:
    """Yield the rows to read as (run, first row, row after the last); a single run is not copied."""
    if len(runs) == 1:
        (run,) = runs
        # Without keys nothing is copied, so no split is needed.
        step = limit if with_keys else max(1, run.row_count)
        for first in range(0, run.row_count, step):
            yield run, first, min(first + step, run.row_count)
        return
    for cut in _steps([Part(run, 0, run.key_count) for run in runs if run.row_count], limit):
        for piece in _fitting(cut, scratch.working_bytes):
            for merged in merge_runs(spec, piece, max_rows=NO_LIMIT, drop_tombstones=True, scratch=scratch):
                yield merged, 0, merged.row_count


def _fitting(cut: list[Run], most_bytes: int) -> Iterator[list[Run]]:
    """Split the runs further while merging them needs too much memory and there are several identities."""
    rows = sum(run.row_count for run in cut)
    if rows <= len(cut) or merge_bytes(cut) <= most_bytes:
        yield cut
        return
    pieces = list(_steps([Part(run, 0, run.key_count) for run in cut], max(1, rows // 2)))
    for piece in pieces:
        yield from _fitting(piece, most_bytes) if len(pieces) > 1 else [piece]


def _steps(parts: Sequence[Part], limit: int) -> Iterator[list[Run]]:
    """Split the parts at the same keys into lists of runs with at most `limit` rows together, ascending."""
    parts = [part for part in parts if part.first < part.stop]
    if not parts:
        return
    if sum(part.rows for part in parts) <= limit:
        yield [_run(part) for part in parts]
        return
    largest = max(parts, key=lambda part: part.stop - part.first)
    middle = largest.run.hashes[(largest.first + largest.stop - 1) // 2]
    for side in ("right", "left"):
        cuts = [_cut(part, middle, side) for part in parts]
        left = [Part(part.run, part.first, at) for part, at in zip(parts, cuts, strict=True)]
        right = [Part(part.run, at, part.stop) for part, at in zip(parts, cuts, strict=True)]
        if any(part.first < part.stop for part in left) and any(part.first < part.stop for part in right):
            yield from _steps(left, limit)
            yield from _steps(right, limit)
            return
    yield from _key_steps(parts, limit)


def _cut(part: Part, hashed: np.uint64, side: str) -> int:
    places = part.run.hashes[part.first : part.stop]
    return part.first + int(np.searchsorted(places, hashed, side=side))  # type: ignore[call-overload]


def _key_steps(parts: Sequence[Part], limit: int) -> Iterator[list[Run]]:
    """Split keys of one hash (almost always one key) with many rows by key, then by time."""
    ranges: dict[bytes, list[tuple[Run, int, int]]] = {}
    for part in parts:
        starts = part.run.starts[part.first : part.stop + 1].tolist()
        names = part.run.keys.slice(part.first, part.stop - part.first).to_pylist()
        for name, first, stop in zip(names, starts, starts[1:], strict=False):
            ranges.setdefault(name, []).append((part.run, first, stop))
    for name in sorted(ranges):
        yield from _time_steps(ranges.pop(name), limit)


def _time_steps(ranges: Sequence[tuple[Run, int, int]], limit: int) -> Iterator[list[Run]]:
    """Split rows of one key in several runs at the same ts; rows of one ts stay together."""
    ranges = [each for each in ranges if each[1] < each[2]]
    if not ranges:
        return
    largest, first, stop = max(ranges, key=lambda each: each[2] - each[1])
    middle = int(largest.ts[(first + stop - 1) // 2])
    if sum(stop - first for _, first, stop in ranges) > limit:
        for side in ("right", "left"):
            cuts = [_row_cut(run, first, stop, middle, side) for run, first, stop in ranges]
            left = [(run, first, cut) for (run, first, _), cut in zip(ranges, cuts, strict=True)]
            right = [(run, cut, stop) for (run, _, stop), cut in zip(ranges, cuts, strict=True)]
            if any(a < b for _, a, b in left) and any(a < b for _, a, b in right):
                yield from _time_steps(left, limit)
                yield from _time_steps(right, limit)
                return
    yield [slice_rows(run, first, stop) for run, first, stop in ranges]


def _row_cut(run: Run, first: int, stop: int, ts: int, side: str) -> int:
    return first + int(np.searchsorted(run.ts[first:stop], ts, side=side))  # type: ignore[call-overload]


def _run(part: Part) -> Run:
    if (part.first, part.stop) == (0, part.run.key_count):
        return part.run
    return slice_rows(part.run, int(part.run.starts[part.first]), int(part.run.starts[part.stop]))


def _batch(schema: pa.Schema, run: Run, first: int, stop: int) -> pa.RecordBatch:
    columns = [
        row_keys(run.keys, run.starts, first, stop)
        if name == "key"
        else run.rows.column(name).slice(first, stop - first)
        for name in schema.names
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class RangeScan:
    """An open scan: iterate it once, and close it, preferably with `with`."""

    def __init__(self, batches: Iterator[pa.RecordBatch], holding: Holding) -> None:
        self._batches = batches
        self._holding = holding
        self._closed = False

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        if self._closed:
            raise StopIteration
        try:
            self._holding.go_on()
            return next(self._batches)
        except BaseException:  # end or error: nothing more will be read
            self.close()
            raise
        finally:
            self._holding.rest()

    def __enter__(self) -> RangeScan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release pins and scratch; idempotent."""
        if not self._closed:
            self._closed = True
            self._holding.release()
