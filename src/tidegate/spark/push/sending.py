"""One partition of a push, in a Spark task: rows in their total order are numbered, check-summed and appended.

Owns a task's work from its sorted rows to the end of its chains in the log, and the one line it answers. The driver
makes the manifest of the answers of those attempts that Spark counts as done.

S1  an attempt sends the same records as every other attempt at its partition: the same GUID, times, numbers and order;
    only the nonce in the keys of control records differs. What a dead or slower attempt left in the topic is
    therefore a repeat, and validators call it a duplicate.
S2  chains are ended only when all rows were appended: an attempt that failed certifies nothing.
S3  nothing is acknowledged in between: a power cut loses the attempt, not a part of a version.
S4  a row in the wrong partition stops the push (`InternalError`); rows without a key stop it with their number,
    which one partition knows, because they all come to it, and first.

On an embedded log an attempt waits for the partition's lock, at most `lock_timeout_ms`, while another one has it.

Thread rule: one thread a task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.clock import Clock, SystemClock
from tidegate.errors import InternalError
from tidegate.integrity.control_records import stable_guid
from tidegate.integrity.header import ChecksumType
from tidegate.integrity.sender import ChainLimits, Chains, ChainState, Outlet, outlet_of
from tidegate.integrity.state import Sent
from tidegate.log.format.records import RecordColumns
from tidegate.log.log import Log, is_kafka, open_log
from tidegate.spark.push.columns import partitions_of
from tidegate.spark.sink.appending import compact
from tidegate.waiting import waiting

GATHER_ROWS: Final = 1 << 16
GATHER_BYTES: Final = 32 << 20
ANSWER: Final = pa.schema(
    [
        pa.field("partition", pa.int32()),
        pa.field("guid", pa.binary()),
        pa.field("chain", pa.int32()),
        pa.field("sequence", pa.int32()),
        pa.field("checksum", pa.decimal128(20, 0)),
        pa.field("records", pa.int64()),
        pa.field("nbytes", pa.int64()),
        pa.field("repeated", pa.int64()),
        pa.field("without_key", pa.int64()),
    ]
)
ANSWER_DDL: Final = (
    "partition int, guid binary, chain int, sequence int, checksum decimal(20,0), records long, nbytes long, "
    "repeated long, without_key long"
)


@dataclass(frozen=True, slots=True)
class SendOrder:
    """What all tasks of a push are told."""

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


@dataclass(frozen=True, slots=True)
class Answer:
    """What one attempt sent, counted by Spark or not."""

    partition: int
    sent: Sent | None
    nbytes: int = 0
    repeated: int = 0
    without_key: int = 0


def send_in_task(order: SendOrder, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """`mapInArrow`'s function: the partition's rows in, one line out."""
    from pyspark import TaskContext

    from tidegate.spark.workers import freeze_once

    freeze_once()
    context = TaskContext.get()
    if context is None:
        raise InternalError("a push is sent by Spark's tasks only")
    answer = send_partition(
        order, context.partitionId(), context.taskAttemptId() % 2**32, batches, clock=SystemClock()
    )
    sent = answer.sent
    row = {
        "partition": answer.partition,
        "guid": None if sent is None else sent.guid,
        "chain": 0 if sent is None else sent.chain,
        "sequence": 0 if sent is None else sent.sequence,
        "checksum": 0 if sent is None else sent.checksum,
        "records": 0 if sent is None else sent.records,
        "nbytes": answer.nbytes,
        "repeated": answer.repeated,
        "without_key": answer.without_key,
    }
    yield pa.RecordBatch.from_pylist([row], schema=ANSWER)


def answer_of(row: Any) -> Answer:
    """The line of one task."""
    sent = None
    if row["guid"] is not None:
        sent = Sent(bytes(row["guid"]), row["chain"], row["sequence"], int(row["checksum"]), row["records"])
    return Answer(row["partition"], sent, row["nbytes"], row["repeated"], row["without_key"])


def send_partition(
    order: SendOrder, partition: int, attempt: int, batches: Iterable[pa.RecordBatch], *, clock: Clock
) -> Answer:
    """Send one partition's rows, which come in their order; `attempt` tells attempts apart."""
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
        for columns in _both(first, opened):
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
    """Sorted rows as records: one for each key, the last."""

    def __init__(self, order: SendOrder, partition: int) -> None:
        self._order, self._partition = order, partition
        self.repeated = 0
        self.without_key = 0

    def unique(self, batches: Iterable[pa.RecordBatch]) -> Iterator[RecordColumns]:
        """Of rows with the same key only the last; the last row of all waits for the next batch."""
        held: pa.Table | None = None
        for batch in _gathered(batches, self._order.gather_rows):
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


def _gathered(batches: Iterable[pa.RecordBatch], gather_rows: int) -> Iterator[pa.Table]:
    """Arrow batches of Spark together, so that the log's are not small; each column in one piece."""
    held: list[pa.RecordBatch] = []
    rows = nbytes = 0
    for batch in batches:
        held.append(batch)
        rows, nbytes = rows + batch.num_rows, nbytes + batch.nbytes
        if rows >= gather_rows or nbytes >= GATHER_BYTES:
            yield pa.Table.from_batches(held).combine_chunks()
            held, rows, nbytes = [], 0, 0
    if rows:
        yield pa.Table.from_batches(held).combine_chunks()


def _both(first: RecordColumns, rest: Iterator[RecordColumns]) -> Iterator[RecordColumns]:
    yield first
    yield from rest
