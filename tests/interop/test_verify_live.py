"""The audit of a broker's folder, while it runs and afterwards: aborted transactions, offsets in transactions."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from kafka_broker import Broker
from kafka_home import KafkaHome

from tidegate.log.verify.verify import verify

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("interop")]


def faults(folder: Path) -> list[str]:
    found = verify(str(folder), log=folder).all_findings()
    return [
        f"{finding.kind} {finding.path.parent.name}/{finding.path.name}: {finding.message}"
        for finding in found.kept
        if finding.severity.value == "fault"
    ]


def transactions(broker: Broker, consumer: Consumer, name: str, count: int) -> None:
    """Records and offsets in transactions, every third of which aborts; the last one stays open."""
    producer = Producer({"bootstrap.servers": broker.address, "transactional.id": name})
    producer.init_transactions(60)
    for number in range(count):
        producer.begin_transaction()
        for row in range(3):
            producer.produce("t", b"%d-%d" % (number, row))
        producer.flush(60)
        positions = [TopicPartition("in", 0, number + 1)]
        producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), 60)
        if number % 3 == 1:
            producer.abort_transaction(60)
        elif number < count - 1:
            producer.commit_transaction(60)


def test_an_audit_calls_no_sound_folder_damaged(kafka: KafkaHome, tmp_path: Path) -> None:
    with Broker(kafka, tmp_path / "broker", {"offsets.topic.segment.bytes": "6000"}) as broker:
        broker.create("t", {"segment.bytes": "6000", "index.interval.bytes": "200"})
        broker.create("in")
        first = Producer({"bootstrap.servers": broker.address})
        first.produce("in", b"x")
        assert first.flush(60) == 0
        group = {"group.id": "g", "auto.offset.reset": "earliest", "enable.auto.commit": False}
        consumer = Consumer({"bootstrap.servers": broker.address, **group})
        consumer.subscribe(["in"])
        while consumer.poll(1.0) is None:
            pass
        is_over = threading.Event()

        def audit() -> list[list[str]]:
            found: list[list[str]] = []
            while not is_over.is_set():
                found += [faults(broker.data / topic) for topic in ("t-0", "__consumer_offsets-0")]
            return found

        with ThreadPoolExecutor(1) as pool:
            audited = pool.submit(audit)
            try:
                for name in ("first", "second", "first"):
                    transactions(broker, consumer, name, 15)
            finally:
                is_over.set()
            found = audited.result()
        assert found and [each for each in found if each] == []
        consumer.close()
        broker.stop()
        for topic in ("t-0", "__consumer_offsets-0"):
            assert len(list((broker.data / topic).glob("*.log"))) > 1, "segments were rolled meanwhile"
        assert any(each.stat().st_size for each in (broker.data / "t-0").glob("*.txnindex")), "some aborted"
        assert faults(broker.data) == []
