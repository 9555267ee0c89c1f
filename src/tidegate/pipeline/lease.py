"""The lease of an app: which process runs it, renewed during long rounds, and the generation in all records.

The lease avoids duplicate work; results do not depend on it (`checkpoint`, R1–R5).

G1  of any number of processes one gets the lease; the error of the others names its holder.
G2  a dead process of this machine does not block; one of another machine does until its lease has run out. A live
    process of this machine that did not renew in time blocks while it holds files that a run needs (`in_use`): the next
    process waits for as long as a lease lasts, and then leaves the lease to it.
G3  a thread renews the lease, so a round may take any time; `check` raises if another process has it.

Thread rule: safe from any thread.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Final

from tidegate.clock import Clock
from tidegate.errors import ConflictError, FencedError, TidegateError
from tidegate.pipeline.checkpoint import Records
from tidegate.randomness import Randomness
from tidegate.scheduling import Scheduler
from tidegate.tables.commits import Lease, read_lease

PAUSE_MS: Final = 100


class AppLease:
    """This process's lease of the app."""

    def __init__(
        self,
        records: Records,
        *,
        clock: Clock,
        randomness: Randomness,
        lease_ms: int,
        scheduler: Scheduler | None = None,
        in_use: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`in_use` names a resource that another process has open and a run of this app needs, or None."""
        self._records = records
        self._clock = clock
        self._lease_ms = lease_ms
        self._lock = threading.Lock()
        self._lease = Lease(
            records.backend, records.lease_name, clock=clock, randomness=randomness, ttl_ms=lease_ms
        )
        self._lost: TidegateError | None = None
        self._await_overdue_owner(in_use)
        made = [] if records.newest() is None else [records.newest_sound()[0].generation]
        held = self._lease.acquire(at_least=max(made, default=0) + 1)  # also where the lease was deleted
        if held is not None:
            if (held.host, held.pid) == (socket.gethostname(), os.getpid()):
                raise ConflictError(
                    f"app {records.app} is being run by this process already (generation {held.epoch}); end that run "
                    "first, with run.stop() and run.await_termination()"
                )
            seconds = max(0, held.until_ms - clock.now_ms()) / 1000
            raise ConflictError(
                f"app {records.app} is being run by process {held.pid} on {held.host} (generation {held.epoch}); stop "
                f"that one first. If it is gone, its turn ends by itself within {seconds:.0f} s"
            )
        self._renewing = (
            None
            if scheduler is None
            else scheduler.every(
                max(1, lease_ms // 3), self._renew, "app lease", initial_delay_ms=lease_ms // 3
            )
        )

    def _await_overdue_owner(self, in_use: Callable[[], str | None]) -> None:
        deadline_ms = self._clock.monotonic_ms() + self._lease_ms
        while (held := self._lease.overdue_owner()) is not None and (what := in_use()) is not None:
            if self._clock.monotonic_ms() >= deadline_ms:
                raise ConflictError(
                    f"app {self._records.app}: process {held.pid} (generation {held.epoch}) did not renew its lease in "
                    f"time, but it is alive and has {what} open: it was stopped, or is very busy. Let it go "
                    f"on with `kill -CONT {held.pid}`; or end it with `kill -KILL {held.pid}`, then start the app again"
                )
            self._clock.sleep_ms(PAUSE_MS)

    @property
    def was_left(self) -> bool:
        """Whether the previous process did not release the app: it may wake, and holds its files until it is fenced."""
        return self._lease.was_left

    @property
    def number(self) -> int:
        return self._lease.epoch

    def keep(self) -> None:
        """Before a step: renew when due; `FencedError` if another process has the app."""
        with self._lock:
            self._raise_lost()
            try:
                self._lease.keep()
            except FencedError:
                raise self._fenced() from None

    def check(self) -> None:
        """After a commit was created: `FencedError` unless the backend still has the lease as ours."""
        with self._lock:
            self._raise_lost()
            found = read_lease(self._records.backend, self._records.lease_name)
        if found is None or found[0].epoch != self.number:
            raise self._fenced()

    def release(self) -> None:
        """Release the app, so that the next process need not wait."""
        if self._renewing is not None:
            self._renewing.cancel()
        with self._lock:
            if self._lost is None:
                self._lease.release()

    def give_up(self) -> None:
        """Release the app; from now on `keep` and `check` raise `FencedError`. For a round that does not end."""
        if self._renewing is not None:
            self._renewing.cancel()
        with self._lock:
            if self._lost is None:
                self._lost = FencedError("the run was interrupted and did not end in time")
                self._lease.release()

    def _renew(self) -> None:
        with self._lock:
            if self._lost is None:
                try:
                    self._lease.keep()
                except TidegateError as error:
                    # Briefly unavailable is no reason to stop: the next renewal tries again.
                    self._lost = error if isinstance(error, FencedError) else None

    def _raise_lost(self) -> None:
        if self._lost is not None:
            raise self._fenced() from self._lost

    def _fenced(self) -> FencedError:
        return FencedError(
            f"app {self._records.app}: another process runs it now, and this one's turn (generation {self.number}) is "
            "over; what it had committed stays. Start it again when the other has ended"
        )
