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
from tidegate.windows.operators.base import Flags, WindowRows, join_rows

DENSE = 8  # times as much room as rows may be marked in


def last_of_each(pieces: Sequence[WindowRows]) -> WindowRows:
    """The pieces behind each other, of every (key, start, end) only the last row.

    Rows are left out before pieces are joined, and a piece of which all rows stay is not copied: one window of lists
    can be a large part of the process's memory.
    """
    if len(pieces) == 1:
        return pieces[0]
    kept = _is_last(
        pa.concat_arrays([piece.key for piece in pieces]),
        np.concatenate([piece.window_start for piece in pieces]),
        np.concatenate([piece.window_end for piece in pieces]),
    )
    left, first = list[WindowRows](), 0
    for piece in pieces:
        chosen = np.flatnonzero(kept[first : first + len(piece)])
        first += len(piece)
        if len(chosen):
            left.append(piece if len(chosen) == len(piece) else piece.take(chosen))
    return join_rows(left or pieces)


def _is_last(key: pa.BinaryArray, start: Int64s, end: Int64s) -> Flags:
    """For each row: whether no later row has the same key, start and end."""
    rows = len(start)
    numbers, room = _codes(key)
    for bound in (start, end):
        codes, count = _codes(pa.array(bound))
        if room * count > DENSE * rows + (1 << 16):
            numbers, room = _codes(pa.array(numbers))
        numbers, room = numbers * count + codes, room * count
    if room > DENSE * rows + (1 << 16):
        numbers, room = _codes(pa.array(numbers))
    last = np.full(room, -1, np.int64)
    last[numbers] = np.arange(rows)  # of equal numbers the last assignment stays
    kept: Flags = np.zeros(rows, np.bool_)
    kept[last[last >= 0]] = True
    return kept


def _codes(column: pa.Array) -> tuple[Int64s, int]:
    """A number for each different value, and how many there are."""
    encoded = pc.dictionary_encode(column)
    codes: Int64s = encoded.indices.to_numpy().astype(np.int64)
    return codes, max(1, len(encoded.dictionary))
