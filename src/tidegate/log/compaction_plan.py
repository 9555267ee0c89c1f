"""Decide which part of a compacted partition to compact next, and how its log segments are merged.

    clean ──────────────► first dirty ─────── cleanable ───────► uncleanable ──── … active ──►

Pure arithmetic: first dirty offset, uncleanable offset, dirty ratio, eligibility, lag, and
the grouping of segments into their replacements. `compaction` reads, filters and rewrites. Ranges are half-open.

Invariants:
P1  Nothing at or above the last stable offset, in the active segment, or in a dirty segment with a record
    younger than `min.compaction.lag.ms` is cleaned; the whole segment that holds the first such offset stays.
P2  A checkpoint outside [log start, log end] is ignored: the partition is dirty from its log start.
P3  A group's replacement fits: its log ≤ `segment.bytes`, its indexes ≤ `segment.index.bytes`, its offsets
    within 2^31-1 of its base.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tidegate.log.segment import LogSegment

MAX_RELATIVE_OFFSET = 2**31 - 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings that decide when a partition is compacted."""

    min_lag_ms: int = 0
    max_lag_ms: int = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Cleanable:
    """The part of one partition that a compaction would cover.

    `checkpoint_reset`: the stored cleaner checkpoint was unusable (P2) and must be rewritten to `first_dirty`.
    `overdue_ms`: the time by which `max.compaction.lag.ms` was exceeded, 0 when it was not.
    """

    first_dirty: int
    first_uncleanable: int
    clean_bytes: int
    cleanable_bytes: int
    overdue_ms: int
    checkpoint_reset: bool

    @property
    def ratio(self) -> float:
        total = self.clean_bytes + self.cleanable_bytes
        return self.cleanable_bytes / total if total else 0.0

    def eligible(self, min_ratio: float) -> bool:
        """Return whether the dirty ratio exceeds `min_ratio`, or the maximum compaction lag has passed."""
        if self.cleanable_bytes <= 0:
            return False
        return self.overdue_ms > 0 or self.ratio > min_ratio


def first_dirty_offset(checkpoint: int | None, log_start: int, log_end: int) -> tuple[int, bool]:
    """Return the first dirty offset, and whether the stored checkpoint must be reset (P2)."""
    if checkpoint is None:
        return log_start, False
    if checkpoint < log_start or checkpoint > log_end:
        return log_start, True
    return checkpoint, False


def cleanable(
    segments: Sequence[LogSegment],
    *,
    checkpoint: int | None,
    log_start: int,
    log_end: int,
    last_stable: int,
    limits: Limits,
    now_ms: int,
) -> Cleanable:
    """Return what can be compacted now; `segments` are all of the partition's, oldest first, the last one active."""
    first_dirty, reset = first_dirty_offset(checkpoint, log_start, log_end)
    active = segments[-1]
    dirty = inactive_from(segments, first_dirty)
    candidates = [last_stable, active.base_offset]
    if limits.min_lag_ms > 0:
        young = (s.base_offset for s in dirty if s.largest_timestamp > now_ms - limits.min_lag_ms)
        candidates += [next(young, active.base_offset)]
    uncleanable = max(first_dirty, min(candidates))
    # The segment that holds the uncleanable offset is not touched at all (P1).
    first_kept = next(iter(inactive_from(segments, uncleanable)), active).base_offset
    return Cleanable(
        first_dirty=first_dirty,
        first_uncleanable=first_kept,
        clean_bytes=sum(s.size for s in segments if s.base_offset < first_dirty),
        cleanable_bytes=sum(s.size for s in between(segments, min(first_dirty, first_kept), first_kept)),
        overdue_ms=_overdue_ms(dirty, limits.max_lag_ms, now_ms),
        checkpoint_reset=reset,
    )


def _overdue_ms(dirty: Iterable[LogSegment], max_lag_ms: int, now_ms: int) -> int:
    clean_until = now_ms - max_lag_ms
    if clean_until <= 0:  # no timestamp is earlier, so no segment needs to be read
        return 0
    earliest = min((s.first_timestamp for s in dirty if s.first_timestamp > 0), default=clean_until)
    return max(0, clean_until - earliest)


def between(segments: Sequence[LogSegment], start: int, stop: int) -> list[LogSegment]:
    """Return the segments that may hold offsets of [start, stop), from the one that holds `start` on."""
    if start >= stop:
        return []
    below = [segment for segment in segments if segment.base_offset < stop]
    first = max((i for i, segment in enumerate(below) if segment.base_offset <= start), default=0)
    return below[first:]


def inactive_from(segments: Sequence[LogSegment], start: int) -> list[LogSegment]:
    """Like `between`, up to the active segment, exclusive."""
    active = segments[-1]
    return between(segments, start, active.base_offset)


def dirtiest(candidates: Iterable[tuple[T, Cleanable]]) -> tuple[T, Cleanable] | None:
    """Return the candidate with the highest dirty ratio; the first one on a tie."""
    return max(candidates, key=lambda candidate: candidate[1].ratio, default=None)


def group_segments(
    segments: Sequence[LogSegment], *, max_bytes: int, max_index_bytes: int, first_uncleanable: int
) -> list[list[LogSegment]]:
    """Group the segments into runs that are each replaced by one segment (P3)."""
    groups: list[list[LogSegment]] = []
    log_bytes = index_bytes = time_bytes = 0
    for position, segment in enumerate(segments):
        following = position + 1 < len(segments)
        # The next segment's base bounds this one's last offset without reading it.
        last_offset = (segments[position + 1].base_offset if following else first_uncleanable) - 1
        joins = (
            bool(groups)
            and log_bytes + segment.size <= max_bytes
            and index_bytes + segment.offset_index_bytes <= max_index_bytes
            and time_bytes + segment.time_index_bytes <= max_index_bytes
            and (segment.size == 0 or last_offset - groups[-1][0].base_offset <= MAX_RELATIVE_OFFSET)
        )
        if not joins:
            groups.append([])
            log_bytes = index_bytes = time_bytes = 0
        groups[-1].append(segment)
        log_bytes += segment.size
        index_bytes += segment.offset_index_bytes
        time_bytes += segment.time_index_bytes
    return groups
