"""Sort rows by key and time, and merge overlapping windows from shared partial results.

A window over ordered rows is a range of positions. Where windows overlap a lot, merging each one's rows would merge
every row once for each window it is in. Instead neighbours are merged two by two, level over level, and a window is
the few nodes that hold exactly its rows (`kernels/windows.py`): of a thousand rows about twenty.

Thread rule: pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tidegate.kernels.sorting import place_rows, sort_cursors
from tidegate.kernels.windows import list_nodes
from tidegate.storage import ScratchLimiter
from tidegate.storage.runs.columns import list_bytes, merge_needs
from tidegate.windows.aggregates.folds import Folds
from tidegate.windows.events import Int64s
from tidegate.windows.keys import Int32s

FEW = 8  # pairs of window and row, per row, up to which no tree is built
_NO_NUMBERS, _NO_NODES = np.empty(0, np.int64), np.empty(0, np.int32)


class Stretches(NamedTuple):
    """Windows as positions from `lows` up to `highs`, without rows whose first window is after the window's limit.

    `firsts` gives for each row the first window that accepts it, `limits` the number of each window, and
    `away_before` how many rows at earlier positions are not accepted by all (one number more than rows).
    """

    limits: Int64s
    lows: Int32s
    highs: Int32s
    firsts: Int64s
    away_before: Int32s


def place(codes: Int32s, keys: int) -> tuple[Int32s, Int32s]:
    """Return the rows by key number, and where each key's begin."""
    counts = np.bincount(codes, minlength=keys).astype(np.int32)
    rows, starts = np.empty(len(codes), np.int32), np.empty(keys + 1, np.int32)
    place_rows(np.arange(keys, dtype=np.int32), counts, codes, np.empty(keys, np.int32), starts, rows)
    return rows, starts


def place_by_time(codes: Int32s, ts: Int64s, keys: int) -> tuple[Int32s, Int32s]:
    """Return the rows by key number and then time, and where each key's begin."""
    rows, starts = place(codes, keys)
    sort_cursors(rows, starts, ts, _NO_NUMBERS, np.empty(len(rows), np.int32))
    return rows, starts


def merge_stretches(
    folds: Folds,
    states: Sequence[pa.Array],
    rows: Int32s,
    windows: Stretches,
    scratch: ScratchLimiter,
    name: Callable[[int], str],
) -> list[pa.Array]:
    """Return the states of each window; `states` belong to the rows that `rows` sorts.

    `scratch` provides the memory; `name` describes the window of a number for the error if there is not enough.
    """
    if not list_bytes(states):
        return _merge(folds, states, rows, windows)
    # a list is in the result once for every window it is in, and in every level of a tree
    before = np.concatenate([_NO_NUMBERS, [0], np.cumsum(merge_needs(states)[rows])])
    sizes = before[windows.highs] - before[windows.lows]
    need = int(sizes.sum()) + int(before[-1])
    with scratch.hold(need, lambda: name(int(np.argmax(sizes))) + f" and {len(sizes) - 1} others"):
        return _merge(folds, states, rows, windows)


def _merge(folds: Folds, states: Sequence[pa.Array], rows: Int32s, windows: Stretches) -> list[pa.Array]:
    lengths = windows.highs - windows.lows
    levels = 1 if int(lengths.sum()) <= FEW * len(rows) else int(lengths.max()).bit_length()
    bases = _bases(len(rows), levels)
    bounds = (rows, *windows, levels, bases)
    pairs = list_nodes(*bounds, _NO_NODES, _NO_NODES)
    nodes, owners = np.empty(pairs, np.int32), np.empty(pairs, np.int32)
    list_nodes(*bounds, nodes, owners)
    if levels == 1:
        chosen, sources = pa.array(rows[nodes]), states
    else:
        chosen, sources = pa.array(nodes), _tree(folds, states, rows, levels)
    return folds.merge([column.take(chosen) for column in sources], owners, len(windows.limits))


def _bases(size: int, levels: int) -> Int64s:
    """Return where each level of a tree over so many rows begins."""
    bases = [0]
    for _ in range(levels - 1):
        bases.append(bases[-1] + size)
        size = (size + 1) // 2
    return np.array(bases, np.int64)


def _tree(folds: Folds, states: Sequence[pa.Array], rows: Int32s, levels: int) -> list[pa.Array]:
    """Return the levels of merged neighbours, concatenated."""
    order = pa.array(rows)
    found = [[column.take(order) for column in states]]
    size = len(rows)
    for _ in range(levels - 1):
        groups = np.arange(size, dtype=np.int32) >> 1
        size = (size + 1) // 2
        found.append(folds.merge(found[-1], groups, size))
    return [pa.concat_arrays(list(columns)) for columns in zip(*found, strict=True)]
