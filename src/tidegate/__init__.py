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
    from tidegate.spark.push import push
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

_NAMES = {
    "tidegate.clock": "ManualClock SystemClock",
    "tidegate.errors": (
        "AuthenticationError ConflictError CorruptError FencedError IntegrityError InvalidError "
        "OffsetOutOfRangeError OverloadError TidegateError UnavailableError WindowedKeyFormatError"
    ),
    "tidegate.log.log": "Log",
    "tidegate.log.topic_config": "TopicConfig",
    "tidegate.pipeline.definition.app": "App",
    "tidegate.pipeline.definition.stream": "Stream",
    "tidegate.spark.push": "push",
    "tidegate.tables.factories": "sessioned_table table windowed_table",
    "tidegate.tables.hybrid.table": "hybrid_table",
    "tidegate.tables.options": "Consumed Materialized",
    "tidegate.tables.serdes.avro": "Avro SchemaRegistry",
    "tidegate.tables.serdes.base": "Bytes Double Int Long String windowed",
    "tidegate.tables.serdes.json": "Json",
    "tidegate.tables.serdes.json_values": "field",
    "tidegate.tables.versions.reader": "versioned_table",
    "tidegate.windows.aggregates.definitions": (
        "approx_count_distinct collect count count_distinct first last max mean min reduce sum top_k"
    ),
    "tidegate.windows.kinds": "Hopping Session Sliding Tumbling Unlimited",
    "tidegate.windows.operators.late": "LateSettings",
    "tidegate.windows.operators.windowed_operator": "Emit FutureGuard",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

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
