"""Many sorted keys against a run's sorted directory: which rows of the run belong to one of them.

Both sides ascend by hash, which is uniform. A run about as large as the keys, or smaller, is read from front to back
(`stream_run`): its hashes are first held against a bitmap of the keys' (32 bits a key, found by the hash's upper
bits, so the bitmap is read from front to back, too), and only the few that pass are looked for. In a run much larger
than the keys, each key leaps to its place (`leap_run`).

Callers prove (K2): starts never fall and count the rows; offsets never fall and end inside the bytes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import BYTES, INT32S, INT64, READ_BYTES, READ_INT32S, READ_INT64S, kernel
from tidegate.kernels.key_bytes import are_equal, int64
from tidegate.kernels.memory import load, pointer, store

BITS_A_KEY: Final = 32
BLOCK: Final = 16
BLOCKS: Final = 8
READ_UINT64S = types.Array(types.uint64, 1, "C", readonly=True)
_U3, _U7 = np.uint64(3), np.uint64(7)


@kernel(types.void(READ_UINT64S, INT64, BYTES))
def mark_hashes(hashes: Any, shift: int, bits: Any) -> None:
    """Set the bit of every hash: the one its bits from `shift` on name."""
    target, right = pointer(bits), np.uint64(shift)
    for at in range(hashes.shape[0]):
        bit = hashes[at] >> right
        byte = int64(bit >> _U3)
        store(target, byte, load(target, byte) | (1 << int64(bit & _U7)))


@register_jitable
def leap(hashes: Any, at: Any, wanted: Any) -> Any:
    """The first place from `at` on whose hash is not below `wanted`, by steps that double."""
    stop = hashes.shape[0]
    if at >= stop or hashes[at] >= wanted:
        return at
    step = int64(1)
    while at + step < stop and hashes[at + step] < wanted:
        at += step
        step += step
    low, high = at + 1, min(at + step, stop)
    while low < high:
        middle = (low + high) >> 1
        if hashes[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@register_jitable
def walk(hashes: Any, at: Any, wanted: Any) -> Any:
    """What `leap` answers, where it is mostly near: whole blocks are compared, which no branch can guess wrong."""
    stop = hashes.shape[0]
    for _ in range(BLOCKS):
        if at + BLOCK > stop:
            break
        if hashes[at + BLOCK - 1] >= wanted:
            below = int64(0)
            for place in range(BLOCK):
                below += hashes[at + place] < wanted
            return at + below
        at += BLOCK
    return leap(hashes, at, wanted)


@register_jitable
def _is_same(source: Any, bounds: Any, key: Any, other: Any, other_bounds: Any, line: Any) -> bool:
    """Whether a key and the run's key in a line are the same bytes."""
    start, stop = int64(bounds[key]), int64(bounds[key + 1])
    return are_equal(source, start, stop, other, int64(other_bounds[line]), int64(other_bounds[line + 1]))


@register_jitable
def _put_rows(
    key: Any, low: Any, high: Any, ts: Any, first_ts: Any, last_ts: Any, keys: Any, rows: Any, count: Any
) -> Any:
    """Note a key's rows inside the bounds, as far as there is room; how many were found by now."""
    for row in range(low, high):
        if first_ts <= ts[row] <= last_ts:
            if count < keys.shape[0]:
                keys[count] = key
                rows[count] = row
            count += 1
    return count


_JOIN = (
    READ_UINT64S, READ_BYTES, READ_INT32S,
    READ_UINT64S, READ_BYTES, READ_INT32S, READ_INT32S, READ_INT64S,
    INT64, INT64, INT32S, INT32S,
)  # fmt: skip


@kernel(INT64(READ_BYTES, INT64, *_JOIN))
def stream_run(
    bits: Any,
    shift: int,
    hashes: Any,
    data: Any,
    bounds: Any,
    run_hashes: Any,
    run_data: Any,
    run_bounds: Any,
    starts: Any,
    ts: Any,
    first_ts: int,
    last_ts: int,
    keys: Any,
    rows: Any,
) -> Any:
    """(key, row) of every row of the run with `first_ts` ≤ ts ≤ `last_ts` that belongs to one of the keys.

    Answers how many there are; with more than there is room for, call again. `bits` are those of `mark_hashes`.
    """
    marks, source, other, right = pointer(bits), pointer(data), pointer(run_data), np.uint64(shift)
    near, count, stop = int64(0), int64(0), hashes.shape[0]
    for line in range(run_hashes.shape[0]):
        wanted = run_hashes[line]
        bit = wanted >> right
        if (load(marks, int64(bit >> _U3)) >> int64(bit & _U7)) & 1 == 0:
            continue
        near = walk(hashes, near, wanted)
        key = near
        while key < stop and hashes[key] == wanted:
            if _is_same(source, bounds, key, other, run_bounds, line):
                low, high = int64(starts[line]), int64(starts[line + 1])
                count = _put_rows(key, low, high, ts, first_ts, last_ts, keys, rows, count)
                break
            key += 1
    return count


@kernel(INT64(*_JOIN))
def leap_run(
    hashes: Any,
    data: Any,
    bounds: Any,
    run_hashes: Any,
    run_data: Any,
    run_bounds: Any,
    starts: Any,
    ts: Any,
    first_ts: int,
    last_ts: int,
    keys: Any,
    rows: Any,
) -> Any:
    """What `stream_run` answers, for a run much larger than the keys."""
    source, other = pointer(data), pointer(run_data)
    near, count, stop = int64(0), int64(0), run_hashes.shape[0]
    for key in range(hashes.shape[0]):
        near = leap(run_hashes, near, hashes[key])
        line = near
        while line < stop and run_hashes[line] == hashes[key]:
            if _is_same(source, bounds, key, other, run_bounds, line):
                low, high = int64(starts[line]), int64(starts[line + 1])
                count = _put_rows(key, low, high, ts, first_ts, last_ts, keys, rows, count)
                break
            line += 1
    return count
