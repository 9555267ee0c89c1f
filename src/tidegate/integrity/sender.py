"""A log writer that numbers and check-sums what it writes, so that receivers see loss, change and repeats.

Owns the critical section: under one lock per partition, rows get their numbers, enter the chain's checksum and
are handed to the log, so that the log's order is the numbers' order. The numbering itself is `chains`', bytes
are `stamping`'s.

    with log.writer("orders", integrity=True) as sender:
        sender.write(table)

Invariants:
S1  a number is given out once: when an append fails, its records are *owed*. The next call for that partition
    sends them first, the very same bytes, and so does `retry()`. Writing the same table object again is that
    repeat too, and not a second write, also when somebody else's call has sent them meanwhile. A receiver
    that got them the first time calls the repeat a duplicate.
S2  a table that cannot be stored (a record too large, a reserved key) is refused before any number is given.
S3  an end is sent by `close()` and by leaving the `with` block without an error. With an error, or by
    `close(graceful=False)`, no chain is ended: a failed job never certifies what it sent.
S4  one GUID per sender, new each time; a GUID that is handed in must come with the positions it was left at,
    unless every attempt sends the same records in the same order (`sorted_sender`).

Thread rule: a sender may be shared; writes to one partition take turns, syncs are shared where the log's are.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple

import pyarrow as pa

from tidegate.clock import Clock, SystemClock
from tidegate.errors import InvalidError
from tidegate.integrity.chains import ChainLimits, Chains, ChainState, Planned
from tidegate.integrity.header import ChainOrigin, ChecksumType, ControlType
from tidegate.integrity.manifest import Sent
from tidegate.integrity.outlet import Prepared, RecordWriter, outlet_of
from tidegate.integrity.stamping import joined
from tidegate.log.format.records import RecordColumns, coerce
from tidegate.log.writer import Partitioner, Written
from tidegate.randomness import Randomness, SystemRandomness

CHECKSUMS: Final = {kind.name.lower(): kind for kind in ChecksumType}
JOINED_BYTES: Final = 1 << 20
"""Control records travel in one batch with data up to this size; larger data is not copied for it."""


class Channel:
    """One partition of a sender."""

    def __init__(self, number: int, state: ChainState) -> None:
        self.number = number
        self.lock = threading.RLock()
        self.state = state
        self.owed: list[Prepared] = []
        """Records that have their numbers and are not known to be stored, in their order."""


class Shipment(NamedTuple):
    """One call's records, partition by partition; kept when the call failed, until it is made again."""

    parts: list[tuple[Channel, Prepared]]
    source: Callable[[], object]


class Sender:
    """Wraps the writer of any log; see the module for its promises.

    `checksum` is "adhash2", "adhash" or "none"; `limits` say when chains end. `guid`, `nonce`, `positions` and
    `fixed_time_ms` (the producer's clock in every header) are for senders whose records must be the same at
    every attempt. `app` is the name that starts of chains give beside host and process, by default the program's; a
    sender with a `fixed_time_ms` names nobody.
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
        """Number and store the rows; one entry per stored batch, control records among them.

        Returns when they are acknowledged, as the wrapped writer's `write` does. After an error write the same
        table object again, or call `retry()` (S1). `now_ms` is the time that goes into the headers, for
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
        """Send a control record, each partition's with its own payload; with `final` end the chain after it.

        After an error, a call with the same `source` object is its repeat, as for tables (S1).
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
        """Send what earlier errors left owed, the same bytes again; what was stored by it.

        Those errors are settled then: a table that met one may be written again as a new one.
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
        """End every open chain and let go; fine to call twice. Not graceful: end none (S3).

        When it fails the sender stays open: call it again, or give up with `graceful=False`.
        """
        if self._closed:
            return
        if graceful:
            self._end(list(self._channels), self._now(None))
        self._closed = True
        self._writer.close()

    def position(self, partition: int) -> ChainState:
        """Where the sender stands in a partition: what `positions` of a later sender takes."""
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
        """The channels of some partitions, locked in one order, owing nothing."""
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
        """Check everything (S2), then give the numbers out, then store."""
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
        """Wait outside the locks, so that other threads go on while the disk syncs."""
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
        """A call that failed is made again."""
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
    """A table is known again as long as its owner keeps it; nobody can write it again otherwise."""
    try:
        return weakref.ref(source)
    except TypeError:
        return lambda: source


def _compact(pieces: list[RecordColumns]) -> list[RecordColumns]:
    """Small pieces as one, so that a short write is one batch; large ones as they lie."""
    if len(pieces) == 1 or sum(_bytes_of(piece) for piece in pieces) > JOINED_BYTES:
        return pieces
    return [joined(pieces)]


def _bytes_of(rows: RecordColumns) -> int:
    # what the buffers hold, slices of large columns included: an upper bound is enough here
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
