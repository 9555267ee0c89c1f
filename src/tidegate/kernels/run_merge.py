"""Merge, join, match and split sorted runs.

Merging: the directories of several runs are concatenated, as their rows are. Line i has hash `hashes[i]`, key i of
(`data`, `bounds`) and the rows from `row_starts[i]` up to, not including, `row_starts[i + 1]`. Lines of one run ascend
by (hash, key bytes); earlier lines are from earlier runs.

Rows by bucket are (line, row) pairs: the index of a key in a sorted list of keys, and a row of the columns. Each bucket
gets a range of both lists; columns are then gathered bucket by bucket, one at a time.

`stream_run` and `leap_run` join many sorted keys with a run's directory. A run about as large as the keys, or smaller,
is read sequentially: its hashes are tested against a bitmap of the keys' hashes (32 bits per key, indexed by the hash's
upper bits), and only those that pass are searched. In a larger run each key is found by galloping search. `match_runs`
finds the rows of two runs with equal identities by a merge join that gallops in the run that is behind.

Callers guarantee (K2): starts never decrease and count the rows, offsets of keys never decrease and end inside their
bytes, requested rows and lines exist, outputs are large enough.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types

from tidegate.kernels.jit import (
    BYTES,
    INT32S,
    INT64,
    INT64S,
    READ_BYTES,
    READ_FLAGS,
    READ_INT32S,
    READ_INT64S,
    READ_UINT64S,
    UINT64S,
    are_equal,
    compare,
    copy_key,
    helper,
    int64,
    kernel,
    load,
    load_word,
    pointer,
    prefetch,
    store,
    store_word,
)
from tidegate.kernels.sorting import is_key_above, is_same_key, sort_rows

# -- keys of rows ----------------------------------------------------------------------------------


@kernel(INT64(READ_INT32S, READ_INT32S, INT64, INT64, INT64))
def count_key_bytes(bounds: Any, starts: Any, line: Any, first: Any, stop: Any) -> Any:
    """The total bytes of the keys of rows first … stop; `line` is the key of the first row."""
    ends, rows = pointer(bounds), pointer(starts)
    total: Any = np.int64(0)
    while first < stop:
        after = min(load(rows, line + 1), stop)
        total += (after - first) * (load(ends, line + 1) - load(ends, line))
        first = after
        line += 1
    return total


@kernel(INT64(READ_BYTES, READ_INT32S, READ_INT32S, INT64, INT64, INT64, BYTES, INT32S))
def spread_keys(
    data: Any, bounds: Any, starts: Any, line: Any, first: Any, stop: Any, target: Any, target_bounds: Any
) -> Any:
    """Write the keys of rows first … stop and their offsets."""
    source, ends, rows = pointer(data), pointer(bounds), pointer(starts)
    into, into_bounds = pointer(target), pointer(target_bounds)
    at: Any = np.int64(0)
    row: Any = np.int64(0)
    store(into_bounds, 0, 0)
    while first < stop:
        after = min(load(rows, line + 1), stop)
        begin = load(ends, line)
        length = load(ends, line + 1) - begin
        for _ in range(after - first):
            copy_key(into, at, source, begin, length)
            at += length
            row += 1
            store(into_bounds, row, at)
        first = after
        line += 1
    return at


# -- rows by bucket --------------------------------------------------------------------------------

AHEAD: Final = 24  # rows between the one at hand and the one whose time is fetched


@helper
def _ascends(source: Any, bounds: Any, hashes: Any, line: Any) -> bool:
    """Whether a line sorts after the previous one."""
    if hashes[line - 1] != hashes[line]:
        return bool(hashes[line - 1] < hashes[line])
    start, middle, stop = int64(bounds[line - 1]), int64(bounds[line]), int64(bounds[line + 1])
    return bool(compare(source, start, middle, source, middle, stop) < 0)


@kernel(INT64(READ_UINT64S, READ_BYTES, READ_INT32S))
def first_disorder(hashes: Any, data: Any, bounds: Any) -> Any:
    """The first line that does not ascend by (hash, key), or the number of lines."""
    source = pointer(data)
    for line in range(1, hashes.shape[0]):
        if not _ascends(source, bounds, hashes, line):
            return int64(line)
    return int64(hashes.shape[0])


@kernel(INT64(READ_INT32S, READ_INT32S, READ_INT64S, INT64, INT64, INT32S, INT64S))
def count_buckets(lines: Any, order: Any, ts: Any, width: int, lowest: int, buckets: Any, counts: Any) -> Any:
    """The number of each row's bucket, from the one that starts at `lowest` on, and how many rows each gets.

    `counts` is zeroed. Returns the first row that does not ascend by (line, ts), or the number of rows.
    """
    times = pointer(ts)
    before, time_before = int64(-1), int64(0)
    for at in range(order.shape[0]):
        if at + AHEAD < order.shape[0]:
            prefetch(times, int64(order[at + AHEAD]))
        line, time = int64(lines[at]), ts[order[at]]
        if line < before or (line == before and time <= time_before):
            return int64(at)
        before, time_before = line, time
        bucket = int64(np.uint64(time - lowest) // np.uint64(width))
        buckets[at] = bucket
        counts[bucket] += 1
    return int64(order.shape[0])


@kernel(types.void(READ_INT32S, READ_INT32S, READ_INT32S, INT64S, INT32S, INT32S))
def divide_rows(lines: Any, order: Any, buckets: Any, places: Any, into_lines: Any, into_order: Any) -> None:
    """Group the pairs by bucket; `places` has the start of each bucket's pairs."""
    for at in range(order.shape[0]):
        bucket = buckets[at]
        place = places[bucket]
        places[bucket] = place + 1
        into_lines[place] = lines[at]
        into_order[place] = order[at]


@kernel(INT64(READ_INT32S, INT32S))
def list_starts(lines: Any, starts: Any) -> Any:
    """Write the start of each line's rows among grouped lines, and their end; returns the number of lines."""
    found, before = int64(0), int64(-1)
    for at in range(lines.shape[0]):
        line = int64(lines[at])
        starts[found] = at  # overwritten by the next unless a line begins here
        found += line != before
        before = line
    starts[found] = lines.shape[0]
    return found


# -- merging ---------------------------------------------------------------------------------------

INT64_PAIR = types.UniTuple(types.int64, 2)


@helper
def _merge(
    hashes: Any, order: Any, start: Any, middle: Any, stop: Any, merged_hashes: Any, merged_order: Any
) -> None:
    """Merge two adjacent ranges by hash; on equal hashes the left one comes first."""
    left, right = start, middle
    for at in range(start, stop):
        # branchless: which side is next is unpredictable, and mispredicted branches are costly
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
    """Order all lines by (hash, run); `run_starts` has the start of each run's lines, and their end.

    Adjacent runs are merged in pairs, from one pair of arrays into the other, until one is left. Returns which pair
    holds it: 0 for `order`, 1 for `other_order`. All four and `run_starts` are overwritten.
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


@kernel(types.void(INT32S, READ_UINT64S, READ_BYTES, READ_INT32S, BYTES))
def settle_keys(order: Any, sorted_hashes: Any, data: Any, bounds: Any, repeats: Any) -> None:
    """Sort lines ordered by hash also by key bytes where keys with one hash differ; those of one key stay by run.

    `repeats[place]` becomes 1 where the line has the key of the line before it, else 0.
    """
    source = pointer(data)
    start, differ = 0, False
    for place in range(order.shape[0] + 1):
        if 0 < place < order.shape[0] and sorted_hashes[place] == sorted_hashes[place - 1]:
            is_same = is_same_key(source, bounds, order[place - 1], order[place])
            repeats[place] = is_same
            differ = differ or not is_same
            continue
        if differ:
            keys, scratch = (source, bounds), np.empty(place - start, np.int32)
            sort_rows(order, start, place, is_key_above, keys, scratch)
            for other in range(start + 1, place):
                repeats[other] = is_same_key(source, bounds, order[other - 1], order[other])
        start, differ = place, False
        if place < order.shape[0]:
            repeats[place] = 0


@kernel(INT64(READ_INT32S, READ_BYTES, READ_INT32S, INT32S, INT32S, INT32S))
def join_lines(order: Any, repeats: Any, row_starts: Any, lines: Any, starts: Any, rows: Any) -> Any:
    """Concatenate the rows of the ordered lines, joining lines of one key; returns the number of keys.

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
    """Remove the rows marked in `is_dropped`, and keys left without rows; returns the remaining rows and keys."""
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
    """Write the rows of these lines, concatenated."""
    filled = int64(0)
    for place in range(lines.shape[0]):
        line = lines[place]
        for row in range(row_starts[line], row_starts[line + 1]):
            rows[filled] = row
            filled += 1


@kernel(INT64(READ_INT32S, READ_INT32S, INT32S))
def measure_keys(lines: Any, bounds: Any, out_bounds: Any) -> Any:
    """Write the offsets of these lines' concatenated keys; returns their total bytes."""
    filled = int64(0)
    out_bounds[0] = 0
    for place in range(lines.shape[0]):
        line = lines[place]
        filled += int64(bounds[line + 1]) - int64(bounds[line])
        out_bounds[place + 1] = filled
    return filled


@kernel(types.void(READ_INT32S, READ_BYTES, READ_INT32S, READ_INT32S, BYTES))
def copy_keys(lines: Any, data: Any, bounds: Any, out_bounds: Any, out_data: Any) -> None:
    """Write the keys of these lines at the offsets from `measure_keys`."""
    source, target = pointer(data), pointer(out_data)
    for place in range(lines.shape[0]):
        line = lines[place]
        start = int64(bounds[line])
        copy_key(target, int64(out_bounds[place]), source, start, int64(bounds[line + 1]) - start)


@kernel(types.void(READ_INT32S, READ_BYTES, INT64, INT64, BYTES))
def copy_even_keys(lines: Any, data: Any, first: int, width: int, out_data: Any) -> None:
    """`copy_keys` for keys of one width, 8 to 16 bytes; the key of line 0 is at `first`."""
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


# -- sorted keys against a run ---------------------------------------------------------------------

BITS_A_KEY: Final = 32
BLOCK: Final = 16
BLOCKS: Final = 8
_U3, _U7 = np.uint64(3), np.uint64(7)


@kernel(types.void(READ_UINT64S, INT64, BYTES))
def mark_hashes(hashes: Any, shift: int, bits: Any) -> None:
    """Set the bitmap bit of every hash, indexed by its bits from `shift` on."""
    target, right = pointer(bits), np.uint64(shift)
    for at in range(hashes.shape[0]):
        bit = hashes[at] >> right
        byte = int64(bit >> _U3)
        store(target, byte, load(target, byte) | (1 << int64(bit & _U7)))


@helper
def leap(hashes: Any, at: Any, wanted: Any) -> Any:
    """Galloping search: the first index from `at` on whose hash is not below `wanted`."""
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


@helper
def walk(hashes: Any, at: Any, wanted: Any) -> Any:
    """`leap` for mostly near targets: compares whole blocks without branches."""
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


@helper
def _is_same(source: Any, bounds: Any, key: Any, other: Any, other_bounds: Any, line: Any) -> bool:
    """Whether a key and the run's key in a line are the same bytes."""
    start, stop = int64(bounds[key]), int64(bounds[key + 1])
    return are_equal(source, start, stop, other, int64(other_bounds[line]), int64(other_bounds[line + 1]))


@helper
def _put_rows(
    key: Any, low: Any, high: Any, ts: Any, first_ts: Any, last_ts: Any, keys: Any, rows: Any, count: Any
) -> Any:
    """Append a key's rows inside the bounds, up to the capacity; returns the count so far."""
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
    """Write (key, row) of every row of the run with `first_ts` ≤ ts ≤ `last_ts` that belongs to one of the keys.

    Returns their count; if it exceeds the capacity, call again. `bits` is the bitmap of `mark_hashes`.
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
    """`stream_run` for a run much larger than the keys."""
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


# -- identities of two runs ------------------------------------------------------------------------


@kernel(
    INT64(
        READ_UINT64S, READ_BYTES, READ_INT32S, READ_INT32S, READ_INT64S, READ_INT64S,
        READ_UINT64S, READ_BYTES, READ_INT32S, READ_INT32S, READ_INT64S, READ_INT64S,
        INT32S, INT32S,
    )
)  # fmt: skip
def match_runs(
    hashes: Any,
    data: Any,
    bounds: Any,
    starts: Any,
    ts: Any,
    seq: Any,
    other_hashes: Any,
    other_data: Any,
    other_bounds: Any,
    other_starts: Any,
    other_ts: Any,
    other_seq: Any,
    rows: Any,
    other_rows: Any,
) -> Any:
    """Write the pairs of rows with equal identity, ascending; returns their count, at most the smaller run's rows."""
    source, other_source = pointer(data), pointer(other_data)
    found, line, other = int64(0), int64(0), int64(0)
    lines, other_lines = hashes.shape[0], other_hashes.shape[0]
    while line < lines and other < other_lines:
        if hashes[line] < other_hashes[other]:
            line = leap(hashes, line, other_hashes[other])
            continue
        if other_hashes[other] < hashes[line]:
            other = leap(other_hashes, other, hashes[line])
            continue
        order = compare(
            source, int64(bounds[line]), int64(bounds[line + 1]),
            other_source, int64(other_bounds[other]), int64(other_bounds[other + 1]),
        )  # fmt: skip
        if order < 0:
            line += 1
            continue
        if order > 0:
            other += 1
            continue
        at, stop = int64(starts[line]), int64(starts[line + 1])
        place, last = int64(other_starts[other]), int64(other_starts[other + 1])
        while at < stop and place < last:
            if ts[at] < other_ts[place] or (ts[at] == other_ts[place] and seq[at] < other_seq[place]):
                at += 1
            elif ts[at] > other_ts[place] or seq[at] > other_seq[place]:
                place += 1
            else:
                rows[found] = at
                other_rows[found] = place
                found += 1
                at += 1
                place += 1
        line += 1
        other += 1
    return found
