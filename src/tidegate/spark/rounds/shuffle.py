"""Events on their way through Spark's shuffle: from the slot that reads a source to the slot that owns the key.

A record as a Spark row would cost more than all the work done with it, so what crosses is blobs: for each batch and
task one Arrow IPC stream, addressed to a slot. Spark's own pairs of a Python shuffle are used (a number, then bytes),
without pickling. What a source came to travels the same way and comes back with the results, and so does an error.
Where slots share a machine, a blob of events stays in a file and only its place crosses (`exchange`).

A blob begins with one byte that says what it is:

    E  uint16 length of the flow's name, uint32 task, the name, zeroes up to a multiple of 64, Arrow IPC stream
    P  Place as MessagePack: where a blob of kind E lies
    S  SourceResult as MessagePack
    R  Reached as MessagePack: how far a source came, for slots whose tasks put sources in order
    F  Failure as MessagePack

S1  batches of one source and task arrive whole; their order does not matter, tasks put them in order of their offsets.

Thread rule: pure functions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec
import pyarrow as pa

from tidegate.errors import InternalError
from tidegate.pipeline.rounds.orders import SourceResult, decode, encode
from tidegate.pipeline.tasks.packing import join_events, pack_events, unpack_events
from tidegate.spark.rounds.exchange import ALIGNMENT, Outbox, Parts, Place, fetched
from tidegate.spark.rounds.failures import Failure
from tidegate.windows.events import EventBatch

GATHERED_ROWS: Final = 1 << 20  # events kept until their parts are sent as one blob for each task
_HEAD: Final = struct.Struct("<cHI")
_EVENTS, _PLACE, _RESULT, _REACHED, _FAILURE = b"E", b"P", b"S", b"R", b"F"


class Reached(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a source came in this round."""

    flow: str
    partition: int
    stream_time: int
    next_offset: int


@dataclass
class Arrived:
    """What came through the shuffle for one slot."""

    sources: list[SourceResult] = field(default_factory=list)
    failure: Failure | None = None
    reached: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)
    _events: dict[tuple[str, int], list[EventBatch]] = field(default_factory=dict)

    def take(self, flow: str, task: int) -> list[EventBatch]:
        """The events of one task; they are given away."""
        return self._events.pop((flow, task), [])

    def add(self, blob: bytes) -> None:
        kind = blob[:1]
        if kind == _EVENTS:
            self._add_events(pa.py_buffer(blob))
        elif kind == _PLACE:
            self._add_events(fetched(decode(blob[1:], Place)))
        elif kind == _RESULT:
            self.sources.append(decode(blob[1:], SourceResult))
        elif kind == _REACHED:
            found = decode(blob[1:], Reached)
            self.reached.setdefault(found.flow, {})[found.partition] = found.stream_time, found.next_offset
        elif kind == _FAILURE:
            self.failure = self.failure or decode(blob[1:], Failure)
        else:
            raise InternalError(f"a row of Spark's shuffle begins with {kind!r}: it is none of ours")

    def _add_events(self, blob: pa.Buffer) -> None:
        kind, length, task = _HEAD.unpack_from(blob)
        if kind != _EVENTS:
            raise InternalError(f"a blob of Spark's shuffle begins with {kind!r}: no events are there")
        flow = bytes(memoryview(blob)[_HEAD.size : _HEAD.size + length]).decode()
        start = -(-(_HEAD.size + length) // ALIGNMENT) * ALIGNMENT
        self._events.setdefault((flow, task), []).append(unpack_events(blob[start:]))


def arrived(rows: Iterable[bytes]) -> Arrived:
    """All rows of a slot; the empty one that a slot without a shuffle has is nothing."""
    found = Arrived()
    for row in rows:
        if row:
            found.add(row)
    return found


def gathered(parts: Iterable[tuple[int, EventBatch]]) -> Iterator[tuple[int, EventBatch]]:
    """Parts of several batches put together by task: fewer and larger blobs."""
    waiting: dict[int, list[EventBatch]] = {}
    rows = 0
    for task, events in parts:
        waiting.setdefault(task, []).append(events)
        rows += len(events)
        if rows >= GATHERED_ROWS:
            yield from ((each, join_events(batches)) for each, batches in waiting.items())
            waiting, rows = {}, 0
    yield from ((each, join_events(batches)) for each, batches in waiting.items())


def address(slot: int) -> bytes:
    """A slot as the key of one of Spark's pairs."""
    return struct.pack("!q", slot)


def pack(flow: str, task: int, events: EventBatch, outbox: Outbox | None = None) -> bytes:
    """Events as a row of the shuffle: the blob, or, put into an outbox, its place."""
    name = flow.encode()
    head = _HEAD.pack(_EVENTS, len(name), task) + name
    parts: Parts = (head, bytes(-len(head) % ALIGNMENT), pack_events(events))
    return b"".join(parts) if outbox is None else _PLACE + encode(outbox.put(parts))


def pack_result(result: SourceResult) -> bytes:
    return _RESULT + encode(result)


def pack_reached(result: SourceResult) -> bytes:
    reached = Reached(result.flow, result.partition, result.stream_time, result.next_offset)
    return _REACHED + encode(reached)


def pack_failure(failure: Failure) -> bytes:
    return _FAILURE + encode(failure)
