"""Messages of a cluster (librdkafka's mock) as Arrow columns, held against confluent-kafka's own objects."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tidegate.errors import InvalidError
from tidegate.log.format.records import RECORD_SCHEMA
from tidegate.log.kafka import reader as consuming
from tidegate.log.kafka.reader import MessageConsumer

confluent_kafka = pytest.importorskip("confluent_kafka")

SENT: list[dict[str, Any]] = [
    {"key": b"k", "value": b"v", "timestamp": 1_700_000_000_001, "headers": [("a", b"1"), ("a", b"2"), ("", b"")]},
    {"key": None, "value": b"", "timestamp": 1_700_000_000_002, "headers": None},
    {"key": b"", "value": None, "timestamp": 1_700_000_000_003, "headers": [("none", None), ("ä", b"\0\xff")]},
    {"key": b"\0" * 3000, "value": b"long" * 5000, "timestamp": 5, "headers": [("x" * 300, b"y" * 3000)]},
]  # fmt: skip
NONE_MORE = "_PARTITION_EOF"


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    """A mock cluster; topic `t` has what is in `SENT` in partition 0, and many small records in partition 1."""
    owner = confluent_kafka.Producer(
        {"test.mock.num.brokers": 1, "bootstrap.servers": "replaced", "log_level": 0}
    )
    broker = next(iter(owner.list_topics(timeout=120).brokers.values()))
    for row in SENT:
        owner.produce("t", partition=0, **row)
    for number in range(5000):
        owner.produce("t", b"value-%d" % number, b"key-%d" % (number % 7), partition=1)
    owner.flush(20)
    yield f"127.0.0.1:{broker.port}"
    del owner


@pytest.fixture
def settings(servers: str) -> dict[str, Any]:
    return {
        "bootstrap.servers": servers,
        "group.id": "t",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "error",
        "log_level": 0,
    }


def fetched(consumer: MessageConsumer, ends: int) -> list[dict[str, Any]]:
    """All rows until so many partitions said that nothing more is there."""
    rows: list[dict[str, Any]] = []
    for _ in range(200):
        some = consumer.fetch(500)
        if some is None:
            continue
        with some:
            for number in np.flatnonzero(some.rows["error"]).tolist():
                assert some.error(number).name() == NONE_MORE
                ends -= 1
            good = some.rows["error"] == 0
            for partition in np.unique(some.rows["partition"][good]).tolist():
                batch = some.batch(np.flatnonzero(good & (some.rows["partition"] == partition)))
                assert batch.schema.equals(RECORD_SCHEMA)
                batch.validate(full=True)
                rows += batch.to_pylist()
        if ends == 0:
            return rows
    raise TimeoutError("the cluster never came to its end")


def test_every_field_is_as_it_was_sent(settings: dict[str, Any], servers: str) -> None:
    consumer = MessageConsumer(settings, servers, "t", most=100)
    consumer.assign({0: 0})
    rows = fetched(consumer, 1)
    consumer.close()
    assert [row["offset"] for row in rows] == list(range(len(SENT)))
    for row, sent in zip(rows, SENT, strict=True):
        assert (row["topic"], row["partition"], row["key"], row["value"]) == (
            "t",
            0,
            sent["key"],
            sent["value"],
        )
        assert int(row["timestamp"].timestamp() * 1000) == sent["timestamp"]
        assert [(each["key"], each["value"]) for each in row["headers"]] == (sent["headers"] or [])


def test_the_clients_own_objects_hold_the_same(settings: dict[str, Any], servers: str) -> None:
    peer = confluent_kafka.Consumer(settings)
    peer.assign([confluent_kafka.TopicPartition("t", number, 0) for number in (0, 1)])
    theirs = []
    while len(theirs) < 5000 + len(SENT):
        theirs += [message for message in peer.consume(10_000, timeout=1) if message.error() is None]
    peer.close()
    consumer = MessageConsumer(settings, servers, "t", most=1000)
    consumer.assign({0: 0, 1: 0})
    ours = fetched(consumer, 2)
    consumer.close()
    found = {(row["partition"], row["offset"]): (row["key"], row["value"]) for row in ours}
    assert len(found) == len(ours)
    assert found == {(each.partition(), each.offset()): (each.key(), each.value()) for each in theirs}


def test_an_unknown_setting_is_named(settings: dict[str, Any], servers: str) -> None:
    with pytest.raises(InvalidError, match=r"no\.such\.setting"):
        MessageConsumer({**settings, "no.such.setting": 1}, servers, "t", most=10)
    with pytest.raises(InvalidError, match=r"security\.protocol"):
        MessageConsumer({**settings, "security.protocol": "none"}, servers, "t", most=10)


def test_a_name_that_is_no_text_is_shown_as_java_shows_it(settings: dict[str, Any], servers: str) -> None:
    """As in a folder. Clients in other languages can write such records, this one cannot: the bytes are changed on
    the way."""
    consumer = MessageConsumer(settings, servers, "t", most=100)
    consumer.assign({0: 2})
    some = None
    while some is None:
        some = consumer.fetch(500)
    with some, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            consuming, "_binary", lambda addresses, _: pa.array([b"\xff"] * len(addresses), pa.binary())
        )
        names = some.batch(np.array([0])).column("headers").flatten().field("key").to_pylist()
        assert set(names) == {"\ufffd"}
    consumer.close()


def test_more_than_arrow_can_count_is_refused_with_the_setting() -> None:
    with pytest.raises(InvalidError, match=r"lower the client's queued\.max\.messages\.kbytes"):
        consuming._ends(np.array([1 << 30, 1 << 30]))


def test_a_consumer_nobody_holds_ends(settings: dict[str, Any], servers: str) -> None:
    consumer = MessageConsumer(settings, servers, "t", most=10)
    consumer.assign({0: 0})
    end, gone = consumer._end, weakref.ref(consumer)
    del consumer
    gc.collect()
    assert gone() is None
    assert not end.alive
