"""Several replicas of one hybrid partition, in one thread, under a schedule of steps.

The steps are deaths, pauses, clocks that differ, appends that are lost, doubled or late, and a live topic whose
retention removes records. The replicas are the real ones (leases, senders, validators, commits as bytes) over a log
and a backend in memory. Every replica has a clock of its own, so two may believe at once that they hold the lease.

`SimulatedLog` has the surface of the real logs, as far as replicas of tables use it. The caller that made the log
draws the fate of each append (`fate`); a late one waits in `late` until it is told to `land`. As in a cluster, no
lock keeps a second writer out.

The expected answer is computed record by record from the topics, by other code: the high-water mark of every live
producer says which of its records are repeats; the stamps in the version topic say whose records count.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa

from schedules import Step
from tidegate.clock import ManualClock
from tidegate.errors import OffsetOutOfRangeError, UnavailableError
from tidegate.integrity.control_records import LEADERSHIP_GUID, UPSTREAM_KEY, Push
from tidegate.integrity.header import CONTROL_KEY_PREFIX, RecordKind, Stamp
from tidegate.integrity.replica import Role
from tidegate.integrity.sender import SCHEMA, Sender, table_of
from tidegate.integrity.state import Manifest
from tidegate.log.catalog import TopicState
from tidegate.log.format.records import RECORD_SCHEMA, coerce
from tidegate.log.log import numbered
from tidegate.log.writer import Written
from tidegate.metrics import Metrics
from tidegate.randomness import SeededRandomness
from tidegate.storage import open_backend
from tidegate.tables.commits import Lease
from tidegate.tables.hybrid.leader import LONGEST_PAUSE_MS, Leading, Live
from tidegate.tables.hybrid.replica import Following
from tidegate.tables.options import table_rules
from tidegate.tables.snapshot import PartitionState

Fate = Literal["stored", "lost", "unknown", "late", "partly", "dies before", "dies after"]


class SimulatedDeath(BaseException):
    """The process that was writing is no more."""


@dataclass
class Partition:
    """Batches one after the other."""

    batches: list[pa.RecordBatch] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    end: int = 0
    start: int = 0
    """What lies before has aged out: readers do not get it, `rows` does."""


class SimulatedLog:
    """Topics of one partition each."""

    def __init__(self, fate: Callable[[str], Fate] = lambda topic: "stored") -> None:
        self.partitions: dict[str, Partition] = {}
        self.late: list[tuple[str, pa.RecordBatch]] = []
        self.fate = fate
        self.most = 1
        """How many appends a reader gets at once when it does not say."""
        self.max_message_bytes = 1 << 20

    def create_topic(self, name: str) -> None:
        self.partitions[name] = Partition()

    def describe(self, topic: str) -> Any:
        config = SimpleNamespace(
            compacts=False,
            deletes=True,
            min_compaction_lag_ms=0,
            retention_ms=-1,
            retention_bytes=-1,
            max_message_bytes=self.max_message_bytes,
        )
        return SimpleNamespace(name=topic, partitions=1, partition_numbers=(0,), config=config)

    def topic_states(self, topics: Iterable[str]) -> dict[str, TopicState]:
        return {topic: TopicState("", 1) for topic in topics if topic in self.partitions}

    def writer(self, topic: str, *, integrity: bool | Mapping[str, Any] = False, **_: Any) -> Any:
        writer = _Writer(self, topic)
        return numbered(writer, integrity) if integrity is not False else writer

    def reader(self, topic: str, *_: Any, start: Any = "earliest", stop: Any = None, **__: Any) -> _Reader:
        return _Reader(self, topic, start, stop)

    def store(self, topic: str, rows: pa.RecordBatch) -> Written:
        """Append for good."""
        partition = self.partitions[topic]
        count, first = rows.num_rows, partition.end
        names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([topic]))
        columns = {
            "topic": names,
            "partition": pa.array(np.zeros(count, np.int32)),
            "offset": pa.array(np.arange(first, first + count)),
        }
        columns |= {name: rows.column(name) for name in ("timestamp", "key", "value", "headers")}
        partition.batches.append(
            pa.RecordBatch.from_arrays([columns[each.name] for each in RECORD_SCHEMA], schema=RECORD_SCHEMA)
        )
        partition.firsts.append(first)
        partition.end += count
        return Written(0, first, partition.end - 1, -1, -1, False, rows.nbytes)

    def append(self, topic: str, rows: pa.RecordBatch) -> Written:
        """Append, or have happen to it what its fate is."""
        fate = self.fate(topic)
        if fate == "dies before":
            raise SimulatedDeath
        if fate in ("stored", "unknown", "dies after"):
            written = self.store(topic, rows)
            if fate == "stored":
                return written
            if fate == "dies after":
                raise SimulatedDeath
        elif fate == "late":
            self.late.append((topic, rows))
        elif fate == "partly":
            cut = rows.num_rows // 2
            if cut:
                self.store(topic, rows.slice(0, cut))
            self.late.append((topic, rows.slice(cut)))
        raise UnavailableError(f"simulated: an append to {topic} was {fate}")

    def land(self, choice: int) -> None:
        """One of the late appends arrives after all; those of one writer in their order."""
        if self.late:
            self.store(*self.late.pop(choice % len(self.late)))

    def rows(self, topic: str) -> list[dict[str, Any]]:
        return [row for batch in self.partitions[topic].batches for row in batch.to_pylist()]


class _Writer:
    def __init__(self, log: SimulatedLog, topic: str) -> None:
        self._log, self.topic, self.partitions = log, topic, 1

    def write(self, table: Any, *, partition: int | None = None) -> list[Written]:
        rows = table_of(coerce(table)) if table.schema != SCHEMA else table
        return [self._log.append(self.topic, rows)]

    def close(self) -> None:
        """Nothing is held."""


class _Reader:
    def __init__(self, log: SimulatedLog, topic: str, start: Any, stop: Any) -> None:
        self._log, self._partition, self.topic = log, log.partitions[topic], topic
        self._stop = None if stop is None else stop[0]
        self._next = self._resolve(start)

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        while (found := self.poll()) is not None:
            yield found

    def poll(self, timeout: int = 0, *, most: int = 0) -> pa.RecordBatch | None:
        """The next records, of up to `most` appends."""
        if self._next < self._partition.start:
            raise OffsetOutOfRangeError(
                f"simulated: {self.topic} has aged out up to {self._partition.start}",
                offset=self._next,
                first=self._partition.start,
                end=self._partition.end,
            )
        end = self._partition.end if self._stop is None else min(self._stop, self._partition.end)
        firsts, most = self._partition.firsts, most or self._log.most
        found: list[pa.RecordBatch] = []
        for number in range(max(0, bisect_right(firsts, self._next) - 1), len(firsts)):
            if self._next >= end or len(found) == most:
                break
            batch, start = self._partition.batches[number], self._next - firsts[number]
            found.append(batch.slice(start, min(batch.num_rows, end - firsts[number]) - start))
            self._next += found[-1].num_rows
        if len(found) > 1:
            return pa.Table.from_batches(found).combine_chunks().to_batches()[0]
        return found[0] if found else None

    def positions(self) -> dict[int, int]:
        return {0: self._next}

    def end_offsets(self) -> dict[int, int]:
        return {0: self._partition.end}

    def close(self) -> None:
        """Nothing is held."""

    def _resolve(self, start: Any) -> int:
        if isinstance(start, Mapping):
            return int(start[0])
        if start in ("earliest", "latest"):
            return self._partition.start if start == "earliest" else self._partition.end
        wanted = int(str(start).removeprefix("@"))
        for batch in self._partition.batches:
            times: Sequence[int] = batch.column("timestamp").view(pa.int64()).to_pylist()
            for row, time in enumerate(times):
                if time >= wanted:
                    return int(batch.column("offset")[row].as_py())
        return self._partition.end


VERSION, LIVE = "users_v1", "users-live"
TTL_MS: Final = 1000
START_MS: Final = 1_767_225_600_000
KEYS: Final = 5
WEIGHTS: Final = {
    "live": 6, "repeat": 2, "drain": 20, "lead": 32, "commit": 4, "die": 1, "revive": 6, "tick": 10, "land": 4,
    "age": 2,
}  # fmt: skip
STORED: Final[tuple[Fate, ...]] = ("stored",) * 24
FATES: Final[tuple[Fate, ...]] = (
    *STORED, "lost", "unknown", "unknown", "late", "late", "late", "partly", "dies before", "dies after",
)  # fmt: skip
Rows = dict[bytes, bytes]


class Node:
    """A process: what it has in memory, and what it committed."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.clock = ManualClock(START_MS + 100_000 + 137 * number)
        self.committed: tuple[Rows, bytes] = ({}, b"")
        self.is_alive = False
        self.taken: list[tuple[bytes, int]] = []
        """Key and upstream offset of every live record it stored, in this life."""
        self.revive()

    def revive(self) -> None:
        if self.is_alive:
            return
        rows, extra = self.committed
        self.rows, self.is_alive, self.taken = dict(rows), True, []
        self.state = PartitionState(self.world.shape, 0)
        self.state.restore_progress(extra)
        now_ms = self.clock.now_ms()
        self.following = Following(self.world.log, self.state, now_ms=now_ms, metrics=Metrics())
        self.leading = Leading(
            self.world.log,
            self.following,
            self.world.live,
            lambda: Lease(
                self.world.backend,
                "leader",
                clock=self.clock,
                randomness=self.world.randomness,
                ttl_ms=TTL_MS,
            ),
            clock=self.clock,
            randomness=self.world.randomness,
        )

    def drain(self, most: int = 1 << 20) -> bool:
        """Take what there is of the version topic, up to so many appends, as one piece."""
        reader = self.world.log.reader(VERSION, start={0: self.state.next_offset}, control_records=True)
        records = reader.poll(most=most)
        if records is None:
            return False
        self.following.drain(records, self.clock.now_ms(), self._put, lambda *_: None)
        self.state.next_offset = reader.positions()[0]
        return True

    def lead(self) -> bool:
        try:
            return self.leading.step()
        except SimulatedDeath:
            self.die()
            return True

    def commit(self) -> None:
        self.committed = (dict(self.rows), self.state.encode_progress())

    def die(self) -> None:
        """Nothing of what is in memory is left, and nobody is told."""
        self.is_alive = False

    def _put(self, kept: pa.RecordBatch) -> None:
        for row in kept.to_pylist():
            if row["value"] is None:
                self.rows.pop(row["key"], None)
            else:
                self.rows[row["key"]] = row["value"]
            upstream = [header["value"] for header in row["headers"] if header["key"] == UPSTREAM_KEY]
            if upstream:
                self.taken.append((row["key"], int.from_bytes(upstream[0], "big")))


class World:
    """One partition, its replicas and what happens to them."""

    def __init__(self, seed: int, nodes: int = 3) -> None:
        self.randomness = SeededRandomness(seed)
        self.is_rough = False
        self.log = SimulatedLog(self._fate)
        self.backend = open_backend("memory://")
        self.shape = table_rules("key", VERSION, (0,)).shape
        self.live = Live(
            LIVE,
            10_000,
            state_bytes=1 + self.randomness.below(4000),
            state_ms=1 + self.randomness.below(5000),
            hold_ms=0,
        )
        self.log.max_message_bytes = (64, 300, 1 << 20)[
            self.randomness.below(3)
        ]  # states in many parts, in few, whole
        for topic in (VERSION, LIVE):
            self.log.create_topic(topic)
        self.live_clock = ManualClock(START_MS)
        self.senders = [
            Sender(self.log.writer(LIVE), clock=self.live_clock, randomness=self.randomness) for _ in range(2)
        ]
        self.written = 0
        self.write_live(3, 0)  # before the rewind: not for this version
        self.live_clock.advance(60_000)
        self._push()
        self.write_live(4, 1)
        self.nodes = [Node(self, number) for number in range(nodes)]
        self.is_rough = True

    def run(self, steps: list[Step]) -> None:
        """A schedule, and then peace until everything has come to rest.

        Then the live topic lets go of what it can, every replica dies, and its producers send old records again.
        """
        for step in steps:
            self._do(step)
        self._rest()
        self._age()
        for node in self.nodes:
            node.die()
        for _ in range(3):
            self._repeat(self.randomness.below(1 << 16))
        self._rest()

    def _rest(self) -> None:
        self.is_rough, self.log.most = False, 1 << 20
        for _ in range(len(self.log.late)):
            self.log.land(self.randomness.below(1 << 16))
        for node in self.nodes:
            node.revive()
        quiet = 0
        for _ in range(200):
            for node in self.nodes:
                node.clock.advance(TTL_MS // 2)
            moved = [node.drain() | node.lead() for node in self.nodes]
            quiet = 0 if any(moved) else quiet + 1
            if quiet * TTL_MS // 2 > LONGEST_PAUSE_MS + TTL_MS:  # longer than any lease or pause
                break
        else:
            raise AssertionError("the replicas do not come to rest")

    def check(self) -> None:
        """Every replica has the answer, and so has one that reads the version topic for the first time."""
        expected, copied = self.answer()
        leaders = [node for node in self.nodes if node.leading.role is Role.LEADER]
        assert leaders, "nobody leads"
        fresh = Node(self, len(self.nodes))
        fresh.drain()
        for node in (*self.nodes, fresh):
            assert node.rows == expected, f"replica {node.number} holds other rows"
            assert node.following.upstream.leadership == fresh.following.upstream.leadership
        assert [offset for _, offset in fresh.taken] == copied, "a record was lost, or is there twice"
        assert fresh.following.upstream.copied == len(copied)
        assert counting(self.log.rows(VERSION)) == copied, "a record counts that is not its epoch's leader's"

    def answer(self) -> tuple[Rows, list[int]]:
        """The table that an undisturbed life gives, and the live offsets that belong in it, one after the other."""
        since = self.pushed_ms - self.live.rewind_ms
        rows: Rows = {b"key-%d" % number: b"pushed" for number in range(KEYS)}
        return undisturbed(rows, self.log.rows(LIVE), since)

    @property
    def epochs(self) -> int:
        """How many leaders there were."""
        return sum(_stamp(record).guid == LEADERSHIP_GUID for record in self.log.rows(VERSION))

    # -- steps -----------------------------------------------------------------------------------

    def write_live(self, count: int, sender: int) -> None:
        rows = []
        for _ in range(count):
            self.written += 1
            value = None if self.written % 7 == 0 else json.dumps(self.written).encode()
            rows.append((b"key-%d" % (self.written % KEYS), value))
        keys, values = zip(*rows, strict=True)
        now_ms = self.live_clock.now_ms()
        self.senders[sender % len(self.senders)].write(
            pa.table(
                {
                    "key": pa.array(keys, pa.binary()),
                    "value": pa.array(values, pa.binary()),
                    "timestamp": pa.array([now_ms] * count, pa.timestamp("ms", tz="UTC")),
                }
            )
        )

    def _do(self, step: Step) -> None:
        node = self.nodes[step.a % len(self.nodes)]
        if step.name == "live":
            self.live_clock.advance(10)
            self.write_live(1 + step.b % 3, step.c)
        elif step.name == "repeat":
            self._repeat(step.b)
        elif step.name == "land":
            self.log.land(step.b)
        elif step.name == "age":
            self._age()
        elif step.name == "tick":
            node.clock.advance(step.b % (3 * TTL_MS))
        elif step.name == "revive":
            node.revive()
        elif node.is_alive:
            {
                "drain": lambda: node.drain(1 + step.b % 4),
                "lead": node.lead,
                "commit": node.commit,
                "die": node.die,
            }[step.name]()

    def _repeat(self, choice: int) -> None:
        """A live producer sends again what it sent before, as after an acknowledgement that got lost."""
        batches = self.log.partitions[LIVE].batches
        again = batches[choice % len(batches)]
        names = ("key", "value", "timestamp", "headers")
        self.log.store(LIVE, pa.RecordBatch.from_arrays([again.column(name) for name in names], list(names)))

    def _age(self) -> None:
        """The live topic lets go of all that a replica was told a state behind: that must be enough for any leader."""
        told = max(node.following.upstream.state_offset for node in self.nodes)
        live = self.log.partitions[LIVE]
        live.start = max(live.start, told)

    def _fate(self, topic: str) -> Fate:
        return FATES[self.randomness.below(len(FATES))] if self.is_rough and topic == VERSION else "stored"

    def _push(self) -> None:
        clock = self.live_clock
        with Sender(self.log.writer(VERSION), clock=clock, randomness=self.randomness) as driver:
            push = Push(driver)
            push.start()
            with Sender(self.log.writer(VERSION), clock=clock, randomness=self.randomness) as task:
                keys = [b"key-%d" % number for number in range(KEYS)]
                task.write(pa.table({"key": keys, "value": [b"pushed"] * KEYS}))
            push.end({0: Manifest.of(list(task.sent().values()))})
        self.pushed_ms = clock.now_ms()


def undisturbed(pushed: Rows, live: Iterable[dict[str, Any]], since_ms: int) -> tuple[Rows, list[int]]:
    """What pushed rows and a live partition come to, and the live offsets that count: a producer's repeats do not."""
    rows, marks, copied, is_before = dict(pushed), {}, [], True  # type: ignore[var-annotated]
    for record in live:
        stamp = _stamp(record)
        is_before &= record["timestamp"].timestamp() * 1000 < since_ms
        mark = (stamp.chain, stamp.sequence)
        if is_before or mark <= marks.get(stamp.guid, (-1, -1)):
            continue
        marks[stamp.guid] = mark
        if stamp.kind == RecordKind.CONTROL:
            continue
        copied.append(record["offset"])
        if record["value"] is None:
            rows.pop(record["key"], None)
        else:
            rows[record["key"]] = record["value"]
    return rows, copied


def counting(version: Iterable[dict[str, Any]]) -> list[int]:
    """The live offsets of a version partition's records that count, by the stamps in front of them."""
    return [offset for _, offset, counts in led(version) if counts]


def leaders(version: Iterable[dict[str, Any]]) -> dict[int, set[bytes]]:
    """Who ever stamped an epoch of a version partition: with leases that work, one in each."""
    found: dict[int, set[bytes]] = {}
    for record in version:
        claimed = _claimed(record)
        if claimed is not None:
            found.setdefault(claimed[0], set()).add(claimed[1])
    return found


def led(version: Iterable[dict[str, Any]]) -> Iterator[tuple[int, int, bool]]:
    """Of every record that a leader copied: the epoch in force, the live offset, and whether it counts."""
    epoch, guid, marks = 0, b"", {}  # type: ignore[var-annotated]
    for record in version:
        stamp, claimed = _stamp(record), _claimed(record)
        if claimed is not None:
            epoch, guid = max((epoch, guid), claimed, key=lambda each: each[0])
            continue
        counts = stamp.guid == guid and (stamp.chain, stamp.sequence) > marks.get(guid, (-1, -1))
        if counts:
            marks[guid] = (stamp.chain, stamp.sequence)
        upstream = [each["value"] for each in record["headers"] if each["key"] == UPSTREAM_KEY]
        if upstream:
            yield epoch, int.from_bytes(upstream[0], "big"), counts


def _claimed(record: dict[str, Any]) -> tuple[int, bytes] | None:
    """The epoch and the leader of a leadership stamp; None of any other record."""
    if _stamp(record).guid != LEADERSHIP_GUID:
        return None
    key = record["key"][len(CONTROL_KEY_PREFIX) :]
    return int.from_bytes(key[16:20], "big") << 31 | int.from_bytes(key[20:24], "big"), key[:16]


def _stamp(record: dict[str, Any]) -> Stamp:
    return Stamp.from_bytes(next(each["value"] for each in record["headers"] if each["key"] == "div"))
