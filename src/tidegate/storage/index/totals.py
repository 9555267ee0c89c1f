"""What an index keeps up to date beside its buckets: totals, and which buckets maintenance should look at.

Both follow the buckets change by change, so that nobody ever walks them all to find out.

Thread rule: guarded by the lock of the index that owns them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.errors import InternalError
from tidegate.storage.index.entries import Bucket, RunEntry


class Totals:
    """Rows, bytes and charge of all runs; none ever falls below zero."""

    __slots__ = ("charge", "nbytes", "rows", "runs")

    def __init__(self) -> None:
        self.rows = self.charge = self.nbytes = self.runs = 0

    def add(self, runs: Sequence[RunEntry]) -> None:
        self._change(runs, 1)

    def take(self, runs: Sequence[RunEntry]) -> None:
        self._change(runs, -1)
        if min(self.rows, self.charge, self.nbytes, self.runs) < 0:
            raise InternalError(
                f"an index lost count: {self.runs} runs with {self.rows} rows, {self.nbytes} bytes, "
                f"{self.charge} charged; restore the task from its last checkpoint and report this"
            )

    def _change(self, runs: Sequence[RunEntry], sign: int) -> None:
        for run in runs:
            self.rows += sign * run.rows
            self.charge += sign * run.charge
            self.nbytes += sign * run.nbytes
        self.runs += sign * len(runs)


class Noted:
    """Buckets with a run that is not stored, with a hot copy, and with more than one run."""

    __slots__ = ("crowded", "hot", "unstored")

    def __init__(self) -> None:
        self.unstored: set[int] = set()
        self.hot: set[int] = set()
        self.crowded: set[int] = set()

    def note(self, bucket: Bucket) -> None:
        """The bucket is like this now."""
        self.forget(bucket.start)
        if any(run.stored is None for run in bucket.runs):
            self.unstored.add(bucket.start)
        if any(run.hot is not None for run in bucket.runs):
            self.hot.add(bucket.start)
        if len(bucket.runs) > 1:
            self.crowded.add(bucket.start)

    def forget(self, start: int) -> None:
        """The bucket is gone."""
        for noted in (self.unstored, self.hot, self.crowded):
            noted.discard(start)
