"""Rows of groups side by side and in order, and the identities among them.

    place_rows       a stable counting sort of rows by group
    sort_cursors     rows of a group by (ts, seq), only where they are not so already
    mark_identities  rows of one (key, ts, seq) next to each other → one number for each identity

Callers prove (K2): all row arrays are equally long, groups and starts are inside them.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import INT32S, INT64, READ_INT32S, READ_INT64S, kernel
from tidegate.kernels.key_bytes import int64
from tidegate.kernels.key_order import sort_rows


@kernel(types.void(READ_INT32S, READ_INT32S, READ_INT32S, INT32S, INT32S, INT32S))
def place_rows(order: Any, counts: Any, groups: Any, following: Any, starts: Any, rows: Any) -> None:
    """Put the rows of group order[0] first, those of order[1] next, each group's as they came.

    `starts` (one more than groups) says where each group's begin; `following` is room for a number a group.
    """
    filled = int64(0)
    for place in range(order.shape[0]):
        group = order[place]
        starts[place] = filled
        following[group] = filled
        filled += counts[group]
    starts[order.shape[0]] = filled
    for row in range(groups.shape[0]):
        group = groups[row]
        rows[following[group]] = row
        following[group] += 1


@register_jitable
def _is_above(cursors: Any, left: Any, right: Any) -> bool:
    """Whether row `left` has the higher (ts, seq); without `seq` (no elements), rows are numbered as they come."""
    ts, seq = cursors
    if ts[left] != ts[right] or seq.shape[0] == 0:
        return bool(ts[left] > ts[right])
    return bool(seq[left] > seq[right])


@kernel(types.void(INT32S, READ_INT32S, READ_INT64S, READ_INT64S, INT32S))
def sort_cursors(rows: Any, starts: Any, ts: Any, seq: Any, scratch: Any) -> None:
    """Sort each group's rows by (ts, seq), keeping equal ones as they are; ascending groups are only read.

    `scratch` is as long as `rows`.
    """
    cursors = (ts, seq)
    for group in range(starts.shape[0] - 1):
        start, stop = int64(starts[group]), int64(starts[group + 1])
        place = start + 1
        while place < stop and not _is_above(cursors, rows[place - 1], rows[place]):
            place += 1
        if place < stop:
            sort_rows(rows, start, stop, _is_above, cursors, scratch)


@kernel(INT64(READ_INT32S, READ_INT32S, READ_INT64S, READ_INT64S, INT32S, INT32S, INT32S))
def mark_identities(
    rows: Any, starts: Any, ts: Any, seq: Any, numbers: Any, lasts: Any, identity_starts: Any
) -> Any:
    """Number the identities of sorted rows: `numbers[row]`, from 0 on in order; answers how many there are.

    `lasts` gets the last row of each identity, `identity_starts` where each group's identities begin.
    """
    found = int64(0)
    for group in range(starts.shape[0] - 1):
        identity_starts[group] = found
        start, stop = int64(starts[group]), int64(starts[group + 1])
        for place in range(start, stop):
            row = rows[place]
            if place > start:
                before = rows[place - 1]
                is_new = ts[before] != ts[row] or (seq.shape[0] > 0 and seq[before] != seq[row])
                found += is_new
            numbers[row] = found
            lasts[found] = row
        found += 1
    identity_starts[starts.shape[0] - 1] = found
    return found
