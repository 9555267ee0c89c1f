"""The master: one round after the other, plan → work → commit → deliver → collect, and nothing else.

It decides nothing itself: `planning` says what a round is to do, the engine does it, `committing` says what is true
afterwards, `records` decides who was first. Everything it keeps between two rounds is a copy of what the newest commit
says, so a master that dies is replaced by one that reads that commit.

M1  no task is started before its plan is durable, and a round is repeated from its plan as it is.
M2  a round starts from the commit before it, read by number.
M3  nothing is delivered that no commit names; a commit counts when it was created and the lease was still ours.
M4  work that took longer than half the grace of the collection is given up, not committed (`collecting`, G3).
M5  a plan that is too much for the workers, or that looks into a commit of a table which is not kept any more, is
    given up by a commit that changes nothing but the number; the next plan is smaller, and new. After `MOST_GIVEN_UP`
    of them in a row the run ends and says why.
M6  a record that a step behind state fails on is found by its task. The round is then tried again from the same plan
    with that record set aside where it is read, or its partition stopped in front of it. One that was read in an
    earlier round and held back since is set aside by its source as well and left out by its task; or its partition
    reads no further, and events from there on stay held back.

Thread rule: one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

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
from tidegate.pipeline.rounds.admission import OVER_ADMITTED, Brake
from tidegate.pipeline.rounds.collecting import Collector
from tidegate.pipeline.rounds.committing import commit_of, require_whole, void_of
from tidegate.pipeline.rounds.delivering import in_order, split_deliveries
from tidegate.pipeline.rounds.engine import Engine
from tidegate.pipeline.rounds.heads import Head
from tidegate.pipeline.rounds.lookups import TableCommits
from tidegate.pipeline.rounds.metrics import RoundMetrics
from tidegate.pipeline.rounds.opening import Opened, partitions_added
from tidegate.pipeline.rounds.orders import (
    BadRecord,
    Delivery,
    RoundOrder,
    RoundResult,
    SourceOrder,
    TaskOrder,
)
from tidegate.pipeline.rounds.planning import Rest, Situation, lag_of, lag_seconds_of, plan_round
from tidegate.pipeline.rounds.records import CommitRecord, Limits, PlanRecord
from tidegate.pipeline.rounds.settings import RunSettings
from tidegate.pipeline.rounds.sizing import RoundSizes
from tidegate.pipeline.rounds.ticks import Watch
from tidegate.randomness import Randomness
from tidegate.storage.backends.base import StorageBackend

RETRY_MS: Final = 200
MOST_GIVEN_UP: Final = 20
Deliver = Callable[[Sequence[Delivery]], None]
Targets = Mapping[tuple[str, int], int]  # topic, partition → the offset to read up to
BACKLOG_REASONS: Final = frozenset({"backlog_full", "retention_exceeds_backlog"})


@dataclass(frozen=True)
class StepOutcome:
    """What a step came to: a round, or rest. `lag_records` is what was left in the log (up to the targets)."""

    kind: Literal["round", "given up", "rest"]
    lag_records: int
    rest_until_ms: int | None = None
    waiting_for: tuple[str, ...] = ()
    records: int = 0
    took_ms: int = 0
    timings_ms: Mapping[str, float] | None = None
    delivered: bool = False  # something was brought into the log just now, perhaps for another flow to read


class Master:
    """Runs an opened app on an engine, step by step."""

    def __init__(
        self,
        opened: Opened,
        engine: Engine,
        backend: StorageBackend,
        deliver: Deliver,
        *,
        clock: Clock,
        randomness: Randomness,
        metrics: Metrics,
        settings: RunSettings,
        tables: TableCommits | None = None,
    ) -> None:
        self.flows = opened.flows
        self.commit, self._digest = opened.commit, opened.digest
        self.heads: dict[str, dict[int, Head]] = {}
        self._topic_ids: dict[str, str] = {}
        self._opened = opened
        self._records = opened.records
        self._generation = opened.generation
        self._engine = engine
        self._deliver = deliver
        self._clock = clock
        self._randomness = randomness
        self._settings = settings
        self._tables = tables or TableCommits(backend)
        storage = opened.setup.storage
        self._brake = Brake(storage.backlog_limit_bytes, engine.place)
        self._limits = Limits(
            storage.backlog_limit_bytes * engine.processes, storage.worker_total_bytes * engine.processes
        )
        self._sizes = RoundSizes(
            fixed=settings.round_records, first=settings.first_round_records, target_ms=settings.target_ms
        )
        self._collector = Collector(
            backend,
            opened.records,
            clock=clock,
            grace_ms=settings.grace_ms,
            every_ms=settings.collect_every_ms,
        )
        self._metrics = RoundMetrics(metrics, opened.setup.app, opened.flows)
        self._topics = {flow.topic: flow.partitions for flow in opened.flows.values()}
        self._seen_ms: dict[
            tuple[str, int], int
        ] = {}  # when a source last had records, on the clock that never jumps
        self._delivered = False  # whether the newest commit's parcels are known to be in the log
        self._given_up = 0  # rounds in a row
        self._tries_again = True
        self._is_first = True  # whether somebody before us may have left a plan
        sizes = [opened.heads.bytes_per_record(topic, count) for topic, count in self._topics.items()]
        self._sizes.begin_with(max((size for size in sizes if size is not None), default=None))

    @property
    def took_over(self) -> bool:
        """Whether the process that ran the app before did not give it up."""
        return self._generation.was_left

    @property
    def lookup_lags(self) -> dict[str, int]:
        """Of each table that is looked up, the records of its topic that it has not seen."""
        return dict(self._tables.lags)

    # -- a step ----------------------------------------------------------------------------------

    def step(self, *, targets: Targets | None = None, closing: bool = False) -> StepOutcome:
        """One round, or rest when there is nothing to do; reading goes no further than the targets.

        With targets the run ends there: what only waits for records behind them waits no longer (`planning`, P4).
        """
        try:
            return self._step(targets, closing)
        except FencedError:
            raise
        except TidegateError:
            # Whoever was overtaken may meet things that were rightly removed: then that is what is to be told.
            self._generation.check()
            raise

    def _step(self, targets: Targets | None, closing: bool) -> StepOutcome:
        self._generation.keep()
        self._look(targets)
        found = self._records.load_plan(self.commit.round + 1) if self._is_first else None
        waiting: tuple[str, ...] = ()
        if found is None:
            planned = plan_round(self._situation(closing, ending=targets is not None), self._brake)
            if isinstance(planned, Rest):
                delivered = self.deliver_outstanding()
                self._tell()
                self._collector.step()
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
        if self._is_first and not self._tables.are_kept(plan.lookups):
            gone = ", ".join(f"commit {number} of {table}" for table, number in plan.lookups.items())
            return self._give_up(
                plan, digest, f"it looks things up in {gone}, and not all of that is kept any more"
            )
        return self._round(plan, digest, waiting)

    def _round(self, plan: PlanRecord, digest: bytes, waiting: tuple[str, ...]) -> StepOutcome:
        self._is_first = True  # until it is committed, a plan is there
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
        topic_ids = self._states()
        if any(topic_ids.get(topic) != known for topic, known in plan.topic_ids.items()):
            # The next plan stops what reads it.
            return self._give_up(
                plan, digest, "a topic that it reads was deleted and created again meanwhile"
            )
        self._generation.keep()  # a round that took long may be one that was given up
        before = self.commit
        self._take(self._committed(plan, digest, result))
        self._delivered = not self.commit.deliveries
        self._given_up = 0
        records = {
            name: sum(each.records for each in result.sources if each.flow == name) for name in self.flows
        }
        self._brake.note(before, self.commit, records)
        self._sizes.note(sum(records.values()), took_ms)
        self._note_seen(result)
        self._collector.superseded(before, self.commit)
        self._metrics.round(result, self.commit, took_ms)
        self._tell()
        self._collector.step()
        lag = lag_of(self.flows, self.commit, self.heads)
        return StepOutcome("round", lag, None, waiting, sum(records.values()), took_ms, _timings(result))

    def deliver_outstanding(self) -> bool:
        """Bring the newest commit's parcels into the log, unless they are known to be there; whether it did."""
        if self._delivered:
            return False
        if self.commit.deliveries:
            self._deliver(in_order(self.commit.deliveries))
        self._delivered = True
        return bool(self.commit.deliveries)

    def collect(self) -> None:
        """A whole pass of collection now."""
        self._collector.run()

    def finish_collecting(self) -> None:
        """At the end of a run: remove what nobody needs any more, for a bounded time."""
        self._collector.finish()

    def try_no_more(self) -> None:
        """From any thread: a round that fails because something is out of reach is not tried again."""
        self._tries_again = False

    def give_app_up(self) -> None:
        """Free the app for the next run, from any thread: nothing is committed here any more."""
        self._generation.give_up()

    def ends_now(self) -> dict[tuple[str, int], int]:
        """Where the sources end now: targets for whoever wants to catch up with what is there.

        Topics that flows of this app write itself have none: what comes into them until the others have caught up
        belongs to it.
        """
        topics = {flow.topic: flow.partitions for flow in self.flows.values() if not flow.upstream}
        heads = self._opened.heads.look(topics)
        return {(topic, number): head.end for topic, found in heads.items() for number, head in found.items()}

    # -- planning --------------------------------------------------------------------------------

    def _look(self, targets: Targets | None) -> None:
        self._topic_ids = self._states()
        heads = self._opened.heads.look(self._topics)
        if targets is not None:
            positions = self._least_positions()
            for (topic, number), end in targets.items():
                head = heads[topic][number]
                # A target never cuts what was read already: the app may stand behind it.
                limit = max(end, positions.get((topic, number), 0))
                heads[topic][number] = Head(head.start, min(head.end, limit), head.end > limit)
        self.heads = heads

    def _states(self) -> dict[str, str]:
        """The ids of the topics that are read. A topic that has more partitions now ends the run: what they hold would
        not be read, and where keys decide the partition, their state would be in another task."""
        found = self._opened.heads.states(self._topics)
        for topic, state in found.items():
            if state.partitions > self._topics[topic]:
                raise partitions_added(self._opened.setup.app, self.flows, topic, state.partitions)
        return {topic: state.topic_id for topic, state in found.items()}

    def _least_positions(self) -> dict[tuple[str, int], int]:
        """The furthest any flow has read each source partition."""
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
        # Rounds' time never goes back, whatever the wall clock does.
        watch = Watch(
            max(self._clock.now_ms(), self.commit.tick.now_ms), self._settings.idle_after_ms, silent
        )
        tables = sorted({table for flow in self.flows.values() for table in flow.lookups})
        return Situation(
            flows=self.flows,
            commit=self.commit,
            base=self._digest,
            heads=self.heads,
            watch=watch,
            generation=self._generation.number,
            size=self._sizes.records,
            on_loss=self._settings.on_loss,
            closing=closing,
            ending=ending,
            closes=self._settings.close,
            lookups=self._tables.newest(tables),
            topic_ids=self._topic_ids,
        )

    def _ordered(self, plan: PlanRecord) -> RoundOrder:
        """The round's orders (M2); what no task of it can deliver is delivered first."""
        handed, own = split_deliveries(() if self._delivered else self.commit.deliveries, plan.tasks)
        if own:
            self._deliver(own)
        sources = {(line.flow, line.partition): line for line in self.commit.sources}
        tokens = {(line.flow, line.task): line.token for line in self.commit.tasks}
        return RoundOrder(
            app=plan.app,
            round=plan.round,
            generation=self._generation.number,
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
            life=self.commit.life,
            frontiers={
                flow: {number: sources[flow, number].frontier for number in tick.waits}
                for flow, tick in plan.ticks.items()
                if tick.waits
            },
        )

    def _looked_up(self, plan: PlanRecord, flow: str) -> dict[str, int]:
        """The commits of tables that a flow looks things up in, in this round."""
        return {table: plan.lookups[table] for table in self.flows[flow].lookups if table in plan.lookups}

    # -- working ---------------------------------------------------------------------------------

    def _attempt(self, order: RoundOrder) -> tuple[RoundOrder, RoundResult]:
        """The engine's answer, and the order that it is of; what is out of reach is asked for again, a few times."""
        if not order.sources and not order.tasks:
            return order, RoundResult((), ())  # the plan only takes partitions out, or records a loss
        for attempt in range(self._settings.attempts):
            self._generation.keep()
            try:
                return self._run(order)
            except UnavailableError:
                if attempt + 1 == self._settings.attempts:
                    raise
                self._clock.sleep_ms(RETRY_MS << attempt)
                if not self._tries_again:
                    raise
        raise InternalError("a round was attempted no times")

    def _run(self, order: RoundOrder) -> tuple[RoundOrder, RoundResult]:
        """Run a round; again without the records that steps behind state failed on, until there are none (M6)."""
        while True:
            result = self._engine.run(order)
            bad = {
                (task.flow, each.partition, each.offset): each for task in result.tasks for each in task.bad
            }
            if not bad:
                return order, result
            self._generation.keep()
            order = self._without(order, bad)

    def _without(self, order: RoundOrder, bad: Mapping[tuple[str, int, int], BadRecord]) -> RoundOrder:
        """The same round with these records set aside, or their partitions stopped, where they are read."""
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
            generation=self._generation.number,
            now_ms=self._clock.now_ms(),
            limits=self._limits,
        )
        return self._records.put_commit(commit)

    def _give_up(
        self, plan: PlanRecord, digest: bytes, why: str, error: OverloadError | None = None
    ) -> StepOutcome:
        """Commit that nothing happened (M5), and make the next round smaller; raise when that leads nowhere."""
        read = sum(each.stop - each.start for each in plan.ranges)
        least = read <= OVER_ADMITTED * max(1, len(plan.ranges))
        smaller = self._sizes.cut()
        if error is not None and (least or not smaller):
            raise self._brake.overload(self.flows, self.commit) from error
        self._given_up += 1
        if self._given_up > MOST_GIVEN_UP:
            raise OverloadError(
                f"app {plan.app}: {self._given_up} rounds in a row were given up, the last one with {read} records to "
                f"read, and nothing was committed: {why}. Then start the app again, it goes on where it stopped",
                reason="rounds_given_up",
            ) from error
        self.deliver_outstanding()
        void = void_of(
            plan,
            digest,
            self.commit,
            generation=self._generation.number,
            now_ms=self._clock.now_ms(),
        )
        self._take(self._records.put_commit(void))
        self._delivered = self.commit.change != "" or not self.commit.deliveries
        waits = (f"a smaller round, after {self._given_up} given up: {why}",)
        return StepOutcome("given up", lag_of(self.flows, self.commit, self.heads), waiting_for=waits)

    def _take(self, made: tuple[CommitRecord, bytes]) -> None:
        """Go on from a commit: ours, or the one somebody else made of the same plan (M3)."""
        self._generation.check()
        self.commit, self._digest = made
        self._is_first = False

    def _end_of(self, topic: str, partition: int) -> int:
        return self._opened.heads.of(topic, self._opened.setup.partitions[topic])[partition].end

    # -- telling ---------------------------------------------------------------------------------

    def _note_seen(self, result: RoundResult) -> None:
        now_ms = self._clock.monotonic_ms()
        for each in result.sources:
            if each.records:
                self._seen_ms[each.flow, each.partition] = now_ms

    def _tell(self) -> None:
        self._metrics.standing(
            self.commit, self.heads, self.lag_seconds(), self._clock.monotonic_ms(), self.lookup_lags
        )

    def lag_seconds(self) -> dict[str, float]:
        """How far each flow's event time is behind now, where it has something to read."""
        return lag_seconds_of(self.flows, self.commit, self.heads, self._clock.now_ms())


def _timings(result: RoundResult) -> dict[str, float]:
    """The tasks' time by what it went to, summed."""
    sums: dict[str, float] = {}
    for task in result.tasks:
        for name, ms in task.timings_ms.items():
            sums[name] = sums.get(name, 0.0) + ms
    return sums
