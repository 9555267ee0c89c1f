"""Audits, comparisons and certificates on Spark: a `Runner` whose workers are Spark's.

Every item is a job of one task, as many at once as Spark has cores, so that results (and with them a line of
progress) come one by one. Workers open files by path: on a cluster the folder must be mounted at the same place
everywhere; `kafka://` needs nothing. An error of ours comes back as it was raised.

Thread rule: one thread calls; the jobs are given to Spark by threads of this runner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tidegate.errors import TidegateError, UnavailableError
from tidegate.spark.rounds.failures import Failure, describe, rebuild
from tidegate.spark.workers import own_garbage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST_AT_ONCE: Final = 128
_LONGEST_CAUSE: Final = 2000


class SparkRunner:
    """Spark's cores as workers."""

    def __init__(self, spark: SparkSession) -> None:
        self._context: Any = spark.sparkContext
        self.workers = int(self._context.defaultParallelism)

    def run(self, work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """The results as they come."""
        if not items:
            return
        with ThreadPoolExecutor(min(self.workers, len(items), _MOST_AT_ONCE)) as pool:
            futures = [pool.submit(self._one, work, item) for item in items]
            try:
                for future in as_completed(futures):
                    outcome = future.result()
                    if isinstance(outcome, Failure):
                        raise rebuild(outcome)
                    yield outcome
            finally:
                for future in futures:
                    future.cancel()

    def _one(self, work: Callable[[Item], Result], item: Item) -> Result | Failure:
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException

        try:
            found: list[Any] = self._context.parallelize([item], 1).map(partial(_guarded, work)).collect()
        except (Py4JError, PySparkException, OSError) as error:
            cause = str(error)[:_LONGEST_CAUSE]
            raise UnavailableError(f"Spark could not finish the audit; start it again: {cause}") from error
        outcome: Result | Failure = found[0]
        return outcome


def _guarded(work: Callable[[Any], Any], item: Any) -> Any:
    """In a worker: what we raise on purpose is brought back, all else Spark tries again elsewhere."""
    with own_garbage():
        try:
            return work(item)
        except TidegateError as error:
            return describe(error)
