"""What a sender needs of a log's writer: check first, store later, repeat exactly.

Owns the two ways to get it. A writer that offers `prepare` (the embedded log's) has checked and encoded
everything before the first byte is stored, and repeats a failed append with the very bytes of the first try.
Any other writer is used through its `write`: pieces go out one by one, each acknowledged before the next, and
one that failed is handed over again as it was. Such writers need not be safe for threads; one lock guards them.

O1  `InvalidError` from `prepare` means that nothing was stored. From `append` any error means that the piece it
    was at, and those after it, may or may not be stored; `append` again goes on with that piece.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from tidegate.log.format.records import HEADERS_TYPE, TIMESTAMP_TYPE, RecordColumns
from tidegate.log.writer import Written

SCHEMA = pa.schema(
    [("key", pa.binary()), ("value", pa.binary()), ("timestamp", TIMESTAMP_TYPE), ("headers", HEADERS_TYPE)]
)


class RecordWriter(Protocol):
    """Any log's writer of Arrow tables."""

    topic: str

    def write(self, table: Any, *, partition: int | None = None) -> list[Written]: ...

    def close(self) -> None: ...


class Prepared(Protocol):
    """Checked records of one partition, on their way (O1)."""

    def append(self) -> list[Written]: ...


@runtime_checkable
class Outlet(Protocol):
    """Where a sender's records go out."""

    def prepare(self, pieces: Sequence[RecordColumns], partition: int) -> Prepared: ...

    def acknowledge(self, partitions: Iterable[int]) -> None: ...


def outlet_of(writer: RecordWriter) -> Outlet:
    """The writer itself, when it can prepare, or its `write` behind the same calls."""
    return writer if isinstance(writer, Outlet) else WholeWrites(writer)


class WholeWrites:
    """A writer that only knows `write`."""

    def __init__(self, writer: RecordWriter) -> None:
        self._writer = writer
        self._lock = threading.Lock()

    def prepare(self, pieces: Sequence[RecordColumns], partition: int) -> Prepared:
        return _Pieces(self._writer, self._lock, list(pieces), partition)

    def acknowledge(self, partitions: Iterable[int]) -> None:
        """`write` has waited for it."""


class _Pieces:
    def __init__(
        self, writer: RecordWriter, lock: threading.Lock, pieces: list[RecordColumns], partition: int
    ) -> None:
        self._writer = writer
        self._lock = lock
        self._left = pieces
        self._partition = partition
        self._written: list[Written] = []

    def append(self) -> list[Written]:
        with self._lock:
            while self._left:
                self._written += self._writer.write(table_of(self._left[0]), partition=self._partition)
                del self._left[0]
        return self._written


def table_of(rows: RecordColumns) -> pa.RecordBatch:
    """Columns as the table any writer takes."""
    headers = rows.headers if rows.headers is not None else pa.nulls(len(rows), HEADERS_TYPE)
    return pa.RecordBatch.from_arrays(
        [rows.key, rows.value, rows.timestamp.view(TIMESTAMP_TYPE), headers], schema=SCHEMA
    )
