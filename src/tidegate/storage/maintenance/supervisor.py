"""Schedules maintenance: in the background for a server, inline with a time budget for a task.

The work of a task is a pass: compact its cold buckets and relieve memory, store and evict cold buckets, rehydrate
buckets that are read repeatedly, move runs out of packs that are mostly dead, and delete retired packs. A pass is one
generator built from the operations' generators, so it can stop after any phase and be resumed later.

S1  the newest buckets of a store (`hot_bucket_count`) are skipped because they are still being written. One is
    compacted only if it has so many small or overlapping runs that reads would be slow (`compaction.is_crowded`).
S2  an error stops the task: every later call for the task raises it (see `TaskStorage`). While the backend is out of
    reach, a background job tries again and stops the task only after `UNAVAILABLE_MS`; an inline pass raises the error.
S3  calling `start` twice creates one set of jobs; `stop` returns when none of them runs.
S4  an inline pass stops only where it rests or waits, with nothing half done and nothing held that others wait for. So
    a checkpoint need not end it, and no work is lost. Time beyond its budget is deducted from later calls.
S5  a rehydrated bucket stays until relief drops it or new rows arrive; rehydration never triggers relief.

Background jobs run on the injected scheduler; no thread is started here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tidegate.errors import UnavailableError
from tidegate.scheduling import Scheduler
from tidegate.storage.maintenance.compaction import compact, is_crowded, is_worth
from tidegate.storage.maintenance.dump import dump, measure, rehydrate, relieve, repack, sparse_segments
from tidegate.storage.maintenance.operations import RESTING, WAITING, Operation
from tidegate.storage.parts import AttachedStore, StorageParts, TaskStorage, Upkeep
from tidegate.storage.spec import Merge

CROWDED_HOT = 4  # times max_deltas runs, and a bucket is compacted although it is among the newest
DUMP_BUCKETS = 64  # buckets stored in one round, so that a pass has many places to stop
REST_BYTES = 4 << 20  # merged at a time by an inline pass: some 20 ms
UNAVAILABLE_MS = 60_000  # how long a background job retries while the backend is out of reach
UNAVAILABLE_TRIES = 4  # and how often at least, where its turns are further apart


class MaintenanceSupervisor:
    """Runs maintenance for the tasks of a worker."""

    def __init__(self, parts: StorageParts, scheduler: Scheduler) -> None:
        self._parts = parts
        self._scheduler = scheduler

    # -- in the background -----------------------------------------------------------------------

    def start(self, task: TaskStorage) -> None:
        """Start the task's background maintenance, until `stop`; idempotent."""
        config = self._parts.config
        if isinstance(task.failure, UnavailableError):
            task.failure = None  # nothing was harmed: data stayed where it was, and the cause may be gone
        task.check()
        upkeep = task.upkeep
        with task.lock:
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
        upkeep = task.upkeep
        was_running = self._end_jobs(task)
        upkeep.stopping.set()
        with upkeep.working:  # a job that runs now ends after its phase
            pass
        self.close_inline(task)
        return was_running

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
                    self._parts.stats.count(task.task, maintenance_retries=1)
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
        self._parts.stats.count(task.task, maintenance_failures=1)
        self._end_jobs(task)

    def _end_jobs(self, task: TaskStorage) -> bool:
        with task.lock:
            jobs, task.upkeep.jobs = task.upkeep.jobs, []
        for job in jobs:
            job.cancel()
        return bool(jobs)

    # -- inline ----------------------------------------------------------------------------------

    def maintain(self, task: TaskStorage, budget_ms: int) -> bool:
        """Work on the task's pass for about `budget_ms`; True when the pass is finished.

        The next call continues, also after a checkpoint (S4). At least one operation runs, however small the budget,
        unless earlier calls exceeded theirs.
        """
        task.check()
        upkeep, clock = task.upkeep, self._parts.clock
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
        upkeep = task.upkeep
        if upkeep.inline is not None:
            upkeep.inline.close()
            upkeep.inline = None

    # -- the parts of a pass ---------------------------------------------------------------------

    def compacting(self, task: TaskStorage, *, rest_bytes: int | None = None) -> Operation[None]:
        """Compact cold buckets, with a rest after every `rest_bytes`; then bring memory below its limits."""
        most = self._parts.config.max_deltas
        for store in task.attached():
            for bucket in self._crowded(store):
                strip = rest_bytes if store.cold([bucket]) else None
                while (yield from compact(store, bucket, rest_bytes=strip)):
                    yield RESTING
                    found = store.state.index.snapshot(bucket)
                    if found is None or not is_worth(store.spec.merge, found.runs, most):
                        break
        yield from relieve(task)
        yield RESTING

    def dumping(self, task: TaskStorage) -> Operation[None]:
        """Store cold buckets and drop their hot copies; bring back those that are read again and again, as far as
        there is room."""
        for store in task.attached():
            index = store.state.index
            found = index.hot_buckets()
            kept = store.cold_reads.kept(found) - set(index.unstored_buckets())
            hot = [bucket for bucket in store.cold(found) if bucket not in kept]
            for start in range(0, len(hot), DUMP_BUCKETS):
                some = hot[start : start + DUMP_BUCKETS]
                yield from dump(task, [(store, some)], evict=True)
                yield RESTING
            for bucket in store.cold_reads.take():
                if (yield from rehydrate(store, bucket)):
                    store.cold_reads.keep(bucket)
                yield RESTING

    def repacking(self, task: TaskStorage) -> Operation[None]:
        """Rewrite the live runs of packs that are mostly dead."""
        yield from measure(task)
        for store in task.attached():
            for segment, packs in sparse_segments(store).items():
                yield from repack(store, segment, packs)
                yield RESTING

    def deleting(self, task: TaskStorage) -> Operation[None]:
        """Delete retired packs without references."""
        parts = self._parts
        deletion = parts.retirement.delete_once(task.task, parts.config.delete_budget)
        for pack in deletion.deleted:
            parts.packs.forget(pack)
        parts.use.forget(task.task, deletion.deleted)
        parts.stats.count(task.task, deleted_packs=len(deletion.deleted), failed_deletes=len(deletion.failed))
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
        cold, most = set(store.cold(crowded)), self._parts.config.max_deltas
        for bucket in crowded:
            if (found := index.snapshot(bucket)) is not None and (
                is_worth(store.spec.merge, found.runs, most)
                if bucket in cold
                else is_crowded(found.runs, CROWDED_HOT * most)
            ):
                yield bucket
