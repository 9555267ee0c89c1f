"""Records copied out of batch bodies, some left behind: what compaction does to a batch that loses records.

A record is `length | attributes | timestamp delta | offset delta | …` (varints, zig-zag). Offset deltas count
from the batch's base offset, which compaction keeps, so all from the offset delta on is copied untouched; the
timestamp delta counts from the base timestamp, which changes, so it and the length are written anew.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import BYTES, INT64, READ_BYTES, kernel, rows_of
from tidegate.kernels.memory import copy, load, pointer, store
from tidegate.kernels.varints import read_varint, read_varlong, varint_size, write_varint

GROWTH_BYTES: Final = 16
"""How much longer one record may become: its length and its timestamp delta take at most 5 and 10 bytes."""

READ_FLAGS = types.Array(types.boolean, 1, "C", readonly=True)

REBUILD_ROW: Final = np.dtype(
    [
        ("body_start", "i8"),  # where the records of the batch lie in the source
        ("body_stop", "i8"),
        ("first_row", "i8"),  # of its records in `keep`
        ("records", "i8"),
        ("delta_ms", "i8"),  # added to each timestamp delta, or its new value when that is fixed
        ("delta_is_fixed", "i1"),
        ("room", "i8"),  # bytes left free in front of the kept records, for a header
        ("start", "i8"),  # filled in: where the batch begins and ends in the target
        ("stop", "i8"),
    ],
    align=True,
)


@register_jitable
def _copy_kept(source: Any, row: Any, keep: Any, target: Any, filled: int, capacity: int) -> int:
    position = row.body_start
    end = row.body_stop
    for record in range(row.records):
        length, start = read_varint(source, position, end)
        if start > end or length < 1 or length > end - start:
            return -1
        position = start + length
        if not keep[row.first_row + record]:
            continue
        delta, rest = read_varlong(source, start + 1, position)
        if rest > position:
            return -1
        delta = row.delta_ms if row.delta_is_fixed else delta + row.delta_ms
        tail = position - rest
        if tail + GROWTH_BYTES > capacity - filled:
            return -1
        filled = write_varint(target, filled, 1 + varint_size(delta) + tail)
        store(target, filled, load(source, start))
        filled = write_varint(target, filled + 1, delta)
        copy(target, filled, source, rest, tail)
        filled += tail
    return filled if position == end else -1


@kernel(INT64(READ_BYTES, rows_of(REBUILD_ROW), READ_FLAGS, BYTES))
def copy_kept(bodies: Any, rows: Any, keep: Any, into: Any) -> int:
    """Copy the kept records of each row's body into `into`, one after the other, and note where they lie.

    How many rows were done: fewer than all when a body does not hold its records or there is no more room.
    """
    source = pointer(bodies)
    target = pointer(into)
    capacity = len(into)
    filled = 0
    for index in range(len(rows)):
        row = rows[index]
        row.start = filled
        inside = 0 <= row.body_start <= row.body_stop <= len(bodies) and row.room <= capacity - filled
        if not inside or row.first_row < 0 or row.first_row + row.records > len(keep):
            return index
        filled = _copy_kept(source, row, keep, target, filled + row.room, capacity)
        if filled < 0:
            return index
        row.stop = filled
    return len(rows)
