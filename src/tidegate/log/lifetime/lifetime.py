"""How long a record really lives: the arithmetic for a steady workload that need not exist yet.

Owns the formula from a topic's settings and a rhythm of appends to the four moments of a record's life, and
the rule behind each. Does not look at any file: `lifetime_segments` answers for log segments that exist,
`lifetime_traps` warns of settings that work against each other, `lifetime_chart` draws.

For record i (from 0) of a log segment that holds N records, one every p, with R = `retention.ms`,
C = the interval of retention checks and D = `file.delete.delay.ms`, timestamps being append times:

    readable for  (N-1-i)·p + R + d,  0 < d ≤ C       d: until the first check strictly after expiry
    on disk for   D longer

    guaranteed         R                    the last record of a segment, checked at once
    oldest at expiry   (N-1)·p + R          the first record, when its segment may go
    readable at most   (N-1)·p + R + C      the first record, checked as late as possible
    on disk at most    (N-1)·p + R + C + D

`retention.bytes` = B works alike with J·p in place of R, J = ceil(B / record size): a segment may go once J
later records exist. The rule that comes first decides. A producer slower than R + C has every record
collected before the next arrives, so its segments never fill (nor do they with B = 0). Between R and R + C
the bounds hold but need not be reached.

Pure; safe from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from tidegate.durations import format_duration, format_size
from tidegate.errors import InvalidError
from tidegate.log.partitions.rolling import SegmentCapacity, records_per_segment
from tidegate.log.topics.topic_config import BrokerConfig, TopicConfig


class Rule(Enum):
    """What decides that a record goes, or that it stays; the value is what reports print."""

    TIME = "time"
    SIZE = "size"
    START_OFFSET = "start-offset"
    COMPACTION = "compaction"
    UNLIMITED = "unlimited"
    UNATTENDED = "unattended"
    FUTURE_DATED = "future-dated"
    OLDER_SEGMENT = "older-segment"
    HIGH_WATERMARK = "high-watermark"


CLEANER_OFF = "log.cleaner.enable=false: nobody compacts or ages a compacted topic, so all its records stay"
_UNATTENDED = "nobody runs retention; start `tidegate log clean --every 5m`"


@dataclass(frozen=True, slots=True)
class Workload:
    """A steady rhythm: every `interval_ms` one append of `record_bytes`, batch overhead included."""

    record_bytes: int
    interval_ms: int

    def __post_init__(self) -> None:
        if self.record_bytes < 1:
            raise InvalidError(f"a record takes at least one byte in the log, not {self.record_bytes}")
        if self.interval_ms < 1:
            raise InvalidError(f"records are at least 1 ms apart, not {self.interval_ms}")


@dataclass(frozen=True, slots=True)
class Bound:
    """One moment of a record's life: its length (None: no end), the rule that sets it, and why in words."""

    ms: int | None
    rule: Rule
    because: str


@dataclass(frozen=True, slots=True)
class WorkloadLifetime:
    """The life of the first record of a log segment under a workload, `guaranteed` being any record's."""

    workload: Workload
    capacity: SegmentCapacity
    fill_ms: int
    check_interval_ms: int | None
    delete_delay_ms: int
    guaranteed: Bound
    oldest_at_expiry: Bound
    visible_max: Bound
    disk_max: Bound
    changes: tuple[str, ...]

    @property
    def retention_phase_ms(self) -> int | None:
        """From the last record of a segment until the segment may go."""
        return None if self.oldest_at_expiry.ms is None else self.oldest_at_expiry.ms - self.fill_ms

    def as_dict(self) -> dict[str, Any]:
        """For machines; the key names are a contract."""
        bounds = {
            "guaranteed": self.guaranteed,
            "oldest_at_expiry": self.oldest_at_expiry,
            "visible_max": self.visible_max,
            "disk_max": self.disk_max,
        }
        return {
            "record_bytes": self.workload.record_bytes,
            "interval_ms": self.workload.interval_ms,
            "records_per_segment": self.capacity.records,
            "segment_bytes": self.capacity.records * self.workload.record_bytes,
            "roll_rule": self.capacity.reason,
            "fill_ms": self.fill_ms,
            "check_interval_ms": self.check_interval_ms,
            "file_delete_delay_ms": self.delete_delay_ms,
            **{f"{name}_ms": bound.ms for name, bound in bounds.items()},
            "rules": {
                f"{name}_ms": {"rule": bound.rule.value, "because": bound.because}
                for name, bound in bounds.items()
            },
            "changes": list(self.changes),
        }


def check_interval_ms(config: TopicConfig, broker: BrokerConfig) -> int | None:
    """How often somebody looks whether log segments may go; None where nobody does.

    Compacted topics are swept by the cleaner, and by nobody where that is off.
    """
    if not config.compacts:
        return broker.log_retention_check_interval_ms
    return broker.log_cleaner_backoff_ms if broker.log_cleaner_enable else None


def workload_lifetime(
    workload: Workload, config: TopicConfig, broker: BrokerConfig, *, attended: bool = True
) -> WorkloadLifetime:
    """The four bounds for a workload; `attended=False` when nobody runs retention."""
    if workload.record_bytes > config.segment_bytes:
        raise InvalidError(
            f"a record of {workload.record_bytes} bytes does not fit into segment.bytes="
            f"{config.segment_bytes}, every append would be refused; raise segment.bytes",
            kafka_name="RECORD_LIST_TOO_LARGE",
        )
    capacity = records_per_segment(
        record_bytes=workload.record_bytes,
        interval_ms=workload.interval_ms,
        segment_bytes=config.segment_bytes,
        index_interval_bytes=config.index_interval_bytes,
        segment_index_bytes=config.segment_index_bytes,
        segment_ms=config.max_segment_ms,
    )
    interval = check_interval_ms(config, broker) if attended else None
    limit = _deciding_limit(workload, config)
    fill = (capacity.records - 1) * workload.interval_ms
    if (
        limit is not None
        and interval is not None
        and (workload.interval_ms > limit[0] + interval or config.retention_bytes == 0)
    ):
        fill = 0  # collected before it fills: the active log segment is no exception to retention
    unswept = config.compacts and not broker.log_cleaner_enable
    expiry = _expiry(fill, limit, config)
    if unswept and limit is None:
        expiry = Bound(None, Rule.UNATTENDED, CLEANER_OFF)
    visible = _visible(expiry, interval, CLEANER_OFF if unswept else _UNATTENDED)
    return WorkloadLifetime(
        workload=workload,
        capacity=capacity,
        fill_ms=fill,
        check_interval_ms=interval,
        delete_delay_ms=config.file_delete_delay_ms,
        guaranteed=_uncleaned(limit) if unswept else _guaranteed(limit, config),
        oldest_at_expiry=expiry,
        visible_max=visible,
        disk_max=_on_disk(visible, config),
        changes=_changes(workload, config, capacity, fill, limit, interval),
    )


def _deciding_limit(workload: Workload, config: TopicConfig) -> tuple[int, Rule, str] | None:
    """The shorter of time and size retention, counted from the last record of a segment; None: no limit."""
    if not config.deletes:
        return None
    limits: list[tuple[int, Rule, str]] = []
    if config.retention_ms >= 0:
        limits.append((config.retention_ms, Rule.TIME, f"retention.ms={config.retention_ms}"))
    if config.retention_bytes >= 0:
        later = -(-config.retention_bytes // workload.record_bytes)
        because = f"retention.bytes={config.retention_bytes} is reached by {later} later records"
        limits.append((later * workload.interval_ms, Rule.SIZE, because))
    return min(limits, key=lambda entry: entry[0], default=None)


def _guaranteed(limit: tuple[int, Rule, str] | None, config: TopicConfig) -> Bound:
    if config.compacts and (limit is None or config.min_compaction_lag_ms < limit[0]):
        because = (
            f"a newer record of the same key may remove it after min.compaction.lag.ms="
            f"{config.min_compaction_lag_ms}; the newest record of a key "
            + ("is kept for ever" if limit is None else f"has {format_duration(limit[0])}")
        )
        return Bound(config.min_compaction_lag_ms, Rule.COMPACTION, because)
    if limit is None:
        return Bound(None, Rule.UNLIMITED, "neither retention.ms nor retention.bytes sets a limit")
    if limit[1] is Rule.SIZE:
        return Bound(limit[0], Rule.SIZE, f"{limit[2]}; the last record of a log segment has no more")
    return Bound(limit[0], Rule.TIME, f"{limit[2]}; the last record of a log segment has no more")


def _uncleaned(limit: tuple[int, Rule, str] | None) -> Bound:
    """What a record of a compacted topic has where nothing is compacted."""
    if limit is None:
        return Bound(None, Rule.UNATTENDED, CLEANER_OFF)
    return Bound(limit[0], limit[1], f"{limit[2]}, should somebody check; {CLEANER_OFF}")


def _expiry(fill_ms: int, limit: tuple[int, Rule, str] | None, config: TopicConfig) -> Bound:
    if limit is None:
        if config.compacts:
            return Bound(
                None, Rule.COMPACTION, "cleanup.policy=compact keeps the newest record of every key for ever"
            )
        return Bound(None, Rule.UNLIMITED, "neither retention.ms nor retention.bytes sets a limit")
    because = (
        f"a log segment goes as a whole: its last record comes {format_duration(fill_ms)} after its first, "
        f"then {limit[2]}"
    )
    return Bound(fill_ms + limit[0], limit[1], because)


def _visible(expiry: Bound, interval_ms: int | None, unattended: str) -> Bound:
    if expiry.ms is None:
        return expiry
    if interval_ms is None:
        return Bound(None, Rule.UNATTENDED, unattended)
    because = f"retention is checked every {format_duration(interval_ms)}, at worst just before expiry"
    return Bound(expiry.ms + interval_ms, expiry.rule, because)


def _on_disk(visible: Bound, config: TopicConfig) -> Bound:
    if visible.ms is None:
        return visible
    delay = config.file_delete_delay_ms
    because = f"the files are renamed .deleted and unlinked after file.delete.delay.ms={delay}"
    return Bound(visible.ms + delay, visible.rule, because)


def _changes(
    workload: Workload,
    config: TopicConfig,
    capacity: SegmentCapacity,
    fill_ms: int,
    limit: tuple[int, Rule, str] | None,
    interval_ms: int | None,
) -> tuple[str, ...]:
    """What to set so that records go nearer to the retention that was asked for."""
    if limit is None or limit[0] == 0:
        return ()
    changes = []
    target = limit[0] // 10
    if fill_ms > target:
        records = max(1, target // workload.interval_ms + 1)
        size = max(records * workload.record_bytes, 14)
        if capacity.records > records:
            changes.append(
                f"segment.bytes={size} ({format_size(size)}, {records} records) makes a log segment span "
                f"{format_duration((records - 1) * workload.interval_ms)}, not {format_duration(fill_ms)}"
            )
    wanted = max(1000, target)
    if interval_ms is not None and interval_ms > wanted and not config.compacts:
        changes.append(
            f"log.retention.check.interval.ms={wanted} (broker) checks every {format_duration(wanted)}, "
            f"not every {format_duration(interval_ms)}"
        )
    return tuple(changes)
