"""Sliding windows found among the events of each key: those a batch changed, or that end in a stretch of time.

Events are given by key and, inside a key, ascending by time (`rows`, `starts`); a window's events are then a stretch
of places, less those that came when the window had closed: `first_end` of an event is the earliest end of a window
that takes it. An event makes a window that ends with it, at `width` at the earliest, if that window takes it, and a
window that starts right after it, if that one holds an event.

Callers prove (K2): `rows` has every event once; outputs have room for two windows an event.
"""

from __future__ import annotations

from typing import Any

from numba.extending import register_jitable

from tidegate.kernels.compiling import (
    INT32S,
    INT64,
    INT64S,
    READ_BYTES,
    READ_INT32S,
    READ_INT64S,
    kernel,
)
from tidegate.kernels.key_bytes import int64

NEVER = 2**63 - 1
_NEVER = int64(NEVER)


@register_jitable
def _end_with(time: int, width: int) -> int:
    """Where the window that ends with an event ends."""
    return max(time, width)


@register_jitable
def _end_after(time: int, width: int) -> int:
    """Where the window that starts right after an event ends."""
    return time + 1 + width if time < _NEVER - width - 1 else _NEVER


@kernel(
    INT64(
        READ_INT32S, READ_INT32S, READ_INT64S, READ_INT64S, READ_BYTES, INT64, INT64, INT64,
        INT32S, INT32S, INT32S, INT64S, INT32S, INT32S,
    )
)  # fmt: skip
def find_windows(
    rows: Any,
    starts: Any,
    ts: Any,
    first_end: Any,
    is_new: Any,
    width: int,
    earliest: int,
    latest: int,
    new_before: Any,
    away_before: Any,
    out_key: Any,
    out_end: Any,
    out_low: Any,
    out_high: Any,
) -> Any:
    """How many windows there are: key, end, places from low up to high; by key and then end.

    With `is_new` (a flag an event) those that hold a new event or did not exist without one; without it (no
    elements) all that end from `earliest` to `latest`. new_before[place] and away_before[place] (one more than
    events) count new events, and events that not every window takes, at earlier places.
    """
    every = is_new.shape[0] == 0
    new_before[0] = 0
    away_before[0] = 0
    for place in range(rows.shape[0]):
        row = rows[place]
        new_before[place + 1] = new_before[place] + (0 if every else is_new[row])
        away_before[place + 1] = away_before[place] + (first_end[row] > _end_with(ts[row], width))
    made = int64(0)
    for key in range(starts.shape[0] - 1):
        stop = int64(starts[key + 1])
        left = int64(starts[key])
        right, low, high = left, left, left
        while right < stop:
            end = _end_after(ts[rows[right]], width)
            if left < stop:
                end = min(end, _end_with(ts[rows[left]], width))
            is_made, was_made, follows_old = False, False, False
            while left < stop and _end_with(ts[rows[left]], width) == end:
                row = rows[left]
                if first_end[row] <= end:
                    is_made = True
                    was_made = was_made or (not every and is_new[row] == 0)
                left += 1
            while right < stop and _end_after(ts[rows[right]], width) == end:
                is_made = True
                follows_old = follows_old or (not every and is_new[rows[right]] == 0)
                right += 1
            if not is_made or end < earliest or end > latest:
                continue
            while low < stop and ts[rows[low]] < end - width:
                low += 1
            high = max(high, low)
            while high < stop and ts[rows[high]] <= end:
                high += 1
            new = int64(new_before[high] - new_before[low])
            held = high - low
            if away_before[high] > away_before[low]:
                for place in range(low, high):
                    row = rows[place]
                    if first_end[row] > end:
                        held -= 1
                        new -= 0 if every else is_new[row]
            existed = not every and (was_made or (follows_old and held > new))
            if new > 0 or (held > 0 and not existed):
                out_key[made], out_end[made], out_low[made], out_high[made] = key, end, low, high
                made += 1
    return made
