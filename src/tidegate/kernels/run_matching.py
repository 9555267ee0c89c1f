"""Two runs walked side by side: which rows of the one have their identity in the other, too.

Both ascend by (hash, key bytes, ts, seq). The walk leaps in whichever run is behind, so a small run finds its rows
in a large one without reading most of it.

Callers prove (K2): row starts never fall and count the rows, offsets of keys never fall and end inside the bytes.
"""

from __future__ import annotations

from typing import Any

from tidegate.kernels.compiling import INT32S, READ_BYTES, READ_INT32S, READ_INT64S, kernel
from tidegate.kernels.compiling import INT64 as INT64_TYPE
from tidegate.kernels.group_order import READ_UINT64S
from tidegate.kernels.key_bytes import compare, int64
from tidegate.kernels.memory import pointer
from tidegate.kernels.run_join import leap


@kernel(
    INT64_TYPE(
        READ_UINT64S, READ_BYTES, READ_INT32S, READ_INT32S, READ_INT64S, READ_INT64S,
        READ_UINT64S, READ_BYTES, READ_INT32S, READ_INT32S, READ_INT64S, READ_INT64S,
        INT32S, INT32S,
    )
)  # fmt: skip
def match_runs(
    hashes: Any,
    data: Any,
    bounds: Any,
    starts: Any,
    ts: Any,
    seq: Any,
    other_hashes: Any,
    other_data: Any,
    other_bounds: Any,
    other_starts: Any,
    other_ts: Any,
    other_seq: Any,
    rows: Any,
    other_rows: Any,
) -> Any:
    """Pairs of rows with one identity, ascending; answers how many. Room for the smaller run's rows is enough."""
    source, other_source = pointer(data), pointer(other_data)
    found, line, other = int64(0), int64(0), int64(0)
    lines, other_lines = hashes.shape[0], other_hashes.shape[0]
    while line < lines and other < other_lines:
        if hashes[line] < other_hashes[other]:
            line = leap(hashes, line, other_hashes[other])
            continue
        if other_hashes[other] < hashes[line]:
            other = leap(other_hashes, other, hashes[line])
            continue
        order = compare(
            source, int64(bounds[line]), int64(bounds[line + 1]),
            other_source, int64(other_bounds[other]), int64(other_bounds[other + 1]),
        )  # fmt: skip
        if order < 0:
            line += 1
            continue
        if order > 0:
            other += 1
            continue
        at, stop = int64(starts[line]), int64(starts[line + 1])
        place, last = int64(other_starts[other]), int64(other_starts[other + 1])
        while at < stop and place < last:
            if ts[at] < other_ts[place] or (ts[at] == other_ts[place] and seq[at] < other_seq[place]):
                at += 1
            elif ts[at] > other_ts[place] or seq[at] > other_seq[place]:
                place += 1
            else:
                rows[found] = at
                other_rows[found] = place
                found += 1
                at += 1
                place += 1
        line += 1
        other += 1
    return found
