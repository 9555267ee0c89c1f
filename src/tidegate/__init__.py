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
        AuthenticationError,
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
    from tidegate.log.log import Log
    from tidegate.log.topic_config import TopicConfig
    from tidegate.pipeline.definition.app import App
    from tidegate.pipeline.definition.stream import Stream
    from tidegate.spark.push.driver import push
    from tidegate.tables.factories import sessioned_table, table, windowed_table
    from tidegate.tables.hybrid.table import hybrid_table
    from tidegate.tables.options import Consumed, Materialized
    from tidegate.tables.serdes.avro import Avro, SchemaRegistry
    from tidegate.tables.serdes.base import Bytes, Double, Int, Long, String, windowed
    from tidegate.tables.serdes.json import Json
    from tidegate.tables.serdes.json_values import field
    from tidegate.tables.versions.reader import versioned_table
    from tidegate.windows.aggregates.definitions import (
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
    from tidegate.windows.operators.late import LateSettings
    from tidegate.windows.operators.windowed_operator import Emit, FutureGuard

_HOMES = {
    "App": "tidegate.pipeline.definition.app",
    "AuthenticationError": "tidegate.errors",
    "Avro": "tidegate.tables.serdes.avro",
    "Bytes": "tidegate.tables.serdes.base",
    "ConflictError": "tidegate.errors",
    "Consumed": "tidegate.tables.options",
    "CorruptError": "tidegate.errors",
    "Double": "tidegate.tables.serdes.base",
    "Emit": "tidegate.windows.operators.windowed_operator",
    "FencedError": "tidegate.errors",
    "FutureGuard": "tidegate.windows.operators.windowed_operator",
    "Hopping": "tidegate.windows.kinds",
    "Int": "tidegate.tables.serdes.base",
    "IntegrityError": "tidegate.errors",
    "InvalidError": "tidegate.errors",
    "Json": "tidegate.tables.serdes.json",
    "LateSettings": "tidegate.windows.operators.late",
    "Log": "tidegate.log.log",
    "Long": "tidegate.tables.serdes.base",
    "ManualClock": "tidegate.clock",
    "Materialized": "tidegate.tables.options",
    "OffsetOutOfRangeError": "tidegate.errors",
    "OverloadError": "tidegate.errors",
    "SchemaRegistry": "tidegate.tables.serdes.avro",
    "Session": "tidegate.windows.kinds",
    "Sliding": "tidegate.windows.kinds",
    "Stream": "tidegate.pipeline.definition.stream",
    "String": "tidegate.tables.serdes.base",
    "SystemClock": "tidegate.clock",
    "TidegateError": "tidegate.errors",
    "TopicConfig": "tidegate.log.topic_config",
    "Tumbling": "tidegate.windows.kinds",
    "UnavailableError": "tidegate.errors",
    "Unlimited": "tidegate.windows.kinds",
    "WindowedKeyFormatError": "tidegate.errors",
    "approx_count_distinct": "tidegate.windows.aggregates.definitions",
    "collect": "tidegate.windows.aggregates.definitions",
    "count": "tidegate.windows.aggregates.definitions",
    "count_distinct": "tidegate.windows.aggregates.definitions",
    "field": "tidegate.tables.serdes.json_values",
    "first": "tidegate.windows.aggregates.definitions",
    "hybrid_table": "tidegate.tables.hybrid.table",
    "last": "tidegate.windows.aggregates.definitions",
    "max": "tidegate.windows.aggregates.definitions",
    "mean": "tidegate.windows.aggregates.definitions",
    "min": "tidegate.windows.aggregates.definitions",
    "push": "tidegate.spark.push.driver",
    "reduce": "tidegate.windows.aggregates.definitions",
    "sessioned_table": "tidegate.tables.factories",
    "sum": "tidegate.windows.aggregates.definitions",
    "table": "tidegate.tables.factories",
    "top_k": "tidegate.windows.aggregates.definitions",
    "versioned_table": "tidegate.tables.versions.reader",
    "windowed": "tidegate.tables.serdes.base",
    "windowed_table": "tidegate.tables.factories",
}

__all__ = [
    "App",
    "AuthenticationError",
    "Avro",
    "Bytes",
    "ConflictError",
    "Consumed",
    "CorruptError",
    "Double",
    "Emit",
    "FencedError",
    "FutureGuard",
    "Hopping",
    "Int",
    "IntegrityError",
    "InvalidError",
    "Json",
    "LateSettings",
    "Log",
    "Long",
    "ManualClock",
    "Materialized",
    "OffsetOutOfRangeError",
    "OverloadError",
    "SchemaRegistry",
    "Session",
    "Sliding",
    "Stream",
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
    "field",
    "first",
    "hybrid_table",
    "last",
    "max",
    "mean",
    "min",
    "push",
    "reduce",
    "sessioned_table",
    "sum",
    "table",
    "top_k",
    "versioned_table",
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
