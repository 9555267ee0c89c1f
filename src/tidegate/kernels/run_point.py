"""The rows of one key in many runs, with as few arguments as can be: a point read is mostly the call itself.

Where it finds them and how it orders them is `run_lookup`'s and `run_order`'s; only what goes in and out differs. The
key comes as bytes, as callers have it, and its hash goes back as a number. For `append` and `last`: rows of a fold
may tie, and `point_lookup` lists those too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from tidegate.kernels.compiling import INT32S, INT64, READ_INT64S, kernel
from tidegate.kernels.memory import keep, pointer, store
from tidegate.kernels.run_lookup import UNKNOWN, _find_key, _guess, _is_outside, _is_settled, _rows_in
from tidegate.kernels.run_order import Marks, order_key, row_total
from tidegate.kernels.run_table import HASHES, KEYS, PARTIAL, ROLE, STORED, WIDTH, cell
from tidegate.kernels.xxh64 import xxh64

_types: Any = types
THREE = _types.UniTuple(types.int64, 3)
KEY = _types.Bytes(types.uint8, 1, "C", readonly=True)


@kernel(THREE(READ_INT64S, KEY, INT64, INT64, INT64, INT32S))
def point_read(lines: Any, name: Any, first_ts: Any, last_ts: Any, kind: Any, stretches: Any) -> Any:
    """How many stretches the key has between the bounds, how many rows, and its hash (its 64 bits as they are).

    The first number is -1 when a stored copy must be asked; above the room, nothing can be said of the rows.
    """
    table, key = pointer(lines), pointer(name)
    line_count, length = len(lines) // WIDTH, len(name)
    wanted = xxh64(key, 0, length)
    lows, highs = np.zeros(line_count, np.int32), np.zeros(line_count, np.int32)
    low, high = pointer(lows), pointer(highs)
    for line in range(line_count):
        if _is_outside(table, line, first_ts, last_ts):
            continue
        role, count = cell(table, line, ROLE), cell(table, line, KEYS)
        if role == STORED:
            if _is_settled(table, low, 0, line):
                continue
            return np.int64(-1), np.int64(0), np.int64(wanted)
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
    marks = Marks(pointer(stretches), len(stretches) // 3, pointer(stretches), np.int64(0))
    so_far = (np.int64(0), np.int64(0), np.int64(0))
    so_far = order_key(table, line_count, low, high, 0, kind, marks, so_far)
    keep(lows)
    keep(highs)
    return so_far[0], row_total(marks, 0, so_far[0]), np.int64(wanted)
