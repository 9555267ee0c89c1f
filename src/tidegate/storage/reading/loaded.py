"""What a load answers: the rows of every request, as views of one key each or as one table.

Keyed requests are answered key by key, in the order their keys were given; a key asked for twice is answered
twice, a key without rows has an empty view.

Close it, best with `with`: until then packs are pinned, keys are in use and a scratch slot may be taken.

Thread rule: one thread at a time; closing is safe from any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

import numpy as np
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.storage.reading.lookup import Found, cut, gather, stretch_ends
from tidegate.storage.reading.row_keys import row_keys
from tidegate.storage.reading.view import Holding, SortedRangeView
from tidegate.storage.spec import Merge, StoreSpec

PIECE_ROWS = (
    1 << 20
)  # of one batch of a result, so that no column of one outgrows Arrow's 2 GiB by count alone


class Answer:
    """The answer to one keyed request: pieces of some keys each, ascending by the number of their first key."""

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
    """The columns of a row that is read: cursor and payload; tombstones are never read."""
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
        """Give back what the load holds, as soon as no entered view needs it; closing again does nothing."""
        if not self._closed:
            self._closed = True
            self._holding.release()

    def __len__(self) -> int:
        """How many requests were answered."""
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
    """The answer to one request for one key: what most reads are, so it makes nothing before it is asked for."""

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
    """With the key before the other columns."""
    return pa.schema([pa.field("key", pa.binary(), nullable=False), *schema])


def numbered_schema(schema: pa.Schema) -> pa.Schema:
    """With the number of the request and the key before the other columns."""
    return pa.schema([pa.field("request", pa.int32(), nullable=False), *keyed_schema(schema)])


def columns_of(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """These columns of the schema, in the order asked for; all of them when nothing is."""
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
