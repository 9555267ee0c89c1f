"""Validate one partition record by record: the oracle of `PartitionValidator`.

Owns what lies around the decision table: which records are not judged at all, how many producers there may be,
what a start and an end of push do to the phase, and where a partition stops. `kernels/validation.py` does the same.

Thread rule: one thread per validator.
"""

from __future__ import annotations

from typing import NamedTuple

from tidegate.integrity.header import ControlType, RecordKind
from tidegate.integrity.state import PartitionState, Phase, Producer, compare_manifest
from tidegate.integrity.validator import OnError, ValidationRules
from tidegate.integrity.verdicts import GAPS, Note, Rule, Verdict
from validation_rules import Observed, Outcome, judge


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
            stops = _stops(self.rules, found.verdict, phase, is_damaged=_is_damaged(arrival, found.verdict))
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
        if outcome.verdict.is_fatal and _stops(
            self.rules, outcome.verdict, self.state.phase, is_damaged=is_damaged
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
            tolerates=lambda producer, record: rules.tolerance.note(
                record.offset,
                record.log_time,
                now_ms,
                known_offset=-1 if producer is None else producer.offset,
                known_time=-1 if producer is None else producer.log_time,
            ),
            gone=phase.is_settled and (rules.head_may_be_gone or phase is Phase.PUSHED or self.state.forgot),
            forces=True,
        )
        ends_push = _is_control(observed, ControlType.END_OF_PUSH) and phase is not Phase.PUSHED
        if not ends_push or outcome.verdict is not Verdict.OK:
            return outcome
        if not compare_manifest(payload, self.producers.get):
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


def _is_damaged(arrival: Arrival, verdict: Verdict) -> bool:
    """Whether the record that shows a gap does not match its own checksum."""
    observed = arrival.observed
    return (
        verdict in GAPS and observed is not None and observed.computed_crc not in (None, observed.stamp.crc)
    )


def _is_control(observed: Observed, control: ControlType) -> bool:
    return observed.stamp.kind == RecordKind.CONTROL and observed.stamp.control == control


def _stops(rules: ValidationRules, verdict: Verdict, phase: Phase, *, is_damaged: bool) -> bool:
    """Whether this fault stops the partition; `is_damaged`: the record does not match its own checksum either."""
    if is_damaged and rules.action(Verdict.CORRUPT, phase) is OnError.FAIL:
        return True
    return rules.action(verdict, phase) is OnError.FAIL
