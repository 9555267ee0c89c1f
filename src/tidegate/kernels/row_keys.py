"""The key of every row, out of a directory with one line a key: each key written as often as it has rows.

Callers prove (K2): `starts` never falls, has one number more than there are keys and ends at the number of rows; the
rows asked for lie inside it; `bounds` never falls and ends inside the keys' bytes; there is room for what comes out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tidegate.kernels.compiling import BYTES, INT32S, INT64, READ_BYTES, READ_INT32S, kernel
from tidegate.kernels.key_bytes import copy_key
from tidegate.kernels.memory import load, pointer, store


@kernel(INT64(READ_INT32S, READ_INT32S, INT64, INT64, INT64))
def count_key_bytes(bounds: Any, starts: Any, line: Any, first: Any, stop: Any) -> Any:
    """How many bytes the keys of rows first … stop have together; `line` is the key of the first of them."""
    ends, rows = pointer(bounds), pointer(starts)
    total: Any = np.int64(0)
    while first < stop:
        after = min(load(rows, line + 1), stop)
        total += (after - first) * (load(ends, line + 1) - load(ends, line))
        first = after
        line += 1
    return total


@kernel(INT64(READ_BYTES, READ_INT32S, READ_INT32S, INT64, INT64, INT64, BYTES, INT32S))
def spread_keys(
    data: Any, bounds: Any, starts: Any, line: Any, first: Any, stop: Any, target: Any, target_bounds: Any
) -> Any:
    """Write the keys of rows first … stop one after the other, and where each begins and the last ends."""
    source, ends, rows = pointer(data), pointer(bounds), pointer(starts)
    into, into_bounds = pointer(target), pointer(target_bounds)
    at: Any = np.int64(0)
    row: Any = np.int64(0)
    store(into_bounds, 0, 0)
    while first < stop:
        after = min(load(rows, line + 1), stop)
        begin = load(ends, line)
        length = load(ends, line + 1) - begin
        for _ in range(after - first):
            copy_key(into, at, source, begin, length)
            at += length
            row += 1
            store(into_bounds, row, at)
        first = after
        line += 1
    return at
