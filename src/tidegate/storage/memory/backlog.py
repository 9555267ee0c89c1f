"""The backlog budget: bytes of data accepted and not yet pruned; the only backpressure on ingest.

Acquired when rows are accepted, released when they are pruned (or merged away, for `last` and `fold`), but not when
they are dumped or evicted: data on the backend still has to be consumed.

B1  used = the sum of what each task acquired and did not release (INV-14); never below 0. Over-release raises.
B2  first come, first served; no lost wake-up (`waiting`, W1).
B3  more than the limit is admitted alone, when nothing else is in; more than `largest_bytes` is an `InvalidError`.
B4  no hang: every wait is bounded. When no room can ever be made, waiters get `retention_exceeds_backlog` at once:
    when all tasks that hold backlog have declared that they have nothing left to prune, or when all threads that
    append and prune wait themselves (`expect_jobs`).
B5  before a caller waits, it merges (`make_room`), so that rows which merging makes unreachable cause no refusal.

Safe from any thread. A caller of `acquire` must not hold a lock that pruning needs (INV-16).
"""

from __future__ import annotations

from collections.abc import Callable

from tidegate.clock import Clock
from tidegate.errors import InternalError, InvalidError, OverloadError
from tidegate.storage.wait_queue import Line


class BacklogBudget:
    """The backlog of one worker, shared by its tasks."""

    def __init__(self, clock: Clock, *, limit_bytes: int, largest_bytes: int, timeout_ms: int) -> None:
        if limit_bytes < 1:
            raise InvalidError(f"backlog_limit_bytes is {limit_bytes}; it must be at least 1")
        self._line = Line(clock)
        self.limit = limit_bytes
        self._largest = largest_bytes
        self._timeout_ms = timeout_ms
        self._held: dict[str, int] = {}
        self._exhausted: set[str] = set()
        self.used = 0
        self.waits = 0  # the number of waits so far
        self._threads: int | None = None  # None: it is not known who makes room
        self._jobs = 0

    def acquire(
        self,
        nbytes: int,
        timeout_ms: int | None = None,
        *,
        task: str = "",
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        """Acquire `nbytes`, waiting in line; raises `OverloadError` after the timeout.

        If the backlog is full, `make_room` is called first, without locks; it returns True when other threads are
        still freeing some, so that waiting can succeed.
        """
        _check(nbytes)
        if nbytes == 0:
            return
        if nbytes > self._largest:
            raise InvalidError(
                f"task {task!r} appends {nbytes} bytes at once; at most {self._largest} fit between "
                "worker_total_bytes and memory_ceiling_bytes. Append smaller batches or raise memory_ceiling_bytes"
            )
        bound_ms = self._timeout_ms if timeout_ms is None else timeout_ms
        with self._line.lock:
            if not len(self._line) and self._admit(task, nbytes):
                return
        is_worth_it = make_room()
        with self._line.lock:
            if not len(self._line) and self._admit(task, nbytes):
                return
            self.waits += 1
            refuse = None if is_worth_it else lambda: self._refuse(task, nbytes)
            if self._line.enter(lambda: self._admit(task, nbytes), bound_ms, refuse=refuse):
                return
        raise OverloadError(
            f"task {task!r} waited {bound_ms} ms for {nbytes} bytes of backlog; {self.used} of {self.limit} are in use "
            "and nothing was pruned meanwhile. Let consumers catch up, then retry; or raise backlog_limit_bytes",
            reason="backlog_full",
        )

    def force(self, nbytes: int, *, task: str = "") -> None:
        """Acquire without a limit, for restored rows that exist already."""
        _check(nbytes)
        with self._line.lock:
            self._add(task, nbytes)

    def release(self, nbytes: int, *, task: str = "") -> None:
        """Release the backlog of rows that were pruned or merged away."""
        _check(nbytes)
        if nbytes == 0:
            return
        with self._line.lock:
            held = self._held.get(task, 0)
            if nbytes > held:
                raise InternalError(
                    f"task {task!r} releases {nbytes} bytes of backlog and holds {held}; the ledger "
                    "of this worker can no longer be trusted, restart it from the last checkpoint"
                )
            self._take_out(task, nbytes)
            self._line.stir()

    def drop(self, task: str) -> int:
        """Release all that a task holds, because it is restored or leaves the worker; returns the bytes."""
        with self._line.lock:
            held = self._held.get(task, 0)
            self._take_out(task, held)
            self._line.stir_all()
            return held

    def nothing_left_to_prune(self, task: str = "") -> None:
        """Declare that the task processed all its input and can prune nothing more.

        Revoked by its next release or acquire. Once every task that holds backlog has declared it, a blocked
        `acquire` raises instead of waiting.
        """
        with self._line.lock:
            self._exhausted.add(task)
            self._line.stir_all()

    def expect_jobs(self, threads: int, jobs: int) -> None:
        """Declare that only these jobs append and prune, on `threads` threads; call `job_done` when one ends.

        When all threads that can run wait, a blocked `acquire` raises instead of waiting.
        """
        with self._line.lock:
            self._threads, self._jobs = threads, jobs
            self._line.stir_all()

    def job_done(self) -> None:
        """One of the jobs is finished."""
        with self._line.lock:
            self._jobs -= 1
            self._line.stir_all()

    def used_by(self, task: str) -> int:
        with self._line.lock:
            return self._held.get(task, 0)

    @property
    def waiting(self) -> int:
        """The number of waiting threads."""
        return len(self._line)

    def _admit(self, task: str, nbytes: int) -> bool:
        if self.used and self.used + nbytes > self.limit:
            return False
        self._add(task, nbytes)
        return True

    def _refuse(self, task: str, nbytes: int) -> None:
        all_wait = self._threads is not None and len(self._line) >= min(self._threads, self._jobs)
        if self.used and (all_wait or self._held.keys() <= self._exhausted):
            raise OverloadError(
                f"task {task!r} needs {nbytes} bytes of backlog and {self.used} of {self.limit} are in use by rows "
                "that must be kept and cannot be pruned: the retained window is larger than the budget. Raise "
                "backlog_limit_bytes, or shorten the retention (window size plus grace)",
                reason="retention_exceeds_backlog",
            )

    def _add(self, task: str, nbytes: int) -> None:
        if nbytes:
            self._held[task] = self._held.get(task, 0) + nbytes
            self.used += nbytes
            self._exhausted.discard(task)

    def _take_out(self, task: str, nbytes: int) -> None:
        left = self._held.pop(task, 0) - nbytes
        if left:
            self._held[task] = left
        self.used -= nbytes
        self._exhausted.discard(task)


def _check(nbytes: int) -> None:
    if nbytes < 0:
        raise InternalError(f"{nbytes} bytes of backlog; a size is never negative")
