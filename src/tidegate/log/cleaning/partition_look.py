"""A partition as the chores see it: its log segments and offsets, whether or not it is open here.

Opening a partition to find out that nothing is due would cost a lock, a removed clean mark and several syncs,
for every partition, at every check. So a partition that nobody here has open is looked at through its files,
read-only; only where that look finds work is it opened.

Thread rule: values; `look_into` reads files of a partition that may be changing, so its answer is a hint that the
opened partition confirms or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidegate.clock import Clock
from tidegate.files import Files
from tidegate.log.cleaning.compaction import Cleanable, Limits, cleanable
from tidegate.log.cleaning.retention import Bounds, Removal, RetentionReport, plan_retention
from tidegate.log.segments.segment import LogSegment
from tidegate.log.topics.topic_config import TopicConfig
from tidegate.randomness import Randomness

if TYPE_CHECKING:
    from tidegate.log.access.partition_view import PartitionView
    from tidegate.log.partitions.partition import PartitionLog


@dataclass(frozen=True, slots=True)
class PartitionLook:
    """One partition at one moment."""

    topic: str
    partition: int
    config: TopicConfig
    segments: Sequence[LogSegment]
    bounds: Bounds
    last_stable: int

    def removals(self, now_ms: int) -> list[Removal]:
        """What a retention pass would take."""
        return plan_retention(self.segments, self.bounds, self.config, now_ms) if self.segments else []

    def retention(self, now_ms: int) -> RetentionReport:
        """The same, as the report of a pass that was not made."""
        removed = tuple(self.removals(now_ms))
        before = self.bounds.log_start_offset
        after = max(before, removed[-1].next_offset) if removed else before
        rolled = bool(removed) and len(removed) == len(self.segments)
        return RetentionReport(self.topic, self.partition, removed, before, after, rolled)

    def cleanable(self, checkpoint: int | None, now_ms: int) -> Cleanable | None:
        """What a compaction would cover; None for a partition that never held anything."""
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


def look_at(log: PartitionLog) -> PartitionLook:
    """An open partition."""
    with log.lock:
        bounds = Bounds(log.log_start_offset, log.high_watermark, log.log_end_offset)
        return PartitionLook(
            log.topic, log.partition, log.config, log.segments, bounds, log.last_stable_offset
        )


def look_into(
    view: PartitionView, config: TopicConfig, *, files: Files, clock: Clock, randomness: Randomness
) -> PartitionLook:
    """A partition that is not open here, through what its folder says; nothing is changed or locked."""
    seen = view.bounds()
    segments = [
        LogSegment(view.folder, base, config, files=files, clock=clock, randomness=randomness, read_only=True)
        for base, _ in view.segment_sizes()
    ]
    bounds = Bounds(seen.log_start, seen.high_watermark, seen.high_watermark)
    return PartitionLook(
        view.topic, view.partition, config, segments, bounds, min(seen.last_stable, seen.high_watermark)
    )
