"""Of several results for one window in a round, the last: an update is sent once a round.

A round larger than a batch goes through the operators in pieces, and each piece sends its updates. Only the last
of a window's says something that the ones before do not, so only it is kept, in its place.

Thread rule: pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.windows.events import Int64s
from tidegate.windows.operators.shapes import WindowRows, join_rows

DENSE = 8  # times as much room as rows may be marked in


def last_of_each(pieces: Sequence[WindowRows]) -> WindowRows:
    """The pieces behind each other, of every (key, start, end) only the last row."""
    rows = join_rows(pieces)
    if len(pieces) == 1:
        return rows
    numbers, room = _codes(rows.key)
    for bound in (rows.window_start, rows.window_end):
        codes, count = _codes(pa.array(bound))
        if room * count > DENSE * len(rows) + (1 << 16):
            numbers, room = _codes(pa.array(numbers))
        numbers, room = numbers * count + codes, room * count
    if room > DENSE * len(rows) + (1 << 16):
        numbers, room = _codes(pa.array(numbers))
    last = np.full(room, -1, np.int64)
    last[numbers] = np.arange(len(rows))  # of equal numbers the last assignment stays
    kept = np.zeros(len(rows), np.bool_)
    kept[last[last >= 0]] = True
    return rows if kept.all() else rows.take(np.flatnonzero(kept))


def _codes(column: pa.Array) -> tuple[Int64s, int]:
    """A number for each different value, and how many there are."""
    encoded = pc.dictionary_encode(column)
    codes: Int64s = encoded.indices.to_numpy().astype(np.int64)
    return codes, max(1, len(encoded.dictionary))
