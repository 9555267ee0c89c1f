"""Audits, comparisons and certificates on Spark: a `Runner` whose workers are Spark's.

All items are one job with one task each; a job for every item would cost the JVM more than a small range costs its
worker. A job returns its results at its end; an accumulator delivers each one when its task is done, once per task,
for the progress line. Workers open files by path: on a cluster the folder must be mounted at the same place
everywhere; `kafka://` needs nothing. A `TidegateError` keeps its type.

Thread rule: one thread calls; a thread of the run submits the job to Spark.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tidegate.errors import TidegateError, UnavailableError
from tidegate.spark.errors import Failure, describe, rebuild
from tidegate.spark.workers import own_garbage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Item = TypeVar("Item")
Result = TypeVar("Result")

SCHEDULES_ONLY: Final = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
"""For a session that does nothing but audit. Its JVM hands out tasks, and compiling itself to be quick at that took it
more processor time than it ever saves: 4 s of start-up, and half a second beside every audit."""
_LOOK_SECONDS: Final = 0.1
_jobs = count(1)


class SparkRunner:
    """A runner on Spark's cores."""

    def __init__(self, spark: SparkSession) -> None:
        self._context: Any = spark.sparkContext
        self.workers = int(self._context.defaultParallelism)

    def run(self, work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Yield the results as they arrive."""
        if not items:
            return
        group = f"tidegate-audit-{next(_jobs)}"
        answers = self._context.accumulator(deque(), _Answers())
        left = len(items)
        with ThreadPoolExecutor(1, "tidegate-audit") as pool:
            job = pool.submit(self._finish, group, partial(_answer, work, answers), items)
            try:
                while left:
                    # looked at first: a finished job has all its results
                    is_done = bool(wait([job], _LOOK_SECONDS).done)
                    while answers.value:
                        answer = answers.value.popleft()
                        if isinstance(answer, Failure):
                            raise rebuild(answer)
                        left -= 1
                        yield answer
                    if is_done and left:
                        job.result()
                        raise UnavailableError(
                            f"Spark finished, but {left} of {len(items)} results are missing; start again"
                        )
            finally:
                self._end(group, job)

    def _finish(self, group: str, answer: Callable[[Any], None], items: Sequence[Any]) -> None:
        from tidegate.spark.compat import failures_told

        with failures_told(lambda: "Spark could not finish the audit; start it again"):
            self._context.setJobGroup(group, "ranges of topics, read by Tidegate", True)
            self._context.parallelize(items, len(items)).foreach(answer)

    def _end(self, group: str, job: Future[None]) -> None:
        """Cancel the rest; a job that Spark has not started yet is cancelled at the next check."""
        while not wait([job], _LOOK_SECONDS).done:
            self._context.cancelJobGroup(group)


class _Answers:
    """Accumulates results: they are concatenated until they are taken."""

    def zero(self, _value: deque[Any]) -> deque[Any]:
        return deque()

    def addInPlace(self, value1: deque[Any], value2: deque[Any]) -> deque[Any]:
        value1.extend(value2)
        return value1


def _answer(work: Callable[[Any], Any], answers: Any, item: Any) -> None:
    """In a worker: return a `TidegateError` as a value; Spark retries after any other error."""
    with own_garbage():
        try:
            answers.add([work(item)])
        except TidegateError as error:
            answers.add([describe(error)])
