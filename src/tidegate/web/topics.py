"""Topics: the list, and one topic with its partitions, log segments, lifetimes and settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from tidegate.durations import setting_meaning
from tidegate.errors import AuthenticationError, CorruptError, TidegateError, UnavailableError
from tidegate.web.schemas import (
    Copy,
    Detail,
    LogBytes,
    LogRecords,
    LogSegments,
    Moment,
    Name,
    Offset,
    Setting,
    Share,
    cli,
    log_python,
    metric,
    shared,
)
from tidegate.web.site import Site

if TYPE_CHECKING:
    from tidegate.log.lifetime.lifetime import SegmentLifetime


# -- the time axis ---------------------------------------------------------------------------------

_DAY_MS: Final = 86_400_000
_LEAST_MS: Final = 1000
_TOO_LONG_MS: Final = 400 * _DAY_MS
_AHEAD_MS: Final = 30 * _DAY_MS


def axis(segments: Sequence[SegmentLine], now_ms: int) -> tuple[int, int] | tuple[None, None]:
    """Where the axis begins and ends.

    Now is on it unless all of it would shrink to a line beside a long emptiness. A record that is dated years ahead
    makes a segment that never seems to go: then the axis ends a month from now, and the bar at its edge.
    """
    if not segments:
        return None, None
    newest = [each.newest_ms for each in segments]
    goes = [moment for each in segments for moment in (each.gone_latest_ms, each.due_ms) if moment]
    low = min([*newest, *(each.first_ms for each in segments if each.first_ms)])
    high = max([*newest, *goes, now_ms, low + _LEAST_MS])
    reach = max([*newest, *goes, low + _LEAST_MS]) - low
    if goes and high - low > 4 * reach:
        high = low + reach * 11 // 10
    if goes and high - low > _TOO_LONG_MS:
        high = max(min(newest), now_ms) + _AHEAD_MS
    return low, high


# -- topics ----------------------------------------------------------------------------------------

SHOWN_SEGMENTS: Final = 60
SHOWN_PARTITIONS: Final = 256
MOST_ASKED: Final = 50
NOT_SHOWN: Final = (
    "A broker does not show its log segments, so when each can disappear is not known here. Run `tidegate log lifetime "
    "TOPIC --log FOLDER` or this page where the broker's data lies: it reads Kafka's own folders."
)


class TopicLine(msgspec.Struct, frozen=True):
    """One topic in a list. `records` are offsets kept: an upper bound where the topic is compacted.

    Of a cluster `bytes` and `segments` are null: a broker does not show them; of its topics after the first
    `MOST_ASKED`, so are `records`. Of a topic that cannot be read all three are.
    """

    name: str
    partitions: Setting
    records: LogRecords | None
    bytes: LogBytes | None
    segments: LogSegments | None
    cleanup: str
    is_exact: bool
    unreadable: str | None = None


class TopicList(msgspec.Struct, frozen=True):
    """All topics of the log."""

    log: str
    topics: list[TopicLine]
    by_hand: Copy


class PartitionLine(msgspec.Struct, frozen=True):
    """One partition. `share` is its part of the topic's bytes, or of a cluster's topic of its records."""

    partition: Name
    log_start: Offset
    high_watermark: Offset
    records: LogRecords
    segments: LogSegments | None
    bytes: LogBytes | None
    share: Share


class SegmentLine(msgspec.Struct, frozen=True):
    """One log segment, when it can go and why; a moment that is null never comes, as things are."""

    partition: Name
    base_offset: Offset
    last_offset: Offset
    next_offset: Offset
    bytes: Detail
    first_ms: Moment | None
    newest_ms: Moment
    active: bool
    due_ms: Moment | None
    gone_earliest_ms: Moment | None
    gone_latest_ms: Moment | None
    disk_latest_ms: Moment | None
    rule: str
    because: str
    change: str | None


class SettingLine(msgspec.Struct, frozen=True):
    """One setting, where its value comes from, and what it means in words."""

    key: str
    value: str
    source: str
    meaning: str


class TrapLine(msgspec.Struct, frozen=True):
    """A surprise that the settings hold, and the line that prevents it."""

    name: str
    message: str
    fix: str


class TopicDocument(msgspec.Struct, frozen=True):
    """One topic. `skew` is the largest partition over the mean, in bytes (of a cluster: records): 1 is even."""

    name: str
    id: str | None
    assumed: bool
    now_ms: Moment
    records: LogRecords
    is_exact: bool
    bytes: LogBytes | None
    skew: Annotated[float, metric("tidegate_topic_skew_ratio")]
    partitions: list[PartitionLine]
    partition: Name
    """The partition whose log segments are shown."""
    segments: list[SegmentLine]
    segments_total: LogSegments
    shown_from_ms: Moment | None
    """Where the time axis of the log segments begins and ends: all there is, or what can be told apart on it."""
    shown_until_ms: Moment | None
    not_shown: str
    """Why there are no log segments to see; empty where there are."""
    checked_every_ms: Setting | None
    settings: list[SettingLine]
    traps: list[TrapLine]
    by_hand: Copy


class TopicQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which partition's log segments to show."""

    partition: int | None = None


def topic_list(site: Site) -> TopicList:
    """Every topic; one that cannot be read, or goes meanwhile, says why."""
    lines = []
    for place, name in enumerate(site.topics()):
        try:
            if place >= MOST_ASKED and site.cluster is not None:
                lines.append(
                    TopicLine(name, len(site.describe(name).partition_numbers), None, None, None, "", False)
                )
                continue
            lines.append(_line(site, name))
        except TidegateError as error:
            lines.append(TopicLine(name, 0, None, None, None, "", False, str(error)))
            if isinstance(error, AuthenticationError | UnavailableError) and site.cluster is not None:
                raise  # a cluster that is gone is gone for all of them, and each would be waited for
    python = log_python(site.log_path, "print(log.topics())")
    return TopicList(str(site.log_path), lines, Copy(cli("tidegate topic list", log=site.log_path), python))


def topic_document(site: Site, topic: str, question: TopicQuestion) -> TopicDocument:
    """One topic whole; of its log segments those of one partition."""
    description = site.describe(topic)
    partition = site.numbers(topic, question.partition)[0]
    rows = partition_rows(site, topic)
    sizes = sizes_of(rows)
    total = sum(sizes)
    lifetimes, checks, traps = ([], None, []) if site.cluster else _lifetimes(site, topic, partition)
    shown = (
        lifetimes
        if len(lifetimes) <= SHOWN_SEGMENTS
        else [*lifetimes[: SHOWN_SEGMENTS // 2], *lifetimes[-SHOWN_SEGMENTS // 2 :]]
    )
    segments = [_segment(partition, each) for each in shown]
    now_ms = site.clock.now_ms()
    low_ms, high_ms = axis(segments, now_ms)
    python = log_python(
        site.log_path,
        f"for row in log.partition_rows({topic!r}):",
        "    print(row)",
        f"for setting in log.describe({topic!r}).settings():",
        "    print(setting)",
    )
    commands = [cli("tidegate topic describe", topic, log=site.log_path)]
    commands += [] if site.cluster else [cli("tidegate log lifetime", topic, log=site.log_path)]
    return TopicDocument(
        name=topic,
        id=description.topic_id,
        assumed=description.assumed,
        now_ms=now_ms,
        records=sum(row["high_watermark"] - row["log_start"] for row in rows),
        is_exact=not description.config.compacts,
        bytes=None if site.cluster else total,
        skew=skew_of(sizes),
        partitions=[
            _partition(row, size / total if total else 0.0)
            for row, size in zip(rows[:SHOWN_PARTITIONS], sizes, strict=False)
        ],
        partition=partition,
        segments=segments,
        segments_total=len(lifetimes),
        shown_from_ms=low_ms,
        shown_until_ms=high_ms,
        not_shown=NOT_SHOWN if site.cluster else "",
        checked_every_ms=checks,
        settings=[
            SettingLine(entry.key, entry.value, str(entry.source), setting_meaning(entry.key, entry.value))
            for entry in description.settings()
        ],
        traps=traps,
        by_hand=Copy("\n".join(commands), python),
    )


def _line(site: Site, name: str) -> TopicLine:
    description, rows = site.log.describe(name), partition_rows(site, name)
    config = description.config
    return TopicLine(
        name=name,
        partitions=description.partitions,
        records=sum(row["high_watermark"] - row["log_start"] for row in rows),
        bytes=None if site.cluster else sum(row["bytes"] for row in rows),
        segments=None if site.cluster else sum(row["segments"] for row in rows),
        cleanup=", ".join(sorted(config.cleanup_policy)) or "none",
        is_exact=not config.compacts,
    )


def partition_rows(site: Site, topic: str) -> list[dict[str, Any]]:
    """What is known of each partition."""
    if site.cluster is None:
        return site.log.partition_rows(topic)
    return [
        {"partition": number, "log_start": first, "high_watermark": end, "bytes": None, "segments": None}
        for number, (first, end) in sorted(site.bounds(topic).items())
    ]


def sizes_of(rows: list[dict[str, Any]]) -> list[int]:
    """Return the size of each partition for its bar: its bytes, or, for a cluster, its number of records."""
    return [
        row["high_watermark"] - row["log_start"] if row["bytes"] is None else row["bytes"] for row in rows
    ]


def skew_of(sizes: list[int]) -> float:
    """The largest over the mean."""
    return max(sizes) * len(sizes) / sum(sizes) if any(sizes) else 1.0


def _partition(row: dict[str, Any], share: float) -> PartitionLine:
    names = ("partition", "log_start", "high_watermark", "segments", "bytes")
    kept = row["high_watermark"] - row["log_start"]
    return PartitionLine(records=kept, share=share, **{name: row[name] for name in names})


def _lifetimes(
    site: Site, topic: str, partition: int
) -> tuple[Sequence[SegmentLifetime], int | None, list[TrapLine]]:
    """When each log segment of a partition can go, how often that is looked at, and what may surprise."""
    from tidegate.log.lifetime.facts import attending_interval_ms, find_traps, partition_facts, view_partition
    from tidegate.log.lifetime.lifetime import forecast

    log, clock = site.files, site.clock
    files = log.files
    config, broker = log.describe(topic).config, log.contents.broker_config()
    checks = attending_interval_ms(log.path, config, broker, files=files)
    traps = [TrapLine(trap.name, trap.message, trap.fix) for trap in find_traps(config, broker)]
    try:
        view = view_partition(log.path, topic, partition, config, files=files, clock=clock)
        facts = partition_facts(view, config, check_interval_ms=checks, files=files, clock=clock)
    except (CorruptError, OSError):
        return [], checks, traps  # damaged, or deleted while it was looked at
    return forecast(facts, config), checks, traps


def _segment(partition: int, found: SegmentLifetime) -> SegmentLine:
    facts = found.segment
    fields = shared(facts, SegmentLine) | shared(found, SegmentLine)
    fields |= {
        "partition": partition,
        "last_offset": max(facts.next_offset - 1, facts.base_offset),
        "bytes": facts.size_bytes,
        "first_ms": facts.first_timestamp_ms,
        "newest_ms": facts.largest_timestamp_ms,
        "rule": found.rule.value,
    }
    return SegmentLine(**fields)


def record_lifetime(site: Site, topic: str, partition: int, offset: int) -> SegmentLine | None:
    """The log segment that holds an offset, and when it can go."""
    from tidegate.log.lifetime.lifetime import lifetime_of_offset

    if site.cluster is not None:
        return None
    found: Any = lifetime_of_offset(_lifetimes(site, topic, partition)[0], offset)
    return None if found is None else _segment(partition, found)
