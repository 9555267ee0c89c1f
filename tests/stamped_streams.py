"""Streams of records, sound or not, written one by one; and both validators over them. For tests of receivers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from scalar_validator import Arrival, Judgement, ScalarValidator
from tidegate.integrity.columns import checksum_of, control_payload, field_sum, read_columns
from tidegate.integrity.header import (
    HEADERS_ONLY,
    HEARTBEAT,
    ChecksumType,
    ControlKey,
    ControlType,
    EndOfChain,
    RecordKind,
    Stamp,
    start_of_chain_bytes,
    start_of_push_bytes,
)
from tidegate.integrity.state import Manifest, PartitionState, Phase, ProducerTable
from tidegate.integrity.validator import Judged, OnError, PartitionValidator, ValidationRules
from tidegate.integrity.verdicts import Note, Rule, Verdict
from tidegate.kernels.integrity import MANAGED, UNMANAGED
from tidegate.log.format.records import RECORD_SCHEMA
from validation_rules import Observed

NOW = 1_800_000_000_000
HOUR = 3_600_000


class Row(NamedTuple):
    """One record on its way; `stamp` None is a record without metadata."""

    stamp: Stamp | None
    key: bytes | None
    value: bytes | None
    payload: bytes | None = None
    time: int = NOW
    extra: tuple[tuple[str, bytes | None], ...] = ()

    def stamped(self, **fields: Any) -> Row:
        """With another stamp; the checksum stays."""
        assert self.stamp is not None
        return self._replace(stamp=self.stamp._replace(**fields))

    @property
    def headers(self) -> list[dict[str, Any]]:
        pairs: list[tuple[str, bytes | None]] = []
        if self.stamp is not None:
            pairs.append(("div", self.stamp.to_bytes()))
        if self.payload is not None:
            pairs.append(("divc", self.payload))
        return [{"key": key, "value": value} for key, value in (*pairs, *self.extra)]


class Pen:
    """A producer that writes sound chains, at whatever place it is told to.

    With `headers_only` it writes no control records: begin with `bare_chain_of`.
    """

    def __init__(
        self,
        number: int = 1,
        kind: ChecksumType = ChecksumType.ADHASH2,
        time: int = NOW,
        *,
        headers_only: bool = False,
    ) -> None:
        self.guid = bytes([number]) * 16
        self.kind = ChecksumType.NONE if headers_only else kind
        self.flags = HEADERS_ONLY if headers_only else 0
        self.time = time
        self.chain, self.sequence = -1, 0
        self.checksum = self.stamp_sum = self.data = 0

    def start(self, chain: int | None = None) -> Row:
        self.chain = self.chain + 1 if chain is None else chain
        self.sequence = self.checksum = self.stamp_sum = 0
        return self.control(ControlType.START_OF_CHAIN, start_of_chain_bytes(self.kind))

    def put(self, key: bytes | None = b"k", value: bytes | None = b"v", sequence: int | None = None) -> Row:
        kind = RecordKind.DELETE if value is None else RecordKind.PUT
        self.data += 1
        return self._write(Stamp(kind, 255, self.flags, self.guid, 0, 0, 0, 0), key, value, None, sequence)

    def puts(self, count: int) -> list[Row]:
        return [self.put(b"k%d" % number, b"value %d" % number) for number in range(count)]

    def control(self, control: int, payload: bytes | None = None, flags: int = 0) -> Row:
        return self._write(
            Stamp(RecordKind.CONTROL, control, flags, self.guid, 0, 0, 0, 0), b"", b"", payload
        )

    def end(self, *, final: bool = True, wrong: bool = False, sequence: int | None = None) -> Row:
        if sequence is not None:
            self.sequence = sequence
        certified = EndOfChain(self.kind, self.checksum ^ wrong, self.sequence, self.stamp_sum)
        return self.control(ControlType.END_OF_CHAIN, certified.to_bytes(), int(final))

    def chain_of(self, count: int) -> list[Row]:
        return [self.start(), *self.puts(count), self.end()]

    def bare_chain_of(self, count: int) -> list[Row]:
        """The next chain without control records."""
        self.chain += 1
        self.sequence = self.checksum = self.stamp_sum = 0
        return self.puts(count)

    def start_push(self) -> Row:
        return self.control(ControlType.START_OF_PUSH, start_of_push_bytes(is_sorted=True))

    def end_push(self, manifest: Manifest | None = None) -> Row:
        return self.control(ControlType.END_OF_PUSH, (manifest or Manifest()).to_bytes())

    def heartbeat(self) -> Row:
        stamp = Stamp(
            RecordKind.CONTROL, ControlType.START_OF_CHAIN, HEARTBEAT, b"\xff" * 16, 0, 0, self.time, 0
        )
        payload = start_of_chain_bytes(ChecksumType.NONE)
        key = ControlKey(stamp.guid, 0, 0).to_bytes()
        crc = checksum_of(stamp, key, b"", payload)
        return Row(stamp._replace(crc=crc), key, b"", payload, self.time)

    def _write(
        self,
        stamp: Stamp,
        key: bytes | None,
        value: bytes | None,
        payload: bytes | None,
        sequence: int | None = None,
    ) -> Row:
        if sequence is not None:
            self.sequence = sequence
        stamp = stamp._replace(chain=self.chain, sequence=self.sequence, timestamp=self.time)
        if stamp.kind == RecordKind.CONTROL:
            key = ControlKey(self.guid, self.chain, self.sequence).to_bytes()
        stamp = stamp._replace(crc=checksum_of(stamp, key, value, payload))
        self.sequence += 1
        if not stamp.is_end_of_chain:
            summands = {ChecksumType.ADHASH2: stamp.crc, ChecksumType.ADHASH: field_sum(stamp, key, value)}
            self.checksum = (self.checksum + summands.get(self.kind, 0)) % 2**64
            self.stamp_sum = (self.stamp_sum + stamp.stamp_summand) % 2**64
        return Row(stamp, key, value, payload, self.time)


def batch_of(rows: Sequence[Row], first: int = 0) -> pa.RecordBatch:
    """Records with consecutive offsets from `first`."""
    topic = pa.DictionaryArray.from_arrays(pa.array([0] * len(rows), pa.int32()), pa.array(["orders"]))
    times = pa.array([None if row.time < 0 else row.time for row in rows], pa.int64())
    columns = [
        topic,
        pa.array([0] * len(rows), pa.int32()),
        pa.array(range(first, first + len(rows)), pa.int64()),
        times.cast(RECORD_SCHEMA.field("timestamp").type),
        pa.array([row.key for row in rows], pa.binary()),
        pa.array([row.value for row in rows], pa.binary()),
        pa.array([row.headers for row in rows], RECORD_SCHEMA.field("headers").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)


def arrivals(rows: Sequence[Row], first: int = 0, *, payloads: bool = True) -> list[Arrival]:
    """The same records for the scalar validator."""
    batch = batch_of(rows, first)
    columns = read_columns(batch.column("headers"))
    found = []
    for number, row in enumerate(rows):
        offset, state = first + number, columns.state[number]
        if state != MANAGED:
            found.append(Arrival(offset, malformed=bool(state != UNMANAGED)))
            continue
        stamp = columns.stamp(number)
        payload = control_payload(batch.column("headers"), number) if stamp.kind == 2 else None
        computes = payloads or stamp.kind == RecordKind.CONTROL
        observed = Observed(
            stamp,
            offset,
            row.time,
            computed_crc=checksum_of(stamp, row.key, row.value, payload) if computes else None,
            field_sum=field_sum(stamp, row.key, row.value),
            announced_type=payload[1] if stamp.is_start_of_chain and payload else 0,
            certified=EndOfChain.from_bytes(payload) if stamp.is_end_of_chain and payload else None,
        )
        found.append(Arrival(offset, observed, payload=payload))
    return found


FAULTY = (Verdict.CORRUPT, Verdict.AFTER_END, Verdict.UNSUPPORTED)


class Both:
    """Both validators over one partition; they must agree at every record, whatever the cuts."""

    def __init__(self, rules: ValidationRules | None = None, state: PartitionState | None = None) -> None:
        given = state if state is not None else PartitionState()
        self.vector = PartitionValidator("orders", 0, rules=rules, state=given.copy())
        self.scalar = ScalarValidator(rules, given.copy())
        self.judged: list[Judged] = []
        self.offset = given.next_offset

    def feed(self, rows: Iterable[Row], cuts: Sequence[int] = (), now_ms: int = NOW) -> list[Judgement]:
        """The judgements of rows up to the one that stops the partition."""
        rows = list(rows)
        found: list[Judgement] = []
        for arrival in arrivals(rows, self.offset, payloads=self.vector.rules.payloads):
            found.append(self.scalar.look(arrival, now_ms))
            if found[-1].stops:
                break
        self.judged = []
        edges = [0, *sorted(cuts), len(rows)]
        for start, stop in itertools.pairwise(edges):
            self.judged.append(self.vector.validate(batch_of(rows[start:stop], self.offset + start), now_ms))
            if self.judged[-1].stop_at is not None:
                break
        assert self.told == [(one.verdict, one.rule, one.note) for one in found]
        assert (self.judged[-1].stop_at is not None) == bool(found and found[-1].stops)
        expected = [self._fate(row, one) for row, one in zip(rows, found, strict=False)]
        different = [
            (row, one, got, want)
            for row, one, got, want in zip(rows, found, self.fates, expected, strict=False)
            if got != want
        ]
        assert not different, different[0]
        self.offset = self.vector.state.next_offset
        assert self.vector.state.phase == self.scalar.state.phase
        assert self.vector.state.end_of_push == self.scalar.state.end_of_push
        assert {one.guid: one for one in self.vector.state.producers} == self.scalar.producers
        return found

    def _fate(self, row: Row, one: Judgement) -> tuple[bool, bool]:
        """Whether a record goes on, and whether it is set aside, by the words of `OnError`."""
        is_control = (
            row.stamp is not None and row.stamp.kind == RecordKind.CONTROL and one.rule is not Rule.U2
        )
        if one.stops or is_control or one.verdict is Verdict.DUPLICATE:
            return False, False
        if one.verdict in FAULTY or one.rule is Rule.U3 or one.note & Note.DAMAGED:
            return False, self._keeps(one)
        return not one.note & Note.UNEXPECTED, False

    def _keeps(self, one: Judgement) -> bool:
        phase = Phase.PUSHING if one.note & Note.DURING_PUSH else Phase.LIVE
        verdict = Verdict.CORRUPT if one.note & Note.DAMAGED else one.verdict
        return self.vector.rules.action(verdict, phase) is OnError.KEEP

    @property
    def fates(self) -> list[tuple[bool, bool]]:
        return [
            pair for one in self.judged for pair in zip(one.kept.tolist(), one.aside.tolist(), strict=True)
        ]

    @property
    def told(self) -> list[tuple[Verdict, Rule, Note]]:
        return [
            (Verdict(verdict), Rule(rule), Note(note))
            for one in self.judged
            for verdict, rule, note in zip(
                one.verdicts.tolist(), one.rules.tolist(), one.notes.tolist(), strict=True
            )
        ]

    def verdicts(self, rows: Iterable[Row], **options: Any) -> list[str]:
        return [one.verdict.name for one in self.feed(rows, **options)]

    @property
    def producers(self) -> ProducerTable:
        return self.vector.state.producers


class Pool:
    """Records to build many streams of: sound ones and damaged ones, encoded once and chosen by their numbers."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self._batch = batch_of(self.rows)
        self._arrivals = arrivals(self.rows)

    def batch(self, chosen: Sequence[int], first: int = 0) -> pa.RecordBatch:
        """For the vector form, with consecutive offsets from `first`."""
        taken = self._batch.take(pa.array(chosen, pa.int32()))
        columns = taken.columns
        columns[2] = pa.array(range(first, first + len(chosen)), pa.int64())
        return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)

    def arrivals(self, chosen: Sequence[int], first: int = 0) -> list[Arrival]:
        """The same for the scalar twin."""
        found = []
        for offset, number in enumerate(chosen, first):
            arrival = self._arrivals[number]
            observed = arrival.observed
            if observed is not None:
                observed = observed._replace(offset=offset)
            found.append(Arrival(offset, observed, arrival.malformed, arrival.payload))
        return found


class Streams:
    """What a test of the receiver is written with."""

    Pen = Pen
    Both = Both
    Pool = Pool
    Row = Row
    NOW = NOW
    HOUR = HOUR
    batch_of = staticmethod(batch_of)
    arrivals = staticmethod(arrivals)
