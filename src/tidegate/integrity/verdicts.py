"""The result of validating a record: verdicts, rules, notes, findings, and the tolerance for gaps.

A verdict is a value, never an exception. By default *fatal* verdicts stop a partition before the end of a push; after
it they are counted, and a faulty record is left out (`validator.ValidationRules`). DUPLICATE is benign; UNMANAGED and
HEARTBEAT records are not validated.

Compaction keeps a record until it is `min.compaction.lag.ms` old, so a gap in front of a younger record is loss. The
age is that of the *incoming* record, as in Venice. By the *previous* record's age, a producer that was silent for
longer than the lag could hide loss; gaps that pass only by that age carry the note TOLERATED_SUSPECT. Where the offset
below which a partition was compacted is known (`compacted_below`, see `log.checkpoints`), a gap after a record at or
above that offset is loss at any age. A gap that begins below that offset and ends above it is tolerated as suspect:
compaction keeps the last record of the range it cleans, unless another producer wrote the same key.

Record times are log timestamps (negative: none); `now_ms` is fixed for the whole round and passed by the caller.

Thread rule: values and pure functions; `compacted_below` may read a file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any, Final

from tidegate.durations import format_duration
from tidegate.errors import IntegrityError, InvalidError
from tidegate.integrity.header import Stamp

# -- verdicts --------------------------------------------------------------------------------------


class Verdict(IntEnum):
    """The result of validating one record."""

    OK = 0
    DUPLICATE = 1
    MISSING = 2
    CORRUPT = 3
    UNREGISTERED_PRODUCER = 4
    AFTER_END = 5
    UNSUPPORTED = 6
    UNMANAGED = 7
    HEARTBEAT = 8

    @property
    def is_fatal(self) -> bool:
        return self in FATAL

    @property
    def label(self) -> str:
        return self.name.lower()


FATAL: Final = frozenset(
    {
        Verdict.MISSING,
        Verdict.CORRUPT,
        Verdict.UNREGISTERED_PRODUCER,
        Verdict.AFTER_END,
        Verdict.UNSUPPORTED,
    }
)
GAPS: Final = frozenset({Verdict.MISSING, Verdict.UNREGISTERED_PRODUCER})
"""Fatal verdicts about missing records: the record after the gap is sound, unless it is DAMAGED."""


class Rule(IntEnum):
    """The row of the decision table that gave the verdict. A: by chain; B: by sequence; C: by checksum."""

    NONE = 0
    A1 = 1  # unknown producer opens its chain 0
    A2 = 2  # unknown producer begins in the middle of chain 0
    A3 = 3  # … which is fine once the head of the log may be gone
    A4 = 4  # unknown producer begins with a later chain
    A5 = 5  # … which is fine once the head of the log may be gone
    A7 = 7  # the next chain is opened
    A8 = 8  # the next chain begins without its start
    A9 = 9  # chains were skipped, tolerated, and this one is opened
    A10 = 10  # chains were skipped, tolerated, and this one is entered in its middle
    A11 = 11  # … before the end of the push: not accepted
    A12 = 12  # chains were skipped
    A13 = 13  # an earlier chain again
    B1 = 21  # the next sequence
    B2 = 22  # a sequence seen already
    B3 = 23  # a gap in a chain entered in its middle
    B4 = 24  # a gap that compaction explains
    B5 = 25  # a gap
    C3 = 33  # data after the end of its chain
    C4 = 34  # the end of the chain, checksum right
    C5 = 35  # the end of the chain, checksum wrong, tolerated
    C6 = 36  # the end of the chain, checksum wrong
    D1 = 41  # the record does not match its own checksum
    U1 = 51  # a kind or control type this release does not know
    U2 = 52  # metadata that cannot be read
    U3 = 53  # no metadata, where all records must have it
    U4 = 54  # one producer more than a partition may have
    M1 = 61  # the end of a push whose manifest lists more, or other, than arrived


class Note(IntFlag):
    """Notes about a record that are counted beside its verdict."""

    NONE = 0
    TOLERATED = 1  # a gap before it is explained by compaction
    TOLERATED_SUSPECT = 2  # … only by the age of the previous record; this one is young: may hide real loss
    UNREGISTERED = 4  # its chain was entered in the middle, so its checksum cannot be tested
    TAINTED = 8  # its chain has a known fault or gap, so its checksum is not tested again
    IGNORED = 16  # a start or end of push that is repeated or too late: ignored
    UNEXPECTED = 32  # data after the end of a push in a `batch_only` partition
    DURING_PUSH = 64  # on faults: judged before the push had ended
    DAMAGED = 128  # on gaps: the record after the gap does not match its own checksum either


# -- tolerance for gaps ----------------------------------------------------------------------------

NOT_COMPACTED: Final = -1
INTEGRITY_LAG_MS: Final = 86_400_000
"""The `min.compaction.lag.ms` that Tidegate sets on compacted topics of numbered records."""
UNKNOWN_BOUND: Final = -1
"""Value of `compacted_below` where the compacted offset is not known."""
PREVIOUS: Final = "previous"
INCOMING: Final = "incoming"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Which gaps are tolerated.

    `compaction_lag_ms` is -1 where the topic is not compacted. `always` is for a stage behind one that removes records
    by design, such as conflict resolution before the store. `compacted_below` returns the offset below which compaction
    may have removed records; call it after the records were read, because the offset advances.
    """

    compaction_lag_ms: int = NOT_COMPACTED
    anchor: str = INCOMING
    always: bool = False
    compacted_below: Callable[[], int] | None = None

    def __post_init__(self) -> None:
        if self.anchor not in (PREVIOUS, INCOMING):
            raise InvalidError(f"anchor={self.anchor!r}: choose {PREVIOUS!r} or {INCOMING!r}")
        if self.compaction_lag_ms < NOT_COMPACTED:
            raise InvalidError(f"compaction_lag_ms={self.compaction_lag_ms}: choose 0 or more, -1 for none")

    def bound(self) -> int:
        """The offset below which compaction may have removed records; UNKNOWN_BOUND: anywhere."""
        if self.compaction_lag_ms == NOT_COMPACTED or self.always or self.compacted_below is None:
            return UNKNOWN_BOUND
        return self.compacted_below()

    def note(
        self, offset: int, log_time: int, now_ms: int, *, known_offset: int = -1, known_time: int = -1
    ) -> Note:
        """The note for a tolerated gap before `offset`, NONE for loss; `known_…`: the producer's last record."""
        if self.always:
            return Note.TOLERATED
        if self.compaction_lag_ms == NOT_COMPACTED:
            return Note.NONE
        bound = self.bound()
        if bound != UNKNOWN_BOUND and known_offset + 1 >= bound:
            return Note.NONE
        incoming_is_old = self._is_old(log_time, now_ms)
        by_previous = self.anchor == PREVIOUS and known_time >= 0
        if not (self._is_old(known_time, now_ms) if by_previous else incoming_is_old):
            return Note.NONE
        reaches_beyond = UNKNOWN_BOUND < bound <= offset
        if reaches_beyond or not incoming_is_old:
            return Note.TOLERATED | Note.TOLERATED_SUSPECT
        return Note.TOLERATED

    def doubt(self, log_start: int = 0) -> str:
        """Where loss would not be detected, as a clause; empty where every gap is a fault."""
        if self.always:
            return "every gap is tolerated here, so loss would not show"
        if self.compaction_lag_ms == NOT_COMPACTED:
            return ""
        bound = self.bound()
        if bound != UNKNOWN_BOUND:
            if bound <= log_start:
                return ""
            return f"compaction may have removed records below offset {bound}, so loss there would not show"
        if self.compaction_lag_ms == 0:
            return (
                "the topic is compacted and its min.compaction.lag.ms is 0, so no gap proves loss "
                f"(set it, for example to {INTEGRITY_LAG_MS})"
            )
        age = format_duration(self.compaction_lag_ms)
        return f"compaction may have removed records older than {age}, so loss among them would not show"

    def _is_old(self, time: int, now_ms: int) -> bool:
        return time >= 0 and now_ms - time >= self.compaction_lag_ms


def tolerance_of(log: Any, topic: str, partition: int) -> Tolerance:
    """The tolerance for gaps in a partition, embedded or of a cluster, by its topic's settings."""
    config = log.describe(topic).config
    if not config.compacts:
        return Tolerance(NOT_COMPACTED)
    return Tolerance(config.min_compaction_lag_ms, compacted_below=log.compacted_below(topic, partition))


# -- findings --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """A fatal verdict: partition, offset, producer, and the state before it (None where unknown)."""

    topic: str
    partition: int
    verdict: Verdict
    rule: Rule
    offset: int
    log_time: int
    stamp: Stamp | None
    previous_chain: int | None = None
    previous_sequence: int | None = None
    previous_offset: int | None = None
    registered: bool | None = None
    detail: str = ""

    @property
    def producer(self) -> str | None:
        """The producer's GUID in hexadecimal digits."""
        return None if self.stamp is None else self.stamp.guid.hex()

    def __str__(self) -> str:
        where = f"{self.topic}-{self.partition} offset {self.offset}"
        parts = [f"{self.verdict.name} ({self.rule.name}) at {where}"]
        if self.stamp is not None:
            stamp = self.stamp
            parts.append(f"producer {stamp.guid.hex()} chain {stamp.chain} sequence {stamp.sequence}")
            parts.append(f"kind {stamp.kind}, producer time {stamp.timestamp}, log time {self.log_time}")
        if self.previous_offset is None:
            parts.append("nothing was known of this producer")
        else:
            parts.append(
                f"last good offset {self.previous_offset}, chain {self.previous_chain} sequence "
                f"{self.previous_sequence}, {'registered' if self.registered else 'not registered'}"
            )
        if self.detail:
            parts.append(self.detail)
        return "; ".join(parts)

    def error(self) -> IntegrityError:
        """The finding as the exception that stops ingestion."""
        return IntegrityError(
            str(self),
            topic=self.topic,
            partition=self.partition,
            offset=self.offset,
            producer=self.producer,
            kind=self.verdict.label,
        )
