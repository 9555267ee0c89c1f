"""Events of several source partitions in the one order that the log alone decides, and those that wait for their turn.

The order is that of (stamp, source partition, offset), where the stamp is the stream time at the event's own place in
its partition. Stamps never go back within a partition, so a partition's events are in this order already, and putting
partitions together is a merge. A partition's *frontier* (stream time, partition, next offset) is what none of its
later events can be below. An event is worked on once it is below the frontiers of all partitions that are waited for;
until then it is held back, in a store of the task:

    key = source partition, 4 bytes | ts = stamp | payload: number, offset, event time, event's key, user's columns

O1  what is worked on over all rounds is the same sequence, however the log is cut into rounds, as long as every
    partition with records to come is waited for. Which ones are is said by the round's plan (`rounds.ticks`).
O2  events of one partition leave in the order they came, always, also when offsets begin anew because somebody had the
    app go on with a topic that was made again. Rows are numbered as they are held back, so one number for each
    partition says which rows of the store are still held back.

Thread rule: one task, one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import CorruptError
from tidegate.pipeline.rounds.orders import Held
from tidegate.pipeline.tasks.batching import BATCH_BYTES, PIECE_ROWS, batch_bytes
from tidegate.pipeline.tasks.packing import join_events
from tidegate.storage import BucketIndex, Merge, StoreSpec, Time, WorkerStorageRuntime
from tidegate.storage.runs.columns import int64_column
from tidegate.windows.events import EventBatch
from tidegate.windows.kinds import LATEST

STORE: Final = "held"
VERSION: Final = 1
EARLIEST: Final = -(2**63)
Frontiers: TypeAlias = Mapping[int, tuple[int, int]]  # source partition → stream time, next offset
Cursor: TypeAlias = tuple[int, int, int]  # stamp, source partition, offset
RELEASED_ROWS: Final = 1 << 20  # about as many held-back events go at once
_END: Final[Cursor] = (LATEST, LATEST, LATEST)


class _Lane(msgspec.Struct, array_like=True):
    """What is held back of one source partition."""

    events: int
    offset: int  # no offset that is held back is below
    number: int  # nor is a row's number


class _Saved(msgspec.Struct, array_like=True):
    waits_for: Cursor = (0, 0, 0)
    next_number: int = 0
    lanes: dict[int, _Lane] = {}


class HeldState:
    """The store of held-back events, and beside it which of its rows still are.

    Version u8 (1) | MessagePack array: what is waited for, next number, {partition: [events, offset, number]}.
    """

    def __init__(self, values: pa.Schema) -> None:
        payload = pa.schema(
            [
                pa.field("number", pa.int64(), nullable=False),
                pa.field("offset", pa.int64(), nullable=False),
                pa.field("event_ts", pa.int64(), nullable=False),
                pa.field("event_key", pa.binary()),
                pa.field("values", pa.struct(list(values))),
            ]
        )
        self._index = BucketIndex(StoreSpec(STORE, Merge.APPEND, payload=payload))
        self.saved = _Saved()

    @property
    def index(self) -> BucketIndex:
        return self._index

    def encode_progress(self) -> bytes:
        return bytes([VERSION]) + msgspec.msgpack.encode(self.saved)

    def restore_progress(self, data: bytes) -> None:
        if data and data[0] != VERSION:
            raise CorruptError(
                f"held-back events have format {data[0]}; this version knows {VERSION}: run the version that "
                "wrote them",
                kafka_name=None,
            )
        try:
            self.saved = msgspec.msgpack.decode(data[1:], type=_Saved) if data else _Saved()
        except msgspec.MsgspecError as error:
            raise CorruptError(f"held-back events cannot be read: {error}", kafka_name=None) from error


class HeldEvents:
    """Puts a task's events in order and holds back those that are too early."""

    def __init__(self, runtime: WorkerStorageRuntime, task: str, values: pa.Schema) -> None:
        self._runtime, self._task, self._values = runtime, task, values
        self._state = HeldState(values)
        runtime.attach(task, self._state)

    @property
    def held(self) -> Held | None:
        """What is held back now; None: nothing."""
        waits_for, lanes = self._state.saved.waits_for, self._state.saved.lanes
        if not lanes:
            return None
        offsets = {partition: lane.offset for partition, lane in sorted(lanes.items())}
        return Held(sum(lane.events for lane in lanes.values()), waits_for, offsets)

    def take(
        self,
        pieces: Iterable[EventBatch],
        frontiers: Frontiers,
        left_out: Sequence[tuple[int, int, int]] = (),
    ) -> Iterator[EventBatch]:
        """Give the events that nothing can come before any more, in order, and hold back the others.

        Each piece is of one source partition, its events in order. Without frontiers nothing is waited for. Events
        of the store with these offsets (partition, first, next) are dropped when their turn comes.
        """
        bound = min(
            ((time, partition, offset) for partition, (time, offset) in frontiers.items()), default=_END
        )
        stored, bound = self._due(bound)
        stored = [rest for piece in stored if len(rest := _without(piece, left_out))]
        lanes: dict[int, list[EventBatch]] = {}
        early: list[EventBatch] = []
        for piece in (*stored, *sorted((each for each in pieces if len(each)), key=_place)):
            partition = int(piece.partition[0])
            count = _count_below(piece, partition, bound)
            if count:
                lanes.setdefault(partition, []).append(piece.slice(0, count))
            if count < len(piece):
                early.append(piece.slice(count, len(piece)))
        self._hold(early, bound)
        return merged([lanes[partition] for partition in sorted(lanes)])

    # -- the store -------------------------------------------------------------------------------

    def _due(self, bound: Cursor) -> tuple[list[EventBatch], Cursor]:
        """Take held-back events below the bound out of the store, by partition and offset.

        When they are very many only the earliest go, and the bound that is returned is the one to go by.
        """
        saved = self._state.saved
        if not saved.lanes or bound <= saved.waits_for:
            return [], bound
        bound = self._bound_within(bound)
        with self._runtime.reader().scan(self._task, self._state, Time(EARLIEST, bound[0])) as scan:
            found = [rows for batch in scan if (rows := self._wanted(batch, bound)).num_rows]
        pieces: list[EventBatch] = []
        lanes = dict(saved.lanes)
        if found:
            rows = pa.concat_batches(found)
            number, partition = rows.column("number").to_numpy(), _numbers(rows.column("key"))
            order = np.lexsort((number, partition))
            together, number = self._events(rows.take(pa.array(order))), number[order]
            cuts = (np.flatnonzero(np.diff(together.partition)) + 1).tolist()
            for start, stop in pairwise([0, *cuts, len(together)]):
                piece = together.slice(start, stop)
                pieces.append(piece)
                left = lanes.pop(int(piece.partition[0])).events - len(piece)
                if left:
                    lanes[int(piece.partition[0])] = _Lane(
                        left, int(piece.offset[-1]) + 1, int(number[stop - 1]) + 1
                    )
        saved.lanes, saved.waits_for = lanes, bound
        self._runtime.writer().prune(self._task, self._state, bound[0] if lanes else LATEST)
        return pieces, bound

    def _bound_within(self, bound: Cursor) -> Cursor:
        """The bound, or a lower one, so that not many more events than fit a batch are below it."""
        index, rows = self._state.index, 0
        for start in index.all_buckets():
            if rows >= RELEASED_ROWS:
                bound = min(bound, (start, -1, -1))
                break
            bucket = index.snapshot(start)
            rows += 0 if bucket is None else sum(run.rows for run in bucket.runs)
        if rows <= 2 * RELEASED_ROWS:
            return bound
        columns = ("key", "ts", "number", "offset")  # a bucket that is too large is cut at a time
        with self._runtime.reader().scan(
            self._task, self._state, Time(EARLIEST, bound[0]), columns=columns
        ) as scan:
            due = [self._wanted(batch, bound).column("ts").to_numpy() for batch in scan]
        stamps = np.concatenate([np.empty(0, np.int64), *due])
        if len(stamps) <= 2 * RELEASED_ROWS:
            return bound
        return min(bound, (int(np.partition(stamps, RELEASED_ROWS)[RELEASED_ROWS]) + 1, -1, -1))

    def _wanted(self, rows: pa.RecordBatch, bound: Cursor) -> pa.RecordBatch:
        """Rows of the store that are still held back, and below the bound."""
        lanes = self._state.saved.lanes
        partition = _numbers(rows.column("key"))
        first = np.full(1 + max(int(partition.max()), *lanes), LATEST, np.int64)
        for number, lane in lanes.items():
            first[number] = lane.number
        time, least, next_offset = bound
        stamp, offset = rows.column("ts").to_numpy(), rows.column("offset").to_numpy()
        is_before = (partition < least) | ((partition == least) & (offset < next_offset))
        is_held = rows.column("number").to_numpy() >= first[partition]
        return rows.filter(pa.array(is_held & ((stamp < time) | ((stamp == time) & is_before))))

    def _events(self, rows: pa.RecordBatch) -> EventBatch:
        return EventBatch(
            key=rows.column("event_key"),
            ts=rows.column("event_ts").to_numpy(),
            offset=rows.column("offset").to_numpy(),
            partition=_numbers(rows.column("key")),
            stream_time=rows.column("ts").to_numpy(),
            values=pa.RecordBatch.from_arrays(rows.column("values").flatten(), schema=self._values),
        )

    def _hold(self, early: Sequence[EventBatch], bound: Cursor) -> None:
        """Keep events for later rounds."""
        saved = self._state.saved
        if not early:
            return
        lanes = dict(saved.lanes)
        for piece in early:
            partition, number, offset = int(piece.partition[0]), saved.next_number, int(piece.offset[0])
            lane = lanes.get(partition, _Lane(0, offset, number))
            lanes[partition] = _Lane(lane.events + len(piece), min(lane.offset, offset), lane.number)
            saved.next_number += len(piece)
            rows = pa.RecordBatch.from_pydict(
                {
                    "key": _keys(piece.partition),
                    "ts": int64_column(np.ascontiguousarray(piece.stream_time)),
                    "number": int64_column(np.arange(number, saved.next_number)),
                    "offset": int64_column(np.ascontiguousarray(piece.offset)),
                    "event_ts": int64_column(np.ascontiguousarray(piece.ts)),
                    "event_key": piece.key,
                    "values": pa.StructArray.from_arrays(piece.values.columns, fields=list(self._values)),
                }
            )
            self._state.index.insert(self._runtime.writer().append(self._task, self._state, rows))
        saved.lanes, saved.waits_for = lanes, bound


def merged(lanes: Sequence[Sequence[EventBatch]]) -> Iterator[EventBatch]:
    """The events of several partitions in order of (stamp, partition, offset), in batches.

    Each lane is one partition's events in order; lanes ascend by partition.
    """
    lanes = [lane for lane in lanes if lane]
    if len(lanes) < 2:
        for lane in lanes:
            yield from lane
        return
    stamps = [np.concatenate([piece.stream_time for piece in lane]) for lane in lanes]
    # lanes lie behind each other and each ascends: a stable sort of the stamps is the merge
    order = np.argsort(np.concatenate(stamps), kind="stable")
    whose = np.repeat(np.arange(len(lanes)), [len(each) for each in stamps])[order]
    size = sum(batch_bytes(piece) for lane in lanes for piece in lane)
    step = max(1, min(PIECE_ROWS, len(order) * BATCH_BYTES // max(1, size)))
    cursors = [_Cut(lane) for lane in lanes]
    for start in range(0, len(order), step):
        counts = np.bincount(whose[start : start + step], minlength=len(lanes)).tolist()
        parts = [piece for cursor, count in zip(cursors, counts, strict=True) for piece in cursor.take(count)]
        together = join_events(parts)
        yield together.take(np.argsort(together.stream_time, kind="stable"))


class _Cut:
    """Cuts events off the front of a lane."""

    def __init__(self, lane: Sequence[EventBatch]) -> None:
        self._lane = list(reversed(lane))

    def take(self, count: int) -> Iterator[EventBatch]:
        while count:
            piece = self._lane.pop()
            if len(piece) > count:
                self._lane.append(piece.slice(count, len(piece)))
                piece = piece.slice(0, count)
            count -= len(piece)
            yield piece


def _without(piece: EventBatch, left_out: Sequence[tuple[int, int, int]]) -> EventBatch:
    """One partition's events without those at these offsets."""
    is_left = np.ones(len(piece), np.bool_)
    for partition, first, following in left_out:
        if partition == int(piece.partition[0]):
            is_left &= (piece.offset < first) | (piece.offset >= following)
    return piece if is_left.all() else piece.take(is_left)


def _place(piece: EventBatch) -> tuple[int, int]:
    """Where a piece that came through a shuffle belongs: after its source partition and offsets."""
    return int(piece.partition[0]), int(piece.offset[0])


def _count_below(piece: EventBatch, partition: int, bound: Cursor) -> int:
    """How many of one partition's events are below the bound."""
    time, least, next_offset = bound
    before = int(np.searchsorted(piece.stream_time, time, side="right" if partition <= least else "left"))
    if partition == least:
        before = min(before, int(np.searchsorted(piece.offset, next_offset)))
    return before


def _keys(partition: npt.NDArray[np.int32]) -> pa.BinaryArray:
    """Numbers of partitions as keys of the store."""
    bounds = np.arange(0, 4 * len(partition) + 1, 4, dtype=np.int32)
    content = np.ascontiguousarray(partition, np.dtype(">i4"))
    return pa.Array.from_buffers(
        pa.binary(), len(partition), [None, pa.py_buffer(bounds), pa.py_buffer(content)]
    )


def _numbers(keys: pa.BinaryArray) -> npt.NDArray[np.int32]:
    """What `_keys` was given."""
    start = int(np.frombuffer(keys.buffers()[1], np.int32)[keys.offset])
    return np.frombuffer(keys.buffers()[2], np.dtype(">i4"), len(keys), start).astype(np.int32)
