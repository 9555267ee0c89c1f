"""Lines sorted by their keys' bytes, where hashes could not tell them apart.

Keys that share a hash by accident are a handful; thousands were made to. So it is insertion for few, and merging
from then on: n log n comparisons, whatever the keys are.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba.extending import register_jitable

from tidegate.kernels.key_bytes import compare, int64

FEW: Final = 16  # lines that are sorted by insertion


@register_jitable
def is_key_above(data: Any, bounds: Any, left: Any, right: Any) -> Any:
    """Whether key `left` of (`data`, `bounds`) sorts after key `right`."""
    left_start, left_stop = int64(bounds[left]), int64(bounds[left + 1])
    right_start, right_stop = int64(bounds[right]), int64(bounds[right + 1])
    return compare(data, left_start, left_stop, data, right_start, right_stop) > 0


@register_jitable
def _insert(order: Any, start: Any, stop: Any, data: Any, bounds: Any) -> None:
    for place in range(start + 1, stop):
        line = order[place]
        at = place
        while at > start and is_key_above(data, bounds, order[at - 1], line):
            order[at] = order[at - 1]
            at -= 1
        order[at] = line


@register_jitable
def _merge(order: Any, start: Any, middle: Any, stop: Any, data: Any, bounds: Any, scratch: Any) -> None:
    """Merge two sorted halves, the left one first where keys are equal."""
    for place in range(start, middle):
        scratch[place - start] = order[place]
    left, right, at = int64(0), middle, start
    while left < middle - start:
        if right < stop and is_key_above(data, bounds, scratch[left], order[right]):
            order[at] = order[right]
            right += 1
        else:
            order[at] = scratch[left]
            left += 1
        at += 1


@register_jitable
def sort_by_key(order: Any, start: Any, stop: Any, data: Any, bounds: Any) -> None:
    """Sort the lines order[start:stop] by the bytes of their keys; lines of one key stay as they are."""
    if stop - start <= FEW:
        _insert(order, start, stop, data, bounds)
        return
    for block in range(start, stop, FEW):
        _insert(order, block, min(block + FEW, stop), data, bounds)
    scratch = np.empty(stop - start, np.int32)
    width = int64(FEW)
    while width < stop - start:
        for left in range(start, stop - width, 2 * width):
            _merge(order, left, left + width, min(left + 2 * width, stop), data, bounds, scratch)
        width *= 2
