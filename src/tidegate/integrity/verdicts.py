"""The outcome of looking at one record: a verdict, the rule that gave it, and what else is worth knowing.

A verdict is a value, never an exception. *Fatal* verdicts stop a partition before the end of a push; after it they
are counted, and a faulty record is left out (`rules`). DUPLICATE is benign, UNMANAGED and HEARTBEAT say that there was
nothing to judge.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Final


class Verdict(IntEnum):
    """What is known of a record."""

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
"""Fatal verdicts about records that are not there: the record that shows the gap is sound, unless it is DAMAGED."""


class Rule(IntEnum):
    """The row of the decision table that decided. A: which chain; B: which sequence; C: which checksum."""

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
    """What else is worth counting about a record."""

    NONE = 0
    TOLERATED = 1  # a gap before it is explained by compaction
    TOLERATED_SUSPECT = 2  # … by the age of the record before; this one is young: real loss could hide here
    UNREGISTERED = 4  # its chain was entered in the middle, so its checksum cannot be tested
    TAINTED = 8  # its chain has a known fault or gap, so its checksum is not tested again
    IGNORED = 16  # a start or end of push that comes again, or too late: it says nothing new
    UNEXPECTED = 32  # data after the end of a push in a partition that takes nothing else
    DURING_PUSH = 64  # on faults: judged before the push had ended
    DAMAGED = 128  # on gaps: the record that shows the gap does not match its own checksum either
