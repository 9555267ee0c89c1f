"""Facts about a partition that a lifetime forecast needs, and warnings about settings that conflict.

`partition_facts` reads few bytes of the folder, takes no lock and writes nothing. The newest timestamp of a closed
log segment is the last entry of its time index, which retention uses too. The index of the last segment lags
behind its `.log`, so the batches after that entry are read as well.

The traps are pure tests of a topic's settings (and, where it matters, of a workload). A trap is advice, not
an error: Kafka accepts every one of these settings. Thread rule: any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tidegate.clock import Clock
from tidegate.durations import format_duration, format_size
from tidegate.errors import CorruptError, InvalidError
from tidegate.files import Files
from tidegate.log.catalog import LogFolder, partition_folder_name
from tidegate.log.lifetime.lifetime import (
    CLEANER_OFF,
    PartitionFacts,
    SegmentFacts,
    Workload,
    capacity_of,
    check_interval_ms,
)
from tidegate.log.locks import owner_status
from tidegate.log.partition_reader import PartitionView
from tidegate.log.segment import LogSegment, read_only_segment
from tidegate.log.topic_config import BrokerConfig, Source, TopicConfig


def attending_interval_ms(
    log: Path, config: TopicConfig, broker: BrokerConfig, *, files: Files
) -> int | None:
    """Return how often retention is checked in this log; None when no process checks.

    A Tidegate folder is checked by the process that holds its maintenance lock; a foreign one by its broker.
    """
    if LogFolder(files, log).is_ours():
        status = owner_status(log, files=files)
        if status is None or not status.running:
            return None
        if not config.compacts and status.interval_ms > 0:
            return status.interval_ms
    return check_interval_ms(config, broker)


def view_partition(
    log: Path, topic: str, partition: int, config: TopicConfig, *, files: Files, clock: Clock
) -> PartitionView:
    folder = log / partition_folder_name(topic, partition)
    return PartitionView(files, clock, folder, topic=topic, partition=partition, config=config)


def partition_facts(
    view: PartitionView,
    config: TopicConfig,
    *,
    check_interval_ms: int | None,
    files: Files,
    clock: Clock,
) -> PartitionFacts:
    """Return the facts of the partition as it is now."""
    bounds = view.bounds()
    bases = [base for base, _ in view.segment_sizes()]
    segments = [read_only_segment(view.folder, base, config, files=files, clock=clock) for base in bases]
    facts: list[SegmentFacts] = []
    log_end = bounds.high_watermark
    for number, segment in enumerate(segments):
        if number + 1 < len(segments):
            facts.append(_closed(segment, bases[number + 1]))
        else:
            last = _active(segment)
            log_end = max(log_end, last.next_offset)
            facts.append(last)
    return PartitionFacts(
        view.topic,
        view.partition,
        tuple(facts),
        bounds.log_start,
        bounds.high_watermark,
        log_end,
        clock.now_ms(),
        check_interval_ms,
    )


def record_timestamp_ms(view: PartitionView, offset: int) -> int | None:
    """Return the timestamp of the record at an offset; None when it has none, or compaction removed it."""
    from tidegate.log.format.decode import decode

    bounds = view.bounds()
    if offset >= bounds.high_watermark:
        return None
    fetched = view.fetch(offset, 1, bounds)
    if fetched is None:
        return None
    records = decode(
        fetched.data,
        topic=view.topic,
        partition=view.partition,
        from_offset=offset,
        to_offset=offset + 1,
        partial_end=True,
    )
    if records.num_rows == 0:
        return None
    value = records.column("timestamp").cast("int64")[0].as_py()
    return None if value is None else int(value)


def _closed(segment: LogSegment, next_base: int) -> SegmentFacts:
    newest = segment.largest.timestamp
    return SegmentFacts(
        segment.base_offset,
        next_base,
        segment.size,
        _first_timestamp(segment),
        segment.largest_timestamp,
        newest < 0,
        active=False,
    )


def _active(segment: LogSegment) -> SegmentFacts:
    newest, end = segment.largest.timestamp, segment.base_offset
    file, position = segment.open_near(segment.largest.offset)
    file.close()
    size = position
    try:
        for at, header in segment.batches(position):
            newest = max(newest, header.max_timestamp)
            end, size = header.next_offset, at + header.size
    except CorruptError:
        pass  # zeros of a preallocated file, or an unfinished batch: the log ends before them
    return SegmentFacts(
        segment.base_offset,
        end,
        size,
        _first_timestamp(segment),
        newest if newest >= 0 else segment.mtime_ms,
        newest < 0,
        active=True,
    )


def _first_timestamp(segment: LogSegment) -> int | None:
    try:
        timestamp = segment.first_timestamp
    except CorruptError:
        return None
    return timestamp if timestamp >= 0 else None


def require_partition(numbers: tuple[int, ...], topic: str, partition: int | None) -> tuple[int, ...]:
    """Return the requested partitions; raise if `partition` does not exist."""
    if partition is None:
        return numbers
    if partition not in numbers:
        raise InvalidError(
            f"topic {topic} has no partition {partition}; it has {numbers[0]} to {numbers[-1]}",
            kafka_name="UNKNOWN_TOPIC_OR_PARTITION",
        )
    return (partition,)


# -- traps -----------------------------------------------------------------------------------------

_SMALLEST_TIME_INDEX = 24  # two 12-byte entries; one of them is kept for the roll
_LATEST_SANE_SKEW_MS = 7 * 86_400_000
_SMALLEST_BATCH = 68  # 61 bytes of header, 7 of an empty record: the densest possible index entries


@dataclass(frozen=True, slots=True)
class Trap:
    """One surprise: a stable name, what will happen, and the fix in one line."""

    name: str
    message: str
    fix: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def find_traps(config: TopicConfig, broker: BrokerConfig, workload: Workload | None = None) -> list[Trap]:
    """Return every trap in the settings, the most surprising first."""
    traps = [
        *_cleaner_traps(config, broker),
        *_retention_traps(config, broker),
        *_index_traps(config, workload),
        *_roll_traps(config, workload),
    ]
    if workload is not None:
        traps += _workload_traps(config, workload)
    return traps


def _cleaner_traps(config: TopicConfig, broker: BrokerConfig) -> Iterator[Trap]:
    if config.compacts and not broker.log_cleaner_enable:
        yield Trap("cleaner-off", CLEANER_OFF, "log.cleaner.enable=true (broker)")


def _retention_traps(config: TopicConfig, broker: BrokerConfig) -> Iterator[Trap]:
    if not config.deletes:
        for key in ("retention.ms", "retention.bytes"):
            if config.source(key) is Source.TOPIC and config.value(key) != "-1":
                yield Trap(
                    "compact-only",
                    f"{key}={config.value(key)} has no effect: cleanup.policy=compact removes nothing by age",
                    "cleanup.policy=compact,delete",
                )
        return
    if config.retention_ms < 0 and config.retention_bytes < 0:
        yield Trap(
            "no-limit",
            "neither retention.ms nor retention.bytes sets a limit: the topic grows until the disk is full",
            "retention.ms=604800000",
        )
    interval = check_interval_ms(config, broker)
    if interval is not None and 0 <= config.retention_ms < interval:
        yield Trap(
            "check-slower-than-retention",
            f"retention is checked every {format_duration(interval)}, longer than retention.ms="
            f"{config.retention_ms}: most of a record's life is waiting for the check",
            f"log.retention.check.interval.ms={max(1000, config.retention_ms // 10)} (broker)",
        )
    if 0 <= config.retention_bytes < config.segment_bytes:
        yield Trap(
            "retention-below-one-segment",
            f"retention.bytes={config.retention_bytes} is less than one log segment, which goes whole: "
            f"up to {format_size(config.retention_bytes + config.segment_bytes)} stay",
            f"segment.bytes={max(14, config.retention_bytes // 10)}",
        )
    if config.message_timestamp_type == "CreateTime" and (
        config.timestamp_bounds_ms[1] > _LATEST_SANE_SKEW_MS
    ):
        yield Trap(
            "future-timestamps",
            "one record dated in the future keeps its log segment and everything newer than it from expiring",
            "message.timestamp.after.max.ms=3600000",
        )


def _roll_traps(config: TopicConfig, workload: Workload | None) -> Iterator[Trap]:
    slow = workload is None or _fill_ms(config, workload) > config.retention_ms
    if config.deletes and slow and 0 <= config.retention_ms < config.max_segment_ms:
        yield Trap(
            "segment-outlives-retention",
            f"segment.ms={config.max_segment_ms} is above retention.ms={config.retention_ms}: a slow topic "
            f"keeps one up to {format_duration(config.max_segment_ms + config.retention_ms)} and a check",
            f"segment.ms={max(1, config.retention_ms // 10)}",
        )
    if config.segment_jitter_ms >= config.segment_ms // 2 and config.segment_jitter_ms > 0:
        yield Trap(
            "jitter",
            f"segment.jitter.ms={config.segment_jitter_ms} may take all of it off segment.ms="
            f"{config.segment_ms}: log segments roll far too early",
            f"segment.jitter.ms={config.segment_ms // 10}",
        )


def _fill_ms(config: TopicConfig, workload: Workload) -> int:
    """Return how long the workload takes to fill a log segment."""
    return (
        capacity_of(config, workload.record_bytes, workload.interval_ms).records - 1
    ) * workload.interval_ms


def _index_traps(config: TopicConfig, workload: Workload | None) -> Iterator[Trap]:
    if config.segment_index_bytes < 12:
        yield Trap(
            "index-too-small",
            f"segment.index.bytes={config.segment_index_bytes} holds no time index entry: nothing opens",
            "segment.index.bytes=10485760",
        )
        return
    if config.segment_index_bytes < _SMALLEST_TIME_INDEX:
        yield Trap(
            "index-too-small",
            f"segment.index.bytes={config.segment_index_bytes} is always full, so every record gets a log "
            f"segment of its own",
            "segment.index.bytes=10485760",
        )
        return
    size = workload.record_bytes if workload is not None else _SMALLEST_BATCH
    if size > config.segment_bytes:
        return
    capacity = capacity_of(config, size, workload.interval_ms if workload is not None else 1)
    by_size, by_time_index = capacity.terms["size"], capacity.terms["time_index_full"]
    if by_time_index < by_size:
        per_entry = config.index_interval_bytes // size + 1
        needed = 12 * (-(-(by_size - 1) // per_entry) + 1)
        yield Trap(
            "time-index-fills-first",
            f"the time index (12 bytes an entry, one slot kept for the roll) is full after "
            f"{format_size(by_time_index * size)}, before segment.bytes={config.segment_bytes}; the offset "
            f"index (8 bytes an entry) would last longer",
            f"segment.index.bytes={needed}",
        )


def _workload_traps(config: TopicConfig, workload: Workload) -> Iterator[Trap]:
    if config.deletes and 0 <= config.retention_ms < workload.interval_ms:
        yield Trap(
            "slower-than-retention",
            f"a record comes every {format_duration(workload.interval_ms)}, later than retention.ms="
            f"{config.retention_ms}: the topic is empty for part of the time",
            f"retention.ms={workload.interval_ms * 2}",
        )
    if workload.record_bytes > config.max_message_bytes:
        yield Trap(
            "record-too-large",
            f"a record of {workload.record_bytes} bytes exceeds max.message.bytes={config.max_message_bytes}",
            f"max.message.bytes={workload.record_bytes}",
        )
