"""Deduplication: fingerprints of record identities, and the decision for each record.

An identity is the pair (record key, id). Its fingerprint is SipHash-2-4 with 128 bits of output, low word first, of

    key, filled up with zeros to whole words | id, the same | length of key u32 LE | length of id, 3 bytes LE

so different pairs are different messages. A message is a chain of dependent operations; `LANES` messages are processed
side by side, which compilers vectorise. Rows are sorted into the order of a run's directory (XXH64 of the fingerprint)
through one integer each: upper bits of the hash, then the row number; `arrange_rows` orders those still equal.

`decide` walks groups of records with one identity. The times at which the identity was accepted are kept sorted; a
record is compared with those less than the horizon from it. `windows/operators/dedupe.py` defines the numbers.

Callers guarantee (K2): offsets of keys and ids never decrease and end inside their bytes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types

from tidegate.kernels.hashing import (
    _P1,
    _P2,
    _P3,
    _P4,
    _P5,
    _U27,
    _U29,
    _U33,
    PRINTS,
    UINT64,
    _round,
    absorb_word,
    begin_sip,
    finish_sip,
)
from tidegate.kernels.hashing import _rotate as _rotate_word
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
    compare,
    helper,
    int64,
    keep,
    kernel,
    load,
    load_word,
    pointer,
    prefetch,
    store,
)
from tidegate.kernels.sorting import sort_rows

# -- fingerprints ----------------------------------------------------------------------------------

PRINT_BYTES: Final = 16
LANES: Final = 32
BLOCK: Final = 512  # fingerprints that are hashed at once
MOST_WORDS: Final = 16  # of a message that takes part; longer ones are done alone
_U0, _U8, _U16, _U32, _U56 = (np.uint64(number) for number in (0, 8, 16, 32, 56))
_WORD: Any = np.uint64


@helper
def _word_at(source: Any, size: Any, start: Any, stop: Any) -> Any:
    """Up to eight bytes from `start` on, none from `stop` on; `size` is how many bytes the source has."""
    if stop - start >= 8:
        return load_word(source, start)
    if start + 8 <= size:
        unwanted = np.uint64(64 - 8 * (stop - start))
        return (load_word(source, start) << unwanted) >> unwanted
    word = _U0
    for place in range(stop - start):
        word |= np.uint64(load(source, start + place)) << (np.uint64(place) * _U8)
    return word


@helper
def _lengths(key_length: Any, id_length: Any) -> Any:
    """The last word of a message."""
    words = ((key_length + 7) >> 3) + ((id_length + 7) >> 3)
    last = np.uint64(key_length) | (np.uint64(id_length & 0xFFFFFF) << _U32)
    return last | (np.uint64((8 * words + 7) & 0xFF) << _U56)


@helper
def _alone(
    keys: Any, key_size: Any, key_start: Any, key_stop: Any,
    ids: Any, id_size: Any, id_start: Any, id_stop: Any, secret0: Any, secret1: Any,
) -> Any:  # fmt: skip
    """The fingerprint of one pair, however long."""
    v0, v1, v2, v3 = begin_sip(secret0, secret1)
    last = _lengths(key_stop - key_start, id_stop - id_start)
    while key_start < key_stop:
        v0, v1, v2, v3 = absorb_word(v0, v1, v2, v3, _word_at(keys, key_size, key_start, key_stop))
        key_start += 8
    while id_start < id_stop:
        v0, v1, v2, v3 = absorb_word(v0, v1, v2, v3, _word_at(ids, id_size, id_start, id_stop))
        id_start += 8
    v0, v1, v2, v3 = absorb_word(v0, v1, v2, v3, last)
    return finish_sip(v0, v1, v2, v3)


@helper(forceinline=True)
def hash_print(low: Any, high: Any) -> Any:
    """XXH64, seed 0, of the 16 bytes of a fingerprint."""
    digest = _P5 + _U16
    digest = _rotate_word(digest ^ _round(_U0, low), _U27) * _P1 + _P4
    digest = _rotate_word(digest ^ _round(_U0, high), _U27) * _P1 + _P4
    digest = (digest ^ (digest >> _U33)) * _P2
    digest = (digest ^ (digest >> _U29)) * _P3
    return digest ^ (digest >> _U32)


@helper(forceinline=True)
def _hash_lanes(
    words: Any, counts: Any, state: Any, least: Any, most: Any, secret0: Any, secret1: Any
) -> None:
    """Fingerprints and hashes of the messages in `words`, a message a lane, into its first three lines.

    Messages have `least` to `most` words.
    """
    v0, v1, v2, v3 = begin_sip(secret0, secret1)
    for lane in range(LANES):
        store(state, lane, int64(v0))
        store(state, LANES + lane, int64(v1))
        store(state, 2 * LANES + lane, int64(v2))
        store(state, 3 * LANES + lane, int64(v3))
    for place in range(most):
        if place < least:  # no message has ended: nothing to choose
            for lane in range(LANES):
                old0, old1 = _WORD(load(state, lane)), _WORD(load(state, LANES + lane))
                old2, old3 = _WORD(load(state, 2 * LANES + lane)), _WORD(load(state, 3 * LANES + lane))
                v0, v1, v2, v3 = absorb_word(old0, old1, old2, old3, _WORD(load(words, place * LANES + lane)))
                store(state, lane, int64(v0))
                store(state, LANES + lane, int64(v1))
                store(state, 2 * LANES + lane, int64(v2))
                store(state, 3 * LANES + lane, int64(v3))
            continue
        for lane in range(LANES):
            old0, old1 = _WORD(load(state, lane)), _WORD(load(state, LANES + lane))
            old2, old3 = _WORD(load(state, 2 * LANES + lane)), _WORD(load(state, 3 * LANES + lane))
            v0, v1, v2, v3 = absorb_word(old0, old1, old2, old3, _WORD(load(words, place * LANES + lane)))
            taken = _WORD(
                int64(place - load(counts, lane)) >> 63
            )  # no bit for a message that has ended: it stays
            store(state, lane, int64(old0 ^ ((v0 ^ old0) & taken)))
            store(state, LANES + lane, int64(old1 ^ ((v1 ^ old1) & taken)))
            store(state, 2 * LANES + lane, int64(old2 ^ ((v2 ^ old2) & taken)))
            store(state, 3 * LANES + lane, int64(old3 ^ ((v3 ^ old3) & taken)))
    for lane in range(LANES):
        v0, v1 = _WORD(load(state, lane)), _WORD(load(state, LANES + lane))
        v2, v3 = _WORD(load(state, 2 * LANES + lane)), _WORD(load(state, 3 * LANES + lane))
        low, high = finish_sip(v0, v1, v2, v3)
        store(words, lane, int64(low))
        store(words, LANES + lane, int64(high))
        store(words, 2 * LANES + lane, int64(hash_print(low, high)))


@helper
def _even_words(source: Any, size: Any, bounds: Any, first: Any, words: Any, line: Any) -> Any:
    """The words of `LANES` values of one width into the lines from `line` on; how many each has, -1 if they are not
    even or stand too near the end to be read by the word."""
    base, width = int64(bounds[first]), int64(bounds[first + 1]) - int64(bounds[first])
    differ = int64(0)
    for lane in range(LANES):
        differ |= (int64(bounds[first + lane + 1]) - int64(bounds[first + lane])) ^ width
    count = (width + 7) >> 3
    if differ != 0 or base + LANES * width + 8 > size or line + count >= MOST_WORDS:
        return -1
    for number in range(count):
        unwanted = _WORD(64 - 8 * min(8, width - 8 * number))
        for lane in range(LANES):
            word = (load_word(source, base + lane * width + 8 * number) << unwanted) >> unwanted
            store(words, (line + number) * LANES + lane, int64(word))
    return count


@kernel(
    INT64(
        READ_BYTES, READ_INT32S, READ_BYTES, READ_INT32S, READ_FLAGS, UINT64, UINT64, INT64, PRINTS, UINT64S
    )
)  # fmt: skip
def fingerprint_pairs(
    keys: Any,
    key_bounds: Any,
    ids: Any,
    id_bounds: Any,
    mask: Any,
    secret0: Any,
    secret1: Any,
    row_bits: int,
    prints: Any,
    marks: Any,
) -> Any:
    """The fingerprint of each masked row's (key, id), low word first, and a mark for it; returns how many.

    No mask at all: every row takes part. Marks have the row in their lowest `row_bits`.
    """
    key_source, id_source = pointer(keys), pointer(ids)
    key_size, id_size, rows = keys.shape[0], ids.shape[0], prints.shape[0]
    room, state_room = np.zeros(MOST_WORDS * LANES, np.uint64), np.zeros(4 * LANES, np.uint64)
    lengths = np.zeros(LANES, np.int64)
    words, state, counts = pointer(room), pointer(state_room), pointer(lengths)
    row_mask = (np.uint64(1) << np.uint64(row_bits)) - np.uint64(1)
    found = int64(0)
    for first in range(0, rows, LANES):
        have, most, least = min(LANES, rows - first), int64(1), int64(MOST_WORDS)
        has_long, is_even = False, False
        if have == LANES:
            of_keys = _even_words(key_source, key_size, key_bounds, first, words, int64(0))
            of_ids = int64(-1)
            if of_keys >= 0:
                of_ids = _even_words(id_source, id_size, id_bounds, first, words, int64(of_keys))
            if of_ids >= 0:
                is_even = True
                most = least = of_keys + of_ids + 1
                last = _lengths(
                    int64(key_bounds[first + 1]) - int64(key_bounds[first]),
                    int64(id_bounds[first + 1]) - int64(id_bounds[first]),
                )
                for lane in range(LANES):
                    store(words, (most - 1) * LANES + lane, int64(last))
        for lane in range(0 if is_even else have):
            row = first + lane
            start, stop = int64(key_bounds[row]), int64(key_bounds[row + 1])
            id_start, id_stop = int64(id_bounds[row]), int64(id_bounds[row + 1])
            count = ((stop - start + 7) >> 3) + ((id_stop - id_start + 7) >> 3) + 1
            if count > MOST_WORDS:
                has_long = True
                continue
            last = _lengths(stop - start, id_stop - id_start)
            at = lane
            while start < stop:
                store(words, at, int64(_word_at(key_source, key_size, start, stop)))
                at += LANES
                start += 8
            while id_start < id_stop:
                store(words, at, int64(_word_at(id_source, id_size, id_start, id_stop)))
                at += LANES
                id_start += 8
            store(words, at, int64(last))
            store(counts, lane, count)
            most, least = max(most, count), min(least, count)
        _hash_lanes(words, counts, state, least, most, secret0, secret1)
        for lane in range(have):
            row = first + lane
            if mask.shape[0] > 0 and not mask[row]:
                continue
            low, high = _WORD(load(words, lane)), _WORD(load(words, LANES + lane))
            digest = _WORD(load(words, 2 * LANES + lane))
            if has_long:
                start, stop = int64(key_bounds[row]), int64(key_bounds[row + 1])
                id_start, id_stop = int64(id_bounds[row]), int64(id_bounds[row + 1])
                if ((stop - start + 7) >> 3) + ((id_stop - id_start + 7) >> 3) >= MOST_WORDS:
                    low, high = _alone(
                        key_source, key_size, start, stop,
                        id_source, id_size, id_start, id_stop, secret0, secret1,
                    )  # fmt: skip
                    digest = hash_print(low, high)
            prints[row, 0] = low
            prints[row, 1] = high
            marks[found] = (digest & ~row_mask) | np.uint64(row)
            found += 1
    keep(room)
    keep(state_room)
    keep(lengths)
    return found


@helper
def _is_above(source: Any, left: Any, right: Any) -> bool:
    """Whether the fingerprint of row `left` stands after that of row `right`, by hash and then by bytes."""
    at, other = PRINT_BYTES * int64(left), PRINT_BYTES * int64(right)
    own_hash = hash_print(load_word(source, at), load_word(source, at + 8))
    other_hash = hash_print(load_word(source, other), load_word(source, other + 8))
    if own_hash != other_hash:
        return bool(own_hash > other_hash)
    return bool(compare(source, at, at + PRINT_BYTES, source, other, other + PRINT_BYTES) > 0)


@helper
def _same_print(source: Any, row: Any, other: Any) -> bool:
    at, before = PRINT_BYTES * row, PRINT_BYTES * other
    return bool(
        load_word(source, at) == load_word(source, before)
        and load_word(source, at + 8) == load_word(source, before + 8)
    )


@kernel(INT64(READ_UINT64S, INT64, READ_BYTES, INT32S, INT32S))
def arrange_rows(marks: Any, row_bits: int, prints: Any, rows: Any, starts: Any) -> Any:
    """Rows by ascending marks in the order of runs, and where each identity's rows start; returns how many.

    `starts` has one number more: where the last one's end. Rows of one identity stay as they came. `prints` are the
    bytes of all fingerprints.
    """
    source = pointer(prints)
    count = marks.shape[0]
    low_bits = np.uint64(row_bits)
    row_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    alike = marks[0] if count > 0 else _U0
    for place in range(count):
        mark = marks[place]
        row = int64(mark & row_mask)
        rows[place] = np.int32(row)
        if (mark ^ alike) >> low_bits == _U0 and place > 0:  # is to be compared soon
            prefetch(source, PRINT_BYTES * row)
            prefetch(source, PRINT_BYTES * int64(alike & row_mask))
        alike = mark
    found, place = int64(0), int64(0)
    while place < count:
        starts[found] = place
        found += 1
        first = place
        place += 1
        if place < count and (marks[place] ^ marks[first]) >> low_bits == _U0:
            while place < count and (marks[place] ^ marks[first]) >> low_bits == _U0:
                place += 1
            at = first + 1
            while at < place and _same_print(source, int64(rows[at]), int64(rows[at - 1])):
                at += 1
            if at < place:  # else they are copies of one another, in the order they came
                sort_rows(rows, first, place, _is_above, source, np.empty(place - first, np.int32))
                for at in range(first + 1, place):
                    if not _same_print(source, int64(rows[at]), int64(rows[at - 1])):
                        starts[found] = at
                        found += 1
    starts[found] = count
    return found


@kernel(types.void(READ_INT32S, READ_INT32S, READ_UINT64S, UINT64S, UINT64S))
def gather_prints(rows: Any, starts: Any, prints: Any, into: Any, hashes: Any) -> None:
    """The two words of each identity's fingerprint, and its hash."""
    source, target, digests = pointer(prints), pointer(into), pointer(hashes)
    groups, room = hashes.shape[0], np.empty(2 * BLOCK, np.uint64)
    lows = pointer(room)
    for first in range(0, groups, BLOCK):
        have = min(BLOCK, groups - first)
        for at in range(have):
            row = int64(rows[starts[first + at]])
            low, high = load(source, 2 * row), load(source, 2 * row + 1)
            store(target, 2 * (first + at), low)
            store(target, 2 * (first + at) + 1, high)
            store(lows, at, low)
            store(lows, BLOCK + at, high)
        for at in range(have):
            digest = hash_print(_WORD(load(lows, at)), _WORD(load(lows, BLOCK + at)))
            store(digests, first + at, int64(digest))
    keep(room)


# -- decisions -------------------------------------------------------------------------------------

NEW, REPLAY, DUPLICATE, LATE, NO_ID = 0, 1, 2, 3, 4
NOT_KEPT: Final = -(2**31)
AHEAD: Final = 4  # groups whose rows are asked for before they are looked at


@helper
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


@helper
def _is_near(later: Any, earlier: Any, within: Any) -> Any:
    """Whether two times are less than `within` apart; their difference fits an unsigned word."""
    return np.uint64(later) - np.uint64(earlier) < np.uint64(within)


@kernel(types.UniTuple(types.int64, 2)(READ_INT32S, READ_INT32S, READ_INT64S, READ_FLAGS, INT32S))
def list_chosen(rows: Any, starts: Any, known_groups: Any, late: Any, chosen: Any) -> Any:
    """The groups that `decide` is to look at; how many they are, and the rows of the largest.

    Others have one row, which is not late, and nothing is known of them: that row is new. `late` has no elements when
    no row is.
    """
    some_late, known, found, largest = late.shape[0] > 0, int64(0), int64(0), int64(0)
    for group in range(starts.shape[0] - 1):
        size = int64(starts[group + 1]) - int64(starts[group])
        is_known = False
        while known < known_groups.shape[0] and known_groups[known] == group:
            is_known = True
            known += 1
        if size > 1 or is_known or (some_late and late[rows[starts[group]]]):
            chosen[found] = group
            found += 1
            largest = max(largest, size)
    return found, largest


@kernel(
    types.void(
        INT32S, READ_INT32S, READ_INT32S, READ_FLAGS, READ_INT64S, READ_INT64S, READ_INT64S, READ_INT32S,
        READ_INT64S, READ_INT64S, READ_INT64S, READ_INT32S, INT64, INT64, INT64,
        INT64S, INT64S, INT32S, INT32S, BYTES,
    )
)  # fmt: skip
def decide(
    rows: Any,
    starts: Any,
    chosen: Any,
    late: Any,
    ts: Any,
    judged: Any,
    offset: Any,
    partition: Any,
    known_groups: Any,
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
) -> None:
    """The verdicts of the rows of chosen groups, and in place of these rows those that are to be kept, by ts.

    Group g has the rows rows[starts[g]:starts[g + 1]], in the order they came; `chosen` ascends. What is known from
    before ascends by (group, ts), and all of its groups are chosen; a refresh is known with its offset inverted. A row
    that only refreshes is kept as -row - 1, and behind what is kept of a group stands `NOT_KEPT`. `late` says which
    rows are, with no elements when none is. `times`, `offsets`, `partitions`, `origins` are room for the largest group
    with all that is known of it.
    """
    some_late, known = late.shape[0] > 0, int64(0)
    all_ts, all_judged, all_offsets, all_verdicts = (
        pointer(ts),
        pointer(judged),
        pointer(offset),
        pointer(verdicts),
    )
    for number in range(chosen.shape[0]):
        later = int64(chosen[min(number + AHEAD, chosen.shape[0] - 1)])
        for turn in range(starts[later], min(starts[later] + 2, starts[later + 1])):  # rows lie anywhere
            row = int64(rows[turn])
            prefetch(all_ts, row)
            prefetch(all_judged, row)
            prefetch(all_offsets, row)
            prefetch(all_verdicts, row)
        group = int64(chosen[number])
        first, stop = int64(starts[group]), int64(starts[group + 1])
        count = int64(0)
        while known < known_groups.shape[0] and known_groups[known] == group:
            times[count] = known_ts[known]
            offsets[count] = known_offset[known]
            partitions[count] = known_partition[known]
            origins[count] = 0
            count += 1
            known += 1
        for turn in range(first, stop):
            row = int64(rows[turn])
            time = ts[row]
            place = _first_at(times, count, time)
            same = place < count and times[place] == time
            own = same and offsets[place] == offset[row] and partitions[place] == partition[row]
            if some_late and late[row]:
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
        into = first
        for at in range(count):
            if origins[at] != 0:
                rows[into] = origins[at] - 1 if origins[at] > 0 else origins[at]
                into += 1
        for at in range(into, stop):
            rows[at] = NOT_KEPT


@kernel(INT64(READ_INT32S, READ_INT32S, INT32S, INT32S))
def list_kept(rows: Any, starts: Any, groups: Any, kept: Any) -> Any:
    """Write the group and the row of everything to be kept; returns the count."""
    found = int64(0)
    for group in range(starts.shape[0] - 1):
        for place in range(starts[group], starts[group + 1]):
            row = rows[place]
            groups[found] = group
            kept[found] = row
            found += row != NOT_KEPT
    return found
