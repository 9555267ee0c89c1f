"""What is said and counted about faults: every fault counts, few are told.

Owns the counters of a partition and the throttle of its warnings; what a fault does to the partition is
`rules`'. A leader that takes over can meet one fault per producer at once, so there is at most one line per
kind of fault and minute; the next line says how many were not told.

Thread rule: one thread per `FaultLog`.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from tidegate.errors import IntegrityError
from tidegate.integrity.counters import COUNTED_NOTES
from tidegate.integrity.findings import Finding
from tidegate.integrity.validator import Judged
from tidegate.integrity.verdicts import Note, Verdict

QUIET_MS: Final = 60_000

logger = logging.getLogger(__name__)


class Throttle:
    """Lets one of a kind through per interval, and counts what it held back."""

    def __init__(self, quiet_ms: int = QUIET_MS) -> None:
        self._quiet_ms = quiet_ms
        self._last: dict[str, int] = {}
        self._held: Counter[str] = Counter()

    def held_back(self, kind: str, now_ms: int, count: int = 1) -> int | None:
        """Of `count` new ones, whether to speak: the number not told since the last time; None to stay quiet."""
        last = self._last.get(kind)
        if last is not None and 0 <= now_ms - last < self._quiet_ms:
            self._held[kind] += count
            return None
        held = self._held.pop(kind, 0) + count - 1
        self._last[kind] = now_ms
        return held


@dataclass(slots=True)
class FaultCounts:
    """What a partition's records were found to be; `faults` are the fatal ones, `expired` and `tracked` producers."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    notes: Counter[Note] = field(default_factory=Counter)
    faults: int = 0
    expired: int = 0
    tracked: int = 0

    @property
    def records(self) -> int:
        return sum(self.verdicts.values())


class FaultLog:
    """Counts the verdicts of one partition and warns about faults, at most once a minute for each kind."""

    def __init__(self, *, throttle: Throttle | None = None) -> None:
        """With a `throttle` that outlives it, a log made anew does not say again what was just said."""
        self.counts = FaultCounts()
        self._throttle = throttle or Throttle()

    def take(self, judged: Judged, now_ms: int) -> None:
        """Count a batch; warn about its faults."""
        fatal = judged.is_fatal
        for verdict, count in judged.counts.items():
            self.counts.verdicts[verdict] += count
            faults = int((judged.verdicts[fatal] == verdict).sum()) if count and fatal.any() else 0
            if faults:
                self.counts.faults += faults
                self._warn(judged, verdict, faults, now_ms)
        for note in COUNTED_NOTES:
            self.counts.notes[note] += judged.noted(note)
        if judged.noted(Note.IGNORED):
            held = self._throttle.held_back("push", now_ms)
            if held is not None:
                logger.warning("a start or end of push that came again, or too late, was ignored")

    def _warn(self, judged: Judged, verdict: Verdict, count: int, now_ms: int) -> None:
        held = self._throttle.held_back(verdict.label, now_ms, count)
        if held is None:
            return
        finding = next((found for found in judged.findings if found.verdict is verdict), None)
        logger.warning("%s%s", finding or verdict.name, f" (and {held} more like it)" if held else "")


def stopping_error(judged: Judged) -> IntegrityError | None:
    """The error of a partition that stopped at a fault; None when it goes on."""
    if judged.stop_at is None:
        return None
    finding: Finding = judged.findings[-1]
    return finding.error()
