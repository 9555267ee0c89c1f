"""A topic of a Kafka cluster audited through its consumers' door: producers' metadata, and offsets.

A broker shows records and bounds, and none of its files: segments, indexes, snapshots, seals, producer ids and
sequences cannot be looked at, and every batch's CRC was checked by the client that fetched it, which stops at a wrong
one. The report says so (`NOT_SHOWN`). Offsets of transaction markers and of what compaction removed are not handed
out, so a skipped offset proves nothing here.

The ranges of a partition are offsets; otherwise all is as in `range_audit`, and the same for any number of workers.

Thread rule: values and pure functions around a reader.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from tidegate.errors import TidegateError
from tidegate.integrity.audit import finish, rules_of, tolerance_by_settings
from tidegate.integrity.audit_findings import add_findings_at
from tidegate.integrity.audit_report import AuditReport, PartitionAudit
from tidegate.integrity.auditing import RANGES_FOR_EACH, FullReport, Runner
from tidegate.integrity.carry import advance
from tidegate.integrity.range_audit import JudgingTap, SummingTap
from tidegate.integrity.rules import ValidationRules
from tidegate.integrity.state import PartitionState
from tidegate.integrity.summary import RangeSummary
from tidegate.log.access.connect import open_log
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.topics.topics import TopicPartition
from tidegate.log.verify.folders import Compaction, PartitionTarget
from tidegate.log.verify.partition import Progress
from tidegate.log.verify.report import PartitionReport

NOT_SHOWN: Final = (
    "a broker does not show its files: segments, indexes, snapshots, seals, and producers' native sequences were not "
    "checked (run verify where the broker's data is); CRCs were checked by the client"
)
SMALLEST_RANGE: Final = 200_000


@dataclass(frozen=True, slots=True)
class BrokerRange:
    """Offsets from `start` up to `stop` of one partition. Travels."""

    place: tuple[int, int]
    url: str
    client: Mapping[str, str]
    topic: str
    partition: int
    start: int
    stop: int
    now_ms: int
    rules: ValidationRules
    audit: PartitionAudit


@dataclass(slots=True)
class BrokerOutcome:
    """What is left of a range: a summary, or of the first one the judgement."""

    place: tuple[int, int]
    summary: RangeSummary = field(default_factory=RangeSummary)
    judged: tuple[PartitionAudit, PartitionState] | None = None
    records: int = 0
    faults: int = 0


def audit_broker(
    url: str,
    topic: str,
    *,
    client: Mapping[str, str] | None = None,
    now_ms: int,
    runner: Runner | None = None,
    smallest: int = SMALLEST_RANGE,
    progress: Progress | None = None,
    report: FullReport | None = None,
) -> FullReport:
    """Audit a topic of the cluster at `url`; without a `runner` in one pass here."""
    report = report if report is not None else FullReport()
    report.metadata = report.metadata or AuditReport()
    report.native.not_shown = NOT_SHOWN
    plans = _plans(url, topic, client or {}, now_ms, runner, smallest)
    found: dict[tuple[int, int], BrokerOutcome] = {}
    ranges = [each for _, plan in plans for each in plan]
    outcomes = map(audit_broker_range, ranges) if runner is None else runner.run(audit_broker_range, ranges)
    for outcome in outcomes:
        found[outcome.place] = outcome
        if progress is not None:
            progress(0, outcome.records, outcome.faults)
    for target, plan in plans:
        partition = PartitionReport(target, compaction=target.compaction)
        partition.compaction_because = target.compaction_because
        audit = _fold(plan, [found[each.place] for each in plan])
        partition.records = audit.total.records
        partition.first_offset, partition.next_offset = target.log_start, target.acknowledged
        report.native.partitions.append(partition)
        report.metadata.partitions.append(audit)
        add_findings_at(audit, partial(_everywhere, target.folder), partition.findings)
    return report


def audit_broker_partition(
    log: KafkaLog,
    audit: PartitionAudit,
    *,
    now_ms: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Judge one partition of an open cluster in one pass, and fill `audit` as it goes."""
    number = audit.partition
    first, end = log.bounds(audit.topic, [number])[number]
    tolerance, audit.compaction = tolerance_by_settings(log.describe(audit.topic).config)
    audit.log_start = first
    tap = JudgingTap(audit, rules_of(audit, tolerance), now_ms, first=first, end=end)
    with log.reader(
        audit.topic, [number], start={number: first}, stop={number: end}, control_records=True
    ) as reader:
        for batch in reader:
            before = audit.total.faults
            tap.take(batch)
            if progress is not None:
                progress(batch.num_rows, audit.total.faults - before)
    tap.finish()


def _everywhere(path: Path, _offset: int) -> Path:
    return path


def audit_broker_range(order: BrokerRange) -> BrokerOutcome:
    """Look at a range."""
    outcome = BrokerOutcome(order.place)
    if order.place[1] == 0:
        tap = JudgingTap(deepcopy(order.audit), order.rules, order.now_ms, first=order.start, end=order.stop)
        outcome.records = _read(order, tap)
        outcome.judged, outcome.faults = (tap.audit, tap.state), tap.audit.total.faults
        return outcome
    summing = SummingTap(order.start, order.stop)
    outcome.records = _read(order, summing)
    outcome.summary = summing.summary
    return outcome


def _read(order: BrokerRange, tap: JudgingTap | SummingTap) -> int:
    records = 0
    if order.start >= order.stop:
        return 0
    with (
        open_log(order.url, client=order.client) as log,
        log.reader(
            order.topic, [order.partition], start=order.start, stop=order.stop, control_records=True
        ) as reader,
    ):
        for batch in reader:
            tap.take(batch)
            records += batch.num_rows
    return records


def _plans(
    url: str, topic: str, client: Mapping[str, str], now_ms: int, runner: Runner | None, smallest: int
) -> list[tuple[PartitionTarget, list[BrokerRange]]]:
    with open_log(url, client=client) as log:
        description = log.describe(topic)
        with log.reader(topic) as reader:
            starts, ends = reader.start_offsets(), reader.end_offsets()  # type: ignore[union-attr]
    config = description.config
    policy = ",".join(sorted(config.cleanup_policy))
    tolerance, why = tolerance_by_settings(config)
    total = sum(max(0, ends[number] - starts[number]) for number in starts)
    pieces = 1 if runner is None else runner.workers * RANGES_FOR_EACH
    chunk = max(smallest, -(-total // pieces))
    plans = []
    for at, number in enumerate(sorted(starts)):
        first, end = starts[number], ends[number]
        compaction = Compaction.YES if config.compacts else Compaction.NO
        place = TopicPartition(topic, number)
        target = PartitionTarget(
            Path(f"{topic}-{number}"), place, compaction, f"the topic's cleanup.policy={policy}", first, end
        )
        audit = PartitionAudit(topic, number, compaction=why, log_start=first)
        rules = rules_of(audit, tolerance)
        step = max(1, end - first) if runner is None or config.compacts else chunk
        edges = [*range(first, end, step), end] if end > first else [first, end]
        plans.append(
            (
                target,
                [
                    BrokerRange((at, n), url, client, topic, number, start, stop, now_ms, rules, audit)
                    for n, (start, stop) in enumerate(itertools.pairwise(edges))
                ],
            )
        )
    return plans


def _fold(plan: Sequence[BrokerRange], outcomes: Sequence[BrokerOutcome]) -> PartitionAudit:
    audit, state = plan[0].audit, PartitionState()
    for order, outcome in zip(plan, outcomes, strict=True):
        if outcome.judged is not None:
            audit, state = outcome.judged
            continue
        after = advance(state, outcome.summary, order.rules)
        if after is not None:
            audit.take_sound(outcome.summary)
            state = after
            continue
        tap = JudgingTap(audit, order.rules, order.now_ms, first=order.start, end=order.stop, state=state)
        try:
            _read(order, tap)
        except TidegateError as error:  # such as records that aged out meanwhile
            audit.unread = f"not read to its end: {error}"
            break
        state = tap.state
    finish(audit, state)
    return audit
