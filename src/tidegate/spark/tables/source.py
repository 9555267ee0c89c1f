"""`format("tidegate.table")`: a committed table as a DataFrame, one Spark task for each of its partitions.

    spark.read.format("tidegate.table").option("state", "./data/state").option("table", "counts").load()

Options, columns and filters are said in `options.py`, `plan.py` and `filters.py`. Reading takes no
lock, needs no log and disturbs no builder.

Two things about Spark's data source API shape this module:
T1  a reader that takes filters is refused while `spark.sql.python.filterPushdown.enabled` is off, which is Spark's
    default; so only the process that Spark starts to push filters gets such a reader.
T2  there is no way for Spark to say which columns it needs: a projection is the user's own, by the option `columns` or
    by a schema that names fewer columns.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from tidegate.errors import InvalidError
from tidegate.spark.tables.options import TableOptions
from tidegate.spark.tables.plan import EVERYTHING, chosen_commit, rules_of, table_schema
from tidegate.spark.workers import freeze_once
from tidegate.tables.commits import CommitList, stored_tables
from tidegate.tables.options import TableRules

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from tidegate.pipeline.definition.flow import Flow
    from tidegate.spark.tables.app_rows import AppTableRead
    from tidegate.storage.backends.base import StorageBackend

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
                columns = _app_rows().app_schema(read.known_flow, options.columns)
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


class TableReader(DataSourceReader):
    """A read of one commit, settled when Spark plans; pickled to the workers, so it holds values only."""

    def __init__(self, options: TableOptions, commits: CommitList, schema: StructType) -> None:
        _check_schema(schema, rules_of(commits.shape, options))
        self._options = options
        self._commits = msgspec.msgpack.encode(commits)
        self._schema = schema
        self._bounds = EVERYTHING

    def partitions(self) -> Sequence[InputPartition]:
        chosen = self._bounds.partitions
        if self._bounds.is_nothing:
            return []
        return [
            TablePartition(number)
            for number in self.commits.shape.partitions
            if chosen is None or number in chosen
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, TablePartition):  # Spark makes one up where there is nothing to read
            return
        from tidegate.spark.tables.rows import read_rows

        freeze_once()
        schema = to_arrow_schema(self._schema, timezone="UTC")
        yield from read_rows(self._options, self.commits, partition.number, self._bounds, schema)

    @property
    def commits(self) -> CommitList:
        return msgspec.msgpack.decode(self._commits, type=CommitList)


class FilteringTableReader(TableReader):
    """The same, with filters on keys and windows."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        from tidegate.spark.tables.filters import bounds_of

        self._bounds, left = bounds_of(filters, rules_of(self.commits.shape, self._options))
        return left


class AppTableReader(DataSourceReader):
    """A read of one commit of an app's table; pickled to the workers, so it holds values only."""

    def __init__(self, options: TableOptions, read: AppTableRead, schema: StructType) -> None:
        flow = read.known_flow
        given = _app_rows().app_schema(flow, schema.fieldNames())
        _check_types(schema, given, flow.name)
        self._options, self._read, self._schema = options, read, schema

    def partitions(self) -> Sequence[InputPartition]:
        return [TablePartition(number) for number in self._read.tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, TablePartition):
            return
        freeze_once()
        schema = to_arrow_schema(self._schema, timezone="UTC")
        yield from _app_rows().read_task(self._options, self._read, partition.number, schema)


def _app_read(backend: StorageBackend, options: TableOptions) -> AppTableRead | None:
    """What is read of an app's table; None where a stored table is asked for, which needs less to be imported."""
    if options.table is not None and ":" not in options.table and options.table in stored_tables(backend):
        return None
    found: AppTableRead | None = _app_rows().planned_read(backend, options)
    return found


def _app_rows() -> Any:
    from tidegate.spark.tables import app_rows

    return app_rows


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
    """A round of an app's table as a DataFrame that executors read; what `to_spark` of it gives.

    The flow itself goes to the executors, so that aggregates of the user's own are read, too.
    """
    from tidegate.spark.tables.app_rows import AppTableRead, app_schema, read_task

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
    """A table as a DataFrame; what `to_spark` of a table gives."""
    from tidegate.spark.session import register

    register(spark)
    options: dict[str, Any] = {
        "state": state,
        "table": table,
        "key": key,
        "value": value,
        "versionAsOf": commit,
    }
    options["columns"] = ",".join(columns) or None
    given = {name: str(each) for name, each in options.items() if each is not None}
    return spark.read.format(FORMAT).options(**given).load()


def _check_schema(schema: StructType, rules: TableRules) -> None:
    """A schema of the user's own may leave columns out and ask for other types, but not for other columns."""
    if not schema.fieldNames():
        raise InvalidError(f"the schema for table {rules.shape.name} has no columns; name at least one")
    _check_types(schema, table_schema(rules, schema.fieldNames()), rules.shape.name)


def _check_types(schema: StructType, given: pa.Schema, name: str) -> None:
    for asked in to_arrow_schema(schema, timezone="UTC"):
        has = given.field(asked.name).type
        try:
            pa.nulls(0, has).cast(asked.type)
        except pa.ArrowNotImplementedError:
            raise InvalidError(
                f"column {asked.name} of table {name} is {has} and cannot become {asked.type}"
            ) from None
