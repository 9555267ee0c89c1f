"""Events of a round put together to batches of a size: neither so small that calls cost more than work, nor so large
that what one step leaves is out of the caches when the next one takes it up.

Where updates are sent on, a batch is larger: of a window that changes in several, only the last row is to be sent, and
finding it costs more (`consolidating`) than the caches save.

B1  where batches are cut depends on the events alone, row by row, not on the pieces they came in: a fetch from a log
    may be cut anywhere, and a round that is repeated has to give the same bytes.
B2  a batch is an eighth of the memory that storage's ceiling leaves besides its pool, or less.

Thread rule: pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from tidegate.pipeline.tasks.packing import join_events
from tidegate.pipeline.tasks.timing import Timings
from tidegate.windows.events import EventBatch, Int64s

PIECE_ROWS = 1 << 18  # a core's share of the caches holds about so many, with what is made of them
BATCH_ROWS = 1 << 20
BATCH_BYTES = 256 << 20
NESTED_BYTES = 64  # of a value whose size is not plain to see
OWN_BYTES = 40  # of an event beside its key and columns


def in_batches(
    pieces: Iterable[EventBatch],
    timings: Timings,
    *,
    rows: int = BATCH_ROWS,
    size: int = BATCH_BYTES,
) -> Iterator[EventBatch]:
    """The events in batches of at most `rows` and `size` bytes, one larger event alone."""
    waiting, rows_left, bytes_left = list[EventBatch](), rows, size
    for whole in pieces:
        piece = whole
        while len(piece):
            fitting, taken = fits(piece, rows_left, bytes_left, alone=not waiting)
            if fitting:
                waiting.append(piece.slice(0, fitting))
                rows_left, bytes_left = rows_left - fitting, bytes_left - taken
            if fitting == len(piece):
                break
            piece = piece.slice(fitting, len(piece))
            yield _joined(waiting, timings)
            waiting, rows_left, bytes_left = [], rows, size
    if waiting:
        yield _joined(waiting, timings)


def fits(piece: EventBatch, rows: int, size: int, *, alone: bool) -> tuple[int, int]:
    """How many of the first events have room, and the bytes they take; with `alone` always one."""
    fitting = min(len(piece), rows)
    total = batch_bytes(piece.slice(0, fitting))
    if total <= size:
        return fitting, total
    taken = np.cumsum(row_bytes(piece.slice(0, fitting)))
    fitting = int(np.searchsorted(taken, size, side="right"))
    fitting = max(fitting, 1) if alone else fitting
    return fitting, int(taken[fitting - 1]) if fitting else 0


def batch_bytes(piece: EventBatch) -> int:
    """What the events are reckoned to take: the sum of `row_bytes`, without looking at rows where that is plain."""
    total = OWN_BYTES * len(piece)
    for column in (piece.key, *piece.values.columns):
        if not len(column):
            continue
        width = _width(column.type)
        if width is not None:
            total += width * len(column)
        else:
            bounds = np.frombuffer(column.buffers()[1], np.int32)
            total += int(bounds[column.offset + len(column)] - bounds[column.offset]) + 4 * len(column)
    return total


def row_bytes(piece: EventBatch) -> Int64s:
    """What each event is reckoned to take."""
    sizes = np.full(len(piece), OWN_BYTES, np.int64)
    for column in (piece.key, *piece.values.columns):
        width = _width(column.type)
        if width is not None:
            sizes += width
        elif len(column):
            bounds = np.frombuffer(column.buffers()[1], np.int32)
            sizes += np.diff(bounds[column.offset : column.offset + len(column) + 1]) + 4
    return sizes


def _width(kind: pa.DataType) -> int | None:
    """The bytes of a value; None: they are between its bounds."""
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        return None
    if pa.types.is_primitive(kind) or pa.types.is_decimal(kind):
        return max(1, int(kind.bit_width) // 8)
    return NESTED_BYTES


def _joined(waiting: list[EventBatch], timings: Timings) -> EventBatch:
    with timings("join"):
        return join_events(waiting)
