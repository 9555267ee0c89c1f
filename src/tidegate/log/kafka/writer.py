"""Arrow tables to a Kafka cluster.

The client takes one message at a time, so here, and in `kafka_reader`, records pass through Python objects. A
write returns when all in-sync replicas have acknowledged it.

Thread rule: one writer, one thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from tidegate.durations import SizeLike, size_bytes
from tidegate.errors import InvalidError, UnavailableError
from tidegate.log.access.writer import Written
from tidegate.log.batches.records import coerce
from tidegate.log.kafka.client import calling, load_client, translated

_FLUSH_SECONDS = 120.0
_CLIENT_SECONDS = 5.0  # the client tells a little later that time is up


class KafkaWriter:
    """Writes tables to one topic of a cluster; made by `KafkaLog.writer`."""

    def __init__(
        self,
        servers: str,
        client: Mapping[str, Any],
        topic: str,
        *,
        compression: str | None = None,
        batch_bytes: SizeLike | None = None,
        batch_records: int | None = None,
        producer_id: int | None = None,
        producer_epoch: int = 0,
        durability: str | None = None,
        idempotent: bool = False,
        timeout_seconds: float | None = None,
    ) -> None:
        """`idempotent`: what the client sends again on its own is stored once, and in order.

        With `timeout_seconds` a write that is not acknowledged in time fails, and nothing of it is sent any more.
        """
        if producer_id is not None or producer_epoch:
            raise InvalidError(
                "a broker hands out producer ids; for idempotent writing use -X enable.idempotence=true"
            )
        settings = {
            "partitioner": "murmur2_random",
            "acks": "1" if durability == "os" else "all",
            "linger.ms": 5,
            **({"enable.idempotence": True} if idempotent else {}),
            **client,
        }
        if compression is not None:
            settings["compression.type"] = compression
        if batch_bytes is not None:
            settings["batch.size"] = size_bytes(batch_bytes)
        if batch_records is not None:
            settings["batch.num.messages"] = batch_records
        if timeout_seconds is not None:
            settings.setdefault("message.timeout.ms", int(timeout_seconds * 1000))
        self.topic = topic
        self._flush_seconds = _FLUSH_SECONDS if timeout_seconds is None else timeout_seconds + _CLIENT_SECONDS
        self._servers = servers
        module = load_client()
        self._held: Any = calling("configure the producer", servers, lambda: module.Producer(settings))
        self._stored: list[tuple[int, int]] = []
        self._failures: list[Any] = []

    def __enter__(self) -> KafkaWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(
        self,
        table: pa.Table | pa.RecordBatch,
        *,
        partition: int | None = None,
        first_sequences: Mapping[int, int] | None = None,
    ) -> list[Written]:
        """Store the rows; one entry per run of offsets. Returns when the cluster has acknowledged them."""
        if first_sequences:
            raise InvalidError("sequence numbers are the broker client's own; leave --first-sequence out")
        self._stored, self._failures = [], []
        for key, value, timestamp, headers, number in _rows(table, partition):
            self._produce(value, key, timestamp, headers, number)
        left = self._producer.flush(self._flush_seconds)
        if self._failures:
            raise translated(self._failures[0], f"write to topic {self.topic}", self._servers)
        if left:
            raise UnavailableError(
                f"{left} records for {self.topic} were not acknowledged by {self._servers} within "
                f"{self._flush_seconds:.0f} s; whether they are stored is unknown"
            )
        return list(_runs(self._stored))

    def close(self) -> None:
        """Nothing is pending after a write; the client ends here and now, as that of `KafkaLog.close`."""
        self._held = None

    @property
    def _producer(self) -> Any:
        if self._held is None:
            raise InvalidError(f"the writer of {self.topic} was closed; open another")
        return self._held

    def _produce(self, value: Any, key: Any, timestamp: int | None, headers: Any, number: int | None) -> None:
        optional = {} if timestamp is None else {"timestamp": timestamp}
        while True:
            try:
                calling(
                    f"write to topic {self.topic}",
                    self._servers,
                    lambda: self._producer.produce(
                        self.topic,
                        value,
                        key,
                        partition=-1 if number is None else number,
                        headers=headers,
                        on_delivery=self._delivered,
                        **optional,
                    ),
                )
                return
            except BufferError:  # the client's queue is full: let some leave
                self._producer.poll(0.1)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self._failures.append(error)
        else:
            self._stored.append((message.partition(), message.offset()))


def _rows(table: pa.Table | pa.RecordBatch, partition: int | None) -> Iterator[tuple[Any, ...]]:
    columns = coerce(table)
    rows = len(columns)
    numbers: list[int | None] = [partition] * rows
    index = table.schema.get_field_index("partition")
    if partition is None and index >= 0:
        numbers = table.column(index).to_pylist()
    headers: list[Any] = [None] * rows
    if columns.headers is not None:
        headers = [
            [(pair["key"], pair["value"]) for pair in pairs] if pairs else None
            for pairs in columns.headers.to_pylist()
        ]
    return zip(
        columns.key.to_pylist(),
        columns.value.to_pylist(),
        columns.timestamp.to_pylist(),
        headers,
        numbers,
        strict=True,
    )


def _runs(stored: list[tuple[int, int]]) -> Iterator[Written]:
    """Runs of consecutive offsets, by partition."""
    run: tuple[int, int, int] | None = None
    for partition, offset in sorted(stored):
        if run is not None and run[0] == partition and offset == run[2] + 1:
            run = (partition, run[1], offset)
            continue
        if run is not None:
            yield Written(*run, -1, -1, False, 0)
        run = (partition, offset, offset)
    if run is not None:
        yield Written(*run, -1, -1, False, 0)
