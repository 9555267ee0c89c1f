"""Stream time per record, statistics per time cell, and filtering of columns.

Stream time is the largest event time of each source partition so far. A record without a key, with a time before the
epoch, or further ahead than the guard allows advances no clock.

    clocks[p]        the largest event time of partition `partitions[p]`, -1 before any
    floor[0]         the minimum clock of the partitions that are not idle; never decreases
    stream_time[i]   the clock of record i's partition, including record i
    judged[i]        the time that decides lateness of record i: its stream time, or the floor where that is higher

Time is divided into segments, and a segment into `per_segment` cells of `width`, of which the last may be shorter;
cells are numbered consecutively. `flags` of a filter have a byte for each row, not 0 where it is kept.

Callers guarantee (K2): there is room for all kept rows; bounds of values never decrease and end inside their bytes.
"""

from __future__ import annotations

from typing import Any

from numba import types

from tidegate.kernels.jit import (
    BYTES,
    INT32S,
    INT64,
    INT64S,
    READ_BYTES,
    READ_INT32S,
    READ_INT64S,
    copy,
    helper,
    int64,
    kernel,
    load,
    load_word,
    pointer,
    store,
    store_word,
)

# -- stream time -----------------------------------------------------------------------------------

GOOD, NO_KEY, NEGATIVE, FUTURE = 0, 1, 2, 3
UNGUARDED = 2**63 - 1  # as `latest`: no record is too far ahead


@helper
def least_clock(clocks: Any, idle: Any, count: int) -> int:
    """The minimum clock of partitions that are not idle; -1 when all are."""
    least = -1
    found = False
    for at in range(count):
        if idle[at] == 0 and (not found or clocks[at] < least):
            least = clocks[at]
            found = True
    return least


@helper
def _run_on(
    row: int,
    ts: Any,
    partition: Any,
    number: int,
    latest: int,
    clock: int,
    least: int,
    stream_time: Any,
    judged: Any,
    verdicts: Any,
) -> Any:
    """Fast path for valid records of a single partition; returns the next row, its clock and the floor."""
    times, numbers = pointer(ts), pointer(partition)
    to_stream, to_judged, to_verdict = pointer(stream_time), pointer(judged), pointer(verdicts)
    while row < ts.shape[0]:
        time = load(times, row)
        if time < 0 or time > latest or load(numbers, row) != number:
            break
        if time > clock:
            if clock <= least:
                least = max(least, time)
            clock = time
        store(to_stream, row, clock)
        store(to_judged, row, max(clock, least))
        store(to_verdict, row, GOOD)
        row += 1
    return row, clock, least


@kernel(
    types.int64(
        INT64, READ_INT64S, READ_INT32S, READ_BYTES, INT64, READ_INT64S, INT64, INT64,
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
    may_lead: int,
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
    """Process records from `first`; returns the first record with an unknown partition, or the number of records.

    `key_valid` is a bitmap from bit `key_start` on, no bytes when every record has a key. `stamped` are stream
    times from before a shuffle, which move the clocks; no elements when there are none. `may_lead` is 1 where times may
    lie ahead of their stamps (changes of windows); elsewhere only records that were too far ahead when they were read
    do. `seen[p]` becomes 1 when a clock was asked.
    """
    count = partitions.shape[0]
    at, number, clock = int64(-1), int64(0), int64(0)
    has_all_keys, is_stamped = key_valid.shape[0] == 0, stamped.shape[0] > 0
    # a record that was too far ahead when read advanced no clock then, and must not later
    is_judged = is_stamped and may_lead == 0 and latest < UNGUARDED
    least = floor[0]
    is_alone = count == 1 and has_all_keys and not is_stamped
    row = int64(first)
    while row < ts.shape[0]:
        if at < 0 or partition[row] != number:
            if at >= 0:
                clocks[at] = clock
            number = int64(partition[row])
            at = int64(-1)
            for other in range(count):
                if partitions[other] == number:
                    at = other
                    break
            if at < 0:
                floor[0] = least
                return int(row)
            clock = clocks[at]
        if is_alone and idle[0] == 0:
            stopped, clock, least = _run_on(
                row, ts, partition, number, latest, clock, least, stream_time, judged, verdicts
            )
            if stopped > row:
                clocks[0] = clock
                seen[0] = 1
                row = stopped
                continue
        time = ts[row]
        verdict = GOOD
        if not has_all_keys and (key_valid[(key_start + row) >> 3] >> ((key_start + row) & 7)) & 1 == 0:
            verdict = NO_KEY
        elif time < 0:
            verdict = NEGATIVE
        elif time > latest or (is_judged and time > stamped[row]):
            verdict = FUTURE
        else:
            if is_stamped:
                time = stamped[row]
            seen[at] = 1
            if time > clock or idle[at] == 1:
                before = clock
                if time > clock:
                    clock = time
                    clocks[at] = time
                if idle[at] == 1 or before <= least:
                    idle[at] = 0
                    least = max(least, least_clock(clocks, idle, count))
        stream_time[row] = clock
        judged[row] = max(clock, least)
        verdicts[row] = verdict
        row += 1
    floor[0] = least
    return int(ts.shape[0])


# -- cells of time ---------------------------------------------------------------------------------


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
    """Add every record to its cell; the arrays begin at cell `first_number`, with counts 0. Times are not negative."""
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


# -- filtering columns -----------------------------------------------------------------------------


@kernel(types.void(READ_BYTES, READ_INT64S, INT64S))
def filter_words(flags: Any, values: Any, into: Any) -> None:
    """Copy the kept eight-byte values; `into` has room for one more."""
    source, target = pointer(values), pointer(into)
    place = int64(0)
    for row in range(flags.shape[0]):
        store(target, place, load(source, row))
        place += flags[row] != 0


@kernel(types.void(READ_BYTES, READ_INT32S, INT32S))
def filter_halves(flags: Any, values: Any, into: Any) -> None:
    """Copy the kept four-byte values; `into` has room for one more."""
    source, target = pointer(values), pointer(into)
    place = int64(0)
    for row in range(flags.shape[0]):
        store(target, place, load(source, row))
        place += flags[row] != 0


@kernel(INT64(READ_BYTES, READ_INT32S, INT32S))
def filter_bounds(flags: Any, bounds: Any, into: Any) -> Any:
    """Write the offsets of the kept values; returns the last one, their total bytes."""
    place, at = int64(0), int64(0)
    for row in range(flags.shape[0]):
        into[place] = at
        if flags[row] != 0:
            at += int64(bounds[row + 1]) - int64(bounds[row])
            place += 1
    into[place] = at
    return at


@kernel(types.void(READ_BYTES, READ_INT32S, READ_BYTES, BYTES))
def filter_bytes(flags: Any, bounds: Any, data: Any, into: Any) -> None:
    """Copy the bytes of the kept values."""
    source, target = pointer(data), pointer(into)
    row, at, rows = int64(0), int64(0), flags.shape[0]
    while row < rows:
        while row < rows and flags[row] == 0:
            row += 1
        first = row
        while row < rows and flags[row] != 0:
            row += 1
        start, length = int64(bounds[first]), int64(bounds[row]) - int64(bounds[first])
        copy(target, at, source, start, length)
        at += length


@kernel(types.void(READ_BYTES, READ_BYTES, INT64, INT64, BYTES))
def filter_even(flags: Any, data: Any, first: int, width: int, into: Any) -> None:
    """Copy kept values of one width, 8 to 16 bytes; row 0 is at `first`; `into` has room for one more."""
    source, target, last = pointer(data), pointer(into), width - 8
    at = int64(0)
    for row in range(flags.shape[0]):
        start = first + width * row
        store_word(target, at, load_word(source, start))
        store_word(target, at + last, load_word(source, start + last))
        at += width if flags[row] != 0 else 0
