"""`df.write` and `df.writeStream` of `format("tidegate")`: rows appended to a topic, numbered and check-summed, once.

Tasks write their rows into files of their own (`outbox.py`); when all are done, the driver appends the files of the
attempts that counted, in order (`appending.py`). Columns are those of a record (`rows.py`), options are in
`options.py`.

What the data source API asks for:
W1  a failed or speculative attempt runs `write` again, and only the winner's message reaches `commit`.
W2  `commit` runs in a process of its own that knows the batch and not the query, so messages carry the query's id.
W3  a `commit` that raises is followed by `abort` with all messages, and the batch comes again: abort deletes nothing.
W4  planning, tasks and commits are processes of their own, so each imports no more than it needs.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from tidegate.errors import InvalidError, TidegateError, UnavailableError
from tidegate.log.log import Log
from tidegate.spark.sink.columns import check_names
from tidegate.spark.sink.options import SinkOptions
from tidegate.spark.sink.outbox import Attempt, Outbox
from tidegate.spark.workers import freeze_once

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What one attempt wrote, and for whom."""

    sender: str
    attempt: Attempt


def check_sink(options: SinkOptions, schema: StructType, overwrite: bool) -> None:
    """Everything that can be refused before a task runs."""
    if overwrite:
        raise InvalidError("a topic is appended to and never overwritten; use .mode('append')")
    check_names(schema.fieldNames())
    options.partition_count()


class TopicWriter(DataSourceArrowWriter):
    """`df.write`: one batch, under the user's `writeId` or a name nobody has."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        check_sink(options, schema, overwrite)
        self._options = options
        self._sender = options.write_id or f"once-{uuid.uuid4()}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _written(self._options, self._sender, 0, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        from tidegate.spark.sink.appending import append_batch

        outbox = _outbox(self._options, self._sender)
        attempts = [message.attempt for message in _all(messages)]
        try:
            append_batch(self._options, outbox, 0, attempts, last=True)
        except TidegateError as error:
            error.add_note(self._way_out())
            raise
        if self._options.write_id is None and outbox.folder.is_dir():
            outbox.remove()

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing (W3): what was not appended waits in the outbox."""

    def _way_out(self) -> str:
        return (
            f"Some rows may be in the topic. To finish this write and add nothing twice, write again with "
            f".option('writeId', '{self._sender}'); to give it up, delete {_outbox(self._options, self._sender).folder}"
        )


class TopicStreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream`: micro-batches of a query, each in the topic once."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if options.write_id is not None:
            raise InvalidError("writeId is for df.write; a stream is known by its checkpointLocation")
        check_sink(options, schema, overwrite)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty(QUERY_ID)
        batch = None if context is None else context.getLocalProperty(BATCH_ID)
        if query is None or batch is None:
            raise UnavailableError("Spark does not say which query and batch this task belongs to")
        return _written(self._options, query, int(batch), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        from tidegate.spark.sink.appending import append_batch

        found = _all(messages)
        if found:
            outbox = _outbox(self._options, found[0].sender)
            append_batch(self._options, outbox, batchId, [message.attempt for message in found])

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing (W3)."""


def _written(options: SinkOptions, sender: str, batch: int, rows: Iterator[pa.RecordBatch]) -> Written:
    from tidegate.spark.sink.rows import RowShaper

    freeze_once()
    context = TaskContext.get()
    task = 0 if context is None else context.partitionId()
    count, largest = _limits(options)
    shaper = RowShaper(options.topic, count, task=task, largest_bytes=largest)
    unique = uuid.uuid4().hex
    attempt = _outbox(options, sender).write(
        batch, task, unique, shaper.shaped(rows), lambda: shaper.partitions
    )
    return Written(sender, attempt)


def _limits(options: SinkOptions) -> tuple[int, int | None]:
    """How many partitions the topic has, and how large a record may be."""
    with options.open() as log:
        if not isinstance(log, Log):
            return options.partition_count(), None
        described = log.describe(options.topic)
        return described.partitions, min(described.config.max_message_bytes, described.config.segment_bytes)


def _outbox(options: SinkOptions, sender: str) -> Outbox:
    return Outbox(options.outbox / options.topic / sender)


def _all(messages: Sequence[WriterCommitMessage | None]) -> list[Written]:
    return [message for message in messages if isinstance(message, Written)]
