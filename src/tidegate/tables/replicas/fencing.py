"""Whose records count: the rule by which every replica, at whatever time it reads, takes the same ones.

A leader that was paused, cut off or given up for dead may append at any later moment, and no lock and no clock can keep
it from that. So nothing is asked of writers: readers decide, from the order of the version topic alone.

    offset   0 … 41   42        43 … 57         58        59         60 …
             push     stamp A   A's records     stamp B   A's: late  B's records
                      epoch 1   count           epoch 2   ignored    count

F1  a leadership stamp counts when its epoch is larger than that of every stamp before it. From a stamp that counts up
    to the next one, the records of its sender count and no others; their GUID is the fencing token.
F2  before the first stamp everything counts: it is the push.
F3  stamps and heartbeats pass; they are no data. A damaged stamp is none.

Thread rule: values and pure functions.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.integrity.columns import IntegrityColumns
from tidegate.integrity.control_records import Leadership, leadership_stamps

NOBODY: Final = Leadership(0, b"")


class Screened(NamedTuple):
    """Which records of a batch count, and who leads after it."""

    counts: NDArray[np.bool_] | None
    """None: all of them."""
    leadership: Leadership
    stamped_at: int
    """The row of the last stamp that counted, -1 without."""


def screen(leadership: Leadership, batch: pa.RecordBatch, columns: IntegrityColumns) -> Screened:
    """Apply F1 to F3 to the next records of a version topic's partition."""
    stamps = list(leadership_stamps(batch, columns))
    if leadership == NOBODY and not stamps:
        return Screened(None, NOBODY, -1)
    counts = np.ones(len(columns), np.bool_)
    stamped_at, start = -1, 0
    for row, found in stamps:
        if found.epoch > leadership.epoch:
            counts[start:row] = _senders(leadership, columns, start, row)
            leadership, stamped_at, start = found, row, row
    counts[start:] = _senders(leadership, columns, start, len(columns))
    return Screened(None if counts.all() else counts, leadership, stamped_at)


def _senders(leadership: Leadership, columns: IntegrityColumns, start: int, stop: int) -> NDArray[np.bool_]:
    """The rows that are this leader's, or nobody's in particular."""
    if leadership == NOBODY:
        return np.ones(stop - start, np.bool_)
    part = columns[start:stop]
    high, low = (int.from_bytes(half, "big") for half in (leadership.guid[:8], leadership.guid[8:]))
    chosen: NDArray[np.bool_] = (part.guid_high == high) & (part.guid_low == low) | part.is_heartbeat
    return chosen
