"""A partition audited in ranges, anywhere and in any order, to the very report that one pass gives.

Owns the two halves of `verify` in parallel, for native evidence and producers' metadata alike: `audit_range` looks at
a range and brings back what is left of it, `fold` puts a partition's ranges together in order. The first range is
judged as it is, because nothing comes before it; of all others a summary is made, which `carry.advance` joins to the
state before it.

P1  the report is the serial one's. What a summary cannot decide (a fault, a repeat, a push, a manifest) is read
    again with its carry, that range only.
P2  files whose records a reader would not meet as they lie there (damage, a torn tail, skipped or falling offsets, old
    formats) have their metadata judged through the reader, the partition as a whole; likewise where compaction shows
    only on the way.

Thread rule: values and pure functions over files that are only read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from tidegate.errors import TidegateError
from tidegate.files import Files
from tidegate.integrity.audit import audit_partition, finish, open_beside, prepare
from tidegate.integrity.audit_report import PartitionAudit
from tidegate.integrity.carry import advance
from tidegate.integrity.columns import int64s
from tidegate.integrity.rules import ValidationRules
from tidegate.integrity.state import PartitionState
from tidegate.integrity.summary import RangeSummary, extend
from tidegate.integrity.validator import PartitionValidator
from tidegate.log.log import Log
from tidegate.log.verify.ranges import RangeEvidence, RangeOrder, gather, scan_range
from tidegate.log.verify.scan import Compaction, PartitionTarget
from tidegate.log.verify.verify import Audit, PartitionReport

_NOTHING: Final = (0, 0)


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """One partition: what is known before it is read, and the ranges it is cut into.

    `rules` are None where metadata is not judged; `audit` then says why, or is None as well. `first` and `end` bound
    what a reader sees.
    """

    target: PartitionTarget
    tasks: tuple[RangeTask, ...]
    now_ms: int
    deep: bool
    rules: ValidationRules | None
    audit: PartitionAudit | None
    first: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class RangeTask:
    """Ranges of one partition that lie behind each other, looked at by one task. Travels."""

    place: tuple[int, int]
    """The partition's number in the audit, the task's in the partition."""
    topic: str
    partition: int
    ranges: tuple[RangeOrder, ...]
    size_bytes: int
    now_ms: int
    rules: ValidationRules | None
    audit: PartitionAudit | None
    first: int
    end: int

    @property
    def judges(self) -> bool:
        return self.place[1] == 0


@dataclass(slots=True)
class RangeOutcome:
    """What is left of a task's ranges. One of `summary` and `judged` is there where metadata was wanted."""

    place: tuple[int, int]
    evidence: list[RangeEvidence] = field(default_factory=list)
    summary: RangeSummary | None = None
    judged: tuple[PartitionAudit, PartitionState] | None = None
    spoiled: bool = False
    size_bytes: int = 0
    records: int = 0
    faults: int = 0


class SummingTap:
    """Records into a summary."""

    def __init__(self, first: int, end: int) -> None:
        self.first, self.end = first, end
        self.summary = RangeSummary()
        self.is_spoiled = False

    def take(self, batch: pa.RecordBatch) -> None:
        if not self.is_spoiled:
            self.summary = extend(self.summary, batch, spares_fields=True)

    def spoiled(self) -> None:
        self.is_spoiled = True


class JudgingTap:
    """Records through the validator, from the partition's first on or behind a `state`."""

    def __init__(
        self,
        audit: PartitionAudit,
        rules: ValidationRules,
        now_ms: int,
        *,
        first: int,
        end: int,
        state: PartitionState | None = None,
    ) -> None:
        self.first, self.end = first, end
        self.audit = audit
        self.is_spoiled = False
        self._now_ms = now_ms
        self._validator = PartitionValidator(audit.topic, audit.partition, rules=rules, state=state)

    @property
    def state(self) -> PartitionState:
        return self._validator.state

    def take(self, batch: pa.RecordBatch) -> None:
        if not self.is_spoiled:
            self.audit.take(self._validator.validate(batch, self._now_ms), int64s(batch, "offset"))

    def spoiled(self) -> None:
        self.is_spoiled = True

    def finish(self) -> None:
        """All records were judged."""
        finish(self.audit, self.state)


def audit_range(task: RangeTask, files: Files | None = None) -> RangeOutcome:
    """Look at a task's ranges."""
    files = files if files is not None else Files()
    outcome = RangeOutcome(task.place)
    tap: SummingTap | JudgingTap | None = None
    if task.rules is not None and task.audit is not None:
        tap = SummingTap(task.first, task.end)
        if task.judges:
            tap = JudgingTap(deepcopy(task.audit), task.rules, task.now_ms, first=task.first, end=task.end)
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
    """Records must be read to go on, and the caller did not want that here."""


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
    if plan.rules is None or plan.audit is None:
        return report, plan.audit
    spoiled = any(outcome.spoiled for outcome in outcomes)
    is_plain = native.is_regular and not spoiled and report.compaction is plan.target.compaction
    if not is_plain:
        if not may_read:
            raise ReadAgain
        return report, judged_through_reader(report, plan.now_ms)
    audit = _fold_files(plan, plan.rules, plan.audit, outcomes, extents, as_given, may_read)
    return report, audit


def judged_through_reader(report: PartitionReport, now_ms: int) -> PartitionAudit:
    """The metadata of a partition whose native audit is done, as any reader meets it (P2)."""
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
    audit: PartitionAudit,
    rules: ValidationRules,
    outcomes: Sequence[RangeOutcome | None],
    read: Callable[[int, PartitionAudit, PartitionState], PartitionState],
) -> PartitionAudit:
    """The metadata of one partition, range by range (P1); `read` judges a range behind a state, None is one to read."""
    state = PartitionState()
    for number, outcome in enumerate(outcomes):
        after: PartitionState | None = None
        if outcome is not None and outcome.judged is not None:
            audit, after = (
                deepcopy(outcome.judged[0]),
                outcome.judged[1],
            )  # a fold may be tried again elsewhere
        elif outcome is not None and outcome.summary is not None:
            after = advance(state, outcome.summary, rules)
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
    plan: PartitionPlan,
    rules: ValidationRules,
    audit: PartitionAudit,
    outcomes: Sequence[RangeOutcome],
    extents: Sequence[tuple[int, int]],
    as_given: Sequence[bool],
    may_read: bool,
) -> PartitionAudit:
    with ExitStack() as opened:
        log: Log | None = None

        def read(number: int, audit: PartitionAudit, state: PartitionState) -> PartitionState:
            nonlocal log
            first, end = extents[number]
            if first >= end:  # a range within one batch of the range before it has nothing of its own
                return state
            if not may_read:
                raise ReadAgain
            first, end = max(first, plan.first), min(end, plan.end)
            if first >= end:
                return state
            log = log or opened.enter_context(open_beside(plan.target.folder))
            tap = JudgingTap(audit, rules, plan.now_ms, first=first, end=end, state=state.copy())
            with log.reader(
                audit.topic, [audit.partition], start=first, stop=end, control_records=True
            ) as reader:
                for batch in reader:
                    tap.take(batch)
            return tap.state

        stood = [outcome if given else None for outcome, given in zip(outcomes, as_given, strict=True)]
        return fold_metadata(deepcopy(audit), rules, stood, read)


def plan_metadata(
    target: PartitionTarget, *, files: Files
) -> tuple[PartitionAudit, ValidationRules | None, int, int]:
    """How a partition's metadata is to be judged, and which offsets a reader sees."""
    audit = PartitionAudit(target.place.topic, target.place.partition)
    with open_beside(target.folder) as log:
        rules = prepare(
            log,
            audit,
            compacts=target.compaction is Compaction.YES,
            because=target.compaction_because,
        )
        if rules is None:
            return audit, None, *_NOTHING
        bounds = log.view(audit.topic, audit.partition).bounds()
        return audit, rules, bounds.log_start, bounds.high_watermark
