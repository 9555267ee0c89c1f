"""Assign judged records to panes: which are accepted, into which pane, and which windows were already closed.

Thread rule: pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tidegate.kernels.stream_time import GOOD
from tidegate.kernels.windows import assign_panes, list_late
from tidegate.windows.events import Int64s
from tidegate.windows.keys import Bytes, Int32s
from tidegate.windows.kinds import Hopping, Unlimited
from tidegate.windows.operators.clock import Stamped


@dataclass(frozen=True, slots=True, eq=False)
class Assigned:
    """The assignment of every record of a batch; `first_start` is 0 where all windows of a record accept it."""

    taken: Bytes
    pane_start: Int64s
    first_start: Int64s
    late_windows: Int32s
    accepted: int
    partly: int
    closed: int  # pairs of a record and a window that was already closed


@dataclass(frozen=True, slots=True, eq=False)
class LateLines:
    """One line for each pair of a record and a window that was already closed."""

    rows: Int64s
    window_start: Int64s
    how_late_ms: Int64s


def assign(kind: Hopping, ts: Int64s, stamped: Stamped, *, also: int = GOOD) -> Assigned:
    """Return the panes of the records whose verdict is good, or `also`."""
    rows = len(ts)
    taken, late = np.empty(rows, np.uint8), np.empty(rows, np.int32)
    pane_start, first_start = np.empty(rows, np.int64), np.empty(rows, np.int64)
    accepted, partly, closed = assign_panes(
        ts, stamped.judged, stamped.verdicts, also,
        kind.size_ms, kind.advance_ms, kind.pane_ms, kind.grace_ms,
        taken, pane_start, first_start, late,
    )  # fmt: skip
    return Assigned(taken, pane_start, first_start, late, accepted, partly, closed)


def assign_unlimited(kind: Unlimited, ts: Int64s, stamped: Stamped, *, also: int = GOOD) -> Assigned:
    """Assign every record that is not before the one window to it."""
    is_good = (stamped.verdicts == GOOD) | (stamped.verdicts == also)
    taken = ((ts >= kind.start_ms) & is_good).astype(np.uint8)
    panes = np.full(len(ts), kind.start_ms, np.int64)
    none = np.zeros(len(ts), np.int32)
    return Assigned(taken, panes, np.zeros(len(ts), np.int64), none, int(taken.sum()), 0, 0)


def late_lines(kind: Hopping, ts: Int64s, stamped: Stamped, assigned: Assigned) -> LateLines:
    """Return every window that was already closed to a record, in the order of the records."""
    lines = LateLines(*(np.empty(assigned.closed, np.int64) for _ in range(3)))
    list_late(
        ts, stamped.judged, assigned.late_windows, kind.size_ms, kind.advance_ms, kind.grace_ms,
        lines.rows, lines.window_start, lines.how_late_ms,
    )  # fmt: skip
    return lines
