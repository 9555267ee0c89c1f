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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.errors import InternalError, InvalidError, UnavailableError
from tidegate.pipeline.messages import RoundOrder, RoundResult, SourceOrder, TaskOrder, decode, encode
from tidegate.pipeline.settings import WorkerSetup
from tidegate.spark.errors import rebuild
from tidegate.spark.exchange import clear, exchange_folder
from tidegate.spark.round_task import HOME, places

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.core.rdd import RDD
    from pyspark.sql import SparkSession

    from tidegate.spark.round_task import Outcome


# -- slots ----------------------------------------------------------------------------------------

VARIABLE: Final = "TIDEGATE_SLOT"
SlotFunction = Callable[[int, Iterable[Any]], Iterable[bytes]]


class Slots:
    """Runs functions on the slots of one app; `owner` separates its processes from those of other apps of the
    session."""

    def __init__(self, context: SparkContext, count: int, owner: str) -> None:
        self.count = count
        self._owner = owner
        self._context = context
        self._nothing = context.parallelize([b""], 1)  # one row makes one task; created once
        _ = self._nothing._jrdd

    def on_each(self, functions: Mapping[int, SlotFunction]) -> RDD[bytes]:
        """Run each slot's function, without input."""
        return self._union([self._placed(self._nothing, slot, work) for slot, work in functions.items()])

    def shuffled(
        self, senders: Mapping[int, SlotFunction], receivers: Mapping[int, SlotFunction]
    ) -> RDD[bytes]:
        """Shuffle: senders yield a slot (eight bytes) and a blob in turn; receivers get the blobs for their slot."""
        sent = [self._placed(self._nothing, slot, send, raw=True) for slot, send in senders.items()]
        blobs = self._exchanged(self._union(sent))
        return self._union(
            [self._placed(self._part(blobs, slot), slot, work) for slot, work in receivers.items()]
        )

    def _placed(self, before: RDD[Any], slot: int, work: SlotFunction, *, raw: bool = False) -> RDD[bytes]:
        """Apply `work` to an RDD of one partition, in the process of this slot; `raw` passes the bytes unchanged."""
        from pyspark.core.rdd import PipelinedRDD

        placed: Any = PipelinedRDD(before, work)
        placed._bypass_serializer = raw
        placed.ctx = self._view(slot)
        _ = placed._jrdd  # serialises the function and its environment now, not when the job runs
        placed.ctx = self._context
        result: RDD[bytes] = placed
        return result

    def _view(self, slot: int) -> SparkContext:
        """Return a copy of the context with one more environment variable, which shares everything else."""
        view = object.__new__(type(self._context))
        view.__dict__.update(self._context.__dict__)
        view.environment = self._context.environment | {VARIABLE: f"{self._owner}/{slot}"}
        return view

    def _union(self, parts: list[RDD[bytes]]) -> RDD[bytes]:
        return parts[0] if len(parts) == 1 else self._context.union(parts)

    def _exchanged(self, sent: RDD[bytes]) -> RDD[bytes]:
        """Return the pairs by their slot, through Spark's shuffle, as `RDD.partitionBy` does it."""
        from pyspark.core.rdd import RDD
        from pyspark.serializers import NoOpSerializer

        jvm: Any = self._context._jvm
        pairs = jvm.PairwiseRDD(sent._jrdd.rdd()).asJavaPairRDD()
        by_slot = pairs.partitionBy(jvm.PythonPartitioner(self.count, id(self)))
        return RDD(jvm.PythonRDD.valueOfPair(by_slot), self._context, NoOpSerializer())

    def _part(self, blobs: RDD[bytes], slot: int) -> RDD[bytes]:
        """Return one partition of the shuffle as an RDD, so that a slot's process can be chosen for it."""
        from pyspark.core.rdd import RDD

        jvm: Any = self._context._jvm
        this_one = jvm.PythonUtils.toSeq([slot]).toSet()  # a Scala set is a predicate
        pruned = jvm.org.apache.spark.rdd.PartitionPruningRDD.create(blobs._jrdd.rdd(), this_one)
        return RDD(pruned.toJavaRDD(), self._context, blobs._jrdd_deserializer)


# -- engine ---------------------------------------------------------------------------------------

_LONGEST_CAUSE: Final = 2000


class SparkEngine:
    """Executes the rounds of one app as jobs of a Spark session."""

    name = "spark"

    def __init__(self, spark: SparkSession, setup: WorkerSetup, *, slots: int | None = None) -> None:
        """`slots` is how many tasks run at once, each in a process of its own; the default is Spark's parallelism."""
        from pyspark.serializers import CloudPickleSerializer

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
        self._setup: bytes = CloudPickleSerializer().dumps(setup)  # type: ignore[no-untyped-call]
        self._digest = hashlib.sha256(self._setup).hexdigest()
        self._slots = Slots(self._context, self.slots, f"{setup.app}/{self._digest[:16]}")
        self._beside = -(-self.slots // _executors(self._context))  # processes on one machine
        self._exchange = exchange_folder(self._context) if self._rekeyed else None
        self._guard = threading.Lock()
        self._group: str | None = None  # of the running job
        self._closed = False
        self.outcomes: tuple[Outcome, ...] = ()  # of the last round, for display

    def place(self, flow: str, task: int) -> int:
        return self._places[flow, task]

    def run(self, order: RoundOrder) -> RoundResult:
        """Execute one round; raise what a task raised, and `UnavailableError` if Spark gave up."""
        from tidegate.spark.round_task import Outcome

        if not order.tasks and not order.sources:
            return RoundResult((), ())
        try:
            with self._in_group(order):
                rows = self._collected(self._job(order))
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
            self._context.cancelJobGroup(group)

    def close(self) -> None:
        """Mark the engine closed. Processes end by themselves after a minute without work."""
        self._closed = True
        self.cancel()

    # -- one job -------------------------------------------------------------------------------------

    def _job(self, order: RoundOrder) -> RDD[bytes]:
        from tidegate.spark.round_task import read_and_split, work_on

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

    def _assigned(self, order: RoundOrder, sources: list[SourceOrder], tasks: list[TaskOrder]) -> Any:
        from tidegate.spark.round_task import Assignment

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
            self._context.cancelJobGroup(group)
            raise
        finally:
            with self._guard:
                self._group = None
            self._context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
            self._context.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]

    def _collected(self, job: RDD[bytes]) -> list[bytes]:
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException

        try:
            return job.collect()
        except (Py4JError, PySparkException, OSError) as error:
            cause = str(error)[:_LONGEST_CAUSE]
            state = "the round was cancelled" if self._closed else "Spark could not finish a round"
            raise UnavailableError(f"{state}; nothing of it counts, it can be done again: {cause}") from error


def _executors(context: Any) -> int:
    """Return the number of machines or containers that run tasks; a local session counts as one."""
    return max(1, int(context._jsc.sc().getExecutorMemoryStatus().size()) - 1)
