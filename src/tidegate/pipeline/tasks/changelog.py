"""Results as the record batches of topics: keys, values and stamps, a column at a time.

After windows a record's key is the windowed key in Kafka Streams' bytes and its value the aggregates; a window that
ceased to exist is a record without a value. Without windows a record keeps its key and time.

Updates of windows have a header `settled`: windows that end at or before this time (8 bytes, big-endian, milliseconds)
get no update after this record any more. Whoever makes windows of them knows by it which of theirs are final
(`sources`): the task's partitions may be far apart in time, so timestamps alone would not tell.

Which partition: a task whose number is a partition of the topic, of as many partitions as there are tasks, writes
that partition alone, as Kafka Streams does. Otherwise the (inner) key decides, as Kafka's default partitioner does.

Numbered records (`integrity`) carry all their metadata in their own headers; nothing else is written into the topic, so
that any consumer of windowed keys and values can read it, and Kafka Streams can restore a store from it.

C1  same bytes on replay: a sender's identity is made of app, life, topic, partition and task, its position is in the
    task's checkpoint (`OutboxState`), and the time in its headers is the round's.
C2  a batch is at most a mebibyte and never larger than the topic takes (`max.message.bytes`): a result that does not
    fit is refused before the round is committed.

Thread rule: one task, one thread.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.durations import format_moment
from tidegate.errors import CorruptError, InvalidError
from tidegate.integrity.columns import joined
from tidegate.integrity.sender import Chains, ChainState
from tidegate.log.format.encode import encode_together
from tidegate.log.format.records import HEADER_TYPE, HEADERS_TYPE, RecordColumns
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.definition.steps import KeyBy, To
from tidegate.pipeline.definition.values import ValueFormat
from tidegate.pipeline.rounds.orders import BadRecord, Tick
from tidegate.pipeline.tasks.parcels import Batches
from tidegate.pipeline.tasks.stateless import Stage, bad_records
from tidegate.pipeline.tasks.timing import Timings
from tidegate.storage import BucketIndex, Merge, StoreSpec
from tidegate.windows.events import EventBatch, Int64s
from tidegate.windows.keys import KeyFormat, encode_keys, partitions_of_inner_keys
from tidegate.windows.kinds import Session
from tidegate.windows.operators.base import Flags, Rows, WindowRows

logger = logging.getLogger(__name__)

BATCH_BYTES: Final = 1 << 20
JOINED_BYTES: Final = 1 << 20
RECORD_OVERHEAD: Final = 1024  # at most this much of a batch of one record is neither its key nor its value
SETTLED: Final = "settled"
OUTBOX: Final = "outbox"
NAMESPACE: Final = uuid.UUID("6d1bcb5c-0d5c-4bd8-9d0b-0e5b6c4b7f0e")
VERSION: Final = 1


class _Saved(msgspec.Struct, array_like=True):
    """Where the task's senders stand, by topic and partition; in one life of the app."""

    life: str = ""
    positions: dict[str, dict[int, bytes]] = {}


class TooLargeError(InvalidError):
    """A record that the topic does not take."""


class OutboxState:
    """The senders' positions, in the task's checkpoint: a store without rows and a few bytes beside it.

    Version u8 (1) | MessagePack array: life, {topic: {partition: chain state}}.
    """

    def __init__(self) -> None:
        self._index = BucketIndex(StoreSpec(OUTBOX, Merge.LAST, payload=pa.schema([("unused", pa.int8())])))
        self._saved = _Saved()

    @property
    def index(self) -> BucketIndex:
        return self._index

    def position(self, life: str, topic: str, partition: int) -> ChainState:
        """Where a sender goes on; a new life of the app begins anew."""
        if self._saved.life != life:
            return ChainState()
        found = self._saved.positions.get(topic, {}).get(partition)
        return ChainState() if found is None else ChainState.from_bytes(found)

    def move(self, life: str, topic: str, partition: int, state: ChainState) -> None:
        if self._saved.life != life:
            self._saved = _Saved(life)
        known = self._saved.positions
        self._saved.positions = {
            **known, topic: {**known.get(topic, {}), partition: state.to_bytes()}
        }  # fmt: skip

    def encode_progress(self) -> bytes:
        return bytes([VERSION]) + msgspec.msgpack.encode(self._saved)

    def restore_progress(self, data: bytes) -> None:
        if data and data[0] != VERSION:
            raise CorruptError(
                f"the senders' positions have format {data[0]}; this version knows {VERSION}: run the version that "
                "wrote them",
                kafka_name=None,
            )
        try:
            self._saved = msgspec.msgpack.decode(data[1:], type=_Saved) if data else _Saved()
        except msgspec.MsgspecError as error:
            raise CorruptError(f"the senders' positions cannot be read: {error}", kafka_name=None) from error


class Changelog:
    """Makes the records of one sink of one task."""

    def __init__(
        self,
        app: str,
        flow: Flow,
        sink: To,
        task: int,
        partitions: int,
        tasks: int,
        *,
        max_batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self._app, self._flow, self._sink, self._task = app, flow, sink, task
        self._max_batch_bytes = max_batch_bytes
        self._partitions = partitions
        shuffled = -1 if flow.rekey_at is None else flow.rekey_at
        changes_key = any(isinstance(step, KeyBy) for step in flow.steps[shuffled + 1 :])
        self._own = task if partitions == tasks and not changes_key else None
        self._values = ValueFormat.of(sink, flow.result_schema, flow.window)
        self._format = key_format(flow, sink)

    def batches(
        self,
        rows: Sequence[Rows],
        state: OutboxState,
        life: str,
        tick: Tick,
        timings: Timings,
        bad: list[BadRecord],
        *,
        settled: tuple[int, int] | None = None,
    ) -> list[Batches]:
        """The rows as batches, partition by partition; positions in `state` move on.

        Records whose values cannot be written are added to `bad`; then there are no batches.

        `settled`: windows that end at or before these times were final before the first and after the last row; None:
        rows do not say so.
        """
        by_partition: dict[int, list[RecordColumns]] = {}
        for number, piece in enumerate(rows, 1):
            with timings("values"):
                values = self._values_of(piece, bad)
                if values is None:
                    continue
                columns = self._columns(piece, values)
                if settled is not None and len(piece):
                    times = np.full(len(piece), settled[0], np.int64)
                    times[-1] = settled[number == len(rows)]
                    columns = replace(columns, headers=settled_headers(times))
            for number, part in self._split(piece, columns):
                by_partition.setdefault(number, []).append(part)
        if bad:
            return []
        made = []
        for number in sorted(by_partition):
            found = self._sealed(number, by_partition[number], state, life, tick, timings)
            if found.records:
                made.append(found)
        return made

    # -- inside ----------------------------------------------------------------------------------

    def _values_of(self, rows: Rows, bad: list[BadRecord]) -> pa.BinaryArray | None:
        """The rows' values as bytes; None where some cannot be written."""
        try:
            return self._encoded(rows.values, rows.key)
        except ValueError as error:  # InvalidError and ArrowInvalid are such
            if isinstance(rows, EventBatch):
                only_first = self._flow.source.on_error == "fail"

                def write(events: EventBatch) -> EventBatch:
                    self._encoded(events.values, events.key)
                    return events

                found = bad_records(
                    f"to {self._sink.topic}",
                    write,
                    rows,
                    error,
                    topic=self._flow.source.topic,
                    only_first=only_first,
                )
                bad += found.values()
                return None if found else self._encoded(rows.values, rows.key)
            finite = _finite(rows.values)
            if finite is rows.values:
                raise self._unwritable(rows, error) from error
        try:
            values = self._encoded(finite, rows.key)
        except ValueError as error:  # InvalidError and ArrowInvalid are such
            raise self._unwritable(rows, error) from error
        logger.warning(
            "to %s: results that are NaN or infinite were sent as null, which is all that %r can say of them",
            self._sink.topic, self._values,
        )  # fmt: skip
        return values

    def _encoded(self, values: pa.RecordBatch, keys: pa.BinaryArray) -> pa.BinaryArray:
        """The values as bytes; `TooLargeError` when the topic does not take one of them with its key."""
        encoded = self._values.encode(values)
        sizes = pc.add(pc.binary_length(encoded).fill_null(0), pc.binary_length(keys).fill_null(0))
        largest = pc.max(sizes).as_py() or 0
        if largest + RECORD_OVERHEAD > self._max_batch_bytes:
            raise TooLargeError(
                f"it has {largest} bytes and the topic takes batches of at most {self._max_batch_bytes} bytes, of "
                f"which {RECORD_OVERHEAD} are kept for headers",
                kafka_name="MESSAGE_TOO_LARGE",
            )
        return encoded

    def _unwritable(self, rows: WindowRows, error: Exception) -> InvalidError:
        """What to say of the first window whose result cannot be written."""
        low, high = 0, len(rows)
        while high - low > 1:
            middle = (low + high) // 2
            try:
                self._encoded(rows.values.slice(low, middle - low), rows.key.slice(low, middle - low))
            except ValueError as failed:
                high, error = middle, failed
            else:
                low = middle
        key, start = rows.key[low].as_py(), format_moment(int(rows.window_start[low]))
        remedy = (
            f"Raise max.message.bytes of topic {self._sink.topic}, or aggregate less"
            if isinstance(error, TooLargeError)
            else "Choose a value= that holds it"
        )
        return InvalidError(
            f"to {self._sink.topic}: the result of key {key!r} in the window that starts at {start} cannot be written "
            f"by {self._values!r}: {str(error).partition(chr(10))[0]}. {remedy}, and run again"
        )

    def _columns(self, rows: Rows, values: pa.BinaryArray) -> RecordColumns:
        if isinstance(rows, EventBatch):
            times = (
                pa.array(rows.ts, mask=rows.ts < 0) if len(rows) and rows.ts.min() < 0 else pa.array(rows.ts)
            )
            return RecordColumns(rows.key, values, times, None)
        if rows.deleted is not None and rows.deleted.any():
            values = _emptied(values, rows.deleted)
        ends = rows.window_end if self._format is KeyFormat.SESSION else None
        key = encode_keys(rows.key, rows.window_start, self._format, end=ends)
        return RecordColumns(key, values, pa.array(rows.ts), None)

    def _split(self, rows: Rows, columns: RecordColumns) -> list[tuple[int, RecordColumns]]:
        if self._own is not None:
            return [(self._own, columns)]
        if self._partitions == 1:
            return [(0, columns)]
        chosen = partitions_of_inner_keys(rows.key, self._partitions)
        chosen[chosen < 0] = self._task % self._partitions  # without a key: beside each other, in their order
        return [(number, columns.filter(pa.array(chosen == number))) for number in np.unique(chosen).tolist()]

    def _sealed(
        self,
        number: int,
        pieces: list[RecordColumns],
        state: OutboxState,
        life: str,
        tick: Tick,
        timings: Timings,
    ) -> Batches:
        topic = self._sink.topic
        if self._sink.integrity:
            with timings("stamp_out"):
                pieces = self._stamped(number, pieces, state, life, tick)
        if len(pieces) > 1 and sum(each.key.nbytes + each.value.nbytes for each in pieces) <= JOINED_BYTES:
            pieces = [joined(pieces)] if self._sink.integrity else pieces
        with timings("encode"):
            batches = encode_together(pieces, max_batch_bytes=min(BATCH_BYTES, self._max_batch_bytes))
        return Batches(topic, number, batches, sum(map(len, pieces)))

    def _stamped(
        self, number: int, pieces: list[RecordColumns], state: OutboxState, life: str, tick: Tick
    ) -> list[RecordColumns]:
        """The pieces numbered and check-summed."""
        topic = self._sink.topic
        chains = Chains(sender_guid(self._app, life, topic, number, self._task), headers_only=True)
        position = state.position(life, topic, number)
        stamped: list[RecordColumns] = []
        for piece in pieces:
            planned = chains.data(position, piece, tick.now_ms)
            stamped += planned.pieces
            position = planned.after
        state.move(life, topic, number, position)
        return stamped


def writing(values: ValueFormat, columns: Sequence[str]) -> Stage:
    """Writing these columns of events as a step that may fail; nothing comes of it."""

    def run(events: EventBatch) -> EventBatch:
        values.encode(events.values.select(list(columns)))
        return events

    return run


def _finite(values: pa.RecordBatch) -> pa.RecordBatch:
    """The same with null for NaN and infinities; itself where there are none."""
    columns, is_same = [], True
    for column in values.columns:
        if pa.types.is_floating(column.type) and not pc.all(pc.is_finite(column)).as_py():
            column = pc.if_else(pc.is_finite(column), column, pa.scalar(None, column.type))
            is_same = False
        columns.append(column)
    return values if is_same else pa.RecordBatch.from_arrays(columns, schema=values.schema)


def sender_guid(app: str, life: str, topic: str, partition: int, task: int) -> bytes:
    """Who a task is to those who validate what it sends: the same at every attempt, another in another life."""
    said = msgspec.json.encode([app, life, topic, partition, task]).decode()
    return uuid.uuid5(NAMESPACE, said).bytes


def key_format(flow: Flow, sink: To) -> KeyFormat:
    """How windows are written into keys."""
    if flow.window is not None and isinstance(flow.window.kind, Session):
        return KeyFormat.SESSION
    return KeyFormat.CHANGELOG if sink.key_format == "changelog" else KeyFormat.TOPIC


def settled_headers(times: Int64s) -> pa.ListArray:
    """A headers column with one header `settled` for each record."""
    count = len(times)
    each = np.arange(count + 1, dtype=np.int32)
    names = pa.py_buffer(SETTLED.encode() * count)
    key = pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(each * len(SETTLED)), names])
    data = pa.py_buffer(times.astype(">i8"))
    value = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(each * 8), data])
    headers = pa.StructArray.from_arrays([key, value], fields=list(HEADER_TYPE))
    return pa.ListArray.from_arrays(pa.array(each), headers, type=HEADERS_TYPE)


def settled_times(headers: pa.ListArray) -> tuple[Int64s, Flags]:
    """The time in each record's header `settled`, and which records have one."""
    times, has_one = np.zeros(len(headers), np.int64), np.zeros(len(headers), np.bool_)
    name, value = headers.flatten().flatten()
    is_wanted = pc.and_(pc.equal(name, SETTLED), pc.equal(pc.binary_length(value), 8))
    found = pc.filter(value, is_wanted)
    if len(found):
        places = pc.filter(pc.list_parent_indices(headers), is_wanted).to_numpy()
        times[places] = np.frombuffer(b"".join(found.to_pylist()), ">i8")
        has_one[places] = True
    return times, has_one


def _emptied(values: pa.BinaryArray, deleted: Any) -> pa.BinaryArray:
    """The values, null where the row is deleted."""
    return pc.if_else(pa.array(deleted), pa.scalar(None, pa.binary()), values)
