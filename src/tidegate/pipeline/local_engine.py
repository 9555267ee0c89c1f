"""The local engine: executes rounds in threads of this process, without a JVM.

The same `Worker` runs here and in Spark's Python workers; this module distributes its work. Kernels and Arrow
release the GIL, so tasks in two threads use two cores for most of their time.

Thread rule: `run` from one thread at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from tidegate.clock import Clock
from tidegate.files import Files
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import Log
from tidegate.metrics import Metrics
from tidegate.pipeline.messages import Delivery, RoundOrder, RoundResult, SourceOrder, SourceResult
from tidegate.pipeline.settings import WorkerSetup
from tidegate.pipeline.worker import Worker
from tidegate.randomness import Randomness
from tidegate.storage.backends.base import StorageBackend
from tidegate.windows.events import EventBatch

Done = TypeVar("Done")


class LocalEngine:
    """One worker and one thread per core."""

    name = "local"
    processes = 1

    def __init__(
        self,
        setup: WorkerSetup,
        *,
        slots: int | None = None,
        log: Log | KafkaLog | None = None,
        backend: StorageBackend | None = None,
        clock: Clock | None = None,
        randomness: Randomness | None = None,
        files: Files | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.slots = slots or _cores()
        self._setup = setup
        self._worker = Worker(
            setup, log=log, backend=backend, clock=clock, randomness=randomness, files=files, metrics=metrics
        )
        self._threads = ThreadPoolExecutor(self.slots, thread_name_prefix="tidegate-task")

    def place(self, flow: str, task: int) -> int:
        return 0

    def run(self, order: RoundOrder) -> RoundResult:
        rekeyed = {flow.name for flow in self._setup.flows if flow.rekey_at is not None}
        shuffled = [source for source in order.sources if source.flow in rekeyed]
        direct = [task for task in order.tasks if task.flow not in rekeyed]
        self._expect(len(shuffled) + len(direct))
        readings = [self._submit(self._read_and_split, order, source) for source in shuffled]
        own = {(each.flow, each.partition): each for each in order.sources if each.flow not in rekeyed}
        done = [
            self._submit(self._worker.do, order, task, own.get((task.flow, task.task))) for task in direct
        ]
        _settle([*readings, *done])
        split = [future.result() for future in readings]
        together = [future.result() for future in done]
        parts: dict[tuple[str, int], list[EventBatch]] = {}
        for _, pieces in split:
            for shard, events in pieces:
                parts.setdefault(shard, []).append(events)
        reached: dict[str, dict[int, tuple[int, int]]] = {}
        for result, _ in split:
            reached.setdefault(result.flow, {})[result.partition] = (result.stream_time, result.next_offset)
        frontiers = {flow: order.frontiers_after(flow, reached.get(flow, {})) for flow in rekeyed}
        self._expect(len(order.tasks) - len(direct))
        gathered = [
            self._submit(
                self._worker.do,
                order,
                task,
                None,
                parts.pop((task.flow, task.task), []),
                frontiers[task.flow],
            )
            for task in order.tasks
            if task.flow in rekeyed
        ]
        _settle(gathered)
        together += [future.result() for future in gathered]
        sources = [result for result, _ in split] + [each for each, _ in together if each is not None]
        return RoundResult(tuple(sources), tuple(each for _, each in together))

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Deliver the coordinator's own parcels through the same worker, so that one process opens a partition once."""
        self._worker.deliver(deliveries)

    def cancel(self) -> None:
        """Cancel the round: threads finish their current work, and the results do not count."""

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._worker.close()

    def _expect(self, jobs: int) -> None:
        """Announce the number of jobs to be submitted: if all threads wait for backlog, none is left to free it."""
        self._worker.runtime.backlog.expect_jobs(self.slots, jobs)

    def _submit(self, job: Callable[..., Done], *arguments: Any) -> Future[Done]:
        def counted() -> Done:
            try:
                return job(*arguments)
            finally:
                self._worker.runtime.backlog.job_done()

        return self._threads.submit(counted)

    def _read_and_split(
        self, order: RoundOrder, source: SourceOrder
    ) -> tuple[SourceResult, list[tuple[tuple[str, int], EventBatch]]]:
        """Read a source of a re-keyed flow and return its events by the task that owns their key."""
        reading = self._worker.read(source, order.tick_of(source.flow))
        pieces = [
            ((source.flow, shard), events)
            for batch in reading
            for shard, events in self._worker.split(source.flow, batch)
        ]
        return reading.result(), pieces


def _cores() -> int:
    """Return the number of cores this process may use; all of them if the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _settle(futures: Iterable[Future[Any]]) -> None:
    """Wait for all jobs, also after a failure: no job keeps running in the background."""
    for future in futures:
        future.exception()
