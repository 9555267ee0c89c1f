"""The memory of one worker: bytes by (task, tenant) under one total, and the caches of runs charged to it.

A tenant has a *reserve*, which other tasks' needs never touch, and a *soft max*: above it a reservation still
succeeds and relief follows. The worker total is hard for `reserve`: relief across tasks, then a bounded wait, then
`OverloadError`. `reserve_over_limit` is for bytes that exist already or replace others in a moment. `WriteBuffer` and
`BaseRuns` own the hot copies; the index owns the runs, and writer and maintenance decide when a copy is dropped.

P1  total = the sum over all (task, tenant); each number is at least 0 (INV-15). Giving back more than was taken
    raises and changes nothing.
P2  relief runs without the pool's lock, so it may release, evict and wait like anybody else (INV-16).
C1  a hot copy is charged with its run's logical bytes, to its cache's tenant. Its id is never used again.
C2  the write buffer takes rows of a caller in all together or not at all, and makes the caller wait at the worker
    total. Base runs never wait: they replace runs that leave in a moment, or the caller checked `has_room`.

Safe from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, NamedTuple

from tidegate.clock import Clock
from tidegate.errors import InternalError, InvalidError, OverloadError
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import HotCopy, Tenant, next_tick
from tidegate.storage.runs.run import Run
from tidegate.storage.wait_queue import Line

# -- pool --------------------------------------------------------------------------------------------


class ReliefShare(NamedTuple):
    """Bytes to take back from one tenant of one task."""

    task: str
    tenant: Tenant
    nbytes: int


class WorkerMemoryPool:
    """All pool memory of one worker process."""

    def __init__(self, config: StorageConfig, clock: Clock) -> None:
        self._config = config
        self._line = Line(clock)
        self._relief: Callable[[list[ReliefShare]], int] | None = None
        self._used: dict[str, dict[Tenant, int]] = {}
        self.total = 0
        self.waits = 0  # the number of waits so far
        self.limit = config.worker_total_bytes

    def set_relief(self, relief: Callable[[list[ReliefShare]], int] | None) -> None:
        """Set the callback that frees memory at the worker total, as near to the shares as it can, without locks."""
        self._relief = relief

    def attach(self, task: str) -> None:
        """Register the task and guarantee its reserves; a first reservation does so, too."""
        with self._line.lock:
            self._task(task)

    def detach(self, task: str) -> dict[Tenant, int]:
        """Remove a task; returns what it still held (empty unless there was a leak)."""
        with self._line.lock:
            held = {tenant: nbytes for tenant, nbytes in self._used.pop(task, {}).items() if nbytes}
            self.total -= sum(held.values())
            self._line.stir()
            return held

    def try_reserve(self, task: str, tenant: Tenant, nbytes: int) -> bool:
        """Reserve the bytes if they fit under the worker total and no other thread waits."""
        _check(nbytes)
        with self._line.lock:
            if nbytes and len(self._line):
                return False
            return self._admit(task, tenant, nbytes)

    def reserve(self, task: str, tenant: Tenant, nbytes: int, *, timeout_ms: int | None = None) -> None:
        """Reserve the bytes; at the worker total: relief across tasks, a bounded wait, then `OverloadError`."""
        _check(nbytes)
        if nbytes > self.limit:
            raise InvalidError(
                f"task {task} asks for {nbytes} bytes of {tenant} at once and the whole worker has "
                f"{self.limit}: raise worker_total_bytes or lower max_batch_bytes"
            )
        if self.try_reserve(task, tenant, nbytes):
            return
        self._relieve(nbytes)
        if timeout_ms is None:
            timeout_ms = self._config.memory_timeout_ms
        with self._line.lock:
            self.waits += 1
            if self._line.enter(lambda: self._admit(task, tenant, nbytes), timeout_ms):
                return
            held = ", ".join(f"{name} {sum(tenants.values())}" for name, tenants in self._used.items())
        raise OverloadError(
            f"task {task} waited {timeout_ms} ms for {nbytes} bytes of {tenant}: the worker holds {self.total} of "
            f"{self.limit} bytes ({held}) and no more could be taken back. Close views that "
            "are held open, run fewer tasks in one worker, or raise worker_total_bytes",
            reason="worker_memory",
        )

    def reserve_over_limit(self, task: str, tenant: Tenant, nbytes: int) -> None:
        """Reserve the bytes even above the total; the next relief frees the excess."""
        _check(nbytes)
        with self._line.lock:
            self._add(task, tenant, nbytes)

    def release(self, task: str, tenant: Tenant, nbytes: int) -> None:
        """Release bytes."""
        _check(nbytes)
        with self._line.lock:
            self._subtract(task, tenant, nbytes)
            self._line.stir()

    def used(self, task: str, tenant: Tenant | None = None) -> int:
        """Bytes of one tenant of a task, or of all of them."""
        with self._line.lock:
            tenants = self._used.get(task, {})
            return sum(tenants.values()) if tenant is None else tenants.get(tenant, 0)

    @property
    def waiting(self) -> int:
        """The number of waiting threads."""
        return len(self._line)

    def ledger(self) -> dict[str, dict[Tenant, int]]:
        """A consistent copy of all numbers."""
        with self._line.lock:
            return {task: dict(tenants) for task, tenants in self._used.items()}

    def is_above_soft(self, task: str, tenant: Tenant, incoming_bytes: int = 0) -> bool:
        """Whether the tenant is strictly above its soft max, `incoming_bytes` included."""
        return self.used(task, tenant) + incoming_bytes > self._config.limits(tenant).soft_max_bytes

    def relief_need(self, task: str, tenant: Tenant, incoming_bytes: int = 0) -> int:
        """Bytes to take back so that a tenant that is (or is about to be) above its soft max is at its low watermark;
        0 when it is not. Never more than it has."""
        if not self.is_above_soft(task, tenant, incoming_bytes):
            return 0
        used = self.used(task, tenant)
        return min(used, used + incoming_bytes - self._config.relief_target(tenant))

    def has_room(self, task: str, tenant: Tenant, nbytes: int) -> bool:
        """Whether so many bytes more stay at or below the low watermark, of the tenant's soft max and of the total."""
        most = self.limit * self._config.low_watermark_permille // 1000
        with self._line.lock:
            used = self._used.get(task, {}).get(tenant, 0)
            return self.total + nbytes <= most and used + nbytes <= self._config.relief_target(tenant)

    def shares(self, need_bytes: int) -> list[ReliefShare]:
        """The shares that together free `need_bytes`, or less if there is less above the reserves.

        Those above their soft max first, the largest excess first, and never below a reserve.
        """
        held = [
            (task, tenant, used)
            for task, all_used in self.ledger().items()
            for tenant, used in all_used.items()
        ]
        shares: dict[tuple[str, Tenant], int] = {}
        for floor in ("soft_max_bytes", "reserve_bytes"):
            excess = [
                (
                    used - getattr(self._config.limits(tenant), floor) - shares.get((task, tenant), 0),
                    task,
                    tenant,
                )
                for task, tenant, used in held
            ]
            for above, task, tenant in sorted(excess, key=lambda each: (-each[0], each[1], each[2])):
                taken = min(above, need_bytes)
                if taken > 0:
                    shares[task, tenant] = shares.get((task, tenant), 0) + taken
                    need_bytes -= taken
        return [ReliefShare(task, tenant, nbytes) for (task, tenant), nbytes in shares.items()]

    def _relieve(self, nbytes: int) -> None:
        relief = self._relief
        need = self.total + nbytes - self.limit
        if relief is not None and need > 0 and (shares := self.shares(need)):
            relief(shares)

    def _admit(self, task: str, tenant: Tenant, nbytes: int) -> bool:
        if nbytes and self.total + nbytes > self.limit:
            return False
        self._add(task, tenant, nbytes)
        return True

    def _add(self, task: str, tenant: Tenant, nbytes: int) -> None:
        tenants = self._task(task)
        tenants[tenant] += nbytes
        self.total += nbytes

    def _subtract(self, task: str, tenant: Tenant, nbytes: int) -> None:
        held = self._used.get(task, {}).get(tenant, 0)
        if nbytes > held:
            raise InternalError(
                f"task {task} gives back {nbytes} bytes of {tenant} and holds {held}; the memory "
                "ledger of this worker can no longer be trusted, restart it from the last checkpoint"
            )
        if nbytes:
            self._used[task][tenant] = held - nbytes
            self.total -= nbytes

    def _task(self, task: str) -> dict[Tenant, int]:
        tenants = self._used.get(task)
        if tenants is None:
            if len(self._used) >= self._config.max_tasks:
                raise InvalidError(
                    f"task {task} is one more than max_tasks {self._config.max_tasks}, and the reserves of all must "
                    "fit in worker_total_bytes: raise max_tasks, or stop a task of this worker first"
                )
            tenants = self._used[task] = dict.fromkeys(Tenant, 0)
        return tenants


def _check(nbytes: int) -> None:
    if nbytes < 0:
        raise InternalError(f"{nbytes} bytes asked of the memory pool; a size is never negative")


# -- caches of runs ----------------------------------------------------------------------------------


class HotRuns:
    """Base of both caches: the hot copies of one tenant, of all tasks of the worker."""

    tenant: ClassVar[Tenant]

    def __init__(self, pool: WorkerMemoryPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._tasks: dict[str, dict[int, HotCopy]] = {}

    def shrink(self, task: str, old: HotCopy, rest: Run) -> HotCopy:
        """Add a copy with some of the keys of `old`; the caller then removes one of the two. Never waits."""
        self._check(old)
        self._pool.reserve_over_limit(task, self.tenant, rest.nbytes)
        return self._keep(task, rest, complete=False)

    def remove(self, task: str, hot: HotCopy) -> int:
        """Drop a hot copy; returns the bytes freed, 0 when it was dropped already."""
        return self.remove_all(task, [hot])

    def remove_all(self, task: str, hots: Iterable[HotCopy]) -> int:
        """Drop several at once; returns the bytes freed."""
        wanted = list(hots)
        for hot in wanted:
            self._check(hot)
        with self._lock:
            mine = self._tasks.get(task, {})
            found = [gone for hot in wanted if (gone := mine.pop(hot.id, None)) is not None]
        nbytes = sum(gone.run.nbytes for gone in found)
        self._pool.release(task, self.tenant, nbytes)
        return nbytes

    def count(self, task: str) -> int:
        with self._lock:
            return len(self._tasks.get(task, ()))

    def clear(self, task: str) -> int:
        """Drop all of a task's hot copies; returns the bytes freed."""
        with self._lock:
            gone = self._tasks.pop(task, {})
        nbytes = sum(hot.run.nbytes for hot in gone.values())
        self._pool.release(task, self.tenant, nbytes)
        return nbytes

    def _keep(self, task: str, run: Run, *, complete: bool = True) -> HotCopy:
        hot = HotCopy(self.tenant, next_tick(), run, complete)
        with self._lock:
            self._tasks.setdefault(task, {})[hot.id] = hot
        return hot

    def _check(self, hot: HotCopy) -> None:
        if hot.tenant is not self.tenant:
            raise InternalError(f"hot copy {hot.id} belongs to {hot.tenant}, not {self.tenant}")


class WriteBuffer(HotRuns):
    """The deltas: runs as accepted, until they are compacted, evicted or pruned."""

    tenant = Tenant.WRITE_BUFFER

    def put_all(self, task: str, runs: Sequence[Run], *, forced: bool = False) -> list[HotCopy]:
        """Take the runs in, all or none. At the worker total this waits, or raises `OverloadError`; never when
        `forced`, for state blobs that are flushed to make room."""
        reserve = self._pool.reserve_over_limit if forced else self._pool.reserve
        kept: list[HotCopy] = []
        try:
            for run in runs:
                reserve(task, self.tenant, run.nbytes)
                kept.append(self._keep(task, run))
        except BaseException:
            self.remove_all(task, kept)
            raise
        return kept

    def is_over_limit(self, task: str, incoming_bytes: int = 0) -> bool:
        """Whether the task's deltas, with what is about to come, are above the soft max; exactly there is not."""
        return self._pool.is_above_soft(task, self.tenant, incoming_bytes)


class BaseRuns(HotRuns):
    """The bases: merged runs, and runs rehydrated for readers."""

    tenant = Tenant.BASE_RUNS

    def put(self, task: str, run: Run) -> HotCopy:
        """Add a run even above the total: its inputs are dropped next, or the caller checked `has_room`."""
        self._pool.reserve_over_limit(task, self.tenant, run.nbytes)
        return self._keep(task, run)

    def has_room(self, task: str, nbytes: int) -> bool:
        """Whether so many bytes more bring no relief near: at or below the low watermarks of task and worker."""
        return self._pool.has_room(task, self.tenant, nbytes)
