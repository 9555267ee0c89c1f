"""What a forecast needs to know of a partition, read from its folder: no lock, no writing, few bytes.

Owns gathering; judging is `lifetime_segments`'. A closed log segment's newest timestamp is its time index's
last entry, which is also what retention goes by; the last log segment's index lags behind what was written,
so the batches behind that entry are looked at, too.
"""

from __future__ import annotations

from pathlib import Path

from tidegate.clock import Clock
from tidegate.errors import CorruptError, InvalidError
from tidegate.files import Files
from tidegate.log.access.partition_view import PartitionView
from tidegate.log.cleaning.maintenance import owner_status
from tidegate.log.lifetime.lifetime import check_interval_ms
from tidegate.log.lifetime.segments import PartitionFacts, SegmentFacts
from tidegate.log.segments.segment import LogSegment
from tidegate.log.topics.catalog import LogFolder
from tidegate.log.topics.topic_config import BrokerConfig, TopicConfig
from tidegate.log.topics.topics import partition_folder_name
from tidegate.randomness import SeededRandomness

_UNUSED_CHANCE = SeededRandomness(0)


def attending_interval_ms(
    log: Path, config: TopicConfig, broker: BrokerConfig, *, files: Files
) -> int | None:
    """How often somebody checks retention in this log; None when nobody does.

    A folder of ours is aged by whoever holds its maintenance lock; a foreign one by its broker.
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
    """The partition as it is now."""
    bounds = view.bounds()
    bases = [base for base, _ in view.segment_sizes()]
    segments = [
        LogSegment(
            view.folder,
            base,
            config,
            files=files,
            clock=clock,
            randomness=_UNUSED_CHANCE,
            read_only=True,
        )
        for base in bases
    ]
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
    """The timestamp of the record at an offset; None when it has none, or compaction removed it."""
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
        pass  # zeros of a preallocated file, or a batch being written: the log ends before them
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
    """The partitions asked for."""
    if partition is None:
        return numbers
    if partition not in numbers:
        raise InvalidError(
            f"topic {topic} has no partition {partition}; it has {numbers[0]} to {numbers[-1]}",
            kafka_name="UNKNOWN_TOPIC_OR_PARTITION",
        )
    return (partition,)
