"""The order of a batch's rows: by bucket, key and cursor, found by sorting one number a row.

Thread rule: pure; the loops run without the interpreter lock.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tidegate.kernels.run_merge import gather_words
from tidegate.kernels.sorting import arrange_rows, mark_rows, number_places, sort_cursors
from tidegate.storage.runs.assembling import NO_NUMBERS, KeySource
from tidegate.storage.runs.hashing import Int32s, sorted_marks
from tidegate.storage.runs.run import Int64s

LONGEST = 1 << 62
MOST_BUCKETS = 1 << 16  # that are numbered one after the other, and how far apart first and last may then be
BucketPart = tuple[int, int, int]  # a bucket that has keys, and its part of them in order, from and up to


class Identities(NamedTuple):
    """Rows in order, by identity: the number of each row's, the first row of each, and what they have in common."""

    numbers: Int32s
    firsts: Int32s
    """One more than identities: where the last one's rows end."""
    starts: Int32s
    """Where the identities of each key start, and one more."""
    ts: Int64s
    """Of each row, in order."""
    seq: Int64s


class OrderedRows(NamedTuple):
    """Rows by bucket, hash, key, ts, seq, and as they came where all that is equal."""

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
    else:  # far apart: buckets are numbered by rank
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
    """Rows by bucket and key, where each key's start, and how many rows each bucket has."""
    count = len(ts)
    marks, counts = np.empty(count, np.uint64), np.zeros(buckets, np.int64)
    row_bits = max(count - 1, 1).bit_length()
    bucket_bits = (buckets - 1).bit_length()
    mark_rows(keys.hashes, ts, width, lowest, bucket_bits, row_bits, marks, counts)
    marks = sorted_marks(marks, bucket_bits, row_bits)
    rows, starts = np.empty(count, np.int32), np.empty(count + 1, np.int32)
    found = arrange_rows(marks, row_bits, keys.data, keys.bounds, keys.hashes, rows, starts)
    return rows, starts[: found + 1], counts
