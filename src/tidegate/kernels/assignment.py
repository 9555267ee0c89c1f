"""Which windows take a record: panes, the windows that closed before it, and what those are told.

Windows start every `advance` at multiples of it, never before the epoch, and are `size` long; one takes a record
while its end lies after the record's time of judgement less grace. Windows are made of panes `pane` wide, and a
record goes into one. Its windows close in the order they start, so those that still take it are the last ones:
`first_start` names the first of them where some have closed, and 0 where all take it.
"""

from __future__ import annotations

from typing import Any

from numba import types

from tidegate.kernels.compiling import (
    BYTES,
    INT32S,
    INT64,
    INT64S,
    READ_BYTES,
    READ_INT32S,
    READ_INT64S,
    kernel,
)
from tidegate.kernels.memory import load, pointer

LATEST = 2**63 - 1


@kernel(
    types.UniTuple(types.int64, 3)(
        READ_INT64S, READ_INT64S, READ_BYTES, INT64,
        INT64, INT64, INT64, INT64, BYTES, INT64S, INT64S, INT32S,
    )
)  # fmt: skip
def assign_panes(
    ts: Any,
    judged: Any,
    verdicts: Any,
    highest_verdict: int,
    size: int,
    advance: int,
    pane: int,
    grace: int,
    taken: Any,
    pane_start: Any,
    first_start: Any,
    late_windows: Any,
) -> tuple[int, int, int]:
    """Fill a row for each record; answers how many are taken, how many of those only by some of their windows,
    and how many windows in all were closed to a record.

    Records with a verdict above `highest_verdict` are left out; `judged` must be at least 0 for the others.
    """
    accepted, partly, closed = 0, 0, 0
    low, first, last = (
        -1,
        0,
        0,
    )  # the pane of the record before, and its windows: divisions are dear, times alike
    for row in range(ts.shape[0]):
        taken[row] = 0
        pane_start[row] = 0
        first_start[row] = 0
        late_windows[row] = 0
        if verdicts[row] != 0 and verdicts[row] != highest_verdict:
            continue
        time = ts[row]
        if low < 0 or time < low or time - low >= pane:
            low = time // pane * pane
            first = max(0, low - size + advance) // advance * advance
            last = low // advance * advance
        windows = 1 if first == last else (last - first) // advance + 1
        close = judged[row] - grace
        late = 0
        if close == LATEST:
            late = windows
        elif close - size >= first:
            late = min(windows, (close - size - first) // advance + 1)
        pane_start[row] = low
        late_windows[row] = late
        closed += late
        if late < windows:
            taken[row] = 1
            accepted += 1
            if late > 0:
                partly += 1
                first_start[row] = first + late * advance
    return accepted, partly, closed


@kernel(types.void(READ_INT64S, READ_INT64S, READ_INT32S, INT64, INT64, INT64, INT64S, INT64S, INT64S))
def list_late(
    ts: Any,
    judged: Any,
    late_windows: Any,
    size: int,
    advance: int,
    grace: int,
    rows: Any,
    window_start: Any,
    how_late: Any,
) -> None:
    """One line for each record and window that was closed to it: how much more grace would have let it in."""
    line = 0
    for row in range(ts.shape[0]):
        first = max(0, ts[row] - size + advance) // advance * advance
        for number in range(late_windows[row]):
            start = first + number * advance
            end = start + size if start <= LATEST - size else LATEST
            rows[line] = row
            window_start[line] = start
            how_late[line] = max(1, judged[row] - grace - end + 1)
            line += 1


@kernel(types.int64(READ_INT64S, READ_INT64S, INT64, INT64, INT64, INT64, INT64S, INT64S))
def list_windows(
    pane_start: Any,
    first_start: Any,
    size: int,
    advance: int,
    lowest: int,
    highest: int,
    rows: Any,
    window_start: Any,
) -> int:
    """One line for each pane and window it belongs to, of windows that start from `lowest` to `highest`.

    Answers how many lines there are; with no room given it only counts.
    """
    line = 0
    room = rows.shape[0]
    for row in range(pane_start.shape[0]):
        pane = pane_start[row]
        start = max(max(0, pane - size + advance) // advance * advance, first_start[row])
        if start < lowest:
            start += (lowest - start + advance - 1) // advance * advance
        while start <= pane and start <= highest:
            if line < room:
                rows[line] = row
                window_start[line] = start
            line += 1
            if start > LATEST - advance:
                break
            start += advance
    return line


@kernel(types.int64(READ_INT64S, INT64, INT64, BYTES))
def admit_sizes(sizes: Any, used: int, limit: int, admitted: Any) -> int:
    """Admit each size that still fits below the limit, in turn; answers what is used then."""
    for row in range(sizes.shape[0]):
        fits = used + sizes[row] <= limit
        admitted[row] = fits
        if fits:
            used += sizes[row]
    return used


@kernel(
    types.void(
        READ_INT64S, READ_INT64S, READ_INT64S, READ_INT64S, READ_INT32S, INT64S, INT64S, INT64S, INT64S, INT64S
    )
)  # fmt: skip
def note_records(
    ones: Any,
    times: Any,
    low_offsets: Any,
    high_offsets: Any,
    groups: Any,
    scratch: Any,
    counts: Any,
    max_ts: Any,
    min_offset: Any,
    max_offset: Any,
) -> None:
    """Make the notes of each group of its records, or of notes of records; no `ones`: each row is one record.

    `scratch` has four zeros for each group: what belongs together lies together while groups come in any order.
    """
    is_plain = ones.shape[0] == 0
    for row in range(groups.shape[0]):
        at = 4 * groups[row]
        is_new = scratch[at] == 0
        scratch[at] += 1 if is_plain else ones[row]
        if is_new or times[row] > scratch[at + 1]:
            scratch[at + 1] = times[row]
        if is_new or low_offsets[row] < scratch[at + 2]:
            scratch[at + 2] = low_offsets[row]
        if is_new or high_offsets[row] > scratch[at + 3]:
            scratch[at + 3] = high_offsets[row]
    for group in range(counts.shape[0]):
        at = 4 * group
        counts[group] = scratch[at]
        max_ts[group] = scratch[at + 1]
        min_offset[group] = scratch[at + 2]
        max_offset[group] = scratch[at + 3]


@kernel(
    types.void(
        READ_INT64S, READ_INT64S, READ_INT64S, READ_INT64S, READ_INT32S, INT64S, INT64S, INT64S, INT64S
    )
)  # fmt: skip
def note_in_order(
    ones: Any,
    times: Any,
    low_offsets: Any,
    high_offsets: Any,
    groups: Any,
    counts: Any,
    max_ts: Any,
    min_offset: Any,
    max_offset: Any,
) -> None:
    """What `note_records` makes of groups that ascend, each with at least one row."""
    is_plain = ones.shape[0] == 0
    before, count, latest, low, high = -1, 0, 0, 0, 0
    for row in range(groups.shape[0]):
        group = groups[row]
        is_new = group != before
        before = group
        count = (0 if is_new else count) + (1 if is_plain else ones[row])
        latest = times[row] if is_new else max(latest, times[row])
        low = low_offsets[row] if is_new else min(low, low_offsets[row])
        high = high_offsets[row] if is_new else max(high, high_offsets[row])
        counts[group] = count
        max_ts[group] = latest
        min_offset[group] = low
        max_offset[group] = high


@kernel(types.boolean(READ_INT32S))
def rise_by_one(groups: Any) -> bool:
    """Whether each number is the one before it or the next."""
    numbers, wrong = pointer(groups), 0
    for row in range(1, groups.shape[0]):
        wrong |= (load(numbers, row) - load(numbers, row - 1)) & ~1  # of a step of 0 or 1 nothing is left
    return wrong == 0
