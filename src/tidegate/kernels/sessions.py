"""Records joined to sessions, key by key, in the order the records came.

    merge_sessions   the sessions there are after a batch; of each record and each session there was before, the
                     one it ended up in

Elements are the sessions found (0 … found − 1) and then the records. Every record that is taken becomes the parent
of all sessions it joins, and stands for the result until a later record joins that one; so parents always come
later, and one walk backwards leads every element to its last parent.

Sessions of one key are kept sorted by their end. They do not overlap, unless some could not be seen when a record
came (they had left the store for it); from then on all later ones are looked at.

Callers prove (K2): `rows` has every record once, side by side by key as `row_starts` says, in order; found sessions
of key k are found_starts[k] … found_starts[k + 1], ascending by end; live arrays have room for the largest key's
sessions and records together.
"""

from __future__ import annotations

from typing import Any

from tidegate.kernels.compiling import BYTES, INT32S, INT64, INT64S, READ_INT32S, READ_INT64S, kernel
from tidegate.kernels.key_bytes import int64

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
