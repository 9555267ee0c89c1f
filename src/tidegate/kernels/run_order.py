"""In which order the rows of a key read that were found in many runs (the table: `run_table.py`).

`order_rows` walks what `search_runs` found, key by key and bucket by bucket, and writes *stretches* (line, first row,
row after the last): reading them one after the other gives the key's rows by ascending (ts, seq), each identity once.
`last` keeps the row of the latest line and hides tombstones. `fold` lists the rows of an identity it finds more than
once as ties (line, row, group) and writes a stretch in the imaginary line `PATCH`, row = group.

`scatter_stretches` turns stretches into row numbers by line, and the permutation that puts them in order.

All arrays are flat: cell (key, line) is key × lines + line, stretch i begins at 3 × i. Inside, everything goes
through pointers, which count no references.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.addresses import byte_at, word_at
from tidegate.kernels.compiling import INT32S, INT64, INT64S, READ_INT64S, kernel
from tidegate.kernels.memory import load, pointer, store
from tidegate.kernels.run_table import BUCKET, DELETED, DELETED_OFFSET, SEQ, TS, WIDTH, cell

APPEND, LAST, FOLD = 0, 1, 2
PATCH: Final = -1

_types: Any = types
FOUR = _types.UniTuple(types.int64, 4)


class Marks(NamedTuple):
    """Where results go: pointers to stretches and ties, and how many of each there is room for."""

    stretches: Any
    room: Any
    ties: Any
    tie_room: Any


@register_jitable
def _is_deleted(table: Any, line: Any, row: Any) -> Any:
    bit = cell(table, line, DELETED_OFFSET) + row
    return (byte_at(cell(table, line, DELETED), bit >> 3) >> (bit & 7)) & 1 == 1


@register_jitable
def _put(marks: Marks, count: Any, floor: Any, line: Any, row: Any, stop: Any) -> Any:
    """Append rows to the stretches (those below `floor` are another key's): the new count.

    Beyond the room there is nothing is written, only counted; then the last one cannot be looked at either, and
    the count is an upper bound.
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


@register_jitable
def _put_live(
    table: Any, marks: Marks, count: Any, floor: Any, line: Any, row: Any, stop: Any, kind: Any
) -> Any:
    if kind != LAST or cell(table, line, DELETED) == 0:
        return _put(marks, count, floor, line, row, stop)
    for each in range(row, stop):
        if not _is_deleted(table, line, each):
            count = _put(marks, count, floor, line, each, each + 1)
    return count


@register_jitable
def _seq(table: Any, line: Any, row: Any) -> Any:
    return word_at(cell(table, line, SEQ), row)


@register_jitable
def _is_same(table: Any, low: Any, high: Any, cells: Any, line: Any, ts: Any, seq: Any) -> Any:
    """Whether the line's next row has this identity."""
    row = load(low, cells + line)
    return (
        row < load(high, cells + line)
        and word_at(cell(table, line, TS), row) == ts
        and _seq(table, line, row) == seq
    )


@register_jitable
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
    """Merge the rows that several lines of a bucket have of one key, until one line is left; `low` moves on."""
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


@register_jitable
def order_key(
    table: Any, line_count: Any, low: Any, high: Any, cells: Any, kind: Any, marks: Marks, so_far: Any
) -> Any:
    """All rows of one key: bucket after bucket, merged where several lines of a bucket have some."""
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


@register_jitable
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
    """Stretches of all keys, key after key by `turns`: how many, of how many ties, tie groups and rows.

    Key k's are those from `key_starts[k]` to `key_ends[k]`, with `key_rows[k]` rows. Going by ascending hash reads
    every run from front to back. With more stretches or ties than there is room for, only the counts mean anything:
    call again with that much room, and the lows as before.
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
