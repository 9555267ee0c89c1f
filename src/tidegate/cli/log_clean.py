"""`tidegate log clean`: retention and compaction, now or every so often, with what they did."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from tidegate.cli.options import DURATION, Verb, dry_run_option, format_option, log_option, talk_options
from tidegate.cli.output import detail, print_rows, say, warn
from tidegate.durations import duration_ms, format_duration, format_size
from tidegate.errors import InvalidError

if TYPE_CHECKING:
    from tidegate.log.access.embedded import Log
    from tidegate.log.cleaning.housekeeping import PartitionOutcome

_COLUMNS = ("partition", "removed", "freed", "rules", "log_start", "compacted", "remark")


@click.command("clean", cls=Verb)
@click.argument("topic", required=False)
@log_option
@click.option(
    "--every", type=DURATION, metavar="DURATION", help="Go on, one pass every so often, until interrupted."
)
@dry_run_option
@format_option()
@talk_options
def command(topic: str | None, log_url: str, every: str | None, dry_run: bool, format: str) -> int:
    """Remove what retention lets go, compact what is dirty enough, and say what was done.

    An embedded log has no daemon: somebody must do this. Partitions that another process writes are left to
    it. Removed log segments are unreadable at once; their files leave the disk after file.delete.delay.ms, or
    when the partition is next opened.

    \b
    tidegate log clean
    tidegate log clean orders --dry-run
    tidegate log clean --every 5m
    """
    from tidegate.log.access.embedded import Log

    if log_url.startswith("kafka://"):
        raise InvalidError("a Kafka cluster cleans its own logs; --log must be a folder")
    if every is not None and dry_run:
        raise click.UsageError("--every and --dry-run do not go together")
    if not Path(log_url).is_dir():
        raise InvalidError(f"there is no log at {log_url}; give --log FOLDER or set TIDEGATE_LOG")
    interval = None if every is None else max(1000, duration_ms(every))
    with Log(log_url) as log:
        if interval is None:
            return _pass(log, topic, dry_run, format)
        say(f"one pass every {format_duration(interval)}; Ctrl-C ends it")
        return _keep_cleaning(log, topic, interval, format)


def _keep_cleaning(log: Log, topic: str | None, interval_ms: int, format: str) -> NoReturn:
    """Pass after pass until interrupted; only what changed is printed."""
    from tidegate.log.cleaning.attendance import Attendance
    from tidegate.log.cleaning.clock_brake import ClockBrake

    brake = ClockBrake(log.clock, hold_ms=interval_ms)
    with Attendance(log.path, interval_ms, files=log.files) as attendance:
        while True:
            look = brake.look()
            if look.leap_ms:
                warn(
                    f"the clock leapt {format_duration(look.leap_ms)} ahead, nothing is aged out for "
                    f"{format_duration(interval_ms)}; if it is wrong, set it right before then"
                )
            if not look.held:
                _pass(log, topic, False, format, only_changes=True)
                attendance.tell(last_run_ms=log.clock.now_ms())
            log.clock.sleep_ms(interval_ms)


def _pass(log: Log, topic: str | None, dry_run: bool, format: str, *, only_changes: bool = False) -> int:
    """One pass over all partitions, each opened only for its turn. 4 when some were held by others."""
    from tidegate.log.cleaning.housekeeping import HELD_ELSEWHERE, Housekeeping

    chores = Housekeeping(
        log,
        broker=log.contents.broker_config(),
        files=log.files,
        clock=log.clock,
        randomness=log.randomness,
    )
    names = log.topics() if topic is None else [log.describe(topic).name]
    outcomes = chores.clean_once(topics=names, dry_run=dry_run)
    rows = [_row(outcome, dry_run) for outcome in outcomes]
    held = [row["partition"] for row in rows if row["remark"] == HELD_ELSEWHERE]
    if only_changes:
        rows = [row for row in rows if row["removed"] or row["compacted"]]
        detail(f"a pass over {len(names)} topics, {len(rows)} partitions changed")
    if rows or not only_changes:
        print_rows(rows, format=format, columns=_COLUMNS)
        sys.stdout.flush()
    if held:
        warn(f"left alone, another process writes them: {', '.join(held)}")
    return 4 if held else 0


def _row(outcome: PartitionOutcome, dry_run: bool) -> dict[str, Any]:
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
