"""Arrow tables to a Kafka cluster. A write returns when all in-sync replicas have acknowledged it.

W1  what a write says is about its own rows: the client of a write that failed is ended, with all it had not sent yet,
    and the next write has a new one. Whether rows of a failed write are stored is unknown.

Thread rule: one writer, one thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.clock import SystemClock
from tidegate.durations import SizeLike, size_bytes
from tidegate.errors import InvalidError, UnavailableError
from tidegate.log.access.writer import Written
from tidegate.log.format.records import RecordColumns, coerce
from tidegate.log.kafka.client import translated
from tidegate.log.kafka.producer import ANY_PARTITION, MessageProducer

_FLUSH_SECONDS = 120.0
_SERVE_MS = 1000  # a call of the client cannot be interrupted
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
        self._clock = SystemClock()
        self._settings = settings
        self._held: MessageProducer | None = MessageProducer(settings, servers, topic)
        self._closed = False

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
        columns = coerce(table)
        partitions = _partitions(table, len(columns), partition)
        producer = self._producer
        try:
            return self._write(producer, columns, partitions)
        except BaseException:
            self._end()  # W1
            raise

    def _write(
        self, producer: MessageProducer, columns: RecordColumns, partitions: npt.NDArray[np.int64]
    ) -> list[Written]:
        producer.send(columns, partitions)
        deadline_ms = self._clock.monotonic_ms() + int(self._flush_seconds * 1000)
        while producer.outstanding and (left_ms := deadline_ms - self._clock.monotonic_ms()) > 0:
            producer.serve(min(left_ms, _SERVE_MS))
        if producer.failure is not None:
            raise translated(producer.failure, f"write to topic {self.topic}", self._servers)
        if producer.outstanding:
            raise UnavailableError(
                f"{producer.outstanding} records for {self.topic} were not acknowledged by {self._servers} within "
                f"{self._flush_seconds:.0f} s; whether they are stored is unknown"
            )
        return _runs(producer.stored())

    def close(self) -> None:
        """Nothing is pending after a write; the client ends here and now, as that of `KafkaLog.close`."""
        self._closed = True
        self._end()

    @property
    def _producer(self) -> MessageProducer:
        if self._closed:
            raise InvalidError(f"the writer of {self.topic} was closed; open another")
        if self._held is None:
            self._held = MessageProducer(self._settings, self._servers, self.topic)
        return self._held

    def _end(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()


def _partitions(table: pa.Table | pa.RecordBatch, rows: int, partition: int | None) -> npt.NDArray[np.int64]:
    """The partition of each row: the one that was asked for, or the table's own, or whichever its key says."""
    index = table.schema.get_field_index("partition")
    if partition is not None or index < 0:
        return np.full(rows, ANY_PARTITION if partition is None else partition, np.int64)
    column = table.column(index)
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    placed: npt.NDArray[np.int64] = (
        column.cast(pa.int64()).fill_null(ANY_PARTITION).to_numpy(zero_copy_only=False)
    )
    return placed


def _runs(stored: npt.NDArray[Any]) -> list[Written]:
    """Runs of consecutive offsets, by partition."""
    placed = stored[np.lexsort((stored["offset"], stored["partition"]))]
    if not len(placed):
        return []
    follows = (np.diff(placed["offset"]) == 1) & (np.diff(placed["partition"]) == 0)
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    last = np.append(first[1:] - 1, len(placed) - 1)
    return [
        Written(*each, -1, -1, False, 0)
        for each in zip(
            placed["partition"][first].tolist(),
            placed["offset"][first].tolist(),
            placed["offset"][last].tolist(),
            strict=True,
        )
    ]
