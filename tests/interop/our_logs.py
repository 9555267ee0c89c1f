"""The product's partition log as the comparisons open it: Kafka's recovery, and a clock that stands still."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import pyarrow as pa
from comparing import batch_heads, cleaned_heads, differences, is_compressed

from tidegate.clock import ManualClock
from tidegate.files import Files
from tidegate.log.compaction import Cleaner, CompactionReport
from tidegate.log.compaction_plan import Limits, cleanable
from tidegate.log.format.decode import decode
from tidegate.log.partition import PartitionLog
from tidegate.log.retention import apply_retention
from tidegate.log.topic_config import BrokerConfig, TopicConfig
from tidegate.randomness import SeededRandomness
from tidegate.scheduling import ManualScheduler

NOW_MS = 1_790_000_000_000
DELETE_HORIZON = 0x40


@dataclass(frozen=True, slots=True)
class OurPartition:
    """An open partition, and the time and chores it was given."""

    log: PartitionLog
    clock: ManualClock
    scheduler: ManualScheduler

    def compact(self, checkpoint: int | None) -> CompactionReport:
        """One cleaning from the checkpoint on, whatever the dirty ratio."""
        now_ms = self.clock.now_ms()
        part = cleanable(
            self.log.segments,
            checkpoint=checkpoint,
            log_start=self.log.log_start_offset,
            log_end=self.log.log_end_offset,
            last_stable=self.log.last_stable_offset,
            limits=Limits(),
            now_ms=now_ms,
        )
        cleaner = Cleaner(files=Files(), clock=self.clock, randomness=SeededRandomness(1))
        return cleaner.clean(self.log, part)

    def retain(self) -> None:
        """One retention check."""
        apply_retention(self.log, self.clock.now_ms())

    def close(self) -> None:
        """Close cleanly, after the files that were waiting for it are gone."""
        self.clock.advance("2m")
        self.scheduler.run_due()
        if not self.log.close(clean=True):
            raise AssertionError("the log was not closed cleanly")


def open_partition(
    folder: Path,
    config: Mapping[str, str],
    *,
    clean: bool = True,
    recovery_point: int = 0,
    log_start: int = 0,
    now_ms: int = NOW_MS,
) -> OurPartition:
    """Open a folder as a broker would."""
    clock = ManualClock(now_ms)
    scheduler = ManualScheduler(clock)
    log = PartitionLog.open(
        folder,
        TopicConfig.of(dict(config)),
        broker=BrokerConfig(),
        files=Files(),
        clock=clock,
        randomness=SeededRandomness(1),
        scheduler=scheduler,
        clean=clean,
        recovery_point=recovery_point,
        log_start=log_start,
        recovery="kafka",
    )
    return OurPartition(log, clock, scheduler)


def same_cleaning(ours: Path, theirs: Path) -> list[str]:
    """How two cleaned folders differ; with compression in them, records are compared instead of bytes."""
    if cleaned_heads(ours) != cleaned_heads(theirs):
        pairs = zip_longest(cleaned_heads(ours), cleaned_heads(theirs))
        return [f"{left} ≠ Kafka's {right}" for left, right in pairs if left != right]
    if not is_compressed(theirs):
        return differences(ours, theirs)
    names = [path.name for path in sorted(theirs.glob("*.log"))]
    return [
        f"{name}: other records"
        for name in names
        if not _records(ours / name).equals(_records(theirs / name))
    ] + [f"only we have {path.name}" for path in ours.glob("*.log") if path.name not in names]


def _records(log: Path) -> pa.RecordBatch:
    return decode(log.read_bytes(), topic="compared", partition=0, control="include")


def cleaning_time(after: Path, delete_retention_ms: int, about_ms: int) -> int:
    """When the broker cleaned: the latest delete horizon it set tells to the millisecond."""
    set_then = [
        head.base_timestamp - delete_retention_ms
        for head in batch_heads(after)
        if head.attributes & DELETE_HORIZON and head.base_timestamp - delete_retention_ms >= about_ms
    ]
    return max(set_then, default=about_ms + 1000)
