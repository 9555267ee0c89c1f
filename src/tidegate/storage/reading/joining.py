"""Many sorted keys joined with the runs of some buckets, in one sweep over each run's directory.

What `find_keys` answers for some thousand keys by looking each up in every run, this answers for hundreds of
thousands of keys, most of which no run has: nothing is kept for a key that was not found. Rows are copied out, so
nothing is held afterwards. Hot copies with some keys only are not asked: their stored runs have every key.

Thread rule: pure, but for `load`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.kernels.run_merge import BITS_A_KEY, leap_run, mark_hashes, stream_run
from tidegate.storage.index.entries import Bucket, RunEntry
from tidegate.storage.reading.loading import RunLoader
from tidegate.storage.runs.hashing import BinaryParts, UInt64s, binary_parts
from tidegate.storage.runs.run import Int64s, Run
from tidegate.storage.spec import Merge, StoreSpec

Int32s = npt.NDArray[np.int32]
LEAP_FROM = 16  # times as many keys in the run as asked for
FIRST_ROOM = 1 << 12


class Joined(NamedTuple):
    """Rows found: ascending by (number of the key, ts, seq), each identity once, tombstones hidden."""

    numbers: Int64s
    rows: pa.RecordBatch  # ts, seq, payload


class _Hits(NamedTuple):
    run: Run
    keys: Int32s
    rows: Int32s


class _Keys(NamedTuple):
    hashes: UInt64s
    parts: BinaryParts
    bits: npt.NDArray[np.uint8]
    shift: int


def join_buckets(
    spec: StoreSpec,
    schema: pa.Schema,
    buckets: Sequence[Bucket],
    keys: pa.BinaryArray,
    hashes: UInt64s,
    first: int,
    last: int,
    load: RunLoader,
) -> Joined:
    """The rows of these keys, which ascend by hash and come once each, with `first` ≤ ts ≤ `last`."""
    if spec.merge is Merge.FOLD:
        raise InvalidError(f"store {spec.name}: rows of a fold are merged when read; plan and load them")
    if len(hashes) != len(keys) or (len(hashes) > 1 and bool((hashes[1:] < hashes[:-1]).any())):
        raise InvalidError(f"store {spec.name}: keys to join need their hashes, and ascend by them")
    asked = _asked(keys, hashes)
    entries = [
        entry
        for bucket in buckets
        for entry in bucket.runs
        if len(keys) and entry.max_ts >= first and entry.min_ts <= last
    ]
    stored = load.all([entry for entry in entries if _whole(entry) is None])
    hits: list[_Hits] = []
    for entry in entries:
        run = _whole(entry)
        found = _join_run(asked, next(stored) if run is None else run, first, last)
        if len(found.keys):
            hits.append(found)
    return _gathered(spec, schema, hits)


def _whole(entry: RunEntry) -> Run | None:
    """The run, if all of it is in memory."""
    return entry.hot.run if entry.hot is not None and entry.hot.complete else None


def _asked(keys: pa.BinaryArray, hashes: UInt64s) -> _Keys:
    width = max(3, (BITS_A_KEY * len(hashes)).bit_length())
    bits = np.zeros(1 << (width - 3), np.uint8)
    mark_hashes(hashes, 64 - width, bits)
    return _Keys(hashes, binary_parts(keys), bits, 64 - width)


def _join_run(asked: _Keys, run: Run, first: int, last: int) -> _Hits:
    own = (run.hashes, *binary_parts(run.keys), run.starts, run.ts)
    room = FIRST_ROOM
    while True:
        keys, rows = np.empty(room, np.int32), np.empty(room, np.int32)
        if run.key_count > LEAP_FROM * len(asked.hashes):
            count = leap_run(asked.hashes, *asked.parts, *own, first, last, keys, rows)
        else:
            count = stream_run(
                asked.bits, asked.shift, asked.hashes, *asked.parts, *own, first, last, keys, rows
            )
        if count <= room:
            return _Hits(run, keys[:count], rows[:count])
        room = int(count)


def _gathered(spec: StoreSpec, schema: pa.Schema, hits: Sequence[_Hits]) -> Joined:
    """All rows that were found in order, the later run's where two have one identity (T15)."""
    if not hits:
        empty = pa.RecordBatch.from_arrays([pa.array([], each.type) for each in schema], schema=schema)
        return Joined(np.empty(0, np.int64), empty)
    numbers = np.concatenate([each.keys for each in hits])
    order = np.argsort(numbers, kind="stable")
    in_order = numbers[order]
    if (
        in_order[1:] == in_order[:-1]
    ).any():  # a key with several rows: by their cursors, the latest run's last
        ts = np.concatenate([each.run.ts[each.rows] for each in hits])
        seq = np.concatenate([each.run.seq[each.rows] for each in hits])
        order = np.lexsort((seq, ts, numbers))
        if spec.merge is Merge.LAST:
            in_order, ts, seq = numbers[order], ts[order], seq[order]
            is_last = np.ones(len(order), np.bool_)
            is_last[:-1] = (in_order[1:] != in_order[:-1]) | (ts[1:] != ts[:-1]) | (seq[1:] != seq[:-1])
            order = order[is_last]
    rows = pa.concat_batches([each.run.rows.take(pa.array(each.rows)) for each in hits])
    if spec.merge is Merge.LAST:
        deleted = rows.column("deleted")
        if deleted.true_count:
            order = order[~deleted.to_numpy(zero_copy_only=False)[order]]
    return Joined(numbers[order].astype(np.int64), rows.select(schema.names).take(pa.array(order)))
