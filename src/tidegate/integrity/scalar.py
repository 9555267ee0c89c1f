"""One partition judged record by record: the readable twin of `validator`, and what its tests compare it with.

Owns what lies around the decision table: which records are not judged at all, how many producers there may be,
what a start and an end of push do to the phase, and where a partition stops. `kernels/judge.py` does the same.

Thread rule: one thread per validator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tidegate.errors import InvalidError
from tidegate.integrity.header import ControlType, RecordKind
from tidegate.integrity.judge import UNCOUNTED, Observed, Outcome, Producer, judge
from tidegate.integrity.manifest import Completeness, Manifest, Received, check_manifest
from tidegate.integrity.rules import ValidationRules
from tidegate.integrity.state import PartitionState, Phase
from tidegate.integrity.verdicts import GAPS, Note, Rule, Verdict


class Arrival(NamedTuple):
    """One record: `observed` is None without metadata, or with metadata that cannot be read (`malformed`)."""

    offset: int
    observed: Observed | None = None
    malformed: bool = False
    payload: bytes | None = None


class Judgement(NamedTuple):
    verdict: Verdict
    rule: Rule = Rule.NONE
    note: Note = Note.NONE
    stops: bool = False


class ScalarValidator:
    """The validator of one partition, slow and obvious. After a judgement that stops nothing has changed.

    `producers` has the producers' states as they go; the rest is in `state`.
    """

    def __init__(self, rules: ValidationRules | None = None, state: PartitionState | None = None) -> None:
        self.rules = rules if rules is not None else ValidationRules()
        self.state = state if state is not None else PartitionState()
        self.producers = {producer.guid: producer for producer in self.state.producers}

    def look(self, arrival: Arrival, now_ms: int) -> Judgement:
        """The verdict of the next record."""
        phase = self.state.phase
        found = self._judgement(arrival, now_ms)
        if found.verdict.is_fatal or found.rule is Rule.U3:
            note = Note.NONE if phase.is_settled else Note.DURING_PUSH
            stops = self.rules.stops(found.verdict, phase, is_damaged=_is_damaged(arrival, found.verdict))
            if not stops and _is_damaged(arrival, found.verdict):
                note |= Note.DAMAGED
            found = found._replace(note=found.note | note, stops=stops)
        if not found.stops:
            self.state.next_offset = arrival.offset + 1
        return found

    def _judgement(self, arrival: Arrival, now_ms: int) -> Judgement:
        observed = arrival.observed
        if arrival.malformed:
            return Judgement(Verdict.UNSUPPORTED, Rule.U2)
        if observed is None:
            return Judgement(Verdict.UNMANAGED, Rule.U3 if self.rules.strict else Rule.NONE)
        stamp = observed.stamp
        if stamp.is_heartbeat and stamp.is_start_of_chain:
            if observed.computed_crc in (None, stamp.crc):
                return Judgement(Verdict.HEARTBEAT)
            return Judgement(Verdict.CORRUPT, Rule.D1)
        known = self.producers.get(stamp.guid)
        if known is None and len(self.producers) >= self.rules.max_producers:
            outcome = Outcome(Verdict.UNREGISTERED_PRODUCER, Rule.U4, None)
        else:
            outcome = self._outcome(known, observed, arrival.payload, now_ms)
        is_damaged = _is_damaged(arrival, outcome.verdict)
        if outcome.verdict.is_fatal and self.rules.stops(
            outcome.verdict, self.state.phase, is_damaged=is_damaged
        ):
            return Judgement(outcome.verdict, outcome.rule)
        if outcome.producer is not None:
            self.producers[stamp.guid] = outcome.producer
        note = outcome.note
        is_new = outcome.verdict is not Verdict.DUPLICATE
        is_data = stamp.kind != RecordKind.CONTROL
        if self.rules.batch_only and self.state.phase is Phase.PUSHED and is_data and is_new:
            note |= Note.UNEXPECTED
        return Judgement(outcome.verdict, outcome.rule, note | self._move_phase(observed, outcome.verdict))

    def _outcome(
        self, known: Producer | None, observed: Observed, payload: bytes | None, now_ms: int
    ) -> Outcome:
        phase, rules = self.state.phase, self.rules
        outcome = judge(
            known,
            observed,
            settled=phase.is_settled,
            tolerates=lambda producer, record: rules.tolerance.note(producer, record, now_ms),
            gone=rules.gone(phase) or (self.state.forgot and phase.is_settled),
            forces=True,
        )
        ends_push = _is_control(observed, ControlType.END_OF_PUSH) and phase is not Phase.PUSHED
        if not ends_push or outcome.verdict is not Verdict.OK:
            return outcome
        if compare(payload, self.producers.get) is None:
            return outcome
        return Outcome(Verdict.MISSING, Rule.M1, outcome.producer)

    def _move_phase(self, observed: Observed, verdict: Verdict) -> Note:
        """A start or end of push that counts moves the phase; the note of one that does not."""
        if verdict not in (Verdict.OK, Verdict.MISSING, Verdict.UNREGISTERED_PRODUCER):
            return Note.NONE
        if observed.computed_crc not in (None, observed.stamp.crc):
            return Note.NONE
        if _is_control(observed, ControlType.START_OF_PUSH):
            if self.state.phase is not Phase.LIVE:
                return Note.IGNORED
            self.state.phase = Phase.PUSHING
        elif _is_control(observed, ControlType.END_OF_PUSH):
            if self.state.phase is Phase.PUSHED:
                return Note.IGNORED
            self.state.phase, self.state.end_of_push = Phase.PUSHED, observed.offset
        return Note.NONE


def compare(payload: bytes | None, known: Callable[[bytes], Producer | None]) -> Completeness | str | None:
    """A push's manifest against what is known of its producers: None when they agree, else how they do not."""
    try:
        manifest = Manifest.from_bytes(payload or b"")
    except InvalidError as error:
        return str(error)
    listed = ((sent.guid, known(sent.guid)) for sent in manifest.producers)
    received = {guid: received_of(producer) for guid, producer in listed if producer is not None}
    completeness = check_manifest(manifest, received)
    return None if completeness.is_complete else completeness


def received_of(producer: Producer) -> Received:
    """What a manifest is compared with; where a chain has a known gap its sum says nothing."""
    is_whole = producer.registered and not producer.tainted
    records = None if producer.data_records == UNCOUNTED else producer.data_records
    return Received(producer.chain, producer.sequence, producer.checksum if is_whole else None, records)


def _is_damaged(arrival: Arrival, verdict: Verdict) -> bool:
    """Whether the record that shows a gap does not match its own checksum."""
    observed = arrival.observed
    return (
        verdict in GAPS and observed is not None and observed.computed_crc not in (None, observed.stamp.crc)
    )


def _is_control(observed: Observed, control: ControlType) -> bool:
    return observed.stamp.kind == RecordKind.CONTROL and observed.stamp.control == control
