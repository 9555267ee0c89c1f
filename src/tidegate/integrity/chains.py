"""How a sender numbers what it sends to one partition: the rules, without sending anything.

Owns the sender's state machine. A sender's records in a partition form *chains*: a start record with sequence
0, data and control records 1, 2, 3, …, and an end record that certifies the sum of all before it. `Chains` is
pure: it answers the pieces to send and the state after them; `sender` sends them and only then keeps the
state.

    state    event                                                 pieces
    none     anything to send                                      start of chain 0, then it
    open     anything to send                                      it
    open     … and the chain is too old, or full                   end, start of the next chain, then it
    open     the partition is closed                               end, final
    ended    anything to send                                      start of the next chain, then it

A sender of *headers only* (`headers_only=True`) sends no control records: its first data record has sequence 0 and
opens the chain, which ends with the last sequence there is. It may go on in a chain that was opened with a start.

Invariants:
C1  numbers never go back: a chain number is used once, a sequence grows by one;
C2  where chains end depends on records and `now_ms` alone, not on how rows were cut into calls (and not on
    `now_ms` either without a time limit): two attempts at the same rows send the same chains;
C3  a chain ends before its sequence could overflow.

Thread rule: values and pure functions.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow.compute as pc

from tidegate.durations import DurationLike, SizeLike, duration_ms, format_duration, size_bytes
from tidegate.errors import InvalidError
from tidegate.integrity.checksum import control_checksum, field_sum
from tidegate.integrity.columns import source_of
from tidegate.integrity.header import (
    CONTROL_VALUE,
    FINAL,
    HEADERS_ONLY,
    MAX_SEQUENCE,
    NO_CONTROL,
    ORIGIN_HEADER_KEY,
    ChainOrigin,
    ChecksumType,
    ControlType,
    EndOfChain,
    RecordKind,
    Stamp,
    start_of_chain_bytes,
)
from tidegate.integrity.stamping import control_key, control_row, stamp_rows, with_header
from tidegate.log.format.records import RecordColumns

MOST_RECORDS: Final = MAX_SEQUENCE - 2  # so that an end still has a number
UNBOUNDED: Final = 2**62
_STATE = struct.Struct(">BiiBQQqqq")
_STATE_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """When a sender ends a chain: before the record that would exceed one of these.

    `max_age` of 0 or less is no limit; `max_records` counts what lies between start and end, `max_bytes`
    their keys and values.
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
    """Where a sender stands in one partition; with `to_bytes` a sender can go on after a restart."""

    chain: int = -1
    """The last chain begun, -1 before the first."""
    sequence: int = 0
    """The next sequence in it: as many records as it has."""
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
    """What to send, in order, and the state once it is sent."""

    pieces: list[RecordColumns]
    after: ChainState


@dataclass(frozen=True, slots=True)
class Chains:
    """The rules for one sender; the state of each partition is handed in."""

    guid: bytes
    nonce: int = 0
    checksum_type: ChecksumType = ChecksumType.ADHASH2
    limits: ChainLimits = ChainLimits()
    origin: ChainOrigin | None = None
    """What starts of chains say about who sends them."""
    headers_only: bool = False
    """Send no control records; then there are no checksums of chains, and `limits` do not count."""

    def data(self, state: ChainState, rows: RecordColumns, now_ms: int) -> Planned:
        """Send rows; those without a timestamp get `now_ms`, so that a repeat has the same bytes."""
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
        """Send a control record inside a chain (starts and ends are this class's own to send)."""
        if control in (ControlType.START_OF_CHAIN, ControlType.END_OF_CHAIN):
            raise InvalidError("a chain's start and end are sent by the sender itself; use close_partition")
        if self.headers_only:
            raise InvalidError("this sender writes no control records")
        pieces: list[RecordColumns] = []
        state = self._ready(state, now_ms, pieces)
        return Planned(pieces, self._add_control(state, control, payload, now_ms, pieces))

    def end(self, state: ChainState, now_ms: int) -> Planned:
        """Send the partition's last end; nothing when no chain is open, or by a sender of headers only."""
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
        begun = self._add_control(opened, ControlType.START_OF_CHAIN, payload, now_ms, pieces)
        if self.origin is not None:
            pieces[-1] = with_header(pieces[-1], ORIGIN_HEADER_KEY, self.origin.to_bytes())
        return begun

    def _end(self, state: ChainState, now_ms: int, pieces: list[RecordColumns], *, flags: int) -> ChainState:
        certified = EndOfChain(self.checksum_type, state.checksum, state.sequence, state.stamp_sum)
        stamp = self._stamp(state, now_ms, ControlType.END_OF_CHAIN, flags)
        self._control_piece(stamp, certified.to_bytes(), now_ms, pieces)
        return state._replace(sequence=state.sequence + 1, is_open=False)

    def _add_control(
        self,
        state: ChainState,
        control: ControlType,
        payload: bytes | None,
        now_ms: int,
        pieces: list[RecordColumns],
    ) -> ChainState:
        stamp = self._control_piece(self._stamp(state, now_ms, control), payload, now_ms, pieces)
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

    def _control_piece(
        self, stamp: Stamp, payload: bytes | None, now_ms: int, pieces: list[RecordColumns]
    ) -> Stamp:
        key = control_key(stamp, self.nonce)
        stamp = stamp._replace(crc=control_checksum(stamp, key, CONTROL_VALUE, payload))
        pieces.append(control_row(stamp, nonce=self.nonce, payload=payload, log_time_ms=now_ms))
        return stamp

    def _stamp(self, state: ChainState, now_ms: int, control: int = NO_CONTROL, flags: int = 0) -> Stamp:
        kind = RecordKind.PUT if control == NO_CONTROL else RecordKind.CONTROL
        return Stamp(kind, control, flags, self.guid, state.chain, state.sequence, now_ms, 0)
