"""Assign records to windows: tumbling and hopping panes, sessions, sliding windows, merge trees.

Windows start every `advance`, at multiples of it, not before the epoch, and are `size` long. A window accepts a record
while the window's end is after `judged` (the record's stream time) minus grace. Windows consist of panes of width
`pane`, and a record is added to one pane. A record's windows close in the order of their starts: `first_start` is the
start of the first open one where some have closed, and 0 where all are open. The hopping window of a key has the number
key × stride + (its start − lowest) / advance; `lowest` is a multiple of `advance`, `stride` more than the windows a key
can have from there on.

`merge_sessions` joins records to sessions, key by key, in order of arrival. Elements are the sessions found
(0 … found − 1) and then the records. Every accepted record becomes the parent of all sessions it joins, so parents have
higher numbers, and one backward pass leads every element to its final parent. Sessions of one key are sorted by their
end. They do not overlap, unless some had expired from the store when a record arrived; from then on all later sessions
are tested.

A sliding window's events are a range of positions, without those that arrived after the window had closed: `first_end`
of an event is the earliest end of a window that accepts it. An event creates a window that ends with it (at `width` at
the earliest) if that window accepts it, and a window that starts right after it if that window has an event.

The merge tree computes overlapping windows from shared partial results. Level 0 has one node per position, a node of
level n + 1 covers two adjacent nodes of level n; node i of level n has the number bases[n] + i. Nodes that span two
keys exist but are never listed. `firsts` of a row is the first window that accepts it, in the order of `limits`.

Callers guarantee (K2): `rows` has every element once, by key and then by time (sessions: by arrival), as `starts` says;
found sessions ascend by end; live arrays have room for the largest key's sessions and records together; outputs have
room for two windows per event; `away_before` has one element more than `rows`; numbers of hops ascend.
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
    helper,
    int64,
    kernel,
    load,
    pointer,
)

# -- panes -----------------------------------------------------------------------------------------

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
    """Fill a row for each record; returns how many are taken, how many of those only by some of their windows,
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
    """Write a line for each record and closed window, with the extra grace that would have accepted the record."""
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

    Returns how many lines there are; with no room given it only counts.
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
    """Admit each size that still fits below the limit, in order; returns the total used."""
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
    """Whether each number equals the previous one or is one higher."""
    numbers, wrong = pointer(groups), 0
    for row in range(1, groups.shape[0]):
        wrong |= (load(numbers, row) - load(numbers, row - 1)) & ~1  # of a step of 0 or 1 nothing is left
    return wrong == 0


# -- hopping windows -------------------------------------------------------------------------------


@kernel(
    INT64(READ_INT32S, READ_INT32S, READ_INT64S, READ_INT64S, INT64, INT64, INT64, INT64, INT64, INT64S)
)  # fmt: skip
def list_hops(
    rows: Any,
    starts: Any,
    pane_start: Any,
    first_start: Any,
    size: int,
    advance: int,
    lowest: int,
    highest: int,
    stride: int,
    numbers: Any,
) -> Any:
    """The windows from `lowest` to `highest` of panes that all their windows take, each once, ascending.

    Returns how many there are; with no room given it only counts.
    """
    found = int64(0)
    room = numbers.shape[0]
    for key in range(starts.shape[0] - 1):
        following = int64(lowest)
        for place in range(starts[key], starts[key + 1]):
            row = rows[place]
            if first_start[row] > 0:
                continue
            pane = pane_start[row]
            start = max(max(int64(0), pane - size + advance) // advance * advance, following)
            while start <= pane and start <= highest:
                if found < room:
                    numbers[found] = key * stride + (start - lowest) // advance
                found += 1
                if start > LATEST - advance:
                    break
                start += advance
            following = max(following, start)
    return found


@kernel(
    types.void(
        READ_INT64S, INT64, INT64, INT64, INT64, READ_INT32S, READ_INT32S, READ_INT64S, INT32S, INT32S
    )
)  # fmt: skip
def reach_of_hops(
    numbers: Any,
    lowest: int,
    size: int,
    advance: int,
    stride: int,
    rows: Any,
    starts: Any,
    pane_start: Any,
    lows: Any,
    highs: Any,
) -> None:
    """Write each window's panes: positions from low up to high."""
    key = int64(-1)
    low, high, stop = int64(0), int64(0), int64(0)
    for at in range(numbers.shape[0]):
        owner = numbers[at] // stride
        start = lowest + numbers[at] % stride * advance
        if owner != key:
            key = owner
            low, stop = int64(starts[key]), int64(starts[key + 1])
            high = low
        while low < stop and pane_start[rows[low]] < start:
            low += 1
        high = max(high, low)
        while high < stop and (start > LATEST - size or pane_start[rows[high]] < start + size):
            high += 1
        lows[at], highs[at] = low, high


# -- sessions --------------------------------------------------------------------------------------

NONE = -1
_LATEST = int64(2**63 - 1)


@kernel(
    INT64(
        READ_INT32S, READ_INT32S, READ_INT64S, READ_INT64S, READ_INT32S, READ_INT64S, READ_INT64S,
        INT64, INT64, INT64, INT64, INT64S, INT64S, INT32S,
        INT32S, INT32S, BYTES, INT64S, INT64S, INT64S, INT32S,
    )
)  # fmt: skip
def merge_sessions(
    rows: Any,
    row_starts: Any,
    ts: Any,
    judged: Any,
    found_starts: Any,
    found_start: Any,
    found_end: Any,
    gap: int,
    allowed: int,
    reach: int,
    stays_final: int,
    live_start: Any,
    live_end: Any,
    live_root: Any,
    parents: Any,
    groups: Any,
    gone: Any,
    late_by: Any,
    out_start: Any,
    out_end: Any,
    out_key: Any,
) -> Any:
    """How many sessions changed; they are out_key, out_start, out_end, by key and then end.

    A session that ends at or before judged − `reach` is not seen. With `stays_final` a session that ends before
    judged − `allowed` is final: a record that would join one is late, and so is a record from before that time which
    lies in no open session. Without it a record is late when the session it makes, with all that it joins, would end
    before that time. late_by[record] says by how much, else 0. groups[element]: the changed session it is in, -1 for
    records that are late and sessions nothing joined. gone[found] is 1 where a session found is in another one now.
    """
    first_record = found_start.shape[0]
    made = int64(0)
    for key in range(row_starts.shape[0] - 1):
        count = int64(0)
        is_plain = True
        for found in range(found_starts[key], found_starts[key + 1]):
            if count > 0 and found_start[found] <= live_end[count - 1]:
                is_plain = False
            live_start[count], live_end[count] = found_start[found], found_end[found]
            live_root[count] = found
            groups[found] = NONE
            gone[found] = 0
            count += 1
        for place in range(row_starts[key], row_starts[key + 1]):
            row = int64(rows[place])
            time = ts[row]
            oldest = time - gap
            newest = time + gap if time <= _LATEST - gap else _LATEST
            unseen = judged[row] - reach
            low, high = int64(0), count
            if count > 0 and live_end[count - 1] < oldest:
                low = count
            while low < high:
                middle = (low + high) // 2
                if live_end[middle] < oldest:
                    low = middle + 1
                else:
                    high = middle
            while low < count and live_end[low] <= unseen:
                is_plain = False
                low += 1
            start, end = time, time
            stop = low
            while stop < count:
                if live_start[stop] <= newest:
                    start, end = min(start, live_start[stop]), max(end, live_end[stop])
                elif is_plain:
                    break
                stop += 1
            close = judged[row] - allowed
            late = close - end
            if stays_final:
                late = int64(0)
                is_inside = False
                for at in range(low, stop):
                    if live_start[at] <= newest:
                        late = max(late, close - live_end[at])
                        if live_start[at] <= time and time <= live_end[at]:
                            is_inside = True
                if time < close and (late > 0 or not is_inside):
                    late = close - time
            if late > 0:
                late_by[row] = late
                parents[first_record + row] = NONE
                groups[first_record + row] = NONE
                continue
            late_by[row] = 0
            root = first_record + row
            parents[root] = root
            kept = low
            for at in range(low, stop):
                if live_start[at] <= newest:
                    parents[live_root[at]] = root
                else:
                    live_start[kept], live_end[kept] = live_start[at], live_end[at]
                    live_root[kept] = live_root[at]
                    kept += 1
            if kept == stop:  # nothing joined: make room for one more
                for at in range(count, stop, -1):
                    live_start[at], live_end[at] = live_start[at - 1], live_end[at - 1]
                    live_root[at] = live_root[at - 1]
                count += 1
            elif stop - kept > 1:
                for at in range(stop, count):
                    to = at - (stop - kept) + 1
                    live_start[to], live_end[to] = live_start[at], live_end[at]
                    live_root[to] = live_root[at]
                count -= stop - kept - 1
            at = kept
            while at > 0 and live_end[at - 1] > end:
                live_start[at], live_end[at] = live_start[at - 1], live_end[at - 1]
                live_root[at] = live_root[at - 1]
                at -= 1
            while at + 1 < count and live_end[at + 1] < end:
                live_start[at], live_end[at] = live_start[at + 1], live_end[at + 1]
                live_root[at] = live_root[at + 1]
                at += 1
            live_start[at], live_end[at], live_root[at] = start, end, root
        for at in range(count):
            if live_root[at] >= first_record:
                out_start[made], out_end[made], out_key[made] = live_start[at], live_end[at], key
                groups[live_root[at]] = made
                made += 1
            else:
                parents[live_root[at]] = NONE
        for place in range(row_starts[key + 1] - 1, row_starts[key] - 1, -1):
            element = first_record + int64(rows[place])
            parent = parents[element]
            if parent != NONE and parent != element:
                groups[element] = groups[parent]
        for found in range(found_starts[key], found_starts[key + 1]):
            if parents[found] != NONE:
                group = groups[parents[found]]
                groups[found] = group
                is_same = out_start[group] == found_start[found] and out_end[group] == found_end[found]
                gone[found] = 0 if is_same else 1
    return made


# -- sliding windows -------------------------------------------------------------------------------

NEVER = 2**63 - 1
_NEVER = int64(NEVER)


@helper
def _end_with(time: int, width: int) -> int:
    """The end of the window that ends with an event."""
    return max(time, width)


@helper
def _end_after(time: int, width: int) -> int:
    """The end of the window that starts right after an event."""
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


# -- merge tree ------------------------------------------------------------------------------------


@helper
def _count_stretch(low: Any, high: Any, levels: int) -> Any:
    """The number of nodes that cover the positions from `low` up to `high`."""
    count = int64(0)
    level = 0
    while low < high:
        if level == levels - 1:
            return count + high - low
        count += (low & 1) + (high & 1)
        low, high, level = (low + 1) >> 1, high >> 1, level + 1
    return count


@helper
def _list_stretch(
    low: Any, high: Any, levels: int, bases: Any, window: Any, at: Any, nodes: Any, windows: Any
) -> Any:
    """List the nodes that hold the places from `low` up to `high`, in the order of the places.

    Merges are done in the order listed, and not every aggregate gives the same in another order. Returns where the
    next node goes. Without room in `nodes` they are only counted.
    """
    end = at + _count_stretch(low, high, levels)
    if nodes.shape[0] == 0:
        return end
    for pair in range(at, end):  # several times as fast as assigning a slice
        windows[pair] = window
    front, back, level = at, end, 0
    while low < high:
        if level == levels - 1:
            for node in range(low, high):
                nodes[front] = bases[level] + node
                front += 1
            return end
        if low & 1:
            nodes[front] = bases[level] + low
            front += 1
            low += 1
        if high & 1:
            high -= 1
            back -= 1
            nodes[back] = bases[level] + high
        low, high, level = low >> 1, high >> 1, level + 1
    return end


@kernel(
    INT64(
        READ_INT32S, READ_INT64S, READ_INT32S, READ_INT32S, READ_INT64S, READ_INT32S, INT64, READ_INT64S,
        INT32S, INT32S,
    )
)  # fmt: skip
def list_nodes(
    rows: Any,
    limits: Any,
    lows: Any,
    highs: Any,
    firsts: Any,
    away_before: Any,
    levels: int,
    bases: Any,
    nodes: Any,
    windows: Any,
) -> Any:
    """Pairs of a node and its window: returns how many, and lists them by window and place if there is room.

    away_before[place] counts rows at earlier places that not every window takes.
    """
    at = int64(0)
    for window in range(limits.shape[0]):
        low, high = int64(lows[window]), int64(highs[window])
        if away_before[high] == away_before[low]:
            if levels == 1:  # the usual case, without a call
                for node in range(low, high):
                    if nodes.shape[0] > 0:
                        nodes[at], windows[at] = bases[0] + node, window
                    at += 1
                continue
            at = _list_stretch(low, high, levels, bases, window, at, nodes, windows)
            continue
        begin = low
        for place in range(low, high):
            if firsts[rows[place]] > limits[window]:
                at = _list_stretch(begin, place, levels, bases, window, at, nodes, windows)
                begin = int64(place + 1)
        at = _list_stretch(begin, high, levels, bases, window, at, nodes, windows)
    return at
