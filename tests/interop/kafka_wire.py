"""The few requests of Kafka's protocol that ordinary clients do not let a test make.

Produce sends exactly the batch bytes it is given (so their boundaries, timestamps, producer ids and
sequences are the test's choice); WriteTxnMarkers writes transaction markers with any epochs; DeleteRecords
moves the log start. All are in versions without tagged fields, so plain structs do. Not safe for use from
several threads.
"""

from __future__ import annotations

import socket
import struct

# Kafka's error codes by the names of its protocol, as far as the tests meet them.
ERROR_NAMES = {
    -1: "UNKNOWN_SERVER_ERROR",
    1: "OFFSET_OUT_OF_RANGE",
    2: "CORRUPT_MESSAGE",
    10: "MESSAGE_TOO_LARGE",
    18: "RECORD_LIST_TOO_LARGE",
    32: "INVALID_TIMESTAMP",
    45: "OUT_OF_ORDER_SEQUENCE_NUMBER",
    47: "INVALID_PRODUCER_EPOCH",
    48: "INVALID_TXN_STATE",
    52: "TRANSACTION_COORDINATOR_FENCED",
    53: "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    87: "INVALID_RECORD",
}
PRODUCE, LIST_OFFSETS, DELETE_RECORDS, WRITE_TXN_MARKERS = 0, 2, 21, 27


class RefusedError(Exception):
    """The broker answered with an error; `name` is Kafka's for it."""

    def __init__(self, code: int, message: str = "") -> None:
        self.name = ERROR_NAMES.get(code, f"error {code}")
        super().__init__(f"{self.name} {message}")


class Wire:
    """One connection to one broker."""

    def __init__(self, address: str, timeout: float = 30) -> None:
        host, port = address.split(":")
        self._socket = socket.create_connection((host, int(port)), timeout)
        self._correlation = 0

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def produce(
        self,
        topic: str,
        batch: bytes,
        *,
        partition: int = 0,
        transactional_id: str | None = None,
    ) -> int:
        """Append this one batch; the base offset it got."""
        body = _string(transactional_id) + struct.pack(">hi", -1, 30_000)
        body += struct.pack(">i", 1) + _string(topic) + struct.pack(">ii", 1, partition)
        body += struct.pack(">i", len(batch)) + batch
        answer = self._call(PRODUCE, 8, body)
        answer.array_of_one()
        answer.string()
        answer.array_of_one()
        _, code, base_offset, _, _ = answer.take(">ihqqq")
        for _ in range(answer.take(">i")[0]):
            answer.take(">i")
            answer.string()
        message = answer.string()
        if code != 0:
            raise RefusedError(code, message or "")
        return base_offset

    def write_marker(
        self,
        topic: str,
        *,
        producer_id: int,
        producer_epoch: int,
        commit: bool,
        coordinator_epoch: int = 0,
        partition: int = 0,
    ) -> None:
        """End this producer's transaction in one partition."""
        body = struct.pack(">iqh?", 1, producer_id, producer_epoch, commit)
        body += struct.pack(">i", 1) + _string(topic) + struct.pack(">ii", 1, partition)
        body += struct.pack(">i", coordinator_epoch)
        answer = self._call(WRITE_TXN_MARKERS, 0, body)
        answer.array_of_one()
        answer.take(">q")
        answer.array_of_one()
        answer.string()
        answer.array_of_one()
        _, code = answer.take(">ih")
        if code != 0:
            raise RefusedError(code)

    def delete_records(self, topic: str, before_offset: int, *, partition: int = 0) -> int:
        """Move the log start offset; where it is now."""
        body = (
            struct.pack(">i", 1) + _string(topic) + struct.pack(">iiqi", 1, partition, before_offset, 30_000)
        )
        answer = self._call(DELETE_RECORDS, 1, body)
        answer.take(">i")
        answer.array_of_one()
        answer.string()
        answer.array_of_one()
        _, low_watermark, code = answer.take(">iqh")
        if code != 0:
            raise RefusedError(code)
        return low_watermark

    def offset_for(self, topic: str, timestamp: int, *, partition: int = 0, committed: bool = False) -> int:
        """Offset for a timestamp, or for -1 latest, -2 earliest; -1 when there is none."""
        body = struct.pack(">i?i", -1, committed, 1) + _string(topic)
        body += struct.pack(">iiiq", 1, partition, -1, timestamp)
        answer = self._call(LIST_OFFSETS, 5, body)
        answer.take(">i")
        answer.array_of_one()
        answer.string()
        answer.array_of_one()
        _, code, _, offset, _ = answer.take(">ihqqi")
        if code != 0:
            raise RefusedError(code)
        return offset

    def _call(self, api: int, version: int, body: bytes) -> _Answer:
        self._correlation += 1
        head = struct.pack(">hhi", api, version, self._correlation) + _string("tidegate-interop")
        self._socket.sendall(struct.pack(">i", len(head) + len(body)) + head + body)
        (length,) = struct.unpack(">i", self._exactly(4))
        answer = _Answer(self._exactly(length))
        (correlation,) = answer.take(">i")
        if correlation != self._correlation:
            raise RuntimeError(f"answer {correlation} to request {self._correlation}")
        return answer

    def _exactly(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            part = self._socket.recv(length - len(parts))
            if not part:
                raise ConnectionError("the broker closed the connection")
            parts += part
        return bytes(parts)


class _Answer:
    """A response being read from front to back."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def take(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(layout, self._body, self._at)
        self._at += struct.calcsize(layout)
        return values

    def string(self) -> str | None:
        (length,) = self.take(">h")
        if length < 0:
            return None
        self._at += length
        return self._body[self._at - length : self._at].decode()

    def array_of_one(self) -> None:
        (count,) = self.take(">i")
        if count != 1:
            raise RuntimeError(f"expected one entry in the answer, found {count}")


def _string(value: str | None) -> bytes:
    if value is None:
        return struct.pack(">h", -1)
    raw = value.encode()
    return struct.pack(">h", len(raw)) + raw
