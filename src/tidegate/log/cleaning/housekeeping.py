"""The chores of a log's owner, one call each: retention, compaction, checkpoints, forgetting, flushing.

Owns which partitions a chore concerns and what happens when one fails. When chores are done is
`maintenance`'s; how, `retention`'s, `cleaner`'s and the partition's.

Partitions that are open here are worked on where they are. Idle ones (open nowhere here) are looked at from
outside and, where something is due, borrowed for as long as it takes; one that another process writes is left
to that process.

Invariants:
W1  A chore finishes its other partitions before it raises what one of them raised. No error is kept quiet.
W2  A partition whose compaction found damage is not compacted again by this object.
W3  A partition that is read-only is left alone, with one warning.
W4  The cleaner checkpoint moves after the swap: a crash between the two repeats a cleaning, never skips one.

Thread rule: one thread at a time; partitions may be appended to and read meanwhile.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from tidegate.clock import Clock
from tidegate.errors import ConflictError, TidegateError, TidegateWarning, UnavailableError
from tidegate.files import Files
from tidegate.log.cleaning.cleaner_checkpoint import CleanerCheckpoint, merge_checkpoint
from tidegate.log.cleaning.compaction import Cleanable, dirtiest
from tidegate.log.cleaning.partition_look import PartitionLook, look_at, look_into
from tidegate.log.cleaning.retention import RetentionReport, apply_retention
from tidegate.log.partitions.checkpoints import HIGH_WATERMARKS, LOG_STARTS, RECOVERY_POINTS
from tidegate.log.topics.topics import TopicPartition
from tidegate.randomness import Randomness

if TYPE_CHECKING:
    from tidegate.log.access.embedded import Log
    from tidegate.log.cleaning.cleaner import Cleaner, CompactionReport
    from tidegate.log.partitions.partition import PartitionLog
    from tidegate.log.topics.topic_config import BrokerConfig

FLUSH_LOOK_MS = 60_000
TRY_LATER = (UnavailableError, ConflictError)
HELD_ELSEWHERE = "another process writes it and has to clean it"


@dataclass(frozen=True, slots=True)
class PartitionOutcome:
    """What one pass did, or would do, to one partition.

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
    """The chores over all partitions of an owner."""

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
        """Let a compaction that is running give up soon; nothing of it will have happened."""
        if self._cleaner is not None:
            self._cleaner.stop()

    # -- retention and compaction ----------------------------------------------------------------

    def retain(self, *, compacted: bool) -> list[RetentionReport]:
        """One retention pass over the open partitions that are, or are not, compacted."""
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
                part = self._cleanable(look_at(log))
                if part is not None and part.checkpoint_reset:
                    self._checkpoint_of_cleaner.put(*_place(log), part.first_dirty)
                if part is not None and part.eligible(log.config.min_cleanable_dirty_ratio):
                    ready.append((log, part))
        chosen = dirtiest(ready)
        return None if chosen is None else self._compact(*chosen)

    def clean_idle(self) -> list[PartitionOutcome]:
        """Retention and compaction, where due, of the partitions that are not open here.

        Where the cleaner is off nobody ages compacted topics, as with those that are open.
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
        """Retention and, where dirty enough, one compaction of every partition, whatever the timetable.

        With `dry_run`, what that would do; then nothing is opened, locked or changed.
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
        look = look_into(
            view,
            self._owner.describe(place.topic).config,
            files=self._files,
            clock=self._clock,
            randomness=self._randomness,
        )
        expected = self._expect(look)
        # Only opening ends a replacement of log segments whose writer died; readers wait for that.
        is_half_replaced = view.bounds().generation % 2 == 1
        due = is_half_replaced or bool(expected.retention.removed) or expected.not_compacted_because is None
        if dry_run or not due:
            return expected
        with self._owner.borrowed(*place) as log:
            if log is None:
                nothing = RetentionReport(
                    *place, (), look.bounds.log_start_offset, look.bounds.log_start_offset, rolled=False
                )
                return PartitionOutcome(*place, nothing, None, None, None, HELD_ELSEWHERE)
            return self._clean_open(log, dry_run=False)

    def _clean_open(self, log: PartitionLog, *, dry_run: bool) -> PartitionOutcome:
        if dry_run or log.read_only_reason is not None:
            return replace(self._expect(look_at(log)), skipped=log.read_only_reason)
        retention = apply_retention(log, self._clock.now_ms())
        expected = self._expect(look_at(log))
        report, reason = None, expected.not_compacted_because
        if reason is None and expected.cleanable is not None:
            report = self._compact(log, expected.cleanable)
            reason = (
                None if report is not None else "the partition was cut meanwhile; the next pass looks again"
            )
        return PartitionOutcome(*_place(log), retention, expected.cleanable, report, reason)

    def _expect(self, look: PartitionLook) -> PartitionOutcome:
        """What a pass would do."""
        place = TopicPartition(look.topic, look.partition)
        part = reason = None
        ratio = look.config.min_cleanable_dirty_ratio
        if not look.config.compacts:
            reason = "cleanup.policy has no compact"
        elif not self._broker.log_cleaner_enable:
            reason = "log.cleaner.enable is false"
        elif place in self._uncleanable:
            reason = f"an earlier compaction failed: {self._uncleanable[place]}"
        elif (part := self._cleanable(look)) is None or not part.cleanable_bytes:
            reason = "nothing is dirty"
        elif not part.eligible(ratio):
            reason = f"dirty ratio {part.ratio:.2f} is not above min.cleanable.dirty.ratio {ratio:g}"
        return PartitionOutcome(*place, look.retention(self._clock.now_ms()), part, None, reason)

    def _cleanable(self, look: PartitionLook) -> Cleanable | None:
        checkpoint = self._checkpoint_of_cleaner.get(look.topic, look.partition)
        return look.cleanable(checkpoint, self._clock.now_ms())

    def _compact(self, log: PartitionLog, part: Cleanable) -> CompactionReport | None:
        if self._cleaner is None:
            from tidegate.log.cleaning.cleaner import Cleaner, CleanerSettings

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
            return None  # the partition was cut meanwhile: nothing happened, the next turn looks again
        except (TidegateError, OSError) as error:
            if log not in self._owner.open_partitions:
                return None  # it was closed meanwhile
            if not isinstance(error, UnavailableError):
                self._uncleanable[_place(log)] = str(error)
            raise
        self._checkpoint_of_cleaner.end(*_place(log), report.next_dirty)
        return report

    # -- checkpoints -----------------------------------------------------------------------------

    def checkpoint_recovery_points(self) -> None:
        self._checkpoint(RECOVERY_POINTS, lambda log: log.recovery_point)

    def checkpoint_high_watermarks(self) -> None:
        self._checkpoint(HIGH_WATERMARKS, lambda log: log.high_watermark)

    def checkpoint_log_starts(self) -> None:
        """Only a log start inside the first segment says more than the folder itself."""

        def inside(log: PartitionLog) -> int | None:
            start = log.log_start_offset
            return start if start > log.segments[0].base_offset else None

        self._checkpoint(LOG_STARTS, inside)

    def _checkpoint(self, name: str, offset_of: Callable[[PartitionLog], int | None]) -> None:
        lines: dict[tuple[str, int], int | None] = {
            _place(log): offset_of(log) for log in self._owner.open_partitions
        }
        merge_checkpoint(self._owner.path / name, lines, files=self._files, clock=self._clock)

    # -- producers and flushing ------------------------------------------------------------------

    def expire_producers(self) -> int:
        """Forget producers silent for `producer.id.expiration.ms`; how many."""
        now_ms = self._clock.now_ms()
        counts: list[int] = []
        self._each_open(self._writable(), lambda log: counts.append(log.remove_expired_producers(now_ms)))
        return sum(counts)

    def flush_due(self) -> int:
        """Flush the partitions whose `flush.ms` has passed; milliseconds until the next one is due."""
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

    # -- one after the other ---------------------------------------------------------------------

    def _writable(self) -> list[PartitionLog]:
        """The open partitions without those that refuse changes (W3)."""
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
                    raise  # else it was closed or deleted meanwhile, and what it said means nothing

        self._each(by_place, unless_closed)

    def _each(self, places: Iterable[TopicPartition], work: Callable[[TopicPartition], None]) -> None:
        """Do the work for every partition, then raise the gravest of what went wrong (W1)."""
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
