"""The interface of all operators over events: their inputs and outputs.

An operator judges every record with the record's own stream time, so its results over a whole stream do not depend
on batch boundaries. Three external inputs are the exceptions; a `Moment` carries them: the time of the round (for
the future guard and for idle sources), a watermark, and the end of the input.

Thread rule: values; an operator belongs to its task's one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.storage import ScratchLimiter
from tidegate.storage.runs.columns import list_bytes, merge_needs, window_words
from tidegate.windows.events import Columns, EventBatch, Int64s

Flags = npt.NDArray[np.bool_]
RESULT_COPIES = 2  # lists in results exist twice: as columns, and encoded


@dataclass(frozen=True, slots=True)
class Moment:
    """The time inputs of a round; fixed while the round lasts, and the same when it is repeated."""

    now_ms: int
    watermark: int | None = None  # stream time is at least this, whatever the records say
    closing: bool = False  # the input ends here: every window is final


@dataclass(frozen=True, eq=False)
class WindowRows(Columns):
    """Results of windows, one row each: key, bounds, values, and notes about the records.

    `ts` is the timestamp of the row when it is sent. `deleted` marks windows that ceased to exist (a session that
    was merged into another); their values are null. `count` records with offsets from `min_offset` to `max_offset`
    made the values; they are used to explain a result.
    """

    key: pa.BinaryArray
    window_start: Int64s
    window_end: Int64s
    ts: Int64s
    values: pa.RecordBatch
    count: Int64s
    min_offset: Int64s
    max_offset: Int64s
    deleted: Flags | None = None  # None: no row is deleted

    def __len__(self) -> int:
        return len(self.window_start)

    def to_batch(self) -> pa.RecordBatch:
        """Return everything as one batch; the values are one struct column, so that no name can clash."""
        columns = {
            "key": self.key,
            "window_start": pa.array(self.window_start),
            "window_end": pa.array(self.window_end),
            "ts": pa.array(self.ts),
            "deleted": pa.array(_deleted(self)),
            "count": pa.array(self.count),
            "min_offset": pa.array(self.min_offset),
            "max_offset": pa.array(self.max_offset),
            "values": pa.StructArray.from_arrays(self.values.columns, fields=list(self.values.schema))
            if self.values.num_columns
            else pa.array([{}] * len(self), pa.struct([])),
        }
        return pa.RecordBatch.from_pydict(columns)


def rows_that_fit(pieces: Iterable[WindowRows], scratch: ScratchLimiter) -> list[WindowRows]:
    """Return the pieces of one result; `OverloadError` as soon as their lists are too large to be sent."""
    found, nbytes = list[WindowRows](), 0
    for piece in pieces:
        found.append(piece)
        nbytes += list_bytes(piece.values.columns)
        scratch.check(RESULT_COPIES * nbytes, lambda: "the result of " + largest_window(found))
    return found


def largest_window(pieces: Sequence[WindowRows]) -> str:
    """Describe the window whose lists are the longest."""
    piece = max(pieces, key=lambda each: list_bytes(each.values.columns))
    row = int(np.argmax(merge_needs(piece.values.columns)))
    return window_words(piece.key[row].as_py(), int(piece.window_start[row]), int(piece.window_end[row]))


def join_rows(pieces: Sequence[WindowRows]) -> WindowRows:
    """Concatenate several results; at least one."""
    if len(pieces) == 1:
        return pieces[0]
    if any(piece.deleted is not None for piece in pieces):
        pieces = [replace(piece, deleted=_deleted(piece)) for piece in pieces]
    columns = zip(*(piece._columns() for piece in pieces), strict=True)
    return WindowRows(*map(_concatenated, columns))


def _deleted(rows: WindowRows) -> Flags:
    return np.zeros(len(rows), np.bool_) if rows.deleted is None else rows.deleted


def _concatenated(pieces: Sequence[Any]) -> Any:
    first = pieces[0]
    if first is None or isinstance(first, np.ndarray):
        return None if first is None else np.concatenate(pieces)
    return pa.concat_batches(pieces) if isinstance(first, pa.RecordBatch) else pa.concat_arrays(pieces)


def no_rows(values: pa.Schema) -> WindowRows:
    """Return an empty result with these values."""
    none = np.empty(0, np.int64)
    empty = pa.RecordBatch.from_pylist([], values)
    return WindowRows(pa.array([], pa.binary()), none, none, none, empty, none, none, none)


@dataclass(frozen=True, eq=False)
class LateRows:
    """Records that were set aside, one row for each window that did not accept them.

    `how_late_ms`: for reason `late`, how much more grace the record would have needed; for `future`, how far its
    time is beyond the guard. `window_start` is -1 where no window was concerned.
    """

    events: EventBatch
    window_start: Int64s
    how_late_ms: Int64s
    reason: pa.StringArray

    def __len__(self) -> int:
        return len(self.events)


class LateLines(NamedTuple):
    """One line for each pair of a record and a window that was already closed."""

    rows: Int64s
    window_start: Int64s
    how_late_ms: Int64s


class Places(NamedTuple):
    """The positions of records in their topic, in order of arrival."""

    partition: npt.NDArray[np.int32]
    offset: Int64s

    @classmethod
    def of(cls, events: EventBatch, chosen: Flags) -> Places:
        """Return the positions of the chosen events."""
        rows = np.flatnonzero(chosen)
        return cls(events.partition[rows], events.offset[rows])


Rows: TypeAlias = WindowRows | EventBatch


@dataclass(frozen=True, slots=True)
class Output:
    """The result of one call: rows to send, records set aside, and counters.

    `places` are the positions of records that were left out of some or all results, by the counter that counts them.
    """

    rows: Rows
    late: LateRows | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, Places] = field(default_factory=dict)
