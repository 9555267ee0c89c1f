"""Loss seen by a reader that starts anywhere and keeps nothing: gaps only, no checksums, no push.

Owns the rules for readers without a checkpoint, such as an export: an unknown producer is fine; what is lower
than seen before is ignored; a skipped chain is always missing, because compaction keeps starts and ends; a gap
inside a chain is missing only while the record before it is younger than the compaction lag. With a lag of 0
or less every gap inside a chain is tolerated.

Thread rule: one thread per reader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tidegate.integrity.header import Stamp
from tidegate.integrity.state import NO_TIME
from tidegate.integrity.verdicts import Verdict

OnGap = Callable[[Stamp, "Seen"], None]


@dataclass(frozen=True, slots=True)
class Seen:
    """The last record of a producer."""

    chain: int
    sequence: int
    log_time: int
    ended: bool


class StatelessReader:
    """Looks for gaps in one partition; `on_gap` gets the stamp behind a gap and what was seen before it."""

    def __init__(self, *, compaction_lag_ms: int = 0, on_gap: OnGap | None = None) -> None:
        self._lag_ms = compaction_lag_ms
        self._on_gap = on_gap
        self._seen: dict[bytes, Seen] = {}

    def look(self, stamp: Stamp, log_time: int, now_ms: int) -> Verdict:
        """The verdict of the next record: OK, DUPLICATE, MISSING or HEARTBEAT."""
        if stamp.is_heartbeat and stamp.is_start_of_chain:
            return Verdict.HEARTBEAT
        seen = self._seen.get(stamp.guid)
        if seen is not None and (stamp.chain, stamp.sequence) <= (seen.chain, seen.sequence):
            return Verdict.DUPLICATE
        self._seen[stamp.guid] = Seen(stamp.chain, stamp.sequence, log_time, stamp.is_end_of_chain)
        if seen is None or not self._is_gap(seen, stamp, now_ms):
            return Verdict.OK
        if self._on_gap is not None:
            self._on_gap(stamp, seen)
        return Verdict.MISSING

    def _is_gap(self, seen: Seen, stamp: Stamp, now_ms: int) -> bool:
        if stamp.chain > seen.chain + 1:
            return True
        if stamp.chain == seen.chain + 1:
            return not seen.ended or stamp.sequence != 0
        if stamp.sequence == seen.sequence + 1 or self._lag_ms <= 0:
            return False
        return seen.log_time == NO_TIME or now_ms - seen.log_time < self._lag_ms
