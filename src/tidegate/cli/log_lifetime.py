"""`tidegate log lifetime`: how long a record really lives, in an existing topic or a workload to come."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tidegate.cli.options import (
    DURATION,
    SIZE,
    Verb,
    format_option,
    log_option,
    settings_option,
    talk_options,
)
from tidegate.cli.output import echo, print_object, print_rows, say
from tidegate.durations import duration_ms, format_duration, format_moment, format_size, moment_ms, size_bytes
from tidegate.errors import InvalidError

if TYPE_CHECKING:
    from tidegate.log.lifetime.lifetime import WorkloadLifetime
    from tidegate.log.lifetime.segments import PartitionFacts, SegmentLifetime
    from tidegate.log.lifetime.timeline import Timeline
    from tidegate.log.lifetime.traps import Trap
    from tidegate.log.topics.topic_config import BrokerConfig, TopicConfig

_SEGMENT_COLUMNS = (
    "segment",
    "offsets",
    "bytes",
    "newest",
    "due",
    "unreadable_from",
    "unreadable_latest",
    "off_disk_latest",
    "rule",
)


@click.command("lifetime", cls=Verb)
@click.argument("topic", required=False)
@log_option
@click.option("-p", "--partition", type=click.IntRange(min=0), help="One partition of the topic.")
@click.option("--offset", type=click.IntRange(min=0), help="Answer for the record at this offset.")
@click.option("--at", "time", metavar="TIME", help="Answer for the first record at or after this time.")
@click.option(
    "--record-bytes", type=SIZE, metavar="SIZE", help="A workload: bytes a record takes, overhead included."
)
@click.option("--interval", type=DURATION, metavar="DURATION", help="A workload: time between two records.")
@settings_option("A setting of the topic or broker (repeatable); with TOPIC: what if it were so.")
@click.option(
    "--checked-every",
    metavar="DURATION|never",
    help="How often retention is checked; by default what the log's owner or the broker's settings say.",
)
@click.option("--picture", metavar="FILE", help="Draw the timeline: FILE.png, FILE.svg or FILE.html.")
@format_option(("table", "json", "jsonl", "csv"))
@talk_options
def command(
    topic: str | None,
    log_url: str,
    partition: int | None,
    offset: int | None,
    time: str | None,
    record_bytes: str | None,
    interval: str | None,
    settings: dict[str, str],
    checked_every: str | None,
    picture: str | None,
    format: str,
) -> None:
    """When records become unreadable and leave the disk, which rule decides, what to change.

    With TOPIC: per log segment, or for one --offset or --at TIME; without it: for a workload to come.

    \b
    tidegate log lifetime orders
    tidegate log lifetime orders --offset 41 --partition 0
    tidegate log lifetime --record-bytes 150 --interval 5s -X retention.ms=600000 -X segment.bytes=16384
    """
    if topic is None:
        if record_bytes is None or interval is None:
            raise click.UsageError("name a TOPIC, or describe a workload: --record-bytes 150 --interval 5s")
        if offset is not None or time is not None or partition is not None:
            raise click.UsageError("--offset, --at and --partition need a TOPIC")
        _workload(record_bytes, interval, settings, checked_every, picture, format)
    else:
        if record_bytes is not None or interval is not None:
            raise click.UsageError("--record-bytes and --interval describe a workload; leave TOPIC out")
        if offset is not None and time is not None:
            raise click.UsageError("--offset and --at both say which record; keep one")
        _topic(topic, log_url, partition, offset, time, settings, checked_every, picture, format)


# -- a workload ------------------------------------------------------------------------------------


def _workload(
    record_bytes: str,
    interval: str,
    settings: dict[str, str],
    checked_every: str | None,
    picture: str | None,
    format: str,
) -> None:
    from tidegate.log.lifetime.lifetime import Workload, workload_lifetime
    from tidegate.log.lifetime.timeline import workload_timeline
    from tidegate.log.lifetime.traps import find_traps

    workload = Workload(size_bytes(record_bytes), duration_ms(interval))
    config, broker = _configs(settings, checked_every)
    lifetime = workload_lifetime(workload, config, broker, attended=checked_every != "never")
    traps = find_traps(config, broker, workload)
    if format == "table":
        _print_workload(lifetime, traps)
    else:
        answer = lifetime.as_dict() | {"traps": [trap.as_dict() for trap in traps]}
        print_object(answer, format=format)
    _draw(workload_timeline(lifetime), picture)


def _print_workload(lifetime: WorkloadLifetime, traps: list[Trap]) -> None:
    capacity = lifetime.capacity
    size = format_size(capacity.records * lifetime.workload.record_bytes)
    echo(
        f"A log segment takes {capacity.records} records ({size}), rolled by "
        f"{capacity.reason.replace('_', ' ')}; they span {format_duration(lifetime.fill_ms)}.\n"
    )
    rows = [
        {"moment": name, "after": _duration(bound.ms), "rule": bound.rule.value, "because": bound.because}
        for name, bound in (
            ("guaranteed", lifetime.guaranteed),
            ("oldest at expiry", lifetime.oldest_at_expiry),
            ("readable at most", lifetime.visible_max),
            ("on disk at most", lifetime.disk_max),
        )
    ]
    print_rows(rows, format="table", columns=("moment", "after", "rule", "because"))
    if lifetime.changes:
        echo("\nTo come nearer to what was asked for:")
        for change in lifetime.changes:
            echo(f"  {change}")
    _print_traps(traps)


# -- a topic ---------------------------------------------------------------------------------------


def _topic(
    topic: str,
    log_url: str,
    partition: int | None,
    offset: int | None,
    time: str | None,
    settings: dict[str, str],
    checked_every: str | None,
    picture: str | None,
    format: str,
) -> None:
    from tidegate.clock import SystemClock
    from tidegate.files import Files
    from tidegate.log.lifetime.facts import (
        attending_interval_ms,
        partition_facts,
        require_partition,
        view_partition,
    )
    from tidegate.log.lifetime.segments import forecast
    from tidegate.log.lifetime.timeline import topic_timeline
    from tidegate.log.lifetime.traps import find_traps
    from tidegate.log.topics.catalog import LogFolder

    if log_url.startswith("kafka://"):
        raise InvalidError(
            "lifetime reads log segments, which kafka:// does not show; run it where the broker's data is, "
            "or ask for a workload with --record-bytes and --interval"
        )
    log, files, clock = Path(log_url), Files(), SystemClock()
    folder = LogFolder(files, log)
    description, broker = folder.describe(topic), folder.broker_config()
    config = description.config.altered(settings, broker=broker) if settings else description.config
    if checked_every is None:
        checks = attending_interval_ms(log, config, broker, files=files)
    else:
        checks = None if checked_every == "never" else duration_ms(checked_every)
    traps = find_traps(config, broker)
    numbers = require_partition(description.partition_numbers, topic, partition)
    views = [view_partition(log, topic, number, config, files=files, clock=clock) for number in numbers]
    facts = [
        partition_facts(view, config, check_interval_ms=checks, files=files, clock=clock) for view in views
    ]
    forecasts = [forecast(found, config) for found in facts]
    if offset is not None or time is not None:
        records = [
            _record(view, found, lifetimes, offset, time)
            for view, found, lifetimes in zip(views, facts, forecasts, strict=True)
        ]
        _print_records(records, format)
    elif format == "table":
        _print_partitions(facts, forecasts, traps, assumed=description.assumed, checks=checks)
    else:
        answer = [_as_dict(found, lifetimes) for found, lifetimes in zip(facts, forecasts, strict=True)]
        report: dict[str, Any] = {"topic": topic, "check_interval_ms": checks}
        report |= {"assumed": description.assumed, "partitions": answer}
        report["traps"] = [trap.as_dict() for trap in traps]
        if format == "csv":
            rows = [
                segment | {"partition": part["partition"]} for part in answer for segment in part["segments"]
            ]
            print_rows(rows, format="csv", columns=["partition", *(rows[0] if rows else [])])
        else:
            print_object(report, format=format)
    if picture is not None:
        _draw(topic_timeline(facts[0], forecasts[0]), picture)
        if len(facts) > 1:
            say(f"the picture shows partition {facts[0].partition}; --partition chooses another")


def _as_dict(facts: PartitionFacts, lifetimes: list[SegmentLifetime]) -> dict[str, Any]:
    return {
        "partition": facts.partition,
        "log_start_offset": facts.log_start_offset,
        "high_watermark": facts.high_watermark,
        "log_end_offset": facts.log_end_offset,
        "bytes": facts.size_bytes,
        "now_ms": facts.now_ms,
        "segments": [lifetime.as_dict() for lifetime in lifetimes],
    }


def _print_partitions(
    facts: list[PartitionFacts],
    forecasts: list[list[SegmentLifetime]],
    traps: list[Trap],
    *,
    assumed: bool,
    checks: int | None,
) -> None:
    if assumed:
        echo("This folder has no settings of ours: defaults are assumed (-X says what if).")
    checked = (
        "nobody checks retention"
        if checks is None
        else f"retention is checked every {format_duration(checks)}"
    )
    for found, lifetimes in zip(facts, forecasts, strict=True):
        echo(
            f"{found.topic}-{found.partition}: {len(found.segments)} log segments, "
            f"{format_size(found.size_bytes)}, offsets {found.log_start_offset} to {found.log_end_offset}; "
            f"{checked}.\n"
        )
        print_rows([_row(lifetime) for lifetime in lifetimes], format="table", columns=_SEGMENT_COLUMNS)
        echo()
        for lifetime in lifetimes[:1] + lifetimes[-1:] if len(lifetimes) > 1 else lifetimes:
            echo(f"{lifetime.segment.base_offset}: {lifetime.because}")
            if lifetime.change:
                echo(f"    → {lifetime.change}")
    _print_traps(traps)


def _row(lifetime: SegmentLifetime) -> dict[str, Any]:
    segment = lifetime.segment
    return {
        "segment": f"{segment.base_offset}{' (active)' if segment.active else ''}",
        "offsets": _offsets(segment.base_offset, segment.next_offset),
        "bytes": format_size(segment.size_bytes),
        "newest": format_moment(segment.largest_timestamp_ms),
        "due": _moment(lifetime.due_ms),
        "unreadable_from": _moment(lifetime.gone_earliest_ms),
        "unreadable_latest": _moment(lifetime.gone_latest_ms),
        "off_disk_latest": _moment(lifetime.disk_latest_ms),
        "rule": lifetime.rule.value,
    }


# -- one record ------------------------------------------------------------------------------------


def _record(
    view: Any,
    facts: PartitionFacts,
    lifetimes: list[SegmentLifetime],
    offset: int | None,
    time: str | None,
) -> dict[str, Any]:
    from tidegate.log.lifetime.facts import record_timestamp_ms
    from tidegate.log.lifetime.segments import describe_age, lifetime_of_offset

    asked: dict[str, Any] = {"partition": facts.partition, "offset": offset}
    if time is not None:
        offset = view.offset_for_time(moment_ms(time), view.bounds())
        asked |= {"at_ms": moment_ms(time), "offset": offset}
    if offset is None:
        return asked | {"answer": "no record is that new"}
    if offset < facts.log_start_offset:
        return asked | {"answer": f"already gone: the log starts at offset {facts.log_start_offset}"}
    lifetime = lifetime_of_offset(lifetimes, offset)
    if lifetime is None:
        return asked | {"answer": f"not written yet: the log ends at offset {facts.log_end_offset}"}
    timestamp = record_timestamp_ms(view, offset)
    return asked | {
        "timestamp_ms": timestamp,
        "segment": lifetime.segment.base_offset,
        "gone_earliest_ms": lifetime.gone_earliest_ms,
        "gone_latest_ms": lifetime.gone_latest_ms,
        "disk_latest_ms": lifetime.disk_latest_ms,
        "age_when_gone": describe_age(timestamp, lifetime.gone_latest_ms),
        "rule": lifetime.rule.value,
        "answer": lifetime.because,
        "change": lifetime.change,
    }


def _print_records(records: list[dict[str, Any]], format: str) -> None:
    if format != "table":
        print_rows(records, format=format, columns=list(records[0]))
        return
    for record in records:
        shown = {
            name.removesuffix("_ms").replace("_", " "): _moment(value) if name.endswith("_ms") else value
            for name, value in record.items()
        }
        print_object(shown, format="table")
        echo()


# -- both ------------------------------------------------------------------------------------------


def _configs(settings: dict[str, str], checked_every: str | None) -> tuple[TopicConfig, BrokerConfig]:
    """Topic and broker settings from one list of `-X`; a name nobody knows is told with the nearest one."""
    from tidegate.log.topics.topic_config import BrokerConfig, TopicConfig
    from tidegate.log.topics.topic_settings import BROKER_SETTINGS

    of_broker: dict[str, Any] = {key: value for key, value in settings.items() if key in BROKER_SETTINGS}
    of_topic = {key: value for key, value in settings.items() if key not in BROKER_SETTINGS}
    if checked_every is not None and checked_every != "never":
        every = duration_ms(checked_every)
        of_broker |= {"log.retention.check.interval.ms": every, "log.cleaner.backoff.ms": every}
    broker = BrokerConfig.of(of_broker)
    return TopicConfig.of(of_topic, broker=broker), broker


def _draw(timeline: Timeline, picture: str | None) -> None:
    if picture is None:
        return
    from tidegate.log.lifetime.chart import write_picture

    write_picture(timeline, Path(picture))
    say(f"drawn: {picture}")


def _print_traps(traps: list[Trap]) -> None:
    if not traps:
        return
    echo("\nWatch out:")
    for trap in traps:
        echo(f"  {trap.name}: {trap.message}\n    → {trap.fix}")
    sys.stdout.flush()


def _offsets(first: int, following: int) -> str:
    return f"{first}…{following - 1}" if following > first else "-"


def _moment(epoch_ms: int | None) -> str:
    return "never" if epoch_ms is None else format_moment(epoch_ms)


def _duration(milliseconds: int | None) -> str:
    return "for ever" if milliseconds is None else format_duration(milliseconds)
