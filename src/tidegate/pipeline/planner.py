"""Plan the next round as a value: offset ranges, watermarks, losses, stopped partitions, and how many records to read.

P1  a range starts where the last commit ended and ends at the log end offset, within round size and backlog limit.
P2  a round is planned if there is something to read, a tick is due, the input ends, or a partition has to be stopped;
    else `Rest`: until when, and what is left. `Rest` with records left is never "caught up".
P3  a co-partitioned task takes part if its source has records or its tick is due; those of a re-keyed flow together.
P4  an ordered flow (`FlowFacts.is_ordered`) waits for every partition that is not silent. If it holds back more than a
    round reads, only partitions without held-back records are read, so these do not grow. At the end of a run with
    targets, partitions that reached theirs are not waited for, unless silence never counts.
P5  missing offsets stop the partition (`on_loss="stop"`), with the command that resumes it, or become a `Loss`.
P6  offsets belong to one topic: a partition stops if its topic was deleted and created again.
W1  a partition with records to read is never silent, also if this run ends before them.
W2  a partition is silent if this process saw no record of it for `idle_after_ms` of monotonic time.
W3  a stopped partition holds the watermark back, because its records are missing; progress names it.
W4  if all partitions are silent the greatest stream time counts; with `idle_close_ms` it then follows the clock.
W5  a co-partitioned flow needs ticks only to close windows by the clock (`idle_close_ms`), until none is open.

A re-keyed flow's watermark is the least stream time of its partitions that are not silent; it is recorded in the plan
and never decreases. The first round is small; later sizes follow the throughput, by a factor of four at most.

Thread rule: pure functions, except for the memory of `Backpressure` and `RoundSizes` (one coordinator thread).
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from tidegate.pipeline.backpressure import Backpressure, Source
from tidegate.pipeline.checkpoint import (
    VERSION,
    CommitRecord,
    Halt,
    Loss,
    PlanRecord,
    Range,
    SourceLine,
    TaskLine,
)
from tidegate.pipeline.flow import FlowFacts
from tidegate.pipeline.log_end_offsets import Head
from tidegate.pipeline.messages import Held, Stop, Tick, resume_command
from tidegate.pipeline.settings import OnLoss

# -- sizing ---------------------------------------------------------------------------------------

STEP: Final = 4
LEAST: Final = 1000
MOST: Final = 32_000_000
FIRST_BYTES: Final = 64 << 20

Name = TypeVar("Name", bound=Hashable)


class RoundSizes:
    """Chooses the number of records of the next round."""

    def __init__(self, *, fixed: int | None, first: int, target_ms: int) -> None:
        self._fixed = fixed
        self._next = fixed or first
        self._target_ms = target_ms

    @property
    def records(self) -> int:
        """The number of records that the next round may read."""
        return self._next

    def begin_with(self, bytes_per_record: float | None) -> None:
        """Reduce the first round where records are large."""
        if self._fixed is None and bytes_per_record:
            self._next = max(1, min(self._next, int(FIRST_BYTES / bytes_per_record)))

    def note(self, records: int, took_ms: int) -> None:
        """Record the duration of a round of so many records."""
        if self._fixed is not None or records == 0:
            return
        # The fixed cost of a round is not measured separately; small rounds therefore look slower than
        # large ones are, and the size grows a step at a time until the target is met.
        wanted = records * self._target_ms // max(1, took_ms)
        if records < self._next and took_ms < self._target_ms:
            return  # there was no more to read: says nothing about larger rounds
        self._next = max(LEAST, min(MOST, self._next * STEP, max(wanted, self._next // STEP)))

    def cut(self) -> bool:
        """Halve the next round after one that was too large; return whether it became smaller."""
        halved = max(1, self._next // 2)
        smaller, self._next = halved < self._next, halved
        self._fixed = None if self._fixed is None else min(self._fixed, halved)
        return smaller


def share_out(wanted: Mapping[Name, int], total: int) -> dict[Name, int]:
    """Share `total` equally among the sources; what one leaves is shared by the others."""
    shares: dict[Name, int] = {}
    left = total
    waiting = sorted(wanted.items(), key=lambda each: each[1])
    for place, (name, most) in enumerate(waiting):
        shares[name] = min(most, max(left, 0) // (len(waiting) - place))
        left -= shares[name]
    return shares


# -- ticks ----------------------------------------------------------------------------------------

NO_TIME = -1
TICK_EVERY_MS = 1000  # for windows closed by the clock


@dataclass(frozen=True, slots=True)
class SilenceClock:
    """The inputs for detecting silence: the time of the round, how long silence has to last, and how long each
    source (flow, partition) has been watched without a record so far."""

    now_ms: int
    idle_after_ms: int | None  # None: silence never counts
    silent_ms: Mapping[tuple[str, int], int]


@dataclass(frozen=True, slots=True)
class Watermark:
    """A re-keyed flow's watermark: the time (-1: none); which partitions hold it back though they have nothing to
    read, and when the first of them will count as silent; all partitions that are not silent (`moving`), and when
    the first of those with nothing to read will be."""

    time: int
    holders: tuple[int, ...]
    changes_at_ms: int | None
    moving: tuple[int, ...] = ()
    silent_at_ms: int | None = None


def watermark_of(
    flow: FlowFacts, lines: Sequence[SourceLine], heads: Mapping[int, Head], watch: SilenceClock, before: int
) -> Watermark:
    """Return the flow's watermark now, not below the one `before`."""
    closes_ms = flow.idle_close_ms
    wait_ms = min((each for each in (watch.idle_after_ms, closes_ms) if each is not None), default=None)
    moving: list[SourceLine] = []
    holders: list[int] = []
    ends_at: list[int] = []
    for line in lines:
        silent_ms = watch.silent_ms.get((line.flow, line.partition), 0)
        if line.stopped is not None:
            moving.append(line)
            holders.append(line.partition)
        elif heads[line.partition].end > line.next_offset or heads[line.partition].goes_on:
            moving.append(line)
        elif wait_ms is None or silent_ms < wait_ms:
            moving.append(line)
            holders.append(line.partition)
            if wait_ms is not None:
                ends_at.append(watch.now_ms + wait_ms - silent_ms)
    silent_at_ms = min(ends_at, default=None)
    newest = max((line.stream_time for line in lines), default=NO_TIME)
    if moving:
        time = min(line.frontier[0] for line in moving)
    else:
        time = newest
        silent_ms = min(watch.silent_ms.get((line.flow, line.partition), 0) for line in lines)
        if closes_ms is not None and newest != NO_TIME and silent_ms >= closes_ms:
            whole_ms = (flow.kept_ms or 0) + closes_ms
            time = newest + min(silent_ms, whole_ms)
            if silent_ms < whole_ms:
                ends_at.append(watch.now_ms + TICK_EVERY_MS)
    if min(time, newest) >= newest:
        holders, ends_at = [], ends_at if not moving else []
    waits = tuple(line.partition for line in moving)
    return Watermark(max(time, before), tuple(holders), min(ends_at, default=None), waits, silent_at_ms)


def tick_due(
    flow: FlowFacts, source: SourceLine, task: TaskLine, head: Head, watch: SilenceClock
) -> tuple[bool, int | None]:
    """Return whether a co-partitioned task needs a round without records now, and if not, when."""
    idle_ms = flow.idle_close_ms
    waits = source.stopped is None and head.end <= source.next_offset and source.stream_time != NO_TIME
    if idle_ms is None or not waits:
        return False, None
    # Operators count silence from the last round with records (W5); the last tick is after all that is kept.
    over_ms = source.seen_ms + idle_ms + (flow.kept_ms or 0)
    if task.ticked_ms >= over_ms:
        return False, None
    first_ms = source.seen_ms + idle_ms
    next_ms = first_ms if task.ticked_ms < first_ms else min(over_ms, task.ticked_ms + TICK_EVERY_MS)
    return (True, None) if watch.now_ms >= next_ms else (False, next_ms)


# -- planning -------------------------------------------------------------------------------------

LOST = "lost"  # stop reason: the next offsets to read are not in the log
RECREATED = "recreated"  # stop reason: the offsets are of a topic that was deleted
NAMED: Final = 3  # how many waited-for partitions are named; of more, only their number
HeadsOf = Mapping[str, Mapping[int, Head]]  # topic → partition


@dataclass(frozen=True)
class Situation:
    """All inputs of a plan."""

    flows: Mapping[str, FlowFacts]
    commit: CommitRecord
    base: bytes
    heads: HeadsOf
    watch: SilenceClock
    generation: int
    size: int
    on_loss: OnLoss = "stop"
    closing: bool = False
    ending: bool = False  # this run ends at the log end offsets
    closes: bool = False  # and then closes the input
    lookups: Mapping[str, int] = field(default_factory=dict)
    topic_ids: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rest:
    """Nothing to do now: until when, what is left to read, and what is waited for."""

    until_ms: int | None
    lag_records: int
    waiting_for: tuple[str, ...] = ()


@dataclass(frozen=True)
class Planned:
    """A plan, and what holds other partitions back."""

    plan: PlanRecord
    waiting_for: tuple[str, ...] = ()


@dataclass
class _Draft:
    """A plan under construction."""

    ranges: dict[Source, Range] = field(default_factory=dict)
    halts: list[Halt] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    ticks: dict[str, Tick] = field(default_factory=dict)
    tasks: set[tuple[str, int]] = field(default_factory=set)
    waiting: list[str] = field(default_factory=list)
    wake_ms: list[int] = field(default_factory=list)


def plan_round(now: Situation, backpressure: Backpressure) -> Planned | Rest:
    """Plan the next round, or rest; `OverloadError` if the app can never continue."""
    draft = _Draft()
    sources = {(line.flow, line.partition): line for line in now.commit.sources if line.flow in now.flows}
    lags = _lags(now, sources, draft)
    lag = _once(now.flows, lags)
    held = held_of(now.flows, now.commit)
    marks = _tick(now, sources, held, draft)
    _order(now, sources, marks, held, draft, is_read=not lag and not draft.halts)
    _admit(now, sources, backpressure, _not_ahead(now, lags, held), marks, held, draft)
    if now.closing and not lag and not draft.halts:
        _close(now, sources, held, draft)
    for (flow, partition), each in draft.ranges.items():
        if each.stop > each.start:
            tasks = _all_tasks(now.flows[flow]) if now.flows[flow].is_rekeyed else {(flow, partition)}
            draft.tasks.update(tasks)
    if not draft.ranges and not draft.tasks and not draft.halts and not draft.losses:
        return Rest(min(draft.wake_ms, default=None), lag, tuple(draft.waiting))
    return Planned(_record(now, draft), tuple(draft.waiting))


def held_of(flows: Container[str], commit: CommitRecord) -> dict[str, Held]:
    """Return what flows hold back for the sake of order, over all tasks; flows that hold nothing back are left out."""
    found: dict[str, Held] = {}
    for line in commit.tasks:
        if line.held is None or line.flow not in flows:
            continue
        have = found.get(line.flow)
        if have is None:
            found[line.flow] = line.held
            continue
        offsets = dict(have.offsets)
        for partition, offset in line.held.offsets.items():
            offsets[partition] = min(offset, offsets.get(partition, offset))
        found[line.flow] = Held(
            have.events + line.held.events,
            min(have.waits_for, line.held.waits_for),
            dict(sorted(offsets.items())),
        )
    return found


def lag_of(flows: Mapping[str, FlowFacts], commit: CommitRecord, heads: HeadsOf) -> int:
    """Count the offsets between the commit and the log end offsets, without stopped partitions.

    Flows that share a topic read the same records, so each partition counts once, with the largest lag.
    """
    lags: dict[tuple[str, int], int] = {}
    for line in commit.sources:
        if line.flow in flows and line.stopped is None:
            end = heads[flows[line.flow].topic][line.partition].end
            lags[line.flow, line.partition] = max(0, end - line.next_offset)
    return _once(flows, lags)


def _once(flows: Mapping[str, FlowFacts], lags: Mapping[tuple[str, int], int]) -> int:
    """Count the records left to flows in their partitions, those of a topic once."""
    left: dict[tuple[str, int], int] = {}
    for (flow, partition), lag in lags.items():
        place = flows[flow].topic, partition
        left[place] = max(lag, left.get(place, 0))
    return sum(left.values())


def lag_seconds_of(
    flows: Mapping[str, FlowFacts], commit: CommitRecord, heads: HeadsOf, now_ms: int
) -> dict[str, float]:
    """Return how far each flow's event time is behind now, for flows with records to read."""
    lags = dict.fromkeys(flows, 0.0)
    for line in commit.sources:
        flow = flows.get(line.flow)
        if flow is None or flow.topic not in heads or line.stopped is not None or line.stream_time < 0:
            continue
        if heads[flow.topic][line.partition].end > line.next_offset:
            lags[line.flow] = max(lags[line.flow], (now_ms - line.stream_time) / 1000)
    return lags


# -- what there is to read -----------------------------------------------------------------------


def _lags(now: Situation, sources: Mapping[Source, SourceLine], draft: _Draft) -> dict[Source, int]:
    """Return the lag of each source; missing offsets become stops or losses here (P5)."""
    lags: dict[Source, int] = {}
    for source, line in sources.items():
        topic = now.flows[line.flow].topic
        head = now.heads[topic][line.partition]
        start = line.next_offset
        if line.stopped is None and _is_another(line, now.topic_ids.get(topic, "")):
            stop = _recreated(now, line, topic, head, now.topic_ids[topic])
            draft.halts.append(Halt(line.flow, line.partition, stop))
            continue
        is_accepted = start < head.start and now.on_loss == "accept"
        if line.stopped is not None and not (is_accepted and line.stopped.reason == LOST):
            continue
        if is_accepted:
            draft.losses.append(Loss(line.flow, line.partition, start, head.start, now.commit.round + 1))
            draft.ranges[source] = Range(line.flow, line.partition, head.start, head.start)
            start = head.start
        elif not head.start <= start <= head.end:
            draft.halts.append(Halt(line.flow, line.partition, _lost(now.commit.app, line, topic, head)))
            continue
        if head.end > start:
            lags[source] = head.end - start
    return lags


def _is_another(line: SourceLine, topic_id: str) -> bool:
    """Whether the name belongs to another topic than the one that was read; unknown ids prove nothing."""
    return bool(line.topic_id and topic_id) and line.topic_id != topic_id


def _recreated(now: Situation, line: SourceLine, topic: str, head: Head, topic_id: str) -> Stop:
    app = now.commit.app
    command = resume_command(app, line.flow, line.partition, head.start)
    message = (
        f"topic {topic} was deleted and created again: flow {line.flow} read partition {line.partition} of the topic "
        f"with id {line.topic_id} up to offset {line.next_offset}, and the topic has id {topic_id} now. Start over "
        f"with `tidegate app reset {app}`, or keep the results so far and read the new topic from its start: "
        f"`{command}`"
    )
    return Stop(RECREATED, message, line.next_offset, command)


def _lost(app: str, line: SourceLine, topic: str, head: Head) -> Stop:
    where, is_gone = f"{topic}-{line.partition}", line.next_offset < head.start
    command = resume_command(app, line.flow, line.partition, head.start if is_gone else head.end)
    if is_gone:
        message = (
            f"offsets {line.next_offset} to {head.start - 1} of {where} were deleted before flow {line.flow} read them "
            f"(retention, or records were deleted); go on without them: `{command}`, or accept such losses with "
            "on_loss='accept'"
        )
    else:
        message = (
            f"{where} ends at offset {head.end}, but flow {line.flow} has read up to {line.next_offset}: the topic was "
            f"made anew or cut. Go on at its end: `{command}`, or read it from its start: `tidegate app reset {app}`"
        )
    return Stop(LOST, message, line.next_offset, command)


def _admit(
    now: Situation,
    sources: Mapping[Source, SourceLine],
    backpressure: Backpressure,
    lags: Mapping[Source, int],
    marks: Mapping[str, Watermark],
    held: Mapping[str, Held],
    draft: _Draft,
) -> None:
    """Admit ranges within the round's size and the backlog limit (A1)."""
    wanted = {source: count for source, count in share_out(lags, max(now.size, len(lags))).items() if count}
    admitted = backpressure.admitted(now.flows, now.commit, wanted)
    if any(admitted.values()):
        backpressure.released()
    elif wanted:
        names = [f"{now.flows[flow].topic}-{partition}" for flow, partition in wanted]
        draft.waiting.append(
            f"the backlog of {', '.join(names[:3])}{' …' if len(names) > 3 else ''} to shrink"
        )
        if draft.tasks:
            return  # a tick can free something: wait for it
        waits = {flow: marks[flow] for flow, _ in wanted if flow in marks and marks[flow].changes_at_ms}
        if waits:  # a partition will count as silent soon, and the watermark advance
            draft.waiting += [
                f"{now.flows[flow].topic}-{number}, which brings nothing, to count as silent"
                for flow, mark in waits.items()
                for number in mark.holders[:3]
            ]
            return
        if not now.ending and all(flow in held and number in held[flow].offsets for flow, number in wanted):
            return  # more records would only wait, too; the partition waited for is already named
        count = backpressure.over_admit(now.flows, now.commit, sorted(wanted), draft.waiting[:-1], held)
        admitted = {source: min(count, lags[source]) for source in wanted}
    for source, count in admitted.items():
        if count:
            begun = draft.ranges.get(source)
            start = sources[source].next_offset if begun is None else begun.stop
            draft.ranges[source] = Range(*source, start, start + count)


# -- what time does ------------------------------------------------------------------------------


def _tick(
    now: Situation, sources: Mapping[Source, SourceLine], held: Container[str], draft: _Draft
) -> dict[str, Watermark]:
    """Add ticks that are due, and return when the next will be."""
    marks: dict[str, Watermark] = {}
    tasks = {(line.flow, line.task): line for line in now.commit.tasks}
    for flow in now.flows.values():
        lines = [sources[flow.name, number] for number in range(flow.partitions)]
        heads = now.heads[flow.topic]
        if not flow.is_rekeyed:
            for line in lines:
                task = tasks.get((flow.name, line.partition), TaskLine(flow.name, line.partition))
                due, next_ms = tick_due(flow, line, task, heads[line.partition], now.watch)
                if due:
                    draft.tasks.add((flow.name, line.partition))
                elif next_ms is not None:
                    draft.wake_ms.append(next_ms)
            continue
        before = now.commit.watermarks.get(flow.name, -1)
        mark = marks[flow.name] = watermark_of(flow, lines, heads, now.watch, before)
        if mark.time >= 0:
            draft.ticks[flow.name] = Tick(now.watch.now_ms, mark.time)
        if mark.time > before and flow.is_stateful:
            draft.tasks |= _all_tasks(flow)
        if mark.changes_at_ms is not None:
            draft.wake_ms.append(mark.changes_at_ms)
        if flow.is_stateful and not now.closing:
            # Held-back events say themselves which partition they wait for.
            is_told = flow.name in held or not flow.has_windows
            holding = [line for line in lines if line.stopped is not None] if is_told else lines
            draft.waiting += _holding(flow, holding, mark, now.watch)
    return marks


def _holding(flow: FlowFacts, lines: Sequence[SourceLine], mark: Watermark, watch: SilenceClock) -> list[str]:
    """Describe the partitions that hold a re-keyed flow's windows open though they have nothing to read."""
    newest = max((line.stream_time for line in lines), default=-1)
    waits = [each for each in (watch.idle_after_ms, flow.idle_close_ms) if each is not None]
    ends = f", or has been silent for {min(waits) / 1000:g} s" if waits else ""
    said = [
        f"{flow.topic}-{line.partition}, which is stopped"
        if line.stopped is not None
        else f"{flow.topic}-{line.partition}, which has no more records: windows of {flow.name} stay open until it "
        f"has{ends}"
        for line in sorted(lines, key=lambda line: (line.stopped is None, line.stream_time))
        if line.partition in mark.holders and (line.stopped is not None or line.stream_time < newest)
    ]
    more = [f"{len(said) - NAMED} more partitions of {flow.topic}"] if len(said) > NAMED else []
    return [*said[:NAMED], *more]


def _order(
    now: Situation,
    sources: Mapping[Source, SourceLine],
    marks: Mapping[str, Watermark],
    held: Mapping[str, Held],
    draft: _Draft,
    *,
    is_read: bool,
) -> None:
    """Decide which partitions ordered flows wait for, and add rounds without records for events that need not wait."""
    for flow in now.flows.values():
        if not flow.is_ordered:
            continue
        waits = marks[flow.name].moving
        if now.closing:
            ends = all(each in now.commit.closed for each in flow.upstream)
        else:
            guesses = now.ending and not now.closes and now.watch.idle_after_ms is not None
            ends = guesses and not held.keys() & flow.upstream
        if ends and is_read:  # of most sources nothing more will be read
            heads = now.heads[flow.topic]
            waits = tuple(
                each
                for each in waits
                if sources[flow.name, each].stopped is not None or (heads[each].goes_on and not now.closing)
            )
        tick = draft.ticks.get(flow.name, Tick(now.watch.now_ms))
        draft.ticks[flow.name] = Tick(tick.now_ms, tick.watermark, tick.closing, waits)
        if flow.name not in held:
            continue
        lines = [sources[flow.name, each] for each in waits]
        least = min(lines, key=lambda line: (line.frontier[0], line.partition), default=None)
        if (
            least is None
            or (least.frontier[0], least.partition, least.frontier[1]) > held[flow.name].waits_for
        ):
            draft.tasks |= _all_tasks(flow)
            continue
        if least.stopped is None and now.heads[flow.topic][least.partition].end > least.next_offset:
            continue  # it advances as it is read
        goes_on = now.heads[flow.topic][least.partition].goes_on
        why = "goes on behind what this run reads" if goes_on else "has no more records"
        why = why if least.stopped is None else "is stopped"
        draft.waiting.append(
            f"{flow.topic}-{least.partition}, which {why}: {held[flow.name].events} records of {flow.name} are held "
            "back until it has come as far as they are"
        )
        silent_at_ms = marks[flow.name].silent_at_ms
        draft.wake_ms += [] if silent_at_ms is None else [silent_at_ms]


def _not_ahead(now: Situation, lags: Mapping[Source, int], held: Mapping[str, Held]) -> dict[Source, int]:
    """Return the sources to read: of a flow that holds back more than a round, those without held-back events (P4)."""
    chosen = dict(lags)
    for flow, each in held.items():
        if each.events <= now.size:
            continue
        own = [source for source in lags if source[0] == flow]
        behind = [source for source in own if source[1] not in each.offsets]
        if behind:
            for source in set(own) - set(behind):
                del chosen[source]
    return chosen


def _close(
    now: Situation, sources: Mapping[Source, SourceLine], held: Mapping[str, Held], draft: _Draft
) -> None:
    """End the input: every task that has all of its input takes part, unless it did before."""
    for flow in now.flows.values():
        stopped = {
            partition for (name, partition), line in sources.items() if name == flow.name and line.stopped
        }
        if flow.name in now.commit.closed or (flow.is_rekeyed and stopped):
            continue
        if flow.name in held:
            continue  # first the events that waited for the end are processed
        if any(each not in now.commit.closed for each in flow.upstream):
            continue  # more records of it will be read first
        tick = draft.ticks.get(flow.name, Tick(now.watch.now_ms))
        # nothing waits any more
        draft.ticks[flow.name] = Tick(now.watch.now_ms, tick.watermark, closing=True)
        draft.tasks |= _all_tasks(flow) - (
            set() if flow.is_rekeyed else {(flow.name, task) for task in stopped}
        )


def _all_tasks(flow: FlowFacts) -> set[tuple[str, int]]:
    return {(flow.name, task) for task in range(flow.tasks)}


def _record(now: Situation, draft: _Draft) -> PlanRecord:
    return PlanRecord(
        version=VERSION,
        app=now.commit.app,
        round=now.commit.round + 1,
        generation=now.generation,
        base=now.base,
        definition=now.commit.definition,
        tick=Tick(now.watch.now_ms),
        ranges=tuple(draft.ranges[source] for source in sorted(draft.ranges)),
        tasks=tuple(sorted(draft.tasks)),
        ticks=draft.ticks,
        losses=tuple(draft.losses),
        halts=tuple(draft.halts),
        lookups=dict(now.lookups),
        topic_ids={topic: found for topic, found in now.topic_ids.items() if found},
    )
