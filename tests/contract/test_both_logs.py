"""One suite over both kinds of log: a folder and a (mock) Kafka cluster behave alike for writers and readers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from log_contract import *  # noqa: F403 - its tests are collected here
from log_contract import PARTITIONS
from tidegate.log.log import open_log


@pytest.fixture(params=["folder", "kafka"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A log with an empty topic `t` of four partitions."""
    if request.param == "folder":
        with open_log(str(tmp_path / "log"), durability="os") as log:
            log.create_topic("t", PARTITIONS)
            yield log
        return
    confluent_kafka = pytest.importorskip("confluent_kafka")
    owner = confluent_kafka.Producer(
        {"test.mock.num.brokers": 1, "bootstrap.servers": "replaced", "log_level": 0}
    )
    broker = next(iter(owner.list_topics(timeout=120).brokers.values()))
    owner.list_topics("t", timeout=120)  # asking for it makes it
    with open_log(f"kafka://127.0.0.1:{broker.port}") as log:
        yield log
    del owner


def test_topics_and_partitions(log: Any) -> None:
    assert log.topics() == ["t"]
    assert log.partition_counts() == {"t": PARTITIONS}
