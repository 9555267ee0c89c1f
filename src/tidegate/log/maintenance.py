"""Run retention, compaction, checkpoints, producer expiry and flushing of a log, on an injected scheduler.

An embedded log has no daemon: the process that opens it with `maintenance=True` (or runs `tidegate log clean`)
runs these tasks. `Housekeeping` has one method per task, `Maintenance` the timetable. Partitions that are open
here are worked on directly. For idle ones a `PartitionSnapshot` is read from their files first, and they are
opened only where it finds work: opening costs a lock, a removed clean mark and several syncs. A partition that
another process writes is skipped.

T1  No error is suppressed. One that means "try later" (a full disk, a busy lock) is shown as a warning, retried
    at the task's next turn, and raised by `close` if it persisted. Any other stops the scheduler's thread.
T2  Wall-clock tasks are suspended, with a warning, while the clock is not to be trusted (`ClockJumpGuard`).
W1  A task finishes its other partitions before it raises the error of one.
W2  A partition whose compaction found damage is not compacted again by this object.
W3  A read-only partition is skipped, with one warning.
W4  The cleaner checkpoint moves after the swap: a crash between the two repeats a compaction, never skips one.

Thread rule: tasks run on the scheduler's thread, one at a time; `start` and `close` are called by the owner.
Partitions may be appended to and read meanwhile.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from tidegate.clock import Clock
from tidegate.durations import format_duration
from tidegate.errors import (
    ConflictError,
    TidegateError,
    TidegateWarning,
    UnavailableError,
)
from tidegate.files import Files
from tidegate.log.catalog import TopicPartition
from tidegate.log.checkpoints import (
    HIGH_WATERMARKS,
    LOG_STARTS,
    RECOVERY_POINTS,
    CleanerCheckpoint,
    merge_checkpoint,
)
from tidegate.log.compaction_plan import Cleanable, Limits, cleanable, dirtiest
from tidegate.log.locks import MaintenanceLock
from tidegate.log.retention import Bounds, RetentionReport, apply_retention, plan_retention, report_of
from tidegate.log.segment import LogSegment, read_only_segment
from tidegate.log.topic_config import TopicConfig
from tidegate.randomness import Randomness
from tidegate.scheduling import Scheduled

if TYPE_CHECKING:
    from tidegate.log.compaction import Cleaner, CompactionReport
    from tidegate.log.log import Log
    from tidegate.log.partition import PartitionLog
    from tidegate.log.partition_reader import PartitionView
    from tidegate.log.topic_config import BrokerConfig


TOLERANCE_MS = 3_600_000


class ClockCheck(NamedTuple):
    """Whether wall-clock tasks are suspended, and how far the clock jumped ahead since the last check (or 0)."""

    suspended: bool
    jump_ms: int


class ClockJumpGuard:
    """Detects jumps of the wall clock; call `check` before every task that depends on it.

    Time retention takes the active log segment too, so a clock set a week ahead, even for a moment, would delete a
    whole log. After a jump of more than an hour, tasks are suspended until both clocks agreed for one check interval.
    """

    def __init__(self, clock: Clock, *, hold_ms: int, tolerance_ms: int = TOLERANCE_MS) -> None:
        self._clock = clock
        self._hold_ms = hold_ms
        self._tolerance_ms = tolerance_ms
        self._wall_ms = clock.now_ms()
        self._monotonic_ms = clock.monotonic_ms()
        self._held_until_ms: int | None = None

    def check(self) -> ClockCheck:
        """Compare how far both clocks advanced since the last check."""
        wall_ms, monotonic_ms = self._clock.now_ms(), self._clock.monotonic_ms()
        ahead_ms = (wall_ms - self._wall_ms) - (monotonic_ms - self._monotonic_ms)
        self._wall_ms, self._monotonic_ms = wall_ms, monotonic_ms
        if ahead_ms > self._tolerance_ms:
            self._held_until_ms = monotonic_ms + self._hold_ms
            return ClockCheck(True, ahead_ms)
        if self._held_until_ms is not None and monotonic_ms < self._held_until_ms:
            return ClockCheck(True, 0)
        self._held_until_ms = None
        return ClockCheck(False, 0)


@dataclass(frozen=True, slots=True)
class PartitionSnapshot:
    """The log segments and offsets of one partition at one moment, whether or not it is open here."""

    topic: str
    partition: int
    config: TopicConfig
    segments: Sequence[LogSegment]
    bounds: Bounds
    last_stable: int

    def retention(self, now_ms: int) -> RetentionReport:
        """Return the report of a retention pass without running it."""
        removals = plan_retention(self.segments, self.bounds, self.config, now_ms) if self.segments else []
        return report_of(self.topic, self.partition, removals, self.bounds, len(self.segments))

    def cleanable(self, checkpoint: int | None, now_ms: int) -> Cleanable | None:
        """Return what a compaction would cover; None for a partition that never held a record."""
        if not self.segments:
            return None
        return cleanable(
            self.segments,
            checkpoint=checkpoint,
            log_start=self.bounds.log_start_offset,
            log_end=self.bounds.log_end_offset,
            last_stable=self.last_stable,
            limits=Limits(self.config.min_compaction_lag_ms, self.config.max_compaction_lag_ms),
            now_ms=now_ms,
        )

    @classmethod
    def from_open(cls, log: PartitionLog) -> PartitionSnapshot:
        """Return the snapshot of a partition that is open in this process."""
        with log.lock:
            bounds = Bounds(log.log_start_offset, log.high_watermark, log.log_end_offset)
            return cls(log.topic, log.partition, log.config, log.segments, bounds, log.last_stable_offset)

    @classmethod
    def from_folder(
        cls,
        view: PartitionView,
        config: TopicConfig,
        *,
        files: Files,
        clock: Clock,
    ) -> PartitionSnapshot:
        """Return the snapshot of a partition that is not open here, from its folder; locks and changes nothing."""
        seen = view.bounds()
        segments = [
            read_only_segment(view.folder, base, config, files=files, clock=clock)
            for base, _ in view.segment_sizes()
        ]
        bounds = Bounds(seen.log_start, seen.high_watermark, seen.high_watermark)
        last_stable = min(seen.last_stable, seen.high_watermark)
        return cls(view.topic, view.partition, config, segments, bounds, last_stable)


FLUSH_LOOK_MS = 60_000
TRY_LATER = (UnavailableError, ConflictError)
HELD_ELSEWHERE = "another process writes it and has to clean it"


@dataclass(frozen=True, slots=True)
class PartitionOutcome:
    """The result of one pass over one partition, or of a dry run.

    `skipped` says why nothing was done at all, `not_compacted_because` why there is no `compaction`.
    """

    topic: str
    partition: int
    retention: RetentionReport
    cleanable: Cleanable | None
    compaction: CompactionReport | None
    not_compacted_because: str | None
    skipped: str | None = None


class Housekeeping:
    """The maintenance tasks of one log, over all its partitions."""

    def __init__(
        self, owner: Log, *, broker: BrokerConfig, files: Files, clock: Clock, randomness: Randomness
    ) -> None:
        self._owner = owner
        self._broker = broker
        self._files = files
        self._clock = clock
        self._randomness = randomness
        self._checkpoint_of_cleaner = CleanerCheckpoint(owner.path, files=files, clock=clock)
        self._cleaner: Cleaner | None = None
        self._flushed_ms: WeakKeyDictionary[PartitionLog, int] = WeakKeyDictionary()
        self._uncleanable: dict[TopicPartition, str] = {}
        self._told: set[tuple[TopicPartition, str]] = set()

    def stop(self) -> None:
        """Make a running compaction stop soon; it then changes nothing."""
        if self._cleaner is not None:
            self._cleaner.stop()

    # -- retention and compaction ----------------------------------------------------------------

    def retain(self, *, compacted: bool) -> list[RetentionReport]:
        """Run one retention pass over the open partitions that are, or are not, compacted."""
        now_ms = self._clock.now_ms()
        reports: list[RetentionReport] = []
        chosen = [log for log in self._writable() if log.config.compacts is compacted]
        self._each_open(chosen, lambda log: reports.append(apply_retention(log, now_ms)))
        return reports

    def compact_dirtiest(self) -> CompactionReport | None:
        """Compact the dirtiest open partition that is dirty enough; None when there is none."""
        ready: list[tuple[PartitionLog, Cleanable]] = []
        for log in self._writable():
            if log.config.compacts and _place(log) not in self._uncleanable:
                part = self._cleanable(PartitionSnapshot.from_open(log))
                if part is not None and part.checkpoint_reset:
                    self._checkpoint_of_cleaner.put(*_place(log), part.first_dirty)
                if part is not None and part.eligible(log.config.min_cleanable_dirty_ratio):
                    ready.append((log, part))
        chosen = dirtiest(ready)
        return None if chosen is None else self._compact(*chosen)

    def clean_idle(self) -> list[PartitionOutcome]:
        """Run retention and compaction, where due, on the partitions that are not open here.

        Where the cleaner is off, compacted topics are not cleaned, as with open partitions.
        """
        outcomes: list[PartitionOutcome] = []

        def clean(place: TopicPartition) -> None:
            if self._broker.log_cleaner_enable or not self._owner.describe(place.topic).config.compacts:
                outcomes.append(self._clean_idle(place, dry_run=False))

        self._each(self._owner.idle_partitions(), clean)
        return outcomes

    def clean_once(
        self, *, topics: Iterable[str] | None = None, dry_run: bool = False
    ) -> list[PartitionOutcome]:
        """Run retention and, where dirty enough, one compaction on every partition now, whatever the timetable.

        With `dry_run`, return what that would do without opening, locking or changing anything.
        """
        wanted = None if topics is None else set(topics)
        outcomes: list[PartitionOutcome] = []

        def is_wanted(place: TopicPartition) -> bool:
            return wanted is None or place.topic in wanted

        idle = [place for place in self._owner.idle_partitions() if is_wanted(place)]
        logs = [log for log in self._owner.open_partitions if is_wanted(_place(log))]
        self._each_open(logs, lambda log: outcomes.append(self._clean_open(log, dry_run=dry_run)))
        self._each(idle, lambda place: outcomes.append(self._clean_idle(place, dry_run=dry_run)))
        return sorted(outcomes, key=lambda outcome: (outcome.topic, outcome.partition))

    def _clean_idle(self, place: TopicPartition, *, dry_run: bool) -> PartitionOutcome:
        view = self._owner.view(*place)
        config = self._owner.describe(place.topic).config
        snapshot = PartitionSnapshot.from_folder(view, config, files=self._files, clock=self._clock)
        expected = self._expect(snapshot)
        # Only opening completes a segment replacement whose writer died; readers wait for that.
        is_half_replaced = view.bounds().generation % 2 == 1
        due = is_half_replaced or bool(expected.retention.removed) or expected.not_compacted_because is None
        if dry_run or not due:
            return expected
        with self._owner.borrowed(*place) as log:
            if log is None:
                nothing = report_of(*place, (), snapshot.bounds, len(snapshot.segments))
                return PartitionOutcome(*place, nothing, None, None, None, HELD_ELSEWHERE)
            return self._clean_open(log, dry_run=False)

    def _clean_open(self, log: PartitionLog, *, dry_run: bool) -> PartitionOutcome:
        if dry_run or log.read_only_reason is not None:
            return replace(self._expect(PartitionSnapshot.from_open(log)), skipped=log.read_only_reason)
        retention = apply_retention(log, self._clock.now_ms())
        expected = self._expect(PartitionSnapshot.from_open(log))
        report, reason = None, expected.not_compacted_because
        if reason is None and expected.cleanable is not None:
            report = self._compact(log, expected.cleanable)
            reason = (
                None if report is not None else "the partition was cut meanwhile; the next pass looks again"
            )
        return PartitionOutcome(*_place(log), retention, expected.cleanable, report, reason)

    def _expect(self, snapshot: PartitionSnapshot) -> PartitionOutcome:
        """Return what a pass would do."""
        place = TopicPartition(snapshot.topic, snapshot.partition)
        part = reason = None
        ratio = snapshot.config.min_cleanable_dirty_ratio
        if not snapshot.config.compacts:
            reason = "cleanup.policy has no compact"
        elif not self._broker.log_cleaner_enable:
            reason = "log.cleaner.enable is false"
        elif place in self._uncleanable:
            reason = f"an earlier compaction failed: {self._uncleanable[place]}"
        elif (part := self._cleanable(snapshot)) is None or not part.cleanable_bytes:
            reason = "nothing is dirty"
        elif not part.eligible(ratio):
            reason = f"dirty ratio {part.ratio:.2f} is not above min.cleanable.dirty.ratio {ratio:g}"
        return PartitionOutcome(*place, snapshot.retention(self._clock.now_ms()), part, None, reason)

    def _cleanable(self, snapshot: PartitionSnapshot) -> Cleanable | None:
        checkpoint = self._checkpoint_of_cleaner.get(snapshot.topic, snapshot.partition)
        return snapshot.cleanable(checkpoint, self._clock.now_ms())

    def _compact(self, log: PartitionLog, part: Cleanable) -> CompactionReport | None:
        if self._cleaner is None:
            from tidegate.log.compaction import Cleaner, CleanerSettings

            self._cleaner = Cleaner(
                files=self._files,
                clock=self._clock,
                randomness=self._randomness,
                settings=CleanerSettings.of(self._broker),
            )
        self._checkpoint_of_cleaner.begin(*_place(log), part.first_uncleanable)
        try:
            report = self._cleaner.clean(log, part)
        except ConflictError:
            return None  # the partition was truncated meanwhile: nothing changed, the next turn retries
        except (TidegateError, OSError) as error:
            if log not in self._owner.open_partitions:
                return None  # the partition was closed meanwhile
            if not isinstance(error, UnavailableError):
                self._uncleanable[_place(log)] = str(error)
            raise
        self._checkpoint_of_cleaner.end(*_place(log), report.next_dirty)
        return report

    # -- checkpoints -----------------------------------------------------------------------------

    def checkpoint(self, name: str) -> None:
        """Write the lines of the open partitions into one of Kafka's checkpoint files."""
        lines: dict[tuple[str, int], int | None] = {
            _place(log): log.checkpoint_lines()[name] for log in self._owner.open_partitions
        }
        merge_checkpoint(self._owner.path / name, lines, files=self._files, clock=self._clock)

    # -- producers and flushing ------------------------------------------------------------------

    def expire_producers(self) -> int:
        """Drop producers idle for `producer.id.expiration.ms`; return how many."""
        now_ms = self._clock.now_ms()
        counts: list[int] = []
        self._each_open(self._writable(), lambda log: counts.append(log.remove_expired_producers(now_ms)))
        return sum(counts)

    def flush_due(self) -> int:
        """Flush the partitions whose `flush.ms` has passed; return the milliseconds until the next one is due."""
        now_ms = self._clock.monotonic_ms()
        waits = [FLUSH_LOOK_MS]

        def flush(log: PartitionLog) -> None:
            interval_ms = log.config.flush_ms
            if self._flushed_ms.setdefault(log, now_ms) + interval_ms <= now_ms:
                self._flushed_ms[log] = now_ms
                if log.recovery_point < log.log_end_offset:
                    log.flush()
            waits.append(self._flushed_ms[log] + interval_ms - now_ms)

        self._each_open(self._writable(), flush)
        return min(waits)

    # -- working through partitions --------------------------------------------------------------

    def _writable(self) -> list[PartitionLog]:
        """Return the open partitions except read-only ones (W3)."""
        logs = []
        for log in self._owner.open_partitions:
            reason = log.read_only_reason
            if reason is None:
                logs.append(log)
            elif (_place(log), reason) not in self._told:
                self._told.add((_place(log), reason))
                warnings.warn(
                    TidegateWarning(
                        f"{_place(log)} is neither aged nor compacted, being read-only: {reason}"
                    ),
                    stacklevel=2,
                )
        return logs

    def _each_open(self, logs: Iterable[PartitionLog], work: Callable[[PartitionLog], None]) -> None:
        by_place = {_place(log): log for log in logs}

        def unless_closed(place: TopicPartition) -> None:
            try:
                work(by_place[place])
            except (TidegateError, OSError):
                if by_place[place] in self._owner.open_partitions:
                    raise  # else it was closed or deleted meanwhile, and its error is meaningless

        self._each(by_place, unless_closed)

    def _each(self, places: Iterable[TopicPartition], work: Callable[[TopicPartition], None]) -> None:
        """Do the work for every partition, then raise the most severe error (W1)."""
        errors: list[TidegateError | OSError] = []
        for place in places:
            try:
                work(place)
            except (TidegateError, OSError) as error:
                error.add_note(f"in the housekeeping of {place}")
                errors.append(error)
        if errors:
            gravest = next((met for met in errors if not isinstance(met, TRY_LATER)), errors[0])
            for other in errors:
                if other is not gravest:
                    gravest.add_note(f"and: {other}")
            raise gravest


def _place(log: PartitionLog) -> TopicPartition:
    return TopicPartition(log.topic, log.partition)


PATIENCE_SECONDS = 60.0


class Maintenance:
    """Runs the maintenance tasks of one log on their timetable. `start` and `close` may be called twice."""

    def __init__(self, owner: Log) -> None:
        self._owner = owner
        self._broker = owner.contents.broker_config()
        self._scheduler = owner.scheduler
        self._clock = owner.clock
        self.housekeeping = Housekeeping(
            owner, broker=self._broker, files=owner.files, clock=owner.clock, randomness=owner.randomness
        )
        self._clock_guard = ClockJumpGuard(owner.clock, hold_ms=self._broker.log_retention_check_interval_ms)
        self._lock: MaintenanceLock | None = None
        self._turning = threading.RLock()
        self._entries: dict[str, Scheduled] = {}
        self._failing: dict[str, TidegateError] = {}

    def start(self) -> None:
        if self._lock is not None:
            return
        interval_ms = self._broker.log_retention_check_interval_ms
        self._lock = MaintenanceLock(self._owner.path, interval_ms, files=self._owner.files)
        broker, tasks = self._broker, self.housekeeping
        first_ms = broker.log_initial_task_delay_ms
        self._every("retention", self._retain, broker.log_retention_check_interval_ms, first_ms)
        if broker.log_cleaner_enable:
            self._after("compaction", self._compact, first_ms)
        interval_ms = broker.replica_high_watermark_checkpoint_interval_ms
        for name, file_name, every_ms, begin_ms in (
            ("recovery points", RECOVERY_POINTS, broker.log_flush_offset_checkpoint_interval_ms, first_ms),
            ("log start offsets", LOG_STARTS, broker.log_flush_start_offset_checkpoint_interval_ms, first_ms),
            ("high watermarks", HIGH_WATERMARKS, interval_ms, interval_ms),
        ):
            self._every(name, partial(tasks.checkpoint, file_name), every_ms, begin_ms)
        interval_ms = broker.producer_id_expiration_check_interval_ms
        self._every("producer expiry", self._expire, interval_ms, interval_ms)
        self._after("flush", self._flush, 0)

    def close(self) -> None:
        """Stop: no new task begins, and a running one is waited for. Raises errors that persisted (T1)."""
        lock, self._lock = self._lock, None
        self.housekeeping.stop()
        if not self._turning.acquire(timeout=PATIENCE_SECONDS):
            raise UnavailableError(
                f"{self._owner.path}: a maintenance task has been running for more than {PATIENCE_SECONDS:.0f} s; "
                "the disk hangs or is overloaded"
            )
        self._turning.release()
        for entry in self._entries.values():
            entry.cancel()
        self._entries.clear()
        if lock is not None:
            lock.release()
        for error in self._failing.values():
            raise error

    # -- tasks -----------------------------------------------------------------------------------

    def _retain(self) -> None:
        if self._clock_is_sound():
            self.housekeeping.retain(compacted=False)
            self.housekeeping.clean_idle()
            if self._lock is not None:
                self._lock.publish(last_run_ms=self._clock.now_ms())

    def _compact(self) -> None:
        worked = False
        try:
            if self._clock_is_sound():
                worked = self.housekeeping.compact_dirtiest() is not None
                self.housekeeping.retain(compacted=True)
        finally:
            self._after("compaction", self._compact, 0 if worked else self._broker.log_cleaner_backoff_ms)

    def _expire(self) -> None:
        if self._clock_is_sound():
            self.housekeeping.expire_producers()

    def _flush(self) -> None:
        wait_ms = FLUSH_LOOK_MS
        try:
            wait_ms = self.housekeeping.flush_due()
        finally:
            self._after("flush", self._flush, max(1, wait_ms))

    def _clock_is_sound(self) -> bool:
        check = self._clock_guard.check()
        if check.jump_ms:
            held = format_duration(self._broker.log_retention_check_interval_ms)
            warnings.warn(
                TidegateWarning(
                    f"{self._owner.path}: the wall clock jumped {format_duration(check.jump_ms)} ahead, so "
                    f"nothing is aged out for {held}; if the clock is wrong, correct it before then: "
                    f"records that look too old are deleted after it"
                ),
                stacklevel=2,
            )
        return not check.suspended

    # -- the timetable ---------------------------------------------------------------------------

    def _every(self, name: str, action: Callable[[], object], interval_ms: int, first_ms: int) -> None:
        self._entries[name] = self._scheduler.every(
            interval_ms, lambda: self._turn(name, action), name, initial_delay_ms=first_ms
        )

    def _after(self, name: str, action: Callable[[], object], delay_ms: int) -> None:
        if self._lock is not None:
            self._entries[name] = self._scheduler.after(delay_ms, lambda: self._turn(name, action), name)

    def _turn(self, name: str, action: Callable[[], object]) -> None:
        with self._turning:
            if self._lock is None:
                return
            try:
                action()
                self._failing.pop(name, None)
            except TRY_LATER as error:
                self._failing[name] = error
                message = f"{name} of {self._owner.path} failed and will be tried again: {error}"
                warnings.warn(TidegateWarning(message), stacklevel=2)
