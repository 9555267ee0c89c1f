"""What the tests of pushes share: a push without Spark, damage done to a version's topic, and a look into one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.clock import SystemClock
from tidegate.errors import TidegateError
from tidegate.integrity.columns import read_columns
from tidegate.integrity.fault_injection import Damage, DamageKind, break_topic
from tidegate.log.log import Log
from tidegate.log.maintenance import Housekeeping
from tidegate.log.topic_config import BrokerConfig
from tidegate.randomness import SeededRandomness
from tidegate.spark.push_rows import SendOrder, partitions_of, send_partition
from tidegate.storage import open_backend
from tidegate.tables.versions.catalog import Fault, PartitionResult, PushReport, TableVersion
from tidegate.tables.versions.ingest import Ingested, ingest_partition
from tidegate.tables.versions.push import PushPlan, VersionPush

ROWS = pa.schema([("key", pa.binary()), ("value", pa.binary()), ("timestamp", pa.timestamp("us", tz="UTC"))])


def rows(count: int, text: str = "v") -> list[tuple[bytes, bytes]]:
    return [(b"key-%05d" % number, f"{text}-{number}".encode()) for number in range(count)]


def sorted_batches(
    given: Sequence[tuple[bytes | None, bytes]], partition: int, partitions: int, size: int = 50
) -> list[pa.RecordBatch]:
    """The rows of one partition in their total order, in batches, as Spark's task gets them."""
    keys = pa.array([key for key, _ in given], pa.binary())
    placed = partitions_of(keys, partitions).to_pylist()
    mine = sorted(
        (row for row, place in zip(given, placed, strict=True) if place == partition),
        key=lambda row: (row[0] is not None, row[0] or b"", row[1]),
    )
    made = [{"key": key, "value": value, "timestamp": None} for key, value in mine]
    return [
        pa.RecordBatch.from_pylist(made[start : start + size], ROWS) for start in range(0, len(made), size)
    ]


def order_of(push: VersionPush) -> SendOrder:
    topic, partitions = push.version.topic, push.plan.partitions
    return SendOrder(push.plan.log, topic, partitions, push.push, push.started_ms, gather_rows=30)


def ingest_here(
    log: Any, backend: Any, version: TableVersion, partitions: list[int], **settings: Any
) -> list[Ingested]:
    """Ingest partitions one after the other; an error of the machine fails only its partition, as in a Spark task."""
    found = []
    for partition in partitions:
        try:
            found.append(ingest_partition(log, backend, version, partition, **settings))
        except TidegateError as error:
            fault = Fault(partition, type(error).__name__, str(error))
            found.append(Ingested(PartitionResult(partition), fault))
    return found


def push_here(
    folder: Path,
    given: Sequence[tuple[bytes | None, bytes]],
    *,
    table: str = "users",
    partitions: int = 2,
    state: str | None = None,
    watch: Callable[[str], None] | None = None,
    touch: dict[str, Callable[[VersionPush], None]] | None = None,
    serdes: tuple[str, str] = ("String()", "String()"),
    **settings: Any,
) -> PushReport:
    """All of a push but Spark, which only brings rows to their tasks; `touch` is called at the steps it names."""
    backend = open_backend(state or str(folder / "state"))
    plan = PushPlan(str(folder / "log"), table, partitions, *serdes, **settings)
    hooks = touch or {}

    def at(step: str) -> None:
        if watch is not None:
            watch(step)
        if step in hooks:
            hooks[step](push)

    push = VersionPush(backend, plan, watch=at)
    try:
        with push:
            push.start()
            sent = {}
            for partition in range(partitions):
                batches = sorted_batches(given, partition, partitions)
                answer = send_partition(
                    order_of(push), partition, partition + 1, batches, clock=SystemClock()
                )
                if answer.sent is not None:
                    sent[partition] = [answer.sent]
            at("sent")
            version = push.end(sent)
            with Log(folder / "log", read_only=True) as log:
                ingested = ingest_here(log, backend, version, list(range(partitions)))
            at("ingested")
            return push.finish(ingested)
    finally:
        backend.close()


def damage(log_folder: Path, topic: str, kind: DamageKind, into: Path, **where: Any) -> Damage:
    """Do to a topic what `tidegate break` does to a copy, and put the copy in its place."""
    with Log(log_folder) as log:
        done = break_topic(log, topic, kind, into=into, **where)
        settings = {"cleanup.policy": log.describe(topic).config.value("cleanup.policy")}
        settings["min.compaction.lag.ms"] = log.describe(topic).config.value("min.compaction.lag.ms")
        partitions = log.describe(topic).partitions
        log.delete_topic(topic)
        log.create_topic(topic, partitions, settings)
        with Log(into, read_only=True) as copy, log.writer(topic) as writer:
            for partition in range(partitions):
                for batch in copy.reader(topic, [partition], control_records=True):
                    columns = ["key", "value", "timestamp", "headers"]
                    writer.write(pa.Table.from_batches([batch.select(columns)]), partition=partition)
    return done


def compact(log_folder: Path, topic: str) -> None:
    """Compact all that a topic has."""
    with Log(log_folder) as log:
        for number in log.describe(topic).partition_numbers:
            log.partition(topic, number).roll()
        chores = Housekeeping(
            log, broker=BrokerConfig(), files=log.files, clock=log.clock, randomness=SeededRandomness(1)
        )
        done = chores.clean_once()
    assert any(each.compaction is not None for each in done)


def stamps(log_folder: Path, topic: str, partition: int) -> np.ndarray[Any, Any]:
    """The metadata of all records of a partition, with `is_control` and the number that tells producers apart."""
    with Log(log_folder, read_only=True) as log:
        found = [
            read_columns(batch.column("headers")).rows
            for batch in log.reader(topic, [partition], control_records=True)
        ]
    return np.concatenate(found)


def keys_of(log_folder: Path, topic: str, partition: int) -> list[bytes]:
    with Log(log_folder, read_only=True) as log:
        return [
            key
            for batch in log.reader(topic, [partition], control_records=True)
            for key in batch.column("key").to_pylist()
        ]


def part_of(batches: Iterable[pa.RecordBatch], count: int) -> Iterable[pa.RecordBatch]:
    """The first batches, and then the attempt dies."""
    for number, batch in enumerate(batches):
        if number == count:
            raise ConnectionAbortedError("this attempt dies here")
        yield batch


def main(folder: str, step: str) -> None:
    """A push that kills its own process at a step."""
    push_here(
        Path(folder),
        rows(120, "new"),
        watch=lambda now: os.kill(os.getpid(), signal.SIGKILL) if now == step else None,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
