"""Several replicas of one hybrid partition, in one thread, under a schedule of steps.

Deaths, pauses, clocks that differ, appends that are lost, doubled or late, a live topic that lets go of records; and
what an undisturbed life would have made of the same records.

The replicas are the real ones (`following`, `leading`, leases, senders, validators, commits as bytes) over a log and a
backend in memory. Every replica has a clock of its own, so two may well believe at once to hold the lease.

The answer is worked out record by record from the topics, by other code: the high-water mark of every live producer
says which of its records are repeats; the stamps in the version topic say whose records count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa

from tidegate.clock import ManualClock
from tidegate.integrity.control_records import LEADERSHIP_GUID, UPSTREAM_KEY, Push
from tidegate.integrity.header import CONTROL_KEY_PREFIX, RecordKind, Stamp
from tidegate.integrity.replica import Role
from tidegate.integrity.sender import Sender
from tidegate.integrity.state import Manifest
from tidegate.metrics import Metrics
from tidegate.randomness import SeededRandomness
from tidegate.storage import open_backend
from tidegate.tables.building.lease import Lease
from tidegate.tables.building.partition_state import PartitionState
from tidegate.tables.building.shape import table_rules
from tidegate.tables.replicas.following import Following
from tidegate.tables.replicas.leading import LONGEST_PAUSE_MS, Leading, Live
from tidegate.testing.schedules import Step
from tidegate.testing.simulated_log import Fate, SimulatedDeath, SimulatedLog

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
