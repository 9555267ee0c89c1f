"""Slots: Python processes that are met again, and the RDDs that reach them.

Spark has a pool of idle Python processes for each set of environment variables a function is to run with, and takes any
of the pool. So each slot of an app gets a variable of its own: its pool has one process, and the same slot of the next
round meets it, as long as it runs on the same executor and was not idle for a minute. A slot is one RDD of one
partition; a round is their union.

P1  a slot has at most one task at a time in a job; two would make its pool grow, and the second process starts cold.
P2  the session's own environment is never changed: other apps and jobs use it from other threads at the same time.

Thread rule: one thread at a time for one `Slots`; several on one context do not disturb each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.core.rdd import RDD

VARIABLE: Final = "TIDEGATE_SLOT"
SlotFunction = Callable[[int, Iterable[Any]], Iterable[bytes]]


class Slots:
    """Functions on the slots of one app; `owner` tells its processes from those of other apps of the session."""

    def __init__(self, context: SparkContext, count: int, owner: str) -> None:
        self.count = count
        self._owner = owner
        self._context = context
        self._nothing = context.parallelize([b""], 1)  # one row, so that there is one task; made once
        _ = self._nothing._jrdd

    def on_each(self, functions: Mapping[int, SlotFunction]) -> RDD[bytes]:
        """Each slot's function, without input."""
        return self._union([self._placed(self._nothing, slot, work) for slot, work in functions.items()])

    def shuffled(
        self, senders: Mapping[int, SlotFunction], receivers: Mapping[int, SlotFunction]
    ) -> RDD[bytes]:
        """Senders yield a slot (eight bytes) and a blob in turn; receivers are given the blobs for their slot."""
        sent = [self._placed(self._nothing, slot, send, raw=True) for slot, send in senders.items()]
        blobs = self._exchanged(self._union(sent))
        return self._union(
            [self._placed(self._part(blobs, slot), slot, work) for slot, work in receivers.items()]
        )

    def _placed(self, before: RDD[Any], slot: int, work: SlotFunction, *, raw: bool = False) -> RDD[bytes]:
        """`work` over an RDD of one partition, in the process of this slot; `raw` leaves the bytes as they are."""
        from pyspark.core.rdd import PipelinedRDD

        placed: Any = PipelinedRDD(before, work)
        placed._bypass_serializer = raw
        placed.ctx = self._view(slot)
        _ = placed._jrdd  # the function with its environment is made here, not when the job runs
        placed.ctx = self._context
        result: RDD[bytes] = placed
        return result

    def _view(self, slot: int) -> SparkContext:
        """The context with one more environment variable, as a copy that shares everything else (P2)."""
        view = object.__new__(type(self._context))
        view.__dict__.update(self._context.__dict__)
        view.environment = self._context.environment | {VARIABLE: f"{self._owner}/{slot}"}
        return view

    def _union(self, parts: list[RDD[bytes]]) -> RDD[bytes]:
        return parts[0] if len(parts) == 1 else self._context.union(parts)

    def _exchanged(self, sent: RDD[bytes]) -> RDD[bytes]:
        """The pairs by their slot: Spark's shuffle, as `RDD.partitionBy` asks for it."""
        from pyspark.core.rdd import RDD
        from pyspark.serializers import NoOpSerializer

        jvm: Any = self._context._jvm
        pairs = jvm.PairwiseRDD(sent._jrdd.rdd()).asJavaPairRDD()
        by_slot = pairs.partitionBy(jvm.PythonPartitioner(self.count, id(self)))
        return RDD(jvm.PythonRDD.valueOfPair(by_slot), self._context, NoOpSerializer())

    def _part(self, blobs: RDD[bytes], slot: int) -> RDD[bytes]:
        """One partition of the shuffle as an RDD, so that it can be given its slot's process."""
        from pyspark.core.rdd import RDD

        jvm: Any = self._context._jvm
        this_one = jvm.PythonUtils.toSeq([slot]).toSet()  # a Scala set is a function to true or false
        pruned = jvm.org.apache.spark.rdd.PartitionPruningRDD.create(blobs._jrdd.rdd(), this_one)
        return RDD(pruned.toJavaRDD(), self._context, blobs._jrdd_deserializer)
