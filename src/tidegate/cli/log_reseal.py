"""`tidegate log reseal`: accept log segments that another program wrote or changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tidegate.cli.options import Verb, dry_run_option, format_option, log_option, talk_options
from tidegate.cli.output import print_rows, say
from tidegate.errors import ConflictError, InvalidError, verify_command

if TYPE_CHECKING:
    from tidegate.files import Files
    from tidegate.log.topics.topic_config import TopicConfig

_COLUMNS = ("partition", "segment", "records", "bytes", "was")


@click.command("reseal", cls=Verb)
@click.argument("topic")
@log_option
@click.option("-p", "--partition", type=click.IntRange(min=0), help="One partition of the topic.")
@click.option("--force", is_flag=True, help="Also where the audit finds faults besides the seals.")
@dry_run_option
@format_option()
@talk_options
def command(topic: str, log_url: str, partition: int | None, force: bool, dry_run: bool, format: str) -> None:
    """Write new seals for log segments whose files are not what their seals say.

    Each partition is audited first and refused when it is damaged, not merely changed. Use it after a broker
    or a repair has worked on the folder on purpose; never to make a warning go away.
    """
    from tidegate.files import Files
    from tidegate.log.lifetime.facts import require_partition
    from tidegate.log.topics.catalog import LogFolder
    from tidegate.log.topics.topics import partition_folder_name

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
    print_rows(rows, format=format, columns=_COLUMNS)
    say(f"{len(rows)} log segments {'would be' if dry_run else 'were'} sealed anew")


def _reseal(
    folder: Path, log: Path, config: TopicConfig, files: Files, *, force: bool, dry_run: bool
) -> list[dict[str, Any]]:
    from tidegate.clock import SystemClock
    from tidegate.log.access.locks import lock_partition
    from tidegate.log.partitions.sealing import seal_as_found
    from tidegate.log.segments.seals import check_seals
    from tidegate.log.segments.segment import LogSegment
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
