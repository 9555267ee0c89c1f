"""Find the rows of keys in many sorted runs at once, and put them in order.

Kernels read runs through a table: one line of `WIDTH` numbers for each copy of a run, ascending by (bucket, order). It
has the addresses and lengths of the run's arrays, the first and last ts of the whole run, its bucket, and its role:

    COMPLETE   a copy with every key of the run
    PARTIAL    a hot copy with some keys; the next line is the stored copy of the same run
    STORED     a stored copy; after a PARTIAL line it is searched only for keys missing there.
               KEYS is -1 until it is loaded

DELETED is 0 for a run without tombstones, else the address of their bitmap. There are no bounds checks: runs were
verified when they were read or built, and the owner of a table keeps them alive.

`search_runs` finds, for each key and line, the rows [low, high) inside the time bounds; (-1, -1) means unknown from
this line. Hashes are uniform, so a search starts near the position and widens. `order_rows` walks the result and writes
*stretches* (line, first row, row after the last): in order they give a key's rows by ascending (ts, seq), each identity
once. `last` keeps the row of the latest line and hides tombstones. `fold` lists the rows of an identity found more than
once as ties (line, row, group) and writes a stretch in the virtual line `PATCH`, row = group. `scatter_stretches` turns
stretches into row numbers by line, and the permutation that puts them in order. `point_lookup` does all for one key;
`point_read` does it for `append` and `last` with few arguments, because the call dominates the cost of a point read.

All arrays are flat: cell (key, line) is key × lines + line, stretch i begins at 3 × i.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import types

from tidegate.kernels.hashing import xxh64
from tidegate.kernels.jit import (
    INT32S,
    INT64,
    INT64S,
    READ_BYTES,
    READ_INT32S,
    READ_INT64S,
    READ_UINT64S,
    UINT64S,
    byte_at,
    half_at,
    helper,
    keep,
    kernel,
    load,
    pointer,
    store,
    unsigned_at,
    word_at,
)

# -- the table of runs -----------------------------------------------------------------------------

HASHES, KEY_BOUNDS, KEY_BYTES, STARTS, TS, SEQ, KEYS, ROWS = 0, 1, 2, 3, 4, 5, 6, 7
DELETED, DELETED_OFFSET, MIN_TS, MAX_TS, ROLE, BUCKET = 8, 9, 10, 11, 12, 13
WIDTH: Final = 14
COMPLETE, PARTIAL, STORED = 0, 1, 2


@helper(forceinline=True)
def cell(table: Any, line: Any, column: Any) -> Any:
    return load(table, line * WIDTH + column)


# -- order of the rows found -----------------------------------------------------------------------

APPEND, LAST, FOLD = 0, 1, 2
PATCH: Final = -1
_types: Any = types
FOUR = _types.UniTuple(types.int64, 4)


class Marks(NamedTuple):
    """The output buffers: pointers to stretches and ties, and the capacity of each."""

    stretches: Any
    room: Any
    ties: Any
    tie_room: Any


@helper
def _is_deleted(table: Any, line: Any, row: Any) -> Any:
    bit = cell(table, line, DELETED_OFFSET) + row
    return (byte_at(cell(table, line, DELETED), bit >> 3) >> (bit & 7)) & 1 == 1


@helper
def _put(marks: Marks, count: Any, floor: Any, line: Any, row: Any, stop: Any) -> Any:
    """Append rows to the stretches (those below `floor` are another key's); returns the new count.

    Beyond the capacity nothing is written, only counted; the last stretch cannot be extended then, so the count is an
    upper bound.
    """
    at = 3 * count
    if floor < count <= marks.room and (
        load(marks.stretches, at - 3) == line and load(marks.stretches, at - 1) == row
    ):
        store(marks.stretches, at - 1, stop)
        return count
    if count < marks.room:
        store(marks.stretches, at, line)
        store(marks.stretches, at + 1, row)
        store(marks.stretches, at + 2, stop)
    return count + 1


@helper
def _put_live(
    table: Any, marks: Marks, count: Any, floor: Any, line: Any, row: Any, stop: Any, kind: Any
) -> Any:
    if kind != LAST or cell(table, line, DELETED) == 0:
        return _put(marks, count, floor, line, row, stop)
    for each in range(row, stop):
        if not _is_deleted(table, line, each):
            count = _put(marks, count, floor, line, each, each + 1)
    return count


@helper
def _seq(table: Any, line: Any, row: Any) -> Any:
    return word_at(cell(table, line, SEQ), row)


@helper
def _is_same(table: Any, low: Any, high: Any, cells: Any, line: Any, ts: Any, seq: Any) -> Any:
    """Whether the line's next row has this identity."""
    row = load(low, cells + line)
    return (
        row < load(high, cells + line)
        and word_at(cell(table, line, TS), row) == ts
        and _seq(table, line, row) == seq
    )


@helper
def _merge_lines(
    table: Any,
    low: Any,
    high: Any,
    cells: Any,
    first: Any,
    stop: Any,
    kind: Any,
    marks: Marks,
    so_far: Any,
    floor: Any,
) -> Any:
    """Merge one key's rows from several lines of a bucket until one line is left; advances `low`."""
    count, tied, groups = so_far
    while True:
        best: Any = np.int64(-1)
        best_ts: Any = np.int64(0)
        best_seq: Any = np.int64(0)
        live = 0
        for line in range(first, stop):
            row = load(low, cells + line)
            if row < load(high, cells + line):
                live += 1
                ts = word_at(cell(table, line, TS), row)
                if best < 0 or ts <= best_ts:
                    seq = _seq(table, line, row)
                    if best < 0 or ts < best_ts or seq < best_seq:
                        best, best_ts, best_seq = np.int64(line), ts, seq
        if live < 2:
            return count, tied, groups
        latest, met = best, 1
        for line in range(best + 1, stop):
            if _is_same(table, low, high, cells, line, best_ts, best_seq):
                latest, met = np.int64(line), met + 1
        row = load(low, cells + latest)
        if met == 1 or kind == LAST:
            count = _put_live(table, marks, count, floor, latest, row, row + 1, kind)
        elif kind == FOLD:
            count = _put(marks, count, floor, PATCH, groups, groups + 1)
        for line in range(best, stop):
            if _is_same(table, low, high, cells, line, best_ts, best_seq):
                row = load(low, cells + line)
                if met > 1 and kind == FOLD:
                    if tied < marks.tie_room:
                        store(marks.ties, 3 * tied, line)
                        store(marks.ties, 3 * tied + 1, row)
                        store(marks.ties, 3 * tied + 2, groups)
                    tied += 1
                elif met > 1 and kind == APPEND:
                    count = _put(marks, count, floor, line, row, row + 1)
                store(low, cells + line, row + 1)
        groups += met > 1 and kind == FOLD


@helper
def order_key(
    table: Any, line_count: Any, low: Any, high: Any, cells: Any, kind: Any, marks: Marks, so_far: Any
) -> Any:
    """Order all rows of one key, bucket by bucket, merged where several lines of a bucket have some."""
    floor = so_far[0]
    first: Any = np.int64(0)
    while first < line_count:
        bucket, stop = cell(table, first, BUCKET), first + 1
        live: Any = np.int64(load(low, cells + first) < load(high, cells + first))
        while stop < line_count and cell(table, stop, BUCKET) == bucket:
            live += load(low, cells + stop) < load(high, cells + stop)
            stop += 1
        if live > 1:
            so_far = _merge_lines(table, low, high, cells, first, stop, kind, marks, so_far, floor)
        if live:
            count, tied, groups = so_far
            for line in range(first, stop):
                row, end = load(low, cells + line), load(high, cells + line)
                if row < end:  # alone: its rows need not be looked at
                    count = _put_live(table, marks, count, floor, line, row, end, kind)
                    store(low, cells + line, end)
            so_far = (count, tied, groups)
        first = stop
    return so_far


@helper
def row_total(marks: Marks, first: Any, stop: Any) -> Any:
    total: Any = np.int64(0)
    for at in range(first, min(stop, marks.room)):
        total += load(marks.stretches, 3 * at + 2) - load(marks.stretches, 3 * at + 1)
    return total


@kernel(FOUR(READ_INT64S, READ_INT64S, INT32S, INT32S, INT64, INT32S, INT32S, INT64S, INT64S, INT64S))
def order_rows(
    lines: Any,
    turns: Any,
    lows: Any,
    highs: Any,
    kind: Any,
    stretches: Any,
    ties: Any,
    key_starts: Any,
    key_ends: Any,
    key_rows: Any,
) -> Any:
    """Write the stretches of all keys in the order of `turns`; returns the counts of stretches, ties, groups and rows.

    Key k's are those from `key_starts[k]` to `key_ends[k]`, with `key_rows[k]` rows. In the order of ascending hashes
    every run is read sequentially. If the capacity is exceeded, only the counts are valid: call again with that
    capacity and the original lows.
    """
    table, low, high, order = pointer(lines), pointer(lows), pointer(highs), pointer(turns)
    marks = Marks(pointer(stretches), len(stretches) // 3, pointer(ties), len(ties) // 3)
    line_count = len(lines) // WIDTH
    so_far = (np.int64(0), np.int64(0), np.int64(0))
    rows = np.int64(0)
    for turn in range(len(turns)):
        key = load(order, turn)
        key_starts[key] = so_far[0]
        so_far = order_key(table, line_count, low, high, key * line_count, kind, marks, so_far)
        key_ends[key] = so_far[0]
        key_rows[key] = row_total(marks, key_starts[key], so_far[0])
        rows += key_rows[key]
    return so_far[0], so_far[1], so_far[2], rows


@kernel(types.void(INT32S, INT64S, INT64S, INT32S))
def lay_out(stretches: Any, key_starts: Any, key_ends: Any, into: Any) -> None:
    """The stretches key after key by number; starts and ends are moved along."""
    source, target = pointer(stretches), pointer(into)
    count: Any = np.int64(0)
    for key in range(len(key_starts)):
        first, stop = key_starts[key], key_ends[key]
        key_starts[key] = count
        for at in range(3 * first, 3 * stop):
            store(target, 3 * (count - first) + at, load(source, at))
        count += stop - first
        key_ends[key] = count


@kernel(types.void(INT32S, INT64S, INT64S, INT64S))
def scatter_stretches(stretches: Any, line_starts: Any, rows: Any, places: Any) -> None:
    """Row numbers by line, and for each row of the result its place among them.

    `line_starts[line + 1]` is where the line's rows begin in `rows` (0: the patch's); it moves to where they end.
    """
    source, starts, row_numbers, result = (
        pointer(stretches),
        pointer(line_starts),
        pointer(rows),
        pointer(places),
    )
    out: Any = np.int64(0)
    for at in range(0, len(stretches), 3):
        line = load(source, at) + 1
        place = load(starts, line)
        for row in range(load(source, at + 1), load(source, at + 2)):
            store(row_numbers, place, row)
            store(result, out, place)
            place += 1
            out += 1
        store(starts, line, place)


# -- many keys -------------------------------------------------------------------------------------

UNKNOWN: Final = -1
MANY_KEYS: Final = 8  # with one hash; from then on they are not looked at one by one
UINT64 = types.uint64


@helper
def _first_hash(hashes: Any, count: Any, wanted: Any, near: Any) -> Any:
    """The first index in ascending hashes whose value is not below `wanted`, searched from `near`."""
    low, high, step = 0, count, 1
    if near < count and unsigned_at(hashes, near) < wanted:
        low = near + 1
        while low + step <= count and unsigned_at(hashes, low + step - 1) < wanted:
            low += step
            step += step
        high = min(low + step - 1, count)
    else:
        high = min(near, count)
        while high - step >= 0 and unsigned_at(hashes, high - step) >= wanted:
            high -= step
            step += step
        low = max(high - step + 1, 0)
    while low < high:
        middle = (low + high) >> 1
        if unsigned_at(hashes, middle) < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@helper
def _guess(hashes: Any, count: Any, wanted: Any) -> Any:
    """Interpolate the approximate index of `wanted`."""
    first, last = unsigned_at(hashes, 0), unsigned_at(hashes, count - 1)
    if wanted <= first:
        return np.int64(0)
    if wanted >= last:
        return count - 1
    return np.int64(np.float64(wanted - first) / np.float64(last - first) * np.float64(count - 1))


@helper
def _compare(content: Any, begin: Any, end: Any, key: Any, start: Any, stop: Any) -> Any:
    """Compare content[begin:end] with key[start:stop]: negative, zero or positive."""
    shorter = min(end - begin, stop - start)
    for at in range(shorter):
        difference = np.int64(byte_at(content, begin + at)) - np.int64(load(key, start + at))
        if difference != 0:
            return difference
    return np.int64((end - begin) - (stop - start))


@helper
def _find_among(
    hashes: Any, count: Any, bounds: Any, content: Any, wanted: Any, key: Any, start: Any, stop: Any, low: Any
) -> Any:
    """Binary search of the key from `low` on among many with its hash; its index or -1."""
    step = 1
    while low + step < count and unsigned_at(hashes, low + step) == wanted:
        step += step
    high = min(low + step, count)
    while low < high:
        middle = (low + high) >> 1
        is_same_hash = unsigned_at(hashes, middle) == wanted
        order = np.int64(1)
        if is_same_hash:
            order = _compare(content, half_at(bounds, middle), half_at(bounds, middle + 1), key, start, stop)
        if order == 0:
            return middle
        if order < 0:
            low = middle + 1
        else:
            high = middle
    return -1


@helper
def _find_key(table: Any, line: Any, wanted: Any, key: Any, start: Any, stop: Any, near: Any) -> Any:
    """The key's index in the line's directory or -1, and the index from which to search a higher hash."""
    hashes, count = cell(table, line, HASHES), cell(table, line, KEYS)
    bounds, content = cell(table, line, KEY_BOUNDS), cell(table, line, KEY_BYTES)
    first = _first_hash(hashes, count, wanted, near)
    at = first
    while at < count and unsigned_at(hashes, at) == wanted:
        if at == first + MANY_KEYS:
            return _find_among(hashes, count, bounds, content, wanted, key, start, stop, at), first
        begin = half_at(bounds, at)
        if half_at(bounds, at + 1) - begin == stop - start:
            same = 0
            while same < stop - start and byte_at(content, begin + same) == load(key, start + same):
                same += 1
            if same == stop - start:
                return at, first
        at += 1
    return -1, first


@helper
def _first_row(ts: Any, low: Any, high: Any, wanted: Any) -> Any:
    """The first row in [low, high) with a ts not below `wanted`; `high` if none has."""
    while low < high:
        middle = (low + high) >> 1
        if word_at(ts, middle) < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@helper
def _rows_in(table: Any, line: Any, at: Any, first_ts: Any, last_ts: Any) -> Any:
    """The rows of the key at place `at` inside the bounds, both of them inclusive."""
    starts, ts = cell(table, line, STARTS), cell(table, line, TS)
    low, high = half_at(starts, at), half_at(starts, at + 1)
    if first_ts > cell(table, line, MIN_TS):
        low = _first_row(ts, low, high, first_ts)
    if last_ts < cell(table, line, MAX_TS):
        high = _first_row(ts, low, high, last_ts + 1)
    return low, high


@helper
def _is_outside(table: Any, line: Any, first_ts: Any, last_ts: Any) -> Any:
    return cell(table, line, MAX_TS) < first_ts or cell(table, line, MIN_TS) > last_ts


@helper
def _is_settled(table: Any, low: Any, cells: Any, line: Any) -> Any:
    """Whether the partial copy in the previous line has the key whose cells start at `cells`."""
    return line > 0 and cell(table, line - 1, ROLE) == PARTIAL and load(low, cells + line - 1) != UNKNOWN


@kernel(
    types.void(
        READ_INT64S, READ_BYTES, READ_INT32S, READ_UINT64S, READ_INT64S, INT64, INT64, INT64, INT32S, INT32S
    )
)
def search_runs(
    lines: Any,
    data: Any,
    key_bounds: Any,
    hashes: Any,
    turns: Any,
    first_ts: Any,
    last_ts: Any,
    is_second: Any,
    lows: Any,
    highs: Any,
) -> None:
    """Fill low and high of every key and line. `turns` names the keys by ascending hash, so that each search goes
    on from the last. The first call leaves STORED lines unknown, the second fills only those that are loaded.
    """
    table, key_data, bounds, order = pointer(lines), pointer(data), pointer(key_bounds), pointer(turns)
    low, high = pointer(lows), pointer(highs)
    line_count, key_count = len(lines) // WIDTH, len(turns)
    for line in range(line_count):
        role = cell(table, line, ROLE)
        if (role == STORED) != (is_second == 1):
            if is_second == 0:
                for key in range(key_count):
                    store(low, key * line_count + line, UNKNOWN)
                    store(high, key * line_count + line, UNKNOWN)
            continue
        outside = _is_outside(table, line, first_ts, last_ts)
        count = cell(table, line, KEYS)
        if count < 0 and not outside:
            continue
        near: Any = np.int64(0)
        for turn in range(key_count):
            key = load(order, turn)
            cells: Any = key * line_count
            begin: Any = np.int64(0)
            end: Any = np.int64(0)
            if not outside and not (role == STORED and _is_settled(table, low, cells, line)):
                at: Any = np.int64(-1)
                if count > 0:
                    at, near = _find_key(
                        table, line, hashes[key], key_data, load(bounds, key), load(bounds, key + 1), near
                    )
                if at >= 0:
                    begin, end = _rows_in(table, line, at, first_ts, last_ts)
                elif role == PARTIAL:
                    begin, end = np.int64(UNKNOWN), np.int64(UNKNOWN)
            store(low, cells + line, begin)
            store(high, cells + line, end)


@helper
def find_one(
    table: Any,
    line_count: Any,
    key: Any,
    length: Any,
    wanted: Any,
    first_ts: Any,
    last_ts: Any,
    low: Any,
    high: Any,
) -> bool:
    """Fill low and high of every line for one key; False when a stored copy must be asked."""
    for line in range(line_count):
        if _is_outside(table, line, first_ts, last_ts):
            continue
        role, count = cell(table, line, ROLE), cell(table, line, KEYS)
        if role == STORED:
            if _is_settled(table, low, 0, line):
                continue
            return False
        at: Any = np.int64(-1)
        if count > 0:
            near = _guess(cell(table, line, HASHES), count, wanted)
            at, _ = _find_key(table, line, wanted, key, 0, length, near)
        if at >= 0:
            found, after = _rows_in(table, line, at, first_ts, last_ts)
            store(low, line, found)
            store(high, line, after)
        elif role == PARTIAL:
            store(low, line, UNKNOWN)
            store(high, line, UNKNOWN)
    return True


@kernel(FOUR(READ_INT64S, READ_BYTES, UINT64, INT64, INT64, INT64, INT64, UINT64S, INT32S, INT32S))
def point_lookup(
    lines: Any,
    data: Any,
    given: Any,
    is_given: Any,
    first_ts: Any,
    last_ts: Any,
    kind: Any,
    hashed: Any,
    stretches: Any,
    ties: Any,
) -> Any:
    """`search_runs` and `order_rows` for one key, without any stored copy.

    The first number is -1 when a stored copy must be asked. The key's hash is left in `hashed[0]`.
    """
    table, key = pointer(lines), pointer(data)
    line_count, length = len(lines) // WIDTH, len(data)
    wanted = given if is_given == 1 else xxh64(key, 0, length)
    hashed[0] = wanted
    lows, highs = np.zeros(line_count, np.int32), np.zeros(line_count, np.int32)
    low, high = pointer(lows), pointer(highs)
    if not find_one(table, line_count, key, length, wanted, first_ts, last_ts, low, high):
        return np.int64(-1), np.int64(0), np.int64(0), np.int64(0)
    marks = Marks(pointer(stretches), len(stretches) // 3, pointer(ties), len(ties) // 3)
    so_far = (np.int64(0), np.int64(0), np.int64(0))
    so_far = order_key(table, line_count, low, high, 0, kind, marks, so_far)
    keep(lows)
    keep(highs)
    return so_far[0], so_far[1], so_far[2], row_total(marks, 0, so_far[0])


# -- one key ---------------------------------------------------------------------------------------

THREE = _types.UniTuple(types.int64, 3)
KEY = _types.Bytes(types.uint8, 1, "C", readonly=True)


@kernel(THREE(READ_INT64S, KEY, INT64, INT64, INT64, INT32S))
def point_read(lines: Any, name: Any, first_ts: Any, last_ts: Any, kind: Any, stretches: Any) -> Any:
    """How many stretches the key has between the bounds, how many rows, and its hash (its 64 bits as they are).

    The first number is -1 when a stored copy must be asked; above the room, nothing can be said of the rows.
    """
    table, key = pointer(lines), pointer(name)
    line_count, length = len(lines) // WIDTH, len(name)
    wanted = xxh64(key, 0, length)
    lows, highs = np.zeros(line_count, np.int32), np.zeros(line_count, np.int32)
    low, high = pointer(lows), pointer(highs)
    if not find_one(table, line_count, key, length, wanted, first_ts, last_ts, low, high):
        return np.int64(-1), np.int64(0), np.int64(wanted)
    marks = Marks(pointer(stretches), len(stretches) // 3, pointer(stretches), np.int64(0))
    so_far = (np.int64(0), np.int64(0), np.int64(0))
    so_far = order_key(table, line_count, low, high, 0, kind, marks, so_far)
    keep(lows)
    keep(highs)
    return so_far[0], row_total(marks, 0, so_far[0]), np.int64(wanted)
