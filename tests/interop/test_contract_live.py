"""The suite over every kind of log (`log_contract`), with a real broker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kafka_broker import Broker

from log_contract import *  # noqa: F403 - its tests are collected here
from log_contract import PARTITIONS
from tidegate.clock import SystemClock
from tidegate.errors import ConflictError
from tidegate.log.log import open_log
from tidegate.waiting import waiting

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("interop")]


@pytest.fixture
def log(broker: Broker) -> Iterator[Any]:
    """The broker, with an empty topic `t` of four partitions."""
    with open_log(f"kafka://{broker.address}") as log:
        log.create_topic("t", PARTITIONS)
        yield log
        log.delete_topic("t")
        waiting(SystemClock(), 60_000, lambda: gone(log, "t"))


def gone(log: Any, topic: str) -> None:
    if topic in log.topics():
        raise ConflictError(f"{topic} is still there")
