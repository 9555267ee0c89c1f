"""`table.to_spark(spark)`: a committed table as a Spark DataFrame.

Imports point the other way, from `spark` to `tables`; for the user's sake this one call goes by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tidegate.errors import TidegateWarning, UnsupportedError
from tidegate.tables.building.shape import TableRules
from tidegate.tables.serdes.named import serde_from

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend


def spark_frame(
    spark: Any,
    backend: StorageBackend,
    rules: TableRules,
    commit: int | None,
    *,
    columns: Sequence[str] = (),
) -> Any:
    """The table at a commit; the last one when none is given.

    Executors open the table themselves, so it must lie in a folder that they share, or in an object store whose
    settings are in their environment. Serdes travel as their names; what no name says is left as bytes, with a warning.
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
    frame = import_module("tidegate.spark.tables.source").table_frame
    return frame(spark, address, rules.shape.name, commit=commit, columns=columns, **serdes)


def address_for_spark(backend: StorageBackend, table: str) -> str:
    """Where Spark's processes find the table."""
    if backend.address is None:
        raise UnsupportedError(
            f"table {table} lies in a backend of kind {backend.kind} that Spark's processes cannot open by its "
            "address; of an object store with settings of its own read "
            "spark.read.format('tidegate.table').option('state', ADDRESS).option('storage.…', …)"
        )
    return backend.address
