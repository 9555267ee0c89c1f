"""Rows of a batch grouped by (bucket, key) and put in order, without sorting the rows.

    group_rows       row → group, by an open-addressing table
    number_rows      row → place of its group, once groups are in order (`group_order.py`)
    place_rows       a stable counting sort of rows by group
    sort_cursors     rows of a group by (ts, seq), only where they are not so already
    mark_identities  rows of one (key, ts, seq) next to each other → one number for each identity

Table of `group_rows`: one int64 for each of a power of two of slots, -1 when empty, else 31 upper bits of the
hash and below them the group. A hash is believed only after the key's bytes and the bucket were compared.
A row's group starts looking at slot (hash + bucket's share) & (slots - 1); nothing is ever removed. At least
half of the slots stay empty.

A group is four int64 side by side, since the rows that meet it come from anywhere: the ts of its first row, that
row and its key's length (upper half), the key's first and last eight bytes. Only longer keys are read again.

Callers prove (K2): offsets of keys never fall and end inside the bytes, all row arrays are equally long, there is
room for as many groups as rows.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import (
    INT32S,
    INT64,
    INT64S,
    READ_BYTES,
    READ_INT32S,
    READ_INT64S,
    kernel,
)
from tidegate.kernels.key_bytes import are_equal, int64, load_word
from tidegate.kernels.memory import load, pointer, prefetch

UINT64S = types.Array(types.uint64, 1, "C")
READ_UINT64S = types.Array(types.uint64, 1, "C", readonly=True)

EMPTY: Final = -1
CROWDED: Final = -1  # an answer of `group_rows`
GROUP_WORDS: Final = 4
MOMENT: Final = 0
LINE: Final = 1
HEAD: Final = 2
TAIL: Final = 3
AHEAD: Final = 16  # rows between the one at hand and the one whose slot is fetched
NEAR: Final = 8  # and the one whose group is fetched
SMALL: Final = 16  # rows that are sorted by insertion
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_ONE, _U63 = np.uint64(1), np.uint64(63)
_UPPER = np.uint64(0x7FFFFFFF00000000)
_POSITIVE = int64(0x7FFFFFFFFFFFFFFF)
_LOWER = int64((1 << 32) - 1)


@register_jitable
def _share(bucket: Any) -> Any:
    """What a bucket adds to the hashes of its keys."""
    return np.uint64(bucket & _POSITIVE) * _SPREAD


@register_jitable
def _upper(number: Any) -> Any:
    """The upper half of a hash without its sign, in place."""
    return int64((number >> _ONE) & _UPPER)


@register_jitable
def _ends(source: Any, start: Any, stop: Any) -> Any:
    """The first and the last eight bytes of a key, which may overlap; of a shorter one its bytes and nothing."""
    if stop - start >= 8:
        return int64(load_word(source, start)), int64(load_word(source, stop - 8))
    head = int64(0)
    for at in range(start, stop):
        head = (head << 8) | load(source, at)
    return head, int64(0)


@register_jitable
def _same_middle(source: Any, start: Any, stop: Any, other: Any) -> bool:
    return are_equal(source, start, stop, source, other, other + (stop - start))


@kernel(
    INT64(
        READ_BYTES, READ_INT32S, READ_UINT64S, READ_INT64S, READ_INT64S, INT64, INT64, INT64, INT64,
        INT64S, INT64, INT64S, INT32S, INT64S, UINT64S,
    )
)  # fmt: skip
def group_rows(
    data: Any,
    bounds: Any,
    hashes: Any,
    ts: Any,
    seq: Any,
    width: int,
    lowest: int,
    bucket_bits: int,
    row_bits: int,
    table: Any,
    most_steps: int,
    progress: Any,
    groups: Any,
    found_groups: Any,
    marks: Any,
) -> Any:
    """The group of each row, numbered by first appearance; answers how many rows are done.

    Stops when half of the table is full; `progress` (rows, groups, whether any group has rows of two cursors; zeros
    at first) then says where it goes on, with a larger table that `move_groups` has filled. Marks of groups
    (`group_order.py`) have `bucket_bits` for buckets, counted from the one at `lowest`; 0: all have number 0.

    Answers `CROWDED` when a row's group is more than `most_steps` from its slot: somebody chose keys with one hash.
    All of it is then done again with other hashes.
    """
    source, slots, lines = pointer(data), pointer(table), pointer(found_groups)
    mask, limit = np.uint64(table.shape[0] - 1), table.shape[0] // 2
    row, found, mixed = progress[0], progress[1], progress[2]
    rows = groups.shape[0]
    hash_shift, index_shift = np.uint64(bucket_bits), _U63 - np.uint64(bucket_bits)
    hash_mask = ~((_ONE << np.uint64(row_bits)) - _ONE)
    index = np.uint64(0)
    bucket, last, share = int64(0), int64(-1), np.uint64(0)  # no moment lies between these
    while row < rows and found < limit:
        if row + AHEAD < rows:
            prefetch(slots, int64((hashes[row + AHEAD] + share) & mask))
            # the slot of a nearer row has come by now: fetch what it points at
            near = table[int64((hashes[row + NEAR] + share) & mask)] & _LOWER
            prefetch(lines, GROUP_WORDS * min(near, found))
        moment = ts[row]
        if moment < bucket or moment > last:
            bucket = moment - moment % width
            last = bucket + min(width - 1, _POSITIVE - max(bucket, 0))
            share = _share(bucket)
            if bucket_bits > 0:
                index = (np.uint64((bucket - lowest) // width) << index_shift) << _ONE
        start = int64(bounds[row])
        stop = int64(bounds[row + 1])
        length = stop - start
        head, tail = _ends(source, start, stop)
        number = hashes[row] + share
        upper = _upper(number)
        slot = int64(number & mask)
        steps = 0
        while True:
            entry = table[slot]
            if entry == EMPTY:
                table[slot] = upper | found
                at = GROUP_WORDS * found
                found_groups[at + MOMENT] = moment
                found_groups[at + LINE] = (length << 32) | row
                found_groups[at + HEAD] = head
                found_groups[at + TAIL] = tail
                marks[found] = index | ((hashes[row] >> hash_shift) & hash_mask) | np.uint64(row)
                groups[row] = found
                found += 1
                break
            group = entry & _LOWER
            if entry ^ group == upper:
                at = GROUP_WORDS * group
                other, first = found_groups[at + MOMENT], found_groups[at + LINE] & _LOWER
                if (
                    bucket <= other <= last
                    and found_groups[at + LINE] ^ first == length << 32
                    and found_groups[at + HEAD] == head
                    and found_groups[at + TAIL] == tail
                    and (length <= 16 or _same_middle(source, start + 8, stop - 8, int64(bounds[first]) + 8))
                ):
                    groups[row] = group
                    mixed |= other != moment
                    if seq.shape[0] > 0:
                        mixed |= seq[first] != seq[row]
                    break
            slot = (slot + 1) & int64(mask)
            steps += 1
            if steps > most_steps:
                return CROWDED
        row += 1
    progress[0], progress[1], progress[2] = row, found, mixed
    return row


@kernel(types.void(READ_UINT64S, READ_INT64S, INT64, INT64, INT64S))
def move_groups(hashes: Any, found_groups: Any, found: int, width: int, table: Any) -> None:
    """Put the first `found` groups into a larger, empty table."""
    mask = np.uint64(table.shape[0] - 1)
    for group in range(found):
        moment = found_groups[GROUP_WORDS * group + MOMENT]
        number = hashes[found_groups[GROUP_WORDS * group + LINE] & _LOWER] + _share(moment - moment % width)
        slot = int64(number & mask)
        while table[slot] != EMPTY:
            slot = (slot + 1) & int64(mask)
        table[slot] = _upper(number) | group


@kernel(types.void(READ_INT32S, READ_INT32S, INT32S, INT32S))
def number_rows(places: Any, groups: Any, numbers: Any, lasts: Any) -> None:
    """The place of each row's group, and the last row of each place."""
    for row in range(groups.shape[0]):
        place = places[groups[row]]
        numbers[row] = place
        lasts[place] = row


@kernel(types.void(READ_INT32S, READ_INT32S, READ_INT32S, INT32S, INT32S, INT32S))
def place_rows(order: Any, counts: Any, groups: Any, following: Any, starts: Any, rows: Any) -> None:
    """Put the rows of group order[0] first, those of order[1] next, each group's as they came.

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


@register_jitable
def _is_above(ts: Any, seq: Any, left: Any, right: Any) -> bool:
    """Whether row `left` has the higher cursor; without `seq` (no elements), rows are numbered as they come."""
    if ts[left] != ts[right] or seq.shape[0] == 0:
        return bool(ts[left] > ts[right])
    return bool(seq[left] > seq[right])


@register_jitable
def _insert(rows: Any, start: Any, stop: Any, ts: Any, seq: Any) -> None:
    for place in range(start + 1, stop):
        row = rows[place]
        at = place
        while at > start and _is_above(ts, seq, rows[at - 1], row):
            rows[at] = rows[at - 1]
            at -= 1
        rows[at] = row


@register_jitable
def _merge(rows: Any, start: Any, middle: Any, stop: Any, ts: Any, seq: Any, scratch: Any) -> None:
    """Merge two sorted halves, the left one first where cursors are equal."""
    if not _is_above(ts, seq, rows[middle - 1], rows[middle]):
        return
    for place in range(start, middle):
        scratch[place] = rows[place]
    left, right, at = start, middle, start
    while left < middle:
        if right < stop and _is_above(ts, seq, scratch[left], rows[right]):
            rows[at] = rows[right]
            right += 1
        else:
            rows[at] = scratch[left]
            left += 1
        at += 1


@kernel(types.void(INT32S, READ_INT32S, READ_INT64S, READ_INT64S, INT32S))
def sort_cursors(rows: Any, starts: Any, ts: Any, seq: Any, scratch: Any) -> None:
    """Sort each group's rows by (ts, seq), keeping equal ones as they are; ascending groups are only read.

    `scratch` is as long as `rows`.
    """
    for group in range(starts.shape[0] - 1):
        start, stop = int64(starts[group]), int64(starts[group + 1])
        place = start + 1
        while place < stop and not _is_above(ts, seq, rows[place - 1], rows[place]):
            place += 1
        if place >= stop:
            continue
        for block in range(start, stop, SMALL):
            _insert(rows, block, min(block + SMALL, stop), ts, seq)
        width = int64(SMALL)
        while width < stop - start:
            for left in range(start, stop - width, 2 * width):
                _merge(rows, left, left + width, min(left + 2 * width, stop), ts, seq, scratch)
            width *= 2


@kernel(INT64(READ_INT32S, READ_INT32S, READ_INT64S, READ_INT64S, INT32S, INT32S, INT32S))
def mark_identities(
    rows: Any, starts: Any, ts: Any, seq: Any, numbers: Any, lasts: Any, identity_starts: Any
) -> Any:
    """Number the identities of sorted rows: `numbers[row]`, from 0 on in order; answers how many there are.

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
