"""The worker: executes source and task orders in one process, in Spark's Python workers and in the local engine's
threads.

A worker keeps tasks in memory between rounds. An order names the checkpoint a task starts from; a task that is
exactly there continues, any other is restored from the token, which reads metadata only.

W1  before the commit only objects with unique names are written: packs, parcels, dead letters.
W2  results are a function of the order and the log, wherever and however often it runs: tokens and names differ,
    rows, offsets and parcels' bytes do not.
W3  a round larger than a batch runs through the operators in pieces. Of several updates of one window only the last
    is sent, in its place.

Thread rule: one thread at a time for one flow and task; different tasks may run in parallel.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.clock import Clock, SystemClock
from tidegate.errors import InternalError, InvalidError, TidegateError
from tidegate.files import Files
from tidegate.log.log import Log, folder_path, is_kafka, open_log
from tidegate.metrics import Metrics
from tidegate.pipeline.flow import Flow
from tidegate.pipeline.held_events import (
    BATCH_BYTES,
    PIECE_ROWS,
    Frontiers,
    HeldEvents,
    in_batches,
    pack_events,
    unpack_events,
)
from tidegate.pipeline.messages import (
    Delivery,
    RoundOrder,
    SourceOrder,
    SourceResult,
    TaskOrder,
    TaskResult,
    Tick,
    parcel_name,
    storage_task,
)
from tidegate.pipeline.operator_chain import TaskChain, checks_of, cut_of, front_of, keyless
from tidegate.pipeline.settings import WorkerSetup
from tidegate.pipeline.sink import BATCH_BYTES as RESULT_BATCH_BYTES
from tidegate.pipeline.sink import Batches, Changelog, Deliverer, OutboxState, write_parcel
from tidegate.pipeline.source import FetchBuffers, Reading, SourceParts, source_tolerance
from tidegate.pipeline.transforms import Around, Timings, raise_if_transient
from tidegate.randomness import Randomness, SystemRandomness
from tidegate.storage import WorkerStorageRuntime, open_backend
from tidegate.storage.backends.base import StorageBackend
from tidegate.storage.runs.columns import list_bytes
from tidegate.tables.snapshot import kept_open
from tidegate.windows.events import EventBatch, Int64s, RowChanges
from tidegate.windows.keys import partitions_of_inner_keys
from tidegate.windows.operators.base import (
    RESULT_COPIES,
    Flags,
    Moment,
    Rows,
    WindowRows,
    join_rows,
    rows_that_fit,
)
from tidegate.windows.operators.windowed_operator import Emit


def open_app_log(address: str, client: Mapping[str, str], *, files: Files | None, clock: Clock | None) -> Any:
    """Open the log of an app: a folder, or a cluster with the client's settings."""
    if is_kafka(address):
        return open_log(address, client=client)
    return Log(folder_path(address), files=files, clock=clock)


# -- consolidating --------------------------------------------------------------------------------

DENSE = 8  # rows are marked in an array of at most this many times their number


def last_of_each(pieces: Sequence[WindowRows]) -> WindowRows:
    """Concatenate the pieces and keep only the last row of every (key, start, end).

    Rows are left out before pieces are joined, and a piece whose rows all stay is not copied: one window of lists
    can be a large part of the process's memory.
    """
    if len(pieces) == 1:
        return pieces[0]
    kept = _is_last(
        pa.concat_arrays([piece.key for piece in pieces]),
        np.concatenate([piece.window_start for piece in pieces]),
        np.concatenate([piece.window_end for piece in pieces]),
    )
    left, first = list[WindowRows](), 0
    for piece in pieces:
        chosen = np.flatnonzero(kept[first : first + len(piece)])
        first += len(piece)
        if len(chosen):
            left.append(piece if len(chosen) == len(piece) else piece.take(chosen))
    return join_rows(left or pieces)


def _is_last(key: pa.BinaryArray, start: Int64s, end: Int64s) -> Flags:
    """For each row: whether no later row has the same key, start and end."""
    rows = len(start)
    numbers, room = _codes(key)
    for bound in (start, end):
        codes, count = _codes(pa.array(bound))
        if room * count > DENSE * rows + (1 << 16):
            numbers, room = _codes(pa.array(numbers))
        numbers, room = numbers * count + codes, room * count
    if room > DENSE * rows + (1 << 16):
        numbers, room = _codes(pa.array(numbers))
    last = np.full(room, -1, np.int64)
    last[numbers] = np.arange(rows)  # of equal numbers the last assignment counts
    kept: Flags = np.zeros(rows, np.bool_)
    kept[last[last >= 0]] = True
    return kept


def _codes(column: pa.Array) -> tuple[Int64s, int]:
    """Return a number for each different value, and how many there are."""
    encoded = pc.dictionary_encode(column)
    codes: Int64s = encoded.indices.to_numpy().astype(np.int64)
    return codes, max(1, len(encoded.dictionary))


__all__ = ["Reading", "Worker", "pack_events", "unpack_events"]

MAINTENANCE_PERMILLE = 40  # of a round's time, for compaction and uploads


@dataclass(eq=False)
class _Task:
    """One task in this process's memory."""

    chain: TaskChain
    outbox: OutboxState
    changelogs: list[Changelog]
    held: HeldEvents | None  # for a flow whose steps need one order of all partitions


class Worker:
    """Keeps the tasks of one app in memory between rounds."""

    def __init__(
        self,
        setup: WorkerSetup,
        *,
        log: Any | None = None,
        backend: StorageBackend | None = None,
        clock: Clock | None = None,
        randomness: Randomness | None = None,
        files: Files | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """`log` and `backend` handed in stay open at `close`; a log handed in is this process's only one."""
        self.setup = setup
        self._clock = clock or SystemClock()
        self._randomness = randomness or SystemRandomness()
        self._owns_log, self._owns_backend = log is None, backend is None
        self._log: Any = (
            open_app_log(setup.log, setup.client, files=files, clock=self._clock) if log is None else log
        )
        self._backend = (
            open_backend(setup.state, key_id=setup.key_id, files=files, clock=self._clock)
            if backend is None
            else backend
        )
        self.runtime = WorkerStorageRuntime.open(
            setup.runtime_config,
            kept_open(self._backend),
            clock=self._clock,
            randomness=self._randomness,
            metrics=metrics,
        )
        self._deliverer = Deliverer(self._log, self._backend, self._clock, keeps_open=log is not None)
        self._around = Around(self._backend, self._clock)
        self._buffers = FetchBuffers()
        self._guard = threading.Lock()
        self._tasks: dict[tuple[str, int], _Task] = {}
        self._attached: set[tuple[str, int]] = set()
        self._sources: dict[tuple[str, int], SourceParts] = {}

    # -- sources ---------------------------------------------------------------------------------

    def read(self, order: SourceOrder, tick: Tick) -> Reading:
        """Return the events of a range of the log; they are read during iteration."""
        flow = self.setup.flow(order.flow)
        place = (order.flow, order.partition)
        with self._guard:
            parts = self._sources.get(place)
        if parts is None:
            tolerance = source_tolerance(self._log, flow, order.partition)
            front = front_of(flow, self._around)
            parts = SourceParts(
                self.setup.app,
                flow,
                self._log,
                self._backend,
                self._clock,
                self._randomness,
                front,
                tolerance,
                self._buffers,
                keyless(self.setup.app, flow, self.setup.partitions[flow.source.topic]),
                checks=checks_of(flow, self._around),
            )
            with self._guard:
                self._sources[place] = parts
        return Reading(parts, order, tick)

    def split(self, flow: str, events: EventBatch) -> list[tuple[int, EventBatch]]:
        """Split events of a re-keyed flow by the task that owns their key: Kafka's partition of the key among the
        tasks.

        Events without a key are sent to task 0, which counts them. Changes of a table's rows are sent to every task:
        to the one that owns the new key with the row's content, to the others as deletions, since they may own the
        old key.
        """
        shards = self.setup.flow(flow).shards
        if shards is None:
            raise InternalError(f"flow {flow!r} is not re-keyed: its events stay where they are")
        if shards == 1 or not len(events):
            return [(0, events)] if len(events) else []
        chosen = np.maximum(partitions_of_inner_keys(events.key, shards), 0)
        if events.changes is not None:
            return [(shard, _seen_by(chosen == shard, events, events.changes)) for shard in range(shards)]
        order = np.argsort(chosen, kind="stable")
        bounds = np.searchsorted(chosen[order], np.arange(shards + 1))
        together = events.take(order)
        return [
            (shard, together.slice(start, stop))
            for shard, (start, stop) in enumerate(pairwise(bounds.tolist()))
            if stop > start
        ]

    # -- tasks -----------------------------------------------------------------------------------

    def do(
        self,
        order: RoundOrder,
        task: TaskOrder,
        source: SourceOrder | None,
        events: Iterable[EventBatch] = (),
        frontiers: Frontiers | None = None,
    ) -> tuple[SourceResult | None, TaskResult]:
        """Run one task of a round with its events: those of `source`, in a co-partitioned flow with records to read."""
        tick = order.tick_of(task.flow)
        reading = None if source is None else self.read(source, tick)
        result = self.work(
            task,
            tick,
            order.round,
            events if reading is None else reading,
            incarnation=order.incarnation,
            frontiers=frontiers,
        )
        return None if reading is None else reading.result(), result

    def work(
        self,
        order: TaskOrder,
        tick: Tick,
        round: int,
        events: Iterable[EventBatch],
        *,
        incarnation: str = "",
        frontiers: Frontiers | None = None,
    ) -> TaskResult:
        """Deliver what was committed before, bring the task through one round, and checkpoint it.

        Events of a co-partitioned flow come as the `Reading` itself, which is read only then. `frontiers` are how far
        the source partitions have come that a re-keyed flow waits for (`RoundOrder.frontiers_after`).
        """
        flow, timings, counters = self.setup.flow(order.flow), Timings(self._clock), Counter[str]()
        if order.deliveries:
            with timings("deliver"):
                counters["delivered"] = self._deliverer.deliver(order.deliveries)
        name, began_ms = storage_task(self.setup.app, order.flow, order.task), self._clock.monotonic_ms()
        try:
            with timings("restore"):
                task = self._standing_at(flow, order, name)
            task.chain.look_up(order.lookups)
            before = task.chain.settled
            arrived = self._in_order(flow, task, events, frontiers or {}, order.left_out, timings)
            rows = self._through(flow, task, tick, events, arrived, counters, timings)
            settled = None if before is None else (before, max(before, task.chain.settled or before))
            contents = list[Batches]()
            for changelog in task.changelogs if rows and not task.chain.bad else ():
                contents += changelog.batches(
                    rows, task.outbox, incarnation, tick, timings, task.chain.bad, settled=settled
                )
            if task.chain.bad:  # the task's state and its parcel include effects of these records
                self.forget(order.flow, order.task)
                return TaskResult(order.flow, order.task, b"", bad=tuple(task.chain.bad))
            parcel = None
            if contents:
                unique = self._randomness.uuid().hex
                with timings("parcel"):
                    where = parcel_name(self.setup.app, order.flow, order.task, round, unique)
                    parcel = write_parcel(self._backend, where, contents)
            rows_sent, nbytes = sum(len(piece) for piece in rows), _list_bytes(rows)
            del rows, contents  # large lists must not stay in memory while the task's state is stored
            self.runtime.scratch.freed(RESULT_COPIES * nbytes)
            with timings("maintain"):
                taken_ms = self._clock.monotonic_ms() - began_ms
                self.runtime.maintain(name, budget_ms=max(1, taken_ms * MAINTENANCE_PERMILLE // 1000))
            with timings("checkpoint"):
                token = self.runtime.checkpoint(name)
        except BaseException as error:
            self.forget(order.flow, order.task)
            if not isinstance(error, TidegateError):
                raise_if_transient(f"flow {order.flow}, task {order.task}", "a function of the flow", error)
            raise
        if isinstance(events, Reading):
            timings.take(events.timings)
        stream_time = max((operator.clocks.floor for operator in task.chain.operators), default=-1)
        return TaskResult(
            flow=order.flow,
            task=order.task,
            token=token,
            parcel=parcel,
            stream_time=events.stream_time if isinstance(events, Reading) else stream_time,
            rows_sent=rows_sent,
            counters=dict(counters),
            backlog_bytes=self.runtime.charge_of(name),
            memory_bytes=self.runtime.pool.used(name),
            timings_ms=timings.ms,
            held=None if task.held is None else task.held.held,
        )

    def deliver(self, deliveries: Iterable[Delivery]) -> None:
        """Append committed parcels; records that are already there are compared and skipped."""
        self._deliverer.deliver(deliveries)

    def forget(self, flow: str, task: int) -> None:
        """Drop a task from memory; its next order restores it from its token."""
        with self._guard:
            known = self._tasks.pop((flow, task), None)
            is_attached = (flow, task) in self._attached
            self._attached.discard((flow, task))
        if known is not None:
            known.chain.close()
        if is_attached:
            with suppress(InvalidError):  # it failed before storage knew the task
                self.runtime.detach(storage_task(self.setup.app, flow, task))

    def close(self) -> None:
        for task in self._tasks.values():
            task.chain.close()
        for parts in self._sources.values():
            parts.stages.close()
        self._tasks.clear()
        self._deliverer.close()
        self.runtime.close()
        if self._owns_log:
            self._log.close()
        if self._owns_backend:
            self._backend.close()

    def _standing_at(self, flow: Flow, order: TaskOrder, name: str) -> _Task:
        """Return the task at the order's token: from memory, or restored."""
        token = order.token or None
        with self._guard:
            known = self._tasks.get((order.flow, order.task))
        if known is not None and self.runtime.is_at(name, token):
            return known
        self.forget(order.flow, order.task)
        with self._guard:
            self._attached.add((order.flow, order.task))
        self.runtime.apply_checkpoint(name, token)
        sources = self.setup.partitions[flow.source.topic]
        partitions = [order.task] if flow.rekey_at is None else list(range(sources))
        outbox = OutboxState()
        made = _Task(
            TaskChain(
                self.runtime,
                name,
                flow,
                partitions,
                self._around,
                randomness=self._randomness,
                told_as=f"app {self.setup.app}, flow {flow.name}, task {order.task}",
            ),
            outbox,
            [
                Changelog(
                    self.setup.app,
                    flow,
                    sink,
                    order.task,
                    self.setup.partitions[sink.topic],
                    flow.tasks(sources),
                    max_batch_bytes=self.setup.max_batch_bytes.get(sink.topic, RESULT_BATCH_BYTES),
                )
                for sink in flow.topics
            ],
            HeldEvents(self.runtime, name, flow.schemas[cut_of(flow)]) if flow.is_ordered else None,
        )
        self.runtime.attach(name, outbox)
        with self._guard:
            self._tasks[order.flow, order.task] = made
        return made

    def _in_order(
        self,
        flow: Flow,
        task: _Task,
        events: Iterable[EventBatch],
        frontiers: Frontiers,
        left_out: Sequence[tuple[int, int, int]],
        timings: Timings,
    ) -> Iterable[EventBatch]:
        """Return the events to process in this round, in order."""
        if flow.rekey_at is None:
            return events
        if task.held is None:
            return sorted(events, key=_place)
        with timings("order"):
            return task.held.take(events, frontiers, left_out)

    def _through(
        self,
        flow: Flow,
        task: _Task,
        tick: Tick,
        events: Iterable[EventBatch],
        arrived: Iterable[EventBatch],
        counters: Counter[str],
        timings: Timings,
    ) -> list[Rows]:
        """Process the events that arrived, then advance to the round's time; return the results."""
        moment, rows = Moment(tick.now_ms), list[Rows]()
        cut = {"size": self._batch_bytes} if flow.topics else {"rows": PIECE_ROWS, "size": self._batch_bytes}
        for batch in in_batches(arrived, timings, **cut):
            counters["events"] += len(batch)
            found = task.chain.process(batch, moment, counters, timings)
            if found is not None:
                rows = self._with(rows, found)
        watermark = tick.watermark
        if isinstance(events, Reading):  # records that a filter left out advance the source's time, too
            watermark = max(events.stream_time, -1 if watermark is None else watermark)
        closed = task.chain.tick(Moment(tick.now_ms, watermark, tick.closing), counters, timings)
        if flow.topics and flow.window is not None and flow.window.emit is Emit.UPDATE:
            windows = [piece for piece in rows if isinstance(piece, WindowRows)]
            if len(windows) > 1:
                with timings("consolidate"):
                    windows = [last_of_each(windows)]
            rows = [_by_time(piece) for piece in windows]
        if closed is not None:
            rows = self._with(rows, closed)
        return rows

    @property
    def _batch_bytes(self) -> int:
        """The batch size limit: a batch is copied a few times on its way through the steps."""
        return min(BATCH_BYTES, self.setup.storage.largest_append_bytes // 8)

    def _with(self, rows: list[Rows], found: Rows) -> list[Rows]:
        """Add results to those of the round; of windows with large lists keep only the last value."""
        rows = [*rows, found]
        windows = [piece for piece in rows if isinstance(piece, WindowRows)]
        working_bytes = self.runtime.scratch.working_bytes
        if len(rows) == len(windows) > 1 and 4 * _list_bytes(rows) > working_bytes:
            windows = [last_of_each(windows)]
            rows = list(windows)
        if windows:
            rows_that_fit(windows, self.runtime.scratch)
        return rows


def _list_bytes(rows: Iterable[Rows]) -> int:
    """Return the bytes of all lists in rows of windows."""
    return sum(list_bytes(piece.values.columns) for piece in rows if isinstance(piece, WindowRows))


def _seen_by(is_own: npt.NDArray[np.bool_], events: EventBatch, changes: RowChanges) -> EventBatch:
    """Return changes as seen by a task that owns some of their keys."""
    is_there = is_own & (changes.weight > 0)
    chosen = pa.array(np.arange(len(events)), mask=~is_there)
    return replace(
        events,
        key=events.key.take(chosen),
        values=pa.RecordBatch.from_arrays(
            [each.take(chosen) for each in events.values.columns], schema=events.values.schema
        ),
        changes=replace(changes, weight=is_there.astype(np.int64)),
    )


def _by_time(rows: WindowRows) -> WindowRows:
    """Sort rows by timestamp, so that no record is late for a reader because of an earlier one."""
    if len(rows) < 2 or (np.diff(rows.ts) >= 0).all():
        return rows
    return rows.take(np.argsort(rows.ts, kind="stable"))


def _place(batch: EventBatch) -> tuple[int, int]:
    """The sort position of a batch that came through a shuffle: by source partition and offsets."""
    return (int(batch.partition[0]), int(batch.offset[0])) if len(batch) else (-1, -1)
