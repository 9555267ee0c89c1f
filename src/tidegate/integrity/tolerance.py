"""When a gap in a producer's numbering may be log compaction's work, and so is no loss.

Compaction leaves a record alone until it is `min.compaction.lag.ms` old; a gap among younger records is loss.
The age is that of the producer's *previous* record by default: what lay behind it was written later still, so
a producer that was silent for longer than the lag could hide loss; such gaps carry a note of their own
(TOLERATED_SUSPECT). With the *incoming* record's age nothing can hide, but gaps that compaction left in front
of a young record are called missing.

Time is the log's (the record's timestamp; a negative one is none); now is the round's one fixed time, handed in.

Thread rule: values and pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tidegate.errors import InvalidError
from tidegate.integrity.judge import Observed, Producer
from tidegate.integrity.verdicts import Note

NOT_COMPACTED: Final = -1
PREVIOUS: Final = "previous"
INCOMING: Final = "incoming"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """`compaction_lag_ms` is -1 where the topic is not compacted; `always` is for a stage behind something that
    removes records by design, such as conflict resolution before the store."""

    compaction_lag_ms: int = NOT_COMPACTED
    anchor: str = PREVIOUS
    always: bool = False

    def __post_init__(self) -> None:
        if self.anchor not in (PREVIOUS, INCOMING):
            raise InvalidError(f"anchor={self.anchor!r}: choose {PREVIOUS!r} or {INCOMING!r}")
        if self.compaction_lag_ms < NOT_COMPACTED:
            raise InvalidError(f"compaction_lag_ms={self.compaction_lag_ms}: choose 0 or more, -1 for none")

    def note(self, known: Producer | None, record: Observed, now_ms: int) -> Note:
        """NONE when a gap before `record` is loss."""
        if self.always:
            return Note.TOLERATED
        if self.compaction_lag_ms == NOT_COMPACTED:
            return Note.NONE
        incoming_is_old = self._is_old(record.log_time, now_ms)
        if self.anchor == INCOMING or known is None or known.log_time < 0:
            return Note.TOLERATED if incoming_is_old else Note.NONE
        if not self._is_old(known.log_time, now_ms):
            return Note.NONE
        return Note.TOLERATED if incoming_is_old else Note.TOLERATED | Note.TOLERATED_SUSPECT

    def _is_old(self, time: int, now_ms: int) -> bool:
        return time >= 0 and now_ms - time >= self.compaction_lag_ms
