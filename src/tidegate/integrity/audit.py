"""The integrity metadata of records at rest, checked: whole partitions through the validator, reading only.

Owns the way from a log folder to a report: which settings a partition is judged with, and how reading goes on
behind damage. Verdicts are the validator's, counts are `audit_report`'s, and the log's metrics get them, too.

An audit never stops at a fault and counts everything. Every record is looked at, so that a share of metadata is
counted and not estimated; records without any cost their decoding. Damage that keeps a batch from being read is
the native audit's finding; here it is stepped over, and the records lost in it show as MISSING.

Gaps are tolerated where the topic is compacted, by its `min.compaction.lag.ms` (0 where a broker's checkpoint
says that it is compacted, but not how), and only below the offset to which compaction has come; where it is unknown
whether a folder is compacted, they are faults. The head of a partition may be gone when its log does not start at
offset 0.

Thread rule: one partition, one thread; different partitions may be audited at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa

from tidegate.errors import CorruptError, TidegateError
from tidegate.integrity.audit_report import AuditReport, PartitionAudit
from tidegate.integrity.columns import int64s
from tidegate.integrity.counters import AUDIT, Counters
from tidegate.integrity.rules import OnError, ValidationRules
from tidegate.integrity.state import PartitionState
from tidegate.integrity.tolerance import NOT_COMPACTED, Tolerance
from tidegate.integrity.validator import PartitionValidator
from tidegate.log.catalog import TopicDescription
from tidegate.log.checkpoints import CompactedBelow
from tidegate.log.log import Log
from tidegate.log.reader import Reader
from tidegate.log.topic_config import TopicConfig

Progress: TypeAlias = Callable[[int, int], None]
"""Called after each batch with its records and its faults."""


def audit_topic(log: Log, topic: str, *, now_ms: int | None = None) -> AuditReport:
    """Every partition of a topic; `now_ms` is the audit's one time, the log's clock without it."""
    now_ms = log.clock.now_ms() if now_ms is None else now_ms
    report = AuditReport()
    for number in log.describe(topic).partition_numbers:
        report.partitions.append(PartitionAudit(topic, number))
        audit_partition(log, report.partitions[-1], now_ms=now_ms)
    return report


def audit_partition(
    log: Log,
    audit: PartitionAudit,
    *,
    now_ms: int,
    compacts: bool | None = None,
    because: str = "",
    progress: Progress | None = None,
) -> None:
    """Judge one partition and fill `audit` as it goes, so that an interrupted one is worth something, too.

    `compacts` says what other evidence knows of a folder without settings, and `because` what evidence.
    """
    rules = prepare(log, audit, compacts=compacts, because=because)
    if rules is None:
        return
    validator = PartitionValidator(audit.topic, audit.partition, rules=rules)
    counters = Counters(log.metrics, audit.topic, audit.partition, AUDIT)
    with log.reader(audit.topic, [audit.partition], control_records=True) as reader:
        for batch in _around_damage(log, reader, audit):
            before = audit.total.faults
            judged = validator.validate(batch, now_ms)
            audit.take(judged, int64s(batch, "offset"))
            counters.take(judged, len(validator.state.producers))
            if progress is not None:
                progress(batch.num_rows, audit.total.faults - before)
    counters.released()
    finish(audit, validator.state)


def prepare(
    log: Log, audit: PartitionAudit, *, compacts: bool | None = None, because: str = ""
) -> ValidationRules | None:
    """How the partition is to be judged, with the reasons put into `audit`; None when it cannot be read at all."""
    try:
        description = log.describe(audit.topic)
        bounds = log.view(audit.topic, audit.partition, description=description).bounds()
    except TidegateError as error:
        audit.unread = str(error)
        return None
    audit.log_start = bounds.log_start
    below = log.compacted_below(audit.topic, audit.partition)
    tolerance, audit.compaction = _tolerance(description, compacts, because, below)
    return rules_of(audit, tolerance)


def rules_of(audit: PartitionAudit, tolerance: Tolerance) -> ValidationRules:
    """The rules of an audit: it never stops. `audit` knows its log's start and why gaps are tolerated."""
    audit.doubt, audit.compacted_below = tolerance.doubt(audit.log_start), tolerance.bound()
    audit.compacted.reason = audit.compaction
    audit.suspect.reason = (
        f"{audit.compaction}; but the gap ends above what was compacted, "
        "or at a young record: loss could hide"
    )
    audit.head.reason = (
        f"the log starts at offset {audit.log_start}: the producer's first records aged out"
        if audit.log_start
        else "the push had ended: a producer may be met in the middle of a chain"
    )
    return ValidationRules(
        during_push=OnError.KEEP,
        otherwise=OnError.KEEP,
        tolerance=tolerance,
        head_may_be_gone=audit.log_start > 0,
    )


def finish(audit: PartitionAudit, state: PartitionState) -> None:
    """All records were judged; `state` is what is known after the last."""
    audit.open_chains = int((state.producers.known["ended"] == 0).sum())


def open_beside(folder: Path) -> Log:
    """The log a partition folder lies in, for reading only."""
    return Log(folder.resolve().parent, read_only=True)


def _around_damage(log: Log, reader: Reader, audit: PartitionAudit) -> Iterator[pa.RecordBatch]:
    """All that can be read: what lies behind damage, too."""
    while True:
        try:
            yield from reader
            return
        except CorruptError as error:
            at = reader.positions()[audit.partition] if error.offset is None else error.offset
            resumed = log.view(audit.topic, audit.partition).next_sound_offset(at)
            if resumed is not None and not at < resumed < reader.end_offsets()[audit.partition]:
                resumed = None
            audit.skipped.append((at, resumed))
            if resumed is None:
                return
            reader.seek(audit.partition, resumed)
        except TidegateError as error:  # such as records that age out while they are read
            audit.unread = f"not read to its end: {error}"
            return


def _tolerance(
    description: TopicDescription, compacts: bool | None, because: str, below: CompactedBelow
) -> tuple[Tolerance, str]:
    """How gaps are judged, and why."""
    config = description.config
    if not description.assumed:
        return tolerance_by_settings(config, below)
    if compacts:
        return Tolerance(0, compacted_below=below), because or "the partition is compacted"
    return Tolerance(NOT_COMPACTED), f"{because or 'compaction is not known of'}: every gap is a fault"


def tolerance_by_settings(
    config: TopicConfig, below: Callable[[], int] | None = None
) -> tuple[Tolerance, str]:
    """How gaps are judged by a topic's settings, and why."""
    policy = ",".join(sorted(config.cleanup_policy))
    if not config.compacts:
        return Tolerance(NOT_COMPACTED), f"cleanup.policy={policy}: every gap is a fault"
    lag_ms = config.min_compaction_lag_ms
    tolerance = Tolerance(lag_ms, compacted_below=below)
    return tolerance, f"cleanup.policy={policy}, min.compaction.lag.ms={lag_ms}"
