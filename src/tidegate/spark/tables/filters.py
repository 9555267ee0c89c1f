"""Spark's filters as bounds of a table: what a table looks up or leaves unread, and what stays with Spark.

| column | filters | becomes |
|---|---|---|
| `key` of bytes, text or whole numbers | `=`, `<=>`, `IN` | look-ups of these keys |
| `window_start`, `window_end` | `=`, `<=>`, `<`, `<=`, `>`, `>=` | bounds of time; whole buckets stay unread |
| `partition` | `=`, `<=>`, `IN` | Spark tasks that do not run |
| all of these | `IS NOT NULL` | nothing: they never are |

A filter taken here is applied exactly, so Spark need not look again. Keys of doubles and JSON stay with Spark: equal
values can have different bytes. Bounds count whole milliseconds, so a bound between two of them is moved to the
next one inside.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from tidegate.spark.tables.plan import EVERYTHING, LARGEST_MS, RowBounds
from tidegate.tables.options import TableRules
from tidegate.tables.serdes.base import Serde

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_KEY_TYPES = {"bytes": bytes, "string": str, "int": int, "long": int}
_WINDOWS = {"window_start": ("start_from", "start_to"), "window_end": ("end_from", "end_to")}


def bounds_of(filters: Sequence[Filter], rules: TableRules) -> tuple[RowBounds, list[Filter]]:
    """The bounds all of the filters together set, and the filters that Spark must apply itself."""
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
    """Keys and places are never null; the moment of a window is where Spark cannot hold it."""
    if column in ("key", "partition", "offset"):
        return bounds
    if column in _WINDOWS and rules.shape.is_windowed:
        high = _WINDOWS[column][1]
        return replace(bounds, **{high: min(getattr(bounds, high), LARGEST_MS)})
    return None


def _wanted(each: Filter) -> tuple[Any, ...] | None:
    """The values a filter asks for; None when it asks for something else."""
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
    below, above = micros // 1000, -(-micros // 1000)  # the milliseconds around it, itself where it is one
    first, last = getattr(bounds, low), min(getattr(bounds, high), LARGEST_MS)  # beyond is null, and no match
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
