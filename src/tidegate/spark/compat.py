"""PySpark's private names: every one that Tidegate uses, and the versions of PySpark that have them.

All other modules use PySpark's public API (`tests/spark/test_compat.py`). What has no public equivalent:

- a task in a process of one's choice. Spark reuses a Python worker for tasks whose environment is equal, so each slot
  has an environment variable of its own (`Slots`);
- a shuffle of bytes by a number. `RDD.partitionBy` would pickle every blob twice;
- conversions between Spark's and Arrow's schemas, functions over Arrow columns, and the errors of Py4J.

Import this module where Spark is used and not at start-up: it imports pyspark.

Thread rule: a `Slots` belongs to the thread that runs rounds; the functions may be called from any thread.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import pyspark
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.core.rdd import RDD, PipelinedRDD
from pyspark.errors import PySparkException
from pyspark.serializers import CloudPickleSerializer, NoOpSerializer
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from tidegate.errors import UnavailableError

__all__ = ["SPARK_ERRORS", "Slots", "arrow_function", "executors", "failures_told", "from_arrow_schema", "is_running",
           "pickled", "to_arrow_schema", "unpickled"]  # fmt: skip

FIRST_VERSION: Final = (4, 2)
NEXT_VERSION: Final = (4, 4)
"""The first version that is not known to have these names; `pyproject.toml` has the same bounds."""


def check_version(version: str) -> None:
    """Raise `UnavailableError` for a version of PySpark that may lack these names."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if not FIRST_VERSION <= (major, minor) < NEXT_VERSION:
        bounds = f">={_dotted(FIRST_VERSION)},<{_dotted(NEXT_VERSION)}"
        raise UnavailableError(
            f"Tidegate needs pyspark{bounds}, and this is {version}; run: pip install 'pyspark{bounds}'"
        )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


check_version(pyspark.__version__)


# -- sessions and errors --------------------------------------------------------------------------

SPARK_ERRORS: Final[tuple[type[Exception], ...]] = (Py4JError, PySparkException, OSError)
"""With these the driver reports that a job failed, or that Java is gone."""
_LONGEST_CAUSE: Final = 2000


@contextmanager
def failures_told(what: Callable[[], str]) -> Iterator[None]:
    """Raise Spark's errors as `UnavailableError`, with `what()` in front."""
    try:
        yield
    except SPARK_ERRORS as error:
        raise UnavailableError(f"{what()}: {str(error)[:_LONGEST_CAUSE]}") from error


def is_running() -> bool:
    """Whether this process has a Spark context."""
    return SparkContext._active_spark_context is not None


def executors(context: SparkContext) -> int:
    """Return the number of machines or containers that run tasks; a local session counts as one."""
    jvm_context: Any = context._jsc.sc()
    return max(1, int(jvm_context.getExecutorMemoryStatus().size()) - 1)


# -- values and functions -------------------------------------------------------------------------


def pickled(value: Any) -> bytes:
    """Encode a value for Spark's workers, with the functions that it holds."""
    encoded: bytes = CloudPickleSerializer().dumps(value)  # type: ignore[no-untyped-call]
    return encoded


def unpickled(data: bytes) -> Any:
    """Decode what `pickled` encoded, in a worker."""
    return CloudPickleSerializer().loads(data)  # type: ignore[no-untyped-call]


def arrow_function(function: Callable[..., Any], returns: str) -> Callable[..., Any]:
    """Return a function of Arrow arrays as one of Spark's columns."""
    make: Any = arrow_udf  # its stubs do not cover functions of any number of columns
    made: Callable[..., Any] = make(function, returns)
    return made


VARIABLE: Final = "TIDEGATE_SLOT"
SlotFunction = Callable[[int, Iterable[Any]], Iterable[bytes]]


_in_use: set[int] = set()
_in_use_lock = threading.Lock()


class Slots:
    """Runs functions on the slots of one app, in processes that no other running app of the session uses.

    A run gets the lowest number that no other run has, and its processes are named by it. A later run with the same
    number uses them again: they have loaded what a task needs, which takes a second or two.
    """

    def __init__(self, context: SparkContext, count: int) -> None:
        self.count = count
        with _in_use_lock:
            self._number = next(number for number in itertools.count() if number not in _in_use)
            _in_use.add(self._number)
        self._context = context
        self._nothing = context.parallelize([b""], 1)  # one row makes one task; created once
        _ = self._nothing._jrdd

    def free(self) -> None:
        """Leave the processes to the next run; not to be called while a task may still be running in one."""
        with _in_use_lock:
            _in_use.discard(self._number)

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
        view.environment = self._context.environment | {VARIABLE: f"{self._number}/{slot}"}
        return view

    def _union(self, parts: list[RDD[bytes]]) -> RDD[bytes]:
        return parts[0] if len(parts) == 1 else self._context.union(parts)

    def _exchanged(self, sent: RDD[bytes]) -> RDD[bytes]:
        """Return the pairs by their slot, through Spark's shuffle, as `RDD.partitionBy` does it."""
        jvm: Any = self._context._jvm
        pairs = jvm.PairwiseRDD(sent._jrdd.rdd()).asJavaPairRDD()
        by_slot = pairs.partitionBy(jvm.PythonPartitioner(self.count, id(self)))
        return RDD(jvm.PythonRDD.valueOfPair(by_slot), self._context, NoOpSerializer())

    def _part(self, blobs: RDD[bytes], slot: int) -> RDD[bytes]:
        """Return one partition of the shuffle as an RDD, so that a slot's process can be chosen for it."""
        jvm: Any = self._context._jvm
        this_one = jvm.PythonUtils.toSeq([slot]).toSet()  # a Scala set is a predicate
        pruned = jvm.org.apache.spark.rdd.PartitionPruningRDD.create(blobs._jrdd.rdd(), this_one)
        return RDD(pruned.toJavaRDD(), self._context, blobs._jrdd_deserializer)
