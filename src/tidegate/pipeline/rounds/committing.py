"""A round's results as the commit that makes them real: lines carried over or replaced, bases given, totals added.

C1  a line that the round did not touch is the last commit's, byte for byte.
C2  every section of every parcel gets the offset it goes to: the end of all that was committed for its partition
    before, in order of flow, task and section; where nothing was, the end of the log as it is.
C3  totals are sums over commits, so a round that was repeated counts once.

Thread rule: pure functions, but for asking where a topic ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from tidegate.errors import InternalError
from tidegate.pipeline.rounds.facts import FlowFacts
from tidegate.pipeline.rounds.orders import (
    Delivery,
    RoundOrder,
    RoundResult,
    SourceResult,
    TaskResult,
)
from tidegate.pipeline.rounds.records import (
    VERSION,
    CommitRecord,
    Limits,
    Loss,
    PlanRecord,
    SourceLine,
    TaskLine,
)

KEPT_LOSSES: Final = 1000  # of an app; older ones are summed up
LATEST: Final = 2**63 - 1
EndOf = Callable[[str, int], int]


def commit_of(
    plan: PlanRecord,
    plan_digest: bytes,
    before: CommitRecord,
    result: RoundResult,
    flows: Mapping[str, FlowFacts],
    *,
    states: Mapping[tuple[str, int], tuple[bytes, str]],
    end_of: EndOf,
    generation: int,
    now_ms: int,
    limits: Limits | None = None,
) -> CommitRecord:
    """The commit of a round. `states` are the sources' new states: bytes, or digest and name of what lies apart."""
    tasks = _tasks(plan, before, result.tasks)
    sources = _still_skipped(_sources(plan, before, result.sources, states, flows), tasks)
    deliveries, ends = _deliveries(plan.round, before, result.tasks, end_of)
    read = {each.flow for each in result.sources if each.records or each.next_offset > _start(plan, each)}
    closing = {name for name, tick in plan.ticks.items() if tick.closing}
    return CommitRecord(
        version=VERSION,
        app=plan.app,
        round=plan.round,
        generation=generation,
        base=plan.base,
        plan=plan_digest,
        definition=before.definition,
        life=before.life,
        tick=plan.tick,
        committed_ms=now_ms,
        sources=sources,
        tasks=tasks,
        deliveries=deliveries,
        ends=ends,
        totals=_totals(before, result),
        watermarks=_watermarks(plan, before, flows, result.sources),
        losses=_losses((*before.losses, *plan.losses)),
        closed=tuple(sorted((set(before.closed) - read) | closing)),
        limits=limits,
    )


def void_of(
    plan: PlanRecord, plan_digest: bytes, before: CommitRecord, *, generation: int, now_ms: int
) -> CommitRecord:
    """The commit of a round that could not be done as planned and is given up: nothing but its number changes."""
    return CommitRecord(
        version=VERSION,
        app=before.app,
        round=plan.round,
        generation=generation,
        base=plan.base,
        plan=plan_digest,
        definition=before.definition,
        life=before.life,
        tick=before.tick,
        committed_ms=now_ms,
        sources=before.sources,
        tasks=before.tasks,
        deliveries=before.deliveries,
        ends=before.ends,
        totals=before.totals,
        watermarks=before.watermarks,
        losses=before.losses,
        closed=before.closed,
        change="given up, to be planned anew",
        limits=before.limits,
    )


def require_whole(order: RoundOrder, result: RoundResult) -> None:
    """An engine that leaves something out, or does something twice, is not believed."""
    ordered = [(each.flow, each.partition) for each in order.sources]
    wanted = [(each.flow, each.task) for each in order.tasks]
    came = [(each.flow, each.partition) for each in result.sources]
    tasks = [(each.flow, each.task) for each in result.tasks]
    if sorted(came) != sorted(ordered) or sorted(tasks) != sorted(wanted):
        raise InternalError(
            f"round {order.round}: {len(ordered)} sources and {len(wanted)} tasks were ordered, {len(came)} and "
            f"{len(tasks)} came back; nothing was committed, start the app again"
        )


def _sources(
    plan: PlanRecord,
    before: CommitRecord,
    results: Iterable[SourceResult],
    states: Mapping[tuple[str, int], tuple[bytes, str]],
    flows: Mapping[str, FlowFacts],
) -> tuple[SourceLine, ...]:
    lines = {(line.flow, line.partition): line for line in before.sources}
    for loss in plan.losses:
        line = lines[loss.flow, loss.partition]
        lines[loss.flow, loss.partition] = _replaced(line, next_offset=loss.end, stopped=None)
    for result in results:
        source = (result.flow, result.partition)
        line = lines[source]
        state, apart = states[source]
        lines[source] = SourceLine(
            result.flow,
            result.partition,
            result.next_offset,
            state,
            apart,
            max(result.stream_time, line.stream_time),
            plan.tick.now_ms if result.records else line.seen_ms,
            result.stopped,
            plan.topic_ids.get(flows[result.flow].topic, line.topic_id),
            line.skipped,
        )
    for halt in plan.halts:
        line = lines[halt.flow, halt.partition]
        lines[halt.flow, halt.partition] = _replaced(line, stopped=halt.stop)
    return tuple(lines[source] for source in sorted(lines))


def _still_skipped(sources: Iterable[SourceLine], tasks: Iterable[TaskLine]) -> tuple[SourceLine, ...]:
    """The sources, without skipped offsets that no task holds back any more."""
    least: dict[tuple[str, int], int] = {}
    for task in tasks:
        for partition, offset in ({} if task.held is None else task.held.offsets).items():
            place = task.flow, partition
            least[place] = min(offset, least.get(place, offset))
    lines = []
    for line in sources:
        first = least.get((line.flow, line.partition), LATEST)
        skipped = tuple(each for each in line.skipped if each[1] > first)
        lines.append(line if skipped == line.skipped else _replaced(line, skipped=skipped))
    return tuple(lines)


def _replaced(line: SourceLine, **changes: object) -> SourceLine:
    fields = {name: getattr(line, name) for name in line.__struct_fields__}
    return SourceLine(**{**fields, **changes})


def _tasks(plan: PlanRecord, before: CommitRecord, results: Iterable[TaskResult]) -> tuple[TaskLine, ...]:
    lines = {(line.flow, line.task): line for line in before.tasks}
    for each in results:
        lines[each.flow, each.task] = TaskLine(
            each.flow,
            each.task,
            each.token,
            each.stream_time,
            each.backlog_bytes,
            each.memory_bytes,
            plan.tick.now_ms,
            each.held,
        )
    return tuple(lines[task] for task in sorted(lines))


def _deliveries(
    round: int, before: CommitRecord, results: Iterable[TaskResult], end_of: EndOf
) -> tuple[tuple[Delivery, ...], dict[str, dict[int, int]]]:
    ends = {topic: dict(partitions) for topic, partitions in before.ends.items()}
    deliveries = []
    for each in sorted(results, key=lambda result: (result.flow, result.task)):
        if each.parcel is None or not each.parcel.sections:
            continue
        bases = []
        for section in each.parcel.sections:
            known = ends.setdefault(section.topic, {})
            if section.partition not in known:
                known[section.partition] = end_of(section.topic, section.partition)
            bases.append(known[section.partition])
            known[section.partition] += section.records
        deliveries.append(Delivery(round, each.parcel, tuple(bases), each.flow, each.task))
    return tuple(deliveries), ends


def _totals(before: CommitRecord, result: RoundResult) -> dict[str, dict[str, int]]:
    totals = {flow: dict(counters) for flow, counters in before.totals.items()}
    for source in result.sources:
        flow = totals.setdefault(source.flow, {})
        _add(flow, "records", source.records)
        _add(flow, "bytes", source.size)
        for name, count in source.counters.items():
            _add(flow, name, count)
        for name, count in source.verdicts.items():
            _add(flow, f"verdict.{name}", count)
    for task in result.tasks:
        flow = totals.setdefault(task.flow, {})
        _add(flow, "rows_sent", task.rows_sent)
        for name, count in task.counters.items():
            if name != "delivered":  # of the round before, and only when a task did it
                _add(flow, name, count)
    return {flow: dict(sorted(counters.items())) for flow, counters in sorted(totals.items())}


def _add(counters: dict[str, int], name: str, count: int) -> None:
    if count or name in counters:
        counters[name] = counters.get(name, 0) + count


def _watermarks(
    plan: PlanRecord, before: CommitRecord, flows: Mapping[str, FlowFacts], results: Iterable[SourceResult]
) -> dict[str, int]:
    marks = dict(before.watermarks)
    limits: dict[str, int] = {}
    for result in results:  # events that are held back from a stop on must not come late when it is resumed
        if result.stopped is not None and result.stopped.stream_time is not None:
            limits[result.flow] = min(result.stopped.stream_time, limits.get(result.flow, LATEST))
    for name, tick in plan.ticks.items():
        if tick.watermark is not None and name in flows:
            marks[name] = max(marks.get(name, -1), min(tick.watermark, limits.get(name, LATEST)))
    return dict(sorted(marks.items()))


def _losses(losses: tuple[Loss, ...]) -> tuple[Loss, ...]:
    """All losses; the oldest of a very long list are summed up by partition, so that none is forgotten."""
    if len(losses) <= KEPT_LOSSES:
        return losses
    old, recent = losses[: -KEPT_LOSSES // 2], losses[-KEPT_LOSSES // 2 :]
    merged: dict[tuple[str, int], Loss] = {}
    for loss in old:
        have = merged.get((loss.flow, loss.partition))
        merged[loss.flow, loss.partition] = (
            loss
            if have is None
            else Loss(
                loss.flow, loss.partition, min(have.first, loss.first), max(have.end, loss.end), loss.round
            )
        )
    return (*merged.values(), *recent)


def _start(plan: PlanRecord, result: SourceResult) -> int:
    return next(
        (
            each.start
            for each in plan.ranges
            if (each.flow, each.partition) == (result.flow, result.partition)
        ),
        result.next_offset,
    )
