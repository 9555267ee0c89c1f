"""SQL over a table's rows, by DuckDB: an extra, loaded when it is asked for.

Rows stream into the query; nothing is written, and the query sees these rows and nothing of the machine's files.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from tidegate.errors import InvalidError


def ask(query: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> pa.Table:
    """The answer to a query over `rows` (also named `this`)."""
    try:
        import duckdb
    except ImportError:
        raise InvalidError("SQL needs DuckDB: pip install 'tidegate[sql]', then try again") from None
    failed: list[BaseException] = []  # what reading raised: DuckDB would tell it as an error of its own
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
