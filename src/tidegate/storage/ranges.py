"""The result of a load: the rows of every request, as ordered views of one key each or as one table.

Keyed requests are answered key by key, in the order of their keys; a key requested twice is answered twice, and a key
without rows has an empty view. A view is zero-copy: it holds stretches of runs, and copies rows only to build a batch.
A position is a row's index in the view, from 0 to `len(view)`.

Close the result, preferably with `with`: until then packs are pinned and a scratch slot may be taken.
`Holding` releases all of that exactly once, when the last holder closes: the loaded ranges themselves, and each view
entered with `with`.

Thread rule: one thread at a time; closing is safe from any.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.storage.lookup import Found, Int32s, cut, gather, stretch_ends
from tidegate.storage.runs.columns import row_keys
from tidegate.storage.scratch import Permit, Scratch, ScratchLimiter
from tidegate.storage.spec import Cursor, Merge, StoreSpec

# -- views -------------------------------------------------------------------------------------------

_COUNTING = threading.Lock()


class Holding:
    """What a load holds, with a reference count: pins, and a scratch permit once a stored run is read."""

    __slots__ = ("_holders", "_permit", "_releases", "_rests", "_scratch")

    def __init__(self, scratch: ScratchLimiter) -> None:
        self._holders = 1
        self._releases: list[Callable[[], None]] = []
        self._scratch = scratch
        self._permit: Permit | None = None
        self._rests = False

    @property
    def is_open(self) -> bool:
        return self._holders > 0

    def add(self, release: Callable[[], None]) -> None:
        self._releases.append(release)

    def retain(self) -> None:
        with _COUNTING:
            if self._holders == 0:
                raise InvalidError("these ranges are closed: load them again")
            self._holders += 1

    def release(self) -> None:
        """Remove one holder; the last one releases everything, even if one release fails."""
        with _COUNTING:
            self._holders -= 1
            last = self._holders == 0
        if last and (self._releases or self._permit is not None):
            with ExitStack() as all_of_them:
                all_of_them.callback(self._give_back)
                for release in self._releases:
                    all_of_them.callback(release)

    def need_scratch(self) -> None:
        """Take the load's scratch permit, when the first stored run is read."""
        if not self.is_open:
            raise InvalidError("this load is closed, and its packs may be gone: load again")
        if self._permit is None:
            self._permit = self._scratch.permit(Scratch.READER)

    def rest(self) -> None:
        """Release the permit until more is read."""
        self._rests = self._rests or self._permit is not None
        self._give_back()

    def go_on(self) -> None:
        """Take a permit again if it was released."""
        if self._rests:
            self._rests = False
            self.need_scratch()

    def _give_back(self) -> None:
        permit, self._permit = self._permit, None
        if permit is not None:
            permit.close()


class SortedRangeView:
    """The rows of one key inside one request's bounds, ascending by cursor."""

    __slots__ = ("_ends", "_entered", "_found", "_hides", "_holding", "_schema", "_stretches", "key", "rows")

    def __init__(
        self,
        found: Found,
        stretches: Int32s,
        rows: int,
        key: bytes,
        schema: pa.Schema,
        holding: Holding,
        hides: bool = True,  # whether runs have columns hidden from readers
    ) -> None:
        self.key = key
        self.rows = rows
        self._found = found
        self._stretches = stretches
        self._schema = schema
        self._holding = holding
        self._hides = hides
        self._ends: list[int] | None = None
        self._entered = 0

    def __len__(self) -> int:
        return self.rows

    def __enter__(self) -> SortedRangeView:
        self._holding.retain()
        self._entered += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release what entering the view took; idempotent."""
        if self._entered:
            self._entered -= 1
            self._holding.release()

    # ── seeking ──────────────────────────────────────────────────────────────────────────────────────────────

    def cursor(self, position: int) -> Cursor:
        """The cursor of the row at this position."""
        line, row = self._locate(position)
        run = self._found.run_of(line)
        return Cursor(int(run.ts[row]), int(run.seq[row]))

    def seek_eq(self, cursor: Cursor) -> int | None:
        """The position of the row with this cursor; None when the view has no such row."""
        position = bisect_left(range(self.rows), cursor, key=self.cursor)
        return position if position < self.rows and self.cursor(position) == cursor else None

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    def to_batch(self, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """All rows: ts, seq and payload, or the given columns."""
        return self.slice(0, self.rows, columns)

    def slice(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Rows from position `start` up to, not including, `stop`; clamped to the view."""
        self._check_open()
        start, stop = max(0, start), min(self.rows, stop)
        whole = (start, stop) == (0, self.rows)
        part = self._stretches if whole else cut(self._stretches, self._stretch_ends(), start, stop)
        if columns is None:
            return gather(self._found, part, self._schema, select=self._hides)
        return gather(self._found, part, pa.schema([self._schema.field(name) for name in columns]))

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """All rows without a copy, one batch per stretch."""
        self._check_open()
        names = self._schema.names if columns is None else list(columns)
        for line, start, stop in self._stretches.tolist():
            yield self._found.run_of(line).rows.slice(start, stop - start).select(names)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    def _check_open(self) -> None:
        if not self._holding.is_open:
            raise InvalidError(
                "this view is closed: read it inside the `with` of its load, or enter the view itself"
            )

    def _stretch_ends(self) -> list[int]:
        if self._ends is None:
            self._ends = stretch_ends(self._stretches)
        return self._ends

    def _locate(self, position: int) -> tuple[int, int]:
        if not 0 <= position < self.rows:
            raise IndexError(f"position {position} of a view of {self.rows} rows")
        self._check_open()
        ends = self._stretch_ends()
        at = bisect_right(ends, position)
        line, _, stop = self._stretches[at].tolist()
        return line, stop - (ends[at] - position)


# -- loaded ranges -----------------------------------------------------------------------------------

PIECE_ROWS = (
    1 << 20
)  # of one batch of a result, so that no column of one outgrows Arrow's 2 GiB by count alone


class Answer(NamedTuple):
    """The answer to one keyed request, in pieces of several keys, ascending by the index of their first key."""

    keys: pa.Array
    pieces: Sequence[tuple[int, Found]]


class LoadedRanges:
    """The answers to a plan's requests, in their order."""

    __slots__ = ("_answers", "_closed", "_hides", "_holding", "_schema")

    def __init__(
        self, spec: StoreSpec, schema: pa.Schema, answers: Sequence[Answer], holding: Holding
    ) -> None:
        self._hides = spec.merge is Merge.LAST
        self._schema = schema
        self._answers = answers
        self._holding = holding
        self._closed = False

    def __enter__(self) -> LoadedRanges:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release what the load holds, once no entered view needs it; idempotent."""
        if not self._closed:
            self._closed = True
            self._holding.release()

    def __len__(self) -> int:
        """The number of requests."""
        return len(self._answers)

    def view(self, request: int = 0, key: int = 0) -> SortedRangeView:
        """The rows of the request's key number `key`."""
        self._check_open()
        answer = self._answers[request]
        if not 0 <= key < len(answer.keys):
            raise InvalidError(f"request {request} has {len(answer.keys)} keys; there is no number {key}")
        first, found = next(piece for piece in reversed(answer.pieces) if piece[0] <= key)
        name, stretches = answer.keys[key].as_py(), found.key_stretches(key - first)
        rows = int(found.key_rows[key - first])
        return SortedRangeView(found, stretches, rows, name, self._schema, self._holding, self._hides)

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """All rows of all requests, in bounded pieces.

        Columns are request (its number), key, ts, seq and payload, or those asked for; others are not made.
        """
        schema = columns_of(numbered_schema(self._schema), columns)
        for request, answer in enumerate(self._answers):
            self._check_open()
            yield from self._answer_batches(request, answer, schema)

    def _answer_batches(self, request: int, answer: Answer, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        wanted = pa.schema([field for field in self._schema if field.name in schema.names])
        everything = len(wanted) == len(self._schema) and not self._hides
        keys = answer.keys if "key" in schema.names else None
        for first, found in answer.pieces:
            starts = np.zeros(len(found.key_rows) + 1, np.int64)
            np.cumsum(found.key_rows, out=starts[1:])
            total = int(starts[-1])
            ends = stretch_ends(found.stretches) if total > PIECE_ROWS else []
            for start in range(0, total, PIECE_ROWS):
                stop = min(start + PIECE_ROWS, total)
                part = cut(found.stretches, ends, start, stop) if ends else found.stretches
                columns: dict[str, pa.Array] = {}
                if len(wanted):
                    rows = gather(found, part, wanted, select=not everything)
                    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
                if keys is not None:
                    own = keys.slice(first, len(found.key_rows))
                    within = np.clip(starts - start, 0, stop - start).astype(np.int32)
                    columns["key"] = row_keys(own, within, 0, stop - start)
                yield _batch(schema, request, columns, stop - start)

    def to_table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows of all requests: request, key, ts, seq and payload, or the columns asked for."""
        schema = columns_of(numbered_schema(self._schema), columns)
        return pa.Table.from_batches(self.batches(columns), schema=schema)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidError("these ranges are closed: load them again")


class LoadedPoint(LoadedRanges):
    """The answer to one request for one key, the most common read; it builds everything lazily."""

    __slots__ = ("_found", "_key")

    def __init__(self, schema: pa.Schema, hides: bool, key: bytes, found: Found, holding: Holding) -> None:
        self._schema = schema
        self._hides = hides
        self._key = key
        self._found = found
        self._holding = holding
        self._closed = False

    @property
    def _answers(self) -> Sequence[Answer]:  # type: ignore[override]
        return (Answer(pa.array([self._key], pa.binary()), ((0, self._found),)),)

    def view(self, request: int = 0, key: int = 0) -> SortedRangeView:
        if request or key or self._closed:
            return super().view(request, key)
        found = self._found
        return SortedRangeView(
            found, found.stretches, found.key_rows[0], self._key, self._schema, self._holding, self._hides
        )


def keyed_schema(schema: pa.Schema) -> pa.Schema:
    """The schema with the key before the other columns."""
    return pa.schema([pa.field("key", pa.binary(), nullable=False), *schema])


def numbered_schema(schema: pa.Schema) -> pa.Schema:
    """The schema with the request's index and the key before the other columns."""
    return pa.schema([pa.field("request", pa.int32(), nullable=False), *keyed_schema(schema)])


def columns_of(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """These columns of the schema, in the given order; by default all."""
    if columns is None:
        return schema
    unknown = [name for name in columns if name not in schema.names]
    if unknown or not columns:
        raise InvalidError(f"there are no columns {unknown} to read; there are {schema.names}")
    return pa.schema([schema.field(name) for name in columns])


def _batch(schema: pa.Schema, request: int, columns: Mapping[str, pa.Array], rows: int) -> pa.RecordBatch:
    arrays = [
        pa.array(np.full(rows, request, np.int32)) if name == "request" else columns[name]
        for name in schema.names
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
