"""Sorted rows divided by the buckets they lie in.

Rows come as (line, row) pairs: which key of a sorted list of keys, and which row of the columns. What a bucket gets is
a stretch of both lists, in the order rows had. Columns are then gathered bucket by bucket, one at a time: a loop that
does one thing is several times as fast as one that fills everything at once.

Callers prove (K2): `order` are rows of `ts`, `lines` are lines of the keys, whose bounds never fall and end inside
their bytes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import INT32S, INT64, INT64S, READ_BYTES, READ_INT32S, READ_INT64S, kernel
from tidegate.kernels.key_bytes import compare, int64
from tidegate.kernels.memory import pointer, prefetch

READ_UINT64S = types.Array(types.uint64, 1, "C", readonly=True)
AHEAD: Final = 24  # rows between the one at hand and the one whose time is fetched


@register_jitable
def _ascends(source: Any, bounds: Any, hashes: Any, line: Any) -> bool:
    """Whether a line stands after the one before it."""
    if hashes[line - 1] != hashes[line]:
        return bool(hashes[line - 1] < hashes[line])
    start, middle, stop = int64(bounds[line - 1]), int64(bounds[line]), int64(bounds[line + 1])
    return bool(compare(source, start, middle, source, middle, stop) < 0)


@kernel(INT64(READ_UINT64S, READ_BYTES, READ_INT32S))
def first_disorder(hashes: Any, data: Any, bounds: Any) -> Any:
    """The first line that does not ascend by (hash, key), or how many there are."""
    source = pointer(data)
    for line in range(1, hashes.shape[0]):
        if not _ascends(source, bounds, hashes, line):
            return int64(line)
    return int64(hashes.shape[0])


@kernel(INT64(READ_INT32S, READ_INT32S, READ_INT64S, INT64, INT64, INT32S, INT64S))
def count_buckets(lines: Any, order: Any, ts: Any, width: int, lowest: int, buckets: Any, counts: Any) -> Any:
    """The number of each row's bucket, from the one that starts at `lowest` on, and how many rows each gets.

    `counts` comes as zeros. Answers the first row that does not ascend by (line, ts), or how many rows there are.
    """
    times = pointer(ts)
    before, time_before = int64(-1), int64(0)
    for at in range(order.shape[0]):
        if at + AHEAD < order.shape[0]:
            prefetch(times, int64(order[at + AHEAD]))
        line, time = int64(lines[at]), ts[order[at]]
        if line < before or (line == before and time <= time_before):
            return int64(at)
        before, time_before = line, time
        bucket = int64(np.uint64(time - lowest) // np.uint64(width))
        buckets[at] = bucket
        counts[bucket] += 1
    return int64(order.shape[0])


@kernel(types.void(READ_INT32S, READ_INT32S, READ_INT32S, INT64S, INT32S, INT32S))
def divide_rows(lines: Any, order: Any, buckets: Any, places: Any, into_lines: Any, into_order: Any) -> None:
    """Put the pairs of each bucket side by side; `places` says where each bucket's begin."""
    for at in range(order.shape[0]):
        bucket = buckets[at]
        place = places[bucket]
        places[bucket] = place + 1
        into_lines[place] = lines[at]
        into_order[place] = order[at]


@kernel(INT64(READ_INT32S, INT32S))
def list_starts(lines: Any, starts: Any) -> Any:
    """Where each line's rows begin among lines side by side, and one more: their end; answers how many lines."""
    found, before = int64(0), int64(-1)
    for at in range(lines.shape[0]):
        line = int64(lines[at])
        starts[found] = at  # overwritten by the next unless a line begins here
        found += line != before
        before = line
    starts[found] = lines.shape[0]
    return found
