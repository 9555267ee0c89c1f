"""Write records with integrity metadata: the sender, its chains, and the writer interface it needs.

    with log.writer("orders", integrity=True) as sender:
        sender.write(table)

Owns the critical section: under one lock per partition, rows get their numbers, enter the chain's checksum and are
passed to the log, so that the log's order is the numbers' order. `Chains` assigns the numbers; `columns` writes the
bytes. A sender's records in a partition form *chains*: a start record with sequence 0, data and control records 1, 2,
3, …, and an end record that certifies the sum of all before it.

    state    event                                                 pieces
    none     anything to send                                      start of chain 0, then it
    open     anything to send                                      it
    open     … and the chain is too old, or full                   end, start of the next chain, then it
    open     the partition is closed                               end, final
    ended    anything to send                                      start of the next chain, then it

A sender of *headers only* sends no control records: its first data record has sequence 0 and opens the chain, which
ends at the highest sequence. It may continue a chain that was opened with a start.

S1  a number is assigned once: when an append fails, its records are *owed*. The next call for that partition
    sends them first, byte for byte, and so does `retry()`. Writing the same table object again is also that
    repeat, not a second write, even when another call has sent the records meanwhile. A receiver that got the
    first attempt treats the repeat as a duplicate.
S2  a table that cannot be stored (a record too large, a reserved key) is refused before any number is given.
S3  an end is sent by `close()` and by leaving the `with` block without an error. With an error, or by
    `close(graceful=False)`, no chain is ended: a failed job certifies nothing.
S4  one GUID per sender, new each time; a `guid` argument needs the `positions` at which that sender stopped,
    unless every attempt sends the same records in the same order (`sorted_sender`).
O1  `InvalidError` from `prepare` means that nothing was stored. After any error from `append`, the batch it
    was writing, and those after it, may or may not be stored; calling `append` again resumes at that batch.
C1  numbers never decrease: a chain number is used once, a sequence grows by one;
C2  where chains end depends on records and `now_ms` alone, not on how rows were cut into calls (and not on
    `now_ms` either without a time limit): two attempts at the same rows send the same chains;
C3  a chain ends before its sequence could overflow.

Thread rule: a sender may be shared; writes to one partition are serialised, syncs are shared where the log's are.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.clock import Clock, SystemClock
from tidegate.durations import DurationLike, SizeLike, duration_ms, format_duration, size_bytes
from tidegate.errors import InvalidError
from tidegate.integrity.columns import (
    control_row,
    field_sum,
    joined,
    source_of,
    stamp_rows,
)
from tidegate.integrity.header import (
    FINAL,
    HEADERS_ONLY,
    MAX_SEQUENCE,
    NO_CONTROL,
    ChainOrigin,
    ChecksumType,
    ControlType,
    EndOfChain,
    RecordKind,
    Stamp,
    start_of_chain_bytes,
)
from tidegate.integrity.state import Sent
from tidegate.log.format.records import HEADERS_TYPE, TIMESTAMP_TYPE, RecordColumns, coerce
from tidegate.log.writer import Partitioner, Written
from tidegate.randomness import Randomness, SystemRandomness

# -- output to a log -------------------------------------------------------------------------------

SCHEMA = pa.schema(
    [("key", pa.binary()), ("value", pa.binary()), ("timestamp", TIMESTAMP_TYPE), ("headers", HEADERS_TYPE)]
)


class RecordWriter(Protocol):
    """Any log's writer of Arrow tables."""

    topic: str

    def write(self, table: Any, *, partition: int | None = None) -> list[Written]: ...

    def close(self) -> None: ...


class Prepared(Protocol):
    """Checked and encoded records of one partition, ready to append (O1)."""

    def append(self) -> list[Written]: ...


@runtime_checkable
class Outlet(Protocol):
    """The writer interface of a sender."""

    def prepare(self, pieces: Sequence[RecordColumns], partition: int) -> Prepared: ...

    def acknowledge(self, partitions: Iterable[int]) -> None: ...


def outlet_of(writer: RecordWriter) -> Outlet:
    """The writer itself if it has `prepare`, else an adapter over its `write`."""
    return writer if isinstance(writer, Outlet) else WholeWrites(writer)


class WholeWrites:
    """Adapter for a writer that only has `write`."""

    def __init__(self, writer: RecordWriter) -> None:
        self._writer = writer
        self._lock = threading.Lock()

    def prepare(self, pieces: Sequence[RecordColumns], partition: int) -> Prepared:
        return _Pieces(self._writer, self._lock, list(pieces), partition)

    def acknowledge(self, partitions: Iterable[int]) -> None:
        """Nothing to do: `write` returned after the acknowledgement."""


class _Pieces:
    def __init__(
        self, writer: RecordWriter, lock: threading.Lock, pieces: list[RecordColumns], partition: int
    ) -> None:
        self._writer = writer
        self._lock = lock
        self._left = pieces
        self._partition = partition
        self._written: list[Written] = []

    def append(self) -> list[Written]:
        with self._lock:
            while self._left:
                self._written += self._writer.write(table_of(self._left[0]), partition=self._partition)
                del self._left[0]
        return self._written


def table_of(rows: RecordColumns) -> pa.RecordBatch:
    """The columns as the record batch that any writer takes."""
    headers = rows.headers if rows.headers is not None else pa.nulls(len(rows), HEADERS_TYPE)
    return pa.RecordBatch.from_arrays(
        [rows.key, rows.value, rows.timestamp.view(TIMESTAMP_TYPE), headers], schema=SCHEMA
    )


# -- chains ----------------------------------------------------------------------------------------

MOST_RECORDS: Final = MAX_SEQUENCE - 2  # so that an end still has a number
UNBOUNDED: Final = 2**62
_STATE = struct.Struct(">BiiBQQqqq")
_STATE_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """When a sender ends a chain: before the record that would exceed one of these.

    `max_age` of 0 or less is no limit; `max_records` counts the records between start and end, `max_bytes`
    the bytes of their keys and values.
    """

    max_age: DurationLike = "5m"
    max_records: int = 1_000_000
    max_bytes: SizeLike = "256MiB"

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_age", format_duration(_age_ms(self.max_age)))
        object.__setattr__(self, "max_bytes", size_bytes(self.max_bytes))
        if not 1 <= self.max_records <= MOST_RECORDS:
            raise InvalidError(f"max_records={self.max_records}: choose 1 to {MOST_RECORDS}")
        if self.bytes < 1:
            raise InvalidError(f"max_bytes={self.max_bytes}: choose at least 1")

    @property
    def age_ms(self) -> int:
        return _age_ms(self.max_age)

    @property
    def bytes(self) -> int:
        return size_bytes(self.max_bytes)


def _age_ms(age: DurationLike) -> int:
    return 0 if isinstance(age, int) and age <= 0 else duration_ms(age)


class ChainState(NamedTuple):
    """A sender's position in one partition; saved with `to_bytes`, a sender can resume after a restart."""

    chain: int = -1
    """The last chain begun, -1 before the first."""
    sequence: int = 0
    """The next sequence, which is the number of records in the chain."""
    is_open: bool = False
    checksum: int = 0
    stamp_sum: int = 0
    used_bytes: int = 0
    started_ms: int = 0
    records: int = 0
    """Data records sent to the partition, over all chains."""

    def to_bytes(self) -> bytes:
        return _STATE.pack(_STATE_VERSION, *self)

    @classmethod
    def from_bytes(cls, data: bytes) -> ChainState:
        if len(data) != _STATE.size or data[0] != _STATE_VERSION:
            raise InvalidError(
                f"a sender's position has {_STATE.size} bytes and version {_STATE_VERSION}; these "
                f"{len(data)} bytes are something else"
            )
        _, chain, sequence, is_open, *rest = _STATE.unpack(data)
        return cls(chain, sequence, bool(is_open), *rest)


class Planned(NamedTuple):
    """The batches to send, in order, and the state once they are sent."""

    pieces: list[RecordColumns]
    after: ChainState


@dataclass(frozen=True, slots=True)
class Chains:
    """The numbering rules of one sender; the caller passes the state of the partition."""

    guid: bytes
    nonce: int = 0
    checksum_type: ChecksumType = ChecksumType.ADHASH2
    limits: ChainLimits = ChainLimits()
    origin: ChainOrigin | None = None
    """The origin that starts of chains carry."""
    headers_only: bool = False
    """Send no control records; chains then have no checksums, and `limits` do not apply."""

    def data(self, state: ChainState, rows: RecordColumns, now_ms: int) -> Planned:
        """Plan data rows; rows without a timestamp get `now_ms`, so that a repeat has the same bytes."""
        pieces: list[RecordColumns] = []
        source = source_of(key=rows.key, value=rows.value, headers=rows.headers)
        start = 0
        while start < len(rows):
            state = self._ready(state, now_ms, pieces)
            first = self._stamp(state, now_ms, flags=HEADERS_ONLY if self.headers_only else 0)
            if self.headers_only:
                room, left, kind = MAX_SEQUENCE + 1 - state.sequence, UNBOUNDED, ChecksumType.NONE
            else:
                room, kind = self.limits.max_records - (state.sequence - 1), self.checksum_type
                left = self.limits.bytes - state.used_bytes
            stop = min(len(rows), start + room)
            stamped = stamp_rows(source, start, stop, first=first, checksum_type=kind, max_bytes=left)
            if stamped.stop == start:
                if state.sequence > 1:
                    state = self._end(state, now_ms, pieces, flags=0)
                    continue
                stamped = stamp_rows(  # larger than a chain may be: it gets one of its own
                    source,
                    start,
                    start + 1,
                    first=first,
                    checksum_type=self.checksum_type,
                    max_bytes=UNBOUNDED,
                )
            count = stamped.stop - start
            piece = rows.slice(start, count)
            timestamp = piece.timestamp
            if timestamp.null_count:
                timestamp = pc.fill_null(timestamp, now_ms)
            pieces.append(RecordColumns(piece.key, piece.value, timestamp, stamped.headers))
            state = state._replace(
                sequence=state.sequence + count,
                checksum=(state.checksum + stamped.checksum) % 2**64,
                stamp_sum=(state.stamp_sum + first.stamp_summand * count) % 2**64,
                used_bytes=state.used_bytes + stamped.used_bytes,
                records=state.records + count,
            )
            if state.sequence > MAX_SEQUENCE:
                state = state._replace(sequence=MAX_SEQUENCE, is_open=False)
            start = stamped.stop
        return Planned(pieces, state)

    def control(self, state: ChainState, control: ControlType, payload: bytes | None, now_ms: int) -> Planned:
        """Plan a control record inside a chain, other than a start or an end."""
        if control in (ControlType.START_OF_CHAIN, ControlType.END_OF_CHAIN):
            raise InvalidError("a chain's start and end are sent by the sender itself; use close_partition")
        if self.headers_only:
            raise InvalidError("this sender writes no control records")
        pieces: list[RecordColumns] = []
        state = self._ready(state, now_ms, pieces)
        return Planned(pieces, self._add_control(state, control, payload, now_ms, pieces))

    def end(self, state: ChainState, now_ms: int) -> Planned:
        """Plan the partition's final end; nothing without an open chain, or for a sender of headers only."""
        pieces: list[RecordColumns] = []
        if state.is_open and not self.headers_only:
            state = self._end(state, now_ms, pieces, flags=FINAL)
        return Planned(pieces, state)

    # -- inside ----------------------------------------------------------------------------------

    def _ready(self, state: ChainState, now_ms: int, pieces: list[RecordColumns]) -> ChainState:
        """An open chain with room for one more record."""
        if state.is_open:
            limits = self.limits
            too_old = limits.age_ms > 0 and now_ms - state.started_ms > limits.age_ms
            full = state.sequence > limits.max_records
            if self.headers_only or (not too_old and not full):
                return state
            state = self._end(state, now_ms, pieces, flags=0)
        if state.chain >= MAX_SEQUENCE:
            raise InvalidError(f"the sender {self.guid.hex()} has used up its chain numbers; make a new one")
        opened = ChainState(chain=state.chain + 1, is_open=True, started_ms=now_ms, records=state.records)
        if self.headers_only:
            return opened
        payload = start_of_chain_bytes(self.checksum_type)
        return self._add_control(opened, ControlType.START_OF_CHAIN, payload, now_ms, pieces, self.origin)

    def _end(self, state: ChainState, now_ms: int, pieces: list[RecordColumns], *, flags: int) -> ChainState:
        certified = EndOfChain(self.checksum_type, state.checksum, state.sequence, state.stamp_sum)
        stamp = self._stamp(state, now_ms, ControlType.END_OF_CHAIN, flags)
        pieces.append(control_row(stamp, certified.to_bytes(), nonce=self.nonce)[1])
        return state._replace(sequence=state.sequence + 1, is_open=False)

    def _add_control(
        self,
        state: ChainState,
        control: ControlType,
        payload: bytes | None,
        now_ms: int,
        pieces: list[RecordColumns],
        origin: ChainOrigin | None = None,
    ) -> ChainState:
        stamp = self._stamp(state, now_ms, control)
        stamp, piece = control_row(stamp, payload, nonce=self.nonce, origin=origin)
        pieces.append(piece)
        summand = 0
        if self.checksum_type is ChecksumType.ADHASH2:
            summand = stamp.crc
        elif self.checksum_type is ChecksumType.ADHASH:
            summand = field_sum(stamp, None, None)
        return state._replace(
            sequence=state.sequence + 1,
            checksum=(state.checksum + summand) % 2**64,
            stamp_sum=(state.stamp_sum + stamp.stamp_summand) % 2**64,
        )

    def _stamp(self, state: ChainState, now_ms: int, control: int = NO_CONTROL, flags: int = 0) -> Stamp:
        kind = RecordKind.PUT if control == NO_CONTROL else RecordKind.CONTROL
        return Stamp(kind, control, flags, self.guid, state.chain, state.sequence, now_ms, 0)


# -- sender ----------------------------------------------------------------------------------------

CHECKSUMS: Final = {kind.name.lower(): kind for kind in ChecksumType}
JOINED_BYTES: Final = 1 << 20
"""Control records travel in one batch with data up to this size; larger data is not copied for it."""


class Channel:
    """A sender's channel to one partition."""

    def __init__(self, number: int, state: ChainState) -> None:
        self.number = number
        self.lock = threading.RLock()
        self.state = state
        self.owed: list[Prepared] = []
        """Numbered records that are not known to be stored, in order."""


class Shipment(NamedTuple):
    """One call's records by partition; a failed call's are kept until the call is repeated."""

    parts: list[tuple[Channel, Prepared]]
    source: Callable[[], object]


class Sender:
    """Wraps the writer of any log and adds integrity metadata; see the module for its invariants.

    `checksum` is "adhash2", "adhash" or "none"; `limits` say when chains end. `guid`, `nonce`, `positions` and
    `fixed_time_ms` (the producer's clock in every header) are for senders whose records must be the same at
    every attempt. `app` is the name that starts of chains carry with host and process, by default the program's; a
    sender with a `fixed_time_ms` writes no origin.
    """

    def __init__(
        self,
        writer: RecordWriter,
        *,
        partitions: int | None = None,
        checksum: str = "adhash2",
        limits: ChainLimits | None = None,
        guid: bytes | None = None,
        nonce: int = 0,
        positions: Mapping[int, ChainState] | None = None,
        fixed_time_ms: int | None = None,
        app: str | None = None,
        clock: Clock | None = None,
        randomness: Randomness | None = None,
    ) -> None:
        if checksum not in CHECKSUMS:
            raise InvalidError(f"checksum {checksum!r}: choose one of {', '.join(CHECKSUMS)}")
        if guid is not None and len(guid) != 16:
            raise InvalidError(f"a producer GUID has 16 bytes, this one {len(guid)}")
        if not 0 <= nonce < 2**32:
            raise InvalidError(f"nonce={nonce}: choose 0 to {2**32 - 1}")
        count = partitions if partitions is not None else getattr(writer, "partitions", None)
        if not isinstance(count, int) or count < 1:
            raise InvalidError(f"how many partitions does {writer.topic} have? Pass partitions=N")
        chance = randomness if randomness is not None else SystemRandomness()
        self.guid: bytes = guid if guid is not None else chance.uuid().bytes
        self.topic = writer.topic
        self.partitions = count
        self.chains = Chains(
            self.guid,
            nonce,
            CHECKSUMS[checksum],
            limits if limits is not None else ChainLimits(),
            ChainOrigin.of_this_process(app) if fixed_time_ms is None else None,
        )
        self._writer = writer
        self._outlet = outlet_of(writer)
        self._clock = clock if clock is not None else SystemClock()
        self._fixed_time_ms = fixed_time_ms
        self._guard = threading.Lock()
        self._partitioner = Partitioner(writer.topic, count, first=chance.below(count))
        self._channels = {
            number: Channel(number, state) for number, state in sorted((positions or {}).items())
        }
        self._failed: list[Shipment] = []
        self._closed = False

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(graceful=kind is None)

    def write(
        self,
        table: pa.Table | pa.RecordBatch,
        *,
        partition: int | None = None,
        now_ms: int | None = None,
    ) -> list[Written]:
        """Number and store the rows; returns one entry per stored batch, control records included.

        Returns when they are acknowledged, as the wrapped writer's `write` does. After an error write the same
        table object again, or call `retry()` (S1). `now_ms` is the time written into the headers, for
        callers that replay.
        """
        self._require_open()
        failed = self._failed_shipment(table)
        if failed is not None:
            return self._finish(failed)
        columns = coerce(table)
        now = self._now(now_ms)
        with self._guard:
            explicit = _partition_column(table, partition, len(columns))
            parts = dict(self._partitioner.split(columns, explicit))
        with self._holding(parts) as channels:
            planned = [
                (channel, self.chains.data(channel.state, parts[channel.number], now)) for channel in channels
            ]
            shipment = self._send(planned, table)
        return self._acknowledged(shipment)

    def send_control(
        self,
        control: ControlType,
        payloads: Mapping[int, bytes | None],
        *,
        final: bool = False,
        now_ms: int | None = None,
        source: object = None,
    ) -> list[Written]:
        """Send a control record to each partition with its own payload; with `final` also end the chain.

        After an error, a call with the same `source` object counts as its repeat, as for tables (S1).
        """
        self._require_open()
        failed = self._failed_shipment(source)
        if failed is not None:
            return self._finish(failed)
        now = self._now(now_ms)
        with self._holding(payloads) as channels:
            planned = []
            for channel in channels:
                plan = self.chains.control(channel.state, control, payloads[channel.number], now)
                if final:
                    end = self.chains.end(plan.after, now)
                    plan = Planned(plan.pieces + end.pieces, end.after)
                planned.append((channel, plan))
            shipment = self._send(planned, source)
        return self._acknowledged(shipment)

    def retry(self) -> list[Written]:
        """Send the records that earlier errors left owed, byte for byte; returns what was stored.

        After that, a table whose write had failed may be written again as a new write.
        """
        self._require_open()
        with self._guard:
            settled = list(self._failed)
        written: list[Written] = []
        for channel in self._every_channel():
            with channel.lock:
                written += self._pay(channel)
        with self._guard:
            self._failed = [kept for kept in self._failed if all(kept is not one for one in settled)]
        return written

    def close_partition(self, partition: int, *, now_ms: int | None = None) -> None:
        """End the sender's chain in one partition; a later write there begins the next chain."""
        self._require_open()
        self._end([partition] if partition in self._channels else [], self._now(now_ms))

    def close(self, *, graceful: bool = True) -> None:
        """End every open chain and release the writer; idempotent. Not graceful: end no chain (S3).

        When it fails the sender stays open: call it again, or give up with `graceful=False`.
        """
        if self._closed:
            return
        if graceful:
            self._end(list(self._channels), self._now(None))
        self._closed = True
        self._writer.close()

    def position(self, partition: int) -> ChainState:
        """The sender's position in a partition, for the `positions` of a later sender."""
        channel = self._channels.get(partition)
        return ChainState() if channel is None else channel.state

    def sent(self) -> dict[int, Sent]:
        """What was sent to each partition, for the completeness manifest; meant for after `close`."""
        return {
            channel.number: Sent(
                self.guid,
                channel.state.chain,
                channel.state.sequence - 1,
                channel.state.checksum,
                channel.state.records,
            )
            for channel in self._every_channel()
            if channel.state.chain >= 0
        }

    # -- inside ----------------------------------------------------------------------------------

    @contextmanager
    def _holding(self, partitions: Iterable[int]) -> Iterator[list[Channel]]:
        """Lock the channels of these partitions in a fixed order, after their owed records are sent."""
        channels = [self._channel(number) for number in sorted(partitions)]
        with ExitStack() as stack:
            for channel in channels:
                stack.enter_context(channel.lock)
            for channel in channels:
                self._pay(channel)
            yield channels

    def _channel(self, number: int) -> Channel:
        if not 0 <= number < self.partitions:
            raise InvalidError(
                f"topic {self.topic} has no partition {number}; it has 0 to {self.partitions - 1}",
                kafka_name="UNKNOWN_TOPIC_OR_PARTITION",
            )
        with self._guard:
            found = self._channels.get(number)
            if found is None:
                found = self._channels[number] = Channel(number, ChainState())
            return found

    def _every_channel(self) -> list[Channel]:
        with self._guard:
            return [self._channels[number] for number in sorted(self._channels)]

    def _send(self, planned: list[tuple[Channel, Planned]], source: object) -> Shipment:
        """Check everything (S2), then assign the numbers, then store."""
        ready = [
            (channel, plan.after, self._outlet.prepare(_compact(plan.pieces), channel.number))
            for channel, plan in planned
            if plan.pieces
        ]
        shipment = Shipment([(channel, prepared) for channel, _, prepared in ready], _reference(source))
        for channel, after, prepared in ready:
            channel.state = after
            channel.owed.append(prepared)
        try:
            for channel, prepared in shipment.parts:
                prepared.append()
                channel.owed.remove(prepared)
        except BaseException:
            self._keep(shipment)
            raise
        return shipment

    def _acknowledged(self, shipment: Shipment) -> list[Written]:
        """Wait outside the locks, so that other threads continue while the disk syncs."""
        try:
            self._outlet.acknowledge([channel.number for channel, _ in shipment.parts])
        except BaseException:
            for channel, prepared in shipment.parts:
                with channel.lock:
                    channel.owed.append(prepared)  # stored already: only its acknowledgement is repeated
            self._keep(shipment)
            raise
        return _written(shipment)

    def _pay(self, channel: Channel) -> list[Written]:
        written: list[Written] = []
        while channel.owed:
            written += channel.owed[0].append()
            self._outlet.acknowledge([channel.number])
            del channel.owed[0]
        return written

    def _finish(self, shipment: Shipment) -> list[Written]:
        """Repeat a call that failed."""
        for channel, _ in shipment.parts:
            with channel.lock:
                self._pay(channel)
        with self._guard:
            self._failed = [kept for kept in self._failed if kept is not shipment]
        return _written(shipment)

    def _keep(self, shipment: Shipment) -> None:
        with self._guard:
            self._failed = [kept for kept in self._failed if kept.source() is not None]
            self._failed.append(shipment)

    def _failed_shipment(self, source: object) -> Shipment | None:
        if source is None:
            return None
        with self._guard:
            return next((kept for kept in self._failed if kept.source() is source), None)

    def _end(self, partitions: Iterable[int], now_ms: int) -> None:
        with self._holding(partitions) as channels:
            ends = [(channel, self.chains.end(channel.state, now_ms)) for channel in channels]
            shipment = self._send(ends, None)
        self._acknowledged(shipment)

    def _now(self, given: int | None) -> int:
        if given is not None:
            return given
        return self._fixed_time_ms if self._fixed_time_ms is not None else self._clock.now_ms()

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidError(f"this sender to {self.topic} is closed; make a new one")


def _written(shipment: Shipment) -> list[Written]:
    return [batch for _, prepared in shipment.parts for batch in prepared.append()]


def _reference(source: object) -> Callable[[], object]:
    """A weak reference to the table where possible: a freed table cannot be written again."""
    try:
        return weakref.ref(source)
    except TypeError:
        return lambda: source


def _compact(pieces: list[RecordColumns]) -> list[RecordColumns]:
    """Join small pieces, so that a short write is one batch; leave large ones as they are."""
    if len(pieces) == 1 or sum(_bytes_of(piece) for piece in pieces) > JOINED_BYTES:
        return pieces
    return [joined(pieces)]


def _bytes_of(rows: RecordColumns) -> int:
    # size of the whole buffers, also for slices of large columns: an upper bound is enough here
    return int(rows.key.nbytes + rows.value.nbytes)


def _partition_column(table: Any, partition: int | None, rows: int) -> pa.Array | None:
    if partition is not None:
        return pa.repeat(pa.scalar(partition, pa.int32()), rows)
    if isinstance(table, RecordColumns):
        return None
    index = table.schema.get_field_index("partition")
    if index < 0:
        return None
    column = table.column(index)
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
