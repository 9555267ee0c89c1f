"""Stable sorts of rows by key and cursor, a radix sort of uint64 keys, and a test for evenly spaced numbers.

`sort_rows` is insertion sort for few rows and merge sort beyond; sorted rows are only read.

Rows of a batch are sorted into the order of runs (bucket, hash, key bytes, arrival) by marks. A mark is one uint64: the
bucket number in the upper bits, then as many upper bits of its hash as fit, then the row number. `radix_sort` sorts
marks by the bits that distinguish most of them, one sequential pass per digit, then fixes adjacent marks; chosen keys
whose hashes agree make it give up, and the caller sorts by comparison. `arrange_rows` sorts the rows with equal marks
above the row number. Then identities are numbered: rows of a key with one cursor (ts, seq) get one number.

Callers guarantee (K2): offsets of keys never decrease and end inside the bytes, all row arrays are equally long, groups
and starts are inside them.
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
    READ_INT32S,
    READ_INT64S,
    READ_UINT64S,
    UINT64S,
    are_equal,
    compare,
    helper,
    int64,
    keep,
    kernel,
    load,
    pointer,
    prefetch,
    store,
)

# -- comparison sort of rows -----------------------------------------------------------------------

FEW: Final = 16  # rows that are sorted by insertion


@helper
def is_key_above(keys: Any, left: Any, right: Any) -> Any:
    """Whether key `left` of `keys` (bytes, bounds) sorts after key `right`."""
    data, bounds = keys
    left_start, left_stop = int64(bounds[left]), int64(bounds[left + 1])
    right_start, right_stop = int64(bounds[right]), int64(bounds[right + 1])
    return compare(data, left_start, left_stop, data, right_start, right_stop) > 0


@helper
def _insert(rows: Any, first: Any, stop: Any, is_above: Any, keys: Any) -> None:
    for place in range(first + 1, stop):
        row = rows[place]
        hole = place
        while hole > first and is_above(keys, rows[hole - 1], row):
            rows[hole] = rows[hole - 1]
            hole -= 1
        rows[hole] = row


@helper
def _merge(rows: Any, first: Any, middle: Any, stop: Any, is_above: Any, keys: Any, scratch: Any) -> None:
    """Merge two sorted halves; on equal keys the left one comes first."""
    if not is_above(keys, rows[middle - 1], rows[middle]):
        return
    for place in range(first, middle):
        scratch[place - first] = rows[place]
    left, right, at = int64(0), middle, first
    while left < middle - first:
        if right < stop and is_above(keys, scratch[left], rows[right]):
            rows[at] = rows[right]
            right += 1
        else:
            rows[at] = scratch[left]
            left += 1
        at += 1


@helper
def sort_rows(rows: Any, first: Any, stop: Any, is_above: Any, keys: Any, scratch: Any) -> None:
    """Sort rows[first:stop]; `is_above(keys, left, right)` compares two. `scratch` has room for as many rows."""
    for block in range(first, stop, FEW):
        _insert(rows, block, min(block + FEW, stop), is_above, keys)
    width = int64(FEW)
    while width < stop - first:
        for left in range(first, stop - width, 2 * width):
            _merge(rows, left, left + width, min(left + 2 * width, stop), is_above, keys, scratch)
        width *= 2


# -- rows by bucket and key ------------------------------------------------------------------------

AHEAD: Final = 32  # rows that are asked for before they are compared
_ONE, _U0, _U63 = np.uint64(1), np.uint64(0), np.uint64(63)


@kernel(types.void(READ_UINT64S, READ_INT64S, INT64, INT64, INT64, INT64, UINT64S, INT64S))
def mark_rows(
    hashes: Any, ts: Any, width: int, lowest: int, bucket_bits: int, row_bits: int, marks: Any, counts: Any
) -> None:
    """Compute each row's mark; buckets of `width` are numbered from the one that starts at `lowest`.

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


@helper
def _is_above(keys: Any, left: Any, right: Any) -> bool:
    """Whether the key of row `left` sorts after that of row `right`; `keys` are bytes, bounds and hashes."""
    source, bounds, hashes = keys
    if hashes[left] != hashes[right]:
        return bool(hashes[left] > hashes[right])
    return bool(is_key_above((source, bounds), left, right))


@helper
def is_same_key(source: Any, bounds: Any, left: Any, right: Any) -> bool:
    """Whether two rows have one key."""
    start, stop = int64(bounds[left]), int64(bounds[left + 1])
    return are_equal(source, start, stop, source, int64(bounds[right]), int64(bounds[right + 1]))


@kernel(INT64(READ_UINT64S, INT64, READ_BYTES, READ_INT32S, READ_UINT64S, INT32S, INT32S))
def arrange_rows(
    marks: Any, row_bits: int, data: Any, bounds: Any, hashes: Any, rows: Any, starts: Any
) -> Any:
    """Order rows by ascending marks, and write where each (bucket, key) starts; returns the number of these.

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
            while at < place and is_same_key(source, bounds, rows[at], rows[at - 1]):
                at += 1
            if at < place:
                keys = (source, bounds, hashes)
                sort_rows(rows, first, place, _is_above, keys, np.empty(place - first, np.int32))
                for at in range(first + 1, place):
                    if not is_same_key(source, bounds, rows[at], rows[at - 1]):
                        starts[found] = at
                        found += 1
    starts[found] = count
    return found


@kernel(INT64(READ_INT64S, READ_INT64S, READ_INT32S, BYTES, INT32S, INT32S, INT32S))
def number_places(
    ts: Any, seq: Any, starts: Any, flags: Any, numbers: Any, firsts: Any, identity_starts: Any
) -> Any:
    """Number the identities of ordered rows in `numbers[place]`; returns their count.

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


# -- rows by group ---------------------------------------------------------------------------------


@kernel(types.void(READ_INT32S, READ_INT32S, READ_INT32S, INT32S, INT32S, INT32S))
def place_rows(order: Any, counts: Any, groups: Any, following: Any, starts: Any, rows: Any) -> None:
    """Stable counting sort: the rows of group order[0] first, then those of order[1], and so on.

    `starts` (one more than groups) says where each group's begin; `following` is room for a number a group.
    """
    filled = int64(0)
    for place in range(order.shape[0]):
        group = order[place]
        starts[place] = filled
        following[group] = filled
        filled += counts[group]
    starts[order.shape[0]] = filled
    for row in range(groups.shape[0]):
        group = groups[row]
        rows[following[group]] = row
        following[group] += 1


@helper
def _is_cursor_above(cursors: Any, left: Any, right: Any) -> bool:
    """Whether row `left` has the higher (ts, seq); without `seq` (no elements), rows are numbered as they come."""
    ts, seq = cursors
    if ts[left] != ts[right] or seq.shape[0] == 0:
        return bool(ts[left] > ts[right])
    return bool(seq[left] > seq[right])


@kernel(types.void(INT32S, READ_INT32S, READ_INT64S, READ_INT64S, INT32S))
def sort_cursors(rows: Any, starts: Any, ts: Any, seq: Any, scratch: Any) -> None:
    """Sort each group's rows by (ts, seq), keeping equal ones as they are; ascending groups are only read.

    `scratch` is as long as `rows`.
    """
    cursors = (ts, seq)
    for group in range(starts.shape[0] - 1):
        start, stop = int64(starts[group]), int64(starts[group + 1])
        place = start + 1
        while place < stop and not _is_cursor_above(cursors, rows[place - 1], rows[place]):
            place += 1
        if place < stop:
            sort_rows(rows, start, stop, _is_cursor_above, cursors, scratch)


@kernel(INT64(READ_INT32S, READ_INT32S, READ_INT64S, READ_INT64S, INT32S, INT32S, INT32S))
def mark_identities(
    rows: Any, starts: Any, ts: Any, seq: Any, numbers: Any, lasts: Any, identity_starts: Any
) -> Any:
    """Number the identities of sorted rows in `numbers[row]`, from 0 on in order; returns their count.

    `lasts` gets the last row of each identity, `identity_starts` where each group's identities begin.
    """
    found = int64(0)
    for group in range(starts.shape[0] - 1):
        identity_starts[group] = found
        start, stop = int64(starts[group]), int64(starts[group + 1])
        for place in range(start, stop):
            row = rows[place]
            if place > start:
                before = rows[place - 1]
                is_new = ts[before] != ts[row] or (seq.shape[0] > 0 and seq[before] != seq[row])
                found += is_new
            numbers[row] = found
            lasts[found] = row
        found += 1
    identity_starts[starts.shape[0] - 1] = found
    return found


# -- radix sort ------------------------------------------------------------------------------------

DIGIT_BITS: Final = 8
DIGITS: Final = 1 << DIGIT_BITS
MOST_PASSES: Final = 5  # beyond that comparing is as quick
SPARE_BITS: Final = 3  # more than are needed to number the marks: few are alike then
FARTHEST: Final = 32  # places a mark may have to move in the last pass
UNSORTED: Final = -1
_WORD: Any = np.uint64


@helper
def _settle(source: Any, count: Any) -> bool:
    """Insertion pass over nearly sorted marks; False when a mark is too far from its position."""
    for place in range(1, count):
        mark = _WORD(load(source, place))
        if _WORD(load(source, place - 1)) <= mark:
            continue
        hole = int64(place)
        while hole > 0 and _WORD(load(source, hole - 1)) > mark:
            store(source, hole, load(source, hole - 1))
            hole -= 1
        store(source, hole, int64(mark))
        if place - hole > FARTHEST:
            return False
    return True


@helper
def _by_digit(source: Any, target: Any, count: Any, shift: Any, places: Any) -> None:
    """Stable sort of marks by the digit at `shift`."""
    mask = _WORD(DIGITS - 1)
    for value in range(DIGITS):
        store(places, value, 0)
    for at in range(count):
        digit = int64((_WORD(load(source, at)) >> shift) & mask)
        store(places, digit, load(places, digit) + 1)
    filled = int64(0)
    for value in range(DIGITS):
        held = load(places, value)
        store(places, value, filled)
        filled += held
    for at in range(count):
        mark = load(source, at)
        digit = int64((_WORD(mark) >> shift) & mask)
        into = load(places, digit)
        store(places, digit, into + 1)
        store(target, into, mark)


@kernel(INT64(UINT64S, UINT64S, INT64))
def radix_sort(marks: Any, other: Any, telling_bits: int) -> int:
    """Sort `marks`, whose upper `telling_bits` tell most of them apart; 0 when they are sorted where they are, 1 when
    in `other`, `UNSORTED` when they are all in `marks` still, in some order."""
    count, passes = marks.shape[0], (telling_bits + DIGIT_BITS - 1) // DIGIT_BITS
    if passes > MOST_PASSES or count < DIGITS:
        return UNSORTED
    mine, others, room = pointer(marks), pointer(other), np.empty(DIGITS, np.int64)
    places = pointer(room)
    for number in range(passes):
        shift = _WORD(64 - DIGIT_BITS * (passes - number))
        if number & 1 == 0:
            _by_digit(mine, others, count, shift, places)
        else:
            _by_digit(others, mine, count, shift, places)
    keep(room)
    if passes & 1 == 1:
        if _settle(others, count):
            return 1
        for at in range(count):
            store(mine, at, load(others, at))
    elif _settle(mine, count):
        return 0
    return UNSORTED


# -- evenly spaced numbers -------------------------------------------------------------------------

BLOCK: Final = 2048  # numbers looked at together: without a way out, several are compared in one instruction


@helper
def _in_steps(source: Any, count: Any, step: Any) -> Any:
    for first in range(1, count, BLOCK):
        wrong = np.int64(0)
        for at in range(first, min(first + BLOCK, count)):
            wrong |= (load(source, at) - load(source, at - 1)) ^ step
        if wrong != 0:
            return False
    return True


@kernel(types.boolean(READ_INT64S, INT64))
def words_are_even(numbers: Any, step: Any) -> Any:
    """Whether each is the one before it and `step`."""
    return _in_steps(pointer(numbers), len(numbers), step)


@kernel(types.boolean(READ_INT32S, INT64))
def halves_are_even(numbers: Any, step: Any) -> Any:
    """Whether each is the one before it and `step`."""
    return _in_steps(pointer(numbers), len(numbers), step)
