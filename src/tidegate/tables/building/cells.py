"""Which offsets of a partition speak of which windows: what `explain` reads again, and no more.

Time is cut into cells, each the size of a window or a 256th of a time segment, whichever is more; no cell reaches over
the border of a time segment. For every cell are kept

    count          records whose window (by its start; a session by its end) lies in the cell
    low, high      their lowest and highest offset
    dropped_from   the first offset that came when the window had expired; -1 for none

C1  every record of a window that the table was given lies between `low` and `high` of the window's cell.
C2  observed time never falls, so of one time segment nothing is stored any more from `dropped_from` on.
C3  at most `MOST_CELLS` are kept: beyond that the ones go that expired, and of those the ones that were spoken of
    longest ago.

Thread rule: noted by the draining thread; a cell is replaced, never changed, so that any thread may look.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from tidegate.kernels.stream_time import note_cells
from tidegate.windows.stores.segments import Expiry, Int64s

MOST_CELLS: Final = 1024
CELLS_OF_A_SEGMENT: Final = 256
MOST_AT_ONCE: Final = 1 << 15  # cells that a batch may span and still be counted in a row of counters


class Cell(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The records of one cell."""

    count: int
    low: int
    high: int
    dropped_from: int = -1


class OffsetCells:
    """The cells of one partition."""

    def __init__(self, expiry: Expiry, size_ms: int) -> None:
        self._segment_ms = expiry.interval_ms
        self._per_segment = min(max(1, self._segment_ms // max(1, size_ms)), CELLS_OF_A_SEGMENT)
        self._width_ms = -(-self._segment_ms // self._per_segment)
        self.cells: dict[int, Cell] = {}

    def find(self, ts: int) -> Cell | None:
        """The cell of a window, if it is kept."""
        return self.cells.get(self._number(ts))

    def note(self, ts: Int64s, offsets: Int64s, dropped: Int64s, first_readable_ts: int) -> None:
        """Records with these times at these ascending offsets came; `dropped` are the rows that had expired."""
        if not len(ts):
            return
        first, last = self._number(int(ts.min())), self._number(int(ts.max()))
        if first == last:
            self._add(first, len(ts), int(offsets[0]), int(offsets[-1]))
        elif last - first < MOST_AT_ONCE:
            self._note_near(ts, offsets, first, last - first + 1)
        else:
            self._note_far(self._numbers(ts), offsets)
        for row in dropped[np.unique(self._numbers(ts[dropped]), return_index=True)[1]].tolist():
            number = self._number(int(ts[row]))
            cell = self.cells[number]
            if cell.dropped_from < 0:
                self.cells[number] = msgspec.structs.replace(cell, dropped_from=int(offsets[row]))
        if len(self.cells) > MOST_CELLS:
            self._forget(self._number(first_readable_ts))

    def _note_near(self, ts: Int64s, offsets: Int64s, first: int, span: int) -> None:
        counts, lows, highs = np.zeros((3, span), np.int64)
        note_cells(
            ts, offsets, self._segment_ms, self._per_segment, self._width_ms, first, counts, lows, highs
        )
        for at in np.flatnonzero(counts).tolist():
            self._add(first + at, int(counts[at]), int(lows[at]), int(highs[at]))

    def _note_far(self, numbers: Int64s, offsets: Int64s) -> None:
        """Windows that lie too far apart for a row of counters."""
        cells, owners = np.unique(numbers, return_inverse=True)
        low, high = np.empty(len(cells), np.int64), np.empty(len(cells), np.int64)
        low[owners[::-1]] = offsets[::-1]  # of equal places the last one written stays
        high[owners] = offsets
        counts = np.bincount(owners)
        for noted in zip(cells.tolist(), counts.tolist(), low.tolist(), high.tolist(), strict=True):
            self._add(*noted)

    def _add(self, number: int, count: int, low: int, high: int) -> None:
        known = self.cells.get(number)
        if known is not None:
            count, low = known.count + count, known.low
        self.cells[number] = Cell(count, low, high, -1 if known is None else known.dropped_from)

    def _forget(self, first_readable: int) -> None:
        ranked = sorted(self.cells.items(), key=lambda each: (each[0] >= first_readable, each[1].high))
        for number, _ in ranked[: len(ranked) - MOST_CELLS]:
            del self.cells[number]

    def _number(self, ts: int) -> int:
        segment, rest = divmod(ts, self._segment_ms)
        return segment * self._per_segment + rest // self._width_ms

    def _numbers(self, ts: Int64s) -> Int64s:
        segments = ts // self._segment_ms
        if self._per_segment == 1:
            return segments
        return segments * self._per_segment + (ts - segments * self._segment_ms) // self._width_ms
