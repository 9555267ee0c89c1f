"""The read-only questions a table answers, one class for each kind of table.

Bounds are inclusive at both ends, as in Kafka Streams; times are epoch milliseconds, ISO 8601 (`2026-01-01T10:00Z`;
UTC where no zone is given) or a `datetime`. Answers come in order of key
bytes and then window, or backwards. What lies beyond the table's retention is not answered, wherever it still lies.
`at_least` waits until the table has seen these offsets (partition → next offset), at most `timeout`.

Thread rule: from any thread.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.durations import DurationLike, MomentLike, moment_ms
from tidegate.errors import TidegateWarning
from tidegate.tables.building.partition_state import EARLIEST
from tidegate.tables.building.shape import TableRules
from tidegate.tables.building.source import TableSource
from tidegate.tables.queries.reading import LATEST, KeyEnds, all_rows, rows_of_key, rows_of_keys
from tidegate.tables.queries.results import RAW_SCHEMA, Rows, typed

Answer = TypeVar("Answer")
Positions: TypeAlias = "Mapping[int, int] | None"
Looked: TypeAlias = Sequence[pa.RecordBatch]
DEFAULT_TIMEOUT = "30s"


class Waiting(TypedDict, total=False):
    """What every question takes: which offsets the answer must have seen, and how long to wait for that."""

    at_least: Positions
    timeout: int | DurationLike


class Asking(Waiting, total=False):
    """What questions for many rows take: also, whether the last come first."""

    backward: bool


class TableQueries(ABC):
    """What all kinds of tables answer."""

    rules: TableRules

    @abstractmethod
    def _read(
        self, look: Callable[[TableSource], Answer], at_least: Positions, timeout: int | DurationLike
    ) -> Answer:
        """Ask the source, once it has seen what is asked for."""

    def batches(
        self,
        *,
        batch_rows: int = 1 << 16,
        at_least: Positions = None,
        timeout: int | DurationLike = DEFAULT_TIMEOUT,
    ) -> Iterator[pa.RecordBatch]:
        """All rows as typed Arrow batches of bounded size, in no promised order."""
        first = self._first
        found = self._read(lambda source: all_rows(source, first, batch_rows=batch_rows), at_least, timeout)
        for batch in found:
            yield from typed(pa.Table.from_batches([batch]), self.rules).to_batches()

    @abstractmethod
    def all(self, **asking: Unpack[Asking]) -> Rows:
        """Everything; for large tables `batches` needs less memory."""

    def to_arrow(self) -> pa.Table:
        """Everything as one Arrow table, in order of key and window."""
        return self.all().to_arrow()

    def to_pandas(self) -> Any:
        """Everything as a pandas DataFrame."""
        return self.all().to_pandas()

    def to_polars(self) -> Any:
        """Everything as a polars DataFrame. Needs polars (the `polars` extra)."""
        return self.all().to_polars()

    def sql(self, query: str) -> pa.Table:
        """Ask in SQL: the rows are the table `rows`, or `this`. Needs DuckDB (the `sql` extra)."""
        from tidegate.tables.queries.sql import ask

        return ask(query, self._schema(), self.batches())

    def export(self, path: str | Path) -> int:
        """Write all rows into a Parquet file, complete or not at all; how many there were."""
        from tidegate.tables.queries.export import write_parquet

        return write_parquet(Path(path), self._schema(), self.batches())

    def _schema(self) -> pa.Schema:
        return typed(RAW_SCHEMA.empty_table(), self.rules).schema

    def dead_letters(self) -> pa.Table:
        """Records that were set aside because their key or value could not be read."""
        return self._read(lambda source: source.dead_letters(), None, 0)

    @property
    def _first(self) -> int:
        """The least ts a row can have."""
        return 0 if self.rules.shape.is_windowed else EARLIEST

    def _key(self, key: Any) -> bytes:
        raw = self.rules.key.encode(key)
        if raw is None:
            raise TypeError("a query needs a key; None is none")
        return raw

    def _ends(self, from_key: Any, to_key: Any) -> KeyEnds | None:
        """The key range as bytes; None, with a warning, when it is turned round."""
        low, high = self.rules.key.encode(from_key), self.rules.key.encode(to_key)
        if low is not None and high is not None and low > high:
            warnings.warn(
                f"keys from {from_key!r} to {to_key!r} are none: the first is the larger one by its bytes (negative "
                "numbers sort after positive ones)",
                TidegateWarning,
                stacklevel=3,
            )
            return None
        return KeyEnds(low, high)

    def _rows(
        self,
        look: Callable[[TableSource], Looked],
        *,
        backward: bool = False,
        at_least: Positions = None,
        timeout: int | DurationLike = DEFAULT_TIMEOUT,
    ) -> Rows:
        return Rows.of(self._read(look, at_least, timeout), self.rules, backward=backward)

    def _one(self, look: Callable[[TableSource], Looked], **waiting: Unpack[Waiting]) -> Any:
        """The value of the only row; of several partitions' the last."""
        found = self._rows(look, **waiting)
        return found[-1].value if len(found) else None

    def _between(
        self,
        from_key: Any,
        to_key: Any,
        look: Callable[[TableSource, KeyEnds], Looked],
        **asking: Unpack[Asking],
    ) -> Rows:
        """The rows of all keys from one to another."""
        ends = self._ends(from_key, to_key)
        if ends is None:
            return Rows.of([], self.rules)
        return self._rows(lambda source: look(source, ends), **asking)


class WindowQueries(TableQueries):
    """Time windows: bounds are on the window's start."""

    def get(self, key: Any, start: MomentLike, **waiting: Unpack[Waiting]) -> Any:
        """The value of the window that starts there; None when there is none."""
        raw, at = self._key(key), moment_ms(start)
        return self._one(lambda source: rows_of_key(source, raw, max(0, at), at), **waiting)

    def fetch(
        self, key: Any, start_from: MomentLike = 0, start_to: MomentLike = LATEST, **asking: Unpack[Asking]
    ) -> Rows:
        """One key's windows that start in [from, to]."""
        raw, (first, last) = self._key(key), _bounds(start_from, start_to)
        return self._rows(lambda source: rows_of_key(source, raw, first, last), **asking)

    def fetch_many(
        self,
        keys: Sequence[Any],
        start_from: MomentLike = 0,
        start_to: MomentLike = LATEST,
        **asking: Unpack[Asking],
    ) -> Rows:
        """Many keys' windows that start in [from, to], in one go."""
        raw, (first, last) = [self._key(key) for key in keys], _bounds(start_from, start_to)
        return self._rows(lambda source: rows_of_keys(source, raw, first, last), **asking)

    def fetch_range(
        self,
        from_key: Any,
        to_key: Any,
        start_from: MomentLike = 0,
        start_to: MomentLike = LATEST,
        **asking: Unpack[Asking],
    ) -> Rows:
        """The windows of all keys from one to another by their bytes, None for an open end."""
        first, last = _bounds(start_from, start_to)
        return self._between(
            from_key,
            to_key,
            lambda source, ends: list(all_rows(source, first, last, keys=ends)),
            **asking,
        )

    def fetch_all(self, start_from: MomentLike, start_to: MomentLike, **asking: Unpack[Asking]) -> Rows:
        """All keys' windows that start in [from, to]."""
        return self.fetch_range(None, None, start_from, start_to, **asking)

    def all(self, **asking: Unpack[Asking]) -> Rows:
        """Everything; for large tables `batches` needs less memory."""
        return self.fetch_all(0, LATEST, **asking)

    def backward_fetch(self, key: Any, start_from: MomentLike = 0, start_to: MomentLike = LATEST) -> Rows:
        return self.fetch(key, start_from, start_to, backward=True)

    def backward_fetch_range(
        self, from_key: Any, to_key: Any, start_from: MomentLike = 0, start_to: MomentLike = LATEST
    ) -> Rows:
        return self.fetch_range(from_key, to_key, start_from, start_to, backward=True)

    def backward_fetch_all(self, start_from: MomentLike, start_to: MomentLike) -> Rows:
        return self.fetch_all(start_from, start_to, backward=True)

    def backward_all(self) -> Rows:
        return self.all(backward=True)


class SessionQueries(TableQueries):
    """Sessions: a query's bounds are moments, and finds the sessions that touch them."""

    def get(self, key: Any, start: MomentLike, end: MomentLike, **waiting: Unpack[Waiting]) -> Any:
        """The value of exactly this session; None when there is none."""
        raw, first, last = self._key(key), moment_ms(start), moment_ms(end)
        return self._one(
            lambda source: _started(rows_of_key(source, raw, max(0, last), last), first, first), **waiting
        )

    def fetch(
        self,
        key: Any,
        earliest_end: MomentLike = 0,
        latest_start: MomentLike = LATEST,
        **asking: Unpack[Asking],
    ) -> Rows:
        """One key's sessions that end at or after the first moment and start at or before the second."""
        raw, (first, last) = self._key(key), _bounds(earliest_end, latest_start)
        return self._rows(lambda source: _started(rows_of_key(source, raw, first, LATEST), 0, last), **asking)

    find_sessions = fetch

    def fetch_many(
        self,
        keys: Sequence[Any],
        earliest_end: MomentLike = 0,
        latest_start: MomentLike = LATEST,
        **asking: Unpack[Asking],
    ) -> Rows:
        """Many keys' sessions, in one go."""
        raw, (first, last) = [self._key(key) for key in keys], _bounds(earliest_end, latest_start)
        return self._rows(
            lambda source: _started(rows_of_keys(source, raw, first, LATEST), 0, last), **asking
        )

    def fetch_range(
        self,
        from_key: Any,
        to_key: Any,
        earliest_end: MomentLike = 0,
        latest_start: MomentLike = LATEST,
        **asking: Unpack[Asking],
    ) -> Rows:
        """The sessions of all keys from one to another by their bytes, None for an open end."""
        first, last = _bounds(earliest_end, latest_start)
        return self._between(
            from_key,
            to_key,
            lambda source, ends: _started(all_rows(source, first, LATEST, keys=ends), 0, last),
            **asking,
        )

    def fetch_all(self, earliest_end: MomentLike, latest_start: MomentLike, **asking: Unpack[Asking]) -> Rows:
        """All keys' sessions that touch these moments."""
        return self.fetch_range(None, None, earliest_end, latest_start, **asking)

    def all(self, **asking: Unpack[Asking]) -> Rows:
        """Everything; for large tables `batches` needs less memory."""
        return self.fetch_all(0, LATEST, **asking)

    def backward_fetch(
        self, key: Any, earliest_end: MomentLike = 0, latest_start: MomentLike = LATEST
    ) -> Rows:
        return self.fetch(key, earliest_end, latest_start, backward=True)

    def backward_fetch_range(
        self, from_key: Any, to_key: Any, earliest_end: MomentLike = 0, latest_start: MomentLike = LATEST
    ) -> Rows:
        return self.fetch_range(from_key, to_key, earliest_end, latest_start, backward=True)

    def backward_fetch_all(self, earliest_end: MomentLike, latest_start: MomentLike) -> Rows:
        return self.fetch_all(earliest_end, latest_start, backward=True)

    def backward_all(self) -> Rows:
        return self.all(backward=True)


class KeyQueries(TableQueries):
    """Plain keys, one value each."""

    def get(self, key: Any, **waiting: Unpack[Waiting]) -> Any:
        """The key's value; None when there is none."""
        raw = self._key(key)
        return self._one(lambda source: rows_of_key(source, raw, 0, 0), **waiting)

    def fetch_many(self, keys: Sequence[Any], **asking: Unpack[Asking]) -> Rows:
        """Many keys' values, in one go."""
        raw = [self._key(key) for key in keys]
        return self._rows(lambda source: rows_of_keys(source, raw, 0, 0), **asking)

    def fetch_range(self, from_key: Any, to_key: Any, **asking: Unpack[Asking]) -> Rows:
        """All keys from one to another by their bytes, None for an open end."""
        return self._between(
            from_key, to_key, lambda source, ends: list(all_rows(source, 0, 0, keys=ends)), **asking
        )

    def all(self, **asking: Unpack[Asking]) -> Rows:
        """Everything; for large tables `batches` needs less memory."""
        return self.fetch_range(None, None, **asking)


def _bounds(first: MomentLike, last: MomentLike) -> tuple[int, int]:
    """Both as epoch milliseconds; nothing lies before the epoch."""
    return max(0, moment_ms(first)), moment_ms(last)


def _started(batches: Iterable[pa.RecordBatch], first: int, last: int) -> list[pa.RecordBatch]:
    """Sessions whose start lies in [first, last]."""
    return [
        batch.filter(
            pc.and_(pc.greater_equal(batch.column("seq"), first), pc.less_equal(batch.column("seq"), last))
        )
        for batch in batches
    ]
