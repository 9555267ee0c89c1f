"""The `tidegate` data source: topics of a log folder or a Kafka cluster as DataFrames and streams.

    spark.read.format("tidegate").option("log", "./data/log").option("topic", "orders").load()

Columns: topic, partition, offset, timestamp, key, value, headers, typed as in Spark's Kafka source, and verdict on
request. One Spark task reads one range of offsets of one partition and yields Arrow batches.

The column `verdict` is the result of integrity validation. It depends on all records before, so a task validates its
partition from the beginning, or from the nearest state in a folder (`verdictState`), a cache that may be deleted:

    <folder>/<log, hashed>/<topic>/<its id>/<isolation>/<partition>-<offset, 20 digits>.state   before this offset

Faults do not stop the query: rows have `missing`, `corrupt`, … The rules are those of `tidegate verify`.

S1  positions are compared as JSON text: one spelling (`offset_ranges.to_json_object`).
S2  `stop()` may never be called and `commit()` lags a batch: nothing is held open between calls.
S3  Trigger.AvailableNow needs `SupportsTriggerAvailableNow`, or everything comes as one giant batch; and the end it
    was promised must be reached, so a limit always admits something.
S4  a yielded batch must equal the declared Arrow schema exactly, field names of inner lists included.
S5  the reader is pickled to the workers: it holds options, no handles. Each of them imports this module anew.
S7  a timestamp that Spark cannot represent (beyond the year 294246) is null.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
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
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from tidegate.clock import SystemClock
from tidegate.errors import CorruptError, OffsetOutOfRangeError
from tidegate.files import Files
from tidegate.integrity.state import PartitionState, decode_state, encode_state
from tidegate.integrity.validator import OnError, PartitionValidator, ValidationRules
from tidegate.integrity.verdicts import Note, Verdict, tolerance_of
from tidegate.log.catalog import TopicDescription
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import Log
from tidegate.spark.compat import to_arrow_schema
from tidegate.spark.offset_ranges import (
    OffsetRange,
    Planner,
    Position,
    from_json_object,
    ids_of,
    opened,
    split,
    to_json_object,
)
from tidegate.spark.options import SourceOptions
from tidegate.spark.workers import freeze_once

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


# -- verdicts -------------------------------------------------------------------------------------

KEPT_STATES: Final = 4
_SUFFIX: Final = ".state"
_MOST_BYTES: Final = 1 << 30
_LABELS: Final = pa.array([verdict.label for verdict in Verdict])


class RangeJudge:
    """Validates the records of one range, and those before it."""

    def __init__(self, log: Log | KafkaLog, r: OffsetRange, options: SourceOptions) -> None:
        description = log.describe(r.topic)
        with log.reader(r.topic, [r.partition], start="earliest") as reader:
            log_start = reader.positions()[r.partition]
        self._range = r
        self._states = None if options.verdict_state is None else _States(options, description, r.partition)
        state, self.start = (None, log_start)
        if self._states is not None:
            found = self._states.nearest(r.start)
            if found is not None and found[1] >= log_start:
                state, self.start = found
        rules = ValidationRules(
            during_push=OnError.KEEP,
            otherwise=OnError.KEEP,
            tolerance=tolerance_of(log, r.topic, r.partition),
            head_may_be_gone=log_start > 0,
        )
        self._now_ms = SystemClock().now_ms()
        self._validator = PartitionValidator(r.topic, r.partition, rules=rules, state=state)

    def judged(self, batch: pa.RecordBatch, *, control_records: bool) -> pa.RecordBatch:
        """Return the rows of a batch that lie in the range, with their verdicts.

        Control records are left out unless requested; one with a fault always stays.
        """
        found = self._validator.validate(batch, self._now_ms)
        # A damaged record after a gap is `corrupt`: a filter on the column must not count it as intact.
        verdicts = np.where(found.notes & Note.DAMAGED, np.uint8(Verdict.CORRUPT), found.verdicts)
        labels = pa.DictionaryArray.from_arrays(pa.array(verdicts.astype(np.int32)), _LABELS)
        rows = batch.append_column("verdict", labels.cast(pa.string()))
        keep = batch.column("offset").to_numpy() >= self._range.start
        if not control_records:
            keep &= ~found.columns.is_control | found.is_fatal
        return rows if keep.all() else rows.filter(pa.array(keep))

    def finish(self) -> None:
        """Store the state at the end of the range for the next one."""
        if self._states is not None:
            self._states.save(self._validator.state, self._range.end)


class _States:
    """The stored states of one partition."""

    def __init__(self, options: SourceOptions, description: TopicDescription, partition: int) -> None:
        log = hashlib.sha256(options.log.encode()).hexdigest()[:16]
        topic = Path(log, description.name, description.topic_id or "unknown", options.isolation)
        self._folder = (options.verdict_state or Path()) / topic
        self._prefix = f"{partition}-"
        self._files = Files()

    def nearest(self, offset: int) -> tuple[PartitionState, int] | None:
        """Return the last state at or before an offset."""
        for at in sorted(self._known(), reverse=True):
            if at <= offset:
                try:
                    return decode_state(self._files.read(self._path(at), limit=_MOST_BYTES)), at
                except (CorruptError, FileNotFoundError):
                    continue  # only a cache: an older state, or the log's beginning, works as well
        return None

    def save(self, state: PartitionState, offset: int) -> None:
        self._files.mkdir(self._folder)
        self._files.publish(self._path(offset), encode_state(state), sync=False)
        for old in sorted(self._known())[:-KEPT_STATES]:
            self._files.unlink(self._path(old), missing_ok=True)

    def _known(self) -> list[int]:
        if not self._files.exists(self._folder):
            return []
        names = [
            name.removeprefix(self._prefix).removesuffix(_SUFFIX)
            for name in self._files.list(self._folder)
            if name.startswith(self._prefix) and name.endswith(_SUFFIX)
        ]
        return [int(name) for name in names if name.isdecimal()]

    def _path(self, offset: int) -> Path:
        return self._folder / f"{self._prefix}{offset:020d}{_SUFFIX}"


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
        from tidegate.spark.options import SinkOptions
        from tidegate.spark.topic_sink import TopicWriter

        return TopicWriter(SinkOptions.parse(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from tidegate.spark.options import SinkOptions
        from tidegate.spark.topic_sink import TopicStreamWriter

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
        if isinstance(partition, RangePartition):  # Spark creates one itself where there is nothing to read
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
    """Yield the records of one range in Spark's schema; records lost while reading are reported as a loss."""
    freeze_once()
    options = planner.options
    schema = to_arrow_schema(declared, timezone="UTC")
    with opened(options) as log:
        settings = {"max_bytes": READ_BYTES} if isinstance(log, Log) else {}
        judge = RangeJudge(log, r, options) if options.verdicts else None
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


def to_spark(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the log's records in exactly the Arrow schema that Spark declared (S4, S7)."""
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
