"""Stream time, record by record: the largest event time of each source partition so far, and the least of those.

A record without a key, with a time before the epoch, or further ahead than the guard allows moves no clock.

    clocks[p]        the largest event time of partition `partitions[p]`, -1 before any
    floor[0]         what no partition is behind any more: the least clock of those that are not idle; never falls
    stream_time[i]   the clock of record i's partition, with record i
    judged[i]        what record i is judged with: its stream time, or the floor where that is higher
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import (
    BYTES,
    INT64,
    INT64S,
    READ_BYTES,
    READ_INT32S,
    READ_INT64S,
    kernel,
)

GOOD, NO_KEY, NEGATIVE, FUTURE = 0, 1, 2, 3


@register_jitable
def least_clock(clocks: Any, idle: Any, count: int) -> int:
    """The least clock of partitions that are not idle; -1 when all are."""
    least = -1
    found = False
    for at in range(count):
        if idle[at] == 0 and (not found or clocks[at] < least):
            least = clocks[at]
            found = True
    return least


@kernel(
    types.int64(
        INT64, READ_INT64S, READ_INT32S, READ_BYTES, INT64, READ_INT64S, INT64,
        READ_INT32S, INT64S, BYTES, BYTES, INT64S, INT64S, INT64S, BYTES,
    )
)  # fmt: skip
def advance_clocks(
    first: int,
    ts: Any,
    partition: Any,
    key_valid: Any,
    key_start: int,
    stamped: Any,
    latest: int,
    partitions: Any,
    clocks: Any,
    idle: Any,
    seen: Any,
    floor: Any,
    stream_time: Any,
    judged: Any,
    verdicts: Any,
) -> int:
    """Go on from record `first`; the record that has an unknown partition, or the number of records.

    `key_valid` is a bitmap from bit `key_start` on, no bytes when every record has a key. `stamped` are stream
    times from before a shuffle, no elements when there are none. `seen[p]` becomes 1 when a clock was asked.
    """
    count = partitions.shape[0]
    at = -1
    for row in range(first, ts.shape[0]):
        number = partition[row]
        if at < 0 or partitions[at] != number:
            at = -1
            for other in range(count):
                if partitions[other] == number:
                    at = other
                    break
            if at < 0:
                return row
        verdict = GOOD
        if key_valid.shape[0] > 0:
            bit = key_start + row
            if (key_valid[bit >> 3] >> (bit & 7)) & 1 == 0:
                verdict = NO_KEY
        if verdict == GOOD:
            if ts[row] < 0:
                verdict = NEGATIVE
            elif ts[row] > latest:
                verdict = FUTURE
        if verdict == GOOD:
            time = ts[row]
            if stamped.shape[0] > 0 and stamped[row] > time:
                time = stamped[row]
            seen[at] = 1
            before = clocks[at]
            was_idle = idle[at]
            idle[at] = 0
            if time > before:
                clocks[at] = time
            if was_idle == 1 or (time > before and before <= floor[0]):
                least = least_clock(clocks, idle, count)
                if least > floor[0]:
                    floor[0] = least
        stream_time[row] = clocks[at]
        judged[row] = max(clocks[at], floor[0])
        verdicts[row] = verdict
    return int(ts.shape[0])
