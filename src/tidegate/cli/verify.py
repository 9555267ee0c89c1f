"""`tidegate verify`: an audit of a topic or of any Kafka data folder, with no set-up and without writing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tidegate.cli.options import Verb, command_options, format_option, log_option, talk_options
from tidegate.cli.output import Progress, echo, print_rows, say, to_json
from tidegate.cli.parallel import parallel_options, parallel_runner
from tidegate.durations import format_size
from tidegate.errors import InvalidError

if TYPE_CHECKING:
    from tidegate.files import Files
    from tidegate.integrity.audit_report import AuditReport
    from tidegate.integrity.auditing import FullReport, Runner
    from tidegate.log.verify.findings import Findings
    from tidegate.log.verify.report import Report

_FINDING_COLUMNS = ("severity", "kind", "file", "position", "offset", "producer", "message", "remedy")
_PARTITION_COLUMNS = (
    "partition",
    "segments",
    "bytes",
    "batches",
    "records",
    "sequenced",
    "producers",
    "offsets",
    "compacted",
    "faults",
)
_PRODUCER_COLUMNS = (
    "partition",
    "producer",
    "records",
    "ok",
    "duplicate",
    "missing",
    "corrupt",
    "unregistered",
    "after_end",
    "unsupported",
    "first_fault",
)


@click.command("verify", cls=Verb)
@click.argument("where", metavar="DIR|TOPIC", required=False)
@log_option
@click.option(
    "--fail-on",
    multiple=True,
    metavar="KINDS",
    help="Which findings give exit code 1: kinds separated by commas (missing, corrupt, duplicate, …), gap, "
    "crc, sequence, any, none. By default every fault; duplicates, aged-out heads and torn tails are none.",
)
@click.option("--shallow", is_flag=True, help="Check headers and CRCs only; do not parse records.")
@click.option(
    "--html",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the whole report as one HTML page, too.",
)
@parallel_options
@command_options
@click.option("--limit", type=click.IntRange(min=0), default=50, show_default=True, help="Findings to print.")
@format_option()
@talk_options
def command(
    where: str | None,
    log_url: str,
    fail_on: tuple[str, ...],
    shallow: bool,
    html: Path | None,
    spark: bool,
    master: str | None,
    jobs: int,
    command_config: str | None,
    command_properties: dict[str, str],
    limit: int,
    format: str,
) -> int:
    """Check CRCs, offsets, producer sequences, indexes, snapshots, seals and integrity metadata.

    DIR is a partition folder, a log folder or any Kafka data folder; TOPIC is a topic of --log. Without
    either the whole --log is checked. Nothing is written but what --html names, no lock is taken, no broker
    is needed.
    Every record is read once, CRCs and integrity metadata together; --shallow looks at headers and CRCs alone. With
    --spark or --jobs ranges of partitions are audited at once, and the report is the same. A topic of a cluster
    (--log kafka://…) is audited by its records' metadata; what a broker does not show is said.

    \b
    tidegate verify /var/lib/kafka/data
    tidegate verify orders --fail-on gap,corrupt,duplicate --format json
    tidegate verify orders --html orders-audit.html
    tidegate verify orders --spark
    """
    from tidegate.clock import SystemClock
    from tidegate.files import Files
    from tidegate.integrity.auditing import FullReport
    from tidegate.log.verify.findings import parse_fail_on

    chosen = parse_fail_on(fail_on) if fail_on else None
    files, now_ms = Files(), SystemClock().now_ms()
    if html is not None:
        _require_room(html, files)  # said now, not after hours of reading
    target = where or log_url
    full, interrupted = FullReport(), False
    with parallel_runner(spark, master, jobs) as runner:
        try:
            if log_url.startswith("kafka://"):
                from tidegate.cli.options import client_settings

                client = client_settings(command_config, command_properties)
                _audit_cluster(log_url, where, client, shallow, now_ms, runner, full)
            else:
                _audit_files(target, Path(log_url), files, not shallow, now_ms, runner, full)
        except KeyboardInterrupt:  # what was found so far is still worth a report
            interrupted = True
    report, integrity = full.native, full.metadata
    findings = report.all_findings()
    _print(report, integrity, findings, format, limit)
    if html is not None:
        from tidegate.integrity.report_page import page

        shown = page(report, integrity, where=target, now_ms=now_ms, interrupted=interrupted)
        files.publish(html, shown.encode())
        say(f"the report is in {html}")
    failing = findings.failing(chosen)
    say(
        _verdict(report, integrity, findings, failing)
        + (" (interrupted, not all was read)" if interrupted else "")
    )
    return 130 if interrupted else 1 if failing else 0


def _require_room(html: Path, files: Files) -> None:
    folder = files.stat(html.parent)
    if folder is None or not folder.is_folder:
        raise InvalidError(f"--html {html}: the folder {html.parent} does not exist; create it first")


def _audit_files(
    target: str,
    log: Path,
    files: Files,
    deep: bool,
    now_ms: int,
    runner: Runner | None,
    report: FullReport,
) -> None:
    from tidegate.integrity.auditing import audit
    from tidegate.log.verify.verify import size_of

    with Progress("verifying", total=size_of(target, log=log, files=files), unit="bytes") as progress:

        def advance(done: int, records: int, faults: int) -> None:
            progress.advance(done, records=records, faults=faults)

        audit(
            target,
            log=log,
            files=files,
            deep=deep,
            now_ms=now_ms,
            runner=runner,
            progress=advance,
            report=report,
        )


def _audit_cluster(
    url: str,
    topic: str | None,
    client: dict[str, str],
    shallow: bool,
    now_ms: int,
    runner: Runner | None,
    report: FullReport,
) -> None:
    from tidegate.integrity.broker_audit import audit_broker

    if topic is None:
        raise InvalidError(f"verify of a cluster needs a topic: `tidegate verify TOPIC --log {url}`")
    if shallow:
        raise InvalidError("--shallow checks files, which a broker does not show; leave it out")
    with Progress("verifying", total=0) as progress:
        audit_broker(
            url,
            topic,
            client=client,
            now_ms=now_ms,
            runner=runner,
            progress=lambda _, records, faults: progress.advance(records, faults=faults),
            report=report,
        )


def _summary(report: Report, integrity: AuditReport | None) -> dict[str, object]:
    return report.as_dict() | {"integrity": None if integrity is None else integrity.as_dict()}


def _print(
    report: Report, integrity: AuditReport | None, findings: Findings, format: str, limit: int
) -> None:
    if format == "json":
        import sys

        sys.stdout.write(to_json(_summary(report, integrity)) + "\n")
        return
    rows = [
        finding.as_dict() | {"file": _short(finding.path), "path": str(finding.path)}
        for finding in findings.kept[:limit]
    ]
    if format == "table":
        print_rows(_partition_rows(report), format="table", columns=_PARTITION_COLUMNS)
        if integrity is not None and integrity.managed:
            echo()
            print_rows(_producer_rows(integrity, limit), format="table", columns=_PRODUCER_COLUMNS)
            _print_expected(integrity)
        if rows:
            echo()
            for row in rows:
                _print_finding(row)
            if findings.total > len(rows):
                echo(f"… and {findings.total - len(rows)} more findings")
        echo(f"\n{report.evidence}")
        if integrity is not None and (integrity.managed or any(each.unread for each in integrity.partitions)):
            echo(integrity.evidence)
        return
    if format == "jsonl":
        rows = [row | {"type": "finding"} for row in rows]
        summary = {key: value for key, value in _summary(report, integrity).items() if key != "findings"}
        rows.append({"type": "summary", **summary})
    print_rows(rows, format=format, columns=_FINDING_COLUMNS)


def _print_finding(row: dict[str, object]) -> None:
    place = str(row["file"])
    for name in ("position", "offset", "producer"):
        if row[name] is not None:
            place += f" {name} {row[name]}"
    echo(f"{row['severity']}: {row['kind']}: {place}")
    echo(f"    {row['message']}")
    echo(f"    → {row['remedy']}")


def _partition_rows(report: Report) -> list[dict[str, object]]:
    return [
        {
            "partition": str(partition.target.place),
            "segments": partition.segments,
            "bytes": format_size(partition.bytes),
            "batches": partition.batches,
            "records": partition.records,
            "sequenced": partition.records_with_sequence,
            "producers": partition.producers,
            "offsets": None
            if partition.first_offset is None
            else f"{partition.first_offset}…{partition.next_offset}",
            "compacted": partition.compaction.value,
            "faults": partition.findings.faults,
        }
        for partition in report.partitions
    ]


def _producer_rows(integrity: AuditReport, limit: int) -> list[dict[str, object]]:
    """One row per partition and producer, those with faults first where not all are shown."""
    from tidegate.integrity.verdicts import FATAL, Verdict

    found = [
        (f"{partition.topic}-{partition.partition}", name, tally)
        for partition in integrity.partitions
        for name, tally in partition.producers.items()
    ]
    if len(found) > limit:
        echo(f"{len(found)} producers; the {limit} with the most faults:")
        found = sorted(found, key=lambda row: -row[2].faults)[:limit]
    return [
        {
            "partition": place,
            "producer": name,
            "records": tally.records,
            "ok": tally.verdicts[Verdict.OK],
            "duplicate": tally.verdicts[Verdict.DUPLICATE],
            "missing": tally.verdicts[Verdict.MISSING],
            "corrupt": tally.verdicts[Verdict.CORRUPT],
            "unregistered": tally.verdicts[Verdict.UNREGISTERED_PRODUCER],
            "after_end": tally.verdicts[Verdict.AFTER_END],
            "unsupported": tally.verdicts[Verdict.UNSUPPORTED],
            "first_fault": min(
                (tally.first[kind][0] for kind in FATAL if tally.first.get(kind)), default=None
            ),
        }
        for place, name, tally in found
    ]


def _print_expected(integrity: AuditReport) -> None:
    for partition in integrity.partitions:
        for gaps in partition.expected:
            place = f"{partition.topic}-{partition.partition}"
            echo(f"{place}: {gaps.count} expected gaps, the first at {gaps.first[0]}: {gaps.reason}")


def _short(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _verdict(report: Report, integrity: AuditReport | None, findings: Findings, failing: int) -> str:
    where = f"{len(report.partitions)} partition{'s' * (len(report.partitions) != 1)}"
    if findings.total == 0:
        doubts = [] if integrity is None else integrity.doubts
        if doubts:
            return f"{where}: no fault found, but {'; '.join(doubts)}"
        return f"{where}: nothing wrong found"
    return f"{where}: {findings.total} findings, {findings.faults} of them faults; {failing} count as failure"
