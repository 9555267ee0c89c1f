"""Where the rows of keys lie in many runs at once (the table: `run_table.py`).

`search_runs` finds, for each key and line, the rows [low, high) inside the time bounds; (-1, -1) says that this
line cannot tell. `point_lookup` does that for one key, and puts its rows in order too (`run_order.py`).

Hashes are uniform, so the place of one is guessed from its value and the search widens from there: two or three
cache lines instead of seventeen. Many keys are looked for by ascending hash, each from where the last one was.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.addresses import byte_at, half_at, unsigned_at, word_at
from tidegate.kernels.compiling import INT32S, INT64, READ_BYTES, READ_INT32S, READ_INT64S, kernel
from tidegate.kernels.memory import keep, load, pointer, store
from tidegate.kernels.run_order import FOUR, Marks, order_key, row_total
from tidegate.kernels.run_table import (
    HASHES,
    KEY_BOUNDS,
    KEY_BYTES,
    KEYS,
    MAX_TS,
    MIN_TS,
    PARTIAL,
    ROLE,
    STARTS,
    STORED,
    TS,
    WIDTH,
    cell,
)
from tidegate.kernels.xxh64 import xxh64

UNKNOWN: Final = -1
MANY_KEYS: Final = 8  # with one hash; from then on they are not looked at one by one

UINT64 = types.uint64
UINT64S = types.Array(types.uint64, 1, "C")
READ_UINT64S = types.Array(types.uint64, 1, "C", readonly=True)


@register_jitable
def _first_hash(hashes: Any, count: Any, wanted: Any, near: Any) -> Any:
    """The first place in an ascending array of hashes whose value is not below `wanted`, searched from `near`."""
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


@register_jitable
def _guess(hashes: Any, count: Any, wanted: Any) -> Any:
    """About where `wanted` is, by its value between the ends."""
    first, last = unsigned_at(hashes, 0), unsigned_at(hashes, count - 1)
    if wanted <= first:
        return np.int64(0)
    if wanted >= last:
        return count - 1
    return np.int64(np.float64(wanted - first) / np.float64(last - first) * np.float64(count - 1))


@register_jitable
def _compare(content: Any, begin: Any, end: Any, key: Any, start: Any, stop: Any) -> Any:
    """Below, at or above zero as content[begin:end] sorts before, with or after key[start:stop]."""
    shorter = min(end - begin, stop - start)
    for at in range(shorter):
        difference = np.int64(byte_at(content, begin + at)) - np.int64(load(key, start + at))
        if difference != 0:
            return difference
    return np.int64((end - begin) - (stop - start))


@register_jitable
def _find_among(
    hashes: Any, count: Any, bounds: Any, content: Any, wanted: Any, key: Any, start: Any, stop: Any, low: Any
) -> Any:
    """The key's place from `low` on among very many that share its hash, which ascend by their bytes; or -1."""
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


@register_jitable
def _find_key(table: Any, line: Any, wanted: Any, key: Any, start: Any, stop: Any, near: Any) -> Any:
    """The key's place in the line's directory or -1, and the place where the search of a higher hash may go on."""
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


@register_jitable
def _first_row(ts: Any, low: Any, high: Any, wanted: Any) -> Any:
    """The first row in [low, high) with a ts not below `wanted`; `high` if none has."""
    while low < high:
        middle = (low + high) >> 1
        if word_at(ts, middle) < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@register_jitable
def _rows_in(table: Any, line: Any, at: Any, first_ts: Any, last_ts: Any) -> Any:
    """The rows of the key at place `at` inside the bounds, both of them inclusive."""
    starts, ts = cell(table, line, STARTS), cell(table, line, TS)
    low, high = half_at(starts, at), half_at(starts, at + 1)
    if first_ts > cell(table, line, MIN_TS):
        low = _first_row(ts, low, high, first_ts)
    if last_ts < cell(table, line, MAX_TS):
        high = _first_row(ts, low, high, last_ts + 1)
    return low, high


@register_jitable
def _is_outside(table: Any, line: Any, first_ts: Any, last_ts: Any) -> Any:
    return cell(table, line, MAX_TS) < first_ts or cell(table, line, MIN_TS) > last_ts


@register_jitable
def _is_settled(table: Any, low: Any, cells: Any, line: Any) -> Any:
    """Whether the partial copy in the line before already answered for the key whose cells start at `cells`."""
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


@register_jitable
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
