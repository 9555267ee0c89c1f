"""One class reads every kind of table: results of apps, tables over topics, pushed versions, replicas.

Bounds include both ends, as in Kafka Streams: of a window its start counts, and a session is found when it touches
them. Times are epoch milliseconds, ISO 8601 (`2026-01-01T10:00Z`; UTC without a zone) or a datetime of Python,
pandas, numpy or Arrow. Results are sorted by key and then window. Rows beyond the table's retention are not returned.
`at_least` waits until the table has seen these offsets (partition → next offset), at most `timeout`.

Q1  every result is of one commit (of one version), and a scan is from its first batch to its last. Q2  a query whose
commit is collected meanwhile is repeated on the newest; a scan that began ends with `CommitGoneError`.

Thread rule: from any thread; queries do not wait for each other. `close` when no query runs any more.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict, TypeVar, Unpack

import pyarrow as pa

from tidegate.durations import DurationLike, MomentLike, moment_ms
from tidegate.errors import CommitGoneError, InvalidError, TidegateWarning, UnsupportedError
from tidegate.tables.commits import TRIES
from tidegate.tables.queries import LATEST, KeyEnds
from tidegate.tables.rows import RowForm, Rows

if TYPE_CHECKING:
    from tidegate.tables.changes import Subscription

Answer = TypeVar("Answer")
Positions: TypeAlias = "Mapping[int, int] | None"
DEFAULT_TIMEOUT = "30s"


class RowSource(Protocol):
    """The rows that queries read: as of one commit, or live where the table is built."""

    @property
    def kind(self) -> str:
        """`window`, `session` or `key`."""

    @property
    def form(self) -> RowForm:
        """The form that turns stored rows into results."""

    def encoded(self, key: Any) -> bytes | None:
        """Return a key as it is stored."""

    def find(self, keys: Sequence[bytes], first: int, last: int) -> list[pa.RecordBatch]:
        """Return the rows of these keys inside the bounds, as stored."""

    def scan(
        self, first: int, last: int, *, keys: KeyEnds | None = None, batch_rows: int = 1 << 16
    ) -> Iterator[pa.RecordBatch]:
        """Return the rows of all keys, or of a key range, inside the bounds, as stored."""

    def late(self) -> pa.Table: ...

    def dead_letters(self) -> pa.Table: ...


class Waiting(TypedDict, total=False):
    """Options of every query: the offsets that the result must include, and how long to wait for them."""

    at_least: Positions
    timeout: int | DurationLike


class Asking(Waiting, total=False):
    """Options of queries for many rows: also, whether the order is reversed."""

    backward: bool


class Table(ABC):
    """The queries of every table. Use it with `with`, or close it."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def _pinned(
        self, at_least: Positions, timeout: int | DurationLike, *, is_retry: bool = False
    ) -> AbstractContextManager[RowSource]:
        """The row source at a commit that includes the requested offsets; fixed until the block ends (Q1).

        The block raises `CommitGoneError` if the commit was collected meanwhile.
        """

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- rows ------------------------------------------------------------------------------------

    def get(
        self,
        key: Any,
        start: MomentLike | None = None,
        end: MomentLike | None = None,
        **waiting: Unpack[Waiting],
    ) -> Any:
        """Return the value of the window (session) that starts there, and ends there if an end is given; of a plain
        key its value. None if there is none."""
        at = 0 if start is None else moment_ms(start)
        until = None if end is None else moment_ms(end)

        def look(source: RowSource) -> Rows:
            if (start is None) != (source.kind == "key") or (start is None and end is not None):
                call = "get(key)" if source.kind == "key" else "get(key, start)"
                raise TypeError(f"table {self.name} has {_KINDS[source.kind]}: {call}")
            return Rows.of(source.find([_key(source, key)], max(0, at), at), source.form)

        for row in reversed(list(self._read(look, **waiting))):
            if row.window is None or (row.window.start == at and until in (None, row.window.end)):
                return row.value
        return None

    def fetch(
        self, key: Any, start_from: MomentLike = 0, start_to: MomentLike = LATEST, **asking: Unpack[Asking]
    ) -> Rows:
        """Return one key's windows that start in [from, to], its sessions that touch it, or the row of a plain key."""
        return self.fetch_many([key], start_from, start_to, **asking)

    def fetch_many(
        self,
        keys: Sequence[Any],
        start_from: MomentLike = 0,
        start_to: MomentLike = LATEST,
        **asking: Unpack[Asking],
    ) -> Rows:
        """Return the same as `fetch` for many keys, in one lookup."""
        if isinstance(keys, str | bytes):
            raise TypeError(f"fetch_many takes a list of keys, not one: fetch({keys!r})")
        first, last = _bounds(start_from, start_to)
        return self._rows(
            lambda source: source.find([_key(source, key) for key in keys], first, last) if keys else [],
            **asking,
        )

    def fetch_range(
        self,
        from_key: Any,
        to_key: Any,
        start_from: MomentLike = 0,
        start_to: MomentLike = LATEST,
        **asking: Unpack[Asking],
    ) -> Rows:
        """Return the same for all keys in a range of their bytes; None is an open end."""
        first, last = _bounds(start_from, start_to)

        def look(source: RowSource) -> Sequence[pa.RecordBatch]:
            ends = _ends(source, from_key, to_key)
            return [] if ends is None else list(source.scan(first, last, keys=ends))

        return self._rows(look, **asking)

    def fetch_all(
        self, start_from: MomentLike = 0, start_to: MomentLike = LATEST, **asking: Unpack[Asking]
    ) -> Rows:
        """Return the same for all keys."""
        first, last = _bounds(start_from, start_to)
        return self._rows(lambda source: list(source.scan(first, last)), **asking)

    def all(self, **asking: Unpack[Asking]) -> Rows:
        """Return everything; for large tables `scan` needs less memory."""
        return self.fetch_all(**asking)

    find_sessions = fetch

    def backward_fetch(self, key: Any, start_from: MomentLike = 0, start_to: MomentLike = LATEST) -> Rows:
        return self.fetch(key, start_from, start_to, backward=True)

    def backward_fetch_range(
        self, from_key: Any, to_key: Any, start_from: MomentLike = 0, start_to: MomentLike = LATEST
    ) -> Rows:
        return self.fetch_range(from_key, to_key, start_from, start_to, backward=True)

    def backward_fetch_all(self, start_from: MomentLike = 0, start_to: MomentLike = LATEST) -> Rows:
        return self.fetch_all(start_from, start_to, backward=True)

    def backward_all(self) -> Rows:
        return self.all(backward=True)

    def scan(
        self,
        start_from: MomentLike = 0,
        start_to: MomentLike = LATEST,
        *,
        batch_rows: int = 1 << 16,
        at_least: Positions = None,
        timeout: int | DurationLike = DEFAULT_TIMEOUT,
    ) -> Iterator[pa.RecordBatch]:
        """Yield all rows of one commit inside the bounds as typed Arrow batches of bounded size, in no defined order.

        The commit is the newest when the first batch is taken, and is held until the iterator ends or is closed. If
        it is collected before the end, `CommitGoneError` is raised.
        """
        if batch_rows < 1:
            raise InvalidError(f"a scan in batches of {batch_rows} rows; ask for at least one")
        bounds = _bounds(start_from, start_to)
        for attempt in range(TRIES):
            is_begun = False
            try:
                with self._pinned(at_least, timeout, is_retry=attempt > 0) as source:
                    for batch in _typed_batches(source, batch_rows, bounds):
                        is_begun = True
                        yield batch
                return
            except CommitGoneError:
                if is_begun or attempt == TRIES - 1:
                    raise

    batches = scan

    # -- all of it -------------------------------------------------------------------------------

    def to_arrow(self) -> pa.Table:
        """Return everything as one Arrow table, sorted by key and window."""
        return self.all().to_arrow()

    def to_pandas(self) -> Any:
        """Return everything as a pandas DataFrame."""
        return self.all().to_pandas()

    def to_polars(self) -> Any:
        """Return everything as a polars DataFrame. Needs polars (the `polars` extra)."""
        return self.all().to_polars()

    def to_spark(self, spark: Any, *, columns: Sequence[str] = ()) -> Any:
        """Return the last commit as a Spark DataFrame, read by executors; with `columns`, only they are read."""
        raise UnsupportedError(f"table {self.name} cannot be opened by Spark's executors; use to_arrow()")

    def sql(self, query: str) -> pa.Table:
        """Run an SQL query: the rows are the table `rows`, or `this`. Needs DuckDB (the `sql` extra)."""
        from tidegate.tables.export import ask

        return self._read(lambda source: ask(query, _schema(source), _typed_batches(source)))

    def export(self, path: str | Path) -> int:
        """Write all rows to a Parquet file, atomically; return how many there were."""
        from tidegate.tables.export import write_parquet

        return self._read(lambda source: write_parquet(Path(path), _schema(source), _typed_batches(source)))

    # -- beside the rows -------------------------------------------------------------------------

    def late(self) -> pa.Table:
        """Return late and future records: whole, with the window that did not accept them and the reason."""
        return self._read(lambda source: source.late(), timeout=0)

    def dead_letters(self) -> pa.Table:
        """Return records whose key or value could not be read, with the reason."""
        return self._read(lambda source: source.dead_letters(), timeout=0)

    def changes(self, limit_rows: int = 1_000_000) -> Subscription:
        """Subscribe to the changes from now on, as `Change(new, old)`; only where the table is built."""
        raise UnsupportedError(
            f"table {self.name} is read from its commits, and changes are told where it is built; read the table, or "
            "the topic that its changes go to, instead"
        )

    def explain(self, key: Any, start: MomentLike | None = None, end: MomentLike | None = None) -> Any:
        """Explain which records made a value, which were left out and why, and which are not read yet."""
        raise UnsupportedError(f"table {self.name} has no log to find the records of {key!r} in")

    # -- inside ----------------------------------------------------------------------------------

    def _read(
        self,
        look: Callable[[RowSource], Answer],
        *,
        at_least: Positions = None,
        timeout: int | DurationLike = DEFAULT_TIMEOUT,
    ) -> Answer:
        """Run a query on one source; repeat it if its commit is collected meanwhile (Q2)."""
        for attempt in range(TRIES - 1):
            try:
                with self._pinned(at_least, timeout, is_retry=attempt > 0) as source:
                    return look(source)
            except CommitGoneError:
                continue
        with self._pinned(at_least, timeout, is_retry=True) as source:
            return look(source)

    def _rows(
        self,
        look: Callable[[RowSource], Sequence[pa.RecordBatch]],
        *,
        backward: bool = False,
        **waiting: Unpack[Waiting],
    ) -> Rows:
        return self._read(lambda source: Rows.of(look(source), source.form, backward=backward), **waiting)


_KINDS = {"window": "windows", "session": "sessions", "key": "plain keys"}


def _key(source: RowSource, key: Any) -> bytes:
    raw = source.encoded(key)
    if raw is None:
        raise TypeError("key must not be None")
    return raw


def _ends(source: RowSource, from_key: Any, to_key: Any) -> KeyEnds | None:
    """Return the key range as bytes; None, with a warning, if it is reversed."""
    low, high = source.encoded(from_key), source.encoded(to_key)
    if low is not None and high is not None and low > high:
        warnings.warn(
            f"keys from {from_key!r} to {to_key!r} are none: the first is the larger one by its bytes (negative "
            "numbers sort after positive ones)",
            TidegateWarning,
            stacklevel=7,
        )
        return None
    return KeyEnds(low, high)


def _schema(source: RowSource) -> pa.Schema:
    return source.form.typed(source.form.stored.empty_table()).schema


def _typed_batches(
    source: RowSource, batch_rows: int = 1 << 16, bounds: tuple[int, int] = (0, LATEST)
) -> Iterator[pa.RecordBatch]:
    for batch in source.scan(*bounds, batch_rows=batch_rows):
        yield from source.form.typed(pa.Table.from_batches([batch])).to_batches()


def _bounds(first: MomentLike, last: MomentLike) -> tuple[int, int]:
    """Return both bounds as epoch milliseconds; nothing is before the epoch."""
    return max(0, moment_ms(first)), moment_ms(last)
