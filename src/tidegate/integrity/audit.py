"""Audit a topic, a log folder or a topic of a Kafka cluster: in one pass, in several processes, or on Spark.

Owns the choice of partitions, how they are cut, and the order of steps; `partition_audit` reads, a `Runner` provides
the workers. Both ways give the same `FullReport`, down to the last finding (P1 of `partition_audit`).

    audit(where, log=…)                         one pass, in this process
    audit(where, log=…, runner=Processes(4))    the same in ranges

Files are opened by path: workers must see the same folder at the same place. A broker returns records and offset
bounds, but not its files; the report of a cluster's topic says what was not checked (`NOT_SHOWN`). Offsets of
transaction markers and of compacted records are not returned, so a skipped offset proves nothing there.

Thread rule: one thread; a runner's workers are its own business.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from tidegate.clock import SystemClock
from tidegate.errors import InvalidError, UnavailableError
from tidegate.files import Files
from tidegate.integrity.digests import ReadOrder, TopicAt, cut
from tidegate.integrity.partition_audit import (
    JudgingTap,
    MetadataPlan,
    PartitionPlan,
    RangeOutcome,
    RangeTask,
    ReadAgain,
    SummingTap,
    audit_range,
    fold,
    fold_metadata,
    judged_through_reader,
    plan_metadata,
    rules_of,
    tolerance_by_settings,
)
from tidegate.integrity.report import AuditReport, PartitionAudit, add_findings, segments_of
from tidegate.integrity.state import PartitionState
from tidegate.log.catalog import TopicPartition
from tidegate.log.format.partition_files import LOG, offset_file
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import open_log
from tidegate.log.verify.ranges import RangeOrder, cut_evenly
from tidegate.log.verify.scan import Compaction, PartitionTarget, find_partitions
from tidegate.log.verify.verify import Audit, PartitionReport, Progress, Report, segment_bases

# -- folders and topics ----------------------------------------------------------------------------

SMALLEST_RANGE: Final = 8 << 20
LARGEST_RANGE: Final = 512 << 20
RANGES_FOR_EACH: Final = 8  # so that one slow range does not keep the others waiting
LAST: Final = 2**63 - 1
Item = TypeVar("Item")
Result = TypeVar("Result")


class Runner(Protocol):
    """Runs functions in other processes; functions and items must be picklable."""

    workers: int

    def run(self, work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Yield the results as they are ready, in any order; raises a worker's error."""
        ...


def run_ranges(
    runner: Runner | None, work: Callable[[Item], Result], items: Sequence[Item]
) -> Iterable[Result]:
    """The results of all items, by the runner or, without one, here."""
    return map(work, items) if runner is None else runner.run(work, items)


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
    """How partitions are cut: by size for a number of workers, or (`cuts`) at given bytes per log segment file."""

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

    A `report` argument is filled partition by partition, so that an interrupted audit leaves partial results.
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
    """One partition, each record read once unless the files are damaged (P2 of `partition_audit`)."""
    partition = PartitionReport(target)
    report.native.partitions.append(partition)
    audit: PartitionAudit | None = None
    tap: JudgingTap | None = None
    if deep:
        audit, metadata = plan_metadata(target, now_ms)
        if metadata is not None:
            tap = JudgingTap(metadata, audit)
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
        if audit.total.records:
            names = files.list(partition.target.folder)
            add_findings(audit, segments_of(partition.target.folder, names), partition.findings)


# -- in ranges -------------------------------------------------------------------------------------


def _plans(
    targets: Sequence[PartitionTarget], cutting: Cutting, files: Files, deep: bool, now_ms: int
) -> list[PartitionPlan]:
    total = sum(_size(target.folder, files) for target in targets)
    wanted = math.ceil(total / max(1, cutting.workers * RANGES_FOR_EACH))
    chunk = min(max(wanted, cutting.smallest), LARGEST_RANGE)
    return [
        _plan(number, target, chunk, cutting, files, deep, now_ms) for number, target in enumerate(targets)
    ]


def _plan(
    number: int,
    target: PartitionTarget,
    chunk: int,
    cutting: Cutting,
    files: Files,
    deep: bool,
    now_ms: int,
) -> PartitionPlan:
    """Plan the ranges of one partition, about `chunk` bytes each; a compacted one is read as a whole."""
    audit, metadata = plan_metadata(target, now_ms) if deep else (None, None)
    whole = target.compaction is Compaction.YES and cutting.cuts is None
    groups: list[tuple[list[RangeOrder], int]] = [([], 0)]
    for order, size in _orders(target, chunk, cutting, files, deep=deep, whole=whole):
        group, held = groups[-1]
        if group and not whole and (cutting.cuts is not None or held + size > chunk):
            groups.append(([order], size))
        else:
            groups[-1] = [*group, order], held + size
    tasks = tuple(
        RangeTask((number, at), tuple(group), size, metadata)
        for at, (group, size) in enumerate(groups)
        if group
    )
    return PartitionPlan(target, deep, audit, metadata, tasks)


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
                bases[at + 1] if at + 1 < len(bases) else LAST,
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
    # Longest first, so that all workers end together: first ranges are validated, which takes longer than a summary.
    tasks.sort(key=lambda task: (task.place[1] > 0, -task.size_bytes))
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


# -- topics of a cluster ---------------------------------------------------------------------------

NOT_SHOWN: Final = (
    "a broker does not show its files: segments, indexes, snapshots, seals, and producers' native sequences were not "
    "checked (run verify where the broker's data is); CRCs were checked by the client"
)
SMALLEST_BROKER_RANGE: Final = 200_000


@dataclass(frozen=True, slots=True)
class BrokerTask:
    """A range of one partition; picklable."""

    place: tuple[int, int]
    order: ReadOrder
    metadata: MetadataPlan

    def read(self, tap: JudgingTap | SummingTap) -> int:
        """Read the range into `tap`; returns the number of records."""
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
    smallest: int = SMALLEST_BROKER_RANGE,
    progress: Progress | None = None,
    report: FullReport | None = None,
) -> FullReport:
    """Audit a topic of the cluster at `url`; without a `runner` in one pass here."""
    report = report if report is not None else FullReport()
    report.metadata = report.metadata or AuditReport()
    report.native.not_shown = NOT_SHOWN
    plans = _broker_plans(TopicAt(url, topic, client or {}), now_ms, runner, smallest)
    found: dict[tuple[int, int], RangeOutcome] = {}
    ranges = [each for _, plan in plans for each in plan]
    for outcome in run_ranges(runner, audit_broker_range, ranges):
        found[outcome.place] = outcome
        if progress is not None:
            progress(0, outcome.records, outcome.faults)
    for target, plan in plans:
        partition = PartitionReport(target)
        audit = _fold_broker_ranges(plan, [found[each.place] for each in plan])
        partition.records = audit.total.records
        partition.first_offset, partition.next_offset = target.log_start, target.acknowledged
        report.native.partitions.append(partition)
        report.metadata.partitions.append(audit)
        add_findings(audit, segments_of(target.folder, ()), partition.findings)
    return report


def audit_broker_partition(
    log: KafkaLog,
    audit: PartitionAudit,
    *,
    now_ms: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Validate one partition of an open cluster in one pass, filling `audit` on the way."""
    number = audit.partition
    first, end = log.bounds(audit.topic, [number])[number]
    tolerance, audit.compaction = tolerance_by_settings(log.describe(audit.topic).config)
    audit.log_start = first
    tap = JudgingTap(MetadataPlan(audit, rules_of(audit, tolerance), now_ms, first, end), audit)
    with log.reader(
        audit.topic, [number], start={number: first}, stop={number: end}, control_records=True
    ) as reader:
        for batch in reader:
            before = audit.total.faults
            tap.take(batch)
            if progress is not None:
                progress(batch.num_rows, audit.total.faults - before)
    tap.finish()


def audit_broker_range(task: BrokerTask) -> RangeOutcome:
    """Read and summarise, or validate, a range."""
    outcome = RangeOutcome(task.place)
    if task.place[1] == 0:
        tap = JudgingTap(task.metadata, deepcopy(task.metadata.audit))
        outcome.records = task.read(tap)
        outcome.judged, outcome.faults = (tap.audit, tap.state), tap.audit.total.faults
        return outcome
    summing = SummingTap(task.metadata)
    outcome.records = task.read(summing)
    outcome.summary = summing.summary
    return outcome


def _broker_plans(
    source: TopicAt, now_ms: int, runner: Runner | None, smallest: int
) -> list[tuple[PartitionTarget, list[BrokerTask]]]:
    with open_log(source.url, client=source.client) as log:
        config = log.describe(source.topic).config
    compaction = Compaction.YES if config.compacts else Compaction.NO
    policy = f"the topic's cleanup.policy={','.join(sorted(config.cleanup_policy))}"
    tolerance, why = tolerance_by_settings(config)
    extents = source.extents()
    pieces = 1 if runner is None or config.compacts else runner.workers * RANGES_FOR_EACH
    orders = cut(source, extents, pieces, smallest=smallest if pieces > 1 else LAST)
    plans = []
    for at, (number, (first, end)) in enumerate(extents.items()):
        place = TopicPartition(source.topic, number)
        folder = Path(f"{source.topic}-{number}")
        audit = PartitionAudit(source.topic, number, compaction=why, log_start=first)
        metadata = MetadataPlan(audit, rules_of(audit, tolerance), now_ms, first, end)
        mine = [order for order in orders if order.partition == number]
        plans.append(
            (
                PartitionTarget(folder, place, compaction, policy, first, end),
                [BrokerTask((at, order.number), order, metadata) for order in mine],
            )
        )
    return plans


def _fold_broker_ranges(plan: Sequence[BrokerTask], outcomes: Sequence[RangeOutcome]) -> PartitionAudit:
    def read(number: int, audit: PartitionAudit, state: PartitionState) -> PartitionState:
        tap = JudgingTap(plan[number].metadata, audit, state)
        plan[number].read(tap)
        return tap.state

    return fold_metadata(plan[0].metadata, outcomes, read)


# -- processes -------------------------------------------------------------------------------------


class Processes:
    """A `Runner` with a fixed number of worker processes, which end with `close`."""

    def __init__(self, workers: int) -> None:
        if not 1 <= workers <= 1024:
            raise InvalidError(f"{workers} processes: choose 1 to 1024")
        self.workers = workers
        # a fresh interpreter each: a fork would copy locks that threads of this one may hold
        self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Yield the results as they are ready."""
        futures = [self._pool.submit(work, item) for item in items]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise UnavailableError(
                "a process of the audit died, most likely for want of memory; take fewer with --jobs"
            ) from error
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """Wait for running items and start no further ones."""
        self._pool.shutdown(cancel_futures=True)
