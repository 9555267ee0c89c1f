"""Topics a broker compacts or ages out, stage by stage: fill, let it clean, add more, let it clean again.

A dirty ratio of 1 is never exceeded, so a topic rests until a step lowers it; one pass later nothing is
dirty.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from confluent_kafka import Producer
from kafka_broker import Broker
from kafka_home import until
from kafka_wire import Wire
from raw_batches import Row, batch
from workloads import CODECS, FOREVER, T0

Step = Callable[[Broker, Wire, str], "Stage"]
DAY = 86_400_000


@dataclass(slots=True)
class Stage:
    """How a folder came to be: what was done, under which settings, and about when.

    `clean` stages are what the broker made of the stage before with these settings and nothing else.
    """

    action: str
    config: dict[str, str] = field(default_factory=dict)
    now_ms: int = 0
    log_start: int = 0
    first_dirty: int | None = None

    def facts(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Cleaning:
    """A topic and the steps it goes through; the broker is stopped and the folder kept after each."""

    steps: tuple[Step, ...]
    config: Mapping[str, str]

    @property
    def settings(self) -> dict[str, str]:
        return {"retention.ms": "-1", "segment.ms": FOREVER, **self.config}


# -- filling ---------------------------------------------------------------------------------------


def keyed(seed: int, count: int, *, producers: tuple[int, ...] = (-1,)) -> Step:
    """Batches over few keys, a third of the later ones tombstones; producers go on where they were."""

    def step(_: Broker, wire: Wire, topic: str) -> Stage:
        chance = random.Random(seed)
        sequences = dict.fromkeys(producers, 0)
        for index in range(count):
            producer = producers[index % len(producers)]
            rows = [
                Row(
                    T0 + 1000 * (1000 * seed + index) + delta,
                    b"k%02d" % chance.randrange(24),
                    None if index > count // 2 and chance.random() < 0.33 else b"%d.%d" % (seed, index) * 3,
                )
                for delta in range(chance.choice((1, 2, 3, 5)))
            ]
            if producer < 0:
                wire.produce(topic, batch(rows))
                continue
            # Each fill is a new epoch of its producers, which has to begin at sequence 0.
            sent = batch(rows, producer_id=producer, producer_epoch=seed, base_sequence=sequences[producer])
            wire.produce(topic, sent)
            sequences[producer] += len(rows)
        return Stage("fill")

    return step


def transactional(seed: int) -> Step:
    """Committed and aborted transactions over few keys, ended by several markers in a row."""

    def step(_: Broker, wire: Wire, topic: str) -> Stage:
        chance = random.Random(seed)
        sequences = {61: 0, 62: 0, 63: 0}
        is_open: set[int] = set()
        for index in range(48):
            producer = 61 + index % 3
            rows = [
                Row(
                    T0 + 1000 * (1000 * seed + index),
                    b"k%02d" % chance.randrange(12),
                    None if chance.random() < 0.2 else b"%d" % index * 4,
                )
                for _ in range(2)
            ]
            sent = batch(
                rows,
                producer_id=producer,
                producer_epoch=seed,
                base_sequence=sequences[producer],
                transactional=True,
            )
            wire.produce(topic, sent, transactional_id=f"id-{producer}")
            sequences[producer] += 2
            is_open.add(producer)
            if index % 5 == 4:
                end(wire, topic, producer, seed, commit=index % 10 == 4)
                is_open.discard(producer)
        for producer in sorted(is_open):
            end(wire, topic, producer, seed, commit=producer != 62)
        return Stage("fill")

    return step


def end(wire: Wire, topic: str, producer: int, epoch: int, *, commit: bool) -> None:
    wire.write_marker(topic, producer_id=producer, producer_epoch=epoch, commit=commit)


def compressed(seed: int) -> Step:
    """Idempotent clients, one per codec, over shared keys."""

    def step(broker: Broker, _: Wire, topic: str) -> Stage:
        chance = random.Random(seed)
        clients = [
            Producer(
                {
                    "bootstrap.servers": broker.address,
                    "compression.type": codec,
                    "linger.ms": 2000,
                    "enable.idempotence": True,
                }
            )
            for codec in CODECS
        ]
        for index in range(20):
            client = clients[index % len(clients)]
            for delta in range(8):
                client.produce(
                    topic,
                    key=b"k%02d" % chance.randrange(30),
                    value=None if chance.random() < 0.15 else b"%d.%d " % (seed, index) * 6,
                    timestamp=T0 + 1000 * (1000 * seed + index) + delta,
                    headers={"n": str(index)} if delta % 3 == 0 else None,
                )
            client.flush(30)
        return Stage("fill")

    return step


# -- cleaning --------------------------------------------------------------------------------------


def rest(step: Step) -> Step:
    """First make the topic rest, then take the step."""

    def resting(broker: Broker, wire: Wire, topic: str) -> Stage:
        arrived = f"Updating topic {topic} with new configuration"
        before = broker.output().count(arrived)
        broker.alter(topic, {"min.cleanable.dirty.ratio": "1"})
        until(lambda: broker.output().count(arrived) > before, f"the new configuration of {topic}")
        return step(broker, wire, topic)

    return resting


def compact(broker: Broker, _: Wire, topic: str) -> Stage:
    """Wake the cleaner and wait until it has made one pass."""
    done = f"cleaned log {topic}-0 "
    before = broker.output().count(done)
    config = {"min.cleanable.dirty.ratio": "0"}
    now_ms = time.time_ns() // 1_000_000
    broker.alter(topic, config)
    until(lambda: broker.output().count(done) > before, f"a pass of the cleaner over {topic}")
    gone(broker, topic)
    return Stage("clean", config, now_ms)


def age_out(key: str, value: Callable[[int], int]) -> Step:
    """Set a retention key and wait until log segments have gone."""

    def step(broker: Broker, _: Wire, topic: str) -> Stage:
        folder = broker.partition(topic)
        before = len(list(folder.glob("*.log")))
        now_ms = time.time_ns() // 1_000_000
        config = {key: str(value(now_ms))}
        broker.alter(topic, config)
        until(lambda: len(list(folder.glob("*.log"))) < before, f"{key} to delete something of {topic}")
        gone(broker, topic)
        return Stage("clean", config, now_ms)

    return step


def delete_before(offset: int) -> Step:
    def step(broker: Broker, wire: Wire, topic: str) -> Stage:
        wire.delete_records(topic, offset)
        folder = broker.partition(topic)
        until(lambda: int(min(folder.glob("*.log")).stem) > 0, f"the start of {topic} to move")
        gone(broker, topic)
        return Stage("delete-records", {"offset": str(offset)}, time.time_ns() // 1_000_000)

    return step


def gone(broker: Broker, topic: str) -> None:
    folder = broker.partition(topic)
    until(lambda: not list(folder.glob("*.deleted")) and not list(folder.glob("*.swap")), "files to go")


COMPACT = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "1",
    "segment.bytes": "2000",
    "segment.index.bytes": "1200",
    "index.interval.bytes": "300",
}
DELETE = {"segment.bytes": "1500", "segment.index.bytes": "240", "index.interval.bytes": "200"}

CLEANINGS: dict[str, Cleaning] = {
    "compact-plain": Cleaning(
        (keyed(1, 60), compact, rest(keyed(2, 30)), compact), {**COMPACT, "delete.retention.ms": "1"}
    ),
    "compact-horizon-far": Cleaning(
        (keyed(1, 60), compact, rest(keyed(2, 30)), compact), {**COMPACT, "delete.retention.ms": str(DAY)}
    ),
    "compact-producers": Cleaning(
        (keyed(1, 60, producers=(51, 52, -1, 53)), compact, rest(keyed(2, 30, producers=(51, -1))), compact),
        {**COMPACT, "delete.retention.ms": "1"},
    ),
    "compact-transactions": Cleaning(
        (transactional(1), compact, rest(transactional(2)), compact, rest(keyed(3, 20)), compact),
        {**COMPACT, "delete.retention.ms": "1"},
    ),
    "compact-codecs": Cleaning(
        (compressed(1), compact, rest(compressed(2)), compact), {**COMPACT, "delete.retention.ms": "1"}
    ),
    "retention-bytes": Cleaning((keyed(1, 60), age_out("retention.bytes", lambda now: 3100)), DELETE),
    "retention-time": Cleaning(
        (keyed(1, 60), age_out("retention.ms", lambda now: now - (T0 + 1000 * 1030))), DELETE
    ),
    "retention-all": Cleaning((keyed(1, 60), age_out("retention.ms", lambda now: DAY)), DELETE),
    "retention-start": Cleaning((keyed(1, 60), delete_before(70)), DELETE),
    "retention-compacted": Cleaning(
        (
            keyed(1, 60),
            compact,
            age_out("retention.ms", lambda now: now - (T0 + 1000 * 1040)),
        ),
        {**COMPACT, "cleanup.policy": "compact,delete", "delete.retention.ms": str(DAY)},
    ),
}
