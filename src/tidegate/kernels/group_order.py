"""Rows of a batch in the order of runs: by bucket, hash, key bytes, and as they came where those are equal.

A row's mark is one uint64: upper bits the number of its bucket, below them as many upper bits of its hash as there is
room for, lowest the row. Marks are sorted as numbers, which processors do very fast, and next to nothing is left to be
compared: only rows alike as far as marks tell, which are mostly rows of one key. `arrange_rows` puts these in order,
by merging where they are many, so keys that somebody chose to share a hash cost a sort of their bytes and no more.

Then identities: rows of a key with one cursor (ts, seq) get one number, ascending in the order of rows.

Callers prove (K2): offsets of keys never fall and end inside the bytes, all row arrays are equally long.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import (
    BYTES,
    INT32S,
    INT64,
    INT64S,
    READ_BYTES,
    READ_INT32S,
    READ_INT64S,
    kernel,
)
from tidegate.kernels.key_bytes import are_equal, int64
from tidegate.kernels.key_order import is_key_above, sort_rows
from tidegate.kernels.memory import load, pointer, prefetch, store

UINT64S = types.Array(types.uint64, 1, "C")
READ_UINT64S = types.Array(types.uint64, 1, "C", readonly=True)
AHEAD: Final = 32  # rows that are asked for before they are compared
_ONE, _U0, _U63 = np.uint64(1), np.uint64(0), np.uint64(63)


@kernel(types.void(READ_UINT64S, READ_INT64S, INT64, INT64, INT64, INT64, UINT64S, INT64S))
def mark_rows(
    hashes: Any, ts: Any, width: int, lowest: int, bucket_bits: int, row_bits: int, marks: Any, counts: Any
) -> None:
    """The mark of each row; buckets of `width` are numbered from the one that starts at `lowest` on.

    `counts` (zeros at first) gets the rows of each bucket.
    """
    hash_shift, index_shift = np.uint64(bucket_bits), _U63 - np.uint64(bucket_bits)
    row_mask = (_ONE << np.uint64(row_bits)) - _ONE
    start, last, index, number, held = (
        int64(1),
        int64(0),
        _U0,
        int64(0),
        int64(0),
    )  # no moment lies between these
    for row in range(ts.shape[0]):
        moment = ts[row]
        if moment < start or moment > last:
            counts[number] += held
            held = int64(0)
            number = int64(np.uint64(moment - lowest) // np.uint64(width))
            start = lowest + number * width
            last = start + min(width - 1, int64(0x7FFFFFFFFFFFFFFF) - max(start, 0))
            index = (np.uint64(number) << index_shift) << _ONE
        held += 1
        marks[row] = index | ((hashes[row] >> hash_shift) & ~row_mask) | np.uint64(row)
    counts[number] += held


@register_jitable
def _is_above(keys: Any, left: Any, right: Any) -> bool:
    """Whether the key of row `left` sorts after that of row `right`; `keys` are bytes, bounds and hashes."""
    source, bounds, hashes = keys
    if hashes[left] != hashes[right]:
        return bool(hashes[left] > hashes[right])
    return bool(is_key_above((source, bounds), left, right))


@register_jitable
def _is_same(source: Any, bounds: Any, left: Any, right: Any) -> bool:
    """Whether two rows have one key."""
    start, stop = int64(bounds[left]), int64(bounds[left + 1])
    return are_equal(source, start, stop, source, int64(bounds[right]), int64(bounds[right + 1]))


@kernel(INT64(READ_UINT64S, INT64, READ_BYTES, READ_INT32S, READ_UINT64S, INT32S, INT32S))
def arrange_rows(
    marks: Any, row_bits: int, data: Any, bounds: Any, hashes: Any, rows: Any, starts: Any
) -> Any:
    """Rows by ascending marks in order, and where those of each (bucket, key) start; answers how many of these.

    `starts` has one number more: where the last one's end.
    """
    source, bound_source = pointer(data), pointer(bounds)
    count, low_bits = marks.shape[0], np.uint64(row_bits)
    row_mask = (_ONE << low_bits) - _ONE
    for place in range(count):
        rows[place] = np.int32(marks[place] & row_mask)
    found, place, asked = int64(0), int64(0), int64(0)
    while place < count:
        starts[found] = place
        found += 1
        first = place
        place += 1
        if place < count and (marks[place] ^ marks[first]) >> low_bits == _U0:
            while asked < min(
                place + AHEAD, count
            ):  # rows lie anywhere: have them brought while others are compared
                prefetch(bound_source, int64(rows[asked]))
                nearer = max(asked - AHEAD // 2, 0)
                prefetch(source, int64(bounds[rows[nearer]]))
                asked += 1
            while place < count and (marks[place] ^ marks[first]) >> low_bits == _U0:
                place += 1
            at = first + 1
            while at < place and _is_same(source, bounds, rows[at], rows[at - 1]):
                at += 1
            if at < place:
                keys = (source, bounds, hashes)
                sort_rows(rows, first, place, _is_above, keys, np.empty(place - first, np.int32))
                for at in range(first + 1, place):
                    if not _is_same(source, bounds, rows[at], rows[at - 1]):
                        starts[found] = at
                        found += 1
    starts[found] = count
    return found


@kernel(INT64(READ_INT64S, READ_INT64S, READ_INT32S, BYTES, INT32S, INT32S, INT32S))
def number_places(
    ts: Any, seq: Any, starts: Any, flags: Any, numbers: Any, firsts: Any, identity_starts: Any
) -> Any:
    """Number the identities of rows that are in order: `numbers[place]`; answers how many there are.

    `ts` and `seq` (no elements: all are one) are in that order too. `firsts` gets the first place of each identity and
    one more, where the last one's end; `identity_starts` where the identities of each key begin, and one more. `flags`
    is room for a byte a place.
    """
    count, marks, moments = ts.shape[0], pointer(flags), pointer(ts)
    for place in range(1, count):
        store(marks, place, load(moments, place) != load(moments, place - 1))
    if seq.shape[0] > 0:
        for place in range(1, count):
            flags[place] |= seq[place] != seq[place - 1]
    for key in range(starts.shape[0] - 1):
        flags[starts[key]] = 1
    found = int64(0)
    for place in range(count):
        firsts[found] = place
        found += flags[place]
        numbers[place] = found - 1
    firsts[found] = count
    for key in range(starts.shape[0] - 1):
        identity_starts[key] = numbers[starts[key]]
    identity_starts[starts.shape[0] - 1] = found
    return found
