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
from tidegate.kernels.memory import keep, pointer
from tidegate.kernels.run_lookup import find_one
from tidegate.kernels.run_order import Marks, order_key, row_total
from tidegate.kernels.run_table import WIDTH
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
    if not find_one(table, line_count, key, length, wanted, first_ts, last_ts, low, high):
        return np.int64(-1), np.int64(0), np.int64(wanted)
    marks = Marks(pointer(stretches), len(stretches) // 3, pointer(stretches), np.int64(0))
    so_far = (np.int64(0), np.int64(0), np.int64(0))
    so_far = order_key(table, line_count, low, high, 0, kind, marks, so_far)
    keep(lows)
    keep(highs)
    return so_far[0], row_total(marks, 0, so_far[0]), np.int64(wanted)
