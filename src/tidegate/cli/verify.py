"""Checks of what a log holds: `tidegate verify`, `audit compare`, `certificate`, and `break`, which plants a damage.

All but `break` read; with `--spark` or `--jobs` they read in ranges, and the result is the same.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tidegate.cli.options import (
    AnyFunction,
    Command,
    Group,
    client_settings,
    command_options,
    format_option,
    log_option,
    state_option,
    verbosity_options,
)
from tidegate.cli.output import Progress, echo, print_object, print_rows, say, to_json, visible
from tidegate.durations import counted, format_size
from tidegate.errors import InvalidError

if TYPE_CHECKING:
    from tidegate.files import Files
    from tidegate.integrity.audit import Runner
    from tidegate.integrity.compare import Kind
    from tidegate.integrity.report import AuditReport
    from tidegate.log.verify.findings import Findings
    from tidegate.log.verify.verify import Report
    from tidegate.storage.backends.base import StorageBackend


# -- --spark, --master, --jobs ---------------------------------------------------------------------


def parallel_options(command: AnyFunction) -> AnyFunction:
    """`--spark`, `--master` and `--jobs` as parameters `spark`, `master` and `jobs`."""
    command = click.option(
        "--jobs",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Processes of this machine that read at once.",
    )(command)
    command = click.option(
        "--master", metavar="URL", help="Spark's master with --spark; every core of this machine without it."
    )(command)
    return click.option("--spark", is_flag=True, help="Read in ranges on Spark; the result is the same.")(
        command
    )


@contextmanager
def parallel_runner(spark: bool, master: str | None, jobs: int) -> Iterator[Runner | None]:
    """Who does the work; None for this process alone."""
    if spark and jobs > 1:
        raise InvalidError("--spark and --jobs both say who reads; keep one")
    if master is not None and not spark:
        raise InvalidError("--master is Spark's; add --spark")
    if spark:
        from tidegate.spark.audit import SCHEDULES_ONLY, SparkRunner
        from tidegate.spark.session import session

        where: dict[str, Any] = {} if master is None else {"master": master}
        made = session("tidegate-audit", config=SCHEDULES_ONLY, **where)
        try:
            yield SparkRunner(made)
        finally:
            made.stop()
    elif jobs > 1:
        from tidegate.integrity.audit import Processes

        with Processes(jobs) as processes:
            yield processes
    else:
        yield None


# -- tidegate verify -------------------------------------------------------------------------------

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


@click.command("verify", cls=Command)
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
@verbosity_options
def verify(
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
    from tidegate.integrity.audit import FullReport, audit, audit_broker
    from tidegate.log.verify.findings import parse_fail_on
    from tidegate.log.verify.verify import size_of

    chosen = parse_fail_on(fail_on) if fail_on else None
    files, now_ms = Files(), SystemClock().now_ms()
    if html is not None:
        _require_room(html, files)  # said now, not after hours of reading
    target, is_cluster = where or log_url, log_url.startswith("kafka://")
    if is_cluster and where is None:
        raise InvalidError(f"verify of a cluster needs a topic: `tidegate verify TOPIC --log {log_url}`")
    if is_cluster and shallow:
        raise InvalidError("--shallow checks files, which a broker does not show; leave it out")
    if where is None and not is_cluster and not Path(log_url).is_dir():
        raise InvalidError(
            f"there is no log at {log_url}: give --log URL or set TIDEGATE_LOG, or name a folder"
        )
    full, interrupted = FullReport(), False
    with parallel_runner(spark, master, jobs) as runner:
        common: dict[str, Any] = {"now_ms": now_ms, "runner": runner, "report": full}
        try:
            if is_cluster:
                client = client_settings(command_config, command_properties)
                with Progress("verifying", total=0) as progress:
                    common["progress"] = lambda _, records, faults: progress.advance(records, faults=faults)
                    audit_broker(log_url, target, client=client, **common)
            else:
                log = Path(log_url)
                size = size_of(target, log=log, files=files)
                with Progress("verifying", total=size, unit="bytes") as progress:
                    common["progress"] = lambda done, records, faults: progress.advance(
                        done, records=records, faults=faults
                    )
                    audit(target, log=log, files=files, deep=not shallow, **common)
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


def _print(
    report: Report, integrity: AuditReport | None, findings: Findings, format: str, limit: int
) -> None:
    summary = report.as_dict() | {"integrity": None if integrity is None else integrity.as_dict()}
    if format == "json":
        sys.stdout.write(to_json(summary) + "\n")
        return
    rows = [
        finding.as_dict()
        | {"file": f"{finding.path.parent.name}/{finding.path.name}", "path": str(finding.path)}
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
                named = [
                    f" {name} {row[name]}"
                    for name in ("position", "offset", "producer")
                    if row[name] is not None
                ]
                echo(f"{row['severity']}: {row['kind']}: {row['file']}{''.join(named)}")
                echo(f"    {row['message']}\n    → {row['remedy']}")
            if findings.total > len(rows):
                echo(f"… and {findings.total - len(rows)} more findings")
        echo(f"\n{report.evidence}")
        if integrity is not None and (integrity.managed or any(each.unread for each in integrity.partitions)):
            echo(integrity.evidence)
        return
    if format == "jsonl":
        rows = [row | {"type": "finding"} for row in rows]
        del summary["findings"]
        rows.append({"type": "summary", **summary})
    print_rows(rows, format=format, columns=_FINDING_COLUMNS)


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

    shown = {
        "unregistered" if each is Verdict.UNREGISTERED_PRODUCER else each.name.lower(): each
        for each in Verdict
    }
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
            **{name: tally.verdicts[verdict] for name, verdict in shown.items()},
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


def _verdict(report: Report, integrity: AuditReport | None, findings: Findings, failing: int) -> str:
    where = counted(len(report.partitions), "partition")
    if findings.total == 0:
        doubts = [] if integrity is None else integrity.doubts
        if doubts:
            return f"{where}: no fault found, but {'; '.join(doubts)}"
        return f"{where}: nothing wrong found"
    return f"{where}: {findings.total} findings, {findings.faults} of them faults; {failing} count as failure"


# -- tidegate audit compare ------------------------------------------------------------------------


@click.command("compare", cls=Command)
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@log_option
@click.option("--headers/--no-headers", default=True, show_default=True, help="Whether headers count.")
@click.option("--timestamps", is_flag=True, help="Timestamps count, too.")
@click.option("--committed", is_flag=True, help="Leave records of aborted transactions out, on both sides.")
@click.option(
    "--by",
    type=click.Choice(["auto", "partition", "key"]),
    default="auto",
    show_default=True,
    help="In order by partition, or by key without order; auto: by key where partitions are not the same.",
)
@click.option("--examples", type=click.IntRange(min=0), default=10, show_default=True, help="Of each kind.")
@parallel_options
@command_options
@format_option(("table", "json"), default="table")
@verbosity_options
def compare_topics(
    a: str,
    b: str,
    log_url: str,
    headers: bool,
    timestamps: bool,
    committed: bool,
    by: str,
    examples: int,
    spark: bool,
    master: str | None,
    jobs: int,
    command_config: str | None,
    command_properties: dict[str, str],
    format: str,
) -> int:
    """Prove that topics A and B hold the same records; exit code 1 when they do not.

    A and B are a topic of --log, FOLDER/TOPIC, or kafka://HOST:PORT/TOPIC. Offsets do not count: records are compared
    in order, partition by partition, by key, value and headers.

    \b
    tidegate audit compare orders /mnt/mirror/orders
    tidegate audit compare kafka://old:9092/orders kafka://new:9092/orders --spark
    """
    from tidegate.integrity.compare import compare_topics
    from tidegate.integrity.digests import Parts, TopicAt

    client = client_settings(command_config, command_properties)
    isolation = "read_committed" if committed else "read_uncommitted"
    sides = []
    for given in (a, b):
        url, topic = _place(given, log_url)
        settings = client if url.startswith("kafka://") else {}
        sides.append(TopicAt(url, topic, settings, isolation))
    parts = Parts.KEY | Parts.VALUE
    parts |= (Parts.HEADERS if headers else Parts(0)) | (Parts.TIMESTAMP if timestamps else Parts(0))
    with parallel_runner(spark, master, jobs) as runner, Progress("comparing", total=0) as progress:
        found = compare_topics(
            sides[0],
            sides[1],
            parts=parts,
            by=by,
            runner=runner,
            examples=examples,
            progress=progress.advance,
        )
    if format == "json":
        print_object({"a": a, "b": b, **found.as_dict()}, format="json")
    else:
        for each in found.partitions:
            where = "all partitions, by key" if each.partition is None else f"partition {each.partition}"
            told = "equal" if each.is_equal else _difference_text(each.counts, each.untold, each.changed)
            echo(f"{where}: {each.records[0]:,} and {each.records[1]:,} records: {told}")
            for (first, stop), (other, end) in each.ranges[:examples]:
                echo(f"  differs: A {_range(first, stop)}, B {_range(other, end)}")
            for example in each.examples:
                offsets = f"A {_offset(example.a)}, B {_offset(example.b)}"
                echo(f"  {example.kind.value}: key {example.key!r} at {offsets}")
    if found.is_equal:
        say(f"equal: {sum(each.records[0] for each in found.partitions):,} records on both sides")
        return 0
    untold = sum(each.untold for each in found.partitions)
    changed = sum(each.changed for each in found.partitions)
    say(f"different: {_difference_text(found.counts, untold, changed)}")
    return 1


def _difference_text(counts: Counter[Kind], untold: int, changed: int) -> str:
    parts = [f"{count:,} {kind.value}" for kind, count in counts.items()]
    if untold:
        parts.append(f"{untold:,} long stretches that were not compared record by record")
    if changed:
        parts.append(f"{changed:,} stretches that changed while they were compared: compare again")
    return ", ".join(parts)


def _place(given: str, log_url: str) -> tuple[str, str]:
    url, slash, topic = given.rpartition("/")
    if not slash:
        return log_url, given
    if given.startswith("kafka://") and url in ("kafka:/", "kafka:"):
        raise InvalidError(f"{given} names no topic; write kafka://HOST:PORT/TOPIC")
    if not topic:
        raise InvalidError(f"{given} names no topic; write FOLDER/TOPIC")
    return url or "/", topic


def _range(first: int, stop: int) -> str:
    return f"offsets {first} to {stop - 1}" if stop > first else "nothing"


def _offset(offset: int | None) -> str:
    return "not there" if offset is None else f"offset {offset}"


# -- tidegate certificate --------------------------------------------------------------------------

_LARGEST_BYTES = 256 << 20
_OUT_OF_REACH = 3


@click.group("certificate", cls=Group)
def certificate() -> None:
    """Certify what was read, and check later that the log still says so.

    \b
    tidegate certificate export orders -o orders.json           all of a topic, audited
    tidegate certificate export shop --round 120 -o 120.json    what a round of an app read
    tidegate certificate export users_v3 -o users_v3.json       a version of a table (users: the current one)
    tidegate certificate check orders.json --log /mnt/mirror    read again and compare
    """


@certificate.command("export")
@click.argument("subject", metavar="APP|TABLE|TOPIC")
@log_option
@state_option
@click.option(
    "--kind",
    type=click.Choice(["auto", "app", "table", "topic"]),
    default="auto",
    show_default=True,
    help="What it is; auto looks for an app of that name, then a table with versions, then a topic.",
)
@click.option(
    "--round", "round_number", type=click.IntRange(min=0), help="Which round of an app; the last one."
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to; stdout.",
)
@click.option(
    "--key-file",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Sign with HMAC-SHA256 and this file's bytes as the key.",
)
@parallel_options
@command_options
@verbosity_options
def export(
    subject: str,
    log_url: str,
    state: str,
    kind: str,
    round_number: int | None,
    output: Path | None,
    key_file: Path | None,
    spark: bool,
    master: str | None,
    jobs: int,
    command_config: str | None,
    command_properties: dict[str, str],
) -> None:
    """Read what an app's round, a table's version or a topic holds, and write its certificate."""
    from tidegate.clock import SystemClock
    from tidegate.files import Files
    from tidegate.integrity.certificates import certify_topic
    from tidegate.pipeline.certificates import certify_round
    from tidegate.tables.versions.certificates import certify_version

    files, now_ms = Files(), SystemClock().now_ms()
    key = None if key_file is None else files.read(key_file, limit=1 << 20)
    given: dict[str, Any] = {"now_ms": now_ms, "key": key}
    given["client"] = client_settings(command_config, command_properties)
    backend = None if kind == "topic" else _backend(state)
    try:
        found = _kind_of(subject, kind, backend, state)
        if round_number is not None and found != "app":
            raise InvalidError(f"--round is an app's, and {subject} is a {found} here")
        with parallel_runner(spark, master, jobs) as runner:
            if backend is not None and found == "app":
                made = certify_round(backend, subject, round_number, log_url, runner=runner, **given)
            elif backend is not None and found == "table":
                made = certify_version(backend, subject, log_url, runner=runner, **given)
            else:
                made = certify_topic(log_url, subject, runner=runner, **given)
    finally:
        if backend is not None:
            backend.close()
    text = to_json(made) + "\n"
    if output is None:
        click.echo(visible(text) if sys.stdout.isatty() else text, nl=False)
    else:
        files.publish(output, text.encode())
    say(f"{made['records']:,} records of {len(made['ranges'])} ranges certified; digest {made['digest']}")


@certificate.command("check")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@log_option
@click.option(
    "--key-file",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Refuse a certificate that is not signed with this key.",
)
@click.option("--complete", is_flag=True, help="Fail also when a part has aged out and cannot be checked.")
@parallel_options
@command_options
@format_option(("table", "json"), default="table")
@verbosity_options
def check(
    file: Path,
    log_url: str,
    key_file: Path | None,
    complete: bool,
    spark: bool,
    master: str | None,
    jobs: int,
    command_config: str | None,
    command_properties: dict[str, str],
    format: str,
) -> int:
    """Read the log again: proven, changed (exit code 1), or aged out (3 when nothing is left to check)."""
    from tidegate.files import Files
    from tidegate.integrity.certificates import check_certificate, parse_certificate

    files = Files()
    key = None if key_file is None else files.read(key_file, limit=1 << 20)
    document = parse_certificate(files.read(file, limit=_LARGEST_BYTES), key=key)
    client = client_settings(command_config, command_properties)
    with parallel_runner(spark, master, jobs) as runner:
        found = check_certificate(document, log_url, client=client, runner=runner)
    if format == "json":
        topics = [each.as_dict() for each in found]
        print_object({"digest": document["digest"], "topics": topics}, format="json")
    for each in found:
        told = f"of {each.records:,} records {each.proven:,} are proven, {each.aged_out:,} aged out"
        say(f"{each.topic}: {each.verdict}; {told}")
        for changed in each.changed if format == "table" else ():
            place = f"{each.topic}-{changed.partition} {_range(changed.first, changed.next)}"
            echo(f"changed: {place}: {changed.reason}")
    verdicts = {each.verdict for each in found}
    if "changed" in verdicts or (complete and verdicts - {"proven"}):
        return 1
    return _OUT_OF_REACH if verdicts == {"aged out"} else 0


def _kind_of(subject: str, kind: str, backend: StorageBackend | None, state: str) -> str:
    from tidegate.pipeline.checkpoint import Records
    from tidegate.tables.versions.catalog import version_named

    if backend is not None and kind in ("auto", "app") and Records(backend, subject).load_app() is not None:
        return "app"
    if backend is not None and kind in ("auto", "table") and version_named(backend, subject) is not None:
        return "table"
    if kind in ("app", "table"):
        raise InvalidError(f"there is no {kind} {subject} in {state}; say where with --state")
    return "topic"


def _backend(state: str) -> StorageBackend | None:
    """The state, if there is any: a topic needs none."""
    from tidegate.storage import open_backend
    from tidegate.storage.backends.base import NoStateError

    try:
        return open_backend(state, read_only=True)
    except NoStateError:
        return None


# -- tidegate break --------------------------------------------------------------------------------

DAMAGE_KINDS = (
    "drop",
    "repeat",
    "flip",
    "swap",
    "reorder",
    "truncate-tail",
    "forget-producer",
    "future-clock",
)


@click.command("break", cls=Command)
@click.argument("topic")
@click.option(
    "--kind", type=click.Choice(DAMAGE_KINDS), required=True, help="What to do to the copy; see above."
)
@click.option("-p", "--partition", type=click.IntRange(min=0), help="The partition to damage.")
@click.option("--offset", type=click.IntRange(min=0), help="The record to damage; by chance without.")
@click.option(
    "--count",
    type=click.IntRange(min=1),
    help="How many records: drop, repeat; of the producer's last: truncate-tail; of its first: forget-producer.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed strikes the same place.")
@click.option(
    "--into",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="The copy's log folder, which must not exist.  [default: the log's name with -broken]",
)
@log_option
@format_option(("line", "json"), default="line")
@verbosity_options
def break_copy(
    topic: str,
    kind: str,
    partition: int | None,
    offset: int | None,
    count: int | None,
    seed: int,
    into: Path | None,
    log_url: str,
    format: str,
) -> None:
    """Copy TOPIC into another log folder with one damage, and say which. The original is only read.

    \b
    drop             a record is gone
    repeat           a record comes twice
    flip             one bit of a value is another
    swap             two records have exchanged key and value
    reorder          two neighbouring records of a producer have changed places
    truncate-tail    a producer's last records are gone, from --offset on or the last --count
    forget-producer  a producer is gone, or its first --count records
    future-clock     a record's header says that its producer's clock was a day ahead

    The topic must have been written with integrity=True. `tidegate verify TOPIC --log FOLDER` finds the damage;
    losses at a producer's end, and of a whole producer, only where a push with its manifest has ended.
    """
    if log_url.startswith("kafka://"):
        raise InvalidError("break copies a topic of a log folder; --log must be one")
    source = Path(log_url)
    target = into if into is not None else source.with_name(f"{source.name}-broken")

    from tidegate.integrity.fault_injection import DamageKind, break_topic
    from tidegate.log.log import Log

    with Log(source, read_only=True) as log:
        done = break_topic(
            log,
            topic,
            DamageKind(kind),
            into=target,
            partition=partition,
            offset=offset,
            count=count,
            seed=seed,
        )
    if format == "json":
        print_object(done.to_dict(), format="json")
    else:
        echo(str(done))
