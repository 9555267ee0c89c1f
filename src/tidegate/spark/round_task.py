"""Execute a round's work in a Spark task, and assign tasks to slots.

A task always goes to the same slot, so that its state is in memory there. The number of slots may change from run to
run; nothing stored depends on it. A process keeps the worker of the last app it ran. An app whose definition changed
has another digest and gets a new worker. Each slot returns one value: its results, or the error that ended it.

Behaviour of Spark's Python workers that this module handles:

- after every task they run a full garbage collection, which takes longer than a small round: see
  `workers.own_garbage`;
- a process whose function leaves input unread is ended, so all rows are always read;
- a task that raises ends its process. Typed errors are therefore returned; others are raised at the first attempt, so
  that Spark retries elsewhere, and returned from the second attempt on.

Thread rule: one task at a time in a process, as Spark does it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from tidegate.errors import TidegateError
from tidegate.pipeline.messages import RoundOrder, RoundResult, TaskResult, decode, encode
from tidegate.pipeline.settings import WorkerSetup, limits_of
from tidegate.pipeline.worker import Worker
from tidegate.spark import exchange as shuffle
from tidegate.spark.compat import unpickled
from tidegate.spark.errors import Failure, describe
from tidegate.spark.exchange import Outbox
from tidegate.spark.workers import own_garbage
from tidegate.storage import StorageConfig

HOME: Final = 0  # the slot that returns the results of re-keyed flows' sources


def places(setup: WorkerSetup, slots: int) -> dict[tuple[str, int], int]:
    """Map (flow, task) to a slot, for every task of the app: in turn, so that each flow uses all slots."""
    tasks = [
        (flow.name, task)
        for flow in setup.flows
        for task in range(flow.tasks(setup.partitions[flow.source.topic]))
    ]
    return {task: number % slots for number, task in enumerate(tasks)}


def share_of(config: StorageConfig, processes: int) -> StorageConfig:
    """Return the storage config of one of several processes that share a machine's memory; the backlog limit is one
    of disk and is not divided."""
    if processes <= 1:
        return config
    total = max(1, config.worker_total_bytes // processes)
    ceiling = config.memory_ceiling_bytes // processes
    return replace(
        config,
        worker_total_bytes=total,
        memory_ceiling_bytes=ceiling,
        max_batch_bytes=min(config.max_batch_bytes, ceiling - total),
        **limits_of(config, config.max_tasks, total),
    )


# -- work -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assignment:
    """The work of one slot in a round; serialised in the task's closure.

    `setup` is a pickled `WorkerSetup`, decoded only by a process that does not have it yet; `order` holds this
    slot's part of the round. `processes` share a machine's memory. `exchange` is a folder that all slots see, for
    blobs of events; empty: there is none.
    """

    setup: bytes
    digest: str
    order: bytes
    slots: int
    processes: int
    exchange: str = ""


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a slot; `process` names where it ran, for display and tests."""

    process: str
    result: RoundResult | None = None
    failure: Failure | None = None


def work_on(assignment: Assignment, _partition: int, rows: Iterable[bytes]) -> Iterator[bytes]:
    """Execute all tasks of a slot; `rows` are events and source results that came through the shuffle, if any."""
    with own_garbage():
        yield encode(_guarded(assignment, iter(rows)))


def read_and_split(assignment: Assignment, _partition: int, rows: Iterable[bytes]) -> Iterator[bytes]:
    """Read the slot's sources of re-keyed flows; yield slot number and blob in turn, as Spark's shuffle takes them."""
    with own_garbage():
        for _ in rows:
            pass
        try:
            order = decode(assignment.order, RoundOrder)
            worker = _worker_of(assignment)
            where = places(worker.setup, assignment.slots)
            outbox = Outbox(assignment.exchange) if assignment.exchange else None
            for source in order.sources:
                reading = worker.read(source, order.tick_of(source.flow))
                parts = (part for batch in reading for part in worker.split(source.flow, batch))
                for shard, events in shuffle.gathered(parts):
                    yield shuffle.address(where[source.flow, shard])
                    yield shuffle.pack(source.flow, shard, events, outbox)
                result = reading.result()
                flow = worker.setup.flow(source.flow)
                if flow.is_ordered:
                    for slot in sorted({slot for (name, _), slot in where.items() if name == flow.name}):
                        yield shuffle.address(slot)
                        yield shuffle.pack_reached(result)
                yield shuffle.address(HOME)
                yield shuffle.pack_result(result)
        except Exception as error:  # noqa: BLE001 - the edge of the process: told, or tried again elsewhere
            _raise_if_first(error)
            yield shuffle.address(HOME)
            yield shuffle.pack_failure(describe(error))


def _guarded(assignment: Assignment, rows: Iterator[bytes]) -> Outcome:
    process = f"{socket.gethostname()}:{os.getpid()}"
    try:
        result = _round(assignment, rows)
    except Exception as error:  # noqa: BLE001 - the edge of the process: told, or tried again elsewhere
        _raise_if_first(error)
        result = describe(error)
    finally:
        for _ in rows:
            pass
    return Outcome(process, failure=result) if isinstance(result, Failure) else Outcome(process, result)


def _round(assignment: Assignment, rows: Iterator[bytes]) -> RoundResult | Failure:
    order = decode(assignment.order, RoundOrder)
    worker = _worker_of(assignment)
    arrived = shuffle.arrived(rows)
    if arrived.failure is not None:
        return arrived.failure
    own = {(each.flow, each.partition): each for each in order.sources}
    sources, tasks = list(arrived.sources), list[TaskResult]()
    for task in order.tasks:
        if worker.setup.flow(task.flow).rekey_at is not None:
            frontiers = order.frontiers_after(task.flow, arrived.reached.get(task.flow, {}))
            source, done = worker.do(order, task, None, arrived.take(task.flow, task.task), frontiers)
        else:
            source, done = worker.do(order, task, own.get((task.flow, task.task)))
        sources += [] if source is None else [source]
        tasks.append(done)
    return RoundResult(tuple(sources), tuple(tasks))


def _raise_if_first(error: Exception) -> None:
    """At a task's first attempt, raise errors that are not ours: another process may succeed."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if not isinstance(error, TidegateError) and (context is None or context.attemptNumber() == 0):
        raise error


_kept: dict[str, Worker] = {}  # digest → worker; only the last one


def _worker_of(assignment: Assignment) -> Worker:
    found = _kept.get(assignment.digest)
    if found is not None:
        return found
    while _kept:
        _kept.popitem()[1].close()
    setup: WorkerSetup = unpickled(assignment.setup)
    setup = replace(setup, storage=share_of(setup.storage, assignment.processes))
    made = _kept[assignment.digest] = Worker(setup)
    made.runtime.backlog.expect_jobs(1, 1)  # one task at a time: while it waits for room, no other frees any
    return made
