"""The producers of one partition as rows, and an index over their GUIDs that kernels read and extend.

The index is an open-addressing table: a power of two of row numbers, EMPTY where free, always larger than the
rows, so that a walk ends. A new producer is added by storing its row number at the place `find_place` answers.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import INT32S, INT64, kernel, rows_of
from tidegate.kernels.memory import load, pointer, store

PRODUCER_ROW: Final = np.dtype(
    [
        ("guid_high", "u8"),
        ("guid_low", "u8"),
        ("checksum", "u8"),
        ("stamp_sum", "u8"),
        ("records", "i8"),
        ("data_records", "i8"),
        ("producer_time", "i8"),
        ("log_time", "i8"),
        ("offset", "i8"),
        ("chain", "i4"),
        ("sequence", "i4"),
        ("registered", "u1"),
        ("ended", "u1"),
        ("final", "u1"),
        ("tainted", "u1"),
        ("checksum_type", "u1"),
    ],
    align=True,
)
PRODUCERS = rows_of(PRODUCER_ROW)

EMPTY: Final = -1


@register_jitable
def first_place(high: Any, low: Any, mask: int) -> Any:
    """Where in the index a GUID is looked for first."""
    mixed = (high ^ (low >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ low ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return np.int64(mixed >> np.uint64(33)) & mask


@register_jitable
def find_place(producers: Any, index: Any, mask: int, high: Any, low: Any) -> Any:
    """The place in the index that has this GUID, or the free one it would get."""
    place = first_place(high, low, mask)
    while True:
        slot = load(index, place)
        if slot == EMPTY:
            return place
        if producers[slot]["guid_high"] == high and producers[slot]["guid_low"] == low:
            return place
        place = (place + 1) & mask


@kernel(INT64(PRODUCERS, INT32S, types.uint64, types.uint64))
def find_producer(producers: Any, index: Any, high: Any, low: Any) -> int:
    """The row of a producer, EMPTY when unknown; the index is a power of two and larger than the rows."""
    places = pointer(index)
    return load(places, find_place(producers, places, len(index) - 1, high, low))


@register_jitable
def fill_index(rows: Any, count: Any, index: Any) -> None:
    """Index the first `count` rows by GUID; of several rows of a producer, the last."""
    index[:] = EMPTY
    places, mask = pointer(index), len(index) - 1
    for slot in range(count):
        high, low = rows[slot]["guid_high"], rows[slot]["guid_low"]
        store(places, find_place(rows, places, mask, high, low), slot)


@kernel(types.void(PRODUCERS, INT64, INT32S))
def index_producers(producers: Any, count: int, index: Any) -> None:
    """Fill the index from the first `count` rows."""
    fill_index(producers, count, index)
