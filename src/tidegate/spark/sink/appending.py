"""One batch of rows into a topic, numbered and check-summed, once: the driver's side of the Spark sink.

    plan (durable)  →  append what is not there yet  →  acknowledge  →  progress (durable)  →  delete files

A1  the bytes that go into the topic are a function of the plan: files, order, positions and time are in it.
A2  a batch at or below the recorded progress is in the topic: it is skipped.
A3  a batch with a plan and no progress was begun: what of it is in the topic is found by the sender's own numbers
    behind the recorded ends, and only the rest is appended. On a Kafka cluster a request of the dead process may
    still arrive after the look; what comes twice then has the same numbers, and validators call it a duplicate.
A4  nothing is acknowledged before the whole batch is appended; readers get a batch partition by partition.
A5  a topic that was deleted and made anew gets a new sender, because the head of the old one's chain is not in it;
    so does another kind of checksum, which no open chain could go on with.

A sender is one streaming query, or one batch write. Its GUID is made from a random incarnation, kept in its progress:
an outbox that was deleted begins as a new sender, and never repeats numbers for other rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa

from tidegate.clock import Clock, SystemClock
from tidegate.integrity.columns import IntegrityColumns, joined, read_columns
from tidegate.integrity.control_records import stable_guid
from tidegate.integrity.sender import CHECKSUMS, ChainLimits, Chains, ChainState, Outlet, outlet_of
from tidegate.kernels.integrity import MANAGED
from tidegate.log.format.records import RecordColumns, coerce
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import Log
from tidegate.log.writer import Partitioner
from tidegate.randomness import Randomness, SystemRandomness
from tidegate.spark.sink.options import SinkOptions
from tidegate.spark.sink.outbox import Attempt, Outbox, Plan, Progress
from tidegate.waiting import waiting

GATHER_ROWS: Final = 1 << 16
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
    """Bring a batch into the topic, unless it is there; how many rows it has. `last` ends the sender's chains."""
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
    """The plan that counts for the batch, and whether it was begun before."""
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
    """The partitions of one topic while one plan is carried out."""

    def __init__(self, log: Log | KafkaLog, options: SinkOptions, plan: Plan, clock: Clock) -> None:
        self._log, self._topic, self._plan = log, options.topic, plan
        self._checksum = CHECKSUMS[plan.checksum]
        self._states = {number: ChainState.from_bytes(raw) for number, raw in plan.positions.items()}
        self._there: dict[int, tuple[int, int]] = {}
        self._touched: set[int] = set()
        self.partitions = sorted({number for each in plan.files for number in each.partitions})
        if isinstance(log, Log):
            for number in self.partitions:  # also brings an interrupted append into sight
                waiting(clock, options.lock_timeout_ms, partial(log.open_partition, self._topic, number))
        settings: dict[str, Any] = {} if options.compression is None else {"compression": options.compression}
        self._writer = log.writer(self._topic, **settings)
        self._outlet: Outlet = outlet_of(self._writer)
        self._count = (
            len(log.describe(self._topic).partition_numbers) if isinstance(log, Log) else len(plan.ends)
        )

    def progress(self) -> Progress:
        """Where the sender stands after the batch; whoever got rows has at least one more offset than before."""
        plan = self._plan
        positions = {number: state.to_bytes() for number, state in self._states.items()}
        ends = {number: end + (number in self.partitions) for number, end in plan.ends.items()}
        return Progress(plan.batch, plan.incarnation, positions, ends, plan.topic_id, plan.checksum)

    def find_what_is_there(self) -> None:
        """The last numbers of this sender behind the recorded ends (A3)."""
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
            for table in _gathered(outbox.read(attempt)):
                columns = coerce(table)
                explicit = table.column("partition").combine_chunks()
                for number, part in partitioner.split(columns, explicit):
                    planned = self._chains(number).data(self._state(number), part, self._plan.now_ms)
                    self._store(number, planned.pieces)
                    self._states[number] = planned.after
                rows += len(columns)
        if last:
            for number in self.partitions:
                planned = self._chains(number).end(self._state(number), self._plan.now_ms)
                self._store(number, planned.pieces)
                self._states[number] = planned.after
        self._outlet.acknowledge(sorted(self._touched))  # A4
        self._writer.close()
        return rows

    # -- inside ----------------------------------------------------------------------------------

    def _chains(self, number: int) -> Chains:
        guid = stable_guid(self._plan.incarnation, self._topic, number)
        return Chains(guid, 0, self._checksum, ChainLimits())

    def _state(self, number: int) -> ChainState:
        return self._states.get(number, ChainState())

    def _store(self, number: int, pieces: Iterable[RecordColumns]) -> None:
        missing = [piece for each in pieces if len(piece := self._missing(number, each))]
        if missing:
            self._touched.add(number)
            self._outlet.prepare(compact(missing), number).append()

    def _missing(self, number: int, piece: RecordColumns) -> RecordColumns:
        """The records of a piece that are not in the topic yet; numbers ascend, so they are its end."""
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


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Small batches together, so that the log's are not small."""
    waiting_batches: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        waiting_batches.append(batch)
        rows += batch.num_rows
        if rows >= GATHER_ROWS:
            yield pa.Table.from_batches(waiting_batches)
            waiting_batches, rows = [], 0
    if waiting_batches:
        yield pa.Table.from_batches(waiting_batches)


def compact(pieces: list[RecordColumns]) -> list[RecordColumns]:
    """A control record and a few rows as one batch; large pieces as they lie."""
    size = sum(int(piece.key.nbytes + piece.value.nbytes) for piece in pieces)
    return pieces if len(pieces) == 1 or size > JOINED_BYTES else [joined(pieces)]
