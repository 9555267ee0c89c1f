"""Which columns of a DataFrame become keys and values of a table, and in which bytes.

| given | becomes |
|---|---|
| one key column | string: UTF-8; binary: as it is; int, bigint, double: Kafka's big-endian numbers |
| several key columns | one JSON object with them as fields, in the order given |
| a value column that is string or binary, named alone | as it is |
| any other value columns (without `value`: all that are no key) | one JSON object with them as fields |

Of rows with the same key the last in the order of `order_by` counts, and where that is not given or equal, the one
with the largest timestamp and then the largest value by its bytes: what counts never depends on how Spark cut the
rows. The whole of (key, order, timestamp, value) is the total order in which a partition is sent; rows that are equal
in all of it are the same bytes, so that every attempt at a task sends the same records.

Imports pyspark only when called. Thread rule: values and pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.tables.serdes.base import Serde
from tidegate.tables.serdes.json import Json, encode_objects, require_serde

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_KEYS: Final = {
    "string": "String()",
    "binary": "Bytes()",
    "int": "Int()",
    "bigint": "Long()",
    "double": "Double()",
}
_JSON: Final = {
    "string": "string", "tinyint": "int8", "smallint": "int16", "int": "int32", "bigint": "int64",
    "float": "double", "double": "double", "boolean": "bool", "date": "date", "timestamp": "timestamp[us]",
}  # fmt: skip
READY: Final = ("string", "binary")
SENT: Final = ("key", "value", "timestamp")


@dataclass(frozen=True, slots=True)
class RowShape:
    """What a row becomes."""

    key: tuple[str, ...]
    value: tuple[str, ...]
    is_ready: bool
    """Whether the only value column goes out as it is."""
    key_serde: str
    value_serde: str
    timestamp: str | None
    order_by: tuple[str, ...]


def row_shape(
    frame: DataFrame,
    *,
    key: str | Sequence[str],
    value: str | Sequence[str] | None = None,
    timestamp: str | None = None,
    order_by: str | Sequence[str] = (),
) -> RowShape:
    """Decide from the columns there are; everything that can be refused is refused here."""
    kinds = dict(frame.dtypes)
    keys, order = _names(key), _names(order_by)
    values = _names(value) if value is not None else tuple(name for name in kinds if name not in keys)
    if not keys or not values:
        raise InvalidError("a table needs a key column and a value column; name them with key= and value=")
    for name in (*keys, *values, *order, *([] if timestamp is None else [timestamp])):
        if name not in kinds:
            raise InvalidError(f"the source has no column {name!r}; it has {', '.join(kinds)}")
    if timestamp is not None and kinds[timestamp] != "timestamp":
        raise InvalidError(
            f"column {timestamp!r} is {kinds[timestamp]}; a timestamp column is of type timestamp"
        )
    is_ready = len(values) == 1 and kinds[values[0]] in READY and (value is not None or values[0] == "value")
    return RowShape(
        keys,
        values,
        is_ready,
        _key_serde(keys, kinds),
        _KEYS[kinds[values[0]]] if is_ready else _json_serde(values, kinds, "value"),
        timestamp,
        order,
    )


def shaped(frame: DataFrame, shape: RowShape, partitions: int) -> DataFrame:
    """Rows of key, value and timestamp, in the partition of their key, in the one total order."""
    from pyspark.sql import functions as f

    order = [f.col(f"`{name}`").alias(f"order_{number}") for number, name in enumerate(shape.order_by)]
    time = f.lit(None).cast("timestamp") if shape.timestamp is None else f.col(f"`{shape.timestamp}`")
    columns = frame.select(
        _key_column(shape).alias("key"), _value_column(shape).alias("value"), time.alias("timestamp"), *order
    )
    placed = columns.repartitionById(partitions, _partition_column(partitions))
    ordered = placed.sortWithinPartitions(
        f.col("key").asc_nulls_first(),
        *(f.col(f"order_{number}").asc_nulls_first() for number in range(len(order))),
        f.col("timestamp").asc_nulls_first(),
        f.col("value").asc_nulls_first(),
    )
    return ordered.select(*SENT)


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _key_serde(keys: Sequence[str], kinds: dict[str, str]) -> str:
    if len(keys) > 1:
        return _json_serde(keys, kinds, "key")
    kind = kinds[keys[0]]
    if kind not in _KEYS:
        raise InvalidError(
            f"key column {keys[0]!r} is {kind}; keys are {', '.join(_KEYS)}: cast it in the source, or give several "
            "columns for a JSON key"
        )
    return _KEYS[kind]


def _json_serde(names: Sequence[str], kinds: dict[str, str], what: str) -> str:
    declared = {}
    for name in names:
        kind = kinds[name]
        known = kind if kind.startswith("decimal") else _JSON.get(kind)
        if known is None:
            raise InvalidError(
                f"{what} column {name!r} is {kind}, which is not written as JSON here; leave it out or cast it "
                "(to_json and base64 make text of anything)"
            )
        if not name.isidentifier():
            raise InvalidError(f"{what} column {name!r} is no name for a field; rename it")
        declared[name] = known
    return repr(Json(**declared))


def _key_column(shape: RowShape) -> Column:
    from pyspark.sql import functions as f

    if len(shape.key) == 1 and shape.key_serde in ("String()", "Bytes()"):
        return f.col(f"`{shape.key[0]}`").cast("binary")
    return _encoded(shape.key, shape.key_serde)


def _value_column(shape: RowShape) -> Column:
    from pyspark.sql import functions as f

    if shape.is_ready:
        return f.col(f"`{shape.value[0]}`").cast("binary")
    return _encoded(shape.value, shape.value_serde)


def _encoded(names: Sequence[str], serde: str) -> Column:
    """The columns as the bytes of a serde; made in Python, column by column."""
    from pyspark.sql import functions as f

    fields, made = tuple(names), _arrow_function()

    def encode(*columns: pa.Array) -> pa.Array:
        return encoded_columns(serde, fields, columns)

    encode.__annotations__ = {"columns": pa.Array, "return": pa.Array}
    column: Column = made(encode, "binary")(*(f.col(f"`{name}`") for name in names))
    return column


def encoded_columns(serde: str, names: Sequence[str], columns: Sequence[pa.Array]) -> pa.BinaryArray:
    """Columns of one batch as bytes: a JSON object of several, or a number's own bytes."""
    chosen: Serde[Any] = require_serde(serde, "serde")
    if isinstance(chosen, Json):
        wanted = pa.schema([field.with_nullable(True) for field in chosen.schema])
        arrays = [column.cast(field.type, safe=False) for column, field in zip(columns, wanted, strict=True)]
        return encode_objects(pa.RecordBatch.from_arrays(arrays, schema=wanted))
    return chosen.encode_column(columns[0])


def _partition_column(partitions: int) -> Column:
    from pyspark.sql import functions as f

    def partition(key: pa.Array) -> pa.Array:
        return partitions_of(key, partitions)

    partition.__annotations__ = {"key": pa.Array, "return": pa.Array}
    column: Column = _arrow_function()(partition, "int")(f.col("key"))
    return column


def _arrow_function() -> Any:
    """Spark's maker of functions over Arrow columns; its declared types know no function of many columns."""
    from pyspark.sql.pandas.functions import arrow_udf

    return arrow_udf


def partitions_of(keys: pa.Array, partitions: int) -> pa.Int32Array:
    """Kafka's partition of each key; rows without a key come together in partition 0, where they are counted."""
    from tidegate.log.writer import partitions_of_column

    return pa.array(partitions_of_column(keys.cast(pa.binary()), partitions))
