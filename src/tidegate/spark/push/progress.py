"""How a push goes: which step, how much of it is done, when it will probably be ready.

While tasks send, Spark says how many of them are done; while they ingest, the commits in the state folder do, because
tasks are other processes. The estimate of what is left is the time so far, stretched to the share that is not done.

Also owns the name under which the push's Spark jobs run, so that an interrupted push ends them.

Thread rule: `step` from the push's thread; a thread of its own looks and tells.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tidegate.clock import Clock
from tidegate.tables.versions.catalog import TableVersion
from tidegate.tables.versions.push import PushPlan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVERY_MS: Final = 500


@dataclass(frozen=True, slots=True)
class PushProgress:
    """One look. `done` of `total` are tasks; `left_ms` is None while nothing can be said."""

    table: str
    version: int
    step: str
    done: int
    total: int
    records: int
    elapsed_ms: int
    left_ms: int | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "doing": self.step,
            "table": self.table,
            "version": self.version,
            "done": self.done,
            "total": self.total,
            "unit": "tasks",
            "percent": round(100 * self.done / self.total) if self.total else None,
            "records": self.records,
            "elapsed_ms": self.elapsed_ms,
            "left_ms": self.left_ms,
        }


class Watcher:
    """Looks at a push while it runs, and tells."""

    def __init__(
        self,
        spark: SparkSession,
        group: str,
        plan: PushPlan,
        told: Callable[[PushProgress], None] | None,
        clock: Clock,
    ) -> None:
        self._context: Any = spark.sparkContext
        self._group = f"tidegate-push-{group}"
        self._plan, self._told, self._clock = plan, told, clock
        self._lock = threading.Lock()
        self._step, self._version, self._records = "starting", 0, 0
        self._began_ms = clock.monotonic_ms()
        self._jobs_before: set[int] = set()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watcher:
        self._context.setJobGroup(self._group, f"push into {self._plan.table}", True)
        if self._told is not None:
            self._thread = threading.Thread(target=self._run, name="tidegate-push-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopping.set()
        if kind is not None:
            self._context.cancelJobGroup(self._group)
        if self._thread is not None:
            self._thread.join()
        for name in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
            self._context.setLocalProperty(name, None)

    def step(self, name: str, version: TableVersion, *, total: int = 0) -> None:
        """The next step begins."""
        with self._lock:
            self._step, self._version, self._records = name, version.number, total
            self._began_ms = self._clock.monotonic_ms()
            self._jobs_before = set(self._context.statusTracker().getJobIdsForGroup(self._group))
        self._tell()

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_MS / 1000):
            self._tell()

    def _tell(self) -> None:
        if self._told is None:
            return
        with self._lock:
            done, total = self._tasks()
            elapsed_ms = self._clock.monotonic_ms() - self._began_ms
            left_ms = None if not 0 < done < total else elapsed_ms * (total - done) // done
            seen = PushProgress(
                self._plan.table, self._version, self._step, done, total, self._records, elapsed_ms, left_ms
            )
        self._told(seen)

    def _tasks(self) -> tuple[int, int]:
        """Tasks done and to be done in this step's jobs, stages that Spark has not begun included."""
        tracker = self._context.statusTracker()
        done = total = 0
        for job in set(tracker.getJobIdsForGroup(self._group)) - self._jobs_before:
            info = tracker.getJobInfo(job)
            for stage in () if info is None else info.stageIds:
                seen = tracker.getStageInfo(stage)
                done += 0 if seen is None else seen.numCompletedTasks
                total += self._plan.partitions if seen is None else seen.numTasks
        return done, total
