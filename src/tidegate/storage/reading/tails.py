"""The last rows of each key: walk back bucket by bucket until every key has enough.

Metadata counts rows of all keys together, so it says how many buckets are needed at least, never how many
are enough. The walk starts with those, and then goes back twice as far each time for the keys still short.

Thread rule: pure, but for the loads it asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from tidegate.kernels.run_order import PATCH
from tidegate.storage.index.bucket_index import BucketIndex
from tidegate.storage.index.entries import Bucket
from tidegate.storage.reading.loading import RunLoader
from tidegate.storage.reading.lookup import Found, Int32s, find_keys, span_of
from tidegate.storage.reading.plan import EARLIEST, RowsTail
from tidegate.storage.runs.hashing import UInt64s
from tidegate.storage.runs.run import Int64s, Run


def find_tails(
    index: BucketIndex,
    buckets: Sequence[Bucket],
    keys: pa.Array,
    hashes: UInt64s,
    tail: RowsTail,
    load: RunLoader,
) -> Found:
    """The last `tail.rows` rows up to `tail.end_ts` of each key, out of buckets captured together."""
    short = np.full(len(keys), tail.rows, np.int64)
    runs: list[Run | None] = []
    owners: list[Int64s] = []
    stretches: list[Int32s] = []
    for chunk in _chunks(buckets, tail):
        active = np.flatnonzero(short > 0)
        if not len(active):
            break
        asked, numbers = keys.take(pa.array(active)), hashes[active]
        pieces = list(find_keys(span_of(chunk), index.spec, asked, numbers, EARLIEST, tail.end_ts, load))
        here: list[tuple[Int64s, Int32s]] = []
        for first, found in pieces:
            members = active[first : first + len(found.key_rows)]
            here.append((_owners(members, found), _moved(found, runs)))
            short[members] -= found.key_rows
        owners[:0] = [owner for owner, _ in here]
        stretches[:0] = [stretch for _, stretch in here]
    return _assemble(runs, owners, stretches, len(keys), tail.rows)


def _chunks(buckets: Sequence[Bucket], tail: RowsTail) -> Iterator[Sequence[Bucket]]:
    """Buckets from the newest back: as many as could hold the tail of a single key, then ever more."""
    stop, covered, first = len(buckets), 0, len(buckets)
    while first and covered < tail.rows:
        first -= 1
        if buckets[first].max_ts <= tail.end_ts:
            covered += buckets[first].row_count
    while stop:
        yield buckets[first:stop]
        first, stop = max(0, first - 2 * (stop - first)), first


def _owners(members: Int64s, found: Found) -> Int64s:
    """The key number of each stretch."""
    return np.repeat(members, np.diff(found.key_ends, prepend=0))


def _moved(found: Found, runs: list[Run | None]) -> Int32s:
    """The stretches, counting lines in `runs`, to which this answer's runs are added."""
    base = len(runs)
    runs += found.runs
    runs.append(found.patch)
    moved = found.stretches.copy()
    moved[:, 0] = np.where(moved[:, 0] == PATCH, len(found.runs), moved[:, 0]) + base
    return moved


def _assemble(
    runs: list[Run | None], owners: list[Int64s], stretches: list[Int32s], keys: int, count: int
) -> Found:
    """Older chunks come first; what a key has beyond its count is cut off its front."""
    if not stretches:
        return Found(runs, np.empty((0, 3), np.int32), np.zeros(keys, np.int64), np.zeros(keys, np.int64))
    owner, stretch = np.concatenate(owners), np.concatenate(stretches)
    turns = np.argsort(owner, kind="stable")
    owner, stretch = owner[turns], stretch[turns]
    lengths = (stretch[:, 2] - stretch[:, 1]).astype(np.int64)
    totals = np.bincount(owner, weights=lengths, minlength=keys).astype(np.int64)
    before = np.cumsum(lengths) - lengths
    key_first = np.concatenate([[0], np.cumsum(totals)[:-1]])
    cut = np.clip(np.maximum(totals - count, 0)[owner] - (before - key_first[owner]), 0, lengths)
    stretch[:, 1] += cut.astype(np.int32)
    kept = cut < lengths
    ends = np.cumsum(np.bincount(owner[kept], minlength=keys)).astype(np.int64)
    return Found(runs, np.ascontiguousarray(stretch[kept]), ends, np.minimum(totals, count))
