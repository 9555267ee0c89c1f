"""A stable sort of rows by a comparison that the caller gives.

Insertion for few rows, merging from then on: n log n comparisons, whatever the keys are. Rows that are sorted already
are only read.
"""

from __future__ import annotations

from typing import Any, Final

from numba.extending import register_jitable

from tidegate.kernels.key_bytes import compare, int64

FEW: Final = 16  # rows that are sorted by insertion


@register_jitable
def is_key_above(keys: Any, left: Any, right: Any) -> Any:
    """Whether key `left` of `keys` (bytes, bounds) sorts after key `right`."""
    data, bounds = keys
    left_start, left_stop = int64(bounds[left]), int64(bounds[left + 1])
    right_start, right_stop = int64(bounds[right]), int64(bounds[right + 1])
    return compare(data, left_start, left_stop, data, right_start, right_stop) > 0


@register_jitable
def _insert(rows: Any, first: Any, stop: Any, is_above: Any, keys: Any) -> None:
    for place in range(first + 1, stop):
        row = rows[place]
        hole = place
        while hole > first and is_above(keys, rows[hole - 1], row):
            rows[hole] = rows[hole - 1]
            hole -= 1
        rows[hole] = row


@register_jitable
def _merge(rows: Any, first: Any, middle: Any, stop: Any, is_above: Any, keys: Any, scratch: Any) -> None:
    """Merge two sorted halves, the left one first where keys are equal."""
    if not is_above(keys, rows[middle - 1], rows[middle]):
        return
    for place in range(first, middle):
        scratch[place - first] = rows[place]
    left, right, at = int64(0), middle, first
    while left < middle - first:
        if right < stop and is_above(keys, scratch[left], rows[right]):
            rows[at] = rows[right]
            right += 1
        else:
            rows[at] = scratch[left]
            left += 1
        at += 1


@register_jitable
def sort_rows(rows: Any, first: Any, stop: Any, is_above: Any, keys: Any, scratch: Any) -> None:
    """Sort rows[first:stop]; `is_above(keys, left, right)` compares two. `scratch` has room for as many rows."""
    for block in range(first, stop, FEW):
        _insert(rows, block, min(block + FEW, stop), is_above, keys)
    width = int64(FEW)
    while width < stop - first:
        for left in range(first, stop - width, 2 * width):
            _merge(rows, left, left + width, min(left + 2 * width, stop), is_above, keys, scratch)
        width *= 2
