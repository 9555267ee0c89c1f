"""Results to topics: encode them as record batches, store them as parcels, deliver committed parcels exactly once.

After windows the key is Kafka Streams' windowed key and the value holds the aggregates; a window that ceased to exist
has no value. Other records keep their key and time. Updates of windows carry the header `settled` (8 bytes, big-endian
milliseconds): windows that end at or before it get no further update. A task writes the partition of its own number
if there are as many partitions as tasks; otherwise the (inner) key decides, as in Kafka's default partitioner.

C1  a replay writes the same bytes: a sender's identity is made of app, incarnation, topic, partition and task; its
    position is in the task's checkpoint (`OutboxState`); the time in headers is the round's.
C2  a batch has at most 1 MiB and never more than `max.message.bytes`; a larger result is refused before commit.
P1  a parcel is the batches of its sections, with base offset 0. Its name belongs to one attempt; `put` is durable.
P2  its bytes are checked (length and CRC-32C) before use.
F1  a folder gets each batch once, at the offset that the commit assigned. If the log ends there, it is appended; if it
    ends behind it, what is there is compared (by CRC, or record by record) and the rest appended; else `FencedError`.
L1  in a cluster the sender's numbers decide, not offsets: if number n is in the log behind the base offset, all up to
    n were delivered. Results without numbers (`integrity=False`) are known by their offsets only.
L2  a record without numbers among ours, or other content at one of our numbers, raises `FencedError`.
L4  two deliveries at the same moment may both produce; validators report the repeated numbers as DUPLICATE.

Thread rule: encoding has one thread for each task; delivery may run on any thread.
"""

from __future__ import annotations

import logging
import struct
import threading
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from fastcrc.crc32 import iscsi as crc32c

from tidegate.clock import Clock
from tidegate.durations import format_moment
from tidegate.errors import CorruptError, FencedError, InvalidError
from tidegate.integrity.columns import IntegrityColumns, joined, read_columns
from tidegate.integrity.sender import Chains, ChainState
from tidegate.kernels.integrity import MANAGED
from tidegate.log.fetch import Isolation
from tidegate.log.format.batch import HEADER_SIZE, BatchHeader, iter_headers
from tidegate.log.format.decode import decode
from tidegate.log.format.encode import encode_together
from tidegate.log.format.records import HEADER_TYPE, HEADERS_TYPE, RecordColumns
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.kafka.writer import KafkaWriter
from tidegate.log.log import Log
from tidegate.log.partition import PartitionLog
from tidegate.log.producer_state import Origin
from tidegate.pipeline.analyzer import ValueFormat
from tidegate.pipeline.flow import Flow
from tidegate.pipeline.messages import (
    BadRecord,
    Delivery,
    Parcel,
    Section,
    Tick,
    decode_state,
    encode_state,
)
from tidegate.pipeline.topology import KeyBy, To
from tidegate.pipeline.transforms import FailedStep, Stage, Timings
from tidegate.storage import BucketIndex, Merge, StoreSpec
from tidegate.storage.backends.base import StorageBackend
from tidegate.waiting import waiting
from tidegate.windows.events import EventBatch, Int64s
from tidegate.windows.keys import KeyFormat, encode_keys, partitions_of_inner_keys
from tidegate.windows.kinds import Session
from tidegate.windows.operators.base import Flags, Rows, WindowRows

# -- parcels --------------------------------------------------------------------------------------

_DIGEST: Final = struct.Struct(">QI")


@dataclass(frozen=True, slots=True)
class Batches:
    """Concatenated encoded record batches for one partition of a topic."""

    topic: str
    partition: int
    batches: bytes | bytearray | memoryview
    records: int


def write_parcel(backend: StorageBackend, name: str, contents: Sequence[Batches]) -> Parcel:
    """Store the batches as one object and return its description."""
    sections: list[Section] = []
    position, crc = 0, 0
    for content in contents:
        size = len(content.batches)
        sections.append(Section(content.topic, content.partition, position, size, content.records))
        position += size
        crc = crc32c(memoryview(content.batches).toreadonly(), crc)  # a mutable buffer would be copied
    backend.put(name, [content.batches for content in contents])
    return Parcel(name, position, _DIGEST.pack(position, crc), tuple(sections))


def read_parcel(backend: StorageBackend, parcel: Parcel) -> memoryview:
    """Read the whole object and check it (P2)."""
    data = memoryview(backend.read(parcel.name))
    if _DIGEST.pack(len(data), crc32c(data)) != parcel.digest:
        length, crc = _DIGEST.unpack(parcel.digest)
        raise CorruptError(
            f"parcel {parcel.name} is damaged: {len(data)} bytes with CRC {crc32c(data):08x}, committed were {length} "
            f"with {crc:08x}; nothing of it was published. Restore the object from a backup",
            path=parcel.name,
            kafka_name=None,
        )
    return data


# -- changelog ------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

BATCH_BYTES: Final = 1 << 20
JOINED_BYTES: Final = 1 << 20
RECORD_OVERHEAD: Final = 1024  # a batch of one record is at most this much larger than its key and value
SETTLED: Final = "settled"
OUTBOX: Final = "outbox"
NAMESPACE: Final = uuid.UUID("6d1bcb5c-0d5c-4bd8-9d0b-0e5b6c4b7f0e")
VERSION: Final = 1


class _Saved(msgspec.Struct, array_like=True):
    """The positions of the task's senders, by topic and partition, in one incarnation of the app."""

    incarnation: str = ""
    positions: dict[str, dict[int, bytes]] = {}


class TooLargeError(InvalidError):
    """The topic does not accept a record of this size."""


class OutboxState:
    """The senders' positions, kept in the task's checkpoint as a store without rows and a few bytes.

    Version u8 (1) | MessagePack array: incarnation, {topic: {partition: chain state}}.
    """

    def __init__(self) -> None:
        self._index = BucketIndex(StoreSpec(OUTBOX, Merge.LAST, payload=pa.schema([("unused", pa.int8())])))
        self._saved = _Saved()

    @property
    def index(self) -> BucketIndex:
        return self._index

    def position(self, incarnation: str, topic: str, partition: int) -> ChainState:
        """Return a sender's position; a new incarnation of the app begins anew."""
        if self._saved.incarnation != incarnation:
            return ChainState()
        found = self._saved.positions.get(topic, {}).get(partition)
        return ChainState() if found is None else ChainState.from_bytes(found)

    def move(self, incarnation: str, topic: str, partition: int, state: ChainState) -> None:
        if self._saved.incarnation != incarnation:
            self._saved = _Saved(incarnation)
        known = self._saved.positions
        self._saved.positions = {
            **known, topic: {**known.get(topic, {}), partition: state.to_bytes()}
        }  # fmt: skip

    def encode_progress(self) -> bytes:
        return encode_state(VERSION, self._saved)

    def restore_progress(self, data: bytes) -> None:
        self._saved = decode_state(data, VERSION, _Saved, "the senders' positions")


class Changelog:
    """Encodes the records of one sink of one task."""

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
        incarnation: str,
        tick: Tick,
        timings: Timings,
        bad: list[BadRecord],
        *,
        settled: tuple[int, int] | None = None,
    ) -> list[Batches]:
        """Encode the rows as batches, partition by partition, and advance the positions in `state`.

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
        made = (
            self._sealed(number, by_partition[number], state, incarnation, tick, timings)
            for number in sorted(by_partition)
        )
        return [found for found in made if found.records]

    def _values_of(self, rows: Rows, bad: list[BadRecord]) -> pa.BinaryArray | None:
        """Encode the rows' values; return None if some cannot be written."""
        try:
            return self._encoded(rows.values, rows.key)
        except ValueError as error:  # InvalidError and ArrowInvalid are ValueErrors
            if isinstance(rows, EventBatch):
                source = self._flow.source

                def write(events: EventBatch) -> EventBatch:
                    self._encoded(events.values, events.key)
                    return events

                step = FailedStep(f"to {self._sink.topic}", write, source.topic, source.on_error == "fail")
                found = step.bad_records(rows, error)
                bad += found.values()
                return None if found else self._encoded(rows.values, rows.key)
            finite = _finite(rows.values)
            if finite is rows.values:
                raise self._unwritable(rows, error) from error
        try:
            values = self._encoded(finite, rows.key)
        except ValueError as error:  # InvalidError and ArrowInvalid are ValueErrors
            raise self._unwritable(rows, error) from error
        logger.warning(
            "to %s: results that are NaN or infinite were sent as null, which is all that %r can say of them",
            self._sink.topic, self._values,
        )  # fmt: skip
        return values

    def _encoded(self, values: pa.RecordBatch, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Encode the values; `TooLargeError` if the topic does not accept one of them with its key."""
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
        """Describe the first window whose result cannot be written."""
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
            has_none = len(rows) and rows.ts.min() < 0
            return RecordColumns(
                rows.key, values, pa.array(rows.ts, mask=rows.ts < 0 if has_none else None), None
            )
        if rows.deleted is not None and rows.deleted.any():
            values = pc.if_else(pa.array(rows.deleted), pa.scalar(None, pa.binary()), values)
        ends = rows.window_end if self._format is KeyFormat.SESSION else None
        key = encode_keys(rows.key, rows.window_start, self._format, end=ends)
        return RecordColumns(key, values, pa.array(rows.ts), None)

    def _split(self, rows: Rows, columns: RecordColumns) -> list[tuple[int, RecordColumns]]:
        if self._own is not None:
            return [(self._own, columns)]
        if self._partitions == 1:
            return [(0, columns)]
        chosen = partitions_of_inner_keys(rows.key, self._partitions)
        chosen[chosen < 0] = self._task % self._partitions  # without a key: together, in their order
        return [(number, columns.filter(pa.array(chosen == number))) for number in np.unique(chosen).tolist()]

    def _sealed(
        self,
        number: int,
        pieces: list[RecordColumns],
        state: OutboxState,
        incarnation: str,
        tick: Tick,
        timings: Timings,
    ) -> Batches:
        topic = self._sink.topic
        if self._sink.integrity:
            with timings("stamp_out"):
                pieces = self._stamped(number, pieces, state, incarnation, tick)
        if len(pieces) > 1 and sum(each.key.nbytes + each.value.nbytes for each in pieces) <= JOINED_BYTES:
            pieces = [joined(pieces)] if self._sink.integrity else pieces
        with timings("encode"):
            batches = encode_together(pieces, max_batch_bytes=min(BATCH_BYTES, self._max_batch_bytes))
        return Batches(topic, number, batches, sum(map(len, pieces)))

    def _stamped(
        self, number: int, pieces: list[RecordColumns], state: OutboxState, incarnation: str, tick: Tick
    ) -> list[RecordColumns]:
        """Return the pieces with numbering and checksums."""
        topic = self._sink.topic
        chains = Chains(sender_guid(self._app, incarnation, topic, number, self._task), headers_only=True)
        position = state.position(incarnation, topic, number)
        stamped: list[RecordColumns] = []
        for piece in pieces:
            planned = chains.data(position, piece, tick.now_ms)
            stamped += planned.pieces
            position = planned.after
        state.move(incarnation, topic, number, position)
        return stamped


def writing(values: ValueFormat, columns: Sequence[str]) -> Stage:
    """Return a step that encodes these columns of events to see whether it fails; the result is discarded."""

    def run(events: EventBatch) -> EventBatch:
        values.encode(events.values.select(list(columns)))
        return events

    return run


def _finite(values: pa.RecordBatch) -> pa.RecordBatch:
    """Return the column with null for NaN and infinities; the column itself if it has none."""
    columns, is_same = [], True
    for column in values.columns:
        if pa.types.is_floating(column.type) and not pc.all(pc.is_finite(column)).as_py():
            column = pc.if_else(pc.is_finite(column), column, pa.scalar(None, column.type))
            is_same = False
        columns.append(column)
    return values if is_same else pa.RecordBatch.from_arrays(columns, schema=values.schema)


def sender_guid(app: str, incarnation: str, topic: str, partition: int, task: int) -> bytes:
    """The sender id of a task: the same for every attempt, another in another incarnation of the app."""
    said = msgspec.json.encode([app, incarnation, topic, partition, task]).decode()
    return uuid.uuid5(NAMESPACE, said).bytes


def key_format(flow: Flow, sink: To) -> KeyFormat:
    """Return the encoding of windows in keys."""
    if flow.window is not None and isinstance(flow.window.kind, Session):
        return KeyFormat.SESSION
    return KeyFormat.CHANGELOG if sink.key_format == "changelog" else KeyFormat.TOPIC


def settled_headers(times: Int64s) -> pa.ListArray:
    """Return a headers column with one header `settled` for each record."""
    count = len(times)
    each = np.arange(count + 1, dtype=np.int32)
    names = pa.py_buffer(SETTLED.encode() * count)
    key = pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(each * len(SETTLED)), names])
    data = pa.py_buffer(times.astype(">i8"))
    value = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(each * 8), data])
    headers = pa.StructArray.from_arrays([key, value], fields=list(HEADER_TYPE))
    return pa.ListArray.from_arrays(pa.array(each), headers, type=HEADERS_TYPE)


def settled_times(headers: pa.ListArray) -> tuple[Int64s, Flags]:
    """Return the time in each record's header `settled`, and which records have one."""
    times, has_one = np.zeros(len(headers), np.int64), np.zeros(len(headers), np.bool_)
    name, value = headers.flatten().flatten()
    is_wanted = pc.and_(pc.equal(name, SETTLED), pc.equal(pc.binary_length(value), 8))
    found = pc.filter(value, is_wanted)
    if len(found):
        places = pc.filter(pc.list_parent_indices(headers), is_wanted).to_numpy()
        times[places] = np.frombuffer(b"".join(found.to_pylist()), ">i8")
        has_one[places] = True
    return times, has_one


# -- sections -------------------------------------------------------------------------------------

COMPARED = ("key", "value", "headers")


def records_of(section: Section, batches: memoryview, base: int) -> pa.RecordBatch:
    """Return a section's records with their assigned offsets."""
    data, offset = bytearray(batches), base
    for position, header in iter_headers(batches):
        data[position : position + HEADER_SIZE] = header._replace(base_offset=offset).pack()
        offset += header.count
    return decode(data, topic=section.topic, partition=section.partition)


def require_ours(section: Section, base: int, ours: pa.RecordBatch, found: pa.RecordBatch) -> None:
    """Check that every record found at one of our offsets is ours."""
    offsets = found.column("offset").to_numpy()
    inside = (offsets >= base) & (offsets < base + section.records)
    theirs = found.filter(pa.array(inside))
    require_same(section, base, theirs, ours.take(pa.array(offsets[inside] - base)))


def require_same(section: Section, base: int, theirs: pa.RecordBatch, mine: pa.RecordBatch) -> None:
    """Check that the records are the same row by row, whatever their batches."""
    for name in COMPARED:
        if not theirs.column(name).equals(mine.column(name)):
            same = np.array(
                [one.equals(other) for one, other in zip(theirs.column(name), mine.column(name), strict=True)]
            )
            at = int(theirs.column("offset")[int(np.argmin(same))].as_py())
            raise fenced(section, base, at, "another record lies there")


def fenced(section: Section, base: int, offset: int, why: str) -> FencedError:
    return FencedError(
        f"results for {section.topic}-{section.partition} belong to offsets {base} to {base + section.records - 1}, "
        f"and at offset {offset} the partition is not as this run left it: {why}. Another program writes to the topic, "
        "or another run took over: let only one of them write there, and start this one again. To have it go on behind "
        "what is there, `tidegate app rebase APP --log LOG`"
    )


# -- delivering to cluster -------------------------------------------------------------------------

TIMEOUT_SECONDS = 20.0  # for one section; delivery is repeated if it takes longer
_CHAIN_BITS = 32  # a position as one number: chain, then sequence


class ClusterDeliverer:
    """Delivers to one cluster."""

    def __init__(self, log: KafkaLog) -> None:
        self._log = log
        self._guard = threading.Lock()
        self._free: dict[str, list[KafkaWriter]] = {}

    def deliver(self, section: Section, base: int, batches: memoryview) -> int:
        """Produce the records of a section that are not in the partition yet; return how many there were."""
        topic, number = section.topic, section.partition
        first, end = self._log.bounds(topic, [number])[number]
        if end < base:
            raise fenced(section, base, end, "it ends before them")
        ours = records_of(section, batches, base)
        left = ours.slice(_delivered(self._log, section, base, ours, first, end))
        if left.num_rows:
            with self._guard:
                free = self._free.setdefault(topic, [])
                writer: Any = free.pop() if free else None
            if writer is None:
                writer = self._log.writer(topic, idempotent=True, timeout_seconds=TIMEOUT_SECONDS)
            try:
                writer.write(left, partition=number)
            except BaseException:
                writer.close()
                raise
            with self._guard:
                free.append(writer)
        return int(left.num_rows)

    def close(self) -> None:
        with self._guard:
            writers = [writer for free in self._free.values() for writer in free]
            self._free.clear()
        for writer in writers:
            writer.close()


def _delivered(log: KafkaLog, section: Section, base: int, ours: pa.RecordBatch, first: int, end: int) -> int:
    """Count the section's records that were delivered before."""
    number, start = section.partition, max(base, first)
    done = min(start - base, section.records)  # records deleted by retention had been delivered
    if start >= end or done == section.records:
        return done
    stamps = read_columns(ours.column("headers"))
    numbered = bool((stamps.state == MANAGED).all())
    with log.reader(
        section.topic, [number], start={number: start}, stop={number: end}, control_records=True
    ) as reader:
        for piece in reader:
            if numbered:
                done = max(done, _reached(section, base, ours, stamps, piece))
            else:
                require_ours(section, base, ours, piece)
            if done == section.records:
                return done
    return done if numbered else min(end - base, section.records)


def _reached(
    section: Section, base: int, ours: pa.RecordBatch, stamps: IntegrityColumns, found: pa.RecordBatch
) -> int:
    """Count our records that were delivered, according to the records found (L1)."""
    theirs = read_columns(found.column("headers"))
    foreign = np.flatnonzero(theirs.state != MANAGED)
    if len(foreign):
        at = int(found.column("offset")[int(foreign[0])].as_py())
        raise fenced(section, base, at, "another record lies there")
    sent = np.flatnonzero((theirs.guid_high == stamps.guid_high[0]) & (theirs.guid_low == stamps.guid_low[0]))
    if not len(sent):
        return 0
    mine, seen = _positions(stamps), _positions(theirs)[sent]
    place = np.searchsorted(mine, seen)
    equal = place < len(mine)
    equal[equal] = mine[place[equal]] == seen[equal]
    require_same(section, base, found.take(pa.array(sent[equal])), ours.take(pa.array(place[equal])))
    return int(np.searchsorted(mine, seen.max(), side="right"))


def _positions(stamps: IntegrityColumns) -> npt.NDArray[np.int64]:
    return (stamps.chain.astype(np.int64) << _CHAIN_BITS) | stamps.sequence.astype(np.int64)


# -- delivering -----------------------------------------------------------------------------------

BUSY_MS: Final = 10_000
PAUSE_MS: Final = 5
FETCH_BYTES: Final = 4 << 20


class Deliverer:
    """Delivers to one log."""

    def __init__(self, log: Any, backend: StorageBackend, clock: Clock, *, keeps_open: bool) -> None:
        """`keeps_open`: no other process writes here, so partitions stay open between deliveries."""
        self._log, self._backend, self._clock = log, backend, clock
        self._keeps_open = keeps_open
        self._cluster = None if isinstance(log, Log) else ClusterDeliverer(log)

    def deliver(self, deliveries: Iterable[Delivery]) -> int:
        """Append the records that are not there yet; return how many there were."""
        count = 0
        for delivery in deliveries:
            data = read_parcel(self._backend, delivery.parcel)
            for section, base in zip(delivery.parcel.sections, delivery.bases, strict=True):
                batches = data[section.position : section.position + section.size]
                if self._cluster is None:
                    count += self._into_folder(section, base, batches)
                else:
                    count += self._cluster.deliver(section, base, batches)
        return count

    def close(self) -> None:
        """Close the partitions that are kept open; the log stays open."""
        if self._cluster is not None:
            self._cluster.close()

    def _into_folder(self, section: Section, base: int, batches: memoryview) -> int:
        opening = partial(self._log.partition, section.topic, section.partition)
        # another process that delivers holds the partition only briefly
        log: PartitionLog = waiting(self._clock, BUSY_MS, opening, pause_ms=PAUSE_MS)
        try:
            return append_expecting(log, section, base, batches, self._log.durability == "disk")
        finally:
            if not self._keeps_open:
                self._log.release(section.topic, section.partition)


def append_expecting(log: PartitionLog, section: Section, base: int, batches: memoryview, sync: bool) -> int:
    """Append a section's batches from offset `base` on, as far as they are missing; return how many records there
    were."""
    appended, stop = 0, base + section.records
    with log.lock:
        end = log.log_end_offset
        if end < base:
            raise fenced(section, base, end, "it ends before them, what was published before is gone")
        if end > base:
            _compare(log, section, base, batches, min(end, stop))
        offset = base
        for position, header in iter_headers(batches):
            if offset < end < offset + header.count:
                raise fenced(section, base, end, "it ends in the middle of a batch")
            if offset >= end:
                _append(log, batches[position : position + header.size], header, offset)
                appended += header.count
            offset += header.count
    if log.high_watermark < stop:
        log.acknowledge(sync=sync)
    return appended


def _append(log: PartitionLog, batch: memoryview, header: BatchHeader, offset: int) -> None:
    """Append one batch at the log's end: as a replica does, except where the topic repacks batches."""
    config = log.config
    data = bytearray(batch)
    if config.compression_type != "producer" or config.message_timestamp_type != "CreateTime":
        log.append(data)
        return
    data[:HEADER_SIZE] = header._replace(base_offset=offset, leader_epoch=log.leader_epoch).pack()
    log.append(data, origin=Origin.REPLICATION)


def _compare(log: PartitionLog, section: Section, base: int, batches: memoryview, stop: int) -> None:
    """Check that the log from `base` up to `stop` has our records, as far as they still exist."""
    expected: dict[int, tuple[int, int]] = {}
    offset = base
    for _, header in iter_headers(batches):
        expected[offset] = (header.crc, header.count)
        offset += header.count
    at = max(base, log.log_start_offset)
    while at < stop:
        fetched = log.fetch(at, max_bytes=FETCH_BYTES, isolation=Isolation.LOG_END)
        found = list(iter_headers(fetched.data))
        if not found:
            return
        for position, header in found:
            if header.base_offset >= stop:
                return
            if expected.get(header.base_offset) != (header.crc, header.count):
                theirs = memoryview(fetched.data)[position : position + header.size]
                there = decode(theirs, topic=section.topic, partition=section.partition)
                require_ours(section, base, records_of(section, batches, base), there)
            at = header.next_offset
