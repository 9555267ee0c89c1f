"""The protocol of rounds under death and doubles: real master, real records and lease, a small world around them.

The world is a source log, a sink log and one backend in memory. Work is small and deterministic: counts by key, each
changed count sent on. Every effect is a point at which an actor may be held up while others go on, or die. Whatever the
schedule was, a last master finishes the job, and sink, states, offsets and totals must be those of a run nobody
disturbed (R-17, R-19, R-20).
"""

from __future__ import annotations

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
from tidegate.metrics import Metrics
from tidegate.pipeline.rounds import collecting
from tidegate.pipeline.rounds.collecting import Collector
from tidegate.pipeline.rounds.facts import FlowFacts
from tidegate.pipeline.rounds.generation import Generation
from tidegate.pipeline.rounds.heads import Head
from tidegate.pipeline.rounds.master import Master
from tidegate.pipeline.rounds.opening import Opened
from tidegate.pipeline.rounds.orders import (
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
from tidegate.pipeline.rounds.records import VERSION, CommitRecord, Records, SourceLine
from tidegate.pipeline.rounds.settings import RunSettings
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
        self.outcome: BaseException | None = None
        self.is_done = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._body = body
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Let it run to its next point, or to its end."""
        self._go.release()
        assert self._stopped.acquire(timeout=30), f"{self.name} hangs after {self.points[-3:]}"

    def point(self, what: str) -> None:
        if self.kill_at is not None and len(self.points) == self.kill_at:
            raise Killed(what)
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

    def bytes_per_record(self, topic: str, partitions: int) -> None:
        return None

    def close(self) -> None:
        pass


class CountingEngine:
    """Counts keys. A token is the name of an object that holds the counts; every attempt writes its own."""

    name, slots, processes = "model", 2, 1

    def __init__(self, world: World, failing: Iterator[bool] | None = None) -> None:
        self.world = world
        self._failing = failing

    def place(self, flow: str, task: int) -> int:
        return 0

    def run(self, order: RoundOrder) -> RoundResult:
        sources = {each.partition: each for each in order.sources}
        done = [self._task(order, task, sources.get(task.task)) for task in order.tasks]
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


def made_world(seed: int = 7) -> World:
    chance = random.Random(seed)
    world = World(
        {p: [(f"k{chance.randrange(3)}", i) for i in range(PER_PARTITION)] for p in range(PARTITIONS)}
    )
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
            life="l",
            tick=Tick(0),
            committed_ms=0,
            sources=tuple(SourceLine("counts", p, 0) for p in range(PARTITIONS)),
            tasks=(),
            change="made",
        )
    )
    return world


def made_master(
    world: World, *, late_ms: int = 0, seed: int = 0, failing: Iterator[bool] | None = None
) -> Master:
    """A process: its own clock, lease, copy of the newest commit. `late_ms` later than the ones before it, so that
    it takes their lease while they, by their own clock, still have it."""
    clock = ManualClock(1_000_000 + late_ms)
    records = Records(world.backend, "model")
    generation = Generation(
        world.backend, records, clock=clock, randomness=SeededRandomness(seed), lease_ms=LEASE_MS
    )
    newest = records.newest()
    assert newest is not None
    commit, digest = records.read_commit(newest)
    setup = SimpleNamespace(
        app="model", storage=SimpleNamespace(backlog_limit_bytes=1 << 30), partitions={SINK: PARTITIONS}
    )
    opened = Opened(setup, {"counts": FLOW}, records, generation, commit, digest, Heads(world))  # type: ignore[arg-type]
    settings = RunSettings(round_records=ROUND_RECORDS, until="caught_up")
    master = Master(
        opened,
        CountingEngine(world, failing),
        world.backend,
        world.deliver,
        clock=clock,
        randomness=SeededRandomness(seed),
        metrics=Metrics(),
        settings=settings,
    )
    master._collector = ModelCollector(world.backend, records, clock=clock, grace_ms=1000, every_ms=10**9)
    return master


def finish(master: Master, *, collecting_too: bool = False) -> None:
    for _ in range(50):
        outcome = master.step()
        if collecting_too:
            master.collect()
        if outcome.kind == "rest" and outcome.lag_records == 0:
            master.deliver_outstanding()
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
    finish(made_master(world))
    assert Counter(row.split(b"=")[0] for rows in world.sink.values() for row in rows)
    assert Records(world.backend, "model").newest() == 3
    return result_of(world)


def after_all(world: World) -> Any:
    """Whoever comes last finishes, and the one after finds nothing to do."""
    finish(made_master(world, late_ms=100 * LEASE_MS, seed=98))
    before = result_of(world)
    finish(made_master(world, late_ms=200 * LEASE_MS, seed=99))
    assert result_of(world) == before
    return before


def points_of_a_run() -> list[str]:
    world = made_world()
    actor = Actor("a", lambda: finish(made_master(world)))
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
    actor = Actor("a", lambda: finish(made_master(world)))
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
    monkeypatch.setattr(collecting, "KEPT", 1)
    world = made_world()
    actor = Actor("a", lambda: finish(made_master(world)))
    for _ in range(stall_at + 1):
        actor.resume()
    if not actor.is_done:
        finish(made_master(world, late_ms=10 * LEASE_MS, seed=5), collecting_too=True)
    while not actor.is_done:
        actor.resume()
    assert actor.outcome is None or isinstance(actor.outcome, TidegateError), actor.outcome
    assert after_all(world) == undisturbed


def test_an_attempt_that_fails_is_repeated_from_the_same_plan(undisturbed: Any) -> None:
    for seed in range(40):
        chance = random.Random(seed)
        world = made_world()
        failures = (chance.random() < 0.3 for _ in itertools.count())
        try:
            finish(made_master(world, failing=failures))
        except UnavailableError:
            pass  # too often in a row: the next process goes on
        assert after_all(world) == undisturbed, seed


# -- two masters and a third, all mixed up -------------------------------------------------------


def mixed(seed: int, *, actors: int, collecting_too: bool) -> tuple[World, list[Actor]]:
    """Masters that each believe to be the one, resumed in random order; some die on the way."""
    chance = random.Random(seed)
    world = made_world()

    def body(number: int) -> Callable[[], None]:
        def run() -> None:
            master = made_master(world, late_ms=number * 2 * LEASE_MS, seed=number)
            finish(master, collecting_too=collecting_too)

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
def test_two_masters_in_any_interleaving_end_as_one(block: int, undisturbed: Any) -> None:
    for seed in range(block * 300, (block + 1) * 300):
        world, running = mixed(seed, actors=2, collecting_too=False)
        for actor in running:
            assert actor.outcome is None or isinstance(actor.outcome, (TidegateError, Killed)), (
                seed,
                actor.outcome,
            )
        assert after_all(world) == undisturbed, f"seed {seed}"


@pytest.mark.parametrize("block", range(4), ids=lambda block: f"R-20-three-{block}")
def test_three_masters_that_also_collect_end_as_one(
    block: int, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "KEPT", 1)
    for seed in range(10_000 + block * 100, 10_000 + (block + 1) * 100):
        world, running = mixed(seed, actors=3, collecting_too=True)
        for actor in running:
            assert actor.outcome is None or isinstance(actor.outcome, (TidegateError, Killed)), (
                seed,
                actor.outcome,
            )
        assert after_all(world) == undisturbed, f"seed {seed}"


def test_of_masters_in_a_row_only_fenced_ones_fail() -> None:
    """What a zombie is told is that it is one, not that something is damaged."""
    told: Counter[str] = Counter()
    for seed in range(300):
        _, running = mixed(seed, actors=2, collecting_too=False)
        told.update(type(actor.outcome).__name__ for actor in running)
    assert set(told) <= {"NoneType", "FencedError", "ConflictError", "Killed"}, told
    assert told["FencedError"] > 20 and told["NoneType"] > 100, told
