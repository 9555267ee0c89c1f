"""Records in Arrow: the schema of records that are read, and the columns of records that are written.

Defines `RECORD_SCHEMA` and `coerce`, the only function that turns a caller's table into the four columns that a
batch is encoded from. `decode` and `encode` handle the bytes.

The schema follows Spark's Kafka source (topic, partition, offset, timestamp, key, value, headers) with
millisecond timestamps. A null timestamp is Kafka's "no timestamp" (-1); no headers is an empty list.

Thread rule: values and pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.errors import InvalidError

HEADER_TYPE: Final = pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary())])
HEADERS_TYPE: Final = pa.list_(pa.field("item", HEADER_TYPE, nullable=False))
TIMESTAMP_TYPE: Final = pa.timestamp("ms", tz="UTC")
TOPIC_TYPE: Final = pa.dictionary(pa.int32(), pa.string())

# Callers' headers are cast to this type: Arrow would trust a declared "not null" without checking.
GIVEN_HEADERS_TYPE: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

RECORD_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", TOPIC_TYPE, nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", TIMESTAMP_TYPE),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", HEADERS_TYPE, nullable=False),
    ]
)

RecordTable: TypeAlias = "pa.Table | pa.RecordBatch | RecordColumns"


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """Records to be encoded: four Arrow arrays of one length, possibly slices of larger ones.

    `timestamp` is int64 milliseconds, null for none; `headers` is None when no record has any.
    """

    key: pa.BinaryArray
    value: pa.BinaryArray
    timestamp: pa.Int64Array
    headers: pa.ListArray | None

    def __len__(self) -> int:
        return len(self.value)

    def slice(self, start: int, length: int | None = None) -> RecordColumns:
        """Return rows `start` to `start + length`, without copying."""
        return self._each(lambda column: column.slice(start, length))

    def filter(self, mask: pa.BooleanArray) -> RecordColumns:
        """Return the rows where `mask` is true."""
        return self._each(lambda column: column.filter(mask))

    def take(self, rows: pa.Array) -> RecordColumns:
        """Return these rows, in this order."""
        return self._each(lambda column: column.take(rows))

    def _each(self, change: Callable[[pa.Array], pa.Array]) -> RecordColumns:
        headers = None if self.headers is None else change(self.headers)
        return RecordColumns(change(self.key), change(self.value), change(self.timestamp), headers)


def coerce(source: RecordTable) -> RecordColumns:
    """Return the record columns of `source`: `key`, `value`, `timestamp`, `headers`, each optional.

    Strings become UTF-8 bytes. Accepted are all types that Arrow can cast to binary, timestamps of any unit
    (truncated to milliseconds), integers as milliseconds, and maps as headers. Other columns are ignored.
    Several chunks are copied into one; a single chunk, sliced or not, is used without a copy.
    """
    if isinstance(source, RecordColumns):
        return source
    rows = source.num_rows
    headers = _column(source, "headers")
    return RecordColumns(
        key=_binary(source, "key", rows),
        value=_binary(source, "value", rows),
        timestamp=_timestamps(source, rows),
        headers=None if headers is None else _headers(headers),
    )


def binary_buffers(column: pa.BinaryArray) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Return the data bytes and the n + 1 offsets of a binary column, without a copy."""
    _, offsets, data = column.buffers()
    if offsets is None or len(column) == 0:
        return np.empty(0, np.uint8), np.zeros(len(column) + 1, np.int32)
    bounds = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(data if data is not None else b"", np.uint8), bounds


def pieces(source: RecordTable) -> Iterator[RecordColumns]:
    """Like `coerce`, but yield several pieces when a table's columns are too large for one Arrow array."""
    if isinstance(source, pa.Table) and any(column.num_chunks > 1 for column in source.columns):
        known = [name for name in ("key", "value", "timestamp", "headers") if name in source.column_names]
        for batch in source.select(known).combine_chunks().to_batches():
            yield coerce(batch)
    else:
        yield coerce(source)


def _column(source: pa.Table | pa.RecordBatch, name: str) -> pa.Array | None:
    indices = source.schema.get_all_field_indices(name)
    if not indices:
        return None
    if len(indices) > 1:
        raise InvalidError(f"the table has {len(indices)} columns called {name!r}; keep one")
    column = source.column(indices[0])
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        raise InvalidError(f"column {name!r} holds 2 GiB or more; write the table in smaller pieces")
    return column


def _binary(source: pa.Table | pa.RecordBatch, name: str, rows: int) -> pa.BinaryArray:
    column = _column(source, name)
    if column is None:
        return pa.nulls(rows, pa.binary())
    return _cast(column, pa.binary(), name)


def _timestamps(source: pa.Table | pa.RecordBatch, rows: int) -> pa.Int64Array:
    column = _column(source, "timestamp")
    if column is None:
        return pa.nulls(rows, pa.int64())
    if pa.types.is_timestamp(column.type):
        is_coarser = column.type.unit == "s"  # may overflow; finer units are truncated
        column = _cast(column, pa.timestamp("ms", tz=column.type.tz), "timestamp", safe=is_coarser)
        column = column.view(pa.int64())
    elif pa.types.is_integer(column.type) or pa.types.is_null(column.type):
        column = _cast(column, pa.int64(), "timestamp")
    else:
        raise InvalidError(
            f"column 'timestamp' is {column.type}; give an Arrow timestamp or integer milliseconds",
            kafka_name="INVALID_TIMESTAMP",
        )
    smallest = pc.min(column).as_py()
    if smallest is not None and smallest < 0:
        column = pc.if_else(pc.equal(column, -1), pa.scalar(None, pa.int64()), column)
        smallest = pc.min(column).as_py()
        if smallest is not None and smallest < 0:
            raise InvalidError(
                f"timestamp {smallest} lies before 1970; Kafka knows none below 0 (null means no timestamp)",
                kafka_name="INVALID_TIMESTAMP",
            )
    return column


def _headers(column: pa.Array) -> pa.ListArray:
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), HEADERS_TYPE)
    if pa.types.is_map(column.type):  # a map is a list of (key, value) structs with the same layout
        column = column.cast(
            pa.list_(pa.struct([("key", column.type.key_type), ("value", column.type.item_type)]))
        )
    headers = _cast(column, GIVEN_HEADERS_TYPE, "headers")
    entries = headers.flatten()
    if entries.null_count or entries.field("key").null_count:
        raise InvalidError("a header has no key; headers are lists of {key, value} with a text key")
    return headers


def _cast(column: pa.Array, wanted: pa.DataType, name: str, *, safe: bool = True) -> pa.Array:
    if column.type == wanted:
        return column
    try:
        return column.cast(wanted, safe=safe)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise InvalidError(f"column {name!r} is {column.type} and cannot become {wanted}: {error}") from None
