"""`df.write` and `df.writeStream` of `format("tidegate")`: append rows to a topic, with numbering and checksums, once.

Each task checks its rows, chooses their partitions and writes them into a file in an outbox; when all are done, the
driver appends the files of the attempts that counted, in order. What the topic would refuse is refused in the task.

    <outbox>/<topic>/<sender>/          sender: a streaming query's id, or a batch write's
        <batch>-<task>-<unique>.arrow   one attempt's rows: an Arrow stream, synced before the task reports it
        plan-<batch>                    which files make the batch and how they are numbered; made once
        progress                        the last batch that is in the topic, and the numbering after it
        lock                            held while a batch is appended

Plan and progress are one line of JSON and one line `crc32c:<8 hex digits>` over it. The driver adds a batch:

    plan (durable)  →  append what is not there yet  →  acknowledge  →  progress (durable)  →  delete files

A1  the bytes in the topic are a function of the plan (files, order, positions, time), which is made once (B2).
A2  a batch at or below the recorded progress is in the topic: it is skipped, and its files are deleted (B3).
A3  a batch with a plan and no progress was begun: its records are found by the sender's own numbers behind the
    recorded ends, and only the rest is appended. On a cluster a request of the dead process may still arrive after
    that check; validators report the repeated numbers as duplicates.
A4  nothing is acknowledged before the whole batch is appended; readers get a batch partition by partition.
A5  a topic that was made anew, or another kind of checksum, gets a new sender. A sender's GUID is made from a random
    incarnation in its progress, so a deleted outbox never repeats numbers for other rows.
W1  a failed or speculative attempt runs `write` again, and only the winner's message reaches `commit`.
W2  `commit` runs in a process that knows the batch and not the query, so messages carry the query's id.
W3  a `commit` that raises is followed by `abort`, and the batch comes again: abort deletes nothing.

Thread rule: one holder of a sender's lock at a time.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from fastcrc.crc32 import iscsi as crc32c
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from tidegate.clock import Clock, SystemClock
from tidegate.errors import CorruptError, InvalidError, TidegateError, UnavailableError
from tidegate.files import File, Files
from tidegate.integrity.columns import IntegrityColumns, joined, read_columns
from tidegate.integrity.control_records import stable_guid
from tidegate.integrity.header import CONTROL_KEY_PREFIX
from tidegate.integrity.sender import CHECKSUMS, ChainLimits, Chains, ChainState, Outlet, Planned, outlet_of
from tidegate.kernels.integrity import MANAGED
from tidegate.log.format.records import HEADERS_TYPE, RecordColumns, coerce
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import Log
from tidegate.log.writer import Partitioner
from tidegate.randomness import Randomness, SystemRandomness
from tidegate.spark.options import SinkOptions
from tidegate.spark.workers import freeze_once
from tidegate.waiting import waiting

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


COLUMNS: Final = ("key", "value", "headers", "timestamp", "partition")
_TAKEN = {
    "key": "binary or string",
    "value": "binary or string",
    "headers": "array of struct (key string, value binary)",
    "timestamp": "timestamp",
    "partition": "int",
}


def check_names(names: Sequence[str]) -> None:
    """Check that the columns of a DataFrame are those of a record."""
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        hint = f"; leave them out: .drop({', '.join(map(repr, unknown))})"
        known = ", ".join(f"{name} ({kind})" for name, kind in _TAKEN.items())
        raise InvalidError(f"columns {', '.join(unknown)} are no part of a record, which has {known}{hint}")
    if "value" not in names:
        raise InvalidError("column value is missing: binary or string, null for a deletion")


# -- rows -----------------------------------------------------------------------------------------

ROWS_SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("timestamp", pa.int64()),
        ("headers", HEADERS_TYPE),
        ("partition", pa.int32()),
    ]
)
_OVERHEAD_BYTES: Final = 256
"""Of a batch with one record: the batch's header, the record's own fields, Tidegate's header."""


class RowShaper:
    """Turns the batches of one task into rows of `ROWS_SCHEMA`; rows without a key are distributed round-robin,
    beginning at the task's own number."""

    def __init__(self, topic: str, partitions: int, *, task: int, largest_bytes: int | None) -> None:
        self._topic = topic
        self._partitioner = Partitioner(topic, partitions, first=task)
        self._largest = largest_bytes
        self.partitions: set[int] = set()

    def shaped(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield self._one(batch)

    def _one(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = coerce(batch)
        self._check(columns.key, columns.value, columns.headers)
        index = batch.schema.get_field_index("partition")
        chosen = self._partitioner.choose(columns, None if index < 0 else batch.column(index))
        self.partitions.update(set(chosen.tolist()))
        headers = pa.nulls(len(columns), HEADERS_TYPE) if columns.headers is None else columns.headers
        arrays = [columns.key, columns.value, columns.timestamp, headers.cast(HEADERS_TYPE), pa.array(chosen)]
        return pa.RecordBatch.from_arrays(arrays, schema=ROWS_SCHEMA)

    def _check(self, key: pa.Array, value: pa.Array, headers: pa.Array | None) -> None:
        reserved = pc.starts_with(key, CONTROL_KEY_PREFIX)
        if pc.any(reserved).as_py():
            raise InvalidError(
                f"a key begins with {CONTROL_KEY_PREFIX!r}, which is reserved for Tidegate's own control records; "
                "leave them out when you copy a topic (the tidegate source does, unless controlRecords is true)"
            )
        if self._largest is None:
            return
        sizes = pc.add(pc.fill_null(pc.binary_length(key), 0), pc.fill_null(pc.binary_length(value), 0))
        largest = (
            pc.max(sizes).as_py() + _OVERHEAD_BYTES + (0 if headers is None else _largest_headers(headers))
        )
        if largest > self._largest:
            raise InvalidError(
                f"a record of about {largest} bytes is above the {self._largest} that max.message.bytes and "
                f"segment.bytes of topic {self._topic} allow; make the record smaller or raise the setting",
                kafka_name="MESSAGE_TOO_LARGE",
            )


def _largest_headers(headers: pa.Array) -> int:
    """An upper bound for the headers of one row: the longest entry times the length of the longest list."""
    entries = headers.flatten()
    if len(entries) == 0:
        return 0
    keys, values = entries.field("key"), pc.fill_null(pc.binary_length(entries.field("value")), 0)
    entry = pc.max(pc.add(pc.binary_length(keys), values)).as_py() + 8
    return int(entry * (pc.max(pc.list_value_length(headers)).as_py() or 0))


# -- outbox ---------------------------------------------------------------------------------------

VERSION: Final = 1
BUFFER_BYTES: Final = 1 << 20
_MOST_BYTES: Final = 64 << 20
_ARROW: Final = ".arrow"

Record = TypeVar("Record", "Plan", "Progress")


class Attempt(msgspec.Struct, frozen=True):
    """The file of one task attempt; `name` is empty if it had no rows."""

    task: int
    name: str
    rows: int
    size: int
    crc: int
    partitions: tuple[int, ...]


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A planned batch: its files, in this order, from these positions on."""

    batch: int
    now_ms: int
    incarnation: str
    files: tuple[Attempt, ...]
    positions: dict[int, bytes]
    """Where the sender stood before the batch, by partition of the topic."""
    ends: dict[int, int]
    """Where the partitions ended before it: what is in the topic already lies behind."""
    topic_id: str
    checksum: str
    version: int = VERSION


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The position of a sender."""

    batch: int
    incarnation: str
    positions: dict[int, bytes]
    ends: dict[int, int]
    """What the partitions reached at least: a topic that ends before was made anew."""
    topic_id: str
    checksum: str
    version: int = VERSION


class Outbox:
    """The folder of one sender."""

    def __init__(self, folder: Path, *, files: Files | None = None) -> None:
        self.folder = folder
        self.files = files or Files()

    # -- a task's side ---------------------------------------------------------------------------

    def write(
        self,
        batch: int,
        task: int,
        unique: str,
        rows: Iterator[pa.RecordBatch],
        partitions: Callable[[], set[int]],
    ) -> Attempt:
        """Store one attempt's rows durably; `partitions` is called at the end to choose their partitions."""
        first = next(rows, None)
        if first is None:
            return Attempt(task, "", 0, 0, 0, ())
        self.files.mkdir(self.folder)
        path = self.folder / f"{batch}-{task}-{unique}{_ARROW}"
        count = 0
        with self.files.open(path, new=True) as file:
            sink = _Sink(file)
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            with pa.BufferedOutputStream(pa.PythonFile(sink, "w"), BUFFER_BYTES) as buffered:
                with pa.ipc.new_stream(buffered, first.schema, options=options) as stream:
                    for each in chain([first], rows):
                        stream.write_batch(each)
                        count += each.num_rows
                buffered.flush()
            file.sync()
        self.files.sync_folder(self.folder)
        return Attempt(task, path.name, count, sink.size, sink.crc, tuple(sorted(partitions())))

    # -- the driver's side -----------------------------------------------------------------------

    @contextmanager
    def locked(self, clock: Clock, timeout_ms: int) -> Iterator[None]:
        """Hold the lock of this sender, under which batches are appended."""
        self.files.mkdir(self.folder)
        lock = waiting(clock, timeout_ms, lambda: self.files.lock(self.folder / "lock"))
        try:
            yield
        finally:
            lock.release()

    def read(self, attempt: Attempt) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one attempt, after all of its bytes were checked."""
        path = self.folder / attempt.name
        try:
            content = self.files.map(path)
        except FileNotFoundError:
            raise CorruptError(
                f"{path} is gone: rows of an unfinished write wait there until they are in the topic; restore it",
                path=path,
            ) from None
        if content.size != attempt.size or _crc_of(content) != attempt.crc:
            raise CorruptError(f"{path} is not as its task wrote it ({content.size} bytes)", path=path)
        try:
            with pa.ipc.open_stream(content) as stream:
                for batch in stream:
                    batch.validate(full=True)
                    yield batch
        except (pa.ArrowException, OSError) as error:
            raise CorruptError(f"{path} holds no rows that can be read: {error}", path=path) from error

    def plan(self, batch: int) -> Plan | None:
        return self._load(f"plan-{batch}", Plan)

    def progress(self) -> Progress | None:
        return self._load("progress", Progress)

    def decide(self, plan: Plan) -> None:
        """Store a plan and return the plan that counts (B2)."""
        self.files.publish_new(self.folder / f"plan-{plan.batch}", _sealed(plan))

    def replace(self, plan: Plan) -> None:
        """Store another plan for a batch that cannot have records in the topic."""
        self.files.publish(self.folder / f"plan-{plan.batch}", _sealed(plan))

    def advance(self, progress: Progress) -> None:
        self.files.publish(self.folder / "progress", _sealed(progress))

    def clear(self, batch: int) -> None:
        """Delete the files of batches up to this one, including those of other attempts (B3)."""
        for name in self.files.list(self.folder):
            number = name.removeprefix("plan-").split("-")[0]
            if number.isdecimal() and int(number) <= batch:
                self.files.unlink(self.folder / name, missing_ok=True)

    def remove(self) -> None:
        """Delete the folder of a sender that is finished."""
        for name in self.files.list(self.folder):
            self.files.unlink(self.folder / name, missing_ok=True)
        self.files.rmdir(self.folder)

    def _load(self, name: str, kind: type[Record]) -> Record | None:
        path = self.folder / name
        if not self.files.exists(path):
            return None
        data = self.files.read(path, limit=_MOST_BYTES)
        line, _, trailer = data.partition(b"\n")
        if trailer != b"crc32c:%08x\n" % crc32c(line):
            raise CorruptError(
                f"{path} is damaged: its checksum does not match; restore it from a copy", path=path
            )
        try:
            found = msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise CorruptError(
                f"{path} cannot be read ({error}); restore it from a copy", path=path
            ) from None
        if found.version != VERSION:
            raise CorruptError(f"{path} was written by another release (version {found.version})", path=path)
        return found


class _Sink(io.RawIOBase):
    """A file that Arrow can write to, and its checksum."""

    def __init__(self, file: File) -> None:
        self._file = file
        self.size = 0
        self.crc = 0

    def write(self, data: Any) -> int:
        content = bytes(data)
        self._file.write_at(self.size, content)
        self.crc = crc32c(content, self.crc)
        self.size += len(content)
        return len(content)

    def writable(self) -> bool:
        return True


def _crc_of(content: pa.Buffer) -> int:
    crc, step = 0, 4 << 20
    for start in range(0, content.size, step):
        crc = crc32c(content[start : start + step].to_pybytes(), crc)
    return crc


def _sealed(record: Plan | Progress) -> bytes:
    line = msgspec.json.encode(record)
    return line + b"\ncrc32c:%08x\n" % crc32c(line)


# -- appending ------------------------------------------------------------------------------------

GATHER_ROWS: Final = 1 << 16
GATHER_BYTES: Final = 32 << 20
JOINED_BYTES: Final = 1 << 20


def append_batch(
    options: SinkOptions,
    outbox: Outbox,
    batch: int,
    attempts: Sequence[Attempt],
    *,
    last: bool = False,
    clock: Clock | None = None,
    randomness: Randomness | None = None,
) -> int:
    """Append a batch to the topic, unless it is there; return its number of rows. `last` ends the sender's chains."""
    clock = clock or SystemClock()
    if not any(attempt.rows for attempt in attempts):
        return 0
    with outbox.locked(clock, options.lock_timeout_ms):
        progress = outbox.progress()
        if progress is not None and batch <= progress.batch:  # A2
            outbox.clear(batch)
            return 0
        with options.open(outbox.files) as log:
            plan, begun = _decided(log, options, outbox, batch, attempts, progress, clock, randomness)
            appender = _Appender(log, options, plan, clock)
            if begun:
                appender.find_what_is_there()
            rows = appender.append(outbox, last=last)
        outbox.advance(appender.progress())
        outbox.clear(batch)
    return rows


def _decided(
    log: Log | KafkaLog,
    options: SinkOptions,
    outbox: Outbox,
    batch: int,
    attempts: Sequence[Attempt],
    progress: Progress | None,
    clock: Clock,
    randomness: Randomness | None,
) -> tuple[Plan, bool]:
    """Return the plan of the batch, and whether it was begun before."""
    with log.reader(options.topic, start="latest") as reader:
        ends = reader.end_offsets()
    topic_id = (log.describe(options.topic).topic_id or "") if isinstance(log, Log) else ""
    known = outbox.plan(batch)
    if known is not None and _is_same_topic(known, topic_id, ends):
        return known, True
    if progress is not None and not (
        _is_same_topic(progress, topic_id, ends) and progress.checksum == options.checksum
    ):
        progress = None  # A5
    files = attempts if known is None else known.files
    chance = randomness or SystemRandomness()
    plan = Plan(
        batch,
        clock.now_ms(),
        str(chance.uuid()) if progress is None else progress.incarnation,
        tuple(sorted((each for each in files if each.rows), key=lambda each: each.task)),
        {} if progress is None else progress.positions,
        ends,
        topic_id,
        options.checksum,
    )
    if known is None:
        outbox.decide(plan)
    else:
        outbox.replace(plan)
    return plan, False


def _is_same_topic(seen: Plan | Progress, topic_id: str, ends: Mapping[int, int]) -> bool:
    reached = all(ends.get(number, 0) >= end for number, end in seen.ends.items())
    return reached and seen.topic_id == topic_id


class _Appender:
    """The partitions of one topic while one plan is executed."""

    def __init__(self, log: Log | KafkaLog, options: SinkOptions, plan: Plan, clock: Clock) -> None:
        self._log, self._topic, self._plan = log, options.topic, plan
        self._checksum = CHECKSUMS[plan.checksum]
        self._states = {number: ChainState.from_bytes(raw) for number, raw in plan.positions.items()}
        self._there: dict[int, tuple[int, int]] = {}
        self._touched: set[int] = set()
        self.partitions = sorted({number for each in plan.files for number in each.partitions})
        if isinstance(log, Log):
            for number in self.partitions:  # also makes records of an interrupted append visible
                waiting(clock, options.lock_timeout_ms, partial(log.open_partition, self._topic, number))
        settings: dict[str, Any] = {} if options.compression is None else {"compression": options.compression}
        self._writer = log.writer(self._topic, **settings)
        self._outlet: Outlet = outlet_of(self._writer)
        self._count = (
            len(log.describe(self._topic).partition_numbers) if isinstance(log, Log) else len(plan.ends)
        )

    def progress(self) -> Progress:
        """Return the sender's progress after the batch; each partition that got rows has at least one more offset."""
        plan = self._plan
        positions = {number: state.to_bytes() for number, state in self._states.items()}
        ends = {number: end + (number in self.partitions) for number, end in plan.ends.items()}
        return Progress(plan.batch, plan.incarnation, positions, ends, plan.topic_id, plan.checksum)

    def find_what_is_there(self) -> None:
        """Find the last numbers of this sender after the recorded ends (A3)."""
        for number in self.partitions:
            guid = np.frombuffer(self._chains(number).guid, ">u8")
            start = self._plan.ends.get(number, 0)
            for batch in self._from(number, start):
                columns = read_columns(batch.column("headers"))
                ours = (
                    (columns.state == MANAGED)
                    & (columns.guid_high == guid[0])
                    & (columns.guid_low == guid[1])
                )
                if ours.any():
                    row = int(np.flatnonzero(ours)[-1])
                    self._there[number] = (int(columns.chain[row]), int(columns.sequence[row]))

    def append(self, outbox: Outbox, *, last: bool) -> int:
        rows = 0
        partitioner = Partitioner(self._topic, self._count)
        for attempt in self._plan.files:
            for table in gathered(outbox.read(attempt)):
                columns = coerce(table)
                explicit = table.column("partition").combine_chunks()
                for number, part in partitioner.split(columns, explicit):
                    planned = self._chains(number).data(self._state(number), part, self._plan.now_ms)
                    self._store(number, planned)
                rows += len(columns)
        if last:
            for number in self.partitions:
                self._store(number, self._chains(number).end(self._state(number), self._plan.now_ms))
        self._outlet.acknowledge(sorted(self._touched))  # A4
        self._writer.close()
        return rows

    def _chains(self, number: int) -> Chains:
        guid = stable_guid(self._plan.incarnation, self._topic, number)
        return Chains(guid, 0, self._checksum, ChainLimits())

    def _state(self, number: int) -> ChainState:
        return self._states.get(number, ChainState())

    def _store(self, number: int, planned: Planned) -> None:
        self._states[number] = planned.after
        missing = [piece for each in planned.pieces if len(piece := self._missing(number, each))]
        if missing:
            self._touched.add(number)
            self._outlet.prepare(compact(missing), number).append()

    def _missing(self, number: int, piece: RecordColumns) -> RecordColumns:
        """Return the records of a piece that are not in the topic yet; numbers ascend, so they are its end."""
        there = self._there.get(number)
        if there is None:
            return piece
        columns: IntegrityColumns = read_columns(piece.headers)
        chain, sequence = there
        later = (columns.chain > chain) | ((columns.chain == chain) & (columns.sequence > sequence))
        return piece.slice(len(piece) - int(later.sum()))

    def _from(self, number: int, start: int) -> Iterator[pa.RecordBatch]:
        with self._log.reader(self._topic, [number], start="earliest", control_records=True) as reader:
            reader.seek(number, max(start, reader.positions()[number]))
            yield from reader


def gathered(batches: Iterable[pa.RecordBatch], gather_rows: int = GATHER_ROWS) -> Iterator[pa.Table]:
    """Concatenate small batches, so that the log's batches are not small; each column in one chunk."""
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


def compact(pieces: list[RecordColumns]) -> list[RecordColumns]:
    """Join a control record and a few rows into one batch; large pieces stay as they are."""
    size = sum(int(piece.key.nbytes + piece.value.nbytes) for piece in pieces)
    return pieces if len(pieces) == 1 or size > JOINED_BYTES else [joined(pieces)]


# -- writers --------------------------------------------------------------------------------------

QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """The result of one attempt, with the id of its query."""

    sender: str
    attempt: Attempt


def check_sink(options: SinkOptions, schema: StructType, overwrite: bool) -> None:
    """Refuse invalid options before a task runs."""
    if overwrite:
        raise InvalidError("a topic is appended to and never overwritten; use .mode('append')")
    check_names(schema.fieldNames())
    options.partition_count()


class TopicWriter(DataSourceArrowWriter):
    """`df.write`: one batch, under the user's `writeId` or a unique name."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        check_sink(options, schema, overwrite)
        self._options = options
        self._sender = options.write_id or f"once-{uuid.uuid4()}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _written(self._options, self._sender, 0, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
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
        """Do nothing (W3): rows that were not appended wait in the outbox."""

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
        found = _all(messages)
        if found:
            outbox = _outbox(self._options, found[0].sender)
            append_batch(self._options, outbox, batchId, [message.attempt for message in found])

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing (W3)."""


def _written(options: SinkOptions, sender: str, batch: int, rows: Iterator[pa.RecordBatch]) -> Written:
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
    """Return the topic's number of partitions, and the largest record it accepts."""
    with options.open() as log:
        if not isinstance(log, Log):
            return options.partition_count(), None
        described = log.describe(options.topic)
        return described.partitions, min(described.config.max_message_bytes, described.config.segment_bytes)


def _outbox(options: SinkOptions, sender: str) -> Outbox:
    return Outbox(options.outbox / options.topic / sender)


def _all(messages: Sequence[WriterCommitMessage | None]) -> list[Written]:
    return [message for message in messages if isinstance(message, Written)]
