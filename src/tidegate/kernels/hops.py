"""Hopping windows over panes that lie side by side: which windows there are, and where each one's panes lie.

Panes are given by key and, inside a key, ascending by where they start (`rows`, `starts`). Windows start every
`advance`, at multiples of it, never before the epoch, and are `size` long. A window has the number

    key × stride + (its start − lowest) / advance

where `lowest` is a multiple of `advance` and `stride` more than the windows a key can have from there on.

Callers prove (K2): `rows` has every pane once; numbers given to `reach_of_hops` ascend.
"""

from __future__ import annotations

from typing import Any

from numba import types

from tidegate.kernels.compiling import INT32S, INT64, INT64S, READ_INT32S, READ_INT64S, kernel
from tidegate.kernels.key_bytes import int64

LATEST = 2**63 - 1


@kernel(
    INT64(READ_INT32S, READ_INT32S, READ_INT64S, READ_INT64S, INT64, INT64, INT64, INT64, INT64, INT64S)
)  # fmt: skip
def list_hops(
    rows: Any,
    starts: Any,
    pane_start: Any,
    first_start: Any,
    size: int,
    advance: int,
    lowest: int,
    highest: int,
    stride: int,
    numbers: Any,
) -> Any:
    """The windows from `lowest` to `highest` of panes that all their windows take, each once, ascending.

    Answers how many there are; with no room given it only counts.
    """
    found = int64(0)
    room = numbers.shape[0]
    for key in range(starts.shape[0] - 1):
        following = int64(lowest)
        for place in range(starts[key], starts[key + 1]):
            row = rows[place]
            if first_start[row] > 0:
                continue
            pane = pane_start[row]
            start = max(max(int64(0), pane - size + advance) // advance * advance, following)
            while start <= pane and start <= highest:
                if found < room:
                    numbers[found] = key * stride + (start - lowest) // advance
                found += 1
                if start > LATEST - advance:
                    break
                start += advance
            following = max(following, start)
    return found


@kernel(
    types.void(
        READ_INT64S, INT64, INT64, INT64, INT64, READ_INT32S, READ_INT32S, READ_INT64S, INT32S, INT32S
    )
)  # fmt: skip
def reach_of_hops(
    numbers: Any,
    lowest: int,
    size: int,
    advance: int,
    stride: int,
    rows: Any,
    starts: Any,
    pane_start: Any,
    lows: Any,
    highs: Any,
) -> None:
    """Each window's panes: places from low up to high."""
    key = int64(-1)
    low, high, stop = int64(0), int64(0), int64(0)
    for at in range(numbers.shape[0]):
        owner = numbers[at] // stride
        start = lowest + numbers[at] % stride * advance
        if owner != key:
            key = owner
            low, stop = int64(starts[key]), int64(starts[key + 1])
            high = low
        while low < stop and pane_start[rows[low]] < start:
            low += 1
        high = max(high, low)
        while high < stop and (start > LATEST - size or pane_start[rows[high]] < start + size):
            high += 1
        lows[at], highs[at] = low, high
