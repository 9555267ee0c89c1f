"""Tiles: pre-aggregates at several widths, so that a long range is a few large pieces and some small ones.

Widths ascend, each a whole multiple of the one before; a tile [start, start + width) lies at a multiple of its width.
Only tiles with records exist. `cover` chooses the fewest tiles for a range: coarse ones inside, finer ones towards
*both* ends, and what is left at the ends is for the rows themselves. A range whose first moment belongs to a single
row (both ends inclusive, as windows that end at a row have) leaves its front to rows: tiles start after it.

Hopping and sliding windows make theirs on the way, from panes or records side by side (`neighbours`).

Thread rule: `cover` is pure; `Tiles` belong to their operator's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.durations import DurationLike, milliseconds
from tidegate.errors import InvalidError
from tidegate.storage import BucketIndex, PlainState, WorkerStorageRuntime
from tidegate.storage.runs.aggregates import Aggregate
from tidegate.storage.runs.assembling import int64_column
from tidegate.windows.aggregates.folds import Aggregates, Folds
from tidegate.windows.events import EventBatch, Int64s
from tidegate.windows.keys.binary_columns import Int32s
from tidegate.windows.operators.panes import Panes, pane_spec

DEFAULT_WIDTHS = ("1m", "5m", "1h", "1d")


class Stretch(NamedTuple):
    """Time from `start` up to, not including, `end`."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Cover:
    """A range in pieces: rows at the front, tiles by (width, start) ascending by start, rows at the back."""

    front: Stretch
    tiles: tuple[tuple[int, int], ...]
    back: Stretch


def tile_widths(widths: Sequence[DurationLike]) -> tuple[int, ...]:
    """Widths in milliseconds, or why they cannot be."""
    found = tuple(milliseconds(width) for width in widths)
    if not found or found[0] <= 0:
        raise InvalidError(f"tile widths {list(widths)}: give at least one, all above 0")
    for finer, coarser in pairwise(found):
        if coarser <= finer or coarser % finer:
            raise InvalidError(
                f"tile widths {list(widths)}: {coarser} ms is no whole multiple of {finer} ms, so its tiles cannot be"
                " made of the finer ones; use widths such as 1m, 5m, 1h"
            )
    return found


def cover(widths: Sequence[int], start: int, end: int, *, after_start: bool = False) -> Cover:
    """The range [start, end) in tiles; with `after_start` no tile holds the first moment of it."""
    finest = widths[0]
    low = -(-(start + after_start) // finest) * finest
    high = end // finest * finest
    if low >= high:
        return Cover(Stretch(start, end), (), Stretch(end, end))
    head: list[tuple[int, int]] = []
    tail: list[tuple[int, int]] = []
    first, last = low, high
    for number, width in enumerate(widths):
        coarser = widths[number + 1] if number + 1 < len(widths) else None
        if coarser is None or -(-first // coarser) * coarser >= last // coarser * coarser:
            head += [(width, at) for at in range(first, last, width)]
            break
        inner, outer = -(-first // coarser) * coarser, last // coarser * coarser
        head += [(width, at) for at in range(first, inner, width)]
        tail = [(width, at) for at in range(outer, last, width)] + tail
        first, last = inner, outer
    return Cover(Stretch(start, low), (*head, *tail), Stretch(high, end))


class Tiles:
    """Tiles of one operator: a fold store for each width, all fed alike."""

    def __init__(
        self,
        runtime: WorkerStorageRuntime,
        task: str,
        name: str,
        aggregates: Aggregates | Sequence[Aggregate],
        widths: Sequence[DurationLike] = DEFAULT_WIDTHS,
        *,
        bucket_ms: int = 3_600_000,
    ) -> None:
        self.widths = tile_widths(widths)
        self._folds = Folds(aggregates)
        self._panes: dict[int, Panes] = {}
        self.states = []
        for width in self.widths:
            cells = -(-max(bucket_ms, width) // width) * width
            state = PlainState(BucketIndex(pane_spec(f"{name}.{width}", self._folds, cells, cells)))
            runtime.attach(task, state)
            self.states.append(state)
            self._panes[width] = Panes(runtime, task, state, self._folds)

    def add(self, events: EventBatch) -> None:
        """Fold events in at every width."""
        inputs = self._folds.inputs(events)
        for width, panes in self._panes.items():
            columns = {"key": events.key, "ts": int64_column(events.ts // width * width), **inputs}
            panes.fold(pa.RecordBatch.from_pydict(columns))

    def drop_before(self, ts: int) -> None:
        """Drop tiles that end at or before `ts`, as whole time segments."""
        for panes in self._panes.values():
            panes.drop_before(ts)

    def total(self, keys: pa.BinaryArray, start: int, end: int) -> tuple[pa.RecordBatch, Int64s, Int64s]:
        """The results of each key's tiles inside [start, end), their records and how many tiles were read.

        Keys are different from each other. Rows of the cover's front and back are not in the answer: they are
        the caller's to add.
        """
        chosen = cover(self.widths, start, end)
        codes: list[Int32s] = []
        states: list[list[pa.Array]] = []
        for width in self.widths:
            wanted = np.array([at for each, at in chosen.tiles if each == width], np.int64)
            if not len(wanted):
                continue
            found, rows = self._panes[width].of_keys(keys, int(wanted.min()), int(wanted.max()))
            hit = np.flatnonzero(np.isin(rows.ts, wanted))
            codes.append(found[hit])
            states.append([pc.take(column, pa.array(hit)) for column in rows.states])
        schema = [field for each in self._folds.stored for field in each.state]
        empty = [pa.array([], field.type) for field in schema]
        joined = [pa.concat_arrays(list(columns)) for columns in zip(empty, *states, strict=True)]
        owners = np.concatenate([np.empty(0, np.int32), *codes])
        present, groups = np.unique(owners, return_inverse=True)
        numbers: Int32s = groups.astype(np.int32)
        notes, results = self._folds.finish(self._folds.merge(joined, numbers, len(present)))
        place = np.full(len(keys), -1, np.int64)
        place[present] = np.arange(len(present))
        nulls = pa.array(place, mask=place < 0)
        records = np.zeros(len(keys), np.int64)
        records[present] = notes[0]
        return results.take(nulls), records, np.bincount(owners, minlength=len(keys)).astype(np.int64)
