"""Random but repeatable traffic for one partition: what clients and a coordinator send, right and wrong.

Each seed gives a topic configuration and a list of operations: plain and compressed batches, idempotent ones with
repeats, gaps, old epochs and wrapped sequences, transactions ended with commit or abort or by a newer epoch.
A broker and the product are given the same list; answers and files must come out equal.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from raw_batches import Row, batch
from workloads import FOREVER, T0

LAST_SEQUENCE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Send:
    """A batch a client sends."""

    raw: bytes
    transactional: bool = False


@dataclass(frozen=True, slots=True)
class End:
    """A transaction marker a coordinator writes."""

    producer_id: int
    producer_epoch: int
    commit: bool
    coordinator_epoch: int


@dataclass(slots=True)
class _Producer:
    number: int
    epoch: int = 0
    sequence: int = 0
    recent: list[Send] = field(default_factory=list)


def random_config(seed: int) -> dict[str, str]:
    """Small log segments with indexes that may be full before them, and everything kept."""
    chance = random.Random(f"config {seed}")
    return {
        "retention.ms": "-1",
        "segment.bytes": str(chance.choice((300, 700, 1500, 4000, 20_000))),
        "index.interval.bytes": str(chance.choice((0, 1, 80, 250, 900))),
        "segment.index.bytes": str(chance.choice((24, 40, 100, 500, 5000))),
        "segment.ms": chance.choice((FOREVER, FOREVER, "3000", "20000")),
        "max.message.bytes": str(chance.choice((1_048_588, 400))),
    }


def random_ops(seed: int, count: int, *, keyed: bool = False) -> list[Send | End]:
    """What is sent, in order; `keyed` for topics that refuse records without a key."""
    chance = random.Random(f"operations {seed}")
    producers = [_Producer(5000 + 10 * seed + at, chance.choice((0, 3))) for at in range(4)]
    producers[3].sequence = LAST_SEQUENCE - 5
    clock = T0 + 10_000 * chance.randrange(100)
    made: list[Send | End] = []
    for _ in range(count):
        clock += chance.choice((0, 1, 40, 900, 900, -700))
        rows = _rows(chance, clock, keyed)
        kind = chance.random()
        if kind < 0.35:
            made.append(Send(batch(rows, gzip=chance.random() < 0.2)))
        elif kind < 0.85:
            made.append(_by_producer(chance, chance.choice(producers), rows))
        else:
            made.append(_end(chance, chance.choice(producers[:2])))
    return made


def last_words(seed: int) -> list[Send | End]:
    """Markers that end whatever transactions the traffic left open, so that nothing holds up a cleaner."""
    return [End(5000 + 10 * seed + at, 30_000, at == 0, 100) for at in range(2)]


def _rows(chance: random.Random, clock: int, keyed: bool) -> list[Row]:
    size = chance.choice((1, 1, 2, 3, 6))
    return [
        Row(
            clock + chance.randrange(-300, 300),
            chance.choice((b"" if keyed else None, b"", *(b"key %d" % chance.randrange(30),) * 6)),
            chance.choice((None, b"v" * chance.randrange(90))),
            (("h", None),) if chance.random() < 0.1 else (),
        )
        for _ in range(size)
    ]


def _by_producer(chance: random.Random, who: _Producer, rows: list[Row]) -> Send:
    """The next batch of a producer, or one it should not send. The first two are transactional."""
    transactional = who.number % 10 < 2 and chance.random() < 0.9
    mistake = chance.random()
    if mistake < 0.12 and who.recent:
        return chance.choice(who.recent)
    epoch, sequence = who.epoch, who.sequence
    if mistake < 0.16:
        sequence = (sequence + 3) % (LAST_SEQUENCE + 1)
    elif mistake < 0.2:
        epoch = max(0, epoch - 1)
    elif mistake < 0.26:
        who.epoch = epoch = epoch + 1
        sequence = 0
        who.recent.clear()
    made = batch(
        rows,
        producer_id=who.number,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=transactional,
    )
    if mistake >= 0.2 or mistake < 0.12:
        who.sequence = (sequence + len(rows)) % (LAST_SEQUENCE + 1)
        who.recent = [*who.recent, Send(made, transactional)][-7:]
    return Send(made, transactional)


def _end(chance: random.Random, who: _Producer) -> End:
    epoch = who.epoch
    if chance.random() < 0.15:
        epoch = max(0, epoch - 1)
    elif chance.random() < 0.15:
        who.epoch = epoch = epoch + 1
        who.sequence = 0
        who.recent.clear()
    return End(who.number, epoch, chance.random() < 0.5, chance.choice((3, 3, 3, 4, 2)))
