"""The coordinator runs one round after another: plan → execute → commit → deliver → collect.

It keeps nothing but copies of the newest commit, so one that dies is replaced by one that reads that commit.

M1  no task starts before its plan is durable; a round is repeated from its plan unchanged.
M2  a round starts from the commit before it, read by number.
M3  nothing is delivered that no commit names; a commit counts if it was created and the lease was still held after.
M4  a round that took longer than half the grace of collection is abandoned, not committed (`gc`, G3).
M5  a plan that exceeds the workers' limits, or reads a commit of a lookup table that is gone, is abandoned by a commit
    that changes only the round number; the next plan is smaller. After `MOST_GIVEN_UP` in a row the run fails.
M6  if a task finds records that fail in a step behind state, the round is repeated from the same plan with each such
    record set aside where it is read, or its partition stopped in front of it. A held-back record of an earlier round
    is set aside by its source and skipped by its task; or its partition stops, and later events stay held back.
E1  `Engine.run` returns one result for every source and every task of the order, in any order. An engine may run an
    order twice and lose its memory between rounds; a `TidegateError` of a task is raised as the same class.
E3  in a co-partitioned flow the events of source i go to task i; in a re-keyed flow they go to the task that owns the
    key, in offset order for each source.
D1  commit N+1 exists only if all parcels of commit N are in the log. A task delivers its own parcel at the start of
    the next round; the coordinator does where several tasks write one partition, in the order of base offsets.

Thread rule: one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import msgspec

from tidegate.clock import Clock
from tidegate.errors import (
    CorruptError,
    FencedError,
    InternalError,
    OverloadError,
    TidegateError,
    UnavailableError,
)
from tidegate.metrics import Metrics
from tidegate.pipeline.backpressure import OVER_ADMITTED, Backpressure
from tidegate.pipeline.checkpoint import CommitRecord, Limits, PlanRecord, commit_of, require_whole, void_of
from tidegate.pipeline.gc import Collector
from tidegate.pipeline.log_end_offsets import Head
from tidegate.pipeline.lookup import TableCommits
from tidegate.pipeline.messages import (
    BadRecord,
    Delivery,
    RoundOrder,
    RoundResult,
    SourceOrder,
    TaskOrder,
)
from tidegate.pipeline.planner import (
    Rest,
    RoundSizes,
    SilenceClock,
    Situation,
    lag_of,
    lag_seconds_of,
    plan_round,
)
from tidegate.pipeline.progress import RoundMetrics
from tidegate.pipeline.recovery import Opened, partitions_added
from tidegate.pipeline.settings import RunSettings
from tidegate.randomness import Randomness


class Engine(Protocol):
    """Executes the work of rounds.

    `name` is `local` or `spark`, `slots` the number of tasks that run at the same time. `processes` hold state, each
    with the budgets of the app's storage config.
    """

    name: str
    slots: int
    processes: int

    def place(self, flow: str, task: int) -> int:
        """Return which process keeps the state of a task; 0 ≤ place < `processes`."""
        ...

    def run(self, order: RoundOrder) -> RoundResult:
        """Execute one round and return its results."""
        ...

    def cancel(self) -> None:
        """Cancel the work in progress, from any thread, if possible; its round does not count."""
        ...

    def close(self) -> None:
        """Release the workers; committed state is in tokens."""
        ...


# -- delivering -----------------------------------------------------------------------------------

Task = tuple[str, int]


def split_deliveries(
    deliveries: Sequence[Delivery], tasks: Collection[Task]
) -> tuple[dict[Task, tuple[Delivery, ...]], tuple[Delivery, ...]]:
    """Split deliveries into those for tasks of the next round, by task, and those the coordinator delivers before
    it."""
    if _share_a_partition(deliveries):
        return {}, in_order(deliveries)
    handed: dict[Task, tuple[Delivery, ...]] = {}
    own: list[Delivery] = []
    for each in deliveries:
        task = (each.flow, each.task)
        if task in tasks:
            handed[task] = (*handed.get(task, ()), each)
        else:
            own.append(each)
    return handed, tuple(own)


def in_order(deliveries: Sequence[Delivery]) -> tuple[Delivery, ...]:
    """Sort by round, flow and task: the order in which base offsets were assigned."""
    return tuple(sorted(deliveries, key=lambda each: (each.round, each.flow, each.task)))


def _share_a_partition(deliveries: Sequence[Delivery]) -> bool:
    fed: dict[tuple[str, int], Task] = {}
    for each in deliveries:
        for section in each.parcel.sections:
            task = (each.flow, each.task)
            if fed.setdefault((section.topic, section.partition), task) != task:
                return True
    return False


RETRY_MS: Final = 200
MOST_GIVEN_UP: Final = 20
Deliver = Callable[[Sequence[Delivery]], None]
Targets = Mapping[tuple[str, int], int]  # topic, partition → the offset to read up to
BACKLOG_REASONS: Final = frozenset({"backlog_full", "retention_exceeds_backlog"})


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step: a round, or rest. `lag_records` is what was left in the log (up to the targets)."""

    kind: Literal["round", "given up", "rest"]
    lag_records: int
    rest_until_ms: int | None = None
    waiting_for: tuple[str, ...] = ()
    records: int = 0
    took_ms: int = 0
    timings_ms: Mapping[str, float] | None = None
    delivered: bool = False  # something was just delivered to the log, perhaps for another flow to read


class Coordinator:
    """Runs an opened app on an engine, step by step."""

    def __init__(
        self,
        opened: Opened,
        engine: Engine,
        deliver: Deliver,
        *,
        clock: Clock,
        randomness: Randomness,
        metrics: Metrics,
        settings: RunSettings,
        tables: TableCommits | None = None,
    ) -> None:
        """`tables` None: no flow looks anything up."""
        self.flows = opened.flows
        self.commit, self._digest = opened.commit, opened.digest
        self.heads: dict[str, dict[int, Head]] = {}
        self._topic_ids: dict[str, str] = {}
        self._opened = opened
        self._records = opened.records
        self.generation = opened.generation
        self._engine = engine
        self._deliver = deliver
        self._clock = clock
        self._randomness = randomness
        self._settings = settings
        self._tables = tables
        storage = opened.setup.storage
        self._backpressure = Backpressure(storage.backlog_limit_bytes, engine.place)
        self._limits = Limits(
            storage.backlog_limit_bytes * engine.processes, storage.worker_total_bytes * engine.processes
        )
        self._sizes = RoundSizes(
            fixed=settings.round_records, first=settings.first_round_records, target_ms=settings.target_ms
        )
        self.collector = Collector(
            opened.records, clock=clock, grace_ms=settings.grace_ms, every_ms=settings.collect_every_ms
        )
        self._metrics = RoundMetrics(metrics, opened.setup.app, opened.flows)
        self._topics = {flow.topic: flow.partitions for flow in opened.flows.values()}
        self._seen_ms: dict[tuple[str, int], int] = {}  # when a source last had records, in monotonic time
        self._delivered = False  # whether the newest commit's parcels are known to be in the log
        self._given_up = 0  # rounds in a row
        self.tries_again = True  # rounds that fail because something is unavailable; set from any thread
        self._is_first = True  # whether an earlier coordinator may have left a plan
        sizes = [opened.heads.bytes_per_record(topic, count) for topic, count in self._topics.items()]
        self._sizes.begin_with(max((size for size in sizes if size is not None), default=None))

    @property
    def lookup_lags(self) -> dict[str, int]:
        """For each lookup table, how many records of its topic it has not read yet."""
        return {} if self._tables is None else dict(self._tables.lags)

    # -- a step ----------------------------------------------------------------------------------

    def step(self, *, targets: Targets | None = None, closing: bool = False) -> StepOutcome:
        """Do one round, or rest if there is nothing to do; read no further than the targets.

        With targets the run ends there: events that wait only for later records are not held back any more
        (`planner`, P4).
        """
        try:
            return self._step(targets, closing)
        except FencedError:
            raise
        except TidegateError:
            # A fenced coordinator may find objects rightly removed: report the fencing then.
            self.generation.check()
            raise

    def _step(self, targets: Targets | None, closing: bool) -> StepOutcome:
        self.generation.keep()
        self._look(targets)
        found = self._records.load_plan(self.commit.round + 1) if self._is_first else None
        waiting: tuple[str, ...] = ()
        if found is None:
            planned = plan_round(self._situation(closing, ending=targets is not None), self._backpressure)
            if isinstance(planned, Rest):
                delivered = self.deliver_outstanding()
                self._tell()
                self.collector.step()
                return StepOutcome(
                    "rest", planned.lag_records, planned.until_ms, planned.waiting_for, delivered=delivered
                )
            waiting = planned.waiting_for
            found = self._records.put_plan(planned.plan)
        plan, digest = found
        if plan.base != self._digest:
            raise CorruptError(
                f"app {plan.app}: the plan of round {plan.round} builds on another commit {plan.round - 1} than the "
                "one that is there: records of two copies were mixed. Restore all of them from one copy, or start over "
                f"with `tidegate app reset {plan.app}`",
                kafka_name=None,
            )
        if self._is_first and self._tables is not None and not self._tables.are_kept(plan.lookups):
            gone = ", ".join(f"commit {number} of {table}" for table, number in plan.lookups.items())
            return self._give_up(
                plan, digest, f"it looks things up in {gone}, and not all of that is kept any more"
            )
        return self._round(plan, digest, waiting)

    def _round(self, plan: PlanRecord, digest: bytes, waiting: tuple[str, ...]) -> StepOutcome:
        self._is_first = True  # until it is committed, a stored plan exists
        started_ms = self._clock.monotonic_ms()
        order = self._ordered(plan)
        try:
            order, result = self._attempt(order)
        except OverloadError as error:
            if error.reason not in BACKLOG_REASONS:
                raise
            return self._give_up(plan, digest, str(error), error)
        took_ms = self._clock.monotonic_ms() - started_ms
        if 2 * took_ms > self._settings.grace_ms:
            why = (
                f"it took {took_ms / 1000:.1f} s, and rounds that take longer than half of grace_ms "
                f"({self._settings.grace_ms}) do not count; raise grace_ms, or give the workers more cores"
            )
            return self._give_up(plan, digest, why)
        require_whole(order, result)
        topic_ids = self._ids()
        if any(topic_ids.get(topic) != known for topic, known in plan.topic_ids.items()):
            # The next plan stops the partitions that read it.
            return self._give_up(
                plan, digest, "a topic that it reads was deleted and created again meanwhile"
            )
        self.generation.keep()  # a round that took long may have been fenced
        before = self.commit
        self._take(self._committed(plan, digest, result))
        self._delivered = not self.commit.deliveries
        self._given_up = 0
        records = {
            name: sum(each.records for each in result.sources if each.flow == name) for name in self.flows
        }
        self._backpressure.note(before, self.commit, records)
        self._sizes.note(sum(records.values()), took_ms)
        now_ms = self._clock.monotonic_ms()
        self._seen_ms |= {(each.flow, each.partition): now_ms for each in result.sources if each.records}
        self.collector.superseded(before, self.commit)
        self._metrics.round(result, self.commit, took_ms)
        self._tell()
        self.collector.step()
        lag = lag_of(self.flows, self.commit, self.heads)
        timings: Counter[str] = Counter()
        for task in result.tasks:
            timings.update(task.timings_ms)
        return StepOutcome("round", lag, None, waiting, sum(records.values()), took_ms, dict(timings))

    def deliver_outstanding(self) -> bool:
        """Deliver the newest commit's parcels unless they are known to be in the log; return whether it did."""
        if self._delivered:
            return False
        if self.commit.deliveries:
            self._deliver(in_order(self.commit.deliveries))
        self._delivered = True
        return bool(self.commit.deliveries)

    def ends_now(self) -> dict[tuple[str, int], int]:
        """Return the current log end offsets of the sources, as targets for catching up.

        Topics that flows of this app write have no targets: records written to them until the others have caught up
        belong to the run.
        """
        topics = {flow.topic: flow.partitions for flow in self.flows.values() if not flow.upstream}
        return self._opened.heads.ends(topics)

    # -- planning --------------------------------------------------------------------------------

    def _look(self, targets: Targets | None) -> None:
        self._topic_ids = self._ids()
        heads = self._opened.heads.look(self._topics)
        if targets is not None:
            positions = self._least_positions()
            for (topic, number), end in targets.items():
                head = heads[topic][number]
                # A target below the position has no effect: the app may already be past it.
                limit = max(end, positions.get((topic, number), 0))
                heads[topic][number] = Head(head.start, min(head.end, limit), head.end > limit)
        self.heads = heads

    def _ids(self) -> dict[str, str]:
        """Return the ids of the topics that are read. If a topic has more partitions now, the run ends: their
        records would not be read, and where keys decide the partition, the state of their keys would be in another
        task."""
        found = self._opened.heads.states(self._topics)
        for topic, state in found.items():
            if state.partitions > self._topics[topic]:
                raise partitions_added(self._opened.setup.app, self.flows, topic, state.partitions)
        return {topic: state.topic_id for topic, state in found.items()}

    def _least_positions(self) -> dict[tuple[str, int], int]:
        """Return the furthest position of any flow in each source partition."""
        furthest: dict[tuple[str, int], int] = {}
        for line in self.commit.sources:
            if line.flow in self.flows:
                source = (self.flows[line.flow].topic, line.partition)
                furthest[source] = max(furthest.get(source, 0), line.next_offset)
        return furthest

    def _situation(self, closing: bool, *, ending: bool) -> Situation:
        now_ms = self._clock.monotonic_ms()
        silent = {
            (line.flow, line.partition): now_ms
            - self._seen_ms.setdefault((line.flow, line.partition), now_ms)
            for line in self.commit.sources
        }
        # The time of rounds never decreases, whatever the wall clock does.
        watch = SilenceClock(
            max(self._clock.now_ms(), self.commit.tick.now_ms), self._settings.idle_after_ms, silent
        )
        return Situation(
            flows=self.flows,
            commit=self.commit,
            base=self._digest,
            heads=self.heads,
            watch=watch,
            generation=self.generation.number,
            size=self._sizes.records,
            on_loss=self._settings.on_loss,
            closing=closing,
            ending=ending,
            closes=self._settings.close,
            lookups={} if self._tables is None else self._tables.newest(),
            topic_ids=self._topic_ids,
        )

    def _ordered(self, plan: PlanRecord) -> RoundOrder:
        """Return the orders of the round (M2); deliver first what none of its tasks can deliver."""
        handed, own = split_deliveries(() if self._delivered else self.commit.deliveries, plan.tasks)
        if own:
            self._deliver(own)
        sources = {(line.flow, line.partition): line for line in self.commit.sources}
        tokens = {(line.flow, line.task): line.token for line in self.commit.tasks}
        return RoundOrder(
            app=plan.app,
            round=plan.round,
            generation=self.generation.number,
            tick=plan.tick,
            sources=tuple(
                SourceOrder(
                    each.flow,
                    each.partition,
                    each.start,
                    each.stop,
                    self._records.state_of(sources[each.flow, each.partition]),
                    self._looked_up(plan, each.flow),
                )
                for each in plan.ranges
                if each.stop > each.start
            ),
            tasks=tuple(
                TaskOrder(
                    flow,
                    task,
                    tokens.get((flow, task), b""),
                    handed.get((flow, task), ()),
                    self._looked_up(plan, flow),
                    tuple(
                        (line.partition, *each)
                        for line in self.commit.sources
                        if line.flow == flow
                        for each in line.skipped
                    ),
                )
                for flow, task in plan.tasks
            ),
            ticks=plan.ticks,
            incarnation=self.commit.incarnation,
            frontiers={
                flow: {number: sources[flow, number].frontier for number in tick.waits}
                for flow, tick in plan.ticks.items()
                if tick.waits
            },
        )

    def _looked_up(self, plan: PlanRecord, flow: str) -> dict[str, int]:
        """The commits of lookup tables that a flow reads in this round."""
        return {table: plan.lookups[table] for table in self.flows[flow].lookups if table in plan.lookups}

    # -- working ---------------------------------------------------------------------------------

    def _attempt(self, order: RoundOrder) -> tuple[RoundOrder, RoundResult]:
        """Return the engine's result and its order; retry a few times if something is unavailable."""
        if not order.sources and not order.tasks:
            return order, RoundResult((), ())  # the plan only takes partitions out, or records a loss
        for attempt in range(self._settings.attempts):
            self.generation.keep()
            try:
                return self._run(order)
            except UnavailableError:
                if attempt + 1 == self._settings.attempts:
                    raise
                self._clock.sleep_ms(RETRY_MS << attempt)
                if not self.tries_again:
                    raise
        raise InternalError("a round was attempted no times")

    def _run(self, order: RoundOrder) -> tuple[RoundOrder, RoundResult]:
        """Run a round; repeat it without the records that steps behind state failed on, until there are none (M6)."""
        while True:
            result = self._engine.run(order)
            bad = {
                (task.flow, each.partition, each.offset): each for task in result.tasks for each in task.bad
            }
            if not bad:
                return order, result
            self.generation.keep()
            order = self._without(order, bad)

    def _without(self, order: RoundOrder, bad: Mapping[tuple[str, int, int], BadRecord]) -> RoundOrder:
        """Return the same round with these records set aside, or their partitions stopped, where they are read."""
        lines = {(line.flow, line.partition): line for line in self.commit.sources}
        sources = {(each.flow, each.partition): each for each in order.sources}
        tasks, stops, ticks = order.tasks, dict(order.stops), dict(order.ticks)
        for (flow, partition, offset), each in sorted(bad.items()):
            line, place = lines[flow, partition], (flow, partition)
            if place not in sources:  # nothing more of it is read in this round
                state, at = self._records.state_of(line), line.next_offset
                sources[place] = SourceOrder(flow, partition, at, at, state)
            source = sources[place]
            if offset in {known.offset for known in source.bad}:
                raise InternalError(
                    f"flow {flow} met offset {offset} of partition {partition}, though it was left out: {each.reason}"
                )
            sources[place] = msgspec.structs.replace(source, bad=(*source.bad, each))
            if offset >= source.start:
                continue
            if self.flows[flow].keeps_bad:
                gone = (partition, offset, offset + 1)
                tasks = tuple(
                    msgspec.structs.replace(task, left_out=(*task.left_out, gone))
                    if task.flow == flow
                    else task
                    for task in tasks
                )
                continue
            here = each.stream_time, offset
            own = stops[flow] = dict(stops.get(flow, {}))
            own[partition] = min(here, own.get(partition, here))
            tick = order.tick_of(flow)
            if tick.watermark is not None:
                ticks[flow] = msgspec.structs.replace(tick, watermark=min(tick.watermark, each.stream_time))
        return msgspec.structs.replace(
            order,
            sources=tuple(sources[place] for place in sorted(sources)),
            tasks=tasks,
            stops=stops,
            ticks=ticks,
        )

    # -- committing ------------------------------------------------------------------------------

    def _committed(self, plan: PlanRecord, digest: bytes, result: RoundResult) -> tuple[CommitRecord, bytes]:
        states = {
            (each.flow, each.partition): self._records.store_state(
                each.flow, each.partition, plan.round, self._randomness.uuid().hex, each.state
            )
            for each in result.sources
        }
        commit = commit_of(
            plan,
            digest,
            self.commit,
            result,
            self.flows,
            states=states,
            end_of=self._end_of,
            generation=self.generation.number,
            now_ms=self._clock.now_ms(),
            limits=self._limits,
        )
        return self._records.put_commit(commit)

    def _give_up(
        self, plan: PlanRecord, digest: bytes, why: str, error: OverloadError | None = None
    ) -> StepOutcome:
        """Commit an empty round (M5) and halve the next one; raise if that cannot help."""
        read = sum(each.stop - each.start for each in plan.ranges)
        least = read <= OVER_ADMITTED * max(1, len(plan.ranges))
        smaller = self._sizes.cut()
        if error is not None and (least or not smaller):
            raise self._backpressure.overload(self.flows, self.commit) from error
        self._given_up += 1
        if self._given_up > MOST_GIVEN_UP:
            raise OverloadError(
                f"app {plan.app}: {self._given_up} rounds in a row were given up, the last one with {read} records to "
                f"read, and nothing was committed: {why}. Then start the app again, it goes on where it stopped",
                reason="rounds_given_up",
            ) from error
        self.deliver_outstanding()
        number, now_ms = self.generation.number, self._clock.now_ms()
        void = void_of(plan, digest, self.commit, generation=number, now_ms=now_ms)
        self._take(self._records.put_commit(void))
        self._delivered = self.commit.change != "" or not self.commit.deliveries
        waits = (f"a smaller round, after {self._given_up} given up: {why}",)
        return StepOutcome("given up", lag_of(self.flows, self.commit, self.heads), waiting_for=waits)

    def _take(self, made: tuple[CommitRecord, bytes]) -> None:
        """Continue from a commit: ours, or another coordinator's of the same plan (M3)."""
        self.generation.check()
        self.commit, self._digest = made
        self._is_first = False

    def _end_of(self, topic: str, partition: int) -> int:
        return self._opened.heads.of(topic, self._opened.setup.partitions[topic])[partition].end

    def _tell(self) -> None:
        now_ms = self._clock.monotonic_ms()
        self._metrics.standing(self.commit, self.heads, self.lag_seconds(), now_ms, self.lookup_lags)

    def lag_seconds(self) -> dict[str, float]:
        """Return how far each flow's event time is behind now, for flows with records to read."""
        return lag_seconds_of(self.flows, self.commit, self.heads, self._clock.now_ms())
