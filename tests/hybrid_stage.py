"""What tests of hybrid tables share: a version topic and a live topic, and replicas over them on one clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from tidegate.clock import ManualClock
from tidegate.integrity import Manifest, Push, Sender
from tidegate.log.format.records import coerce
from tidegate.log.log import Log
from tidegate.scheduling import ManualScheduler
from tidegate.tables.hybrid.table import HybridTable, hybrid_table
from tidegate.tables.options import Consumed
from tidegate.tables.serdes.base import String

VERSION, LIVE = "users_v1", "user-updates"
DAY = 86_400_000


class Stage:
    """A log with a version topic and a live topic, and replicas over it, all on one clock that the test moves."""

    def __init__(self, folder: Path, partitions: int = 1) -> None:
        self.folder, self.clock = folder, ManualClock()
        self.log = Log(
            folder / "log", durability="os", clock=self.clock, scheduler=ManualScheduler(self.clock)
        )
        for topic in (VERSION, LIVE):
            self.log.create_topic(topic, partitions)
        self.driver = self.sender(VERSION)
        self.pushing = Push(self.driver)
        self.tables: list[HybridTable] = []

    def sender(self, topic: str) -> Sender:
        made: Sender = self.log.writer(topic, integrity=True)
        return made

    def write(self, sender: Sender, partition: int = 0, **values: str | None) -> None:
        table = pa.table({"key": list(values), "value": pa.array(list(values.values()), pa.string())})
        sender.write(table, partition=partition)
        self.free()

    def push(self, **values: str) -> None:
        """A whole push, into partition 0."""
        self.pushing.start()
        task = self.sender(VERSION)
        self.write(task, **values)
        self.end_push(task)

    def end_push(self, *tasks: Sender) -> None:
        manifests: dict[int, list[Any]] = {}
        for task in tasks:
            task.close()
            for number, sent in task.sent().items():
                manifests.setdefault(number, []).append(sent)
        self.pushing.end({number: Manifest.of(sent) for number, sent in manifests.items()})
        self.free()

    def free(self) -> None:
        """Let replicas of this process write the version topic too."""
        for number in self.log.describe(VERSION).partition_numbers:
            self.log.release(VERSION, number)

    def replica(self, name: str, **settings: Any) -> HybridTable:
        given = {"rewind": "1d", "commit_interval": "1h", "hold": 0, "consumed": Consumed(String(), String())}
        table = hybrid_table(
            self.log, VERSION, live=LIVE, state=self.folder / "state", replica=name, **(given | settings)
        )
        self.tables.append(table)
        return table

    def settle(self, *tables: HybridTable) -> None:
        """Step until nobody has anything to do, also after a lease has ended."""
        for _ in range(3):
            moved = [True]
            while any(moved):
                moved = [table.step() for table in tables]
            self.clock.advance("2s")

    def close(self) -> None:
        for table in self.tables:
            table.close()
        self.log.close()


def rows(table: Any) -> dict[str, str]:
    return {row["key"]: row["value"] for batch in table.batches() for row in batch.to_pylist()}


def producers(table: HybridTable, partition: int = 0) -> set[bytes]:
    return {each.guid for each in table.serving.leading[partition].following.replica.drainer.state.producers}


def faults(table: HybridTable) -> int:
    return sum(each.faults + each.live_faults for each in table.status().partitions)


def lose_one(sender: Sender) -> None:
    """A record that got its number and was never stored."""
    channel = sender._channel(0)
    channel.state = sender.chains.data(channel.state, _columns("lost"), 0).after


def _columns(key: str) -> Any:
    return coerce(pa.table({"key": [key], "value": ["lost"]}))
