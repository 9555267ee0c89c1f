"""Rows of a table as a Parquet file, an SQL relation or a Spark DataFrame.

Parquet files are written batch by batch and appear when they are complete. SQL runs in DuckDB, an optional
dependency that is loaded on first use: rows stream into the query; nothing is written, and the query has no access
to other tables or files. `table.to_spark(spark)` returns a committed table as a Spark DataFrame; imports point from
`spark` to `tables`, so this call loads its module by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.errors import InvalidError, TidegateWarning, UnsupportedError
from tidegate.files import Files
from tidegate.tables.options import TableRules
from tidegate.tables.serdes.json import serde_from

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend


# --- export


def write_parquet(
    path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch], *, files: Files | None = None
) -> int:
    """Write to a temporary name, sync, then rename; return how many rows there were."""
    files = files or Files()
    temporary, rows = path.with_name(path.name + ".tmp"), 0
    try:
        with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
            for batch in batches:
                writer.write_batch(batch.cast(schema) if batch.schema != schema else batch)
                rows += batch.num_rows
        with files.open(temporary, write=True) as file:
            file.sync()
        files.rename(temporary, path)
        files.sync_folder(path.parent)
    except BaseException:
        files.unlink(temporary, missing_ok=True)
        raise
    return rows


# --- sql


def ask(query: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> pa.Table:
    """Run a query over `rows` (also named `this`) and return its result."""
    try:
        import duckdb
    except ImportError:
        raise InvalidError("SQL needs DuckDB: pip install 'tidegate[sql]', then try again") from None
    failed: list[BaseException] = []  # errors of reading, which DuckDB would report as its own
    connection = duckdb.connect(":memory:", config={"enable_external_access": "false"})
    try:
        connection.register("rows", pa.RecordBatchReader.from_batches(schema, _watched(batches, failed)))
        connection.execute("CREATE TABLE this AS SELECT * FROM rows")
        connection.unregister("rows")
        connection.execute("CREATE VIEW rows AS SELECT * FROM this")
        answer = connection.sql(query)
        return pa.table({}) if answer is None else answer.to_arrow_table()
    except Exception as error:
        if failed:
            raise failed[0] from None
        if not isinstance(error, duckdb.Error):
            raise
        hint = (
            "; the rows of this table are called `rows`" if isinstance(error, duckdb.CatalogException) else ""
        )
        raise InvalidError(f"the query cannot be answered: {error}{hint}") from None
    finally:
        connection.close()


def _watched(batches: Iterator[pa.RecordBatch], failed: list[BaseException]) -> Iterator[pa.RecordBatch]:
    try:
        yield from batches
    except Exception as error:
        failed.append(error)
        raise


# --- spark frame


def spark_frame(
    spark: Any,
    backend: StorageBackend,
    rules: TableRules,
    commit: int | None,
    *,
    columns: Sequence[str] = (),
) -> Any:
    """Return the table at a commit as a Spark DataFrame; without one, the last commit.

    Executors open the table themselves, so it must be in a folder that they share, or in an object store whose
    settings are in their environment. Serdes are passed by name; columns of serdes without a name stay bytes, with a
    warning.
    """
    address = address_for_spark(backend, rules.shape.name)
    serdes: dict[str, str] = {}
    for name, serde in (("key", rules.key), ("value", rules.value)):
        if serde_from(repr(serde)) is None:
            warnings.warn(
                f"table {rules.shape.name}: Spark gets column {name} as bytes, because no name says {serde!r}",
                TidegateWarning,
                stacklevel=3,
            )
        serdes[name] = repr(serde) if serde_from(repr(serde)) is not None else "bytes"
    frame = import_module("tidegate.spark.table_source").table_frame
    return frame(spark, address, rules.shape.name, commit=commit, columns=columns, **serdes)


def address_for_spark(backend: StorageBackend, table: str) -> str:
    """Return the address at which Spark's processes find the table."""
    if backend.address is None:
        raise UnsupportedError(
            f"table {table} lies in a backend of kind {backend.kind} that Spark's processes cannot open by its "
            "address; of an object store with settings of its own read "
            "spark.read.format('tidegate.table').option('state', ADDRESS).option('storage.…', …)"
        )
    return backend.address
