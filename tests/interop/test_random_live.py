"""The same random traffic for a broker and for us: the same answers, files, recoveries and cleanings."""

from __future__ import annotations

import random
import shutil
import time
from collections import deque
from pathlib import Path

import pytest
from comparing import differences
from damages import cut, flip, last_log
from kafka_broker import Broker, read_lines
from kafka_home import KafkaHome, until
from kafka_wire import RefusedError, Wire
from our_logs import NOW_MS, OurPartition, cleaning_time, open_partition, same_cleaning
from random_ops import End, Send, last_words, random_config, random_ops
from raw_batches import CONTROL, heads, marker, stored_batches

from tidegate.errors import TidegateError
from tidegate.log.producer_state import Origin

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("interop")]

CHECKPOINT = "recovery-point-offset-checkpoint"
LONG = pytest.mark.timeout(7200)
NO_RETENTION = {"log.initial.task.delay.ms": "600000"}


def told_broker(wire: Wire, topic: str, operation: Send | End) -> str:
    """What the broker answers."""
    try:
        if isinstance(operation, Send):
            identity = "random" if operation.transactional else None
            return str(wire.produce(topic, operation.raw, transactional_id=identity))
        wire.write_marker(
            topic,
            producer_id=operation.producer_id,
            producer_epoch=operation.producer_epoch,
            commit=operation.commit,
            coordinator_epoch=operation.coordinator_epoch,
        )
        return "written"
    except RefusedError as refused:
        return refused.name


def told_us(partition: OurPartition, operation: Send | End, times: deque[int]) -> str:
    """What we answer; markers take the time the broker gave them."""
    before = partition.log.log_end_offset
    try:
        if isinstance(operation, Send):
            return str(partition.log.append(operation.raw).first_offset)
        made = marker(
            operation.commit,
            producer_id=operation.producer_id,
            producer_epoch=operation.producer_epoch,
            coordinator_epoch=operation.coordinator_epoch,
            timestamp=times[0],
        )
        partition.log.append(made, origin=Origin.COORDINATOR)
        if len(times) > 1:  # a refused marker has no recorded time; the nearest one will do
            times.popleft()
        return "written"
    except TidegateError as refused:
        assert partition.log.log_end_offset == before
        return refused.kafka_name or str(refused)
    finally:
        partition.log.acknowledge(sync=False)


# -- the same answers and files --------------------------------------------------------------------


def test_random_traffic(broker: Broker, tmp_path: Path) -> None:
    compare_traffic(broker, tmp_path, seeds=range(1, 11), count=150)


@pytest.mark.soak
@LONG
def test_much_random_traffic(broker: Broker, tmp_path: Path) -> None:
    for first in range(1000, 3000, 50):
        compare_traffic(broker, tmp_path / str(first), seeds=range(first, first + 50), count=400)


def compare_traffic(broker: Broker, folder: Path, *, seeds: range, count: int) -> None:
    configs = {f"random-{seed}": random_config(seed) for seed in seeds}
    broker.create_all(configs)
    answers: dict[str, list[str]] = {}
    with Wire(broker.address) as wire:
        for seed, topic in zip(seeds, configs, strict=True):
            answers[topic] = [told_broker(wire, topic, operation) for operation in random_ops(seed, count)]
    broker.stop()
    stopped = keep(broker, configs, folder / "stopped")
    broker.start()
    for seed, (topic, config) in zip(seeds, configs.items(), strict=True):
        theirs, ours = stopped / f"{topic}-0", folder / "ours" / f"{topic}-0"
        partition = open_partition(ours, config)
        markers = [head for head, _ in stored_batches(theirs) if head.attributes & CONTROL]
        times = deque([head.max_timestamp for head in markers] or [NOW_MS])
        for number, operation in enumerate(random_ops(seed, count)):
            answer = told_us(partition, operation, times)
            assert answer == answers[topic][number], f"seed {seed}, operation {number}: {operation}"
        partition.close()
        assert differences(ours, theirs) == [], f"seed {seed}"


def keep(broker: Broker, topics: dict[str, dict[str, str]], target: Path) -> Path:
    for topic in topics:
        shutil.copytree(broker.partition(topic), target / f"{topic}-0")
    return target


# -- the same recoveries ---------------------------------------------------------------------------


def test_random_damage(kafka: KafkaHome, tmp_path: Path) -> None:
    compare_damage(kafka, tmp_path, seeds=range(100, 120), count=60)


@pytest.mark.soak
@LONG
def test_much_random_damage(kafka: KafkaHome, tmp_path: Path) -> None:
    for first in range(4000, 6000, 100):
        compare_damage(kafka, tmp_path / str(first), seeds=range(first, first + 100), count=150)


def compare_damage(kafka: KafkaHome, folder: Path, *, seeds: range, count: int) -> None:
    broker = Broker(kafka, folder / "broker", NO_RETENTION).start()
    # Room in the index, because a broker that has to rebuild a fuller one than fits does not start.
    configs = {f"damaged-{seed}": {**random_config(seed), "segment.index.bytes": "9600"} for seed in seeds}
    broker.create_all(configs)
    with Wire(broker.address) as wire:
        for seed, topic in zip(seeds, configs, strict=True):
            for operation in random_ops(seed, count):
                told_broker(wire, topic, operation)
    broker.kill()
    for seed, topic in zip(seeds, configs, strict=True):
        damage(broker.partition(topic), random.Random(seed))
    crashed = keep(broker, configs, folder / "crashed")
    now_ms = time.time_ns() // 1_000_000
    broker.start()
    broker.stop()
    ends = read_lines(broker.data / CHECKPOINT)
    for seed, (topic, config) in zip(seeds, configs.items(), strict=True):
        ours = crashed / f"{topic}-0"
        partition = open_partition(ours, config, clean=False, now_ms=now_ms)
        assert partition.log.log_end_offset == ends[topic, 0], f"seed {seed}"
        partition.close()
        assert differences(ours, broker.partition(topic)) == [], f"seed {seed}"


def damage(folder: Path, chance: random.Random) -> None:
    """Tear the end, or flip a bit of the bytes a checksum covers, anywhere; now and then lose an index."""
    log = last_log(folder)
    kind = chance.randrange(4)
    if kind == 0:
        cut(log, chance.randrange(log.stat().st_size))
    elif kind == 1:
        victim = chance.choice([path for path in folder.glob("*.log") if path.stat().st_size])
        head = chance.choice(list(heads(victim.read_bytes())))
        flip(victim, head.position + chance.randrange(21, head.size))
    elif kind == 2:
        for path in list(folder.glob(chance.choice(("*.index", "*.timeindex", "*.snapshot", "*.txnindex")))):
            path.unlink()


# -- the same cleanings ----------------------------------------------------------------------------


def test_random_compaction(broker: Broker, tmp_path: Path) -> None:
    compare_compaction(broker, tmp_path, seeds=range(200, 205), count=120)


@pytest.mark.soak
@LONG
def test_much_random_compaction(broker: Broker, tmp_path: Path) -> None:
    for first in range(7000, 8000, 50):
        compare_compaction(broker, tmp_path / str(first), seeds=range(first, first + 50), count=250)


def compare_compaction(broker: Broker, folder: Path, *, seeds: range, count: int) -> None:
    """Two rounds of traffic and cleaning; the second begins with what the broker's first one left."""
    configs = {f"compacted-{seed}": {**random_config(seed), **compacting(seed)} for seed in seeds}
    broker.create_all(configs)
    for turn in range(2):
        with Wire(broker.address) as wire:
            for seed, topic in zip(seeds, configs, strict=True):
                made = random_ops(seed + 10_000 * turn, count, keyed=True)
                for operation in [*made, *last_words(seed + 10_000 * turn)]:
                    told_broker(wire, topic, operation)
        broker.stop()
        dirty = keep(broker, configs, folder / f"dirty-{turn}")
        before = read_lines(broker.data / "cleaner-offset-checkpoint")
        broker.start()
        started = clean_all(broker, list(configs))
        broker.stop()
        cleaned = keep(broker, configs, folder / f"cleaned-{turn}")
        after = read_lines(broker.data / "cleaner-offset-checkpoint")
        for topic, config in configs.items():
            ours, theirs = dirty / f"{topic}-0", cleaned / f"{topic}-0"
            now_ms = cleaning_time(theirs, int(config["delete.retention.ms"]), started)
            partition = open_partition(ours, config, now_ms=now_ms)
            report = partition.compact(before.get((topic, 0)))
            assert report.next_dirty == after.get((topic, 0), report.next_dirty), topic
            partition.close()
            assert same_cleaning(ours, theirs) == [], f"{topic}, round {turn}"
        broker.start()
        for topic in configs:
            broker.alter(topic, {"min.cleanable.dirty.ratio": "1"})


def compacting(seed: int) -> dict[str, str]:
    chance = random.Random(f"compacting {seed}")
    return {
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": "1",
        "delete.retention.ms": chance.choice(("1", "1", "86400000")),
        "segment.index.bytes": "9600",
        "segment.bytes": chance.choice(("500", "1500")),
    }


def clean_all(broker: Broker, topics: list[str]) -> int:
    """Wake the cleaner for these topics and wait until each has been cleaned once; when that began."""
    started = time.time_ns() // 1_000_000
    for topic in topics:
        broker.alter(topic, {"min.cleanable.dirty.ratio": "0"})
    for topic in topics:
        folder = broker.partition(topic)
        until(lambda: f"cleaned log {topic}-0 " in broker.output(), f"{topic} to be cleaned")  # noqa: B023
        until(lambda: not [*folder.glob("*.deleted"), *folder.glob("*.swap")], "files to go")  # noqa: B023
    return started
