"""The rules of validation for one record, in plain Python: the oracle of `kernels/validation.py`.

The rules and their invariants are described there. Pure: one record at a time, no loops, no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from tidegate.integrity.header import (
    MAX_SEQUENCE,
    ChecksumType,
    ControlType,
    EndOfChain,
    RecordKind,
    Stamp,
)
from tidegate.integrity.state import NO_TIME, UNCOUNTED, Producer
from tidegate.integrity.verdicts import Note, Rule, Verdict

SEAMLESS = frozenset({Rule.A1, Rule.A7, Rule.B1})
CONTROL_TYPES = frozenset(int(control) for control in ControlType)


class Observed(NamedTuple):
    """One managed record as it arrived; `field_sum` is ADHASH's summand, `computed_crc` None when cheap."""

    stamp: Stamp
    offset: int
    log_time: int
    computed_crc: int | None = None
    field_sum: int = 0
    announced_type: int = ChecksumType.NONE
    certified: EndOfChain | None = None


class Outcome(NamedTuple):
    """A verdict, why, and the producer's state afterwards (the same object when nothing changed)."""

    verdict: Verdict
    rule: Rule
    producer: Producer | None
    note: Note = Note.NONE


Tolerates = Callable[[Producer | None, Observed], Note]
"""Whether a gap before this record may be compaction's: NONE when not."""


class PhaseRules(NamedTuple):
    """What does not depend on the producer: see the module's text."""

    settled: bool
    gone: bool
    forces: bool
    tolerates: Tolerates


def judge(
    known: Producer | None,
    record: Observed,
    *,
    settled: bool,
    tolerates: Tolerates,
    gone: bool | None = None,
    forces: bool | None = None,
) -> Outcome:
    """One record; `known` is its producer's state, None on first contact; `gone`, `forces`: `settled`'s value."""
    footing = PhaseRules(
        settled, settled if gone is None else gone, settled if forces is None else forces, tolerates
    )
    if not _is_supported(record):
        return _unsupported(known, record, footing)
    placed = _first_contact(record, footing) if known is None else _place(known, record, footing)
    if placed.verdict is Verdict.DUPLICATE and not _matches_itself(record):
        return Outcome(Verdict.CORRUPT, Rule.D1, known)
    if placed.producer is not None and placed.producer is not known and placed.rule not in SEAMLESS:
        placed = placed._replace(producer=replace(placed.producer, data_records=UNCOUNTED))
    if placed.verdict is not Verdict.OK or placed.producer is None:
        return placed
    return _sum_up(known, placed.producer, placed, record, footing)


def _is_supported(record: Observed) -> bool:
    stamp = record.stamp
    if stamp.kind != RecordKind.CONTROL:
        return stamp.kind in (RecordKind.PUT, RecordKind.DELETE, RecordKind.UPDATE)
    return stamp.control in CONTROL_TYPES


def _unsupported(known: Producer | None, record: Observed, footing: PhaseRules) -> Outcome:
    """An unknown kind of record still takes its number, so that what follows is not called missing."""
    stamp = record.stamp
    if known is None or stamp.chain != known.chain or stamp.sequence != known.sequence + 1:
        return Outcome(Verdict.UNSUPPORTED, Rule.U1, known)
    moved = replace(_moved(known, record), tainted=True)
    return _fault(Verdict.UNSUPPORTED, Rule.U1, known, moved, footing)


def _opens(stamp: Stamp) -> bool:
    return stamp.sequence == 0 and (stamp.is_start_of_chain or stamp.is_headers_only)


def _matches_itself(record: Observed) -> bool:
    return record.computed_crc is None or record.computed_crc == record.stamp.crc


# -- A and B: where the record stands in its producer's numbering ----------------------------------


def _first_contact(record: Observed, footing: PhaseRules) -> Outcome:
    stamp = record.stamp
    entered = _entered(None, record)
    if stamp.chain == 0 and _opens(stamp):
        return Outcome(Verdict.OK, Rule.A1, entered)
    note = footing.tolerates(None, record) if stamp.is_headers_only and not footing.gone else Note.NONE
    if footing.gone or note:
        return Outcome(Verdict.OK, Rule.A3 if stamp.chain == 0 else Rule.A5, entered, note)
    rule = Rule.A2 if stamp.chain == 0 else Rule.A4
    return _fault(Verdict.UNREGISTERED_PRODUCER, rule, None, _forced(entered, record), footing)


def _place(known: Producer, record: Observed, footing: PhaseRules) -> Outcome:
    stamp = record.stamp
    if stamp.chain < known.chain:
        return Outcome(Verdict.DUPLICATE, Rule.A13, known)
    if stamp.chain == known.chain:
        return _same_chain(known, record, footing)
    entered = _entered(known, record)
    if stamp.chain == known.chain + 1 and known.ended:
        if _opens(stamp):
            return Outcome(Verdict.OK, Rule.A7, entered)
        if stamp.is_headers_only and (note := footing.tolerates(known, record)):
            return Outcome(Verdict.OK, Rule.A10, entered, note)
        return _fault(Verdict.UNREGISTERED_PRODUCER, Rule.A8, known, _forced(entered, record), footing)
    note = footing.tolerates(known, record)
    if not note:
        return _fault(Verdict.MISSING, Rule.A12, known, _forced(entered, record), footing)
    if _opens(stamp):
        return Outcome(Verdict.OK, Rule.A9, entered, note)
    if footing.settled:
        return Outcome(Verdict.OK, Rule.A10, entered, note)
    return _fault(Verdict.UNREGISTERED_PRODUCER, Rule.A11, known, _forced(entered, record), footing)


def _same_chain(known: Producer, record: Observed, footing: PhaseRules) -> Outcome:
    sequence = record.stamp.sequence
    if sequence <= known.sequence:
        return Outcome(Verdict.DUPLICATE, Rule.B2, known)
    moved = _moved(known, record)
    if sequence == known.sequence + 1:
        return Outcome(Verdict.OK, Rule.B1, moved)
    if footing.settled and not moved.registered:
        return Outcome(Verdict.OK, Rule.B3, moved)
    moved = replace(moved, tainted=True)
    if note := footing.tolerates(known, record):
        return Outcome(Verdict.OK, Rule.B4, moved, note)
    return _fault(Verdict.MISSING, Rule.B5, known, _forced(moved, record), footing)


# -- D and C: checksums --------------------------------------------------------------------------


def _sum_up(
    known: Producer | None, producer: Producer, placed: Outcome, record: Observed, footing: PhaseRules
) -> Outcome:
    """The record is where it should be; test its own checksum, then its chain's."""
    if not _matches_itself(record):
        tainted = replace(producer, tainted=True)
        return _fault(Verdict.CORRUPT, Rule.D1, known, _forced(tainted, record), footing)
    if record.stamp.is_end_of_chain:
        return _end_chain(known, producer, placed, record, footing)
    if not producer.registered:
        return placed._replace(note=placed.note | Note.UNREGISTERED)
    if producer.ended and producer.checksum_type != ChecksumType.NONE:
        if note := footing.tolerates(known, record):
            return placed._replace(note=placed.note | note)
        return _fault(Verdict.AFTER_END, Rule.C3, known, producer, footing)
    return placed._replace(producer=_added(producer, record))


def _end_chain(
    known: Producer | None, producer: Producer, placed: Outcome, record: Observed, footing: PhaseRules
) -> Outcome:
    ended = replace(producer, ended=True, final=record.stamp.is_final)
    if not producer.registered:
        return placed._replace(producer=ended, note=placed.note | Note.UNREGISTERED)
    if producer.tainted:
        return placed._replace(producer=ended, note=placed.note | Note.TAINTED)
    if record.certified is not None and _matches(producer, record.certified):
        return Outcome(Verdict.OK, Rule.C4, ended, placed.note)
    if note := footing.tolerates(known, record):
        return Outcome(Verdict.OK, Rule.C5, ended, placed.note | note)
    return _fault(Verdict.CORRUPT, Rule.C6, known, ended, footing)


def _matches(producer: Producer, certified: EndOfChain) -> bool:
    if certified.checksum_type != producer.checksum_type:
        return False
    if certified.records != producer.records or certified.stamp_sum != producer.stamp_sum:
        return False
    return certified.checksum == producer.checksum


# -- states --------------------------------------------------------------------------------------


def _fault(
    verdict: Verdict, rule: Rule, known: Producer | None, onward: Producer, footing: PhaseRules
) -> Outcome:
    """Nothing changes unless the caller forces (J1)."""
    return Outcome(verdict, rule, onward if footing.forces else known)


def _forced(producer: Producer, record: Observed) -> Producer:
    """What else a faulty record does to a state that moves on (J3)."""
    if record.stamp.is_end_of_chain:
        return replace(producer, ended=True, final=record.stamp.is_final)
    if producer.registered and not producer.ended:
        return _added(producer, record)
    return producer


def _entered(known: Producer | None, record: Observed) -> Producer:
    """A chain met for the first time, at its start or in its middle."""
    stamp = record.stamp
    registered = _opens(stamp) or stamp.is_headers_only
    return Producer(
        guid=stamp.guid,
        chain=stamp.chain,
        sequence=stamp.sequence,
        registered=registered,
        checksum_type=record.announced_type if registered else ChecksumType.NONE,
        data_records=_counted(0 if known is None else known.data_records, stamp),
        producer_time=max(NO_TIME if known is None else known.producer_time, stamp.timestamp),
        log_time=record.log_time,
        offset=record.offset,
    )


def _moved(known: Producer, record: Observed) -> Producer:
    return replace(
        known,
        sequence=record.stamp.sequence,
        registered=known.registered or record.stamp.is_headers_only,
        data_records=_counted(known.data_records, record.stamp),
        producer_time=max(known.producer_time, record.stamp.timestamp),
        log_time=record.log_time,
        offset=record.offset,
    )


def _counted(count: int, stamp: Stamp) -> int:
    return count if count == UNCOUNTED else count + (stamp.kind != RecordKind.CONTROL)


def _added(producer: Producer, record: Observed) -> Producer:
    """The record enters the chain's checksum; one with the last sequence there is ends the chain."""
    if producer.checksum_type == ChecksumType.ADHASH2:
        summand = record.stamp.crc
    elif producer.checksum_type == ChecksumType.ADHASH:
        summand = record.field_sum
    else:
        summand = 0
    return replace(
        producer,
        checksum=(producer.checksum + summand) % 2**64,
        stamp_sum=(producer.stamp_sum + record.stamp.stamp_summand) % 2**64,
        records=producer.records + 1,
        ended=producer.ended or producer.sequence == MAX_SEQUENCE,
    )
