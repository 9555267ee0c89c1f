"""Rows of behaviour of replicas behind a push of Spark: a version goes on with a live topic, its producers age.

Spark pushes once; every test gets a copy of its log as it was when the push had ended, or when its tasks had sent all
and its driver had not said so yet.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from hybrid_rows import *  # noqa: F403 - its tests are collected here
from hybrid_stage import LIVE, VERSION, Stage, faults, producers, rows
from tidegate.clock import ManualClock, SystemClock
from tidegate.integrity.outlet import SCHEMA
from tidegate.log.access.embedded import Log
from tidegate.scheduling import ManualScheduler
from tidegate.spark.push.driver import push

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class PushedStage(Stage):
    """What Spark pushed, as it was at a step; the clock stands where the push ended."""

    def __init__(self, pushed: Path, step: str, folder: Path) -> None:
        shutil.copytree(pushed / step, folder / "log")
        self.folder, self.clock = folder, ManualClock(SystemClock().now_ms())
        self.log = Log(
            folder / "log", durability="os", clock=self.clock, scheduler=ManualScheduler(self.clock)
        )
        self.tables = []

    def push(self, **values: str) -> None:
        with self.log.reader(VERSION, control_records=True) as reader:
            held = {row["key"]: row["value"] for batch in reader for row in batch.to_pylist()}
        assert {key: held[key.encode()].decode() for key in values} == values, "Spark has pushed them"


@pytest.fixture(scope="module")
def pushed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of two pushes, of one partition and of two, as it was at their steps."""
    parent = tmp_path_factory.mktemp("pushed")
    for partitions in (1, 2):
        folder = parent / f"work-{partitions}"
        with Log(folder / "log", durability="os") as log:
            log.create_topic(LIVE, partitions)

        def keep(step: str, folder: Path = folder, partitions: int = partitions) -> None:
            if step in ("sent", "swapped"):
                shutil.copytree(folder / "log", parent / f"{step}-{partitions}")

        frame = spark.createDataFrame([("alice", "pushed")], "key string, value string")
        push(
            frame,
            table="users",
            key="key",
            log=str(folder / "log"),
            state=str(folder / "state"),
            partitions=partitions,
            watch=keep,
        )
    return parent


@pytest.fixture
def at(pushed: Path, tmp_path: Path) -> Iterator[Callable[[str], PushedStage]]:
    made: list[PushedStage] = []

    def open_at(step: str) -> PushedStage:
        made.append(PushedStage(pushed, step, tmp_path))
        return made[-1]

    yield open_at
    for stage in made:
        stage.close()


@pytest.fixture
def stage(at: Callable[[str], PushedStage]) -> PushedStage:
    return at("swapped-1")


def said_last(pushed: Path) -> pa.Table:
    """What the driver says after its tasks: the end of push with its manifest, and the end of its chain."""
    with Log(pushed / "sent-1", read_only=True) as log, log.reader(VERSION, control_records=True) as reader:
        sent = reader.end_offsets()[0]
    with (
        Log(pushed / "swapped-1", read_only=True) as log,
        log.reader(VERSION, start=sent, control_records=True) as reader,
    ):
        return pa.Table.from_batches([batch.select(SCHEMA.names) for batch in reader])


@pytest.mark.parametrize("row", ["DIV-21+DIV-24"])
def test_spark_has_sent_all_but_who_ends_the_push_has_expired(
    row: str, at: Callable[[str], PushedStage], pushed: Path
) -> None:
    stage = at("sent-1")
    stage.clock.advance("5m")
    edge, fresh = stage.sender(VERSION), stage.sender(VERSION)
    stage.write(edge, edge="1")
    stage.clock.advance("5s")
    stage.write(fresh, fresh="1")
    table = stage.replica("a")
    stage.settle(table)
    assert len(producers(table)) == 4 and rows(table)["alice"] == "pushed"
    table.close()
    table = stage.replica("a", max_age="5s", rewind=0)
    assert producers(table) == {edge.guid, fresh.guid}, "exactly at the limit is kept; Spark's are gone"
    stage.write(edge, edge="2")
    stage.settle(table)
    assert rows(table)["edge"] == "2" and faults(table) == 0
    with stage.log.writer(VERSION) as writer:
        writer.write(said_last(pushed), partition=0)
    stage.free()
    stage.settle(table)
    status = table.status().partitions[0]
    assert status.role == "offline" and "UNREGISTERED_PRODUCER" in status.error


@pytest.mark.parametrize("row", ["DIV-22"])
def test_partitions_that_spark_sent_expire_producers_independently(
    row: str, at: Callable[[str], PushedStage]
) -> None:
    stage = at("sent-2")
    patient = stage.replica("patient")
    stage.settle(patient)
    by_spark: list[Any] = [producers(patient, number) for number in (0, 1)]
    assert sorted(map(len, by_spark)) == [1, 2], "the driver everywhere, a task where alice is"
    stage.clock.advance("20s")
    late = stage.sender(VERSION)
    stage.write(late, partition=0, zero="2")
    table = stage.replica("a", max_age="5s", rewind=0)
    stage.settle(table)
    table.commit()
    assert producers(table, 0) == {late.guid}
    assert producers(table, 1) == by_spark[1], "partition 1 lags: nobody is old there"
