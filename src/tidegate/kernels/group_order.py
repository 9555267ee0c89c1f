"""Groups of rows in order of (bucket, hash, key bytes).

`group_rows` gives each group a mark, one uint64: upper bits the number of its bucket, below them as many upper bits of
its hash as there is room for, lowest its first row. Marks are sorted as numbers, which processors do very fast;
`place_groups` then puts the few groups in order that are equal as far as marks tell.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import INT32S, INT64, INT64S, READ_BYTES, READ_INT32S, READ_INT64S, kernel
from tidegate.kernels.grouping import READ_UINT64S
from tidegate.kernels.key_bytes import int64
from tidegate.kernels.key_order import is_key_above, sort_by_key
from tidegate.kernels.memory import pointer

MOST_ALIKE: Final = 16
_ONE, _U63 = np.uint64(1), np.uint64(63)


@register_jitable
def _is_above(data: Any, bounds: Any, hashes: Any, left: Any, right: Any) -> Any:
    """Whether the key of row `left` sorts after that of row `right`."""
    if hashes[left] != hashes[right]:
        return hashes[left] > hashes[right]
    return is_key_above(data, bounds, left, right)


@kernel(
    types.boolean(
        READ_BYTES, READ_INT32S, READ_UINT64S, READ_UINT64S, INT64, INT64, READ_INT32S, INT32S, INT32S, INT64S
    )
)  # fmt: skip
def place_groups(
    data: Any,
    bounds: Any,
    hashes: Any,
    marks: Any,
    row_bits: int,
    bucket_bits: int,
    groups: Any,
    lines: Any,
    places: Any,
    ends: Any,
) -> bool:
    """The first row of each group in order, where each group stands, and where the groups of each bucket end.

    `marks` are sorted. `ends` has a number for each bucket, which stays as it is where there are no groups. False, and
    nothing is in order, when more groups are alike as far as marks tell than chance brings together.
    """
    source = pointer(data)
    low_bits, high_bits = np.uint64(row_bits), _U63 - np.uint64(bucket_bits)
    row_mask = (_ONE << low_bits) - _ONE
    alike = 0
    for place in range(marks.shape[0]):
        mark = marks[place]
        line = int64(mark & row_mask)
        at = place
        if place > 0 and (marks[place - 1] ^ mark) >> low_bits == 0:
            alike += 1
            if alike > MOST_ALIKE:
                return False
            while at > place - alike and _is_above(source, bounds, hashes, lines[at - 1], line):
                lines[at] = lines[at - 1]
                at -= 1
        else:
            alike = 0
        lines[at] = line
        ends[int64((mark >> high_bits) >> _ONE)] = place + 1
    for place in range(marks.shape[0]):
        places[groups[lines[place]]] = place
    return True


@kernel(types.void(READ_BYTES, READ_INT32S, READ_UINT64S, READ_INT64S, INT32S))
def settle_hashes(data: Any, bounds: Any, hashes: Any, buckets: Any, lines: Any) -> None:
    """Sort rows that are in order of bucket and hash also by their keys' bytes; `buckets` are in that order."""
    source = pointer(data)
    start = int64(0)
    for place in range(1, lines.shape[0] + 1):
        if place < lines.shape[0]:
            before, line = lines[place - 1], lines[place]
            if hashes[before] == hashes[line] and buckets[place - 1] == buckets[place]:
                continue
        if place - start > 1:
            sort_by_key(lines, start, place, source, bounds)
        start = int64(place)
