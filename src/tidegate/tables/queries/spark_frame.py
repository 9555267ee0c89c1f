"""`table.to_spark(spark)`: a committed table as a Spark DataFrame.

Imports point the other way, from `spark` to `tables`; for the user's sake this one call goes by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.errors import InvalidError, TidegateWarning
from tidegate.tables.building.shape import TableRules
from tidegate.tables.serdes.named import serde_from

if TYPE_CHECKING:
    from tidegate.storage.backends.port import StorageBackend


def spark_frame(
    spark: Any,
    backend: StorageBackend,
    rules: TableRules,
    commit: int | None,
    *,
    columns: Sequence[str] = (),
) -> Any:
    """The table at a commit; the last one when none is given.

    Executors open the table themselves, so it must lie in a folder that they share. Serdes travel as their names; what
    no name says is left as bytes, with a warning.
    """
    root: Path | None = getattr(backend, "root", None)
    if root is None:
        raise InvalidError(
            f"table {rules.shape.name} lies in a backend of kind {backend.kind}, which Spark's processes cannot open "
            "from here; of an object store read spark.read.format('tidegate.table').option('state', ADDRESS)"
        )
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
    return frame(spark, str(root.absolute()), rules.shape.name, commit=commit, columns=columns, **serdes)
