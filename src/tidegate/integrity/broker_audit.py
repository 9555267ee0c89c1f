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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tidegate.integrity.audit import rules_of, tolerance_by_settings
from tidegate.integrity.audit_findings import add_findings_at
from tidegate.integrity.audit_report import AuditReport, PartitionAudit
from tidegate.integrity.auditing import RANGES_FOR_EACH, FullReport, Runner
from tidegate.integrity.range_audit import JudgingTap, RangeOutcome, SummingTap, fold_metadata
from tidegate.integrity.reading_ranges import ReadOrder, TopicAt
from tidegate.integrity.rules import ValidationRules
from tidegate.integrity.state import PartitionState
from tidegate.log.catalog import TopicPartition
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import open_log
from tidegate.log.verify.scan import Compaction, PartitionTarget
from tidegate.log.verify.verify import PartitionReport, Progress

NOT_SHOWN: Final = (
    "a broker does not show its files: segments, indexes, snapshots, seals, and producers' native sequences were not "
    "checked (run verify where the broker's data is); CRCs were checked by the client"
)
SMALLEST_RANGE: Final = 200_000


@dataclass(frozen=True, slots=True)
class BrokerTask:
    """A range of one partition, and how it is judged. Travels."""

    place: tuple[int, int]
    order: ReadOrder
    now_ms: int
    rules: ValidationRules
    audit: PartitionAudit

    def tap(self, audit: PartitionAudit, state: PartitionState | None = None) -> JudgingTap:
        return JudgingTap(
            audit, self.rules, self.now_ms, first=self.order.start, end=self.order.stop, state=state
        )

    def read(self, tap: JudgingTap | SummingTap) -> int:
        """How many records `tap` was given."""
        records = 0
        for batch in self.order.batches():
            tap.take(batch)
            records += batch.num_rows
        return records


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
    plans = _plans(TopicAt(url, topic, client or {}), now_ms, runner, smallest)
    found: dict[tuple[int, int], RangeOutcome] = {}
    ranges = [each for _, plan in plans for each in plan]
    outcomes = map(audit_broker_range, ranges) if runner is None else runner.run(audit_broker_range, ranges)
    for outcome in outcomes:
        found[outcome.place] = outcome
        if progress is not None:
            progress(0, outcome.records, outcome.faults)
    for target, plan in plans:
        partition = PartitionReport(target)
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


def audit_broker_range(task: BrokerTask) -> RangeOutcome:
    """Look at a range."""
    outcome = RangeOutcome(task.place)
    if task.place[1] == 0:
        tap = task.tap(deepcopy(task.audit))
        outcome.records = task.read(tap)
        outcome.judged, outcome.faults = (tap.audit, tap.state), tap.audit.total.faults
        return outcome
    summing = SummingTap(task.order.start, task.order.stop)
    outcome.records = task.read(summing)
    outcome.summary = summing.summary
    return outcome


def _plans(
    source: TopicAt, now_ms: int, runner: Runner | None, smallest: int
) -> list[tuple[PartitionTarget, list[BrokerTask]]]:
    topic = source.topic
    with open_log(source.url, client=source.client) as log:
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
        orders = [
            ReadOrder(source, number, n, start, stop)
            for n, (start, stop) in enumerate(itertools.pairwise(edges))
        ]
        tasks = [BrokerTask((at, order.number), order, now_ms, rules, audit) for order in orders]
        plans.append((target, tasks))
    return plans


def _fold(plan: Sequence[BrokerTask], outcomes: Sequence[RangeOutcome]) -> PartitionAudit:
    def read(number: int, audit: PartitionAudit, state: PartitionState) -> PartitionState:
        tap = plan[number].tap(audit, state)
        plan[number].read(tap)
        return tap.state

    return fold_metadata(plan[0].audit, plan[0].rules, outcomes, read)
