"""The Spark engine: a round is one Spark job that the driver starts.

Spark schedules, retries and places tasks; the work itself is `round_task`, with the same `Worker` as in the local
engine. Each slot is a Python process that keeps the state of its tasks between rounds (`Slots`). In a re-keyed flow,
a first stage reads the sources and shuffles the events to the slots that own the keys: through Spark's shuffle, or
through files if all slots share a machine (`exchange`).

Thread rule: `run` from one thread at a time; `cancel` and `close` from any thread.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from tidegate.errors import InternalError, InvalidError
from tidegate.pipeline.messages import RoundOrder, RoundResult, SourceOrder, TaskOrder, decode, encode
from tidegate.pipeline.settings import WorkerSetup
from tidegate.spark.compat import Slots, executors, failures_told, pickled
from tidegate.spark.errors import rebuild
from tidegate.spark.exchange import clear, exchange_folder
from tidegate.spark.round_task import HOME, Assignment, Outcome, places, read_and_split, work_on

if TYPE_CHECKING:
    from pyspark.core.rdd import RDD
    from pyspark.sql import SparkSession


class SparkEngine:
    """Executes the rounds of one app as jobs of a Spark session."""

    name = "spark"

    def __init__(self, spark: SparkSession, setup: WorkerSetup, *, slots: int | None = None) -> None:
        """`slots` is how many tasks run at once, each in a process of its own; the default is Spark's parallelism."""
        if type(spark).__module__.startswith("pyspark.sql.connect"):
            raise InvalidError(
                "a Spark Connect session cannot run a pipeline: rounds are jobs over RDDs, which Connect does not "
                "have. Start it where the driver runs (spark-submit, tidegate.spark.session()), or with engine='local'"
            )
        self._context = spark.sparkContext
        self.slots = slots or max(1, self._context.defaultParallelism)
        self.processes = self.slots
        self._rekeyed = {flow.name for flow in setup.flows if flow.rekey_at is not None}
        self._places = places(setup, self.slots)
        self._setup = pickled(setup)
        self._digest = hashlib.sha256(self._setup).hexdigest()
        self._slots = Slots(self._context, self.slots)
        self._beside = -(-self.slots // executors(self._context))  # processes on one machine
        self._exchange = exchange_folder(self._context) if self._rekeyed else None
        self._guard = threading.Lock()
        self._group: str | None = None  # of the running job
        self._closed = False
        self._cancelled = False  # a job ended early, and its tasks may still be running
        self.outcomes: tuple[Outcome, ...] = ()  # of the last round, for display

    def place(self, flow: str, task: int) -> int:
        return self._places[flow, task]

    def run(self, order: RoundOrder) -> RoundResult:
        """Execute one round; raise what a task raised, and `UnavailableError` if Spark gave up."""
        if not order.tasks and not order.sources:
            return RoundResult((), ())
        try:
            with self._in_group(order), failures_told(self._failure):
                rows = self._job(order).collect()
        finally:
            if self._exchange is not None:
                clear(self._exchange)
        self.outcomes = tuple(decode(row, Outcome) for row in rows)
        for outcome in self.outcomes:
            if outcome.failure is not None:
                raise rebuild(outcome.failure)
        results = [outcome.result for outcome in self.outcomes if outcome.result is not None]
        return RoundResult(
            tuple(source for result in results for source in result.sources),
            tuple(task for result in results for task in result.tasks),
        )

    def cancel(self) -> None:
        """Cancel the running job, if any; its round is not committed and is repeated."""
        with self._guard:
            group = self._group
        if group is not None:
            self._cancelled = True
            self._context.cancelJobGroup(group)

    def close(self) -> None:
        """Mark the engine closed. Its processes serve the next run, or end after a minute without work."""
        with self._guard:
            was_closed, self._closed = self._closed, True
        self.cancel()
        if not was_closed and not self._cancelled:
            self._slots.free()

    def _failure(self) -> str:
        state = "the round was cancelled" if self._closed else "Spark could not finish a round"
        return f"{state}; nothing of it counts, it can be done again"

    # -- one job -------------------------------------------------------------------------------------

    def _job(self, order: RoundOrder) -> RDD[bytes]:
        sources: dict[int, list[SourceOrder]] = {}
        tasks: dict[int, list[TaskOrder]] = {}
        readers: dict[int, list[SourceOrder]] = {}
        for task in order.tasks:
            tasks.setdefault(self._places[task.flow, task.task], []).append(task)
        for source in order.sources:
            if source.flow in self._rekeyed:
                readers.setdefault(source.partition % self.slots, []).append(source)
            else:
                sources.setdefault(self._places[source.flow, source.partition], []).append(source)
        if readers:
            tasks.setdefault(HOME, [])
        workers = {
            slot: partial(work_on, self._assigned(order, sources.get(slot, []), own))
            for slot, own in sorted(tasks.items())
        }
        if not readers:
            return self._slots.on_each(workers)
        senders = {
            slot: partial(read_and_split, self._assigned(order, own, [])) for slot, own in readers.items()
        }
        return self._slots.shuffled(senders, workers)

    def _assigned(self, order: RoundOrder, sources: list[SourceOrder], tasks: list[TaskOrder]) -> Assignment:
        part = msgspec.structs.replace(order, sources=tuple(sources), tasks=tuple(tasks))
        exchange = "" if self._exchange is None else str(self._exchange)
        return Assignment(self._setup, self._digest, encode(part), self.slots, self._beside, exchange)

    @contextmanager
    def _in_group(self, order: RoundOrder) -> Iterator[None]:
        """Run a job in a named group, which Spark's UI shows and `cancel` can end."""
        group = f"tidegate {order.app} {order.generation}.{order.round}"
        with self._guard:
            if self._closed:
                raise InternalError("a round was asked of an engine that is closed")
            self._group = group
        described = f"{order.app}: round {order.round}"
        self._context.setJobGroup(group, described, interruptOnCancel=False)
        try:
            yield
        except BaseException:
            self._cancelled = True
            self._context.cancelJobGroup(group)
            raise
        finally:
            with self._guard:
                self._group = None
            self._context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
            self._context.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]
