"""`kafka://` behind the Spark source and sink, over librdkafka's own mock cluster; no JVM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

from tidegate.clock import ManualClock
from tidegate.errors import InvalidError, UnavailableError
from tidegate.integrity import without_control
from tidegate.log.kafka.writer import KafkaWriter
from tidegate.log.log import open_log
from tidegate.randomness import SeededRandomness
from tidegate.spark.offset_ranges import OffsetRange, Planner, split
from tidegate.spark.options import SinkOptions, SourceOptions
from tidegate.spark.topic_sink import Attempt, Outbox, RowShaper, append_batch
from tidegate.spark.topic_source import read_range

confluent_kafka = pytest.importorskip("confluent_kafka")
SCHEMA = (
    StructType()
    .add("topic", StringType())
    .add("partition", IntegerType())
    .add("offset", LongType())
    .add("timestamp", TimestampType())
    .add("key", BinaryType())
    .add("value", BinaryType())
    .add("headers", ArrayType(StructType().add("key", StringType()).add("value", BinaryType())))
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A mock cluster with topics `in` (100 records, one a second) and `out`, four partitions each."""
    owner = confluent_kafka.Producer(
        {"test.mock.num.brokers": 1, "bootstrap.servers": "replaced", "log_level": 0}
    )
    broker = next(iter(owner.list_topics(timeout=120).brokers.values()))
    for n in range(100):
        owner.produce("in", b"v%d" % n, key=b"k%d" % n, partition=n % 4, timestamp=1000 * (n + 1))
    owner.produce("out", b"first", partition=0)
    owner.flush(20)
    yield f"kafka://127.0.0.1:{broker.port}"
    del owner


def planner(url: str, **given: str) -> Planner:
    return Planner(SourceOptions.parse({"log": url, "topic": "in", **given}))


def test_bounds_are_the_clusters(url: str) -> None:
    plan = planner(url)
    assert plan.starting() == {("in", n): 0 for n in range(4)}
    assert plan.latest() == plan.ending() == {("in", n): 25 for n in range(4)}
    some = planner(url, startingOffsets='{"0": 3, "1": -1, "2": -2, "3": 0}').starting()
    assert some == {("in", 0): 3, ("in", 1): 25, ("in", 2): 0, ("in", 3): 0}
    assert sum(plan.admit_rows(plan.starting(), plan.latest(), 10).values()) == 10


def test_every_record_is_read_once(url: str) -> None:
    plan = planner(url)
    seen = []
    for each in split(plan.starting(), plan.latest(), 6):
        for batch in read_range(plan, each, SCHEMA):
            seen += [(row["partition"], row["offset"], row["value"]) for row in batch.to_pylist()]
    assert sorted(seen) == sorted((n % 4, n // 4, b"v%d" % n) for n in range(100))
    assert next(iter(read_range(plan, OffsetRange("in", 1, 5, 7), SCHEMA))).column("offset").to_pylist() == [
        5,
        6,
    ]


def test_what_a_cluster_cannot_do_is_said(url: str) -> None:
    with pytest.raises(InvalidError, match="did you mean in"):
        planner(url, topic="inn").latest()
    with pytest.raises(InvalidError, match="maxRecordsPerTrigger"):
        planner(url, maxBytesPerTrigger="1MiB")
    with pytest.raises(InvalidError, match=r"kafka://HOST:PORT|kafka"):
        SourceOptions.parse({"log": "./folder", "topic": "in", "kafka.acks": "1"})


def values(url: str) -> list[bytes]:
    with open_log(url) as log, log.reader("out") as reader:
        return sorted(row["value"] for batch in reader for row in without_control(batch).to_pylist())


def test_a_batch_whose_append_was_cut_short_is_completed_and_not_repeated(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SinkOptions.parse({"log": url, "topic": "out", "outbox": str(tmp_path / "outbox")})
    outbox = Outbox(options.outbox / "out" / "query")
    assert options.partition_count() == 4

    def attempt(batch: int, first: int, last: int, unique: str = "a") -> Attempt:
        shaper = RowShaper("out", 4, task=0, largest_bytes=None)
        names = range(first, last)
        rows = pa.record_batch({"key": [f"k{n}" for n in names], "value": [f"v{n}" for n in names]})
        return outbox.write(batch, 0, unique, shaper.shaped(iter([rows])), lambda: shaper.partitions)

    def append(batch: int, attempts: list[Attempt]) -> int:
        return append_batch(
            options, outbox, batch, attempts, clock=ManualClock(5000), randomness=SeededRandomness(3)
        )

    before = values(url)
    assert append(0, [attempt(0, 0, 20)]) == 20
    calls, write = [0], KafkaWriter.write

    def failing(self: KafkaWriter, *given: object, **named: object) -> object:
        calls[0] += 1
        if calls[0] == 3:
            raise UnavailableError("the connection broke")
        return write(self, *given, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as broken:
        broken.setattr(KafkaWriter, "write", failing)
        with pytest.raises(UnavailableError):
            append(1, [attempt(1, 20, 50)])
    assert len(before) + 20 < len(values(url)) < len(before) + 50
    append(1, [attempt(1, 20, 50, "b")])
    assert values(url) == sorted([*before, *(b"v%d" % n for n in range(50))])
    assert append(1, [attempt(1, 20, 50, "c")]) == 0
