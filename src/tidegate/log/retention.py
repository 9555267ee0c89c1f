"""Kafka's three retention rules, as pure counts over a partition's log segments, and one pass that applies them.

The rules, in the order of a pass; each starts at the oldest segment and stops at the first that does not match:

| rule | a segment matches while | policies |
|---|---|---|
| start-offset | the next segment's base ≤ log start offset | all |
| size | removing it leaves at least `retention.bytes` (which must be ≥ 0) | with `delete` |
| time | now − its largest timestamp > `retention.ms` (which must be ≥ 0) | with `delete` |

R1  A segment is removed only when the high watermark has reached its end (the next segment's base, or the log end).
R2  A last segment without bytes is never removed; for one with bytes the partition first rolls an empty segment.
R3  A segment that does not match keeps every segment after it, whatever their timestamps are.

Thread rule: the counts are pure; a pass runs under the partition's own lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.log.partition import PartitionLog
    from tidegate.log.segment import LogSegment
    from tidegate.log.topic_config import TopicConfig


class Reason(Enum):
    """Why log segments were removed; reports and the command line print the value."""

    START_OFFSET = "start-offset"
    SIZE = "size"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The offsets of one partition that limit every rule."""

    log_start_offset: int
    high_watermark: int
    log_end_offset: int


def breaching_start_offset(segments: Sequence[LogSegment], bounds: Bounds) -> int:
    """Return how many of the oldest segments lie wholly below the log start offset."""

    def matches(index: int) -> bool:
        return index + 1 < len(segments) and segments[index + 1].base_offset <= bounds.log_start_offset

    return _leading(segments, bounds, matches)


def breaching_size(segments: Sequence[LogSegment], bounds: Bounds, retention_bytes: int) -> int:
    """Return how many of the oldest segments can go and leave `retention_bytes`; negative is no limit."""
    total = sum(segment.size for segment in segments)
    if retention_bytes < 0 or total < retention_bytes:
        return 0
    surplus = total - retention_bytes

    def matches(index: int) -> bool:
        nonlocal surplus
        size = segments[index].size
        if surplus - size < 0:
            return False
        surplus -= size
        return True

    return _leading(segments, bounds, matches)


def breaching_time(segments: Sequence[LogSegment], bounds: Bounds, retention_ms: int, now_ms: int) -> int:
    """Return how many of the oldest segments hold only records older than `retention_ms`; negative is no limit."""
    if retention_ms < 0:
        return 0
    return _leading(segments, bounds, lambda index: now_ms - segments[index].largest_timestamp > retention_ms)


def _leading(segments: Sequence[LogSegment], bounds: Bounds, matches: Callable[[int], bool]) -> int:
    """Return the number of matching segments from the oldest on (R1, R2, R3)."""
    for index, segment in enumerate(segments):
        is_last = index + 1 == len(segments)
        end = bounds.log_end_offset if is_last else segments[index + 1].base_offset
        if bounds.high_watermark < end or not matches(index) or (is_last and segment.size == 0):
            return index
    return len(segments)


@dataclass(frozen=True, slots=True)
class Removal:
    """One log segment to remove; its files are unlinked after `file.delete.delay.ms`."""

    base_offset: int
    next_offset: int
    size_bytes: int
    largest_timestamp: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """The result of one pass over one partition. `rolled`: the active segment was removed, too."""

    topic: str
    partition: int
    removed: tuple[Removal, ...]
    log_start_before: int
    log_start_after: int
    rolled: bool

    @property
    def removed_bytes(self) -> int:
        return sum(removal.size_bytes for removal in self.removed)


def report_of(
    topic: str, partition: int, removals: Sequence[Removal], bounds: Bounds, segments: int
) -> RetentionReport:
    """Return the report of a pass that removes these of the partition's segments."""
    before = bounds.log_start_offset
    after = max(before, removals[-1].next_offset) if removals else before
    rolled = bool(removals) and len(removals) == segments
    return RetentionReport(topic, partition, tuple(removals), before, after, rolled)


def plan_retention(
    segments: Sequence[LogSegment], bounds: Bounds, config: TopicConfig, now_ms: int
) -> list[Removal]:
    """Return the segments that a pass removes, oldest first: by start offset, then size, then time."""
    removals: list[Removal] = []
    for reason in Reason if config.deletes else (Reason.START_OFFSET,):
        if reason is Reason.START_OFFSET:
            count = breaching_start_offset(segments, bounds)
        elif reason is Reason.SIZE:
            count = breaching_size(segments, bounds, config.retention_bytes)
        else:
            count = breaching_time(segments, bounds, config.retention_ms, now_ms)
        ends = [segment.base_offset for segment in segments[1:]] + [bounds.log_end_offset]
        removals += [
            Removal(segment.base_offset, end, segment.size, segment.largest_timestamp, reason)
            for segment, end in zip(segments[:count], ends, strict=False)
        ]
        segments = segments[count:]
    return removals


def apply_retention(log: PartitionLog, now_ms: int) -> RetentionReport:
    """Run one retention pass over one partition."""
    with log.lock:
        segments = log.segments
        bounds = Bounds(log.log_start_offset, log.high_watermark, log.log_end_offset)
        removals = plan_retention(segments, bounds, log.config, now_ms)
        for reason in Reason:
            bases = {removal.base_offset for removal in removals if removal.reason is reason}
            if bases:
                chosen = [segment for segment in segments if segment.base_offset in bases]
                log.delete_segments(chosen, reason.value)
    return report_of(log.topic, log.partition, removals, bounds, len(segments))
