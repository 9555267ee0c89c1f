"""A producer that takes Arrow columns: many rows at a time, none a Python object; what became of them as arrays.

The library copies rows into its queue until that is full, sends them in its own threads, and tells of each whether and
where it was stored. A row is outstanding until that was told.

Thread rule: one producer, one thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import InvalidError
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
from tidegate.log.format.records import RecordColumns
from tidegate.log.kafka.client import translated
from tidegate.log.kafka.librdkafka import ClientError, Library, library

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
        """Hand over rows, each for its partition (`ANY_PARTITION`: by its key); waits while the queue is full."""
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
        """Note what became of rows, after waiting for word of the first at most so long."""
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
        """Where rows were stored, since this was asked last; a `DELIVERY_ROW` for each, in the order of being told."""
        told, self._told = self._told, []
        return np.concatenate(told) if told else np.zeros(0, DELIVERY_ROW)

    def close(self) -> None:
        """End here and now; what is outstanding is not sent any more."""
        self._end()

    def _note(self, messages: npt.NDArray[np.int64]) -> None:
        rows: Rows = np.zeros(len(messages), DELIVERY_ROW)
        look_at_deliveries(messages, rows)
        self.outstanding -= len(rows)
        failed = np.flatnonzero(rows["error"])
        if len(failed) and self.failure is None:
            # not the message's own text of the error, which for a producer is the row's value
            self.failure = self._library.error(int(rows["error"][failed[0]]))
        self._told.append(rows[rows["error"] == 0])


def _end(client: Library, producer: int, queue: int, handle: int | None) -> None:
    if handle:
        client.calls["rd_kafka_topic_destroy"](handle)
    client.calls["rd_kafka_queue_destroy"](queue)
    client.calls["rd_kafka_destroy"](producer)


def _places(column: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The address and the length of each value; a null has the length `NONE`, what is empty still an address."""
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
    """Which headers each row has, as ends; where all of them lie; and what holds them there."""
    given = columns.headers
    if given is None:
        return np.zeros(len(columns) + 1, np.int64), np.zeros(0, HEADER_ROW), []
    counts = given.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    names, values = given.flatten().flatten()
    rows: Rows = np.zeros(len(names), HEADER_ROW)
    rows["name"], rows["name_length"] = _places(names)
    rows["value"], rows["value_length"] = _places(values)
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]), rows, [names, values]
