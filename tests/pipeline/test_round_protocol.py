"""The protocol of rounds under death and doubles: real master, real records and lease, a small world around them.

The world is a source log, a sink log and one backend in memory. Work is small and deterministic: counts by key, each
changed count sent on. Every effect is a point at which an actor may be held up while others go on, or die. Whatever the
schedule was, a last master finishes the job, and sink, states, offsets and totals must be those of a run nobody
disturbed (R-17, R-19, R-20).
"""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tidegate.clock import ManualClock
from tidegate.errors import FencedError, TidegateError, UnavailableError
from tidegate.log.catalog import TopicState
from tidegate.metrics import Metrics
from tidegate.pipeline import gc
from tidegate.pipeline.checkpoint import VERSION, CommitRecord, Records, SourceLine
from tidegate.pipeline.coordinator import Coordinator
from tidegate.pipeline.flow import FlowFacts
from tidegate.pipeline.gc import Collector
from tidegate.pipeline.lease import AppLease
from tidegate.pipeline.log_end_offsets import Head
from tidegate.pipeline.messages import (
    Delivery,
    Parcel,
    RoundOrder,
    RoundResult,
    Section,
    SourceOrder,
    SourceResult,
    TaskOrder,
    TaskResult,
    Tick,
)
from tidegate.pipeline.recovery import Opened
from tidegate.pipeline.settings import RunSettings
from tidegate.randomness import SeededRandomness
from tidegate.storage.backends.memory import MemoryBackend

PARTITIONS = 2
ROUND_RECORDS = 6
PER_PARTITION = 9  # three rounds of three records a partition
FLOW = FlowFacts("counts", "in", PARTITIONS, PARTITIONS)
LEASE_MS = 10_000
SINK = "out"


class Killed(BaseException):
    """The process is gone."""


# -- actors and schedules ------------------------------------------------------------------------


class Actor:
    """A function on a thread that runs only when told to, from point to point."""

    def __init__(self, name: str, body: Callable[[], Any]) -> None:
        self.name = name
        self.points: list[str] = []
        self.kill_at: int | None = None
        self.fail_at: int | None = None
        self.outcome: BaseException | None = None
        self.is_done = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._body = body
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Let it run to its next point, or to its end."""
        self._go.release()
        assert self._stopped.acquire(timeout=300), f"{self.name} hangs after {self.points[-3:]}"

    def point(self, what: str) -> None:
        if self.kill_at is not None and len(self.points) == self.kill_at:
            raise Killed(what)
        if self.fail_at is not None and len(self.points) == self.fail_at:
            self.fail_at = None
            raise UnavailableError(f"out of reach: {what}")
        self.points.append(what)
        self._stopped.release()
        self._go.acquire()

    def _main(self) -> None:
        HERE.actor = self
        self._go.acquire()
        try:
            self._body()
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.outcome = error
        self.is_done = True
        self._stopped.release()


HERE = threading.local()


def point(what: str) -> None:
    actor = getattr(HERE, "actor", None)
    if actor is not None:
        actor.point(what)


# -- the world -----------------------------------------------------------------------------------


class PointedBackend(MemoryBackend):
    """The backend; every call of a record or an object is a point."""

    def publish(self, name: str, data: bytes, *, expected: str | None) -> str:
        point(f"publish {name}")
        version = super().publish(name, data, expected=expected)
        point(f"published {name}")
        return version

    def read_published(self, name: str) -> tuple[bytes, str] | None:
        point(f"read {name}")
        return super().read_published(name)

    def delete(self, name: str) -> None:
        point(f"delete {name}")
        super().delete(name)


@dataclass
class World:
    """What outlives every process."""

    source: dict[int, list[tuple[str, int]]]
    backend: PointedBackend = field(default_factory=lambda: PointedBackend(randomness=SeededRandomness(1)))
    sink: dict[int, list[bytes]] = field(default_factory=lambda: {number: [] for number in range(PARTITIONS)})
    unique: Iterator[int] = field(default_factory=itertools.count)

    def append(self, partition: int, base: int, records: Sequence[bytes]) -> None:
        """The conditional append: at the end, or there already, or fenced."""
        point(f"append {partition}@{base}")
        have = self.sink[partition]
        if len(have) == base:
            have += records
        elif have[base : base + len(records)] != list(records):
            raise FencedError(f"out-{partition} offset {base} holds something else")
        point(f"appended {partition}@{base}")

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        for each in deliveries:
            point(f"read parcel {each.parcel.name}")
            rows = msgspec.msgpack.decode(memoryview(self.backend.read(each.parcel.name)), type=list[bytes])
            for section, base in zip(each.parcel.sections, each.bases, strict=True):
                part = rows[section.position : section.position + section.records]
                self.append(section.partition, base, part)


@dataclass
class Heads:
    world: World

    def look(self, topics: Mapping[str, int]) -> dict[str, dict[int, Head]]:
        return {topic: self.of(topic, count) for topic, count in topics.items()}

    def of(self, topic: str, partitions: int) -> dict[int, Head]:
        logs: Mapping[int, Sequence[Any]] = self.world.source if topic == "in" else self.world.sink
        return {number: Head(0, len(logs[number])) for number in range(partitions)}

    def states(self, topics: Mapping[str, int]) -> dict[str, TopicState]:
        return {topic: TopicState("id", count) for topic, count in topics.items()}

    def bytes_per_record(self, topic: str, partitions: int) -> None:
        return None

    def close(self) -> None:
        pass


class CountingEngine:
    """Counts keys. A token is the name of an object that holds the counts; every attempt writes its own."""

    name, slots, processes = "model", 2, 1

    def __init__(self, world: World, failing: Iterator[bool] | None = None, turned: bool = False) -> None:
        self.world = world
        self._failing = failing
        self._turned = turned  # tasks work in the other order, as with another number of slots

    def place(self, flow: str, task: int) -> int:
        return 0

    def run(self, order: RoundOrder) -> RoundResult:
        sources = {each.partition: each for each in order.sources}
        tasks = order.tasks[::-1] if self._turned else order.tasks
        done = [self._task(order, task, sources.get(task.task)) for task in tasks]
        return RoundResult(
            tuple(each for each, _ in done if each is not None), tuple(each for _, each in done)
        )

    def _task(
        self, order: RoundOrder, task: TaskOrder, source: SourceOrder | None
    ) -> tuple[SourceResult | None, TaskResult]:
        self.world.deliver(task.deliveries)
        if self._failing is not None and next(self._failing):
            raise UnavailableError("a worker died")
        counts = state_of(self.world.backend, task.token)
        read = [] if source is None else self.world.source[task.task][source.start : source.stop]
        changed: dict[str, int] = {}
        for key, _ in read:
            counts[key] = changed[key] = counts.get(key, 0) + 1
        unique = next(self.world.unique)
        token = f"model/{order.round}-{unique}"
        self.world.backend.put(token, [msgspec.msgpack.encode(counts, order="sorted")])
        point(f"worked {task.task}")
        parcel = self._parcel(order, task, changed, unique)
        result = TaskResult(
            "counts",
            task.task,
            token.encode(),
            parcel,
            rows_sent=len(changed),
            counters={"keys": len(changed)},
        )
        if source is None:
            return None, result
        state = msgspec.msgpack.encode([source.stop, Counter(key for key, _ in read).total(), source.state])
        newest = max((ts for _, ts in read), default=-1)
        return (
            SourceResult("counts", task.task, source.stop, state, newest, len(read), 8 * len(read)),
            result,
        )

    def _parcel(
        self, order: RoundOrder, task: TaskOrder, changed: dict[str, int], unique: int
    ) -> Parcel | None:
        if not changed:
            return None
        rows = [f"{key}={count}".encode() for key, count in changed.items()]
        name = f"apps/model/parcels/counts/{task.task}/{order.round:010d}-{unique}"
        self.world.backend.put(name, [msgspec.msgpack.encode(rows)])
        return Parcel(name, 0, b"", (Section(SINK, task.task, 0, 0, len(rows)),))

    def close(self) -> None:
        pass


class ModelCollector(Collector):
    """The real rules; tokens of the model reach one object."""

    def _reachable(self, token: bytes, *, required: bool) -> set[str]:
        return {token.decode()}

    def _orphans(self) -> Iterator[None]:
        yield from ()


def state_of(backend: MemoryBackend, token: bytes) -> dict[str, int]:
    return (
        msgspec.msgpack.decode(memoryview(backend.read(token.decode())), type=dict[str, int]) if token else {}
    )


def made_world(seed: int = 7, rows: int = PER_PARTITION) -> World:
    chance = random.Random(seed)
    world = World({p: [(f"k{chance.randrange(3)}", i) for i in range(rows)] for p in range(PARTITIONS)})
    records = Records(world.backend, "model")
    records.put_change(
        CommitRecord(
            version=VERSION,
            app="model",
            round=0,
            generation=0,
            base=b"",
            plan=b"",
            definition="d",
            incarnation="l",
            tick=Tick(0),
            committed_ms=0,
            sources=tuple(SourceLine("counts", p, 0) for p in range(PARTITIONS)),
            tasks=(),
            change="made",
        )
    )
    return world


def made_coordinator(
    world: World,
    *,
    late_ms: int = 0,
    seed: int = 0,
    failing: Iterator[bool] | None = None,
    turned: bool = False,
    round_records: int = ROUND_RECORDS,
) -> Coordinator:
    """A process: its own clock, lease, copy of the newest commit. `late_ms` later than the ones before it, so that
    it takes their lease while they, by their own clock, still have it."""
    clock = ManualClock(1_000_000 + late_ms)
    records = Records(world.backend, "model")
    generation = AppLease(records, clock=clock, randomness=SeededRandomness(seed), lease_ms=LEASE_MS)
    newest = records.newest()
    assert newest is not None
    commit, digest = records.read_commit(newest)
    setup = SimpleNamespace(
        app="model",
        storage=SimpleNamespace(backlog_limit_bytes=1 << 30, worker_total_bytes=1 << 30),
        partitions={SINK: PARTITIONS},
    )
    opened = Opened(setup, {"counts": FLOW}, records, generation, commit, digest, Heads(world))  # type: ignore[arg-type]
    settings = RunSettings(round_records=round_records, until="caught_up")
    coordinator = Coordinator(
        opened,
        CountingEngine(world, failing, turned),
        world.deliver,
        clock=clock,
        randomness=SeededRandomness(seed),
        metrics=Metrics(),
        settings=settings,
    )
    coordinator.collector = ModelCollector(records, clock=clock, grace_ms=1000, every_ms=10**9)
    return coordinator


def finish(coordinator: Coordinator, *, collecting_too: bool = False, patient: bool = False) -> None:
    """To the end of what is there; a patient one tries again what was out of reach, as a run does."""
    for _ in range(50):
        try:
            outcome = coordinator.step()
            if outcome.kind == "rest" or outcome.lag_records == 0:
                coordinator.deliver_outstanding()
        except UnavailableError:
            if not patient:
                raise
            continue
        if collecting_too:
            coordinator.collector.run()
        if outcome.kind == "rest" and outcome.lag_records == 0:
            return
    raise AssertionError("it never came to rest")


def result_of(world: World) -> Any:
    """All that must not depend on what went wrong."""
    records = Records(world.backend, "model")
    newest = records.newest()
    assert newest is not None
    commit, _ = records.read_commit(newest)
    return (
        world.sink,
        {line.task: state_of(world.backend, line.token) for line in commit.tasks},
        [(line.partition, line.next_offset, line.state, line.stream_time) for line in commit.sources],
        commit.totals,
        commit.ends,
    )


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    world = made_world()
    finish(made_coordinator(world))
    assert Counter(row.split(b"=")[0] for rows in world.sink.values() for row in rows)
    assert Records(world.backend, "model").newest() == 3
    return result_of(world)


def after_all(world: World) -> Any:
    """Whoever comes last finishes, and the one after finds nothing to do."""
    finish(made_coordinator(world, late_ms=100 * LEASE_MS, seed=98))
    before = result_of(world)
    finish(made_coordinator(world, late_ms=200 * LEASE_MS, seed=99))
    assert result_of(world) == before
    return before


def points_of_a_run() -> list[str]:
    world = made_world()
    actor = Actor("a", lambda: finish(made_coordinator(world)))
    while not actor.is_done:
        actor.resume()
    assert actor.outcome is None, actor.outcome
    return actor.points


POINTS = points_of_a_run()


# -- one master, every death ---------------------------------------------------------------------


def test_a_run_has_points_at_every_step_of_the_protocol() -> None:
    for what in ("publish apps/model/lease", "plans/", "worked", "commits/", "append", "delete"):
        assert any(what in each for each in POINTS), what
    assert len(POINTS) > 40


@pytest.mark.parametrize(
    "kill_at", range(len(POINTS)), ids=lambda at: f"R-17-{at}-{POINTS[at].split('/')[-1]}"
)
def test_a_master_killed_at_any_effect_is_replaced_without_a_trace(kill_at: int, undisturbed: Any) -> None:
    world = made_world()
    actor = Actor("a", lambda: finish(made_coordinator(world)))
    actor.kill_at = kill_at
    while not actor.is_done:
        actor.resume()
    assert isinstance(actor.outcome, Killed)
    assert after_all(world) == undisturbed


@pytest.mark.parametrize("stall_at", range(len(POINTS)), ids=lambda at: f"R-17-stall-{at}")
def test_a_master_that_sleeps_at_any_effect_and_wakes_after_all_is_done_changes_nothing(
    stall_at: int, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it sleeps, another finishes and collects, so that records of its round are gone when it wakes (R-20)."""
    monkeypatch.setattr(gc, "KEPT", 1)
    world = made_world()
    actor = Actor("a", lambda: finish(made_coordinator(world)))
    for _ in range(stall_at + 1):
        actor.resume()
    if not actor.is_done:
        finish(made_coordinator(world, late_ms=10 * LEASE_MS, seed=5), collecting_too=True)
    while not actor.is_done:
        actor.resume()
    assert actor.outcome is None or isinstance(actor.outcome, TidegateError), actor.outcome
    assert after_all(world) == undisturbed


@pytest.mark.parametrize(
    "fail_at", range(len(POINTS)), ids=lambda at: f"R-17-raise-{at}-{POINTS[at].split('/')[-1]}"
)
@pytest.mark.parametrize("same", [True, False], ids=["goes-on", "replaced"])
def test_an_effect_that_fails_once_at_any_place_leaves_no_trace(
    fail_at: int, same: bool, undisturbed: Any
) -> None:
    """The master tries again itself, or ends and is replaced."""
    world = made_world()
    actor = Actor("a", lambda: finish(made_coordinator(world), patient=same))
    actor.fail_at = fail_at
    while not actor.is_done:
        actor.resume()
    assert actor.fail_at is None, "the place was reached"
    assert actor.outcome is None or isinstance(actor.outcome, UnavailableError), actor.outcome
    if same and fail_at > POINTS.index(next(each for each in POINTS if "plans/" in each)):
        assert actor.outcome is None, "once it runs, a moment out of reach does not end it"
    assert after_all(world) == undisturbed


def test_an_attempt_that_fails_is_repeated_from_the_same_plan(undisturbed: Any) -> None:
    for seed in range(40):
        chance = random.Random(seed)
        world = made_world()
        failures = (chance.random() < 0.3 for _ in itertools.count())
        try:
            finish(made_coordinator(world, failing=failures))
        except UnavailableError:
            pass  # too often in a row: the next process goes on
        assert after_all(world) == undisturbed, seed


# -- rounds that are done again --------------------------------------------------------------------


class Copies:
    """A backup of the records and states after every round, as an operator would take it; the sink is not in it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.taken: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def take(self) -> None:
        backend = self.world.backend
        self.taken.append((dict(backend._objects), dict(backend._published)))

    def go_back(self, rounds: int) -> None:
        """The backend as it was before the last rounds; what they sent stays sent."""
        backend = self.world.backend
        objects, published = self.taken[-1 - rounds]
        backend._objects, backend._published = dict(objects), dict(published)


@pytest.mark.parametrize("block", range(4), ids=lambda block: f"R-19-{block}")
def test_rounds_done_again_change_nothing(block: int, tally: Any) -> None:
    """Up to three, over and over, by masters that differ: what they send is there already, to the byte. One that cuts
    its rounds differently finds something else there, says so, and adds nothing."""
    replays, told = 0, 0
    for seed in range(block * 100, (block + 1) * 100):
        chance, world = random.Random(seed), made_world(seed, rows=15)
        copies, coordinator = Copies(world), made_coordinator(world)
        copies.take()
        while coordinator.step().kind != "rest":
            copies.take()
        undisturbed = copy.deepcopy(result_of(world))
        for replay in range(5):
            copies.go_back(chance.randint(1, 3))
            cut = chance.choice([ROUND_RECORDS, ROUND_RECORDS, ROUND_RECORDS, 2])
            again = made_coordinator(
                world,
                late_ms=(replay + 1) * 10 * LEASE_MS,
                turned=chance.random() < 0.5,
                round_records=cut,
            )
            try:
                finish(again)
                assert cut != ROUND_RECORDS or result_of(world) == undisturbed, seed
            except FencedError:
                assert cut != ROUND_RECORDS
                told += 1
            assert world.sink == undisturbed[0]
            replays += 1
    assert 0 < told < replays // 2
    tally(replays, repaired=replays - told, detected=told, seeds=[block * 100, (block + 1) * 100])


# -- two masters and a third, all mixed up -------------------------------------------------------


def mixed(seed: int, *, actors: int, collecting_too: bool) -> tuple[World, list[Actor]]:
    """Masters that each believe to be the one, resumed in random order; some die on the way."""
    chance = random.Random(seed)
    world = made_world()

    def body(number: int) -> Callable[[], None]:
        def run() -> None:
            coordinator = made_coordinator(world, late_ms=number * 2 * LEASE_MS, seed=number)
            finish(coordinator, collecting_too=collecting_too)

        return run

    running = [Actor(f"m{number}", body(number)) for number in range(actors)]
    for actor in running:
        if chance.random() < 0.3:
            actor.kill_at = chance.randrange(len(POINTS))
    # Long stretches of one are as likely as quick changes: a zombie sleeps long, a race is short.
    while alive := [actor for actor in running if not actor.is_done]:
        actor = chance.choice(alive)
        for _ in range(chance.choice((1, 1, 2, 5, 20))):
            if not actor.is_done:
                actor.resume()
    return world, running


@pytest.mark.parametrize("block", range(10), ids=lambda block: f"R-20-{block}")
def test_two_masters_in_any_interleaving_end_as_one(block: int, undisturbed: Any, tally: Any) -> None:
    fenced = 0
    for seed in range(block * 300, (block + 1) * 300):
        world, running = mixed(seed, actors=2, collecting_too=False)
        for actor in running:
            assert actor.outcome is None or isinstance(actor.outcome, (TidegateError, Killed)), (
                seed,
                actor.outcome,
            )
        fenced += any(isinstance(actor.outcome, FencedError) for actor in running)
        assert after_all(world) == undisturbed, f"seed {seed}"
    tally(300, detected=fenced, seeds=[block * 300, (block + 1) * 300])


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("block", range(12), ids=lambda block: f"R-20-soak-{block}")
def test_many_more_interleavings(block: int, undisturbed: Any, tally: Any) -> None:
    """Every order of the steps of two, as many as there are of eight steps each, and a third one in between."""
    for seed in range(100_000 + block * 1100, 100_000 + (block + 1) * 1100):
        world, _ = mixed(seed, actors=2 + seed % 2, collecting_too=False)
        assert after_all(world) == undisturbed, f"seed {seed}"
    tally(1100, seeds=[100_000 + block * 1100, 100_000 + (block + 1) * 1100])


@pytest.mark.parametrize("block", range(4), ids=lambda block: f"R-20-three-{block}")
def test_three_masters_that_also_collect_end_as_one(
    block: int, undisturbed: Any, monkeypatch: pytest.MonkeyPatch, tally: Any
) -> None:
    monkeypatch.setattr(gc, "KEPT", 1)
    for seed in range(10_000 + block * 100, 10_000 + (block + 1) * 100):
        world, running = mixed(seed, actors=3, collecting_too=True)
        for actor in running:
            assert actor.outcome is None or isinstance(actor.outcome, (TidegateError, Killed)), (
                seed,
                actor.outcome,
            )
        assert after_all(world) == undisturbed, f"seed {seed}"
    tally(100, seeds=[10_000 + block * 100, 10_000 + (block + 1) * 100])


def test_of_masters_in_a_row_only_fenced_ones_fail() -> None:
    """What a zombie is told is that it is one, not that something is damaged."""
    told: Counter[str] = Counter()
    for seed in range(300):
        _, running = mixed(seed, actors=2, collecting_too=False)
        told.update(type(actor.outcome).__name__ for actor in running)
    assert set(told) <= {"NoneType", "FencedError", "ConflictError", "Killed"}, told
    assert told["FencedError"] > 20 and told["NoneType"] > 100, told
