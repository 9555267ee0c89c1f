"""Decide when the active log segment is full and a new one begins: Kafka's rules, as pure functions.

The test runs before an append is written; the first rule that applies is the reason:

    size             size > segment.bytes − append size
    time             size > 0 and waited > maximum age − jitter
    index_full       the offset index has no free entry
    time_index_full  the time index has no free entry but the one kept for the roll itself
    offset_overflow  last offset − base offset does not fit 31 bits

`waited` is event time when the segment's first batch has a timestamp (newest timestamp of the append − that
one), else wall-clock time since the segment object was made. `records_per_segment` says how many equal
records fit one segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tidegate.errors import InvalidError

if TYPE_CHECKING:
    from tidegate.log.append_validation import Prepared
    from tidegate.log.segment import LogSegment
    from tidegate.log.topic_config import TopicConfig


MAX_RELATIVE_OFFSET: Final = 2**31 - 1
OFFSET_ENTRY_BYTES: Final = 8
TIME_ENTRY_BYTES: Final = 12

SIZE: Final = "size"
TIME: Final = "time"
INDEX_FULL: Final = "index_full"
TIME_INDEX_FULL: Final = "time_index_full"
OFFSET_OVERFLOW: Final = "offset_overflow"


def roll_reason(segment: LogSegment, append: Prepared, config: TopicConfig, now_ms: int) -> str | None:
    """Return why the append needs a new log segment; None when it does not."""
    size = segment.size
    if size > config.segment_bytes - append.size:
        return SIZE
    if (
        size > 0
        and waited_ms(segment, append.max_timestamp, now_ms) > config.max_segment_ms - segment.roll_jitter_ms
    ):
        return TIME
    if segment.is_offset_index_full:
        return INDEX_FULL
    if segment.is_time_index_full:
        return TIME_INDEX_FULL
    if not 0 <= append.last_offset - segment.base_offset <= MAX_RELATIVE_OFFSET:
        return OFFSET_OVERFLOW
    return None


def waited_ms(segment: LogSegment, append_timestamp: int, now_ms: int) -> int:
    """Return how long the segment has been filling, in event time if its first batch has a timestamp."""
    first = segment.first_timestamp
    return append_timestamp - first if first >= 0 else now_ms - segment.created_ms


@dataclass(frozen=True, slots=True)
class SegmentCapacity:
    """How many equal records one log segment holds; `terms` has each rule's own limit."""

    records: int
    reason: str
    terms: dict[str, int]


def records_per_segment(
    *,
    record_bytes: int,
    interval_ms: int,
    segment_bytes: int,
    index_interval_bytes: int,
    segment_index_bytes: int,
    segment_ms: int,
    jitter_ms: int = 0,
) -> SegmentCapacity:
    """Return the capacity for batches of one record each, `record_bytes` long and `interval_ms` apart.

    `segment_ms` is the effective age limit (the smaller of `segment.ms` and, when compacting, the maximum lag).
    """
    if record_bytes <= 0 or record_bytes > segment_bytes:
        raise InvalidError(
            f"a batch of {record_bytes} bytes does not fit segment.bytes={segment_bytes}; "
            f"raise segment.bytes or make batches smaller",
            kafka_name="RECORD_LIST_TOO_LARGE",
        )
    if interval_ms < 0:
        raise InvalidError(f"records {interval_ms} ms apart: the interval cannot be negative")
    per_entry = index_interval_bytes // record_bytes + 1
    terms = {SIZE: segment_bytes // record_bytes}
    if interval_ms > 0:
        terms[TIME] = max(segment_ms - jitter_ms, 0) // interval_ms + 1
    terms[INDEX_FULL] = per_entry * (segment_index_bytes // OFFSET_ENTRY_BYTES) + 1
    # Records that share one timestamp add a single time-index entry between them.
    time_entries = segment_index_bytes // TIME_ENTRY_BYTES - 1
    if interval_ms > 0 or time_entries <= 1:
        terms[TIME_INDEX_FULL] = per_entry * max(time_entries, 0) + 1
    terms[OFFSET_OVERFLOW] = MAX_RELATIVE_OFFSET + 1
    reason = min(terms, key=lambda name: terms[name])  # the first in the order of the test wins a tie
    return SegmentCapacity(terms[reason], reason, terms)
