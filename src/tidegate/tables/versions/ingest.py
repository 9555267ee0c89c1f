"""Ingest one partition of a version topic into a partition of a version: validate, store, commit, or fail.

Each partition is a stored table of its own, with a lease and commits (`TableVersion.shape`).

I1  judged by the rules of a push from the first record on: a fatal verdict before the end of push stops the partition.
I2  a partition that failed is never committed again, and its last commit says an offset before the fault.
I3  a partition is complete when its end of push came, and all that its manifest lists, and no record more.
I4  after a crash, an ingest continues from the last commit with the same result: the counts are part of it.
I5  records after the end of push are counted and not stored: a version holds its push and nothing else.
I6  a repeat that is left out has its first copy in the topic, also where that is compacted; or the partition fails.

Thread rule: one thread for each partition; partitions share nothing but the log and the backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from tidegate.clock import Clock, SystemClock
from tidegate.errors import ConflictError, CorruptError, IntegrityError
from tidegate.integrity import Replica, ValidationRules
from tidegate.integrity.columns import control_payload, read_columns
from tidegate.integrity.header import ControlType
from tidegate.integrity.replica import CheckpointCadence
from tidegate.integrity.state import Manifest, Phase, encode_state
from tidegate.integrity.validator import Judged, OnError
from tidegate.integrity.verdicts import Finding, Note, Verdict, tolerance_of
from tidegate.log.log import Log
from tidegate.metrics import Metrics
from tidegate.randomness import Randomness, SystemRandomness
from tidegate.scheduling import NoScheduler
from tidegate.storage import StorageConfig, WorkerStorageRuntime
from tidegate.tables.commits import DEFAULT_TTL_MS, Commits, Lease, lease_name, next_epoch
from tidegate.tables.ingest.consumer import TopicWatch
from tidegate.tables.ingest.decode import count_put, take_records, warn_about
from tidegate.tables.ingest.materializer import kept_checkpoints
from tidegate.tables.options import Consumed, TableRules
from tidegate.tables.serdes.base import Bytes
from tidegate.tables.snapshot import TableSource, attach, kept_open, task_of
from tidegate.tables.versions.catalog import (
    COMPACTED,
    UNLISTED,
    Fault,
    PartitionResult,
    TableVersion,
    fault_of,
    lone_repeat,
)

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend

READ_BYTES: Final = 16 << 20
APPEND_BYTES: Final = 48 << 20
"""Rows that become runs together: fewer, larger runs are quicker to read."""

_STORAGE: Final = StorageConfig(max_tasks=1, retained_checkpoints=kept_checkpoints())


@dataclass(frozen=True, slots=True)
class Ingested:
    """The outcome of one partition: its result, and the fault that stopped it, if any."""

    result: PartitionResult
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class IngestSettings:
    """The settings of an ingest; the same for all partitions."""

    commit_bytes: int = 256 << 20
    lease_ttl_ms: int = DEFAULT_TTL_MS
    storage: StorageConfig = _STORAGE


def ingest_partition(
    log: Any,
    backend: StorageBackend,
    version: TableVersion,
    partition: int,
    *,
    settings: IngestSettings | None = None,
    clock: Clock | None = None,
    randomness: Randomness | None = None,
    metrics: Metrics | None = None,
    told: Callable[[int], None] | None = None,
) -> Ingested:
    """Build one partition of a version from its topic; `told` receives the number of records as they are read.

    Faults of the data are returned (`Ingested.fault`); errors of the machine are raised.
    """
    clock, chosen = clock or SystemClock(), settings or IngestSettings()
    shape = version.shape(partition)
    lease = Lease(
        backend,
        lease_name(shape.name),
        clock=clock,
        randomness=randomness or SystemRandomness(),
        ttl_ms=chosen.lease_ttl_ms,
    )
    held = lease.acquire(at_least=next_epoch(backend, shape.name))
    if held is not None:
        raise ConflictError(
            f"partition {partition} of {version.name} is built by process {held.pid} on {held.host}; wait for it, or "
            "stop it first"
        )
    try:
        rules = TableRules(shape, Bytes(), Bytes(), Consumed(), "fail")
        commits = Commits(backend, shape, lease.epoch, TopicWatch(log, shape).topic_id)
        known = commits.take_over()
        runtime = WorkerStorageRuntime.open(
            chosen.storage, kept_open(backend), clock=clock, randomness=randomness, scheduler=NoScheduler()
        )
        runtime.backlog.expect_jobs(
            1, 1
        )  # one thread appends and prunes: while it waits, no other makes room
        try:
            if known:
                runtime.apply_checkpoint(task_of(shape), known[-1].token)
            source = attach(runtime, rules)
            work = _Ingest(log, version, source, commits, lease, chosen, clock, metrics or Metrics())
            return work.run(told)
        finally:
            runtime.close()
    finally:
        lease.release()


def push_rules(log: Any, topic: str, partition: int) -> ValidationRules:
    """Return the validation rules of a version topic: gaps are accepted only where the topic itself is compacted."""
    return ValidationRules(
        otherwise=OnError.FAIL,  # also before its start of push came (I1)
        tolerance=tolerance_of(log, topic, partition),
        strict=True,
        batch_only=True,
    )


class _Ingest:
    """One partition during its ingest."""

    def __init__(
        self,
        log: Any,
        version: TableVersion,
        source: TableSource,
        commits: Commits,
        lease: Lease,
        settings: IngestSettings,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._log, self._version, self._source, self._clock = log, version, source, clock
        self._commits, self._lease = commits, lease
        (self._state,) = source.partitions
        self.partition = self._state.partition
        self._cadence = CheckpointCadence(pushing_bytes=settings.commit_bytes, settled_bytes=-1)
        self._metrics = metrics
        self._rules = push_rules(log, version.topic, self.partition)
        self._replica = self._judging(self._rules, self._state.drainer or None)
        self._behind: Replica | None = None
        self._state.encode_drainer = self._saved
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        stored = self._state.counts
        self._records = stored.applied + stored.deleted + stored.null_keys
        self._before = self._counted_before()
        self._unexpected = 0

    def run(self, told: Callable[[int], None] | None) -> Ingested:
        """Ingest up to the end of push, or to a fault."""
        for records in self._read():
            for piece in _cut_behind_words(records):
                if self._complete():
                    self._count_behind(piece)
                    continue
                judged = self._replica.drain(piece, self._clock.now_ms(), self._keep)
                self._state.next_offset = self._replica.drainer.state.next_offset
                if judged.stop_at is not None:
                    return self._failed(judged.findings[-1])
                fault = self._lone_repeat(piece, judged)
                if fault is None and self._complete():
                    fault = self._unlisted(piece)
                if fault is not None:
                    return Ingested(self._result(is_complete=False), fault)
                self._commit_if_due(judged, piece.nbytes)
            if told is not None:
                told(records.num_rows)
        return Ingested(self._result()) if self._complete() else self._failed(None)

    # -- inside ----------------------------------------------------------------------------------

    def _complete(self) -> bool:
        """Whether the end of push arrived, which requires all that its manifest lists (I3)."""
        return self._replica.drainer.state.phase is Phase.PUSHED

    def _counted_before(self) -> Counter[str]:
        """Return the verdicts up to the commit that this ingest continues from (I4)."""
        if self._state.next_offset and self._state.verdicts is None:
            raise CorruptError(
                f"{self._version.topic}-{self.partition} was ingested up to offset {self._state.next_offset} by "
                "another release, which did not keep what validation had found until there; push again"
            )
        return Counter(self._state.verdicts)

    def _verdicts(self) -> Counter[str]:
        """Return what validation found in all records of the version, over all attempts."""
        found = Counter(self._before)
        for verdict, number in self._replica.faults.verdicts.items():
            found[verdict.label] += number
        return found

    def _judging(self, rules: ValidationRules, state: bytes | None) -> Replica:
        replica = Replica(self._version.topic, self.partition, rules=rules, metrics=self._metrics)
        replica.to_standby(state, now_ms=self._clock.now_ms())
        return replica

    def _unlisted(self, piece: pa.RecordBatch) -> Fault | None:
        """Return a fault if a sender that is not part of the push wrote more records than the manifest lists."""
        listed = Manifest.from_bytes(
            control_payload(piece.column("headers"), piece.num_rows - 1) or b""
        ).records
        self._store()
        foreign = self._records - listed
        if foreign <= 0:
            return None
        said = (
            f"{self._version.topic}-{self.partition} holds {foreign} records that the push did not send: its "
            f"manifest lists {listed}; nobody but the push may write to a version's topic before its end"
        )
        return Fault(self.partition, UNLISTED, said, self._state.next_offset - 1)

    def _lone_repeat(self, piece: pa.RecordBatch, judged: Judged) -> Fault | None:
        """Return a fault if compaction removed the first copy of a repeat that is left out (I6)."""
        repeats = (judged.verdicts == Verdict.DUPLICATE) & ~judged.columns.is_control
        if self._rules.tolerance.compaction_lag_ms < 0 or not repeats.any():
            return None
        topic, offsets = self._version.topic, piece.column("offset").to_numpy()[: len(repeats)]
        found = lone_repeat(self._log, topic, self.partition, judged.columns[repeats], offsets[repeats])
        if found is None:
            return None
        said = (
            f"{topic}-{self.partition} was compacted before it was ingested, and kept at offset {found} a repeat whose "
            "first copy, or a later value, is gone; push again, into a topic that is not compacted"
        )
        return Fault(self.partition, COMPACTED, said, found)

    def _count_behind(self, piece: pa.RecordBatch) -> None:
        """Count the records after the end of push, and store none of them (I5)."""
        if self._behind is None:
            rules = replace(self._rules, otherwise=OnError.KEEP)
            self._behind = self._judging(rules, encode_state(self._replica.drainer.state))
        judged = self._behind.drain(piece, self._clock.now_ms(), lambda *_: None)
        self._unexpected += judged.noted(Note.UNEXPECTED)

    def _read(self) -> Iterator[pa.RecordBatch]:
        size = {"max_bytes": READ_BYTES} if isinstance(self._log, Log) else {}
        topic, number = self._version.topic, self.partition
        start = {number: self._state.next_offset}
        with self._log.reader(topic, [number], start=start, control_records=True, **size) as reader:
            yield from reader  # ends at the partition's current end, or when it learns that nothing follows

    def _keep(self, records: pa.RecordBatch, _: Judged) -> None:
        if records.num_rows == 0:
            return
        self._waiting.append(records)
        self._waiting_bytes += records.nbytes
        self._records += records.num_rows
        if self._waiting_bytes >= APPEND_BYTES:
            self._store()

    def _store(self) -> None:
        """Write what waits as runs."""
        if not self._waiting:
            return
        table = pa.Table.from_batches(
            [batch.select(["offset", "timestamp", "key", "value"]) for batch in self._waiting]
        ).combine_chunks()
        self._waiting, self._waiting_bytes = [], 0
        state = self._state
        for records in table.to_batches():
            taken = take_records(self._source.rules, records, state.observed_ms, state.newest_ms)
            count_put(state.shape, taken, state.store.put_batch(taken.rows, stream_time=taken.stream_time))
            state.newest_ms = taken.newest_ms
            warn_about(self._source.rules, state, taken.dropped)
            state.counts.add(taken.counts)

    def _commit_if_due(self, judged: Judged, size: int) -> None:
        now_ms, phase = self._clock.now_ms(), self._replica.drainer.state.phase
        self._lease.keep()
        if not self._cadence.is_due(judged, size, phase, now_ms):
            return
        self._store()
        self._state.verdicts = dict(self._verdicts())
        token = self._source.runtime.checkpoint(self._source.task)
        self._lease.keep(force=True)
        self._commits.add(token, self._source.positions, self._state.index.total_rows, now_ms)
        self._cadence.taken(now_ms)

    def _saved(self) -> bytes:
        data = self._replica.checkpoint(now_ms=self._clock.now_ms())
        if data is None:  # I2
            raise self._replica.error or IntegrityError(f"{self._version.topic}-{self.partition} has failed")
        return data

    def _result(self, *, is_complete: bool | None = None) -> PartitionResult:
        counts = self._verdicts()
        if self._behind is not None:
            for verdict, number in self._behind.faults.verdicts.items():
                counts[verdict.label] += number
        counts["unexpected"] = self._unexpected
        received = self._replica.drainer.state
        return PartitionResult(
            partition=self.partition,
            rows=self._state.index.total_rows,
            records=self._records,
            next_offset=received.next_offset,
            end_of_push=received.end_of_push,
            verdicts={name: number for name, number in counts.items() if number},
            is_complete=self._complete() if is_complete is None else is_complete,
        )

    def _failed(self, finding: Finding | None) -> Ingested:
        fault = fault_of(self._log, self._version, self.partition, self._replica.drainer.state, finding)
        return Ingested(self._result(), fault)


def _cut_behind_words(records: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the batch in pieces that end with a start or an end of push, so that a commit can be made there."""
    headers = records.column("headers")
    if len(headers.flatten()) == records.num_rows:  # control records have one header more: here is none
        yield records
        return
    columns = read_columns(headers)
    words = columns.is_control & (columns.control <= ControlType.END_OF_PUSH)
    start = 0
    for row in np.flatnonzero(words).tolist():
        yield records.slice(start, row + 1 - start)
        start = row + 1
    if start < records.num_rows:
        yield records.slice(start)
