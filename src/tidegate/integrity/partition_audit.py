"""Audit the integrity metadata of one partition: in one pass, or in ranges that are merged in order.

The validator gives the verdicts, `report` counts them. An audit never stops at a fault and counts every record. A batch
that cannot be read is a finding of the native audit; here it is skipped, and its records show as MISSING. Gaps are
tolerated where the topic is compacted, by its `min.compaction.lag.ms` (0 where a broker's checkpoint shows that it is
compacted, but not its settings), and only below the offset up to which it was compacted. The head of a partition may be
gone when its log does not start at offset 0.

A range is read in any process, by `audit_range`. The first one is validated directly, because nothing precedes it;
every other range is summarised, and `advance` applies the summary to the state before it, by the rules for a sound
stream (A1, A7, B1, C4). `fold` merges a partition's outcomes in order.

P1  the report equals the serial one. A range that its summary cannot decide (a fault, a duplicate, a push, a manifest)
    is read again, that range only, with the state before it.
P2  files whose records a reader would not return as they are stored (damage, a torn tail, skipped or decreasing
    offsets, old formats) have their metadata validated through the reader, the whole partition at once; likewise where
    compaction is discovered only while reading.
Y1  where `advance` returns a state, the validator finds every record of the range sound (OK, UNMANAGED or a heartbeat)
    and leaves an equal state.
Y2  where it returns None nothing has changed.

Thread rule: one partition, one thread; different partitions may be audited at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa

from tidegate.errors import CorruptError, TidegateError
from tidegate.files import Files
from tidegate.integrity.columns import int64s
from tidegate.integrity.header import MAX_SEQUENCE, ChecksumType, EndOfChain
from tidegate.integrity.report import AuditReport, PartitionAudit
from tidegate.integrity.state import NO_TIME, UNCOUNTED, PartitionState, Producer
from tidegate.integrity.summary import NOWHERE, RangeSummary, Run, extend
from tidegate.integrity.validator import AUDIT, Counters, OnError, PartitionValidator, ValidationRules
from tidegate.integrity.verdicts import NOT_COMPACTED, Tolerance
from tidegate.log.log import Log
from tidegate.log.reader import Reader
from tidegate.log.topic_config import TopicConfig
from tidegate.log.verify.ranges import RangeEvidence, RangeOrder, gather, scan_range
from tidegate.log.verify.scan import Compaction, PartitionTarget
from tidegate.log.verify.verify import Audit, PartitionReport

# -- one pass --------------------------------------------------------------------------------------

Progress: TypeAlias = Callable[[int, int], None]
"""Called after each batch with its records and its faults."""


def audit_topic(log: Log, topic: str, *, now_ms: int | None = None) -> AuditReport:
    """Audit every partition of a topic; `now_ms` is the audit's fixed time, by default the log's clock."""
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
    """Validate one partition, filling `audit` on the way, so that an interrupted audit leaves partial results.

    For a folder without settings, `compacts` says whether it is compacted, and `because` by which evidence.
    """
    plan = prepare(log, audit, now_ms, compacts=compacts, because=because)
    if plan is None:
        return
    validator = PartitionValidator(audit.topic, audit.partition, rules=plan.rules)
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


@dataclass(frozen=True, slots=True)
class MetadataPlan:
    """How the metadata of one partition is validated; `first` and `end` bound the offsets that a reader returns.

    `audit` is the empty report, with the log's start and why gaps are tolerated.
    """

    audit: PartitionAudit
    rules: ValidationRules
    now_ms: int
    first: int
    end: int


def prepare(
    log: Log, audit: PartitionAudit, now_ms: int, *, compacts: bool | None = None, because: str = ""
) -> MetadataPlan | None:
    """The plan, with the reasons recorded in `audit`; None when the partition cannot be read."""
    try:
        description = log.describe(audit.topic)
        bounds = log.view(audit.topic, audit.partition, description=description).bounds()
    except TidegateError as error:
        audit.unread = str(error)
        return None
    audit.log_start = bounds.log_start
    below = log.compacted_below(audit.topic, audit.partition)
    if not description.assumed:
        tolerance, audit.compaction = tolerance_by_settings(description.config, below)
    elif compacts:
        tolerance = Tolerance(0, compacted_below=below)
        audit.compaction = because or "the partition is compacted"
    else:
        tolerance = Tolerance(NOT_COMPACTED)
        audit.compaction = f"{because or 'compaction is not known of'}: every gap is a fault"
    return MetadataPlan(audit, rules_of(audit, tolerance), now_ms, bounds.log_start, bounds.high_watermark)


def plan_metadata(target: PartitionTarget, now_ms: int) -> tuple[PartitionAudit, MetadataPlan | None]:
    """The empty report of a partition folder, and its plan; None when it cannot be read."""
    audit = PartitionAudit(target.place.topic, target.place.partition)
    with open_beside(target.folder) as log:
        compacts = target.compaction is Compaction.YES
        return audit, prepare(log, audit, now_ms, compacts=compacts, because=target.compaction_because)


def rules_of(audit: PartitionAudit, tolerance: Tolerance) -> ValidationRules:
    """The settings of an audit, which never stops. `audit` has the log's start and why gaps are tolerated."""
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
    """Complete the report; `state` is the state after the last record."""
    audit.open_chains = int((state.producers.known["ended"] == 0).sum())


def open_beside(folder: Path) -> Log:
    """Open the log that contains a partition folder, read-only."""
    return Log(folder.resolve().parent, read_only=True)


def _around_damage(log: Log, reader: Reader, audit: PartitionAudit) -> Iterator[pa.RecordBatch]:
    """Yield all readable batches, those after damage included."""
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


def tolerance_by_settings(
    config: TopicConfig, below: Callable[[], int] | None = None
) -> tuple[Tolerance, str]:
    """The tolerance for gaps by a topic's settings, and its reason."""
    policy = ",".join(sorted(config.cleanup_policy))
    if not config.compacts:
        return Tolerance(NOT_COMPACTED), f"cleanup.policy={policy}: every gap is a fault"
    lag_ms = config.min_compaction_lag_ms
    tolerance = Tolerance(lag_ms, compacted_below=below)
    return tolerance, f"cleanup.policy={policy}, min.compaction.lag.ms={lag_ms}"


# -- state after a range ---------------------------------------------------------------------------

_SUMMED = 2**64


def advance(state: PartitionState, summary: RangeSummary, rules: ValidationRules) -> PartitionState | None:
    """The state after a range; None when the range must be validated record by record (Y1, Y2)."""
    if summary.malformed or summary.has_push or summary.bad_heartbeats or rules.strict or rules.batch_only:
        return None
    if not summary.records:
        return state
    if summary.first_offset < state.next_offset:
        return None
    moved: list[Producer] = []
    for guid, runs in sorted(summary.runs.items(), key=lambda item: item[1][0].first_offset):
        producer = state.producers.get(guid)
        for run in runs:
            producer = _follow(producer, guid, run)
            if producer is None:
                return None
        if producer is not None:
            moved.append(producer)
    after = state.copy()
    after.producers.put_all(moved)
    if len(after.producers) > rules.max_producers:
        return None
    after.next_offset = summary.last_offset + 1
    return after


def _follow(known: Producer | None, guid: bytes, run: Run) -> Producer | None:
    """The producer's state after a run of sound records; None when they are not sound or that is unknown."""
    if run.bad_offset != NOWHERE:
        return None
    if run.announced >= 0:
        producer = _opened(known, guid, run)
    else:
        producer = None if known is None or known.ended else _continued(known, run)
    if producer is None:
        return None
    if run.end is None:
        return producer
    if producer.registered and not producer.tainted and run.end != _certified(producer):
        return None
    return replace(producer, ended=True, final=run.final)


def _opened(known: Producer | None, guid: bytes, run: Run) -> Producer | None:
    is_first = known is None and run.chain == 0
    is_next = known is not None and known.ended and run.chain == known.chain + 1
    if not is_first and not is_next:
        return None
    blank = Producer(
        guid=guid,
        chain=run.chain,
        sequence=run.first_sequence,
        registered=True,
        checksum_type=run.announced,
        data_records=0 if known is None else known.data_records,
        producer_time=NO_TIME if known is None else known.producer_time,
    )
    return _moved(blank, run)


def _continued(known: Producer, run: Run) -> Producer | None:
    if run.chain != known.chain or run.first_sequence != known.sequence + 1:
        return None
    if known.registered and known.checksum_type == ChecksumType.ADHASH:
        return None  # its sums were not computed because the chain starts in another range
    if not known.registered:
        return None  # whether the records are of headers only, which makes it registered, is not in a run
    return _moved(known, run)


def _moved(producer: Producer, run: Run) -> Producer:
    counted = producer.data_records
    sums = {ChecksumType.ADHASH2: run.crc_sum, ChecksumType.ADHASH: run.field_sum}
    added = sums.get(ChecksumType(producer.checksum_type), 0)
    moved = replace(
        producer,
        sequence=run.last_sequence,
        data_records=counted if counted == UNCOUNTED else counted + run.data_records,
        producer_time=max(producer.producer_time, run.newest_time),
        log_time=run.log_time,
        offset=run.last_offset,
    )
    return replace(
        moved,
        checksum=(producer.checksum + added) % _SUMMED,
        stamp_sum=(producer.stamp_sum + run.stamp_sum) % _SUMMED,
        records=producer.records + run.records,
        ended=producer.ended or run.last_sequence == MAX_SEQUENCE,
    )


def _certified(producer: Producer) -> EndOfChain:
    return EndOfChain(
        ChecksumType(producer.checksum_type), producer.checksum, producer.records, producer.stamp_sum
    )


# -- ranges ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """The plan of one partition, and the ranges it is cut into.

    `metadata` is None where metadata is not validated; `audit` then has the reason, or is None as well.
    """

    target: PartitionTarget
    deep: bool
    audit: PartitionAudit | None
    metadata: MetadataPlan | None
    tasks: tuple[RangeTask, ...] = ()


@dataclass(frozen=True, slots=True)
class RangeTask:
    """Adjacent ranges of one partition, read by one task; picklable."""

    place: tuple[int, int]
    """The partition's number in the audit, the task's in the partition."""
    ranges: tuple[RangeOrder, ...]
    size_bytes: int
    metadata: MetadataPlan | None


@dataclass(slots=True)
class RangeOutcome:
    """The outcome of a task's ranges. One of `summary` and `judged` is set if metadata was requested."""

    place: tuple[int, int]
    evidence: list[RangeEvidence] = field(default_factory=list)
    summary: RangeSummary | None = None
    judged: tuple[PartitionAudit, PartitionState] | None = None
    spoiled: bool = False
    size_bytes: int = 0
    records: int = 0
    faults: int = 0


class SummingTap:
    """Summarises the records it is given."""

    def __init__(self, plan: MetadataPlan) -> None:
        self.first, self.end = plan.first, plan.end
        self.summary = RangeSummary()
        self.is_spoiled = False

    def take(self, batch: pa.RecordBatch) -> None:
        if not self.is_spoiled:
            self.summary = extend(self.summary, batch, spares_fields=True)

    def spoiled(self) -> None:
        self.is_spoiled = True


class JudgingTap:
    """Validates the records it is given, from the partition's first or from a `state`, and fills `audit`."""

    def __init__(
        self, plan: MetadataPlan, audit: PartitionAudit, state: PartitionState | None = None
    ) -> None:
        self.first, self.end = plan.first, plan.end
        self.audit = audit
        self.is_spoiled = False
        self._now_ms = plan.now_ms
        self._validator = PartitionValidator(audit.topic, audit.partition, rules=plan.rules, state=state)

    @property
    def state(self) -> PartitionState:
        return self._validator.state

    def take(self, batch: pa.RecordBatch) -> None:
        if not self.is_spoiled:
            self.audit.take(self._validator.validate(batch, self._now_ms), int64s(batch, "offset"))

    def spoiled(self) -> None:
        self.is_spoiled = True

    def finish(self) -> None:
        """Complete the report after the last record."""
        finish(self.audit, self.state)


def audit_range(task: RangeTask, files: Files | None = None) -> RangeOutcome:
    """Read a task's ranges and return the outcome."""
    files = files if files is not None else Files()
    outcome = RangeOutcome(task.place)
    tap: SummingTap | JudgingTap | None = None
    if (plan := task.metadata) is not None:
        tap = JudgingTap(plan, deepcopy(plan.audit)) if task.place[1] == 0 else SummingTap(plan)
    for order in task.ranges:
        evidence = scan_range(order, files=files, tap=tap)
        outcome.evidence.append(evidence)
        outcome.size_bytes += max(0, evidence.end - order.start)
        outcome.records += int(evidence.rows["count"].sum())
        outcome.faults += len(evidence.damages) + len(evidence.unparsed)
    if tap is not None:
        outcome.spoiled = tap.is_spoiled
    if isinstance(tap, JudgingTap):
        outcome.judged = tap.audit, tap.state
        outcome.faults += tap.audit.total.faults
    elif tap is not None:
        outcome.summary = tap.summary
    return outcome


# -- putting together ------------------------------------------------------------------------------


class ReadAgain(Exception):
    """Records must be read to continue, but the caller does not allow it."""


def fold(
    plan: PartitionPlan,
    outcomes: Sequence[RangeOutcome],
    *,
    files: Files | None = None,
    may_read: bool = True,
) -> tuple[PartitionReport, PartitionAudit | None]:
    """One partition's reports from its outcomes, in order (P1)."""
    files = files if files is not None else Files()
    report = PartitionReport(plan.target)
    gathered, extents, as_given = _gathered(outcomes, files, may_read)
    native = Audit(report, files, plan.deep, gathered=gathered)
    native.run()
    if plan.metadata is None:
        return report, plan.audit
    spoiled = any(outcome.spoiled for outcome in outcomes)
    if native.is_regular and not spoiled and report.compaction is plan.target.compaction:
        stood = [outcome if given else None for outcome, given in zip(outcomes, as_given, strict=True)]
        return report, _fold_files(plan.target, plan.metadata, stood, extents, may_read)
    if not may_read:
        raise ReadAgain
    return report, judged_through_reader(report, plan.metadata.now_ms)


def judged_through_reader(report: PartitionReport, now_ms: int) -> PartitionAudit:
    """Validate the metadata of a partition through the reader, after its native audit (P2)."""
    place = report.target.place
    audit = PartitionAudit(place.topic, place.partition)
    with open_beside(report.target.folder) as log:
        audit_partition(
            log,
            audit,
            now_ms=now_ms,
            compacts=report.compaction is Compaction.YES,
            because=report.compaction_because,
        )
    return audit


def _gathered(
    outcomes: Sequence[RangeOutcome], files: Files, may_read: bool
) -> tuple[dict[int, list[RangeEvidence] | None], list[tuple[int, int]], list[bool]]:
    """The evidence of each log segment; each task's offsets, and whether its evidence stood."""
    by_base: dict[int, list[tuple[int, RangeEvidence]]] = {}
    for number, outcome in enumerate(outcomes):
        for evidence in outcome.evidence:
            by_base.setdefault(evidence.order.base_offset, []).append((number, evidence))

    def again(order: RangeOrder) -> RangeEvidence:
        if not may_read:
            raise ReadAgain
        return scan_range(order, files=files)

    gathered: dict[int, list[RangeEvidence] | None] = {}
    ends, as_given = [0] * len(outcomes), [True] * len(outcomes)
    for base, parts in by_base.items():
        found = gather([part for _, part in parts], again)
        has_messages = any(part.evidence.has_messages for part in found)
        gathered[base] = None if has_messages else [part.evidence for part in found]
        for part in found:
            number = parts[part.number][0]
            as_given[number] = as_given[number] and part.stood
            if len(part.evidence.rows):
                ends[number] = max(ends[number], part.evidence.next_offset)
    extents, before = list[tuple[int, int]](), 0
    for end in ends:
        extents.append((before, max(before, end)))
        before = max(before, end)
    return gathered, extents, as_given


def fold_metadata(
    plan: MetadataPlan,
    outcomes: Sequence[RangeOutcome | None],
    read: Callable[[int, PartitionAudit, PartitionState], PartitionState],
) -> PartitionAudit:
    """Fold one partition's metadata, range by range (P1); `read` validates a range (None: to be read) after a state."""
    audit = deepcopy(plan.audit)
    state = PartitionState()
    for number, outcome in enumerate(outcomes):
        after: PartitionState | None = None
        if outcome is not None and outcome.judged is not None:
            audit, after = deepcopy(outcome.judged)  # a fold may be repeated in another process
        elif outcome is not None and outcome.summary is not None:
            after = advance(state, outcome.summary, plan.rules)
            if after is not None:
                audit.take_sound(outcome.summary)
        try:
            state = read(number, audit, state) if after is None else after
        except TidegateError as error:  # such as records that aged out meanwhile
            audit.unread = f"not read to its end: {error}"
            break
    finish(audit, state)
    return audit


def _fold_files(
    target: PartitionTarget,
    plan: MetadataPlan,
    outcomes: Sequence[RangeOutcome | None],
    extents: Sequence[tuple[int, int]],
    may_read: bool,
) -> PartitionAudit:
    with ExitStack() as opened:
        log: Log | None = None

        def read(number: int, audit: PartitionAudit, state: PartitionState) -> PartitionState:
            nonlocal log
            first, end = extents[number]
            if first >= end:  # a range that lies within the last batch of the range before it is empty
                return state
            if not may_read:
                raise ReadAgain
            first, end = max(first, plan.first), min(end, plan.end)
            if first >= end:
                return state
            log = log or opened.enter_context(open_beside(target.folder))
            tap = JudgingTap(plan, audit, state.copy())
            with log.reader(
                audit.topic, [audit.partition], start=first, stop=end, control_records=True
            ) as reader:
                for batch in reader:
                    tap.take(batch)
            return tap.state

        return fold_metadata(plan, outcomes, read)
