"""Shuffle events from the slot that reads a source to the slot that owns the key.

Spark's shuffle moves blobs in the format of PySpark's own (a number, then bytes), without pickling. The first byte of a
blob is its kind:

    E  uint16 length of the flow's name, uint32 task, the name, zeroes up to a multiple of 64, Arrow IPC stream
    P  Place as MessagePack: the file and position of a blob of kind E
    S  SourceResult as MessagePack
    R  Reached as MessagePack: how far a source was read, for slots whose tasks order several sources
    F  Failure as MessagePack

If all slots share a machine (`local[…]`), events are written to a file once and mapped, and their place is shuffled.

S1  batches of one source and task arrive whole, in any order; tasks sort them by offset.
X1  a file belongs to one attempt and is complete before Spark hears of it.
X2  files stay until the job ends, so that a second attempt of a reader finds them; then the driver removes them all.

Thread rule: one owner.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from tidegate.errors import InternalError, TidegateError, UnavailableError
from tidegate.files import Files
from tidegate.pipeline.held_events import join_events, pack_events, unpack_events
from tidegate.pipeline.messages import SourceResult, decode, encode
from tidegate.randomness import SystemRandomness
from tidegate.spark.errors import Failure
from tidegate.windows.events import EventBatch

# -- exchange -------------------------------------------------------------------------------------

ALIGNMENT = 64
Parts = Sequence["bytes | pa.Buffer"]


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file and position of a blob."""

    path: str
    position: int
    length: int


class Outbox:
    """The blobs of one task attempt, in a file that is created with the first of them."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / SystemRandomness().uuid().hex
        self._files = Files()
        self._end = 0

    def put(self, parts: Parts) -> Place:
        """Write a blob, given in parts; return its place."""
        views = [memoryview(part) for part in parts]
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        with self._files.open(self._path, write=True, create=True) as file:
            file.write_parts(start, views)
        self._end = start + sum(view.nbytes for view in views)
        return Place(str(self._path), start, self._end - start)


def fetched(place: Place) -> pa.Buffer:
    """Return a blob, memory-mapped."""
    try:
        whole = Files().map(Path(place.path))
    except FileNotFoundError as error:
        raise UnavailableError(
            f"{place.path}, written in this round, is gone: keep what cleans temporary files away from folders of a "
            "session that runs (spark.local.dir moves them); nothing of the round counts, it can be done again"
        ) from error
    return whole[place.position : place.position + place.length]


def exchange_folder(context: Any) -> Path | None:
    """Return a folder for blobs that is deleted with the session, or None if slots may be on several machines."""
    from pyspark import SparkFiles

    if not str(context.master).startswith("local["):
        return None
    folder = Path(SparkFiles.getRootDirectory()) / f"exchange-{SystemRandomness().uuid().hex}"
    Files().mkdir(folder, private=True)
    return folder


def clear(folder: Path) -> None:
    """Remove all blobs; what cannot be removed is deleted with the session (X2)."""
    files = Files()
    with suppress(TidegateError, OSError):
        for name in files.list(folder):
            files.unlink(folder / name, missing_ok=True)


# -- shuffle --------------------------------------------------------------------------------------

GATHERED_ROWS: Final = 1 << 20  # events collected until they are sent as one blob for each task
_HEAD: Final = struct.Struct("<cHI")
_EVENTS, _PLACE, _RESULT, _REACHED, _FAILURE = b"E", b"P", b"S", b"R", b"F"


class Reached(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The position of a source after this round."""

    flow: str
    partition: int
    stream_time: int
    next_offset: int


@dataclass
class Arrived:
    """The blobs that arrived through the shuffle for one slot."""

    sources: list[SourceResult] = field(default_factory=list)
    failure: Failure | None = None
    reached: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)
    _events: dict[tuple[str, int], list[EventBatch]] = field(default_factory=dict)

    def take(self, flow: str, task: int) -> list[EventBatch]:
        """Return the events of one task and drop them here."""
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
    """Collect all rows of a slot; the empty row of a slot without a shuffle is skipped."""
    found = Arrived()
    for row in rows:
        if row:
            found.add(row)
    return found


def gathered(parts: Iterable[tuple[int, EventBatch]]) -> Iterator[tuple[int, EventBatch]]:
    """Merge parts of several batches by task: fewer and larger blobs."""
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
    """Encode a slot as the key of a pair in Spark's shuffle."""
    return struct.pack("!q", slot)


def pack(flow: str, task: int, events: EventBatch, outbox: Outbox | None = None) -> bytes:
    """Encode events as a row of the shuffle: the blob, or its place in an outbox."""
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
