"""When the owner of a log does its chores: the loop over an injected scheduler, and who may know of it.

An embedded log has no daemon, so whoever opens it with `maintenance=True` (or runs `tidegate log clean`) is
the one who ages it. Owns the timetable; the chores themselves are `housekeeping`'s.

| chore | first after | then every |
|---|---|---|
| retention of partitions not compacted | `log.initial.task.delay.ms` | `log.retention.check.interval.ms` |
| one compaction, then retention of compacted ones | the same | `log.cleaner.backoff.ms`, at once after work |
| both, of partitions not open here | with the first | with the first |
| recovery points | `log.initial.task.delay.ms` | `log.flush.offset.checkpoint.interval.ms` |
| log start offsets | `log.initial.task.delay.ms` | `log.flush.start.offset.checkpoint.interval.ms` |
| high watermarks | their interval | `replica.high.watermark.checkpoint.interval.ms` |
| forgetting silent producers | their interval | `producer.id.expiration.check.interval.ms` |
| flushing partitions whose `flush.ms` passed | 0 ms | when the next is due, at most 1 min |

Invariants:
T1  No error is kept quiet. What means "try later" (a full disk, a busy lock) is told as a warning, tried again
    at the chore's next turn, and raised by `close` if it never went away. Anything else is raised to whoever
    drives or closes the scheduler, which stops.
T2  Chores that go by the wall clock wait, with a warning, while it is not to be trusted (`clock_brake`).
T3  Others can tell that somebody ages this log (`attendance`).

Thread rule: chores run on the scheduler's thread; `start` and `close` are called by the owner.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from tidegate.durations import format_duration
from tidegate.errors import (
    TidegateError,
    TidegateWarning,
    UnavailableError,
)
from tidegate.log.cleaning.attendance import LOCK_NAME, STATUS_NAME, Attendance, OwnerStatus, owner_status
from tidegate.log.cleaning.clock_brake import ClockBrake
from tidegate.log.cleaning.housekeeping import FLUSH_LOOK_MS, TRY_LATER, Housekeeping
from tidegate.scheduling import Scheduled

if TYPE_CHECKING:
    from tidegate.log.access.embedded import Log

__all__ = ["LOCK_NAME", "STATUS_NAME", "Attendance", "Maintenance", "OwnerStatus", "owner_status"]

PATIENCE_SECONDS = 60.0


class Maintenance:
    """The chores of one owner, in time. `start` begins, `close` ends; both are safe to call twice."""

    def __init__(self, owner: Log) -> None:
        self._owner = owner
        self._broker = owner.contents.broker_config()
        self._scheduler = owner.scheduler
        self._clock = owner.clock
        self.chores = Housekeeping(
            owner, broker=self._broker, files=owner.files, clock=owner.clock, randomness=owner.randomness
        )
        self._brake = ClockBrake(owner.clock, hold_ms=self._broker.log_retention_check_interval_ms)
        self._attendance: Attendance | None = None
        self._turning = threading.RLock()
        self._entries: dict[str, Scheduled] = {}
        self._failing: dict[str, TidegateError] = {}

    def start(self) -> None:
        if self._attendance is not None:
            return
        interval_ms = self._broker.log_retention_check_interval_ms
        self._attendance = Attendance(self._owner.path, interval_ms, files=self._owner.files)
        broker, chores = self._broker, self.chores
        first_ms = broker.log_initial_task_delay_ms
        self._every("retention", self._retain, broker.log_retention_check_interval_ms, first_ms)
        if broker.log_cleaner_enable:
            self._after("compaction", self._compact, first_ms)
        self._every(
            "recovery points",
            chores.checkpoint_recovery_points,
            broker.log_flush_offset_checkpoint_interval_ms,
            first_ms,
        )
        self._every(
            "log start offsets",
            chores.checkpoint_log_starts,
            broker.log_flush_start_offset_checkpoint_interval_ms,
            first_ms,
        )
        interval_ms = broker.replica_high_watermark_checkpoint_interval_ms
        self._every("high watermarks", chores.checkpoint_high_watermarks, interval_ms, interval_ms)
        interval_ms = broker.producer_id_expiration_check_interval_ms
        self._every("producer expiry", self._expire, interval_ms, interval_ms)
        self._after("flush", self._flush, 0)

    def close(self) -> None:
        """No chore begins after this; one that is running is waited for. Raises what kept failing (T1)."""
        attendance, self._attendance = self._attendance, None
        self.chores.stop()
        if not self._turning.acquire(timeout=PATIENCE_SECONDS):
            raise UnavailableError(
                f"{self._owner.path}: a chore has been running for more than {PATIENCE_SECONDS:.0f} s; the disk "
                f"hangs or is overloaded"
            )
        self._turning.release()
        for entry in self._entries.values():
            entry.cancel()
        self._entries.clear()
        if attendance is not None:
            attendance.release()
        for error in self._failing.values():
            raise error

    # -- turns -----------------------------------------------------------------------------------

    def _retain(self) -> None:
        if self._clock_is_sound():
            self.chores.retain(compacted=False)
            self.chores.clean_idle()
            if self._attendance is not None:
                self._attendance.tell(last_run_ms=self._clock.now_ms())

    def _compact(self) -> None:
        worked = False
        try:
            if self._clock_is_sound():
                worked = self.chores.compact_dirtiest() is not None
                self.chores.retain(compacted=True)
        finally:
            self._after("compaction", self._compact, 0 if worked else self._broker.log_cleaner_backoff_ms)

    def _expire(self) -> None:
        if self._clock_is_sound():
            self.chores.expire_producers()

    def _flush(self) -> None:
        wait_ms = FLUSH_LOOK_MS
        try:
            wait_ms = self.chores.flush_due()
        finally:
            self._after("flush", self._flush, max(1, wait_ms))

    def _clock_is_sound(self) -> bool:
        look = self._brake.look()
        if look.leap_ms:
            held = format_duration(self._broker.log_retention_check_interval_ms)
            warnings.warn(
                TidegateWarning(
                    f"{self._owner.path}: the wall clock leapt {format_duration(look.leap_ms)} ahead, so "
                    f"nothing is aged out for {held}; if the clock is wrong, set it right before then: "
                    f"records that look too old are deleted after it"
                ),
                stacklevel=2,
            )
        return not look.held

    # -- the timetable ---------------------------------------------------------------------------

    def _every(self, name: str, action: Callable[[], object], interval_ms: int, first_ms: int) -> None:
        self._entries[name] = self._scheduler.every(
            interval_ms, lambda: self._turn(name, action), name, initial_delay_ms=first_ms
        )

    def _after(self, name: str, action: Callable[[], object], delay_ms: int) -> None:
        if self._attendance is not None:
            self._entries[name] = self._scheduler.after(delay_ms, lambda: self._turn(name, action), name)

    def _turn(self, name: str, action: Callable[[], object]) -> None:
        with self._turning:
            if self._attendance is None:
                return
            try:
                action()
                self._failing.pop(name, None)
            except TRY_LATER as error:
                self._failing[name] = error
                message = f"{name} of {self._owner.path} failed and will be tried again: {error}"
                warnings.warn(TidegateWarning(message), stacklevel=2)
