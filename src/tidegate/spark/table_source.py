"""`format("tidegate.table")`: a committed table as a DataFrame, one Spark task for each of its partitions.

    spark.read.format("tidegate.table").option("state", "./data/state").option("table", "counts").load()

Reading takes no lock and needs no log. Columns: key, window_start, window_end (not in tables of plain keys), value,
timestamp, partition, offset. Filters that a table applies itself, exactly; others stay with Spark:

| column | filters | becomes |
|---|---|---|
| `key` of bytes, text or whole numbers | `=`, `<=>`, `IN` | look-ups of these keys |
| `window_start`, `window_end` | `=`, `<=>`, `<`, `<=`, `>`, `>=` | bounds of time; whole buckets stay unread |
| `partition` | `=`, `<=>`, `IN` | Spark tasks that do not run |
| all of these | `IS NOT NULL` | nothing: they never are |

R1  all tasks of one read use one commit: the plan carries the commit itself, not "the last".
R2  only requested columns are read and decoded: the option `columns`, or a schema that names fewer columns.
R3  memory: one batch of `batch_rows`, and what storage holds to read one bucket.
R4  a time that Spark cannot represent is null.
T1  a reader that takes filters is refused while `spark.sql.python.filterPushdown.enabled` is off, Spark's default; so
    only the process that Spark starts to push filters gets such a reader.

Each of Spark's processes imports this module anew, so it is light. Thread rule: pure functions over a snapshot.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from tidegate.clock import SystemClock
from tidegate.durations import format_moment
from tidegate.errors import CommitGoneError, InvalidError, UnavailableError
from tidegate.spark.compat import from_arrow_schema, to_arrow_schema
from tidegate.spark.options import TableOptions
from tidegate.spark.workers import freeze_once
from tidegate.storage.backends.base import MissingObjectError, StorageBackend
from tidegate.tables.commits import Commit, CommitList, load_commits, stored_tables
from tidegate.tables.options import Consumed, TableRules, TableShape
from tidegate.tables.queries import rows_of_keys
from tidegate.tables.serdes.base import Serde
from tidegate.tables.snapshot import EARLIEST, TableSource, stored_snapshot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from tidegate.pipeline.flow import Flow
    from tidegate.spark.app_tables import AppTableRead
    from tidegate.storage.backends.base import StorageBackend


# -- plan -----------------------------------------------------------------------------------------

LATEST: Final = 2**63 - 1
LARGEST_MS: Final = (2**63 - 1) // 1000
"""The last millisecond that Spark's timestamps, which count microseconds, reach."""
TIMESTAMP: Final = pa.timestamp("us", tz="UTC")


@dataclass(frozen=True, slots=True)
class RowBounds:
    """The rows of a read; milliseconds, both ends inclusive."""

    keys: tuple[bytes, ...] | None = None
    start_from: int = 0
    start_to: int = LATEST
    end_from: int = 0
    end_to: int = LATEST
    partitions: frozenset[int] | None = None

    @property
    def is_nothing(self) -> bool:
        return self.keys == () or self.start_from > self.start_to or self.end_from > self.end_to


EVERYTHING: Final = RowBounds()


def chosen_commit(backend: StorageBackend, options: TableOptions) -> CommitList:
    """Return the table's commit list, reduced to the requested commit."""
    name = options.table or _only_table(backend, options.state)
    found = load_commits(backend, name)
    if found is None:
        known = ", ".join(stored_tables(backend)) or "none"
        raise InvalidError(f"there is no table {name!r} in {options.state}; there are {known}")
    commits = found[0].commits
    if not commits:
        raise UnavailableError(f"table {name} has no commit yet; try again when its builder has made one")
    return msgspec.structs.replace(found[0], commits=(_chosen(commits, options, name),))


def _only_table(backend: StorageBackend, state: str) -> str:
    known = stored_tables(backend)
    if len(known) != 1:
        reason = f"there are {', '.join(known)}" if known else f"there is none in {state}"
        raise InvalidError(f"option table is missing: the table's name; {reason}")
    return known[0]


def _chosen(commits: Sequence[Commit], options: TableOptions, name: str) -> Commit:
    reach = f"there are {commits[0].number} to {commits[-1].number}"
    if options.version is not None:
        for commit in commits:
            if commit.number == options.version:
                return commit
        raise InvalidError(f"commit {options.version} of table {name} is not kept; {reach}")
    if options.moment_ms is None:
        return commits[-1]
    for commit in reversed(commits):
        if commit.committed_ms <= options.moment_ms:
            return commit
    first = format_moment(commits[0].committed_ms)
    raise InvalidError(
        f"table {name} keeps no commit as old as {format_moment(options.moment_ms)}; {reach}, the first of {first}"
    )


def rules_of(shape: TableShape, options: TableOptions) -> TableRules:
    """Return the stored shape with the serdes to read it with."""
    key, value = options.serde("key", shape.key_serde), options.serde("value", shape.value_serde)
    return TableRules(shape, key, value, Consumed(), "fail")


def table_schema(rules: TableRules, columns: Sequence[str] = ()) -> pa.Schema:
    """Return the columns of a table in Spark's types: the requested ones, in that order."""
    windows = [("window_start", TIMESTAMP), ("window_end", TIMESTAMP)] if rules.shape.is_windowed else []
    known = {
        "key": sparks_type(rules.key.arrow_type),
        **dict(windows),
        "value": sparks_type(rules.value.arrow_type),
        "timestamp": TIMESTAMP,
        "partition": pa.int32(),
        "offset": pa.int64(),
    }
    check_columns(columns, tuple(known), rules.shape.name)
    return pa.schema([(name, known[name]) for name in columns or known])


def check_columns(columns: Sequence[str], known: Sequence[str], table: str) -> None:
    for name in columns:
        if name not in known:
            raise InvalidError(f"table {table} has no column {name!r}; it has {', '.join(known)}")


def sparks_type(kind: pa.DataType) -> pa.DataType:
    """Return the nearest Spark type that holds every value."""
    if pa.types.is_unsigned_integer(kind):
        return {8: pa.int16(), 16: pa.int32(), 32: pa.int64()}.get(kind.bit_width, pa.decimal128(20, 0))
    if pa.types.is_timestamp(kind):
        return TIMESTAMP
    if pa.types.is_list(kind):
        return pa.list_(sparks_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, sparks_type(each.type)) for each in kind])
    return kind


# -- filters --------------------------------------------------------------------------------------

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_KEY_TYPES = {"bytes": bytes, "string": str, "int": int, "long": int}
_WINDOWS = {"window_start": ("start_from", "start_to"), "window_end": ("end_from", "end_to")}


def bounds_of(filters: Sequence[Filter], rules: TableRules) -> tuple[RowBounds, list[Filter]]:
    """Return the bounds that the filters set together, and the filters that Spark must apply itself."""
    bounds, left = EVERYTHING, []
    for each in filters:
        narrowed = _narrowed(bounds, each, rules)
        if narrowed is None:
            left.append(each)
        else:
            bounds = narrowed
    return bounds, left


def _narrowed(bounds: RowBounds, each: Filter, rules: TableRules) -> RowBounds | None:
    path: tuple[str, ...] = getattr(each, "attribute", ())
    if len(path) != 1:
        return None
    column = path[0].lower()
    if isinstance(each, IsNotNull):
        return _present(bounds, column, rules)
    if column == "key":
        return _keyed(bounds, each, rules.key)
    if column in _WINDOWS and rules.shape.is_windowed:
        return _timed(bounds, each, *_WINDOWS[column])
    if column == "partition":
        return _placed(bounds, each)
    return None


def _present(bounds: RowBounds, column: str, rules: TableRules) -> RowBounds | None:
    """Return the bounds with a filter `IS NOT NULL` applied; None if Spark must apply it itself."""
    if column in ("key", "partition", "offset"):
        return bounds
    if column in _WINDOWS and rules.shape.is_windowed:
        high = _WINDOWS[column][1]
        return replace(bounds, **{high: min(getattr(bounds, high), LARGEST_MS)})
    return None


def _wanted(each: Filter) -> tuple[Any, ...] | None:
    """Return the values that a filter selects; None if it is of another kind."""
    if isinstance(each, In):
        return tuple(value for value in each.value if value is not None)
    if isinstance(each, EqualTo | EqualNullSafe) and each.value is not None:
        return (each.value,)
    return None


def _keyed(bounds: RowBounds, each: Filter, serde: Serde[Any]) -> RowBounds | None:
    values, kind = _wanted(each), _KEY_TYPES.get(serde.name)
    if values is None or kind is None:
        return None
    if kind is bytes:
        values = tuple(bytes(value) if isinstance(value, bytearray) else value for value in values)
    if not all(type(value) is kind for value in values):
        return None
    raw = dict.fromkeys(serde.encode(value) or b"" for value in values)
    if bounds.keys is not None:
        raw = dict.fromkeys(key for key in bounds.keys if key in raw)
    return replace(bounds, keys=tuple(raw))


def _placed(bounds: RowBounds, each: Filter) -> RowBounds | None:
    values = _wanted(each)
    if values is None or not all(type(value) is int for value in values):
        return None
    chosen = frozenset(values)
    return replace(bounds, partitions=chosen if bounds.partitions is None else chosen & bounds.partitions)


def _timed(bounds: RowBounds, each: Filter, low: str, high: str) -> RowBounds | None:
    moment = getattr(each, "value", None)
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        return None
    micros = (moment - _EPOCH) // timedelta(microseconds=1)
    # the milliseconds around it; equal if it is a whole one
    below, above = micros // 1000, -(-micros // 1000)
    first, last = getattr(bounds, low), min(getattr(bounds, high), LARGEST_MS)  # beyond is null: no match
    if isinstance(each, EqualTo | EqualNullSafe):
        first, last = max(first, above), min(last, below)
    elif isinstance(each, GreaterThanOrEqual):
        first = max(first, above)
    elif isinstance(each, GreaterThan):
        first = max(first, below + 1)
    elif isinstance(each, LessThanOrEqual):
        last = min(last, below)
    elif isinstance(each, LessThan):
        last = min(last, above - 1)
    else:
        return None
    return replace(bounds, **{low: first, high: last})


# -- rows -----------------------------------------------------------------------------------------

KEYS_AT_ONCE: Final = 1024
TIMES: Final = frozenset({"window_start", "window_end", "timestamp"})


def read_rows(
    options: TableOptions, commits: CommitList, partition: int, bounds: RowBounds, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one partition, in exactly `schema`."""
    rules, commit = rules_of(commits.shape, options), commits.commits[0]
    with options.opened() as backend:
        try:
            with closing(stored_snapshot(backend, rules, commit, clock=SystemClock())) as snapshot:
                states = [state for state in snapshot.source.partitions if state.partition == partition]
                source = replace(snapshot.source, partitions=states)
                for raw in _raw_rows(source, bounds, schema.names, options.batch_rows):
                    yield _finished(raw, rules, partition, schema)
        except MissingObjectError as error:
            raise CommitGoneError(
                f"commit {commit.number} of table {commits.shape.name} is no longer there: its builder has made "
                f"several newer ones while Spark read this one ({error.name} is gone); read the table again"
            ) from error


def _raw_rows(
    source: TableSource, bounds: RowBounds, names: Sequence[str], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    first, last = _ts_bounds(source.rules.shape, bounds)
    wants_seq = source.rules.shape.kind == "session"
    found: Iterator[pa.RecordBatch]
    if bounds.keys is not None:
        keys = pa.array(bounds.keys, pa.binary())
        found = (
            raw.slice(start, batch_rows)
            for key in range(0, len(keys), KEYS_AT_ONCE)
            for raw in rows_of_keys(source, keys.slice(key, KEYS_AT_ONCE), first, last)
            for start in range(0, raw.num_rows, batch_rows)
        )
    else:
        found = _scanned(source, first, last, _stored_names(names, wants_seq), batch_rows)
    for raw in found:
        rows = _started(raw, bounds) if wants_seq else raw
        if rows.num_rows:
            yield rows


def _scanned(
    source: TableSource, first: int, last: int, names: Sequence[str], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    for state in source.partitions:
        earliest = max(first, state.readable_from)
        if earliest <= last:
            with state.store.open_scan(earliest, last, batch_rows=batch_rows, columns=names) as scan:
                for batch in scan:
                    for start in range(0, batch.num_rows, batch_rows):
                        yield batch.slice(start, batch_rows)


def _stored_names(names: Sequence[str], wants_seq: bool) -> list[str]:
    """Return the stored columns to read (R2); `ts` always, so that a batch knows how many rows it has."""
    stored = {"ts"} | ({"seq"} if wants_seq else set())
    stored |= {name for name in ("key", "value", "offset") if name in names}
    stored |= {"value_ts"} if "timestamp" in names else set()
    return [name for name in ("key", "ts", "seq", "value", "value_ts", "offset") if name in stored]


def _ts_bounds(shape: TableShape, bounds: RowBounds) -> tuple[int, int]:
    """Return bounds of the stored ts: the start of a window, the end of a session, 0 for plain keys."""
    if shape.kind == "key":
        return EARLIEST, LATEST
    if shape.kind == "session":
        return bounds.end_from, bounds.end_to
    first, last = bounds.start_from, bounds.start_to
    if bounds.end_from > 0:
        first = max(first, bounds.end_from - shape.size_ms)
    if bounds.end_to < LATEST:
        last = min(last, bounds.end_to - shape.size_ms)
    return max(first, 0), last


def _started(raw: pa.RecordBatch, bounds: RowBounds) -> pa.RecordBatch:
    if bounds.start_from <= 0 and bounds.start_to == LATEST:
        return raw
    starts = raw.column("seq")
    return raw.filter(
        pc.and_(pc.greater_equal(starts, bounds.start_from), pc.less_equal(starts, bounds.start_to))
    )


def _finished(raw: pa.RecordBatch, rules: TableRules, partition: int, schema: pa.Schema) -> pa.RecordBatch:
    arrays = [sparks_column(_column(raw, rules, partition, field.name), field) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def sparks_column(column: pa.Array, field: pa.Field) -> pa.Array:
    """Return a column of a table in the type that Spark declared for it; times are epoch milliseconds."""
    if field.name in TIMES:
        column = as_timestamps(column)
    return column if column.type == field.type else column.cast(field.type)


def _column(raw: pa.RecordBatch, rules: TableRules, partition: int, name: str) -> pa.Array:
    shape = rules.shape
    if name == "key":
        return rules.key.decode_column(raw.column("key")).require_good()
    if name == "value":
        return rules.value.decode_column(raw.column("value")).require_good()
    if name == "timestamp":
        times = raw.column("value_ts")
        return pc.if_else(pc.less(times, 0), pa.scalar(None, pa.int64()), times)
    if name == "partition":
        return pa.array(np.full(raw.num_rows, partition, np.int32))
    if name == "window_start":
        return raw.column("seq" if shape.kind == "session" else "ts")
    if name == "window_end":
        ts = raw.column("ts")
        return ts if shape.kind == "session" else _ends(ts, shape.size_ms)
    return raw.column(name)


def _ends(starts: pa.Array, size_ms: int) -> pa.Array:
    numbers = starts.to_numpy()
    return pa.array(
        np.where(numbers > LATEST - size_ms, LATEST, numbers + np.minimum(size_ms, LATEST - numbers))
    )


def as_timestamps(milliseconds: pa.Array) -> pa.Array:
    """Return epoch milliseconds as Spark's timestamps; null where they cannot be represented."""
    newest: Any = pc.max(milliseconds).as_py()
    if newest is not None and newest > LARGEST_MS:
        holds = pc.less_equal(milliseconds, LARGEST_MS)
        milliseconds = pc.if_else(holds, milliseconds, pa.scalar(None, pa.int64()))
    return milliseconds.cast(pa.timestamp("ms", tz="UTC")).cast(TIMESTAMP)


FORMAT = "tidegate.table"
_PUSHING = "pyspark.sql.worker.data_source_pushdown_filters"


@dataclass(frozen=True)
class TablePartition(InputPartition):
    """One Spark task: one partition of the table."""

    number: int


class TableDataSource(DataSource):
    """`format("tidegate.table")`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        options = TableOptions.parse(self.options)
        with options.opened() as backend:
            read = _app_read(backend, options)
            if read is not None:
                columns = _app_tables().app_schema(read.known_flow, options.columns)
            else:
                columns = table_schema(
                    rules_of(chosen_commit(backend, options).shape, options), options.columns
                )
        found: StructType = from_arrow_schema(columns, prefer_timestamp_ntz=False)
        return found

    def reader(self, schema: StructType) -> DataSourceReader:
        options = TableOptions.parse(self.options)
        with options.opened() as backend:
            read = _app_read(backend, options)
            if read is not None:
                return AppTableReader(options, read, schema)
            commits = chosen_commit(backend, options)
        kind = FilteringTableReader if _PUSHING in sys.modules else TableReader  # T1
        return kind(options, commits, schema)


class _Reader(DataSourceReader):
    """A read of one commit, fixed when Spark plans; pickled to the workers, so it holds values only."""

    def __init__(self, options: TableOptions, schema: StructType) -> None:
        self._options, self._schema = options, schema

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, TablePartition):  # Spark creates one itself where there is nothing to read
            freeze_once()
            yield from self._rows(partition.number, to_arrow_schema(self._schema, timezone="UTC"))

    def _rows(self, number: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError


class TableReader(_Reader):
    """A read of a stored table."""

    def __init__(self, options: TableOptions, commits: CommitList, schema: StructType) -> None:
        super().__init__(options, schema)
        rules = rules_of(commits.shape, options)
        if not schema.fieldNames():
            raise InvalidError(f"the schema for table {rules.shape.name} has no columns; name at least one")
        _check_types(schema, table_schema(rules, schema.fieldNames()), rules.shape.name)
        self._commits = msgspec.msgpack.encode(commits)
        self._bounds = EVERYTHING

    def partitions(self) -> Sequence[InputPartition]:
        chosen = self._bounds.partitions
        if self._bounds.is_nothing:
            return []
        numbers = self.commits.shape.partitions
        return [TablePartition(number) for number in numbers if chosen is None or number in chosen]

    def _rows(self, number: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        return read_rows(self._options, self.commits, number, self._bounds, schema)

    @property
    def commits(self) -> CommitList:
        return msgspec.msgpack.decode(self._commits, type=CommitList)


class FilteringTableReader(TableReader):
    """A `TableReader` with filters on keys and windows."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._bounds, left = bounds_of(filters, rules_of(self.commits.shape, self._options))
        return left


class AppTableReader(_Reader):
    """A read of an app's table."""

    def __init__(self, options: TableOptions, read: AppTableRead, schema: StructType) -> None:
        super().__init__(options, schema)
        flow = read.known_flow
        _check_types(schema, _app_tables().app_schema(flow, schema.fieldNames()), flow.name)
        self._read = read

    def partitions(self) -> Sequence[InputPartition]:
        return [TablePartition(number) for number in self._read.tasks]

    def _rows(self, number: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        rows: Iterator[pa.RecordBatch] = _app_tables().read_task(self._options, self._read, number, schema)
        return rows


def _app_read(backend: StorageBackend, options: TableOptions) -> AppTableRead | None:
    """Return the plan for an app's table; None for a stored table, which needs fewer imports."""
    if options.table is not None and ":" not in options.table and options.table in stored_tables(backend):
        return None
    found: AppTableRead | None = _app_tables().planned_read(backend, options)
    return found


def _app_tables() -> Any:
    from tidegate.spark import app_tables

    return app_tables


def app_table_frame(
    spark: SparkSession,
    state: str,
    app: str,
    flow: Flow,
    round: int,
    tasks: Sequence[int],
    *,
    columns: Sequence[str] = (),
) -> DataFrame:
    """Return a round of an app's table as a DataFrame that executors read, for `to_spark`.

    The flow itself is sent to the executors, so that user-defined aggregates are read, too.
    """
    from tidegate.spark.app_tables import AppTableRead, app_schema, read_task

    read, options = AppTableRead(app, flow, round, tuple(tasks)), TableOptions(state)
    schema = app_schema(flow, columns)

    def rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        freeze_once()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from read_task(options, read, read.tasks[number], schema)

    numbers = spark.range(0, len(tasks), 1, max(1, len(tasks)))
    return numbers.mapInArrow(rows, from_arrow_schema(schema, prefer_timestamp_ntz=False))


def table_frame(
    spark: SparkSession,
    state: str,
    table: str,
    *,
    commit: int | None = None,
    key: str | None = None,
    value: str | None = None,
    columns: Sequence[str] = (),
) -> DataFrame:
    """Return a table as a DataFrame, for `to_spark`."""
    from tidegate.spark.session import register

    register(spark)
    options = {"state": state, "table": table, "key": key, "value": value, "versionAsOf": commit}
    options["columns"] = ",".join(columns) or None
    given = {name: str(each) for name, each in options.items() if each is not None}
    return spark.read.format(FORMAT).options(**given).load()


def _check_types(schema: StructType, given: pa.Schema, name: str) -> None:
    for asked in to_arrow_schema(schema, timezone="UTC"):
        has = given.field(asked.name).type
        try:
            pa.nulls(0, has).cast(asked.type)
        except pa.ArrowNotImplementedError:
            raise InvalidError(
                f"column {asked.name} of table {name} is {has} and cannot become {asked.type}"
            ) from None
