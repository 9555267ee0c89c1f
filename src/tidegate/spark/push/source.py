"""What is to be pushed, from words of a command line: a path of a format that Spark reads, or a query.

Imports pyspark only when called. Thread rule: pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from tidegate.errors import InvalidError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMATS: Final = ("parquet", "orc", "json", "csv", "text", "tidegate.table")
_ENDINGS: Final = {
    ".parquet": "parquet", ".orc": "orc", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv",
}  # fmt: skip
_COMPRESSED: Final = {".gz", ".bz2", ".zst", ".snappy", ".lz4"}
_CSV: Final = {"header": "true", "inferSchema": "true"}


def format_of(path: str) -> str:
    """The format that a path's ending names; a folder without one is Parquet, as Spark has it."""
    endings = [ending for ending in PurePosixPath(path).suffixes if ending not in _COMPRESSED]
    if not endings:
        return "parquet"
    found = _ENDINGS.get(endings[-1].lower())
    if found is None:
        raise InvalidError(
            f"{path}: what is {endings[-1]}? Say --source-format {'|'.join(FORMATS)}, or any of Spark's"
        )
    return found


def source_frame(
    spark: SparkSession,
    path: str | None,
    *,
    format: str | None = None,
    options: Mapping[str, str] | None = None,
    sql: str | None = None,
) -> DataFrame:
    """The rows of a path, or of a query; with both, the path is the view `source` of the query."""
    from pyspark.errors import AnalysisException, ParseException

    try:
        frame = None if path is None else _read(spark, path, format, options or {})
        if sql is None:
            if frame is None:
                raise InvalidError("nothing to push: name a path, or give a query with --sql")
            return frame
        if frame is not None:
            frame.createOrReplaceTempView("source")
        return spark.sql(sql)
    except (AnalysisException, ParseException) as error:
        raise InvalidError(f"Spark cannot read the source: {str(error).strip().splitlines()[0]}") from error


def _read(spark: SparkSession, path: str, format: str | None, options: Mapping[str, str]) -> DataFrame:
    chosen = format or format_of(path)
    settings = {**(_CSV if chosen == "csv" else {}), **options}
    # Spark's Java process need not stand in the same folder as this one.
    place = path if "://" in path else str(Path(path).expanduser().absolute())
    return spark.read.format(chosen).options(**settings).load(place)
