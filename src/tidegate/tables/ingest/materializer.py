"""The builder of a table: claim the lease, restore the last commit, read the topic, commit.

    consumer  reads ahead, validates with the consumer's validator, fills the buffer
    drainer   empties it, validates with the drainer's validator, writes rows, advances the position

M1  a commit is one storage checkpoint: rows, positions and the drainer's validation states of one moment.
M2  rows of a piece are in storage before its position advances; repeating a piece after a failure changes nothing.
M3  after a fault nothing is committed any more: the first error stops the builder, and `check` raises it.

Thread rules: `consume_once` on one thread, `drain_once` and `commit` on one, which may be the same; `run` starts one
for each. Waiting for positions is safe from any. A claim: one thread at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from tidegate.clock import Clock
from tidegate.errors import FencedError, InvalidError, OverloadError, UnavailableError
from tidegate.integrity.validator import Judged, reasons_of
from tidegate.metrics import Metrics
from tidegate.randomness import Randomness
from tidegate.scheduling import Scheduler
from tidegate.storage import StorageConfig, WorkerStorageRuntime
from tidegate.tables.changes import ChangeHub
from tidegate.tables.commits import KEPT, Commit, Commits, Held, Lease, lease_name, next_epoch
from tidegate.tables.dead_letters import letters_of
from tidegate.tables.ingest.consumer import DEFAULT_LIMIT_BYTES, BoundedBuffer, Piece, TopicTail, TopicWatch
from tidegate.tables.ingest.decode import Int64s, Taken, count_put, take_records, warn_about
from tidegate.tables.ingest.validation import OrderWatch, Validation
from tidegate.tables.options import TableRules
from tidegate.tables.snapshot import (
    Counts,
    PartitionState,
    TableSource,
    attach,
    kept_open,
    task_of,
)
from tidegate.windows.stores.segmented_store import PreparedPut

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend


# --- materialiser

PAUSE_MS = 50
MAINTAIN_MS = 20
ValidationOf = Callable[..., Any]
"""Makes what stands before and behind the buffer of a partition: `Validation`, or what replicas have in its place."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cadence:
    """When a commit is due, and how much may wait in the buffer."""

    commit_interval_ms: int = 5_000
    commit_bytes: int = 256 << 20
    buffer_bytes: int = DEFAULT_LIMIT_BYTES
    read_bytes: int = 12 << 20


class Materialiser:
    """Builds one table; made by `Claim`."""

    def __init__(
        self,
        log: Any,
        source: TableSource,
        commits: Commits,
        lease: Lease,
        *,
        clock: Clock,
        metrics: Metrics,
        cadence: Cadence,
        validation_of: ValidationOf | None = None,
        topic: TopicWatch,
    ) -> None:
        self.source = source
        self._topic = topic
        self.changes = ChangeHub(source.rules)
        self.error: BaseException | None = None
        self.buffer = BoundedBuffer(clock, cadence.buffer_bytes)
        self.commits = commits
        self._lease = lease
        self._clock = clock
        self._cadence = cadence
        self._order = OrderWatch(source.rules.shape, clock)
        self._states = {state.partition: state for state in source.partitions}
        now_ms = clock.now_ms()
        make: ValidationOf = validation_of or partial(Validation, consumed=source.rules.consumed)
        self.validations: dict[int, Any] = {
            state.partition: make(log, state, now_ms=now_ms, metrics=metrics) for state in source.partitions
        }
        self._records = metrics.counter(
            "tidegate_table_records_total", "records of tables by outcome", ("table", "outcome")
        )
        self._tail = TopicTail(log, source, read_bytes=cadence.read_bytes)
        self._moved = threading.Condition()
        self._stopping = threading.Event()
        self._wants_commit = threading.Event()
        self._threads: list[threading.Thread] = []
        self._uncommitted_bytes = 0
        self._dirty = any(state.counts.skipped_offsets for state in source.partitions)
        self._committed_at_ms = clock.monotonic_ms()

    # -- the two stages --------------------------------------------------------------------------

    def consume_once(self, timeout_ms: int = 0) -> bool:
        """Read the next piece and put it into the buffer; False if there was none."""
        pieces = self._tail.poll(timeout_ms)
        for piece in pieces:
            if piece.records is not None:
                self.validations[piece.partition].consume(piece.records, self._clock.now_ms())
            self._put(piece)
        return bool(pieces)

    def drain_once(self, timeout_ms: int = 0) -> bool:
        """Take one piece out of the buffer into the table; False if there was none."""
        piece = self.buffer.take(timeout_ms)
        if piece is None:
            return False
        state = self._states[piece.partition]
        if self.validations[piece.partition].is_stopped:
            return True  # its position stays; the others continue
        if piece.records is not None and not self._drain(state, piece.records):
            return True
        state.next_offset = piece.next_offset
        self._dirty = True
        self._uncommitted_bytes += piece.nbytes
        with self._moved:
            self._moved.notify_all()
        return True

    def commit(self) -> Commit | None:
        """Commit everything drained; None if there was nothing since the last commit."""
        if self.error is not None:
            raise self.error
        newest = self.commits.newest
        if not self._dirty and newest is not None:
            return None
        try:
            self._lease.keep()
            self._topic.check()  # checks that records since the last commit are of this topic
            token = self.source.runtime.checkpoint(self.source.task)
            rows = sum(state.index.total_rows for state in self.source.partitions)
            commit = self.commits.add(token, self.source.positions, rows, self._clock.now_ms())
        except FencedError as error:
            self.error = error  # for good: another process builds the table now
            raise
        self._dirty, self._uncommitted_bytes = False, 0
        self._committed_at_ms = self._clock.monotonic_ms()
        return commit

    def commit_if_due(self) -> None:
        """Commit when due, renew the lease, and do a little maintenance."""
        waited = self._clock.monotonic_ms() - self._committed_at_ms
        due = (
            waited >= self._cadence.commit_interval_ms
            or self._uncommitted_bytes >= self._cadence.commit_bytes
        )
        if self._dirty and (due or self._wants_commit.is_set()):
            self.commit()
        self._wants_commit.clear()
        self._lease.keep()
        if not self._threads:
            self.source.runtime.maintain(self.source.task, MAINTAIN_MS)

    # -- catching up -----------------------------------------------------------------------------

    def end_offsets(self) -> dict[int, int]:
        """Return the topic's end offsets, for this table's isolation level."""
        return self._tail.end_offsets()

    def advance_to(self, targets: Mapping[int, int], idle_ms: int) -> bool:
        """Read and drain on this thread until these offsets are reached; False if no record arrived for so long."""
        self._guarded(lambda: self._advance_to(targets, idle_ms))
        return self.has_reached(targets)

    def _advance_to(self, targets: Mapping[int, int], idle_ms: int) -> None:
        self._topic.check()
        deadline = self._clock.monotonic_ms() + idle_ms
        while not self.has_reached(targets):
            left = deadline - self._clock.monotonic_ms()
            came = self.consume_once(max(0, min(left, PAUSE_MS)))
            if self.drain_once() or came:
                deadline = self._clock.monotonic_ms() + idle_ms
                self.commit_if_due()
            elif left <= 0:
                return

    def has_reached(self, targets: Mapping[int, int]) -> bool:
        return all(self._states[number].next_offset >= offset for number, offset in targets.items())

    def wait_for(self, targets: Mapping[int, int], timeout_ms: int) -> bool:
        """Wait until these offsets are drained; return whether they are."""
        deadline = self._clock.monotonic_ms() + timeout_ms
        with self._moved:
            while not self.has_reached(targets):
                self.check()
                left = deadline - self._clock.monotonic_ms()
                if left <= 0:
                    return False
                self._clock.wait_ms(self._moved, min(left, PAUSE_MS * 4))
        return True

    # -- threads ---------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return bool(self._threads)

    def run(self) -> None:
        """Run in the background until `stop`."""
        self.source.runtime.start(self.source.task)
        for name, body in (("consumer", self._consume_on), ("drainer", self._drain_on)):
            label = f"tidegate-{self.source.rules.shape.name}-{name}"
            self._threads.append(
                threading.Thread(target=self._guarded, args=(body,), name=label, daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def request_commit(self, timeout_ms: int) -> None:
        """Have the drainer commit what it has drained by now; wait until it has."""
        target = self.source.positions
        self._wants_commit.set()
        deadline = self._clock.monotonic_ms() + timeout_ms
        while not _covers(self.commits.newest, target):
            self.check()
            if self._clock.monotonic_ms() >= deadline:
                raise UnavailableError(
                    f"no commit came within {timeout_ms} ms; wait longer, or look at the disk"
                )
            self._wants_commit.set()
            self._clock.sleep_ms(2)

    def stop(self) -> None:
        """Stop both stages; buffered pieces are read again after the next start."""
        self._stopping.set()
        self.buffer.close()
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._tail.close()

    def close(self) -> None:
        """Stop, commit what is drained if all is well, and release the lease."""
        self.stop()
        try:
            if self.error is None and self._dirty:
                self.commit()
        finally:
            self.changes.close()
            self._lease.release()

    def forget(self) -> None:
        """Stop, and let `close` save nothing since the last commit."""
        self.stop()
        self._dirty = False

    def check(self) -> None:
        """Raise the error that stopped the builder, if any (M3)."""
        if self.error is not None:
            raise self.error

    def _consume_on(self) -> None:
        while not self._stopping.is_set():
            self.consume_once(PAUSE_MS)

    def _drain_on(self) -> None:
        while not self._stopping.is_set():
            self.drain_once(PAUSE_MS)
            self.commit_if_due()

    def _guarded(self, body: Callable[[], None]) -> None:
        self.check()
        try:
            body()
        except BaseException as error:  # kept and raised by `check`: a thread has no caller
            self.error = error
            self._stopping.set()
            self.buffer.close()
            with self._moved:
                self._moved.notify_all()
            if threading.current_thread() not in self._threads:
                raise
            logger.error("table %s stopped: %s", self.source.rules.shape.name, error)

    # -- inside ----------------------------------------------------------------------------------

    def _drain(self, state: PartitionState, records: pa.RecordBatch) -> bool:
        """Store records in the table; False if the partition stopped among them."""
        validation = self.validations[state.partition]
        state.counts.repeated += validation.drain(
            records,
            self._clock.now_ms(),
            lambda kept: self._store(state, kept),
            lambda looked_at, judged: self._set_aside(state, looked_at, judged),
        )
        if validation.wants_commit():
            self._wants_commit.set()
        return not validation.is_stopped

    def _store(self, state: PartitionState, records: pa.RecordBatch) -> None:
        if records.num_rows == 0:
            return
        taken = take_records(self.source.rules, records, state.observed_ms, state.newest_ms)
        prepared = self._prepare(state, taken)
        try:
            rows, seen = count_put(state.shape, taken, prepared.result)
            self._order.look(state, rows)
            changed = self.changes.before(state, rows)
        except BaseException:
            prepared.undo()
            raise
        with self.source.cut:
            state.observed_ms, state.newest_ms = taken.observed_ms, taken.newest_ms
            prepared.commit()
        state.cells.note(*seen, state.readable_from)
        taken.counts.letters_not_kept = sum(map(self._keep_letters, taken.letters))
        self._count(state, taken.counts, taken.dropped)
        self.changes.publish(changed)

    def _prepare(self, state: PartitionState, taken: Taken) -> PreparedPut:
        """Write the rows to the store.

        If there is no room, the time segments that these rows expire are dropped first: a builder that has to stop
        anyway restarts from its last commit, which has them.
        """
        store = state.store
        try:
            return store.prepare(taken.rows, stream_time=taken.stream_time)
        except OverloadError:
            if not store.advance(taken.observed_ms):
                raise
        return store.prepare(taken.rows, stream_time=taken.stream_time)

    def _set_aside(self, state: PartitionState, records: pa.RecordBatch, judged: Judged) -> None:
        """Keep the faulty records of a batch as dead letters, and count them and those that are dropped."""
        aside = np.flatnonzero(judged.aside)
        faulty = len(aside) + int(np.count_nonzero(judged.dropped))
        if not faulty:
            return
        kept = Counts(faulty=faulty)
        if len(aside):
            kept.letters_not_kept = self._keep_letters(
                letters_of(records, aside, reasons_of(aside, judged, records))
            )
        offsets = records.column("offset").to_numpy()[judged.aside | judged.dropped]
        self._count(state, kept, {"faulty": offsets})

    def _keep_letters(self, letters: pa.RecordBatch) -> int:
        source = self.source
        return source.letters.put(letters, source.rules.consumed.dead_letter_bytes)

    def _count(self, state: PartitionState, counts: Counts, dropped: Mapping[str, Int64s]) -> None:
        warn_about(self.source.rules, state, dropped)
        state.counts.add(counts)
        for outcome, number in msgspec.structs.asdict(counts).items():
            if number:
                self._records.add(number, table=self.source.rules.shape.name, outcome=outcome)

    def _put(self, piece: Piece) -> None:
        while not self.buffer.put(piece, PAUSE_MS if self._threads else 0):
            if self._stopping.is_set():
                return
            if not self._threads:  # one thread does both: make room itself
                self.drain_once()


def kept_checkpoints() -> int:
    """Return how many checkpoints storage must hold so that every listed commit stays readable."""
    return KEPT + 2  # one being written, and the one that its publish removes from the list


def _covers(commit: Commit | None, target: Mapping[int, int]) -> bool:
    return commit is not None and all(commit.positions[number] >= offset for number, offset in target.items())


# --- claim


class Claim:
    """The means to build one table here, once no other process does."""

    def __init__(
        self,
        log: Any,
        rules: TableRules,
        backend: StorageBackend,
        *,
        cadence: Cadence,
        storage: StorageConfig | None,
        lease_ttl_ms: int,
        clock: Clock,
        randomness: Randomness,
        scheduler: Scheduler | None,
        validation_of: ValidationOf | None = None,
    ) -> None:
        if lease_ttl_ms <= 0:
            raise InvalidError("lease_ttl is 0: a lease that ends at once protects nothing")
        self._storage = storage or StorageConfig(retained_checkpoints=kept_checkpoints())
        if self._storage.retained_checkpoints < kept_checkpoints():
            raise InvalidError(
                f"retained_checkpoints is {self._storage.retained_checkpoints}; a table keeps its last commits "
                f"readable and needs at least {kept_checkpoints()}"
            )
        self._log, self._rules, self._backend = log, rules, backend
        self._cadence, self._ttl_ms = cadence, lease_ttl_ms
        self._clock, self._randomness, self._scheduler = clock, randomness, scheduler
        self._validation_of = validation_of
        self.held: Held | None = None
        """Who had the lease when it was asked for last, if somebody else did."""

    @property
    def retry_ms(self) -> int:
        """The time between attempts."""
        return min(max(self._ttl_ms // 10, 50), 1000)

    def attempt(self) -> Materialiser | None:
        """Return the builder if the lease is ours now, else None."""
        lease = Lease(
            self._backend,
            lease_name(self._rules.shape.name),
            clock=self._clock,
            randomness=self._randomness,
            ttl_ms=self._ttl_ms,
        )
        self.held = lease.acquire(at_least=next_epoch(self._backend, self._rules.shape.name))
        if self.held is not None:
            return None
        try:
            return self._build(lease)
        except FencedError:
            return None  # another process was quicker, and has put the commits under its name already
        except BaseException:
            lease.release()
            raise

    def _build(self, lease: Lease) -> Materialiser:
        rules, clock = self._rules, self._clock
        topic = TopicWatch(self._log, rules.shape)
        commits = Commits(self._backend, rules.shape, lease.epoch, topic.topic_id)
        known = commits.take_over()
        metrics = getattr(self._log, "metrics", None) or Metrics()
        runtime = WorkerStorageRuntime.open(
            self._storage,
            kept_open(self._backend),
            clock=clock,
            randomness=self._randomness,
            scheduler=self._scheduler,
            metrics=metrics,
        )
        runtime.backlog.expect_jobs(
            1, 1
        )  # the drainer appends and prunes: while it waits, no other thread makes room
        try:
            task = task_of(rules.shape)
            tokens = [commit.token for commit in known]
            if known:
                runtime.apply_checkpoint(task, tokens[-1], retained=tokens[:-1])
            source = attach(runtime, rules)
            runtime.collect_garbage(task, tokens)
            return Materialiser(
                self._log,
                source,
                commits,
                lease,
                clock=clock,
                metrics=metrics,
                cadence=self._cadence,
                validation_of=self._validation_of,
                topic=topic,
            )
        except BaseException:
            runtime.close()
            raise
