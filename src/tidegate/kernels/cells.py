"""Which offsets speak of which cell of time: a count, the first and the last offset of each.

Time is cut into segments, and a segment into `per_segment` cells of `width`, the last one shorter where that does not
come out even; cells are numbered through. Offsets ascend.
"""

from __future__ import annotations

from typing import Any

from numba import types

from tidegate.kernels.compiling import INT64, INT64S, READ_INT64S, kernel


@kernel(
    types.void(READ_INT64S, READ_INT64S, INT64, INT64, INT64, INT64, INT64S, INT64S, INT64S)
)  # fmt: skip
def note_cells(
    ts: Any,
    offsets: Any,
    segment: int,
    per_segment: int,
    width: int,
    first_number: int,
    counts: Any,
    lows: Any,
    highs: Any,
) -> None:
    """Add every record to its cell; the arrays begin at cell `first_number`, with counts of 0. Times are 0 or later."""
    begin, end, cell = 0, 0, 0  # the cell of the record before: divisions are dear, times alike
    for row in range(ts.shape[0]):
        time = ts[row]
        if time < begin or time >= end:
            number = time // segment
            inside = (time - number * segment) // width
            begin = number * segment + inside * width
            end = min(begin + width, (number + 1) * segment)
            cell = number * per_segment + inside - first_number
        if counts[cell] == 0:
            lows[cell] = offsets[row]
        counts[cell] += 1
        highs[cell] = offsets[row]
