"""The `tidegate` data source: topics of a log folder or a Kafka cluster as DataFrames and streams.

    spark.read.format("tidegate").option("log", "./data/log").option("topic", "orders").load()
    spark.readStream.format("tidegate").options(log=…, topic=…, maxRecordsPerTrigger=10_000).load()

Columns: topic, partition, offset, timestamp, key, value, headers, typed as in Spark's Kafka source, and verdict
where it is asked for. Options: see `options.py`. One Spark task reads one range of offsets of one partition
and yields Arrow batches; of a log folder no record becomes a Python object. Writing is `sink`'s.

What Spark's Python data source API asks for, and is easily missed:
S1  positions are compared as JSON text: one spelling (`ranges.to_json_object`).
S2  `stop()` may never be called and `commit()` lags a batch: nothing is held open between calls.
S3  Trigger.AvailableNow needs `SupportsTriggerAvailableNow`, or everything comes as one giant batch; and the
    end it was promised must be reached, so a limit always admits something.
S4  a yielded batch must equal the declared Arrow schema exactly, field names of inner lists included.
S5  the reader is pickled to the workers: it holds options, no handles.
S6  every process that Spark starts imports this module anew, so what only some need is imported when they need it.
S7  a timestamp that Spark cannot hold (beyond the year 294246) is null.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from tidegate.errors import OffsetOutOfRangeError
from tidegate.log.log import Log
from tidegate.spark.topics.extents import opened
from tidegate.spark.topics.options import SourceOptions
from tidegate.spark.topics.planning import Planner
from tidegate.spark.topics.ranges import (
    OffsetRange,
    Position,
    from_json_object,
    ids_of,
    split,
    to_json_object,
)
from tidegate.spark.workers import freeze_once

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from tidegate.spark.topics.verdicts import RangeJudge

COLUMNS = (
    "topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, key BINARY, value BINARY, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
)
VERDICT = ", verdict STRING"
READ_BYTES = 4 << 20
_LARGEST_MS = (2**63 - 1) // 1000


@dataclass(frozen=True)
class RangePartition(InputPartition):
    """One Spark task: a range of offsets of one partition."""

    range: OffsetRange


class TidegateDataSource(DataSource):
    """`format("tidegate")`."""

    @classmethod
    def name(cls) -> str:
        return "tidegate"

    def schema(self) -> str:
        return COLUMNS + (VERDICT if SourceOptions.parse(self.options).verdicts else "")

    def reader(self, schema: StructType) -> DataSourceReader:
        return TopicReader(SourceOptions.parse(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = SourceOptions.parse(self.options)
        options.check_streaming()
        return TopicStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from tidegate.spark.sink.options import SinkOptions
        from tidegate.spark.sink.writers import TopicWriter

        return TopicWriter(SinkOptions.parse(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from tidegate.spark.sink.options import SinkOptions
        from tidegate.spark.sink.writers import TopicStreamWriter

        return TopicStreamWriter(SinkOptions.parse(self.options), schema, overwrite)


class TopicReader(DataSourceReader):
    """A batch read: from one position to another, both fixed when Spark plans."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._planner = Planner(options)
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        options, planner = self._planner.options, self._planner
        end = planner.ending()
        start = planner.check_loss(planner.starting(), end)
        return [RangePartition(r) for r in split(start, end, options.min_partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, RangePartition):  # Spark makes one up where there is nothing to read
            yield from read_range(self._planner, partition.range, self._schema)


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read. Planning happens in one long-lived process, reading in the workers."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._planner = Planner(options)
        self._schema = schema
        self._target: Position | None = None

    def initialOffset(self) -> dict[str, Any]:
        return to_json_object(self._planner.starting(), self._planner.topic_ids())

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._planner.latest()

    def getDefaultReadLimit(self) -> ReadLimit:
        options = self._planner.options
        if options.max_records is not None:
            return ReadMaxRows(options.max_records)
        return ReadAllAvailable() if options.max_bytes is None else ReadMaxBytes(options.max_bytes)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        planner = self._planner
        topic_ids = planner.topic_ids()
        begun = planner.of_these_topics(from_json_object(start), ids_of(start), topic_ids)
        end = planner.latest() if self._target is None else dict(self._target)
        usable = planner.check_loss(begun, end)
        end = {place: max(last, usable.get(place, last)) for place, last in end.items()}
        usable = {place: usable.get(place, last) for place, last in end.items()}
        if isinstance(limit, ReadMaxRows):
            end = planner.admit_rows(usable, end, limit.max_rows)
        max_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else planner.options.max_bytes
        if max_bytes is not None and not isinstance(limit, ReadAllAvailable):
            end = planner.admit_bytes(usable, end, max_bytes)
        return to_json_object(end, topic_ids)

    def reportLatestOffset(self) -> dict[str, Any]:
        return to_json_object(self._planner.latest(), self._planner.topic_ids())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        finish = from_json_object(end)
        begun = self._planner.of_these_topics(
            from_json_object(start), ids_of(start), self._planner.topic_ids()
        )
        begin = self._planner.check_loss(begun, finish)
        finish = {place: last for place, last in finish.items() if place in begin}
        return [RangePartition(r) for r in split(begin, finish, self._planner.options.min_partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, RangePartition):
            yield from read_range(self._planner, partition.range, self._schema)


def read_range(planner: Planner, r: OffsetRange, declared: StructType) -> Iterator[pa.RecordBatch]:
    """The records of one range as Spark wants them; a loss while reading is reported as one."""
    freeze_once()
    options = planner.options
    schema = to_arrow_schema(declared, timezone="UTC")
    with opened(options) as log:
        settings = {"max_bytes": READ_BYTES} if isinstance(log, Log) else {}
        judge = _judge(log, r, options) if options.verdicts else None
        start = r.start if judge is None else judge.start
        while start < r.end:
            try:
                with log.reader(
                    r.topic,
                    partitions=[r.partition],
                    start={r.partition: start},
                    stop={r.partition: r.end},
                    isolation=options.isolation,
                    control_records=judge is not None or options.control_records,
                    **settings,
                ) as reader:
                    for batch in reader:
                        start = batch.column("offset")[-1].as_py() + 1
                        rows = batch
                        if judge is not None:
                            rows = judge.judged(batch, control_records=options.control_records)
                        if rows.num_rows:
                            yield to_spark(rows, schema)
                break
            except OffsetOutOfRangeError as error:
                if max(start, error.first) > r.start:
                    reason = "retention or deletion removed them while they were being read"
                    planner.report_loss((r.topic, r.partition), max(start, r.start), error.first, reason)
                start = max(error.first, start + 1)
        if judge is not None:
            judge.finish()


def _judge(log: Any, r: OffsetRange, options: SourceOptions) -> RangeJudge:
    from tidegate.spark.topics.verdicts import RangeJudge

    return RangeJudge(log, r, options)


def to_spark(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Records as the log gives them, in exactly the Arrow schema that Spark declared (S4, S7)."""
    columns = []
    for field in schema:
        column = batch.column(field.name)
        if field.name == "timestamp":
            column = _within_sparks_range(column)
        columns.append(column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _within_sparks_range(timestamps: pa.Array) -> pa.Array:
    newest = pc.max(timestamps.cast(pa.int64())).as_py()
    if newest is None or newest <= _LARGEST_MS:
        return timestamps
    holds = pc.less_equal(timestamps.cast(pa.int64()), _LARGEST_MS)
    return pc.if_else(holds, timestamps, pa.scalar(None, timestamps.type))
