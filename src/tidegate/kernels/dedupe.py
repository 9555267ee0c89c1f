"""The verdicts of deduplication, in a kernel.

`decide` walks groups of one identity, which `fingerprints.py` made. Times at which the identity was accepted are kept
sorted; a record meets those less than the horizon from it. All numbers are as `windows/operators/dedupe.py` has them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import (
    BYTES,
    INT32S,
    INT64,
    INT64S,
    READ_INT32S,
    READ_INT64S,
    kernel,
)
from tidegate.kernels.key_bytes import int64
from tidegate.kernels.key_hash import READ_FLAGS
from tidegate.kernels.memory import pointer, prefetch

NEW, REPLAY, DUPLICATE, LATE, NO_ID = 0, 1, 2, 3, 4
NOT_KEPT: Final = -(2**31)
AHEAD: Final = 4  # groups whose rows are asked for before they are looked at


@register_jitable
def _first_at(times: Any, count: Any, wanted: Any) -> Any:
    low, high = int64(0), int64(count)
    if high > 0 and times[high - 1] < wanted:  # mostly time goes on
        return high
    while low < high:
        middle = (low + high) >> 1
        if times[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@register_jitable
def _is_near(later: Any, earlier: Any, within: Any) -> Any:
    """Whether two times are less than `within` apart; their difference always fits a word without a sign."""
    return np.uint64(later) - np.uint64(earlier) < np.uint64(within)


@kernel(types.UniTuple(types.int64, 2)(READ_INT32S, READ_INT32S, READ_INT64S, READ_FLAGS, INT32S))
def list_chosen(rows: Any, starts: Any, known_groups: Any, late: Any, chosen: Any) -> Any:
    """The groups that `decide` is to look at; how many they are, and the rows of the largest.

    Others have one row, which is not late, and nothing is known of them: that row is new. `late` has no elements when
    no row is.
    """
    some_late, known, found, largest = late.shape[0] > 0, int64(0), int64(0), int64(0)
    for group in range(starts.shape[0] - 1):
        size = int64(starts[group + 1]) - int64(starts[group])
        is_known = False
        while known < known_groups.shape[0] and known_groups[known] == group:
            is_known = True
            known += 1
        if size > 1 or is_known or (some_late and late[rows[starts[group]]]):
            chosen[found] = group
            found += 1
            largest = max(largest, size)
    return found, largest


@kernel(
    types.void(
        INT32S, READ_INT32S, READ_INT32S, READ_FLAGS, READ_INT64S, READ_INT64S, READ_INT64S, READ_INT32S,
        READ_INT64S, READ_INT64S, READ_INT64S, READ_INT32S, INT64, INT64, INT64,
        INT64S, INT64S, INT32S, INT32S, BYTES,
    )
)  # fmt: skip
def decide(
    rows: Any,
    starts: Any,
    chosen: Any,
    late: Any,
    ts: Any,
    judged: Any,
    offset: Any,
    partition: Any,
    known_groups: Any,
    known_ts: Any,
    known_offset: Any,
    known_partition: Any,
    within: int,
    retention: int,
    refresh: int,
    times: Any,
    offsets: Any,
    partitions: Any,
    origins: Any,
    verdicts: Any,
) -> None:
    """The verdicts of the rows of chosen groups, and in place of these rows those that are to be kept, by ts.

    Group g has the rows rows[starts[g]:starts[g + 1]], in the order they came; `chosen` ascends. What is known from
    before ascends by (group, ts), and all of its groups are chosen; a refresh is known with its offset inverted. A row
    that only refreshes is kept as -row - 1, and behind what is kept of a group stands `NOT_KEPT`. `late` says which
    rows are, with no elements when none is. `times`, `offsets`, `partitions`, `origins` are room for the largest group
    with all that is known of it.
    """
    some_late, known = late.shape[0] > 0, int64(0)
    all_ts, all_judged, all_offsets, all_verdicts = (
        pointer(ts),
        pointer(judged),
        pointer(offset),
        pointer(verdicts),
    )
    for number in range(chosen.shape[0]):
        later = int64(chosen[min(number + AHEAD, chosen.shape[0] - 1)])
        for turn in range(starts[later], min(starts[later] + 2, starts[later + 1])):  # rows lie anywhere
            row = int64(rows[turn])
            prefetch(all_ts, row)
            prefetch(all_judged, row)
            prefetch(all_offsets, row)
            prefetch(all_verdicts, row)
        group = int64(chosen[number])
        first, stop = int64(starts[group]), int64(starts[group + 1])
        count = int64(0)
        while known < known_groups.shape[0] and known_groups[known] == group:
            times[count] = known_ts[known]
            offsets[count] = known_offset[known]
            partitions[count] = known_partition[known]
            origins[count] = 0
            count += 1
            known += 1
        for turn in range(first, stop):
            row = int64(rows[turn])
            time = ts[row]
            place = _first_at(times, count, time)
            same = place < count and times[place] == time
            own = same and offsets[place] == offset[row] and partitions[place] == partition[row]
            if some_late and late[row]:
                verdicts[row] = REPLAY if own and time > judged[row] - retention else LATE
                continue
            if own:
                verdicts[row] = REPLAY
                continue
            mark = int64(row + 1)
            if (place < count and _is_near(times[place], time, within)) or (
                place > 0 and _is_near(time, times[place - 1], within)
            ):
                verdicts[row] = DUPLICATE
                if refresh == 0 or same:
                    continue
                mark = -mark
            else:
                verdicts[row] = NEW
            for at in range(count, place, -1):
                times[at] = times[at - 1]
                offsets[at] = offsets[at - 1]
                partitions[at] = partitions[at - 1]
                origins[at] = origins[at - 1]
            times[place] = time
            offsets[place] = offset[row] if mark > 0 else ~offset[row]
            partitions[place] = partition[row]
            origins[place] = mark
            count += 1
        into = first
        for at in range(count):
            if origins[at] != 0:
                rows[into] = origins[at] - 1 if origins[at] > 0 else origins[at]
                into += 1
        for at in range(into, stop):
            rows[at] = NOT_KEPT


@kernel(INT64(READ_INT32S, READ_INT32S, INT32S, INT32S))
def list_kept(rows: Any, starts: Any, groups: Any, kept: Any) -> Any:
    """The group and the row of everything that is to be kept; answers how many."""
    found = int64(0)
    for group in range(starts.shape[0] - 1):
        for place in range(starts[group], starts[group + 1]):
            row = rows[place]
            groups[found] = group
            kept[found] = row
            found += row != NOT_KEPT
    return found
