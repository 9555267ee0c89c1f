"""Work done by other processes of this machine: a `Runner` for audits where there is no Spark.

A process is started once for each worker and takes one item after the other; results come as they are ready. What a
worker raises is raised here, and no further item begins.

Thread rule: one thread.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from tidegate.errors import InvalidError, UnavailableError

Item = TypeVar("Item")
Result = TypeVar("Result")


class Processes:
    """So many processes, which end with `close`."""

    def __init__(self, workers: int) -> None:
        if not 1 <= workers <= 1024:
            raise InvalidError(f"{workers} processes: choose 1 to 1024")
        self.workers = workers
        # a fresh interpreter each: a fork would copy locks that threads of this one may hold
        self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """The results as they come."""
        futures = [self._pool.submit(work, item) for item in items]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise UnavailableError(
                "a process of the audit died, most likely for want of memory; take fewer with --jobs"
            ) from error
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """Wait for what is running, start nothing more."""
        self._pool.shutdown(cancel_futures=True)
