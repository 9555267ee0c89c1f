"""The read-only questions a table answers, one class for each kind of table.

Bounds are inclusive at both ends, as in Kafka Streams; times are epoch milliseconds, ISO 8601 (`2026-01-01T10:00Z`;
UTC where no zone is given) or a datetime of Python, pandas, numpy or Arrow. Answers come in order of key
bytes and then window, or backwards. What lies beyond the table's retention is not answered, wherever it still lies.
`at_least` waits until the table has seen these offsets (partition → next offset), at most `timeout`.

Q1  a query takes its source once and keeps it to its end, with the serdes that belong to it: an answer is of one
    commit (of one version of a pushed table), and a scan is so from its first batch to its last.
Q2  a commit that is collected while it is read is never mixed with another: a query begins again with the newest one,
    and a scan that has given a batch ends with `CommitGoneError`.

Thread rule: from any thread; queries do not wait for each other.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, TypeAlias, TypedDict, TypeVar, Unpack

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.durations import DurationLike, MomentLike, moment_ms
from tidegate.errors import CommitGoneError, TidegateWarning
from tidegate.tables.building.partition_state import EARLIEST
from tidegate.tables.building.shape import TableRules
from tidegate.tables.building.source import TableSource
from tidegate.tables.queries.reading import LATEST, KeyEnds, all_rows, rows_of_key, rows_of_keys
from tidegate.tables.queries.results import RAW_SCHEMA, Rows, typed

Answer = TypeVar("Answer")
Positions: TypeAlias = "Mapping[int, int] | None"
Looked: TypeAlias = Sequence[pa.RecordBatch]
DEFAULT_TIMEOUT = "30s"
TRIES: Final = 4


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
    def _pinned(
        self, at_least: Positions, timeout: int | DurationLike, *, is_retry: bool = False
    ) -> AbstractContextManager[TableSource]:
        """What is read, once it has seen what is asked for; it stays as it is until the block ends (Q1).

        `CommitGoneError` comes out of the block where what it read was collected meanwhile.
        """

    def _read(
        self, look: Callable[[TableSource], Answer], at_least: Positions, timeout: int | DurationLike
    ) -> Answer:
        """Ask one source; begin again where its commit is collected meanwhile (Q2)."""
        for attempt in range(TRIES - 1):
            try:
                with self._pinned(at_least, timeout, is_retry=attempt > 0) as source:
                    return look(source)
            except CommitGoneError:
                continue
        with self._pinned(at_least, timeout, is_retry=True) as source:
            return look(source)

    def batches(
        self,
        *,
        batch_rows: int = 1 << 16,
        at_least: Positions = None,
        timeout: int | DurationLike = DEFAULT_TIMEOUT,
    ) -> Iterator[pa.RecordBatch]:
        """All rows of one commit as typed Arrow batches of bounded size, in no promised order.

        The commit is the newest when the first batch is taken, and is let go with the iterator. When it is collected
        before the end, `CommitGoneError` says so.
        """
        for attempt in range(TRIES):
            is_begun = False
            try:
                with self._pinned(at_least, timeout, is_retry=attempt > 0) as source:
                    for batch in _typed_batches(source, batch_rows):
                        is_begun = True
                        yield batch
                return
            except CommitGoneError:
                if is_begun or attempt == TRIES - 1:
                    raise

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

        return self._read(
            lambda source: ask(query, _schema(source), _typed_batches(source)), None, DEFAULT_TIMEOUT
        )

    def export(self, path: str | Path) -> int:
        """Write all rows into a Parquet file, complete or not at all; how many there were."""
        from tidegate.tables.queries.export import write_parquet

        return self._read(
            lambda source: write_parquet(Path(path), _schema(source), _typed_batches(source)),
            None,
            DEFAULT_TIMEOUT,
        )

    def dead_letters(self) -> pa.Table:
        """Records that were set aside because their key or value could not be read."""
        return self._read(lambda source: source.dead_letters(), None, 0)

    def _rows(
        self,
        look: Callable[[TableSource], Looked],
        *,
        backward: bool = False,
        at_least: Positions = None,
        timeout: int | DurationLike = DEFAULT_TIMEOUT,
    ) -> Rows:
        return self._read(
            lambda source: Rows.of(look(source), source.rules, backward=backward), at_least, timeout
        )

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

        def looked(source: TableSource) -> Looked:
            ends = _ends(source, from_key, to_key)
            return [] if ends is None else look(source, ends)

        return self._rows(looked, **asking)


class WindowQueries(TableQueries):
    """Time windows: bounds are on the window's start."""

    def get(self, key: Any, start: MomentLike, **waiting: Unpack[Waiting]) -> Any:
        """The value of the window that starts there; None when there is none."""
        at = moment_ms(start)
        return self._one(lambda source: rows_of_key(source, source.key(key), max(0, at), at), **waiting)

    def fetch(
        self, key: Any, start_from: MomentLike = 0, start_to: MomentLike = LATEST, **asking: Unpack[Asking]
    ) -> Rows:
        """One key's windows that start in [from, to]."""
        first, last = _bounds(start_from, start_to)
        return self._rows(lambda source: rows_of_key(source, source.key(key), first, last), **asking)

    def fetch_many(
        self,
        keys: Sequence[Any],
        start_from: MomentLike = 0,
        start_to: MomentLike = LATEST,
        **asking: Unpack[Asking],
    ) -> Rows:
        """Many keys' windows that start in [from, to], in one go."""
        first, last = _bounds(start_from, start_to)
        return self._rows(lambda source: rows_of_keys(source, _keys(source, keys), first, last), **asking)

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

    def get(
        self, key: Any, start: MomentLike, end: MomentLike | None = None, **waiting: Unpack[Waiting]
    ) -> Any:
        """The value of the session that starts there (and ends there, if that is said); None when there is none."""
        at = moment_ms(start)
        first, last = (max(0, at), LATEST) if end is None else (moment_ms(end), moment_ms(end))
        return self._one(
            lambda source: _started(rows_of_key(source, source.key(key), first, last), at, at), **waiting
        )

    def fetch(
        self,
        key: Any,
        earliest_end: MomentLike = 0,
        latest_start: MomentLike = LATEST,
        **asking: Unpack[Asking],
    ) -> Rows:
        """One key's sessions that end at or after the first moment and start at or before the second."""
        first, last = _bounds(earliest_end, latest_start)
        return self._rows(
            lambda source: _started(rows_of_key(source, source.key(key), first, LATEST), 0, last), **asking
        )

    find_sessions = fetch

    def fetch_many(
        self,
        keys: Sequence[Any],
        earliest_end: MomentLike = 0,
        latest_start: MomentLike = LATEST,
        **asking: Unpack[Asking],
    ) -> Rows:
        """Many keys' sessions, in one go."""
        first, last = _bounds(earliest_end, latest_start)
        return self._rows(
            lambda source: _started(rows_of_keys(source, _keys(source, keys), first, LATEST), 0, last),
            **asking,
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
        return self._one(lambda source: rows_of_key(source, source.key(key), 0, 0), **waiting)

    def fetch_many(self, keys: Sequence[Any], **asking: Unpack[Asking]) -> Rows:
        """Many keys' values, in one go."""
        return self._rows(lambda source: rows_of_keys(source, _keys(source, keys), 0, 0), **asking)

    def fetch_range(self, from_key: Any, to_key: Any, **asking: Unpack[Asking]) -> Rows:
        """All keys from one to another by their bytes, None for an open end."""
        return self._between(
            from_key, to_key, lambda source, ends: list(all_rows(source, 0, 0, keys=ends)), **asking
        )

    def all(self, **asking: Unpack[Asking]) -> Rows:
        """Everything; for large tables `batches` needs less memory."""
        return self.fetch_range(None, None, **asking)


def _keys(source: TableSource, keys: Sequence[Any]) -> list[bytes]:
    return [source.key(key) for key in keys]


def _ends(source: TableSource, from_key: Any, to_key: Any) -> KeyEnds | None:
    """The key range as bytes; None, with a warning, when it is turned round."""
    low, high = source.rules.key.encode(from_key), source.rules.key.encode(to_key)
    if low is not None and high is not None and low > high:
        warnings.warn(
            f"keys from {from_key!r} to {to_key!r} are none: the first is the larger one by its bytes (negative "
            "numbers sort after positive ones)",
            TidegateWarning,
            stacklevel=7,
        )
        return None
    return KeyEnds(low, high)


def _schema(source: TableSource) -> pa.Schema:
    return typed(RAW_SCHEMA.empty_table(), source.rules).schema


def _typed_batches(source: TableSource, batch_rows: int = 1 << 16) -> Iterator[pa.RecordBatch]:
    first = 0 if source.rules.shape.is_windowed else EARLIEST
    for batch in all_rows(source, first, batch_rows=batch_rows):
        yield from typed(pa.Table.from_batches([batch]), source.rules).to_batches()


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
