"""The pieces overlapping windows are put together from: nodes of a tree over rows that lie side by side.

Rows are given by key and, inside a key, ascending by time (`rows`); a window's rows are then a stretch of places, less
those that came when the window had closed: `firsts` of a row is the first window, by whatever windows are told
apart with (`limits`), that takes it.

Tree: level 0 has a node a place, a node of level n + 1 holds two neighbours of level n; node i of level n is
number bases[n] + i. Nodes across two keys are there and never listed.

Callers prove (K2): stretches lie inside `rows`; `away_before` has one more element than `rows`.
"""

from __future__ import annotations

from typing import Any

from numba.extending import register_jitable

from tidegate.kernels.compiling import INT32S, INT64, READ_INT32S, READ_INT64S, kernel
from tidegate.kernels.key_bytes import int64


@register_jitable
def _count_stretch(low: Any, high: Any, levels: int) -> Any:
    """How many nodes hold the places from `low` up to `high`."""
    count = int64(0)
    level = 0
    while low < high:
        if level == levels - 1:
            return count + high - low
        count += (low & 1) + (high & 1)
        low, high, level = (low + 1) >> 1, high >> 1, level + 1
    return count


@register_jitable
def _list_stretch(
    low: Any, high: Any, levels: int, bases: Any, window: Any, at: Any, nodes: Any, windows: Any
) -> Any:
    """List the nodes that hold the places from `low` up to `high`, in the order of the places.

    Merges are done in the order listed, and not every aggregate gives the same in another order. Returns where the
    next node goes. Without room in `nodes` they are only counted.
    """
    end = at + _count_stretch(low, high, levels)
    if nodes.shape[0] == 0:
        return end
    windows[at:end] = window
    front, back, level = at, end, 0
    while low < high:
        if level == levels - 1:
            for node in range(low, high):
                nodes[front] = bases[level] + node
                front += 1
            return end
        if low & 1:
            nodes[front] = bases[level] + low
            front += 1
            low += 1
        if high & 1:
            high -= 1
            back -= 1
            nodes[back] = bases[level] + high
        low, high, level = low >> 1, high >> 1, level + 1
    return end


@kernel(
    INT64(
        READ_INT32S, READ_INT64S, READ_INT32S, READ_INT32S, READ_INT64S, READ_INT32S, INT64, READ_INT64S,
        INT32S, INT32S,
    )
)  # fmt: skip
def list_nodes(
    rows: Any,
    limits: Any,
    lows: Any,
    highs: Any,
    firsts: Any,
    away_before: Any,
    levels: int,
    bases: Any,
    nodes: Any,
    windows: Any,
) -> Any:
    """Pairs of a node and its window: returns how many, and lists them by window and place if there is room.

    away_before[place] counts rows at earlier places that not every window takes.
    """
    at = int64(0)
    for window in range(limits.shape[0]):
        low, high = int64(lows[window]), int64(highs[window])
        if away_before[high] == away_before[low]:
            at = _list_stretch(low, high, levels, bases, window, at, nodes, windows)
            continue
        begin = low
        for place in range(low, high):
            if firsts[rows[place]] > limits[window]:
                at = _list_stretch(begin, place, levels, bases, window, at, nodes, windows)
                begin = int64(place + 1)
        at = _list_stretch(begin, high, levels, bases, window, at, nodes, windows)
    return at
