"""Records as an ordinary client sees them, and as our reader does, in one comparable shape."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from confluent_kafka import Consumer, TopicPartition

from tidegate.log.log import Log


class Seen(NamedTuple):
    """One record a reader got."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


def consume(
    address: str, topic: str, *, partition: int = 0, committed: bool = False, start: int | None = None
) -> list[Seen]:
    """Everything an ordinary client reads of a partition, up to its end now."""
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "nobody",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "check.crcs": True,
            "isolation.level": "read_committed" if committed else "read_uncommitted",
            "fetch.wait.max.ms": 20,
            "log_level": 0,
        }
    )
    try:
        low, _ = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=30)
        consumer.assign([TopicPartition(topic, partition, low if start is None else start)])
        seen: list[Seen] = []
        while (message := consumer.poll(30)) is not None:
            if message.error() is not None:
                if message.error().name() == "_PARTITION_EOF":
                    return seen
                raise RuntimeError(f"consuming {topic}: {message.error()}")
            headers = tuple((key, value) for key, value in message.headers() or ())
            seen.append(
                Seen(message.offset(), message.timestamp()[1], message.key(), message.value(), headers)
            )
        raise TimeoutError(f"consuming {topic} came to no end")
    finally:
        consumer.close()


def read(folder: Path, topic: str, *, committed: bool = False) -> list[Seen]:
    """Everything our reader finds of a topic with one partition in a log folder."""
    with Log(folder, read_only=True) as log:
        reader = log.reader(
            topic, isolation="read_committed" if committed else "read_uncommitted", stop="latest"
        )
        return [row for batch in reader for row in rows(batch)]


def rows(batch: pa.RecordBatch) -> list[Seen]:
    table = pa.Table.from_batches([batch])
    times = table.column("timestamp").cast(pa.int64()).fill_null(-1).to_pylist()
    return [
        Seen(
            row["offset"],
            time,
            row["key"],
            row["value"],
            tuple((header["key"], header["value"]) for header in row["headers"]),
        )
        for row, time in zip(table.drop(["timestamp"]).to_pylist(), times, strict=True)
    ]
