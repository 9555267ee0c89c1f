"""Write Arrow tables to a Kafka cluster. A write returns when all in-sync replicas have acknowledged it.

`MessageProducer` passes columns to librdkafka, without a Python object for each row, and returns delivery reports as
arrays. The library copies rows into its queue until that is full, sends them in its own threads, and reports
for each row whether and at which offset it was stored. A row is outstanding until its report arrived.

W1  the result of a write concerns its own rows only: the client of a failed write is closed, with all rows it
    had not sent yet, and the next write opens a new one. Whether rows of a failed write are stored is unknown.

Thread rule: one writer, one thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.clock import SystemClock
from tidegate.durations import SizeLike, size_bytes
from tidegate.errors import InvalidError, UnavailableError
from tidegate.kernels.librdkafka import (
    DELIVERY_ROW,
    FLAGS,
    HEADER_ROW,
    MOST_UNITS,
    NONE,
    TOPIC,
    UNIT_WORDS,
    look_at_deliveries,
    send_rows,
)
from tidegate.log.format.records import RecordColumns, coerce
from tidegate.log.kafka.client import ClientError, Library, library, translated
from tidegate.log.writer import Written

Rows = npt.NDArray[Any]
ANY_PARTITION: Final = -1
_COPY: Final = 2
_FULL_WAIT_MS: Final = 100
_DELIVERED_EVENT: Final = 1


class MessageProducer:
    """Sends rows to one topic."""

    def __init__(self, settings: Mapping[str, Any], servers: str, topic: str) -> None:
        self._library = library()
        self._servers, self._topic = servers, topic
        calls = self._library.calls
        self._producer = self._library.producer(settings)
        queue = calls["rd_kafka_queue_get_main"](self._producer)
        handle = calls["rd_kafka_topic_new"](self._producer, topic.encode(), None)
        self._queue, self._handle = queue, handle
        self._units = np.zeros(UNIT_WORDS * MOST_UNITS, np.int64)
        self._units[:2] = TOPIC, handle or 0
        self._units[UNIT_WORDS : UNIT_WORDS + 2] = FLAGS, _COPY
        self._told: list[Rows] = []
        self.outstanding = 0
        self.failure: ClientError | None = None
        self._end = weakref.finalize(self, _end, self._library, self._producer, queue, handle)
        if not handle:
            self.close()
            raise InvalidError(f"could not write to topic {topic}: the client refuses its name or settings")

    @property
    def is_open(self) -> bool:
        return self._end.alive

    def send(self, columns: RecordColumns, partitions: npt.NDArray[np.int64]) -> None:
        """Queue rows, each for its partition (`ANY_PARTITION`: by its key); waits while the queue is full."""
        keys, key_lengths = _places(columns.key)
        values, value_lengths = _places(columns.value)
        times = columns.timestamp.fill_null(NONE).to_numpy(zero_copy_only=False)
        if not times.all():
            row = int(np.argmin(times != 0))
            raise InvalidError(
                f"row {row} for topic {self._topic} has the timestamp 0, for which the Kafka client would send the "
                "present time; give null for that, or a time after 1970-01-01T00:00:00Z"
            )
        header_ends, headers, _kept = _headers(columns)
        of, failed, row = self._library.addresses, np.zeros(1, np.int64), 0
        while row < len(columns):
            reached = send_rows(
                self._producer, of["produce"], of["new_headers"], of["add_header"], of["drop_headers"], failed,
                self._units, partitions, keys, key_lengths, values, value_lengths, times, header_ends, headers, row,
            )  # fmt: skip
            self.outstanding += reached - row
            row = reached
            if row < len(columns):
                error = self._library.taken(int(failed[0]))
                if error.name() != "_QUEUE_FULL":
                    raise translated(error, f"write to topic {self._topic}", self._servers)
                self.serve(_FULL_WAIT_MS)

    def serve(self, timeout_ms: int) -> None:
        """Process delivery reports, after waiting up to `timeout_ms` for the first."""
        calls = self._library.calls
        event = calls["rd_kafka_queue_poll"](self._queue, timeout_ms)
        if not event:
            return
        if calls["rd_kafka_event_type"](event) == _DELIVERED_EVENT:
            messages = np.zeros(calls["rd_kafka_event_message_count"](event), np.int64)
            count = calls["rd_kafka_event_message_array"](event, messages.ctypes.data, len(messages))
            self._note(messages[:count])
        calls["rd_kafka_event_destroy"](event)  # and the messages

    def stored(self) -> Rows:
        """Return the stored rows reported since the last call, as `DELIVERY_ROW`s in the order of the reports."""
        told, self._told = self._told, []
        return np.concatenate(told) if told else np.zeros(0, DELIVERY_ROW)

    def close(self) -> None:
        """Close now; outstanding rows are not sent any more."""
        self._end()

    def _note(self, messages: npt.NDArray[np.int64]) -> None:
        rows: Rows = np.zeros(len(messages), DELIVERY_ROW)
        look_at_deliveries(messages, rows)
        self.outstanding -= len(rows)
        failed = np.flatnonzero(rows["error"])
        if len(failed) and self.failure is None:
            # not the message's own error text, which for a producer is the row's value
            self.failure = self._library.error(int(rows["error"][failed[0]]))
        self._told.append(rows[rows["error"] == 0])


def _end(client: Library, producer: int, queue: int, handle: int | None) -> None:
    if handle:
        client.calls["rd_kafka_topic_destroy"](handle)
    client.calls["rd_kafka_queue_destroy"](queue)
    client.calls["rd_kafka_destroy"](producer)


def _places(column: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the address and the length of each value; nulls have the length `NONE`, empty values an address."""
    _, bounds, content = column.buffers()
    count = len(column)
    if not count:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    ends = np.frombuffer(bounds, np.int32)[column.offset : column.offset + count + 1].astype(np.int64)
    base = content.address if content is not None and content.address else bounds.address
    lengths = np.diff(ends)
    if column.null_count:
        lengths[column.is_null().to_numpy(zero_copy_only=False)] = NONE
    return base + ends[:-1], lengths


def _headers(columns: RecordColumns) -> tuple[npt.NDArray[np.int64], Rows, list[pa.Array]]:
    """Return the end of each row's headers, the addresses of all headers, and the arrays that keep them alive."""
    given = columns.headers
    if given is None:
        return np.zeros(len(columns) + 1, np.int64), np.zeros(0, HEADER_ROW), []
    counts = given.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    names, values = given.flatten().flatten()
    rows: Rows = np.zeros(len(names), HEADER_ROW)
    rows["name"], rows["name_length"] = _places(names)
    rows["value"], rows["value_length"] = _places(values)
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]), rows, [names, values]


_FLUSH_SECONDS = 120.0
_SERVE_MS = 1000  # a call of the client cannot be interrupted
_CLIENT_SECONDS = 5.0  # the client reports a timeout a little later


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
        """Open a writer. `idempotent`: rows that the client retries are stored once, and in order.

        With `timeout_seconds` a write that is not acknowledged in time fails, and its remaining rows are not sent.
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
        """Store the rows and wait for the cluster's acknowledgement; return one entry for each run of offsets."""
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
        """Close the client now, as `KafkaLog.close` does; no work is pending after a write."""
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
    """Return the partition of each row: the requested one, or the table's own, or the one of its key."""
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
    """Return the runs of consecutive offsets, by partition."""
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
