"""A consumer of chosen partitions that gives messages as Arrow columns: many at a time, none a Python object.

What `fetch` gives is the library's memory until it is closed; `batch` copies out of it, once.

Thread rule: one consumer, one thread.
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
    HEADER_ROW,
    MESSAGE_ROW,
    NONE,
    copy_values,
    let_go,
    look_at_headers,
    look_at_messages,
)
from tidegate.log.format.record_builder import header_names
from tidegate.log.format.records import HEADER_TYPE, HEADERS_TYPE, RECORD_SCHEMA, TIMESTAMP_TYPE, TOPIC_TYPE
from tidegate.log.kafka.client import translated
from tidegate.log.kafka.librdkafka import ClientError, Library, library

Rows = npt.NDArray[Any]
MOST_BYTES: Final = (1 << 31) - 1  # of a column: Arrow counts its bytes in 31 bits


class MessageConsumer:
    """Fetches messages of one topic; joins no group."""

    def __init__(self, settings: Mapping[str, Any], servers: str, topic: str, *, most: int) -> None:
        self._library = library()
        self._servers, self._topic = servers, topic
        consumer = self._library.consumer(settings)
        queue = self._library.calls["rd_kafka_queue_get_consumer"](consumer)
        self._consumer, self._queue = consumer, queue
        self._messages = np.zeros(most, np.int64)
        self._end = weakref.finalize(self, _end, self._library, consumer, queue)

    @property
    def is_open(self) -> bool:
        return self._end.alive

    def assign(self, offsets: Mapping[int, int]) -> None:
        """Fetch these partitions, from these offsets on."""
        self._require_open()
        error = self._library.assign(self._consumer, self._topic, offsets)
        if error is not None:
            raise translated(error, f"read topic {self._topic}", self._servers)

    def fetch(self, timeout_ms: int) -> Fetched | None:
        """What has come, after waiting for the first of it at most so long; None for nothing."""
        self._require_open()
        calls, room = self._library.calls, self._messages
        first = calls["rd_kafka_consumer_poll"](self._consumer, timeout_ms)
        if not first:
            return None
        room[0] = first  # asked for many, the library would wait for all of them
        more = calls["rd_kafka_consume_batch_queue"](self._queue, 0, room[1:].ctypes.data, len(room) - 1)
        fetched = Fetched(self._library, self._topic, room[: 1 + max(more, 0)].copy())
        if more < 0:
            fetched.close()
            error = self._library.error(calls["rd_kafka_last_error"]())
            raise translated(error, f"read topic {self._topic}", self._servers)
        return fetched

    def close(self) -> None:
        self._end()

    def _require_open(self) -> None:
        if not self.is_open:  # its memory is gone: asking the library would end the process
            raise InvalidError(f"the reader of {self._topic} was closed; open another")


class Fetched:
    """Messages that have come, and errors among them, in their order; `rows` has a `MESSAGE_ROW` for each."""

    def __init__(self, client: Library, topic: str, messages: npt.NDArray[np.int64]) -> None:
        self._library, self._topic, self._messages = client, topic, messages
        self.rows: Rows = np.zeros(len(messages), MESSAGE_ROW)
        of = client.addresses
        look_at_messages(
            messages, of["timestamp_of"], of["headers_of"], of["count_of"], np.zeros(1, np.int64), self.rows
        )

    def __enter__(self) -> Fetched:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the messages back."""
        let_go(self._messages, self._library.addresses["destroy"])
        self._messages = self._messages[:0]

    def error(self, row: int) -> ClientError:
        """What the error at this row says."""
        said = self._library.calls["rd_kafka_message_errstr"](int(self._messages[row]))
        return self._library.error(int(self.rows["error"][row]), (said or b"").decode("utf-8", "replace"))

    def batch(self, chosen: npt.NDArray[np.int64]) -> pa.RecordBatch:
        """These rows, all of one partition, as an Arrow batch."""
        rows: Rows = self.rows[chosen]
        count, partition = len(rows), int(rows["partition"][0])
        times = np.ascontiguousarray(rows["timestamp"])
        columns = [
            pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([self._topic])),
            pa.array(np.full(count, partition, np.int32)),
            pa.array(np.ascontiguousarray(rows["offset"])),
            pa.Array.from_buffers(TIMESTAMP_TYPE, count, [_bitmap(times != NONE), pa.py_buffer(times)]),
            _binary(rows["key"], rows["key_length"]),
            _binary(rows["value"], rows["value_length"]),
            self._headers(rows),
        ]
        columns[0] = columns[0].cast(TOPIC_TYPE)
        return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)

    def _headers(self, rows: Rows) -> pa.Array:
        counts = np.ascontiguousarray(rows["header_count"])
        ends = _ends(counts)
        entries: Rows = np.zeros(int(ends[-1]), HEADER_ROW)
        look_at_headers(
            np.ascontiguousarray(rows["headers"]),
            counts,
            self._library.addresses["header_at"],
            np.zeros(3, np.int64),
            entries,
        )
        names = header_names(_binary(entries["name"], entries["name_length"]))
        pairs = [names, _binary(entries["value"], entries["value_length"])]
        return pa.ListArray.from_arrays(
            pa.array(ends), pa.StructArray.from_arrays(pairs, fields=list(HEADER_TYPE)), type=HEADERS_TYPE
        )


def _end(client: Library, consumer: int, queue: int) -> None:
    client.calls["rd_kafka_queue_destroy"](queue)
    client.calls["rd_kafka_consumer_close"](consumer)
    client.calls["rd_kafka_destroy"](consumer)


def _binary(addresses: Rows, lengths: Rows) -> pa.Array:
    """Values at addresses, copied into a column; a length of `NONE` is a null."""
    count, there = len(lengths), lengths != NONE
    ends = _ends(np.where(there, lengths, 0))
    content = np.empty(int(ends[-1]), np.uint8)
    copy_values(np.ascontiguousarray(addresses), ends, content)
    return pa.Array.from_buffers(
        pa.binary(), count, [_bitmap(there), pa.py_buffer(ends), pa.py_buffer(content)]
    )


def _ends(lengths: Rows) -> npt.NDArray[np.int32]:
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    if ends[-1] > MOST_BYTES:
        raise InvalidError(
            f"{ends[-1]:,} bytes came at once, more than Arrow can count; lower the client's queued.max.messages.kbytes"
        )
    return ends.astype(np.int32)


def _bitmap(there: npt.NDArray[np.bool_]) -> pa.Buffer | None:
    return None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))
