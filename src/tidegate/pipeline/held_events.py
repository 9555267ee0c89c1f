"""Order events of several source partitions, hold back those whose turn has not come, and regroup them into batches.

The order is (stamp, source partition, offset); the stamp is the stream time at the event's own place in its partition,
where stamps never decrease. The *frontier* of a partition (stream time, partition, next offset) is a lower bound of
its later events. An event is processed once it is below the frontiers of all partitions that are waited for; until
then the task keeps it in a store:

    key = source partition, 4 bytes | ts = stamp | payload: number, offset, event time, event's key, user's columns

O1  the sequence of processed events does not depend on how the log is cut into rounds, as long as every partition
    with records to come is waited for; the round's plan names these (`planner`).
O2  events of one partition leave in the order they came, also if offsets start again: rows are numbered when stored.
B1  where batches are cut depends on the events alone, row by row, not on the pieces they arrived in.
B2  a batch is at most an eighth of the memory that the storage limit leaves besides its pool.

Thread rule: one thread for each task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.pipeline.messages import Held, decode_state, encode_state
from tidegate.pipeline.transforms import Timings
from tidegate.storage import BucketIndex, Merge, StoreSpec, Time, WorkerStorageRuntime
from tidegate.storage.runs.columns import int64_column
from tidegate.windows.events import EventBatch, Int64s, RowChanges
from tidegate.windows.kinds import LATEST

# -- packing --------------------------------------------------------------------------------------


def pack_events(batch: EventBatch) -> pa.Buffer:
    """Encode a batch as one Arrow IPC stream; the user's columns follow the event's own, so that names cannot clash."""
    own = [
        batch.key,
        pa.array(batch.ts),
        pa.array(batch.offset),
        pa.array(batch.partition),
        pa.array(batch.stream_time),
    ]
    if batch.changes is not None:
        own += [batch.changes.row, pa.array(batch.changes.weight), pa.array(batch.changes.written)]
    fields = [pa.field(name, column.type) for name, column in zip(_NAMES, own, strict=False)]
    schema = pa.schema([*fields, *batch.values.schema], metadata={_OWN: str(len(own))})
    packed = pa.RecordBatch.from_arrays([*own, *batch.values.columns], schema=schema)
    measure = pa.MockOutputStream()
    _write(packed, measure)
    # allocated at its final size: a growing stream copies what it has
    data = pa.allocate_buffer(measure.size())
    _write(packed, pa.FixedSizeBufferWriter(data))
    return data


def _write(packed: pa.RecordBatch, sink: pa.NativeFile) -> None:
    with pa.ipc.new_stream(sink, packed.schema) as writer:
        writer.write_batch(packed)


def unpack_events(data: bytes | memoryview | pa.Buffer) -> EventBatch:
    """Decode what `pack_events` returned; columns point into the given bytes."""
    with pa.ipc.open_stream(data) as reader:
        packed = reader.read_next_batch()
    own = int(packed.schema.metadata[_OWN])
    key, ts, offset, partition, stream_time, *changes = packed.columns[:own]
    schema = pa.schema(list(packed.schema)[own:])
    return EventBatch(
        key=key,
        ts=ts.to_numpy(),
        offset=offset.to_numpy(),
        partition=partition.to_numpy(),
        stream_time=stream_time.to_numpy(),
        values=_values(packed.columns[own:], schema, packed.num_rows),
        changes=RowChanges(changes[0], changes[1].to_numpy(), changes[2].to_numpy()) if changes else None,
    )


def join_events(batches: Sequence[EventBatch]) -> EventBatch:
    """Concatenate batches; at least one."""
    if len(batches) == 1:
        return batches[0]
    values = [batch.values for batch in batches]
    changes = [batch.changes for batch in batches if batch.changes is not None]
    return EventBatch(
        key=pa.concat_arrays([batch.key for batch in batches]),
        ts=np.concatenate([batch.ts for batch in batches]),
        offset=np.concatenate([batch.offset for batch in batches]),
        partition=np.concatenate([batch.partition for batch in batches]),
        stream_time=np.concatenate([batch.stream_time for batch in batches]),
        values=pa.concat_batches(values)
        if values[0].num_columns
        else _values([], values[0].schema, sum(map(len, batches))),
        changes=RowChanges(
            row=pa.concat_arrays([each.row for each in changes]),
            weight=np.concatenate([each.weight for each in changes]),
            written=np.concatenate([each.written for each in changes]),
        )
        if changes
        else None,
    )


def _values(columns: list[pa.Array], schema: pa.Schema, rows: int) -> pa.RecordBatch:
    if columns:
        return pa.RecordBatch.from_arrays(columns, schema=schema)
    # a batch without columns still has rows
    return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))


_OWN = b"columns of the event itself"  # their number; the user's columns follow
_NAMES = ("key", "ts", "offset", "partition", "stream_time", "row", "weight", "written")


# -- batching -------------------------------------------------------------------------------------

PIECE_ROWS = 1 << 18  # about as many rows as fit a core's share of the caches, with intermediates
BATCH_ROWS = 1 << 20
BATCH_BYTES = 256 << 20
NESTED_BYTES = 64  # for a value whose size is not known without looking
OWN_BYTES = 40  # for an event, besides key and columns


def in_batches(
    pieces: Iterable[EventBatch],
    timings: Timings,
    *,
    rows: int = BATCH_ROWS,
    size: int = BATCH_BYTES,
) -> Iterator[EventBatch]:
    """Yield the events in batches of at most `rows` and `size` bytes; a larger event comes alone."""
    waiting, rows_left, bytes_left = list[EventBatch](), rows, size
    for whole in pieces:
        piece = whole
        while len(piece):
            fitting, taken = fits(piece, rows_left, bytes_left, alone=not waiting)
            if fitting:
                waiting.append(piece.slice(0, fitting))
                rows_left, bytes_left = rows_left - fitting, bytes_left - taken
            if fitting == len(piece):
                break
            piece = piece.slice(fitting, len(piece))
            with timings("join"):
                joined = join_events(waiting)
            yield joined
            waiting, rows_left, bytes_left = [], rows, size
    if waiting:
        with timings("join"):
            joined = join_events(waiting)
        yield joined


def fits(piece: EventBatch, rows: int, size: int, *, alone: bool) -> tuple[int, int]:
    """Return how many of the first events fit, and their bytes; with `alone` at least one."""
    fitting = min(len(piece), rows)
    total = batch_bytes(piece.slice(0, fitting))
    if total <= size:
        return fitting, total
    taken = np.cumsum(row_bytes(piece.slice(0, fitting)))
    fitting = int(np.searchsorted(taken, size, side="right"))
    fitting = max(fitting, 1) if alone else fitting
    return fitting, int(taken[fitting - 1]) if fitting else 0


def batch_bytes(piece: EventBatch) -> int:
    """Estimate the bytes of the events: the sum of `row_bytes`, without looking at rows where that is possible."""
    total = OWN_BYTES * len(piece)
    for column in (piece.key, *piece.values.columns):
        if not len(column):
            continue
        width = _width(column.type)
        if width is not None:
            total += width * len(column)
        else:
            bounds = np.frombuffer(column.buffers()[1], np.int32)
            total += int(bounds[column.offset + len(column)] - bounds[column.offset]) + 4 * len(column)
    return total


def row_bytes(piece: EventBatch) -> Int64s:
    """Estimate the bytes of each event."""
    sizes = np.full(len(piece), OWN_BYTES, np.int64)
    for column in (piece.key, *piece.values.columns):
        width = _width(column.type)
        if width is not None:
            sizes += width
        elif len(column):
            bounds = np.frombuffer(column.buffers()[1], np.int32)
            sizes += np.diff(bounds[column.offset : column.offset + len(column) + 1]) + 4
    return sizes


def _width(kind: pa.DataType) -> int | None:
    """The bytes of a value; None: given by its offsets."""
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        return None
    if pa.types.is_primitive(kind) or pa.types.is_decimal(kind):
        return max(1, int(kind.bit_width) // 8)
    return NESTED_BYTES


# -- held events -----------------------------------------------------------------------------------

STORE: Final = "held"
VERSION: Final = 1
EARLIEST: Final = -(2**63)
Frontiers: TypeAlias = Mapping[int, tuple[int, int]]  # source partition → stream time, next offset
Cursor: TypeAlias = tuple[int, int, int]  # stamp, source partition, offset
RELEASED_ROWS: Final = 1 << 20  # about as many held-back events are released at once
_END: Final[Cursor] = (LATEST, LATEST, LATEST)


class _Lane(msgspec.Struct, array_like=True):
    """The held-back events of one source partition."""

    events: int
    offset: int  # no held-back offset is below
    number: int  # no held-back row's number is below


class _Saved(msgspec.Struct, array_like=True):
    waits_for: Cursor = (0, 0, 0)
    next_number: int = 0
    lanes: dict[int, _Lane] = {}


class HeldState:
    """The state of the store of held-back events: which of its rows are still held back.

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
        return encode_state(VERSION, self.saved)

    def restore_progress(self, data: bytes) -> None:
        self.saved = decode_state(data, VERSION, _Saved, "held-back events")


class HeldEvents:
    """Orders a task's events and holds back those that are too early."""

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
        """Return, in order, the events that no other event can precede any more, and hold back the others.

        Each piece is of one source partition, its events in order. Without frontiers nothing is waited for. Stored
        events with the offsets to skip (partition, first, next) are dropped when their turn comes.
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

        If they are very many, only the earliest are taken; the returned bound is the one that counts.
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
        """Return the bound, or a lower one that not many more events than fit a batch are below."""
        index, rows = self._state.index, 0
        for start in index.all_buckets():
            if rows >= RELEASED_ROWS:
                bound = min(bound, (start, -1, -1))
                break
            bucket = index.snapshot(start)
            rows += 0 if bucket is None else sum(run.rows for run in bucket.runs)
        if rows <= 2 * RELEASED_ROWS:
            return bound
        columns = ("key", "ts", "number", "offset")  # a bucket that is too large is cut by time
        with self._runtime.reader().scan(
            self._task, self._state, Time(EARLIEST, bound[0]), columns=columns
        ) as scan:
            due = [self._wanted(batch, bound).column("ts").to_numpy() for batch in scan]
        stamps = np.concatenate([np.empty(0, np.int64), *due])
        if len(stamps) <= 2 * RELEASED_ROWS:
            return bound
        return min(bound, (int(np.partition(stamps, RELEASED_ROWS)[RELEASED_ROWS]) + 1, -1, -1))

    def _wanted(self, rows: pa.RecordBatch, bound: Cursor) -> pa.RecordBatch:
        """Return rows of the store that are still held back and below the bound."""
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
    """Merge the events of several partitions in the order (stamp, partition, offset), in batches.

    Each lane is one partition's events in order; lanes ascend by partition.
    """
    lanes = [lane for lane in lanes if lane]
    if len(lanes) < 2:
        for lane in lanes:
            yield from lane
        return
    stamps = [np.concatenate([piece.stream_time for piece in lane]) for lane in lanes]
    # lanes are concatenated and each ascends: a stable sort of the stamps is the merge
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
    """Return one partition's events without those at these offsets."""
    is_left = np.ones(len(piece), np.bool_)
    for partition, first, following in left_out:
        if partition == int(piece.partition[0]):
            is_left &= (piece.offset < first) | (piece.offset >= following)
    return piece if is_left.all() else piece.take(is_left)


def _place(piece: EventBatch) -> tuple[int, int]:
    """The sort position of a piece that came through a shuffle: by source partition and offsets."""
    return int(piece.partition[0]), int(piece.offset[0])


def _count_below(piece: EventBatch, partition: int, bound: Cursor) -> int:
    """Count one partition's events below the bound."""
    time, least, next_offset = bound
    before = int(np.searchsorted(piece.stream_time, time, side="right" if partition <= least else "left"))
    if partition == least:
        before = min(before, int(np.searchsorted(piece.offset, next_offset)))
    return before


def _keys(partition: npt.NDArray[np.int32]) -> pa.BinaryArray:
    """Encode partition numbers as keys of the store."""
    bounds = np.arange(0, 4 * len(partition) + 1, 4, dtype=np.int32)
    content = np.ascontiguousarray(partition, np.dtype(">i4"))
    return pa.Array.from_buffers(
        pa.binary(), len(partition), [None, pa.py_buffer(bounds), pa.py_buffer(content)]
    )


def _numbers(keys: pa.BinaryArray) -> npt.NDArray[np.int32]:
    """Decode what `_keys` returned."""
    start = int(np.frombuffer(keys.buffers()[1], np.int32)[keys.offset])
    return np.frombuffer(keys.buffers()[2], np.dtype(">i4"), len(keys), start).astype(np.int32)
