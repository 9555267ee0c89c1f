"""A table over a Kafka cluster (a mock one): the same answers as over a folder, and a restart reads nothing twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from table_records import window_record, windows_in
from tidegate.log.catalog import TopicDescription
from tidegate.log.format.records import TIMESTAMP_TYPE
from tidegate.log.log import open_log
from tidegate.log.topic_config import TopicConfig
from tidegate.tables.factories import windowed_table


class Described:
    """The cluster with the one answer that the mock cannot give."""

    def __init__(self, log: Any) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def describe(self, topic: str) -> TopicDescription:
        numbers = range(self._log.partition_counts()[topic])
        return TopicDescription(topic, tuple(numbers), TopicConfig())


@pytest.fixture
def log() -> Iterator[Any]:
    confluent_kafka = pytest.importorskip("confluent_kafka")
    owner = confluent_kafka.Producer(
        {"test.mock.num.brokers": 1, "bootstrap.servers": "replaced", "log_level": 0}
    )
    broker = next(iter(owner.list_topics(timeout=120).brokers.values()))
    owner.list_topics("t", timeout=120)  # asking for it makes it
    with open_log(f"kafka://127.0.0.1:{broker.port}") as opened:
        yield Described(opened)
    del owner


def write(log: Any, first: int, count: int) -> None:
    said = [
        window_record(b"k%d" % (n % 3), n * 10, b"%d" % n, n * 10 + 5) for n in range(first, first + count)
    ]
    table = pa.table(
        {
            "key": pa.array([each.key for each in said], pa.binary()),
            "value": pa.array([each.value for each in said], pa.binary()),
            "timestamp": pa.array([each.timestamp for each in said], pa.int64()).view(TIMESTAMP_TYPE),
        }
    )
    with log.writer("t") as writer:
        writer.write(table, partition=1)


def test_a_table_over_a_cluster(log: Any, tmp_path: Path) -> None:
    write(log, 0, 20)
    expected = {(b"k%d" % (n % 3), n * 10, n * 10 + 10): (b"%d" % n, n * 10 + 5) for n in range(30)}
    with windowed_table(log, "t", "10ms", state=tmp_path / "state") as table:
        assert windows_in(table) == dict(list(expected.items())[:20])
        assert table.position[1] == 20
    write(log, 20, 10)
    with windowed_table(log, "t", "10ms", state=tmp_path / "state", bootstrap=False) as table:
        assert table.position[1] == 20
        table.catch_up("20s")
        assert windows_in(table) == expected
        assert table.counts.applied == 30
