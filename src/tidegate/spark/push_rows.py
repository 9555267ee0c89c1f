"""Convert a DataFrame's rows to keys and values of a table, and send one partition of a push.

| given | becomes |
|---|---|
| one key column | string: UTF-8; binary: as it is; int, bigint, double: Kafka's big-endian numbers |
| several key columns | one JSON object with them as fields, in the order given |
| a value column that is string or binary, named alone | as it is |
| any other value columns (without `value`: all that are no key) | one JSON object with them as fields |

A partition is sent in the total order (key, order_by, timestamp, value); of rows with the same key the last counts.
Each task returns one line; the driver builds the manifest from the attempts that Spark counts as done.

S1  every attempt at a partition sends the same records: the same GUID, times, numbers and order. What a dead attempt
    left in the topic is a repeat, and validators call it a duplicate.
S2  chains are ended only when all rows were appended: an attempt that failed certifies nothing.
S3  nothing is acknowledged in between: a power cut loses the attempt, not a part of a version.
S4  a row in the wrong partition stops the push (`InternalError`); rows without a key, all sent to one partition, stop
    it with their number.

pyspark is imported only when called. Thread rule: one thread per task; the rest are values and pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.clock import Clock, SystemClock
from tidegate.errors import InternalError, InvalidError
from tidegate.integrity.control_records import stable_guid
from tidegate.integrity.header import ChecksumType
from tidegate.integrity.sender import ChainLimits, Chains, ChainState, Outlet, outlet_of
from tidegate.integrity.state import Sent
from tidegate.log.format.records import RecordColumns
from tidegate.log.log import Log, is_kafka, open_log
from tidegate.spark.topic_sink import GATHER_ROWS, compact, gathered
from tidegate.tables.serdes.base import Serde
from tidegate.tables.serdes.json import Json, encode_objects, require_serde
from tidegate.waiting import waiting

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


# -- columns --------------------------------------------------------------------------------------

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
    """The conversion of a row."""

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
    """Choose the conversion for these columns; everything that can be refused is refused here."""
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
    """Return rows of key, value and timestamp, in the partition of their key, in the total order."""
    from pyspark.sql import functions as f

    order = [f.col(f"`{name}`").alias(f"order_{number}") for number, name in enumerate(shape.order_by)]
    time = f.lit(None).cast("timestamp") if shape.timestamp is None else f.col(f"`{shape.timestamp}`")
    is_ready = len(shape.key) == 1 and shape.key_serde in ("String()", "Bytes()")
    key = _column(shape.key, shape.key_serde, is_ready=is_ready).alias("key")
    value = _column(shape.value, shape.value_serde, is_ready=shape.is_ready).alias("value")
    columns = frame.select(key, value, time.alias("timestamp"), *order)
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


def _column(names: Sequence[str], serde: str, *, is_ready: bool) -> Column:
    """Encode columns with a serde, in Python, column by column; one that `is_ready` goes out as it is."""
    from pyspark.sql import functions as f

    from tidegate.spark.compat import arrow_function

    if is_ready:
        return f.col(f"`{names[0]}`").cast("binary")

    def encode(*columns: pa.Array) -> pa.Array:
        return encoded_columns(serde, names, columns)

    encode.__annotations__ = {"columns": pa.Array, "return": pa.Array}
    column: Column = arrow_function(encode, "binary")(*(f.col(f"`{name}`") for name in names))
    return column


def encoded_columns(serde: str, names: Sequence[str], columns: Sequence[pa.Array]) -> pa.BinaryArray:
    """Encode the columns of one batch: a JSON object of several, or a number's own bytes."""
    chosen: Serde[Any] = require_serde(serde, "serde")
    if isinstance(chosen, Json):
        wanted = pa.schema([field.with_nullable(True) for field in chosen.schema])
        arrays = [column.cast(field.type, safe=False) for column, field in zip(columns, wanted, strict=True)]
        return encode_objects(pa.RecordBatch.from_arrays(arrays, schema=wanted))
    return chosen.encode_column(columns[0])


def _partition_column(partitions: int) -> Column:
    from pyspark.sql import functions as f

    from tidegate.spark.compat import arrow_function

    def partition(key: pa.Array) -> pa.Array:
        return partitions_of(key, partitions)

    partition.__annotations__ = {"key": pa.Array, "return": pa.Array}
    column: Column = arrow_function(partition, "int")(f.col("key"))
    return column


def partitions_of(keys: pa.Array, partitions: int) -> pa.Int32Array:
    """Return Kafka's partition of each key; rows without a key are all in partition 0, where they are counted."""
    from tidegate.log.writer import partitions_of_column

    return pa.array(partitions_of_column(keys.cast(pa.binary()), partitions))


# -- sending --------------------------------------------------------------------------------------

ANSWER_DDL: Final = "answer binary"


@dataclass(frozen=True, slots=True)
class SendOrder:
    """The instructions for all tasks of a push."""

    log: str
    topic: str
    partitions: int
    push: str
    started_ms: int
    without_key: str = "refuse"
    compression: str | None = None
    lock_timeout_ms: int = 60_000
    gather_rows: int = GATHER_ROWS
    """How many rows are appended at once; where that cuts them changes no record."""
    client: Mapping[str, str] = field(default_factory=dict)


class Answer(NamedTuple):
    """The records that one attempt sent, whether or not Spark counts it."""

    partition: int
    sent: Sent | None
    nbytes: int = 0
    repeated: int = 0
    without_key: int = 0


def send_in_task(order: SendOrder, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The function for `mapInArrow`: takes the partition's rows and returns one line."""
    from pyspark import TaskContext

    from tidegate.spark.workers import freeze_once

    freeze_once()
    context = TaskContext.get()
    if context is None:
        raise InternalError("a push is sent by Spark's tasks only")
    answer = send_partition(
        order, context.partitionId(), context.taskAttemptId() % 2**32, batches, clock=SystemClock()
    )
    yield pa.RecordBatch.from_pydict({"answer": [msgspec.msgpack.encode(answer)]})


def answer_of(row: Any) -> Answer:
    """Decode the line of one task."""
    return msgspec.msgpack.decode(row["answer"], type=Answer)


def send_partition(
    order: SendOrder, partition: int, attempt: int, batches: Iterable[pa.RecordBatch], *, clock: Clock
) -> Answer:
    """Send one partition's sorted rows; `attempt` distinguishes attempts."""
    rows = _Rows(order, partition)
    opened = iter(rows.unique(batches))
    first = next(opened, None)
    if first is None or (rows.without_key and order.without_key == "refuse"):
        return Answer(partition, None, 0, rows.repeated, rows.without_key)
    log = open_log(order.log, client=order.client or None) if is_kafka(order.log) else open_log(order.log)
    with log:
        if isinstance(log, Log):
            waiting(clock, order.lock_timeout_ms, partial(log.open_partition, order.topic, partition))
        settings: dict[str, Any] = {} if order.compression is None else {"compression": order.compression}
        writer = log.writer(order.topic, **settings)
        outlet: Outlet = outlet_of(writer)
        guid = stable_guid(order.push, order.topic, partition)
        chains = Chains(guid, attempt, ChecksumType.ADHASH2, ChainLimits(max_age=0))
        state, nbytes = ChainState(), 0
        for columns in chain([first], opened):
            planned = chains.data(state, columns, order.started_ms)
            outlet.prepare(compact(planned.pieces), partition).append()
            state = planned.after
            nbytes += int(columns.key.nbytes + columns.value.nbytes)
        planned = chains.end(state, order.started_ms)  # S2
        outlet.prepare(planned.pieces, partition).append()
        outlet.acknowledge([partition])  # S3
        state = planned.after
        writer.close()
    sent = Sent(guid, state.chain, state.sequence - 1, state.checksum, state.records)
    return Answer(partition, sent, nbytes, rows.repeated, rows.without_key)


class _Rows:
    """Sorted rows as records: for each key the last."""

    def __init__(self, order: SendOrder, partition: int) -> None:
        self._order, self._partition = order, partition
        self.repeated = 0
        self.without_key = 0

    def unique(self, batches: Iterable[pa.RecordBatch]) -> Iterator[RecordColumns]:
        """Yield only the last row of each key; the last key's row waits for the next batch."""
        held: pa.Table | None = None
        for batch in gathered(batches, self._order.gather_rows):
            table = self._keyed(batch)
            if held is not None:
                table = pa.concat_tables([held, table]).combine_chunks()
            if table.num_rows == 0:
                continue
            keys = table.column("key").chunk(0)
            last = np.ones(len(keys), np.bool_)
            last[:-1] = pc.not_equal(keys[:-1], keys[1:]).to_numpy(zero_copy_only=False)
            held = table.slice(table.num_rows - 1)
            last[-1] = False
            self.repeated += len(keys) - 1 - int(last.sum())
            if last.any():
                kept = table.slice(0, table.num_rows - 1)
                yield self._columns(kept if last[:-1].all() else kept.filter(pa.array(last[:-1])))
        if held is not None:
            yield self._columns(held)

    def _keyed(self, table: pa.Table) -> pa.Table:
        keys = table.column("key")
        if keys.null_count:
            self.without_key += keys.null_count
            table = table.filter(keys.is_valid())
        if table.num_rows:
            placed = partitions_of(table.column("key").combine_chunks(), self._order.partitions)
            if not pc.all(pc.equal(placed, self._partition)).as_py():  # S4
                raise InternalError(
                    f"Spark gave task {self._partition} rows of another partition of {self._order.topic}; nothing "
                    "was certified. Please report it with the Spark version"
                )
        return table

    def _columns(self, table: pa.Table) -> RecordColumns:
        table = table.combine_chunks()
        times = table.column("timestamp").combine_chunks()
        times = times.cast(pa.timestamp("ms", tz=times.type.tz), safe=False).view(pa.int64())
        key, value = table.column("key").combine_chunks(), table.column("value").combine_chunks()
        return RecordColumns(key, value, pc.fill_null(times, self._order.started_ms), None)
