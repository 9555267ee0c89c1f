"""Rows of behaviour of replicas behind a push of Spark: a version goes on with a live topic, its producers age.

Spark pushes once; every test gets a copy of its log as it was when the push had ended, or when its tasks had sent all
and its driver had not said so yet.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from hybrid_rows import *  # noqa: F403 - its tests are collected here
from hybrid_stage import LIVE, VERSION, Stage, faults, producers, rows
from tidegate.clock import ManualClock, SystemClock
from tidegate.integrity.sender import SCHEMA
from tidegate.log.log import Log
from tidegate.scheduling import ManualScheduler
from tidegate.spark.push import push
from tidegate.tables.factories import table as table_of
from tidegate.tables.options import Consumed
from tidegate.tables.serdes.base import String

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
def test_who_ends_sparks_push_is_not_forgotten_however_late_and_is_after_it(
    row: str, at: Callable[[str], PushedStage], pushed: Path
) -> None:
    stage = at("sent-1")
    table = stage.replica("a")
    stage.settle(table)
    by_spark = producers(table)
    assert len(by_spark) == 2 and rows(table)["alice"] == "pushed"
    table.close()
    stage.clock.advance("5m")
    other = stage.sender(VERSION)
    stage.write(other, other="1")
    table = stage.replica("a", max_age="5s", rewind=0)
    stage.settle(table)
    table.commit()
    assert producers(table) == by_spark | {other.guid}, "the push is under way: its driver will speak again"
    with stage.log.writer(VERSION) as writer:
        writer.write(said_last(pushed), partition=0)
    stage.free()
    stage.settle(table)
    assert rows(table) == {"alice": "pushed", "other": "1"} and faults(table) == 0
    stage.clock.advance("10s")
    stage.write(stage.sender(LIVE), live="1")
    stage.settle(table)
    table.commit()
    assert not producers(table) & by_spark, "the push is over, and the leader speaks"
    assert rows(table)["live"] == "1" and faults(table) == 0


@pytest.mark.parametrize("row", ["DIV-22"])
def test_partitions_that_spark_sent_expire_producers_independently(
    row: str, at: Callable[[str], PushedStage]
) -> None:
    stage = at("swapped-2")
    stage.clock.advance("2h")
    late = stage.sender(VERSION)
    stage.write(late, partition=0, zero="2")
    found = {}
    for max_age in ("1h", None):
        consumed = Consumed(String(), String(), max_age=max_age)
        with table_of(
            stage.log, VERSION, state=stage.folder / f"table-{max_age}", consumed=consumed
        ) as table:
            table.commit()
            validations = table._builder.validations
            found[max_age] = [
                {each.guid for each in validations[number].replica.drainer.state.producers}
                for number in (0, 1)
            ]
            assert table.get("alice") == "pushed" and table.get("zero") == "2"
            assert [validations[number].replica.faults.faults for number in (0, 1)] == [0, 0]
    by_spark = [found[None][0] - {late.guid}, found[None][1]]
    assert sorted(map(len, by_spark)) == [1, 2], "the driver everywhere, a task where alice is"
    assert found["1h"][0] == {late.guid}
    assert found["1h"][1] == by_spark[1], "partition 1 lags: nobody is old there"
