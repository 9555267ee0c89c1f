"""Control records: start and end of push, heartbeats, leadership stamps, topic switches.

In one partition a push reads

    start of chain, start of push (the driver's sender) | start, data, end (each task's) | end of push, end

Owns the driver's records, and the GUID and settings of *sorted* tasks, whose attempts all send the same rows in the
same order. They share one GUID, so that repeats are duplicates; a nonce per attempt in the control records' keys keeps
compaction from treating the starts of two attempts as one key. `validator` decides how a receiver handles the records.

Also owns the records of the leader of a hybrid partition, which `tables.hybrid.replica` interprets. All numbers are
big-endian. *Leadership stamp*: from this record on, only the records of this leader are valid. Like a heartbeat it is
not numbered: a start of chain with the heartbeat flag, by a well-known producer. Its content is in its key, which its
checksum covers and which is unique, so that compaction keeps every stamp:

    00 "DIV" 00 | GUID of the leader's sender, 16 bytes | epoch >> 31, i32 | epoch & 2^31-1, i32 | nonce u32

*Topic switch*: a control record of the leader's own chain. The first one gives the offset where reading the live topic
begins; a later one gives the offset reached and the validation state there, so that the next leader resumes from it.
Its `divc`:

    u8 version, 1 | i64 time rewound to, ms | i64 next offset of the live topic | u16 length, topic in UTF-8
    then the live topic's validation state at that offset (`state.encode_state`), or nothing: none seen yet

A state that is too large for one record is split into parts, one record each, in order. Version 2 is version 1 with
`u8 length, id of the topic | u64 generation | u32 part, from 0 on | u32 parts` behind the topic. Parts of one state
share a generation, which is unique in the partition; the state is valid once all its parts have arrived. Version 1 is
written where there is one part and the topic has no id.

*Upstream position*: the header `divu` of every record that a leader copies from the live topic, 8 bytes: the record's
offset there. The last one that arrived is the exact position of the leader in the live topic.

Thread rule: values and pure functions, but for `send_leadership`.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.clock import Clock
from tidegate.errors import InvalidError
from tidegate.integrity.columns import (
    IntegrityColumns,
    checksum_of,
    control_payload,
    control_row,
    single,
)
from tidegate.integrity.header import (
    HEARTBEAT,
    ChecksumType,
    ControlKey,
    ControlType,
    RecordKind,
    Stamp,
    start_of_chain_bytes,
    start_of_push_bytes,
)
from tidegate.integrity.sender import ChainLimits, RecordWriter, Sender, outlet_of
from tidegate.integrity.state import Manifest
from tidegate.log.format.records import HEADER_TYPE, HEADERS_TYPE, RecordColumns
from tidegate.log.writer import Written

# -- pushes and heartbeats -------------------------------------------------------------------------

NAMESPACE: Final = uuid.UUID("5d1c9a3e-3c0b-5f55-9e0b-7d1f6c7a2b41")
HEARTBEAT_GUID: Final = uuid.uuid5(NAMESPACE, "heartbeat").bytes
"""The fixed producer GUID of heartbeats."""


def stable_guid(name: str, topic: str, partition: int) -> bytes:
    """A deterministic GUID for this push or application, topic and partition."""
    return uuid.uuid5(NAMESPACE, f"{name}\0{topic}\0{partition}").bytes


def sorted_sender(
    writer: RecordWriter,
    *,
    push: str,
    partition: int,
    attempt: int,
    started_ms: int,
    limits: ChainLimits | None = None,
    **settings: Any,
) -> Sender:
    """Create the sender of one attempt at a task whose rows have one total order.

    `push`, `partition`, `started_ms` and `limits` must be the same for all attempts; `attempt` distinguishes them.
    """
    bounds = limits if limits is not None else ChainLimits(max_age=0)
    if bounds.age_ms > 0:
        raise InvalidError(
            "chains of a sorted sender must not end by time: attempts would differ; use max_age=0"
        )
    return Sender(
        writer,
        guid=stable_guid(push, writer.topic, partition),
        nonce=attempt,
        fixed_time_ms=started_ms,
        limits=bounds,
        **settings,
    )


class _Call:
    """Identity of a call, so that a call made again after an error counts as its repeat."""


class Push:
    """The driver's side of a bulk load, with its own sender.

    Call `start()`, then run the tasks, then call `end(manifests)`. After an error in between no end is sent, and the
    receiver keeps waiting. Both may be called again, also after an error: nothing is sent twice.
    """

    def __init__(self, sender: Sender, *, is_sorted: bool = False) -> None:
        self.sender = sender
        self.is_sorted = is_sorted
        self._starting, self._ending = _Call(), _Call()
        self._started = False
        self._ended = False

    def start(self) -> list[Written]:
        """Write a start of push to every partition; returns when they are stored."""
        if self._started:
            return []
        payload = start_of_push_bytes(is_sorted=self.is_sorted)
        written = self.sender.send_control(
            ControlType.START_OF_PUSH,
            dict.fromkeys(range(self.sender.partitions), payload),
            source=self._starting,
        )
        self._started = True
        return written

    def end(self, manifests: Mapping[int, Manifest]) -> list[Written]:
        """Write an end of push to every partition, with its manifest; no manifest means that it received nothing."""
        if self._ended:
            return []
        unknown = set(manifests) - set(range(self.sender.partitions))
        if unknown:
            raise InvalidError(f"topic {self.sender.topic} has no partition {min(unknown)}")
        payloads: dict[int, bytes | None] = {
            number: manifests.get(number, Manifest()).to_bytes() for number in range(self.sender.partitions)
        }
        written = self.sender.send_control(ControlType.END_OF_PUSH, payloads, final=True, source=self._ending)
        self._ended = True
        return written


def send_heartbeat(writer: RecordWriter, partitions: Iterable[int], *, clock: Clock) -> list[Written]:
    """Write one heartbeat per partition; heartbeats are not numbered and validators ignore them."""
    now_ms = clock.now_ms()
    payload = start_of_chain_bytes(ChecksumType.NONE)
    stamp = Stamp(RecordKind.CONTROL, ControlType.START_OF_CHAIN, HEARTBEAT, HEARTBEAT_GUID, 0, 0, now_ms, 0)
    _, row = control_row(stamp, payload)
    outlet = outlet_of(writer)
    written: list[Written] = []
    numbers = list(partitions)
    for number in numbers:
        written += outlet.prepare([row], number).append()
    outlet.acknowledge(numbers)
    return written


# -- leadership of hybrid tables -------------------------------------------------------------------

UPSTREAM_KEY: Final = "divu"
UPSTREAM_BYTES: Final = 8
NO_OFFSET: Final = -1
LEADERSHIP_GUID: Final = uuid.uuid5(NAMESPACE, "leadership").bytes
"""The fixed producer GUID of leadership stamps."""
LARGEST_EPOCH: Final = 2**62 - 1
_SWITCH: Final = struct.Struct(">BqqH")
_WHOLE, _IN_PARTS = 1, 2
_PART: Final = struct.Struct(">QII")
_LONGEST_ID: Final = 255
_HALF: Final = 31


class Leadership(NamedTuple):
    """The leader of a partition: its fencing epoch, and the GUID of the sender whose records are valid."""

    epoch: int
    guid: bytes


class TopicSwitch(NamedTuple):
    """The position in a live topic, and the state of its producers there.

    `state` is the whole state, or part `part` of `parts`; `generation` identifies the state. Offsets belong to the
    topic with `topic_id`, which is empty where unknown.
    """

    topic: str
    start_ms: int
    offset: int
    state: bytes = b""
    part: int = 0
    parts: int = 1
    generation: int = 0
    topic_id: str = ""

    def to_bytes(self) -> bytes:
        name, topic_id = self.topic.encode(), self.topic_id.encode()
        is_plain = self.parts == 1 and not topic_id
        head = _SWITCH.pack(_WHOLE if is_plain else _IN_PARTS, self.start_ms, self.offset, len(name)) + name
        if is_plain:
            return head + self.state
        if len(topic_id) > _LONGEST_ID:
            raise InvalidError(f"topic {self.topic} has an id of {len(topic_id)} bytes: {self.topic_id}")
        place = _PART.pack(self.generation, self.part, self.parts)
        return head + bytes([len(topic_id)]) + topic_id + place + self.state

    def in_parts(self, most: int, generation: int) -> list[TopicSwitch]:
        """The switches to write, each with at most `most` bytes of state: this one, or its parts in order."""
        if len(self.state) <= most:
            return [self]
        pieces = [self.state[start : start + most] for start in range(0, len(self.state), most)]
        return [
            self._replace(state=piece, part=part, parts=len(pieces), generation=generation)
            for part, piece in enumerate(pieces)
        ]

    @classmethod
    def from_bytes(cls, data: bytes) -> TopicSwitch:
        if len(data) < _SWITCH.size or data[0] not in (_WHOLE, _IN_PARTS):
            raise InvalidError(
                f"a topic switch has version {_WHOLE} or {_IN_PARTS} and at least {_SWITCH.size} bytes; these "
                f"{len(data)} are something else, or of a later release"
            )
        version, start_ms, offset, length = _SWITCH.unpack_from(data)
        end = _SWITCH.size + length
        topic, rest = data[_SWITCH.size : end].decode(errors="replace"), data[end:]
        if len(data) < end or offset < 0:
            raise InvalidError(f"a topic switch of {len(data)} bytes at offset {offset} cannot be read")
        if version == _WHOLE:
            return cls(topic, start_ms, offset, rest)
        start = 1 + (rest[0] if rest else 0)
        if len(rest) < start + _PART.size:
            raise InvalidError(f"a topic switch of {len(data)} bytes at offset {offset} cannot be read")
        generation, part, parts = _PART.unpack_from(rest, start)
        if not 0 <= part < parts:
            raise InvalidError(f"a topic switch says to be part {part} of {parts}")
        topic_id, state = rest[1:start].decode(errors="replace"), rest[start + _PART.size :]
        return cls(topic, start_ms, offset, state, part, parts, generation, topic_id)


# -- leadership stamps ---------------------------------------------------------------------------


def send_leadership(
    writer: RecordWriter, partition: int, leadership: Leadership, *, nonce: int, now_ms: int
) -> Written:
    """Write a leadership stamp and return its position. A repeat needs another nonce."""
    outlet = outlet_of(writer)
    written = outlet.prepare([leadership_row(leadership, nonce=nonce, now_ms=now_ms)], partition).append()
    outlet.acknowledge([partition])
    return written[-1]


def leadership_row(leadership: Leadership, *, nonce: int, now_ms: int) -> RecordColumns:
    """A leadership stamp ready to write."""
    epoch, guid = leadership
    if not 0 < epoch <= LARGEST_EPOCH or len(guid) != 16:
        raise InvalidError(f"epoch {epoch} of a sender with {len(guid)} bytes of GUID: no leadership")
    key = ControlKey(guid, epoch >> _HALF, epoch & (1 << _HALF) - 1, nonce).to_bytes()
    payload = start_of_chain_bytes(ChecksumType.NONE)
    stamp = Stamp(RecordKind.CONTROL, ControlType.START_OF_CHAIN, HEARTBEAT, LEADERSHIP_GUID, 0, 0, now_ms, 0)
    return control_row(stamp, payload, key=key)[1]


def leadership_stamps(batch: pa.RecordBatch, columns: IntegrityColumns) -> Iterator[tuple[int, Leadership]]:
    """Yield row and content of every sound leadership stamp in a batch; damaged ones are skipped."""
    high, low = (int.from_bytes(half, "big") for half in (LEADERSHIP_GUID[:8], LEADERSHIP_GUID[8:]))
    is_stamp = columns.is_heartbeat & (columns.guid_high == high) & (columns.guid_low == low)
    for row in np.flatnonzero(is_stamp).tolist():
        key = batch.column("key")[row].as_py()
        found = None if key is None else ControlKey.from_bytes(key)
        stamp = columns.stamp(row)
        payload = control_payload(batch.column("headers"), row)
        crc = checksum_of(stamp, key, batch.column("value")[row].as_py(), payload)
        if found is not None and crc == stamp.crc and found.chain >= 0 and found.sequence >= 0:
            yield row, Leadership(found.chain << _HALF | found.sequence, found.guid)


# -- upstream positions --------------------------------------------------------------------------


def with_upstream(headers: pa.ListArray, offsets: NDArray[np.int64]) -> pa.ListArray:
    """The headers column with each record's upstream position appended; an older position is replaced."""
    column = single(headers)
    rows = len(column)
    entries, parents = column.flatten(), pc.list_parent_indices(column).to_numpy(zero_copy_only=False)
    older = pc.equal(entries.field("key"), UPSTREAM_KEY)
    if older.true_count:
        others = pc.invert(older)
        entries, parents = entries.filter(others), parents[others.to_numpy(zero_copy_only=False)]
    counts = np.bincount(parents, minlength=rows) + 1
    ends = np.zeros(rows + 1, np.int32)
    np.cumsum(counts, out=ends[1:])
    fresh = pa.StructArray.from_arrays(
        [pa.repeat(pa.scalar(UPSTREAM_KEY), rows), _positions(offsets)], fields=list(HEADER_TYPE)
    )
    chosen = np.empty(len(entries) + rows, np.int64)
    is_fresh = np.zeros(len(chosen), np.bool_)
    is_fresh[ends[1:] - 1] = True
    chosen[is_fresh] = np.arange(len(entries), len(entries) + rows)
    chosen[~is_fresh] = np.arange(len(entries))
    together = pa.concat_arrays([entries.cast(HEADER_TYPE), fresh]).take(pa.array(chosen))
    return pa.Array.from_buffers(HEADERS_TYPE, rows, [None, pa.py_buffer(ends)], children=[together])


def upstream_offsets(headers: pa.ListArray) -> NDArray[np.int64]:
    """The upstream position of each record, -1 where it has none."""
    column = single(headers)
    found = np.full(len(column), NO_OFFSET, np.int64)
    entries = column.flatten()
    values = entries.field("value")
    good = pc.and_(
        pc.equal(entries.field("key"), UPSTREAM_KEY), pc.equal(pc.binary_length(values), UPSTREAM_BYTES)
    )
    good = good.fill_null(False)
    if good.true_count:
        chosen = values.filter(good)
        parents = pc.list_parent_indices(column).filter(good).to_numpy(zero_copy_only=False)
        start = chosen.offset * 4
        first = int(np.frombuffer(chosen.buffers()[1], np.int32)[start // 4])
        numbers = np.frombuffer(chosen.buffers()[2], ">i8", len(chosen), first)
        found[parents] = numbers
    return found


def _positions(offsets: NDArray[np.int64]) -> pa.Array:
    ends = np.arange(len(offsets) + 1, dtype=np.int32) * UPSTREAM_BYTES
    content = offsets.astype(">i8")
    return pa.Array.from_buffers(
        pa.binary(), len(offsets), [None, pa.py_buffer(ends), pa.py_buffer(content.tobytes())]
    )
