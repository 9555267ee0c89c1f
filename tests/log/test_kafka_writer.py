"""Arrow columns to a cluster (librdkafka's mock), held against what confluent-kafka's consumer then finds there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tidegate.errors import InvalidError, UnavailableError
from tidegate.kernels.librdkafka import DELIVERY_ROW
from tidegate.log.format.records import GIVEN_HEADERS_TYPE, coerce
from tidegate.log.kafka.writer import ANY_PARTITION, KafkaWriter, MessageProducer, _runs

confluent_kafka = pytest.importorskip("confluent_kafka")

ROWS = [
    (b"k", b"v", 1_700_000_000_001, [("a", b"1"), ("a", b"2"), ("ä", b"")]),
    (None, b"", 1_700_000_000_002, []),
    (b"", None, 1_700_000_000_003, [("none", None)]),
    (b"\0" * 3000, b"long" * 5000, 5, [("x" * 300, b"y" * 3000)]),
]


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    owner = confluent_kafka.Producer(
        {"test.mock.num.brokers": 1, "bootstrap.servers": "replaced", "log_level": 0}
    )
    broker = next(iter(owner.list_topics(timeout=120).brokers.values()))
    yield f"127.0.0.1:{broker.port}"
    del owner


def settings(servers: str, **more: Any) -> dict[str, Any]:
    return {"bootstrap.servers": servers, "log_level": 0, "linger.ms": 5, **more}


def found(servers: str, topic: str, rows: int) -> list[Any]:
    """What confluent-kafka's consumer sees, by partition and offset."""
    consumer = confluent_kafka.Consumer(settings(servers, **{"group.id": "t"}))
    consumer.assign([confluent_kafka.TopicPartition(topic, number, 0) for number in range(4)])
    seen: list[Any] = []
    while len(seen) < rows:
        seen += [message for message in consumer.consume(10_000, timeout=1) if message.error() is None]
    consumer.close()
    return sorted(seen, key=lambda message: (message.partition(), message.offset()))


def table() -> pa.Table:
    return pa.table(
        {
            "key": pa.array([row[0] for row in ROWS], pa.binary()),
            "value": pa.array([row[1] for row in ROWS], pa.binary()),
            "timestamp": [row[2] for row in ROWS],
            "headers": pa.array(
                [[{"key": name, "value": value} for name, value in row[3]] for row in ROWS],
                GIVEN_HEADERS_TYPE,
            ),
        }
    )


@pytest.mark.parametrize("first", [0, 1], ids=["alone", "behind a sound row"])
def test_the_timestamp_zero_is_refused_before_anything_is_sent(servers: str, first: int) -> None:
    """The client takes 0 for the present time: records of 1970-01-01 would be dated today."""
    topic = f"zero-{first}"
    rows = pa.table({"value": ["sound", "zero"], "timestamp": [5, 0]}).slice(1 - first)
    with KafkaWriter(servers, settings(servers), topic) as writer:
        with pytest.raises(InvalidError, match=rf"row {first} .*topic {topic} has the timestamp 0"):
            writer.write(rows, partition=0)
        (run,) = writer.write(pa.table({"value": ["earliest"], "timestamp": [1]}), partition=0)
    assert (run.first_offset, run.last_offset) == (0, 0)
    (message,) = found(servers, topic, 1)
    assert (message.value(), message.timestamp()[1]) == (b"earliest", 1)


@pytest.mark.parametrize("cut", [0, 2])
def test_every_field_arrives(servers: str, cut: int) -> None:
    """Also of a table that is a slice of a larger one."""
    topic = f"fields-{cut}"
    with KafkaWriter(servers, settings(servers), topic) as writer:
        (run,) = writer.write(table().slice(cut), partition=2)
    assert (run.partition, run.first_offset, run.last_offset) == (2, 0, len(ROWS) - cut - 1)
    for message, (key, value, time, headers) in zip(
        found(servers, topic, len(ROWS) - cut), ROWS[cut:], strict=True
    ):
        assert (message.partition(), message.key(), message.value()) == (2, key, value)
        assert message.timestamp()[1] == time
        assert (message.headers() or []) == headers


def test_rows_without_time_or_headers_and_each_in_the_tables_own_partition(servers: str) -> None:
    rows = pa.table({"value": [b"%d" % n for n in range(100)], "partition": [n % 4 for n in range(100)]})
    with KafkaWriter(servers, settings(servers), "own") as writer:
        runs = writer.write(rows)
    assert [(run.partition, run.records) for run in runs] == [(n, 25) for n in range(4)]
    seen = found(servers, "own", 100)
    assert [int(message.value()) % 4 for message in seen] == [message.partition() for message in seen]
    assert all(message.headers() is None for message in seen)


def test_a_full_queue_is_waited_for_and_nothing_is_lost_or_doubled(servers: str) -> None:
    small = settings(servers, **{"queue.buffering.max.messages": 100})
    with KafkaWriter(servers, small, "full") as writer:
        runs = writer.write(pa.table({"value": [b"%d" % n for n in range(5000)]}), partition=0)
    assert sum(run.records for run in runs) == 5000
    assert [int(message.value()) for message in found(servers, "full", 5000)] == list(range(5000))


def test_a_row_that_is_too_large_is_an_error_and_the_rows_before_it_are_told(servers: str) -> None:
    producer = MessageProducer(settings(servers, **{"message.max.bytes": 2000}), servers, "large")
    columns = coerce(pa.table({"value": [b"small", b"x" * 5000, b"small"]}))
    with pytest.raises(InvalidError, match="could not write to topic large"):
        producer.send(columns, np.full(3, ANY_PARTITION, np.int64))
    while producer.outstanding:
        producer.serve(1000)
    assert len(producer.stored()) == 1
    producer.close()


def test_nobody_there_is_told_after_the_time_that_was_given(servers: str) -> None:
    with (
        KafkaWriter("127.0.0.1:1", settings("127.0.0.1:1"), "t", timeout_seconds=0.5) as writer,
        pytest.raises(UnavailableError, match="could not write to topic t"),
    ):
        writer.write(pa.table({"value": [b"v"]}))


def test_a_producer_nobody_holds_ends(servers: str) -> None:
    producer = MessageProducer(settings(servers), servers, "t")
    end, gone = producer._end, weakref.ref(producer)
    del producer
    gc.collect()
    assert gone() is None
    assert not end.alive


def test_runs_are_of_neighbours_in_one_partition() -> None:
    places = [(1, 5), (0, 7), (0, 8), (1, 6), (0, 10), (2, 0)]
    rows = np.array([(0, *place) for place in places], DELIVERY_ROW)
    assert [run[:3] for run in _runs(rows)] == [(0, 7, 8), (0, 10, 10), (1, 5, 6), (2, 0, 0)]
    assert _runs(rows[:0]) == []
