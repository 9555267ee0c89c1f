"""The whole audit of a topic or folder: one pass here, or ranges spread over processes or a Spark cluster.

Owns what is looked at, how it is cut, and the order of steps; reading is `range_audit`'s, the workers are a `Runner`'s.
Both ways give the same `FullReport`, down to the last finding (P1 there).

    audit(where, log=…)                         one pass, in this process
    audit(where, log=…, runner=Processes(4))    the same in ranges

Files are opened by path: workers must see the same folder at the same place.

Thread rule: one thread; a runner's workers are its own business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from tidegate.clock import SystemClock
from tidegate.files import Files
from tidegate.integrity.audit_findings import add_findings
from tidegate.integrity.audit_report import AuditReport, PartitionAudit
from tidegate.integrity.range_audit import (
    JudgingTap,
    PartitionPlan,
    RangeOutcome,
    RangeTask,
    ReadAgain,
    audit_range,
    fold,
    judged_through_reader,
    plan_metadata,
)
from tidegate.log.format.partition_files import LOG, offset_file
from tidegate.log.verify.ranges import RangeOrder, cut_evenly
from tidegate.log.verify.scan import Compaction, PartitionTarget, find_partitions
from tidegate.log.verify.verify import Audit, PartitionReport, Progress, Report, segment_bases

SMALLEST_RANGE: Final = 8 << 20
LARGEST_RANGE: Final = 512 << 20
RANGES_FOR_EACH: Final = 8  # so that one slow range does not keep the others waiting
_LAST: Final = 2**63 - 1

Item = TypeVar("Item")
Result = TypeVar("Result")


class Runner(Protocol):
    """Somebody who has work done elsewhere; functions and items must be such as can be sent there."""

    workers: int

    def run(self, work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """The results as they come, in any order; raises what a worker raised."""
        ...


@dataclass(slots=True)
class FullReport:
    """Both audits of the same partitions, in the same order; `metadata` is None where records were not read."""

    native: Report = field(default_factory=Report)
    metadata: AuditReport | None = None

    def as_dict(self) -> dict[str, Any]:
        integrity = None if self.metadata is None else self.metadata.as_dict()
        return self.native.as_dict() | {"integrity": integrity}


@dataclass(frozen=True, slots=True)
class Cutting:
    """How partitions are cut: by size for so many workers, or (`cuts`) at given bytes, by log segment file."""

    workers: int = 1
    smallest: int = SMALLEST_RANGE
    cuts: Callable[[Path, int], Sequence[int]] | None = None


def audit(
    where: str,
    *,
    log: Path,
    files: Files | None = None,
    deep: bool = True,
    now_ms: int | None = None,
    runner: Runner | None = None,
    cutting: Cutting | None = None,
    progress: Progress | None = None,
    report: FullReport | None = None,
) -> FullReport:
    """Audit a partition folder, a log folder, or a topic of the log at `log`.

    A `report` handed in is filled partition by partition, so that an interrupted audit is worth something, too.
    """
    files = files if files is not None else Files()
    now_ms = SystemClock().now_ms() if now_ms is None else now_ms
    report = report if report is not None else FullReport()
    if deep and report.metadata is None:
        report.metadata = AuditReport()
    targets = find_partitions(where, log, report.native.general, files=files)
    if runner is None:
        for target in targets:
            audit_here(target, report, files, deep, now_ms, progress)
    else:
        cutting = cutting or Cutting(runner.workers)
        plans = _plans(targets, cutting, files, deep, now_ms)
        _audit_elsewhere(plans, runner, report, files, progress)
    return report


# -- in one pass -----------------------------------------------------------------------------------


def audit_here(
    target: PartitionTarget,
    report: FullReport,
    files: Files,
    deep: bool,
    now_ms: int,
    progress: Progress | None,
) -> None:
    """One partition, each record read once unless the files are damaged (P2 of `range_audit`)."""
    partition = PartitionReport(target)
    report.native.partitions.append(partition)
    audit: PartitionAudit | None = None
    tap: JudgingTap | None = None
    if deep:
        audit, rules, first, end = plan_metadata(target, files=files)
        if rules is not None:
            tap = JudgingTap(audit, rules, now_ms, first=first, end=end)
    native = Audit(partition, files, deep, progress, tap=tap)
    try:
        native.run()
        if tap is not None and audit is not None:
            if native.is_regular and not tap.is_spoiled and partition.compaction is target.compaction:
                tap.finish()
            else:
                audit = judged_through_reader(partition, now_ms)
    finally:
        _add(report, partition, audit, files)


def _add(report: FullReport, partition: PartitionReport, audit: PartitionAudit | None, files: Files) -> None:
    if audit is not None and report.metadata is not None:
        report.metadata.partitions.append(audit)
        add_findings(audit, partition.target.folder, partition.findings, files=files)


# -- in ranges -------------------------------------------------------------------------------------


def _plans(
    targets: Sequence[PartitionTarget], cutting: Cutting, files: Files, deep: bool, now_ms: int
) -> list[PartitionPlan]:
    total = sum(_size(target.folder, files) for target in targets)
    wanted = math.ceil(total / max(1, cutting.workers * RANGES_FOR_EACH))
    chunk = min(max(wanted, cutting.smallest), LARGEST_RANGE)
    return [
        plan_partition(number, target, chunk, cutting, files=files, deep=deep, now_ms=now_ms)
        for number, target in enumerate(targets)
    ]


def plan_partition(
    number: int,
    target: PartitionTarget,
    chunk: int,
    cutting: Cutting,
    *,
    files: Files,
    deep: bool,
    now_ms: int,
) -> PartitionPlan:
    """The ranges of one partition, about `chunk` bytes each; a compacted one is looked at as a whole."""
    audit, rules, first, end = None, None, 0, 0
    if deep:
        audit, rules, first, end = plan_metadata(target, files=files)
    whole = target.compaction is Compaction.YES and cutting.cuts is None
    groups: list[tuple[list[RangeOrder], int]] = [([], 0)]
    for order, size in _orders(target, chunk, cutting, files, deep=deep, whole=whole):
        group, held = groups[-1]
        if group and not whole and (cutting.cuts is not None or held + size > chunk):
            groups.append(([order], size))
        else:
            groups[-1] = [*group, order], held + size
    place = target.place
    tasks = tuple(
        RangeTask(
            (number, at), place.topic, place.partition, tuple(group), size, now_ms, rules, audit, first, end
        )
        for at, (group, size) in enumerate(groups)
        if group
    )
    return PartitionPlan(target, tasks, now_ms, deep, rules, audit, first, end)


def _orders(
    target: PartitionTarget, chunk: int, cutting: Cutting, files: Files, *, deep: bool, whole: bool
) -> Iterator[tuple[RangeOrder, int]]:
    if not files.exists(target.folder):
        return
    bases = segment_bases(target.folder, files)
    for at, base in enumerate(bases):
        path = offset_file(target.folder, base, LOG)
        found = files.stat(path)
        size = 0 if found is None else found.size
        if cutting.cuts is not None:
            cuts = sorted({cut for cut in cutting.cuts(path, size) if 0 < cut < size})
        else:
            pieces = 1 if whole else math.ceil(size / chunk)
            cuts = cut_evenly(target.folder, base, size, pieces, files=files)
        edges = [0, *cuts]
        for start, stop in zip(edges, [*cuts, None], strict=True):
            order = RangeOrder(
                path,
                base,
                bases[at + 1] if at + 1 < len(bases) else _LAST,
                at + 1 == len(bases),
                target.acknowledged,
                start,
                stop,
                deep=deep,
            )
            yield order, (size if stop is None else stop) - start


def _audit_elsewhere(
    plans: Sequence[PartitionPlan],
    runner: Runner,
    report: FullReport,
    files: Files,
    progress: Progress | None,
) -> None:
    outcomes: dict[tuple[int, int], RangeOutcome] = {}
    tasks = [task for plan in plans for task in plan.tasks]
    # What takes longest begins first, so that all workers end together: first ranges are judged, which others are not.
    tasks.sort(key=lambda task: (not task.judges, -task.size_bytes))
    for outcome in runner.run(audit_range, tasks):
        outcomes[outcome.place] = outcome
        if progress is not None:
            progress(outcome.size_bytes, outcome.records, outcome.faults)
    given = [[outcomes[task.place] for task in plan.tasks] for plan in plans]
    done: dict[int, tuple[PartitionReport, PartitionAudit | None]] = {}
    again: list[int] = []
    for number, plan in enumerate(plans):
        try:
            done[number] = fold(plan, given[number], files=files, may_read=False)
        except ReadAgain:
            again.append(number)
    items = [(number, plans[number], given[number]) for number in again]
    found = map(_fold_item, items) if len(items) < 2 else runner.run(_fold_item, items)
    for number, result in found:
        done[number] = result
    for number in range(len(plans)):
        partition, audit = done[number]
        report.native.partitions.append(partition)
        _add(report, partition, audit, files)


FoldItem = tuple[int, PartitionPlan, list[RangeOutcome]]
Folded = tuple[int, tuple[PartitionReport, PartitionAudit | None]]


def _fold_item(item: FoldItem) -> Folded:
    number, plan, outcomes = item
    return number, fold(plan, outcomes)


def _size(folder: Path, files: Files) -> int:
    if not files.exists(folder):
        return 0
    found = [files.stat(offset_file(folder, base, LOG)) for base in segment_bases(folder, files)]
    return sum(each.size for each in found if each is not None)
