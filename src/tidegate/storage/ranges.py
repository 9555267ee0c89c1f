"""The result of a load: the rows of every request, as ordered views of one key each or as one table.

Keyed requests are answered key by key, in the order of their keys; a key requested twice is answered twice, and a key
without rows has an empty view. A view is zero-copy: it holds stretches of runs, and copies rows only to build a batch.
A position is a row's index in the view, from 0 to `len(view)`.

Close the result, preferably with `with`: until then packs are pinned, keys are in use and a scratch slot may be taken.
`Holding` releases all of that exactly once, when the last holder closes: the loaded ranges themselves, and each view
entered with `with`.

Thread rule: one thread at a time; closing is safe from any.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Protocol

import numpy as np
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.storage.lookup import Found, Int32s, cut, gather, stretch_ends
from tidegate.storage.runs.columns import UInt64s, row_keys
from tidegate.storage.runs.run import Int64s
from tidegate.storage.spec import Cursor, Merge, StoreSpec

# -- views -------------------------------------------------------------------------------------------

_COUNTING = threading.Lock()


class Holding:
    """The resources of a load, with a reference count."""

    __slots__ = ("_holders", "_releases")

    def __init__(self, releases: Sequence[Callable[[], None]] = ()) -> None:
        self._holders = 1
        self._releases = releases

    @property
    def is_open(self) -> bool:
        return self._holders > 0

    def retain(self) -> None:
        with _COUNTING:
            if self._holders == 0:
                raise InvalidError("these ranges are closed: load them again")
            self._holders += 1

    def release(self) -> None:
        """Remove one holder; the last one releases everything, even if one release fails."""
        with _COUNTING:
            self._holders -= 1
            releases, last = self._releases, self._holders == 0
            if last:
                self._releases = ()
        if last:
            release_all(releases)


class KeyUse(Protocol):
    """The interface that records key accesses: the task's `KeyLru`."""

    def touch(self, hashes: UInt64s) -> None:
        """Record that these keys were accessed now."""

    def hold(self, hashes: UInt64s) -> None:
        """Mark these keys as in use until `unhold` is called with the same array."""

    def unhold(self, hashes: UInt64s) -> None: ...

    def begin_use(self, key_hash: int) -> None:
        """Record an access to one key, which is in use until `end_use`."""

    def end_use(self, key_hash: int) -> None: ...


class KeyHolding(Holding):
    """The resources of a read of one hot key: only the key's use."""

    __slots__ = ("_hash", "_use")

    def __init__(self, use: KeyUse, key_hash: int) -> None:
        use.begin_use(key_hash)
        self._holders = 1
        self._use = use
        self._hash = key_hash

    def release(self) -> None:
        with _COUNTING:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._use.end_use(self._hash)


def release_all(releases: Sequence[Callable[[], None]]) -> None:
    """Call each release in order, even after errors; the first error is raised at the end."""
    for position, release in enumerate(releases):
        try:
            release()
        except BaseException:
            release_all(releases[position + 1 :])
            raise


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

    @property
    def ts(self) -> Int64s:
        """Every row's ts."""
        return self._numbers("ts")

    @property
    def seq(self) -> Int64s:
        """Every row's seq."""
        return self._numbers("seq")

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

    def _numbers(self, name: str) -> Int64s:
        self._check_open()
        pieces = [getattr(self._found.run_of(line), name)[a:b] for line, a, b in self._stretches.tolist()]
        if len(pieces) == 1:
            return pieces[0]  # type: ignore[no-any-return]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


# -- loaded ranges -----------------------------------------------------------------------------------

PIECE_ROWS = (
    1 << 20
)  # of one batch of a result, so that no column of one outgrows Arrow's 2 GiB by count alone


class Answer:
    """The answer to one keyed request, in pieces of several keys, ascending by the index of their first key."""

    __slots__ = ("keys", "pieces", "single")

    def __init__(
        self, keys: pa.Array | None, pieces: Sequence[tuple[int, Found]], single: bytes | None = None
    ) -> None:
        self.keys = keys
        self.pieces = pieces
        self.single = single

    @property
    def key_count(self) -> int:
        return 1 if self.keys is None else len(self.keys)

    def column(self) -> pa.Array:
        return pa.array([self.single], pa.binary()) if self.keys is None else self.keys


def result_schema(spec: StoreSpec) -> pa.Schema:
    """The columns returned to readers: cursor and payload; tombstones are never returned."""
    return pa.schema([field for field in spec.rows if field.name != "deleted"])


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
        if not 0 <= key < answer.key_count:
            raise InvalidError(f"request {request} has {answer.key_count} keys; there is no number {key}")
        if answer.keys is None:
            name, (first, found) = answer.single or b"", answer.pieces[0]
            stretches = found.stretches
        else:
            first, found = next(piece for piece in reversed(answer.pieces) if piece[0] <= key)
            name, stretches = answer.keys[key].as_py(), found.key_stretches(key - first)
        rows = int(found.key_rows[key - first])
        return SortedRangeView(found, stretches, rows, name, self._schema, self._holding, self._hides)

    def views(self) -> Iterator[SortedRangeView]:
        """The view of every key of every request, in order."""
        for request, answer in enumerate(self._answers):
            for key in range(answer.key_count):
                yield self.view(request, key)

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
        keys = answer.column() if "key" in schema.names else None
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
        return (Answer(None, ((0, self._found),), self._key),)

    def view(self, request: int = 0, key: int = 0) -> SortedRangeView:
        if request or key or self._closed:
            return super().view(request, key)
        found = self._found
        return SortedRangeView(
            found, found.stretches, found.key_rows[0], self._key, self._schema, self._holding, self._hides
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._closed:
            self._closed = True
            self._holding.release()


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
