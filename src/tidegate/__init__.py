"""Tidegate: partitioned event logs in; verified, deduplicated, windowed tables out.

The public names, nothing else. Each is loaded when first touched, so that a log tool never pays for
Arrow, numba or Spark it does not use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tidegate.clock import ManualClock, SystemClock
    from tidegate.errors import (
        ConflictError,
        CorruptError,
        FencedError,
        IntegrityError,
        InvalidError,
        OffsetOutOfRangeError,
        OverloadError,
        TidegateError,
        UnavailableError,
        WindowedKeyFormatError,
    )
    from tidegate.log.access.embedded import Log
    from tidegate.log.topics.topics import TopicConfig
    from tidegate.tables.avro import Avro
    from tidegate.tables.consumed import Consumed
    from tidegate.tables.json_serde import Json
    from tidegate.tables.key_table import table
    from tidegate.tables.materialized import Materialized
    from tidegate.tables.schema_registry import SchemaRegistry
    from tidegate.tables.serdes import Bytes, Double, Int, Long, String
    from tidegate.tables.sessioned_table import sessioned_table
    from tidegate.tables.windowed_serdes import windowed
    from tidegate.tables.windowed_table import windowed_table
    from tidegate.windows.aggregates import (
        approx_count_distinct,
        collect,
        count,
        count_distinct,
        first,
        last,
        max,
        mean,
        min,
        reduce,
        sum,
        top_k,
    )
    from tidegate.windows.kinds import Hopping, Session, Sliding, Tumbling, Unlimited

_HOMES = {
    "Avro": "tidegate.tables.avro",
    "Bytes": "tidegate.tables.serdes",
    "ConflictError": "tidegate.errors",
    "Consumed": "tidegate.tables.consumed",
    "CorruptError": "tidegate.errors",
    "Double": "tidegate.tables.serdes",
    "FencedError": "tidegate.errors",
    "Hopping": "tidegate.windows.kinds",
    "Int": "tidegate.tables.serdes",
    "IntegrityError": "tidegate.errors",
    "InvalidError": "tidegate.errors",
    "Json": "tidegate.tables.json_serde",
    "Log": "tidegate.log.access.embedded",
    "Long": "tidegate.tables.serdes",
    "ManualClock": "tidegate.clock",
    "Materialized": "tidegate.tables.materialized",
    "OffsetOutOfRangeError": "tidegate.errors",
    "OverloadError": "tidegate.errors",
    "SchemaRegistry": "tidegate.tables.schema_registry",
    "Session": "tidegate.windows.kinds",
    "Sliding": "tidegate.windows.kinds",
    "String": "tidegate.tables.serdes",
    "SystemClock": "tidegate.clock",
    "TidegateError": "tidegate.errors",
    "TopicConfig": "tidegate.log.topics.topics",
    "Tumbling": "tidegate.windows.kinds",
    "UnavailableError": "tidegate.errors",
    "Unlimited": "tidegate.windows.kinds",
    "WindowedKeyFormatError": "tidegate.errors",
    "approx_count_distinct": "tidegate.windows.aggregates",
    "collect": "tidegate.windows.aggregates",
    "count": "tidegate.windows.aggregates",
    "count_distinct": "tidegate.windows.aggregates",
    "first": "tidegate.windows.aggregates",
    "last": "tidegate.windows.aggregates",
    "max": "tidegate.windows.aggregates",
    "mean": "tidegate.windows.aggregates",
    "min": "tidegate.windows.aggregates",
    "reduce": "tidegate.windows.aggregates",
    "sessioned_table": "tidegate.tables.sessioned_table",
    "sum": "tidegate.windows.aggregates",
    "table": "tidegate.tables.key_table",
    "top_k": "tidegate.windows.aggregates",
    "windowed": "tidegate.tables.windowed_serdes",
    "windowed_table": "tidegate.tables.windowed_table",
}

__all__ = [
    "Avro",
    "Bytes",
    "ConflictError",
    "Consumed",
    "CorruptError",
    "Double",
    "FencedError",
    "Hopping",
    "Int",
    "IntegrityError",
    "InvalidError",
    "Json",
    "Log",
    "Long",
    "ManualClock",
    "Materialized",
    "OffsetOutOfRangeError",
    "OverloadError",
    "SchemaRegistry",
    "Session",
    "Sliding",
    "String",
    "SystemClock",
    "TidegateError",
    "TopicConfig",
    "Tumbling",
    "UnavailableError",
    "Unlimited",
    "WindowedKeyFormatError",
    "__version__",
    "approx_count_distinct",
    "collect",
    "count",
    "count_distinct",
    "first",
    "last",
    "max",
    "mean",
    "min",
    "reduce",
    "sessioned_table",
    "sum",
    "table",
    "top_k",
    "windowed",
    "windowed_table",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tidegate' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
