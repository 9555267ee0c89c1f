"""Forecast when records and log segments of a partition disappear. Pure functions; times are epoch milliseconds.

`workload_lifetime` is for a steady workload that need not exist yet, `forecast` for the log segments of an existing
partition, from the facts that `facts` reads. For record i (from 0) of a log segment that holds N records, one every
p, with R = `retention.ms`, C = the interval of retention checks and D = `file.delete.delay.ms`:

    readable for       (N-1-i)·p + R + d,  0 < d ≤ C       d: until the first check strictly after expiry
    guaranteed         R                    the last record of a segment, checked at once
    oldest at expiry   (N-1)·p + R          the first record, when its segment expires
    readable at most   (N-1)·p + R + C      the first record, checked as late as possible
    on disk at most    (N-1)·p + R + C + D

`retention.bytes` = B is treated the same way, with J·p in place of R and J = ceil(B / record size). The rule that
applies first decides. A producer slower than R + C has every record collected before the next one arrives, so its
segments never fill (with B = 0 they never do).

For existing segments, a retention pass walks from the oldest segment and stops at the first unexpired one, so

    E1  a segment becomes due at max(when the next older one does, min(its own rules)): one future-dated
        segment holds back every newer one;
    E2  the rules by time and size need `cleanup.policy` with delete, the one by log start offset never does;
    E3  the active segment counts too, but while records keep arriving its newest timestamp moves: its latest
        moment follows from `segment.ms`, after which the next record opens another segment;
    E4  removal follows 1 ms to one check interval after expiry, and never when no process runs the checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from tidegate.durations import format_duration, format_moment, format_size
from tidegate.errors import InvalidError
from tidegate.log.segment_roll import SegmentCapacity, records_per_segment
from tidegate.log.topic_config import BrokerConfig, TopicConfig


class Rule(Enum):
    """The reason why a record is removed, or why it stays; reports print the value."""

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
    """A steady workload: every `interval_ms` one append of `record_bytes`, batch overhead included."""

    record_bytes: int
    interval_ms: int

    def __post_init__(self) -> None:
        if self.record_bytes < 1:
            raise InvalidError(f"a record takes at least one byte in the log, not {self.record_bytes}")
        if self.interval_ms < 1:
            raise InvalidError(f"records are at least 1 ms apart, not {self.interval_ms}")


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound on a record's life: its length (None: no end), the rule that sets it, and the reason in words."""

    ms: int | None
    rule: Rule
    because: str


@dataclass(frozen=True, slots=True)
class WorkloadLifetime:
    """The life of the first record of a log segment under a workload; `guaranteed` holds for any record."""

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
        """The time from a segment's last record until the segment expires."""
        return None if self.oldest_at_expiry.ms is None else self.oldest_at_expiry.ms - self.fill_ms

    def as_dict(self) -> dict[str, Any]:
        """Return the lifetime as a dict for JSON; the key names are stable."""
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
    """Return how often log segments are checked for removal; None where no process checks.

    The cleaner checks compacted topics; where it is off, no process does.
    """
    if not config.compacts:
        return broker.log_retention_check_interval_ms
    return broker.log_cleaner_backoff_ms if broker.log_cleaner_enable else None


def capacity_of(config: TopicConfig, record_bytes: int, interval_ms: int) -> SegmentCapacity:
    """Return how many such records a log segment of the topic holds."""
    return records_per_segment(
        record_bytes=record_bytes,
        interval_ms=interval_ms,
        segment_bytes=max(config.segment_bytes, record_bytes),
        index_interval_bytes=config.index_interval_bytes,
        segment_index_bytes=config.segment_index_bytes,
        segment_ms=config.max_segment_ms,
    )


def workload_lifetime(
    workload: Workload, config: TopicConfig, broker: BrokerConfig, *, attended: bool = True
) -> WorkloadLifetime:
    """Return the four bounds for a workload; `attended=False` when no process runs retention."""
    if workload.record_bytes > config.segment_bytes:
        raise InvalidError(
            f"a record of {workload.record_bytes} bytes does not fit into segment.bytes="
            f"{config.segment_bytes}, every append would be refused; raise segment.bytes",
            kafka_name="RECORD_LIST_TOO_LARGE",
        )
    capacity = capacity_of(config, workload.record_bytes, workload.interval_ms)
    interval = check_interval_ms(config, broker) if attended else None
    limit = _deciding_limit(workload, config)
    fill = (capacity.records - 1) * workload.interval_ms
    if (
        limit is not None
        and interval is not None
        and (workload.interval_ms > limit[0] + interval or config.retention_bytes == 0)
    ):
        fill = 0  # expires before it fills: retention removes the active log segment, too
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
    """Return the shorter of time and size retention, from a segment's last record on; None if there is no limit."""
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
    return Bound(limit[0], limit[1], f"{limit[2]}; the last record of a log segment has no more")


def _uncleaned(limit: tuple[int, Rule, str] | None) -> Bound:
    """Return the bound for a record of a compacted topic where the cleaner does not run."""
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
    """Return settings that would bring the lifetime closer to the configured retention."""
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


# -- segments --------------------------------------------------------------------------------------

FUTURE_TOLERANCE_MS = 60_000  # clocks usually differ by seconds, not by minutes


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """The facts of one log segment. `largest_timestamp_ms` is the file's mtime when no record has a timestamp."""

    base_offset: int
    next_offset: int
    size_bytes: int
    first_timestamp_ms: int | None
    largest_timestamp_ms: int
    timestamp_is_file_time: bool
    active: bool


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """One partition at one moment. `check_interval_ms` is None when no process runs retention."""

    topic: str
    partition: int
    segments: tuple[SegmentFacts, ...]
    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    now_ms: int
    check_interval_ms: int | None

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)

    @property
    def bytes_per_ms(self) -> float | None:
        """The growth rate of the partition by its own timestamps; None when they do not tell."""
        stamped = [s for s in self.segments if s.first_timestamp_ms is not None and s.size_bytes]
        if not stamped:
            return None
        first = min(s.first_timestamp_ms for s in stamped if s.first_timestamp_ms is not None)
        last = max(min(s.largest_timestamp_ms, self.now_ms) for s in stamped)
        return sum(s.size_bytes for s in stamped) / (last - first) if last > first else None


@dataclass(frozen=True, slots=True)
class SegmentLifetime:
    """The forecast for one log segment. A moment that is None means never, with the current settings."""

    segment: SegmentFacts
    rule: Rule
    due_ms: int | None
    gone_earliest_ms: int | None
    gone_latest_ms: int | None
    disk_earliest_ms: int | None
    disk_latest_ms: int | None
    headroom_bytes: int | None
    blocked_by: int | None
    because: str
    change: str | None

    def as_dict(self) -> dict[str, Any]:
        facts = asdict(self)
        segment: dict[str, Any] = facts.pop("segment")
        return segment | facts | {"rule": self.rule.value}


@dataclass(frozen=True, slots=True)
class _Due:
    """When a retention pass would remove a segment; `latest` differs for an active one (E3)."""

    earliest: int | None
    latest: int | None
    rule: Rule
    because: str
    change: str | None = None
    blocked_by: int | None = None


def forecast(facts: PartitionFacts, config: TopicConfig) -> list[SegmentLifetime]:
    """Return the lifetime of every log segment, oldest first."""
    lifetimes: list[SegmentLifetime] = []
    older: _Due | None = None
    for index, segment in enumerate(facts.segments):
        headroom = _headroom(facts, config, index)
        due = _behind(older, _own_due(facts, config, index, headroom), facts.segments[:index])
        lifetimes.append(_lifetime(facts, config, segment, due, headroom))
        older = due
    return lifetimes


def lifetime_of_offset(lifetimes: Sequence[SegmentLifetime], offset: int) -> SegmentLifetime | None:
    """Return the forecast of the log segment that holds the offset; None when no segment does."""
    for lifetime in lifetimes:
        if lifetime.segment.base_offset <= offset < lifetime.segment.next_offset:
            return lifetime
    return None


def _headroom(facts: PartitionFacts, config: TopicConfig, index: int) -> int | None:
    """Return how many bytes may still arrive before the size rule removes the segment; None without a size rule."""
    if not config.deletes or config.retention_bytes < 0:
        return None
    newer = sum(segment.size_bytes for segment in facts.segments[index + 1 :])
    return max(0, config.retention_bytes - newer)


def _own_due(facts: PartitionFacts, config: TopicConfig, index: int, headroom: int | None) -> _Due:
    segment = facts.segments[index]
    if not segment.active and segment.next_offset <= facts.log_start_offset:
        because = f"all of it lies below the log start offset {facts.log_start_offset}"
        return _Due(facts.now_ms, facts.now_ms, Rule.START_OFFSET, because)
    if not config.deletes:
        return _compacted(facts, config, segment)
    if segment.active and segment.size_bytes == 0:
        return _Due(None, None, Rule.UNLIMITED, "an empty active log segment is never removed")
    candidates = [
        due
        for due in (_by_size(facts, config, headroom), _by_time(facts, config, segment))
        if due is not None
    ]
    if not candidates:
        return _Due(
            None,
            None,
            Rule.UNLIMITED,
            "neither retention.ms nor retention.bytes sets a limit",
            "set retention.ms or retention.bytes",
        )
    first = min(candidates, key=lambda due: _or_forever(due.earliest))
    latest = min(candidates, key=lambda due: _or_forever(due.latest)).latest
    if segment.next_offset > facts.high_watermark:
        return _Due(
            None,
            None,
            Rule.HIGH_WATERMARK,
            f"the high watermark {facts.high_watermark} has not reached its end {segment.next_offset}",
            "let the writer acknowledge, or reopen the log so that its tail is recovered",
        )
    return _Due(first.earliest, latest, first.rule, first.because, first.change)


def _by_time(facts: PartitionFacts, config: TopicConfig, segment: SegmentFacts) -> _Due | None:
    if config.retention_ms < 0:
        return None
    due = segment.largest_timestamp_ms + config.retention_ms + 1  # strictly older than retention.ms
    latest = due
    newest = format_moment(segment.largest_timestamp_ms)
    because = f"its newest record is of {newest}, and retention.ms={config.retention_ms}"
    change = None
    rule = Rule.TIME
    if segment.timestamp_is_file_time:
        because = (
            f"no record has a timestamp, its file is of {newest}, and retention.ms={config.retention_ms}"
        )
    if segment.largest_timestamp_ms > facts.now_ms + FUTURE_TOLERANCE_MS:
        rule = Rule.FUTURE_DATED
        because = f"its newest timestamp {newest} lies in the future"
        change = (
            f"delete up to offset {segment.next_offset}, or wait; message.timestamp.after.max.ms=3600000 "
            f"refuses such records from now on"
        )
    if segment.active and segment.first_timestamp_ms is not None:
        latest = max(due, segment.first_timestamp_ms + config.max_segment_ms + config.retention_ms + 1)
        because += "; while records arrive it stays, and rolls on the first one later than segment.ms"
        full = _full_ms(facts, config, segment)
        if full is not None and full < segment.first_timestamp_ms + config.max_segment_ms:
            because += f" or, at the measured rate, when full, about {format_moment(full)}"
        change = change or f"segment.ms={max(1, config.retention_ms // 10)} rolls it sooner"
    return _Due(due, latest, rule, because, change)


def _full_ms(facts: PartitionFacts, config: TopicConfig, segment: SegmentFacts) -> int | None:
    """Return when the active log segment reaches `segment.bytes` if the partition keeps growing at its rate."""
    rate = facts.bytes_per_ms
    if rate is None or rate <= 0:
        return None
    return facts.now_ms + int(max(0, config.segment_bytes - segment.size_bytes) / rate)


def _by_size(facts: PartitionFacts, config: TopicConfig, headroom: int | None) -> _Due | None:
    if headroom is None:
        return None
    if headroom == 0:
        return _Due(
            facts.now_ms,
            facts.now_ms,
            Rule.SIZE,
            f"at least retention.bytes={config.retention_bytes} is newer than it",
            "raise retention.bytes to keep it",
        )
    rate = facts.bytes_per_ms
    because = f"{format_size(headroom)} more make retention.bytes={config.retention_bytes} newer than it"
    if rate is None:
        return _Due(None, None, Rule.SIZE, because)
    due = facts.now_ms + int(headroom / rate)
    because += f", at the measured rate about {format_moment(due)}; should none arrive, it stays"
    return _Due(due, None, Rule.SIZE, because)


def _compacted(facts: PartitionFacts, config: TopicConfig, segment: SegmentFacts) -> _Due:
    if segment.active:
        because = "cleanup.policy=compact never touches the active log segment"
        return _Due(
            None, None, Rule.COMPACTION, because, "segment.ms or max.compaction.lag.ms closes it sooner"
        )
    since = max(facts.now_ms, segment.largest_timestamp_ms + config.min_compaction_lag_ms)
    because = (
        f"from {format_moment(since)} on a cleaning may remove records with a newer one of the same key; "
        f"the newest of every key stays for ever"
    )
    if facts.check_interval_ms is None:
        because = f"nobody runs compaction, so all records stay; {because}"
    return _Due(None, None, Rule.COMPACTION, because, "cleanup.policy=compact,delete ends their life, too")


def _behind(older: _Due | None, own: _Due, before: Sequence[SegmentFacts]) -> _Due:
    """Return the later of both times (E1): a pass stops at the first unexpired segment."""
    if older is None or own.rule in (Rule.START_OFFSET, Rule.COMPACTION):
        return own
    late = _or_forever(older.earliest) > _or_forever(own.earliest)
    if not late:
        return _Due(
            own.earliest,
            None if older.latest is None or own.latest is None else max(older.latest, own.latest),
            own.rule,
            own.because,
            own.change,
        )
    blocker = older.blocked_by if older.blocked_by is not None else before[-1].base_offset
    rule = older.rule if older.rule is Rule.FUTURE_DATED else Rule.OLDER_SEGMENT
    because = f"log segment {blocker} before it stays until then: {older.because}"
    if older.blocked_by is not None:
        because = older.because
    latest = None if older.latest is None or own.latest is None else max(older.latest, own.latest)
    return _Due(older.earliest, latest, rule, because, older.change, blocker)


def _lifetime(
    facts: PartitionFacts, config: TopicConfig, segment: SegmentFacts, due: _Due, headroom: int | None
) -> SegmentLifetime:
    interval, delay = facts.check_interval_ms, config.file_delete_delay_ms
    earliest = None if due.earliest is None else max(due.earliest, facts.now_ms)
    latest = None if due.latest is None or interval is None else max(due.latest, facts.now_ms) + interval
    rule, because, change = due.rule, due.because, due.change
    if interval is None and due.earliest is not None:
        rule = Rule.UNATTENDED
        because = (
            f"nobody runs retention; a pass would take it from {format_moment(due.earliest)} on ({because})"
        )
        change = "run `tidegate log clean --every 5m`, or open the log with maintenance=True"
        earliest = None
    return SegmentLifetime(
        segment=segment,
        rule=rule,
        due_ms=due.earliest,
        gone_earliest_ms=earliest,
        gone_latest_ms=latest,
        disk_earliest_ms=None if earliest is None else earliest + delay,
        disk_latest_ms=None if latest is None else latest + delay,
        headroom_bytes=headroom,
        blocked_by=due.blocked_by,
        because=because,
        change=change,
    )


def _or_forever(moment_ms: int | None) -> float:
    return float("inf") if moment_ms is None else moment_ms


def describe_age(record_timestamp_ms: int | None, gone_ms: int | None) -> str | None:
    """Return how old a record will be when it is removed; None when either time is unknown."""
    if record_timestamp_ms is None or gone_ms is None or gone_ms < record_timestamp_ms:
        return None
    return format_duration(gone_ms - record_timestamp_ms)
