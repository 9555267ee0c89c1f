"""`tidegate log dump|lifetime|clean|reseal`: the files of a log folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from tidegate.cli.options import (
    DURATION,
    SIZE,
    Command,
    dry_run_option,
    format_option,
    log_option,
    settings_option,
    verbosity_options,
)
from tidegate.cli.output import TerminalText, detail, echo, print_object, print_rows, say, warn
from tidegate.durations import duration_ms, format_duration, format_moment, format_size, moment_ms, size_bytes
from tidegate.errors import ConflictError, InvalidError, verify_command

if TYPE_CHECKING:
    from tidegate.files import Files
    from tidegate.log.dump.decoders import RecordParser
    from tidegate.log.lifetime.facts import Trap
    from tidegate.log.lifetime.lifetime import PartitionFacts, SegmentLifetime, WorkloadLifetime
    from tidegate.log.lifetime.timeline import Timeline
    from tidegate.log.log import Log
    from tidegate.log.maintenance import PartitionOutcome
    from tidegate.log.topic_config import BrokerConfig, TopicConfig


# -- tidegate log dump -----------------------------------------------------------------------------

_TEXT = "org.apache.kafka.tools.api.StringDecoder"
_NOT_OFFERED = {
    "cluster_metadata_decoder": "--cluster-metadata-decoder",
    "remote_log_metadata_decoder": "--remote-log-metadata-decoder",
    "share_group_state_decoder": "--share-group-state-decoder",
}


@click.command("dump", cls=Command)
@click.argument("positional", metavar="[FILES]...", nargs=-1)
@click.option("--files", "listed", metavar="A,B,…", multiple=True, help="The files, separated by commas.")
@click.option("--print-data-log", is_flag=True, help="Print keys and values; implies --deep-iteration.")
@click.option("--deep-iteration", is_flag=True, help="Print records, not only batches.")
@click.option("--index-sanity-check", is_flag=True, help="Only check indexes as a broker does at start.")
@click.option("--verify-index-only", is_flag=True, help="Compare indexes with the log without printing them.")
@click.option("--skip-record-metadata", is_flag=True, help="Print only key and value of records.")
@click.option(
    "--max-message-size",
    type=click.IntRange(min=0),
    default=5 * 1024 * 1024,
    show_default=True,
    metavar="BYTES",
    help="Largest batch an index entry may point at.",
)
@click.option(
    "--max-bytes",
    type=click.IntRange(min=0, max=2**31 - 1),
    default=2**31 - 1,
    metavar="BYTES",
    help="Read no more than this much of each log file.",
)
@click.option(
    "--key-decoder-class",
    is_flag=False,
    flag_value=_TEXT,
    metavar="[NAME]",
    help="How to read keys: StringDecoder, IntegerDecoder, LongDecoder, DefaultDecoder (hex).",
)
@click.option(
    "--value-decoder-class", is_flag=False, flag_value=_TEXT, metavar="[NAME]", help="How to read values."
)
@click.option("--offsets-decoder", is_flag=True, help="The files are of __consumer_offsets.")
@click.option("--transaction-log-decoder", is_flag=True, help="The files are of __transaction_state.")
@click.option("--cluster-metadata-decoder", is_flag=True, hidden=True)
@click.option("--remote-log-metadata-decoder", is_flag=True, hidden=True)
@click.option("--share-group-state-decoder", is_flag=True, hidden=True)
@click.option(
    "--format-profile",
    type=click.Choice(["modern", "seed"]),
    default="modern",
    show_default=True,
    help="Wording of Kafka 3.3 and later, or of 2.7 and before.",
)
@click.option(
    "--format",
    "format",
    type=click.Choice(["kafka", "json", "jsonl"]),
    default="kafka",
    show_default=True,
    help="Kafka's text (also in a pipe), or one JSON object per line.",
)
@verbosity_options
def dump_files(
    positional: tuple[str, ...],
    listed: tuple[str, ...],
    print_data_log: bool,
    deep_iteration: bool,
    index_sanity_check: bool,
    verify_index_only: bool,
    skip_record_metadata: bool,
    max_message_size: int,
    max_bytes: int,
    key_decoder_class: str | None,
    value_decoder_class: str | None,
    offsets_decoder: bool,
    transaction_log_decoder: bool,
    format_profile: str,
    format: str,
    **not_offered: bool,
) -> int:
    """Print .log, .index, .timeindex, .txnindex, .snapshot and .checkpoint files.

    Needs no broker, writes nothing. Findings (gaps, indexes that do not fit) go to stderr and leave the exit
    code at 0, as Kafka's tool does; a file that cannot be read to its end gives 5. `tidegate verify` judges.

    \b
    tidegate log dump data/log/orders-0/00000000000000000000.log
    tidegate log dump --files A.log,A.index --print-data-log
    """
    from tidegate.log.dump.dump import DumpOptions, Target, dump
    from tidegate.log.dump.json import JsonSink
    from tidegate.log.dump.text import TextSink

    targets = [Target.of(name) for name in _names(listed, positional)]
    if not targets:
        raise click.UsageError("no files: name them, or give --files A,B")
    options = DumpOptions(
        print_data=print_data_log or key_decoder_class is not None or value_decoder_class is not None,
        deep=deep_iteration,
        index_sanity_check=index_sanity_check,
        verify_index_only=verify_index_only,
        skip_record_metadata=skip_record_metadata,
        max_message_bytes=max_message_size,
        max_bytes=max_bytes,
        profile=format_profile,
        parser=_parser(
            key_decoder_class, value_decoder_class, offsets_decoder, transaction_log_decoder, not_offered
        ),
    )
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=False)
    out: Any = TerminalText(sys.stdout) if sys.stdout.isatty() else sys.stdout
    sink = TextSink(options, out, sys.stderr) if format == "kafka" else JsonSink(options, out)
    return 5 if dump(targets, options, sink) else 0


def _names(listed: tuple[str, ...], positional: tuple[str, ...]) -> list[str]:
    return [name for group in listed for name in group.split(",") if name] + list(positional)


def _parser(
    key: str | None, value: str | None, offsets: bool, transactions: bool, not_offered: dict[str, bool]
) -> RecordParser | None:
    from tidegate.log.dump import decoders as dump_decoders

    for name, asked in not_offered.items():
        if asked:
            raise InvalidError(
                f"{_NOT_OFFERED[name]} is not offered; dump the raw values with --print-data-log, "
                f"or with --value-decoder-class DefaultDecoder as hex"
            )
    if offsets:
        return dump_decoders.parse_offsets_record
    if transactions:
        return dump_decoders.parse_transaction_record
    return dump_decoders.parse_with(
        dump_decoders.find_decoder(key or _TEXT), dump_decoders.find_decoder(value or _TEXT)
    )


# -- tidegate log lifetime -------------------------------------------------------------------------

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


@click.command("lifetime", cls=Command)
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
@verbosity_options
def show_lifetime(
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
        _show_workload(record_bytes, interval, settings, checked_every, picture, format)
    else:
        if record_bytes is not None or interval is not None:
            raise click.UsageError("--record-bytes and --interval describe a workload; leave TOPIC out")
        if offset is not None and time is not None:
            raise click.UsageError("--offset and --at both say which record; keep one")
        _show_topic(topic, log_url, partition, offset, time, settings, checked_every, picture, format)


def _show_workload(
    record_bytes: str,
    interval: str,
    settings: dict[str, str],
    checked_every: str | None,
    picture: str | None,
    format: str,
) -> None:
    from tidegate.log.lifetime.facts import find_traps
    from tidegate.log.lifetime.lifetime import Workload, workload_lifetime
    from tidegate.log.lifetime.timeline import workload_timeline

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


def _show_topic(
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
    from tidegate.log.catalog import LogFolder
    from tidegate.log.lifetime.facts import (
        attending_interval_ms,
        find_traps,
        partition_facts,
        require_partition,
        view_partition,
    )
    from tidegate.log.lifetime.lifetime import forecast
    from tidegate.log.lifetime.timeline import topic_timeline

    if log_url.startswith("kafka://"):
        raise InvalidError(
            "lifetime reads log segments, which kafka:// does not show; run it where the broker's data is, "
            "or ask for a workload with --record-bytes and --interval"
        )
    log, files, clock = Path(log_url), Files(), SystemClock()
    folder = LogFolder(files, log)
    description, broker = folder.describe(topic), folder.broker_config()
    config = description.config
    if settings:
        of_topic, of_broker = _split(settings)
        broker = broker.altered(of_broker)
        config = config.altered(of_topic, broker=broker)
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
            _record_lifetime(view, found, lifetimes, offset, time)
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
        print_rows(
            [_lifetime_row(lifetime) for lifetime in lifetimes], format="table", columns=_SEGMENT_COLUMNS
        )
        echo()
        for lifetime in lifetimes[:1] + lifetimes[-1:] if len(lifetimes) > 1 else lifetimes:
            echo(f"{lifetime.segment.base_offset}: {lifetime.because}")
            if lifetime.change:
                echo(f"    → {lifetime.change}")
    _print_traps(traps)


def _lifetime_row(lifetime: SegmentLifetime) -> dict[str, Any]:
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


def _record_lifetime(
    view: Any,
    facts: PartitionFacts,
    lifetimes: list[SegmentLifetime],
    offset: int | None,
    time: str | None,
) -> dict[str, Any]:
    from tidegate.log.lifetime.facts import record_timestamp_ms
    from tidegate.log.lifetime.lifetime import describe_age, lifetime_of_offset

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


def _configs(settings: dict[str, str], checked_every: str | None) -> tuple[TopicConfig, BrokerConfig]:
    """Topic and broker settings from one list of `-X`; a name nobody knows is told with the nearest one."""
    from tidegate.log.topic_config import BrokerConfig, TopicConfig

    of_topic, of_broker = _split(settings)
    if checked_every is not None and checked_every != "never":
        every = duration_ms(checked_every)
        of_broker |= {"log.retention.check.interval.ms": every, "log.cleaner.backoff.ms": every}
    broker = BrokerConfig.of(of_broker)
    return TopicConfig.of(of_topic, broker=broker), broker


def _split(settings: dict[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    """The settings of topics, and those of brokers."""
    from tidegate.log.topic_config import BROKER_SETTINGS

    of_broker: dict[str, Any] = {key: value for key, value in settings.items() if key in BROKER_SETTINGS}
    return {key: value for key, value in settings.items() if key not in BROKER_SETTINGS}, of_broker


def _draw(timeline: Timeline, picture: str | None) -> None:
    if picture is None:
        return
    from tidegate.log.lifetime.page import write_picture

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


# -- tidegate log clean ----------------------------------------------------------------------------

_CLEANED_COLUMNS = ("partition", "removed", "freed", "rules", "log_start", "compacted", "remark")


@click.command("clean", cls=Command)
@click.argument("topic", required=False)
@log_option
@click.option(
    "--every", type=DURATION, metavar="DURATION", help="Go on, one pass every so often, until interrupted."
)
@dry_run_option
@format_option()
@verbosity_options
def clean(topic: str | None, log_url: str, every: str | None, dry_run: bool, format: str) -> int:
    """Remove what retention lets go, compact what is dirty enough, and say what was done.

    An embedded log has no daemon: somebody must do this. Partitions that another process writes are left to
    it. Removed log segments are unreadable at once; their files leave the disk after file.delete.delay.ms, or
    when the partition is next opened.

    \b
    tidegate log clean
    tidegate log clean orders --dry-run
    tidegate log clean --every 5m
    """
    from tidegate.log.log import Log

    if log_url.startswith("kafka://"):
        raise InvalidError("a Kafka cluster cleans its own logs; --log must be a folder")
    if every is not None and dry_run:
        raise click.UsageError("--every and --dry-run do not go together")
    if not Path(log_url).is_dir():
        raise InvalidError(f"there is no log at {log_url}; give --log FOLDER or set TIDEGATE_LOG")
    interval = None if every is None else max(1000, duration_ms(every))
    with Log(log_url) as log:
        if interval is None:
            return _clean_once(log, topic, dry_run, format)
        say(f"one pass every {format_duration(interval)}; Ctrl-C ends it")
        return _keep_cleaning(log, topic, interval, format)


def _keep_cleaning(log: Log, topic: str | None, interval_ms: int, format: str) -> NoReturn:
    """Pass after pass until interrupted; only what changed is printed."""
    from tidegate.log.locks import MaintenanceLock
    from tidegate.log.maintenance import ClockJumpGuard

    clock_guard = ClockJumpGuard(log.clock, hold_ms=interval_ms)
    with MaintenanceLock(log.path, interval_ms, files=log.files) as lock:
        while True:
            check = clock_guard.check()
            if check.jump_ms:
                warn(
                    f"the clock jumped {format_duration(check.jump_ms)} ahead, nothing is aged out for "
                    f"{format_duration(interval_ms)}; if the clock is wrong, correct it before then"
                )
            if not check.suspended:
                _clean_once(log, topic, False, format, only_changes=True)
                lock.publish(last_run_ms=log.clock.now_ms())
            log.clock.sleep_ms(interval_ms)


def _clean_once(
    log: Log, topic: str | None, dry_run: bool, format: str, *, only_changes: bool = False
) -> int:
    """One pass over all partitions, each opened only for its turn. 4 when some were held by others."""
    from tidegate.log.maintenance import HELD_ELSEWHERE, Housekeeping

    chores = Housekeeping(
        log,
        broker=log.contents.broker_config(),
        files=log.files,
        clock=log.clock,
        randomness=log.randomness,
    )
    names = log.topics() if topic is None else [log.describe(topic).name]
    outcomes = chores.clean_once(topics=names, dry_run=dry_run)
    rows = [_cleaned_row(outcome, dry_run) for outcome in outcomes]
    held = [row["partition"] for row in rows if row["remark"] == HELD_ELSEWHERE]
    if only_changes:
        rows = [row for row in rows if row["removed"] or row["compacted"]]
        detail(f"a pass over {len(names)} topics, {len(rows)} partitions changed")
    if rows or not only_changes:
        print_rows(rows, format=format, columns=_CLEANED_COLUMNS)
        sys.stdout.flush()
    if held:
        warn(f"left alone, another process writes them: {', '.join(held)}")
    return 4 if held else 0


def _cleaned_row(outcome: PartitionOutcome, dry_run: bool) -> dict[str, Any]:
    retention, compaction = outcome.retention, outcome.compaction
    rules = sorted({segment.reason.value for segment in retention.removed})
    compacted: str | None = None
    if compaction is not None:
        compacted = (
            f"{compaction.records_before} → {compaction.records_after} records, "
            f"{format_size(compaction.bytes_before)} → {format_size(compaction.bytes_after)}"
        )
    elif dry_run and outcome.cleanable is not None and outcome.not_compacted_because is None:
        compacted = f"would clean offsets from {outcome.cleanable.first_dirty}"
    return {
        "partition": f"{outcome.topic}-{outcome.partition}",
        "removed": len(retention.removed),
        "freed": format_size(retention.removed_bytes),
        "rules": ",".join(rules) or None,
        "log_start": retention.log_start_after,
        "compacted": compacted,
        "remark": outcome.skipped or outcome.not_compacted_because,
        "freed_bytes": retention.removed_bytes,
        "dry_run": dry_run,
        "segments": [
            {
                "base_offset": segment.base_offset,
                "next_offset": segment.next_offset,
                "bytes": segment.size_bytes,
                "largest_timestamp_ms": segment.largest_timestamp,
                "rule": segment.reason.value,
            }
            for segment in retention.removed
        ],
    }


# -- tidegate log reseal ---------------------------------------------------------------------------

_RESEALED_COLUMNS = ("partition", "segment", "records", "bytes", "was")


@click.command("reseal", cls=Command)
@click.argument("topic")
@log_option
@click.option("-p", "--partition", type=click.IntRange(min=0), help="One partition of the topic.")
@click.option("--force", is_flag=True, help="Also where the audit finds faults besides the seals.")
@dry_run_option
@format_option()
@verbosity_options
def reseal(topic: str, log_url: str, partition: int | None, force: bool, dry_run: bool, format: str) -> None:
    """Write new seals for log segments whose files are not what their seals say.

    Each partition is audited first and refused when it is damaged, not merely changed. Use it after a broker
    or a repair has worked on the folder on purpose; never to make a warning go away.
    """
    from tidegate.files import Files
    from tidegate.log.catalog import LogFolder, partition_folder_name
    from tidegate.log.lifetime.facts import require_partition

    if log_url.startswith("kafka://"):
        raise InvalidError("seals are files of a log folder; --log must be one")
    files, log = Files(), Path(log_url)
    folder = LogFolder(files, log)
    if folder.is_foreign():
        raise ConflictError(f"{log} was not made by Tidegate, so nothing is written to it; it has no seals")
    description = folder.describe(topic)
    rows: list[dict[str, Any]] = []
    for number in require_partition(description.partition_numbers, topic, partition):
        place = log / partition_folder_name(topic, number)
        rows += _reseal(place, log, description.config, files, force=force, dry_run=dry_run)
    print_rows(rows, format=format, columns=_RESEALED_COLUMNS)
    say(f"{len(rows)} log segments {'would be' if dry_run else 'were'} sealed anew")


def _reseal(
    folder: Path, log: Path, config: TopicConfig, files: Files, *, force: bool, dry_run: bool
) -> list[dict[str, Any]]:
    from tidegate.clock import SystemClock
    from tidegate.log.locks import lock_partition
    from tidegate.log.sealer import seal_as_found
    from tidegate.log.seals import check_seals
    from tidegate.log.segment import LogSegment
    from tidegate.randomness import SeededRandomness

    with lock_partition(files, folder, SystemClock()):
        broken = {
            int(found.path.name.partition(".")[0]): found.message for found in check_seals(files, folder)
        }
        if not broken:
            return []
        if not force:
            _refuse_damage(folder, log, files)
        rows = []
        for base, message in sorted(broken.items()):
            segment = LogSegment(
                folder,
                base,
                config,
                files=files,
                clock=SystemClock(),
                randomness=SeededRandomness(0),
                read_only=True,
            )
            row: dict[str, Any] = {"partition": folder.name, "segment": base, "was": message}
            if not dry_run:
                seal = seal_as_found(files, folder, segment)
                row |= {"records": seal.records, "bytes": seal.files[".log"].size}
            rows.append(row)
        return rows


def _refuse_damage(folder: Path, log: Path, files: Files) -> None:
    from tidegate.log.verify.findings import Severity
    from tidegate.log.verify.verify import verify

    findings = verify(str(folder), log=log, files=files).all_findings()
    faults = [f for f in findings.kept if f.severity is Severity.FAULT and f.kind != "seal"]
    if faults:
        raise ConflictError(
            f"{folder}: {faults[0].message} ({len(faults)} faults besides the seals); look at them with "
            f"{verify_command(folder)}, restore what is damaged, or insist with --force"
        )
