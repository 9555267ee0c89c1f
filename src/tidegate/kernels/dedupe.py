"""Deduplication in kernels: identities as fingerprints, fingerprints in the order of runs, and the verdicts.

An identity is the pair (record key, id), both bytes. Its fingerprint is SipHash-2-4 with 128 bits of output of

    key, filled up with zeros to whole words | id, the same | length of key u32 LE | length of id, 3 bytes LE

so no two pairs are one message. It is kept as 16 bytes: the low word little-endian, then the high one.

`order_prints` puts rows in the order a run's directory has: by XXH64 of those 16 bytes; rows of one identity stay as
they came. Two passes of a radix sort by the upper 22 bits, and insertion for the rest: hashes are uniform, so there
is next to nothing left to insert.

`decide` walks groups of one identity. Times at which the identity was accepted are kept sorted; a record meets those
less than the horizon from it. All numbers are as `windows/operators/dedupe.py` has them.

Callers prove (K2): offsets of keys and ids never fall and end inside their bytes.
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
from tidegate.kernels.key_bytes import compare, int64, load_word
from tidegate.kernels.key_hash import PRINTS, READ_FLAGS, UINT64, _sip_round
from tidegate.kernels.memory import load, pointer
from tidegate.kernels.xxh64 import xxh64

PRINT_BYTES: Final = 16
NEW, REPLAY, DUPLICATE, LATE, NO_ID = 0, 1, 2, 3, 4

UINT64S = types.Array(types.uint64, 1, "C")
READ_UINT64S = types.Array(types.uint64, 1, "C", readonly=True)

DIGIT: Final = 11
_DIGITS: Final = 1 << DIGIT
_U8, _U56 = np.uint64(8), np.uint64(56)


@register_jitable
def _absorb(v0: Any, v1: Any, v2: Any, v3: Any, word: Any) -> Any:
    v3 ^= word
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    return v0 ^ word, v1, v2, v3


@register_jitable
def _absorb_bytes(v0: Any, v1: Any, v2: Any, v3: Any, source: Any, size: Any, start: Any, stop: Any) -> Any:
    """Absorb source[start:stop] word by word; `size` is how many bytes the source has."""
    while stop - start >= 8:
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, load_word(source, start))
        start += 8
    if start < stop:
        word = np.uint64(0)
        if start + 8 <= size:
            unwanted = np.uint64(64 - 8 * (stop - start))
            word = (load_word(source, start) << unwanted) >> unwanted
        else:
            for place in range(stop - start):
                word |= np.uint64(load(source, start + place)) << (np.uint64(place) * _U8)
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, word)
    return v0, v1, v2, v3


@kernel(types.void(READ_BYTES, READ_INT32S, READ_BYTES, READ_INT32S, READ_FLAGS, UINT64, UINT64, PRINTS))
def fingerprint_pairs(
    keys: Any, key_bounds: Any, ids: Any, id_bounds: Any, mask: Any, secret0: Any, secret1: Any, prints: Any
) -> None:
    """The fingerprint of each masked row's (key, id), low word first."""
    key_source, id_source = pointer(keys), pointer(ids)
    key_size, id_size = keys.shape[0], ids.shape[0]
    for row in range(mask.shape[0]):
        if not mask[row]:
            continue
        v0 = secret0 ^ np.uint64(0x736F6D6570736575)
        v1 = secret1 ^ np.uint64(0x646F72616E646F6D) ^ np.uint64(0xEE)
        v2 = secret0 ^ np.uint64(0x6C7967656E657261)
        v3 = secret1 ^ np.uint64(0x7465646279746573)
        key_start, key_stop = int64(key_bounds[row]), int64(key_bounds[row + 1])
        id_start, id_stop = int64(id_bounds[row]), int64(id_bounds[row + 1])
        v0, v1, v2, v3 = _absorb_bytes(v0, v1, v2, v3, key_source, key_size, key_start, key_stop)
        v0, v1, v2, v3 = _absorb_bytes(v0, v1, v2, v3, id_source, id_size, id_start, id_stop)
        words = ((key_stop - key_start + 7) >> 3) + ((id_stop - id_start + 7) >> 3)
        last = np.uint64(key_stop - key_start) | (np.uint64((id_stop - id_start) & 0xFFFFFF) << np.uint64(32))
        last |= np.uint64((8 * words + 7) & 0xFF) << _U56
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, last)
        v2 ^= np.uint64(0xEE)
        for _ in range(4):
            v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
        prints[row, 0] = v0 ^ v1 ^ v2 ^ v3
        v1 ^= np.uint64(0xDD)
        for _ in range(4):
            v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
        prints[row, 1] = v0 ^ v1 ^ v2 ^ v3


@register_jitable
def _scatter(shift: Any, hashes: Any, rows: Any, into_hashes: Any, into_rows: Any) -> None:
    """One pass: sorted by the digit at `shift`, rows of one digit as they were."""
    right, mask = np.uint64(shift), np.uint64(_DIGITS - 1)
    starts = np.zeros(_DIGITS, np.int64)
    for at in range(rows.shape[0]):
        starts[int64((hashes[at] >> right) & mask)] += 1
    filled = int64(0)
    for digit in range(_DIGITS):
        count = starts[digit]
        starts[digit] = filled
        filled += count
    for at in range(rows.shape[0]):
        digit = int64((hashes[at] >> right) & mask)
        place = starts[digit]
        starts[digit] = place + 1
        into_hashes[place] = hashes[at]
        into_rows[place] = rows[at]


@register_jitable
def _settle_prints(source: Any, rows: Any, first: Any, stop: Any) -> None:
    """Rows of one hash, sorted by the bytes of their fingerprints; equal ones as they came."""
    for place in range(first + 1, stop):
        row = rows[place]
        hole = place
        while hole > first:
            before = int64(rows[hole - 1])
            start, own = PRINT_BYTES * before, PRINT_BYTES * int64(row)
            if compare(source, start, start + PRINT_BYTES, source, own, own + PRINT_BYTES) <= 0:
                break
            rows[hole] = rows[hole - 1]
            hole -= 1
        rows[hole] = row


@kernel(types.void(READ_BYTES, UINT64S, INT32S, UINT64S, INT32S))
def order_prints(prints: Any, hashes: Any, rows: Any, spare_hashes: Any, spare_rows: Any) -> None:
    """Sort `rows` by (XXH64, bytes) of their fingerprints, and leave the hashes beside them in `hashes`.

    The spare arrays are as long; `prints` are the bytes of all fingerprints.
    """
    source = pointer(prints)
    count = rows.shape[0]
    for at in range(count):
        start = PRINT_BYTES * int64(rows[at])
        hashes[at] = xxh64(source, start, start + PRINT_BYTES)
    if count > 64:
        _scatter(64 - 2 * DIGIT, hashes, rows, spare_hashes, spare_rows)
        _scatter(64 - DIGIT, spare_hashes, spare_rows, hashes, rows)
    for place in range(1, count):
        value, row = hashes[place], rows[place]
        hole = place
        while hole > 0 and hashes[hole - 1] > value:
            hashes[hole] = hashes[hole - 1]
            rows[hole] = rows[hole - 1]
            hole -= 1
        hashes[hole] = value
        rows[hole] = row
    first = int64(0)
    for place in range(1, count + 1):
        if place < count and hashes[place] == hashes[first]:
            continue
        if place - first > 1:
            _settle_prints(source, rows, first, place)
        first = place


@kernel(INT64(READ_BYTES, READ_UINT64S, READ_INT32S, INT32S, UINT64S, UINT64S))
def group_prints(
    prints: Any, hashes: Any, rows: Any, starts: Any, group_hashes: Any, group_prints: Any
) -> Any:
    """Where the groups of equal fingerprints begin among sorted rows, and one more; of each its hash and the two
    words of its fingerprint. Answers how many."""
    source = pointer(prints)
    found = int64(0)
    for place in range(rows.shape[0]):
        own = PRINT_BYTES * int64(rows[place])
        low, high = load_word(source, own), load_word(source, own + 8)
        if found > 0 and group_prints[2 * found - 2] == low and group_prints[2 * found - 1] == high:
            continue
        starts[found] = place
        group_hashes[found] = hashes[place]
        group_prints[2 * found] = low
        group_prints[2 * found + 1] = high
        found += 1
    starts[found] = rows.shape[0]
    return found


@register_jitable
def _first_at(times: Any, count: Any, wanted: Any) -> Any:
    low, high = int64(0), int64(count)
    if high > 0 and times[high - 1] < wanted:  # mostly time goes on
        return high
    while low < high:
        middle = (low + high) >> 1
        if times[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@register_jitable
def _is_near(later: Any, earlier: Any, within: Any) -> Any:
    """Whether two times are less than `within` apart; their difference always fits a word without a sign."""
    return np.uint64(later) - np.uint64(earlier) < np.uint64(within)


@kernel(
    INT64(
        READ_INT32S, READ_INT32S, READ_FLAGS, READ_INT64S, READ_INT64S, READ_INT64S, READ_INT32S,
        READ_INT64S, READ_INT64S, READ_INT64S, READ_INT32S, INT64, INT64, INT64,
        INT64S, INT64S, INT32S, INT32S, BYTES, INT32S, INT32S,
    )
)  # fmt: skip
def decide(
    rows: Any,
    starts: Any,
    late: Any,
    ts: Any,
    judged: Any,
    offset: Any,
    partition: Any,
    known_starts: Any,
    known_ts: Any,
    known_offset: Any,
    known_partition: Any,
    within: int,
    retention: int,
    refresh: int,
    times: Any,
    offsets: Any,
    partitions: Any,
    origins: Any,
    verdicts: Any,
    new_groups: Any,
    new_rows: Any,
) -> Any:
    """The verdict of each row; of what is to be kept, ascending by (group, ts): the group and the row. How many.

    Group g has the rows rows[starts[g]:starts[g + 1]], in the order they came, and what is known of it from before is
    known_…[known_starts[g]:known_starts[g + 1]], ascending by ts; a refresh is known with its offset inverted. A row
    that only refreshes is kept as -row - 1. `late` says which rows are. `times`, `offsets`, `partitions`, `origins`
    are room for the largest group with all that is known of it.
    """
    kept = int64(0)
    for group in range(starts.shape[0] - 1):
        first, stop = int64(starts[group]), int64(starts[group + 1])
        if stop == first + 1 and known_starts[group] == known_starts[group + 1]:  # mostly
            row = int64(rows[first])
            if late[row]:
                verdicts[row] = LATE
            else:
                verdicts[row] = NEW
                new_groups[kept] = group
                new_rows[kept] = row
                kept += 1
            continue
        count = int64(0)
        for known in range(known_starts[group], known_starts[group + 1]):
            times[count] = known_ts[known]
            offsets[count] = known_offset[known]
            partitions[count] = known_partition[known]
            origins[count] = 0
            count += 1
        before = count
        for turn in range(first, stop):
            row = int64(rows[turn])
            time = ts[row]
            place = _first_at(times, count, time)
            same = place < count and times[place] == time
            own = same and offsets[place] == offset[row] and partitions[place] == partition[row]
            if late[row]:
                verdicts[row] = REPLAY if own and time > judged[row] - retention else LATE
                continue
            if own:
                verdicts[row] = REPLAY
                continue
            mark = int64(row + 1)
            if (place < count and _is_near(times[place], time, within)) or (
                place > 0 and _is_near(time, times[place - 1], within)
            ):
                verdicts[row] = DUPLICATE
                if refresh == 0 or same:
                    continue
                mark = -mark
            else:
                verdicts[row] = NEW
            for at in range(count, place, -1):
                times[at] = times[at - 1]
                offsets[at] = offsets[at - 1]
                partitions[at] = partitions[at - 1]
                origins[at] = origins[at - 1]
            times[place] = time
            offsets[place] = offset[row] if mark > 0 else ~offset[row]
            partitions[place] = partition[row]
            origins[place] = mark
            count += 1
        if count > before:
            for at in range(count):
                if origins[at] != 0:
                    new_groups[kept] = group
                    new_rows[kept] = origins[at] - 1 if origins[at] > 0 else origins[at]
                    kept += 1
    return kept


@kernel(
    types.void(
        READ_INT32S, READ_INT32S, READ_INT64S, READ_INT64S, READ_INT32S, READ_UINT64S, READ_UINT64S,
        INT64S, INT64S, INT32S, UINT64S, UINT64S,
    )
)  # fmt: skip
def gather_new(
    new_groups: Any,
    new_rows: Any,
    ts: Any,
    offset: Any,
    partition: Any,
    hashes: Any,
    prints: Any,
    into_ts: Any,
    into_offset: Any,
    into_partition: Any,
    into_hashes: Any,
    into_prints: Any,
) -> None:
    """The columns of what `decide` said is to be kept; a refresh has its offset inverted."""
    for at in range(new_groups.shape[0]):
        group, row = int64(new_groups[at]), int64(new_rows[at])
        if row < 0:
            row = -row - 1
            into_offset[at] = ~offset[row]
        else:
            into_offset[at] = offset[row]
        into_ts[at] = ts[row]
        into_partition[at] = partition[row]
        into_hashes[at] = hashes[group]
        into_prints[2 * at] = prints[2 * group]
        into_prints[2 * at + 1] = prints[2 * group + 1]
