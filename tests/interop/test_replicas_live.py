"""Replicas over a real broker, which has no lock for a partition's writer: a paused leader really appends late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kafka_broker import Broker

from simulated_replicas import counting, led, undisturbed
from tidegate.clock import ManualClock
from tidegate.integrity import Manifest, Push
from tidegate.integrity.replica import Role
from tidegate.log.log import open_log
from tidegate.tables.hybrid.table import HybridTable, hybrid_table

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("interop")]

VERSION, LIVE = "replicated_v1", "replicated-live"


def rows(log: Any, topic: str) -> list[dict[str, Any]]:
    with log.reader(topic, [0], control_records=True) as reader:
        return [row for batch in reader for row in batch.to_pylist()]


def settle(*tables: HybridTable, leader: HybridTable) -> None:
    for _ in range(400):
        for table in tables:
            table.step()
        partitions = [table.status().partitions[0] for table in tables]
        if leader.roles[0] is Role.LEADER and not any(each.lag or each.live_lag for each in partitions):
            return
    raise AssertionError(f"the replicas do not come to rest: {partitions}")


def test_a_leader_that_was_replaced_appends_to_the_broker_in_vain(broker: Broker, tmp_path: Path) -> None:
    with open_log(f"kafka://{broker.address}") as log:
        for topic in (VERSION, LIVE):
            log.create_topic(topic, 1, {"retention.ms": "-1"})
        with log.writer(VERSION, integrity=True) as driver:
            push = Push(driver)
            push.start()
            with log.writer(VERSION, integrity=True) as task:
                task.write(pa.table({"key": ["ann", "bob"], "value": ["pushed", "pushed"]}))
            push.end({0: Manifest.of(list(task.sent().values()))})
        live = log.writer(LIVE, integrity=True)
        live.write(pa.table({"key": ["ann"], "value": ["1"]}))
        clocks = ManualClock(1_900_000_000_000), ManualClock(1_900_000_000_000)
        paused, second = (
            hybrid_table(
                log, VERSION, live=LIVE, state=tmp_path / "state", replica=name, clock=clock, rewind="3650d"
            )
            for name, clock in zip(("a", "b"), clocks, strict=True)
        )
        settle(paused, second, leader=paused)
        clocks[1].advance("1h")  # a lease that ended, as far as the second one knows
        settle(second, leader=second)
        assert paused.roles[0] is second.roles[0] is Role.LEADER
        live.write(pa.table({"key": ["bob", "ann"], "value": ["2", "3"]}))
        settle(second, leader=second)
        leading = paused.serving.leading[0]
        for _ in range(100):  # it copies the records too, being a leader as far as it knows
            if leading.step() and any(not counts for _, _, counts in led(rows(log, VERSION))):
                break
        settle(paused, second, leader=second)
        assert paused.roles[0] is Role.STANDBY and second.counts.fenced > 0
        expected, copied = undisturbed({b"ann": b"pushed", b"bob": b"pushed"}, rows(log, LIVE), 0)
        assert counting(rows(log, VERSION)) == copied
        for table in (paused, second):
            found = {row["key"]: row["value"] for batch in table.batches() for row in batch.to_pylist()}
            assert found == expected == {b"ann": b"3", b"bob": b"2"}
            assert table.serving.leading[0].following.upstream.copied == len(copied) == 3
            table.close()
