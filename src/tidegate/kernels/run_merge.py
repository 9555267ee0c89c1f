"""Directories of runs merged, chosen from and expanded to rows.

The directories of several runs stand behind each other, as their rows do: line i of all has hash `hashes[i]`,
key i of (`data`, `bounds`) and the rows `row_starts[i]` up to, not including, `row_starts[i + 1]`. Lines of one
run ascend by (hash, key bytes); earlier lines came from earlier runs.

Callers prove (K2): row starts never fall and count the rows, offsets of keys never fall and end inside the bytes.
"""

from __future__ import annotations

from typing import Any

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
from tidegate.kernels.group_order import READ_UINT64S, UINT64S
from tidegate.kernels.key_bytes import are_equal, copy_key, int64, load_word, store_word
from tidegate.kernels.key_order import is_key_above, sort_rows
from tidegate.kernels.memory import pointer

INT64_PAIR = types.UniTuple(types.int64, 2)
READ_FLAGS = types.Array(types.boolean, 1, "C", readonly=True)


@register_jitable
def _merge(
    hashes: Any, order: Any, start: Any, middle: Any, stop: Any, merged_hashes: Any, merged_order: Any
) -> None:
    """Merge two neighbours by hash, the left one first where hashes are equal."""
    left, right = start, middle
    for at in range(start, stop):
        # which side is next is a coin toss; chosen without a jump, it costs nothing to guess wrong
        if left < middle and right < stop:
            left_hash, right_hash = hashes[left], hashes[right]
            is_right = right_hash < left_hash
            merged_hashes[at] = right_hash if is_right else left_hash
            merged_order[at] = order[right] if is_right else order[left]
            right += is_right
            left += 1 - is_right
        elif left < middle:
            merged_hashes[at], merged_order[at] = hashes[left], order[left]
            left += 1
        else:
            merged_hashes[at], merged_order[at] = hashes[right], order[right]
            right += 1


@kernel(INT64(UINT64S, INT32S, INT64S, UINT64S, INT32S))
def merge_lines(hashes: Any, order: Any, run_starts: Any, other_hashes: Any, other_order: Any) -> int:
    """All lines in order of (hash, run); `run_starts` says where each run's lines start, and their end.

    Neighbours are merged in pairs, from one pair of arrays into the other, until one is left. Answers which pair
    holds it: 0 for `order`, 1 for `other_order`. All four and `run_starts` are used up.
    """
    for line in range(order.shape[0]):
        order[line] = line
    runs, turn = run_starts.shape[0] - 1, 0
    while runs > 1:
        merged = 0
        for run in range(0, runs, 2):
            start = run_starts[run]
            middle = run_starts[run + 1]
            stop = run_starts[run + 2] if run + 1 < runs else middle
            if turn == 0:
                _merge(hashes, order, start, middle, stop, other_hashes, other_order)
            else:
                _merge(other_hashes, other_order, start, middle, stop, hashes, order)
            run_starts[merged] = start
            merged += 1
        run_starts[merged] = run_starts[runs]
        runs, turn = merged, 1 - turn
    return turn


@register_jitable
def _same_keys(data: Any, bounds: Any, left: Any, right: Any) -> Any:
    left_start, left_stop = int64(bounds[left]), int64(bounds[left + 1])
    right_start, right_stop = int64(bounds[right]), int64(bounds[right + 1])
    return are_equal(data, left_start, left_stop, data, right_start, right_stop)


@kernel(types.void(INT32S, READ_UINT64S, READ_BYTES, READ_INT32S, BYTES))
def settle_keys(order: Any, sorted_hashes: Any, data: Any, bounds: Any, repeats: Any) -> None:
    """Sort lines ordered by hash also by key bytes where keys with one hash differ; those of one key stay by run.

    `repeats[place]` becomes 1 where the line has the key of the line before it, else 0.
    """
    source = pointer(data)
    start, differ = 0, False
    for place in range(order.shape[0] + 1):
        if 0 < place < order.shape[0] and sorted_hashes[place] == sorted_hashes[place - 1]:
            is_same = _same_keys(source, bounds, order[place - 1], order[place])
            repeats[place] = is_same
            differ = differ or not is_same
            continue
        if differ:
            keys, scratch = (source, bounds), np.empty(place - start, np.int32)
            sort_rows(order, start, place, is_key_above, keys, scratch)
            for other in range(start + 1, place):
                repeats[other] = _same_keys(source, bounds, order[other - 1], order[other])
        start, differ = place, False
        if place < order.shape[0]:
            repeats[place] = 0


@kernel(INT64(READ_INT32S, READ_BYTES, READ_INT32S, INT32S, INT32S, INT32S))
def join_lines(order: Any, repeats: Any, row_starts: Any, lines: Any, starts: Any, rows: Any) -> Any:
    """Rows of the ordered lines behind each other; lines of one key are one. Answers how many keys there are.

    `lines` gets a line of each key, `starts` (one more) where its rows begin in `rows`.
    """
    keys, filled = int64(0), int64(0)
    for place in range(order.shape[0]):
        line = order[place]
        if repeats[place] == 0:
            lines[keys] = line
            starts[keys] = filled
            keys += 1
        for row in range(row_starts[line], row_starts[line + 1]):
            rows[filled] = row
            filled += 1
    starts[keys] = filled
    return keys


@kernel(INT64_PAIR(INT32S, INT32S, INT32S, INT64, READ_FLAGS))
def drop_rows(rows: Any, starts: Any, lines: Any, keys: int, is_dropped: Any) -> Any:
    """Take out the rows marked in `is_dropped`, and keys left without rows; answers the rows and keys that stay."""
    kept_rows, kept_keys, start = int64(0), int64(0), int64(starts[0])
    for key in range(keys):
        stop, before = int64(starts[key + 1]), kept_rows
        for place in range(start, stop):
            if not is_dropped[rows[place]]:
                rows[kept_rows] = rows[place]
                kept_rows += 1
        start = stop
        if kept_rows > before:
            lines[kept_keys] = lines[key]
            starts[kept_keys] = before
            kept_keys += 1
    starts[kept_keys] = kept_rows
    return kept_rows, kept_keys


@kernel(INT64_PAIR(READ_UINT64S, READ_INT32S, READ_UINT64S, INT64, INT32S, INT32S))
def choose_lines(hashes: Any, row_starts: Any, chosen: Any, is_kept: int, lines: Any, starts: Any) -> Any:
    """The lines whose hash is (`is_kept` 1) or is not (0) among the ascending `chosen`: how many, and their rows.

    `starts` (one more) gets where each one's rows will begin.
    """
    wanted, keys, filled = 0, int64(0), int64(0)
    for line in range(hashes.shape[0]):
        while wanted < chosen.shape[0] and chosen[wanted] < hashes[line]:
            wanted += 1
        is_chosen = wanted < chosen.shape[0] and chosen[wanted] == hashes[line]
        if is_chosen == (is_kept != 0):
            lines[keys] = line
            starts[keys] = filled
            filled += int64(row_starts[line + 1]) - int64(row_starts[line])
            keys += 1
    starts[keys] = filled
    return keys, filled


@kernel(types.void(READ_INT32S, READ_INT32S, INT32S))
def expand_lines(lines: Any, row_starts: Any, rows: Any) -> None:
    """The rows of these lines behind each other."""
    filled = int64(0)
    for place in range(lines.shape[0]):
        line = lines[place]
        for row in range(row_starts[line], row_starts[line + 1]):
            rows[filled] = row
            filled += 1


@kernel(INT64(READ_INT32S, READ_UINT64S, READ_INT32S, UINT64S, INT32S))
def measure_lines(lines: Any, hashes: Any, bounds: Any, out_hashes: Any, out_bounds: Any) -> Any:
    """The hashes of these lines and the offsets of their keys; answers how many bytes the keys have."""
    filled = int64(0)
    out_bounds[0] = 0
    for place in range(lines.shape[0]):
        line = lines[place]
        out_hashes[place] = hashes[line]
        filled += int64(bounds[line + 1]) - int64(bounds[line])
        out_bounds[place + 1] = filled
    return filled


@kernel(INT64(READ_INT32S, READ_INT32S, INT32S))
def measure_keys(lines: Any, bounds: Any, out_bounds: Any) -> Any:
    """The offsets of these lines' keys once they lie behind each other; answers how many bytes they have."""
    filled = int64(0)
    out_bounds[0] = 0
    for place in range(lines.shape[0]):
        line = lines[place]
        filled += int64(bounds[line + 1]) - int64(bounds[line])
        out_bounds[place + 1] = filled
    return filled


@kernel(types.void(READ_INT32S, READ_BYTES, READ_INT32S, READ_INT32S, BYTES))
def copy_keys(lines: Any, data: Any, bounds: Any, out_bounds: Any, out_data: Any) -> None:
    """The keys of these lines behind each other, where `measure_lines` put them."""
    source, target = pointer(data), pointer(out_data)
    for place in range(lines.shape[0]):
        line = lines[place]
        start = int64(bounds[line])
        copy_key(target, int64(out_bounds[place]), source, start, int64(bounds[line + 1]) - start)


@kernel(types.void(READ_INT32S, READ_BYTES, INT64, INT64, BYTES))
def copy_even_keys(lines: Any, data: Any, first: int, width: int, out_data: Any) -> None:
    """What `copy_keys` does for keys of one width, 8 to 16 bytes, of which line 0 has the one at `first`."""
    source, target = pointer(data), pointer(out_data)
    last = width - 8
    for place in range(lines.shape[0]):
        start, at = first + width * int64(lines[place]), width * place
        store_word(target, at, load_word(source, start))
        store_word(target, at + last, load_word(source, start + last))


@kernel(types.void(READ_INT64S, READ_INT32S, INT64S))
def gather_words(values: Any, rows: Any, into: Any) -> None:
    """`into[i]` = `values[rows[i]]`, for values of eight bytes."""
    for place in range(rows.shape[0]):
        into[place] = values[rows[place]]


@kernel(types.void(READ_INT32S, READ_INT32S, INT32S))
def gather_halves(values: Any, rows: Any, into: Any) -> None:
    """`into[i]` = `values[rows[i]]`, for values of four bytes."""
    for place in range(rows.shape[0]):
        into[place] = values[rows[place]]
