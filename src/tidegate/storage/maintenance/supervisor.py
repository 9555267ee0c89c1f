"""Schedules maintenance: in the background for a server, inline with a time budget for a task.

The work of a task is a pass: compact its cold buckets and relieve memory, store and evict cold buckets, rehydrate
buckets that are read repeatedly, move runs out of packs that are mostly dead, and delete retired packs. A pass is one
generator built from the operations' generators, so it can stop after any phase and be resumed later, and closing it
leaves nothing half done.

S1  the newest buckets of a store (`hot_bucket_count`) are skipped because they are still being written. One is
    compacted only if it has so many runs that are small or overlap in time that reads would be slow
    (`compaction.is_crowded`).
S2  an error stops the task: every later call for the task raises it (see `TaskStorage`). An unreachable backend does no
    harm: a background job tries again at its next turn, and stops the task only after `UNAVAILABLE_MS` without success;
    an inline pass raises the error to its caller, who may call again.
S3  calling `start` twice creates one set of jobs; `stop` returns when none of them runs.
S4  an inline pass stops only where it rests or waits, with nothing half done and nothing held that others wait for. So
    a checkpoint need not end it, and no work is lost. Time beyond its budget is deducted from later calls.
S5  stored runs are merged only when there are many, because merging writes them again.
S6  a rehydrated bucket stays until relief drops it or new rows arrive; their memory is limited by the low watermarks,
    so that rehydration never triggers relief.

Background jobs run on the injected scheduler; no thread is started here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tidegate.errors import UnavailableError
from tidegate.scheduling import Scheduled, Scheduler
from tidegate.storage.maintenance.compaction import compact, has_reclaimable_rows, is_crowded
from tidegate.storage.maintenance.dump import dump, measure, rehydrate, relieve, repack, sparse_segments
from tidegate.storage.maintenance.operations import RESTING, WAITING, Operation
from tidegate.storage.parts import AttachedStore, StorageParts, TaskStorage
from tidegate.storage.spec import Merge

CROWDED_HOT = 4  # times max_deltas runs, and a bucket is compacted although it is among the newest
DUMP_BUCKETS = 64  # buckets stored in one round, so that a pass has many places to stop
REST_BYTES = 4 << 20  # merged at a time by an inline pass: some 20 ms
UNAVAILABLE_MS = 60_000  # how long a background job retries while the backend is out of reach
UNAVAILABLE_TRIES = 4  # and how often at least, where its turns are further apart


@dataclass(slots=True)
class Upkeep:
    """The jobs and the unfinished inline pass of one task."""

    jobs: list[Scheduled] = field(default_factory=list)
    working: threading.Lock = field(default_factory=threading.Lock)
    stopping: threading.Event = field(default_factory=threading.Event)
    inline: Operation[None] | None = None
    overrun_ms: int = 0  # what inline passes took beyond their budgets so far


class MaintenanceSupervisor:
    """Runs maintenance for the tasks of a worker."""

    def __init__(self, parts: StorageParts, scheduler: Scheduler) -> None:
        self._parts = parts
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._upkeep: dict[str, Upkeep] = {}

    # -- in the background -----------------------------------------------------------------------

    def start(self, task: TaskStorage) -> None:
        """Start the task's background maintenance, until `stop`; idempotent."""
        config = self._parts.config
        if isinstance(task.failure, UnavailableError):
            task.failure = None  # nothing was harmed: data stayed where it was, and the cause may be gone
        task.check()
        upkeep = self._of(task)
        with self._lock:
            if upkeep.jobs:
                return
            upkeep.stopping.clear()
            for name, interval_ms, make in (
                ("compact", config.compaction_interval_ms, self.compacting),
                ("dump", config.dump_interval_ms, self.dumping),
                ("delete", config.dump_interval_ms, self.reclaiming),
            ):
                upkeep.jobs.append(
                    self._scheduler.every(
                        max(1, interval_ms),
                        self._job(task, upkeep, make),
                        f"{task.task}/{name}",
                        initial_delay_ms=interval_ms,
                    )
                )

    def stop(self, task: TaskStorage) -> bool:
        """Stop the task's background jobs and its inline pass, at a safe point; returns whether jobs were running."""
        upkeep = self._of(task)
        with self._lock:
            jobs, upkeep.jobs = upkeep.jobs, []
        for job in jobs:
            job.cancel()
        upkeep.stopping.set()
        with upkeep.working:  # a job that runs now ends after its phase
            pass
        self.close_inline(task)
        return bool(jobs)

    def is_running(self, task: TaskStorage) -> bool:
        return bool(self._of(task).jobs)

    def _job(
        self, task: TaskStorage, upkeep: Upkeep, make: Callable[[TaskStorage], Operation[None]]
    ) -> Callable[[], None]:
        tries, first_ms = 0, 0  # those that found the backend out of reach, since one that did not

        def run() -> None:
            nonlocal tries, first_ms
            with upkeep.working:
                if upkeep.stopping.is_set() or task.failure is not None:
                    return
                operation = make(task)
                try:
                    self._drive(operation, upkeep)
                    tries = 0
                except UnavailableError as error:
                    now_ms = self._parts.clock.monotonic_ms()
                    tries, first_ms = tries + 1, first_ms if tries else now_ms
                    self._parts.stats.retried(task.task)
                    if tries >= UNAVAILABLE_TRIES and now_ms - first_ms >= UNAVAILABLE_MS:
                        self._failed(task, error)
                except Exception as error:  # noqa: BLE001 - a job's edge: kept, and raised by the task's next call
                    self._failed(task, error)
                finally:
                    operation.close()

        return run

    def _drive(self, operation: Operation[None], upkeep: Upkeep) -> None:
        waits = 0
        for phase in operation:
            if upkeep.stopping.is_set():
                return
            waits = waits + 1 if phase == WAITING else 0
            if waits:
                if waits > self._parts.config.scratch_timeout_ms:
                    return  # a slot or a bucket stays locked: the next tick tries again
                self._parts.clock.sleep_ms(1)

    def _failed(self, task: TaskStorage, error: Exception) -> None:
        task.fail(error)
        self._parts.stats.failed(task.task)
        upkeep = self._of(task)
        with self._lock:
            jobs, upkeep.jobs = upkeep.jobs, []
        for job in jobs:
            job.cancel()

    # -- inline ----------------------------------------------------------------------------------

    def maintain(self, task: TaskStorage, budget_ms: int) -> bool:
        """Work on the task's pass for about `budget_ms`; True when the pass is finished.

        The next call continues, also after a checkpoint (S4). At least one operation runs, however small the budget,
        unless earlier calls exceeded theirs.
        """
        task.check()
        upkeep, clock = self._of(task), self._parts.clock
        if upkeep.overrun_ms > budget_ms:
            upkeep.overrun_ms -= budget_ms
            return False
        began_ms, budget_ms = clock.monotonic_ms(), budget_ms - upkeep.overrun_ms
        if upkeep.inline is None:
            upkeep.inline = self._pass(task)
        try:
            for phase in upkeep.inline:
                took_ms = clock.monotonic_ms() - began_ms
                if phase in (RESTING, WAITING) and took_ms >= budget_ms:
                    upkeep.overrun_ms = took_ms - budget_ms
                    return False
                if phase == WAITING:
                    clock.sleep_ms(1)
        except BaseException as error:
            upkeep.inline = None
            if not isinstance(error, UnavailableError) and isinstance(error, Exception):
                self._failed(task, error)
            raise
        upkeep.inline = None
        upkeep.overrun_ms = max(0, clock.monotonic_ms() - began_ms - budget_ms)
        return True

    def close_inline(self, task: TaskStorage) -> None:
        """Close an unfinished inline pass and undo what it has not published."""
        upkeep = self._of(task)
        if upkeep.inline is not None:
            upkeep.inline.close()
            upkeep.inline = None

    def forget(self, task: TaskStorage) -> None:
        """Drop the task's jobs and pass, because it leaves the worker."""
        self.stop(task)
        with self._lock:
            del self._upkeep[task.task]

    # -- the parts of a pass ---------------------------------------------------------------------

    def compacting(self, task: TaskStorage, *, rest_bytes: int | None = None) -> Operation[None]:
        """Compact cold buckets, with a rest after every `rest_bytes`; then bring memory below its limits."""
        for store in task.attached():
            for bucket in self._crowded(store):
                strip = rest_bytes if self._cold(store, [bucket]) else None
                while (yield from compact(self._parts, task, store, bucket, rest_bytes=strip)):
                    yield RESTING
                    if not self._is_worth(store, bucket):
                        break
        yield from relieve(self._parts, task)
        yield RESTING

    def dumping(self, task: TaskStorage) -> Operation[None]:
        """Store cold buckets and drop their hot copies; bring back those that are read again and again, as far as
        there is room (S6)."""
        for store in task.attached():
            index = store.state.index
            found = index.hot_buckets()
            kept = store.cold_reads.kept(found) - set(index.unstored_buckets())
            hot = [bucket for bucket in self._cold(store, found) if bucket not in kept]
            for start in range(0, len(hot), DUMP_BUCKETS):
                some = hot[start : start + DUMP_BUCKETS]
                yield from dump(self._parts, task, [(store, some)], evict=True)
                yield RESTING
            for bucket in store.cold_reads.take():
                if (yield from rehydrate(self._parts, task, store, bucket)):
                    store.cold_reads.keep(bucket)
                yield RESTING

    def repacking(self, task: TaskStorage) -> Operation[None]:
        """Rewrite the live runs of packs that are mostly dead."""
        yield from measure(self._parts, task)
        for store in task.attached():
            for segment, packs in sparse_segments(self._parts, task, store).items():
                yield from repack(self._parts, task, store, segment, packs)
                yield RESTING

    def deleting(self, task: TaskStorage) -> Operation[None]:
        """Delete retired packs without references."""
        parts = self._parts
        deletion = parts.retirement.delete_once(task.task, parts.config.delete_budget)
        for pack in deletion.deleted:
            parts.packs.forget(pack)
        parts.use.forget(task.task, deletion.deleted)
        parts.stats.deleted(task.task, packs=len(deletion.deleted), failed=len(deletion.failed))
        yield "deleted"

    def reclaiming(self, task: TaskStorage) -> Operation[None]:
        """Free unused bytes on the backend: repack, then delete."""
        yield from self.repacking(task)
        yield from self.deleting(task)

    def _pass(self, task: TaskStorage) -> Operation[None]:
        yield from self.compacting(task, rest_bytes=REST_BYTES)
        yield from self.dumping(task)
        yield from self.reclaiming(task)

    def _crowded(self, store: AttachedStore) -> Iterator[int]:
        """Buckets to compact: cold ones that are worth it, and newest ones with far too many runs (S1)."""
        index = store.state.index
        crowded = index.crowded_buckets()
        if store.spec.merge is Merge.LAST:  # a lone run of tombstones is unsettled too; fresh runs are hot
            crowded = sorted({*crowded, *index.hot_buckets()})
        cold = set(self._cold(store, crowded))
        limit = CROWDED_HOT * self._parts.config.max_deltas
        for bucket in crowded:
            if bucket in cold:
                if self._is_worth(store, bucket):
                    yield bucket
            elif (found := index.snapshot(bucket)) is not None and is_crowded(found.runs, limit):
                yield bucket

    def _is_worth(self, store: AttachedStore, bucket: int) -> bool:
        index, most = store.state.index, self._parts.config.max_deltas
        found = index.snapshot(bucket)
        if found is None:
            return False
        return (
            len({run.order for run in found.runs}) > most
            or (
                index.should_compact(bucket, max_deltas=most)
                and any(run.stored is None for run in found.runs)
            )
            or has_reclaimable_rows(store.spec.merge, found.runs)
        )

    def _cold(self, store: AttachedStore, buckets: list[int]) -> list[int]:
        if not store.hot_buckets:
            return buckets
        newest = store.state.index.all_buckets()[-store.hot_buckets :]
        return [bucket for bucket in buckets if not newest or bucket < newest[0]]

    def _of(self, task: TaskStorage) -> Upkeep:
        with self._lock:
            return self._upkeep.setdefault(task.task, Upkeep())
