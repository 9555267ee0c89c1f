"""What a broker refuses, and by which name, we refuse by the same name; what it takes, we store alike."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from bad_batches import SETTINGS, bad_batches, hopeless_batches
from comparing import differences
from kafka_broker import Broker
from kafka_wire import RefusedError, Wire
from our_logs import OurPartition, open_partition

from tidegate.errors import TidegateError

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("interop")]


def told_broker(wire: Wire, topic: str, raw: bytes) -> str:
    try:
        return f"stored at {wire.produce(topic, raw)}"
    except RefusedError as refused:
        return refused.name


def told_us(partition: OurPartition, raw: bytes) -> str:
    try:
        return f"stored at {partition.log.append(raw).first_offset}"
    except TidegateError as refused:
        return refused.kafka_name or str(refused)


def test_bad_batches_are_refused_by_the_same_name(broker: Broker, tmp_path: Path) -> None:
    now_ms = time.time_ns() // 1_000_000
    topics = {f"refusing-{kind}": {"retention.ms": "-1", **config} for kind, config in SETTINGS.items()}
    broker.create_all(topics)
    partitions = {
        topic: open_partition(tmp_path / f"{topic}-0", config, now_ms=now_ms)
        for topic, config in topics.items()
    }
    answers = {}
    with Wire(broker.address) as wire:
        for name, (kind, raw) in bad_batches(now_ms).items():
            topic = f"refusing-{kind}"
            answers[name] = (told_us(partitions[topic], raw), told_broker(wire, topic, raw))
        for name, raw in hopeless_batches(now_ms).items():
            theirs = told_broker(wire, "refusing-ordinary", raw)
            assert theirs in ("UNKNOWN_SERVER_ERROR", "INVALID_RECORD"), name
            assert told_us(partitions["refusing-ordinary"], raw) in ("CORRUPT_MESSAGE", "INVALID_RECORD"), (
                name
            )
    assert {name: pair for name, pair in answers.items() if pair[0] != pair[1]} == {}
    assert len({theirs for _, theirs in answers.values()}) > 8
    broker.stop()
    for topic, partition in partitions.items():
        partition.close()
        assert differences(tmp_path / f"{topic}-0", broker.partition(topic)) == [], topic
    broker.start()
