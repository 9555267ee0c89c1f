"""When a gap in a producer's numbering may be log compaction's work, and so is no loss.

Compaction leaves a record alone until it is `min.compaction.lag.ms` old; a gap in front of a younger record is loss.
The age is that of the *incoming* record, as in Venice. With the *previous* record's age a producer that was silent for
longer than the lag could hide loss; gaps that pass only because of it carry a note of their own (TOLERATED_SUSPECT).

Where it is known how far a partition was compacted (`compacted_below`, see `log.checkpoints`), a gap
behind a record at or above that offset is loss whatever its age. A gap that begins below that offset and ends above it
is tolerated as suspect: compaction keeps the last record of what it cleans, unless another producer wrote its key.

Time is the log's (the record's timestamp; a negative one is none); now is the round's one fixed time, handed in.

Thread rule: values and pure functions; `compacted_below` may read a file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tidegate.durations import format_duration
from tidegate.errors import InvalidError
from tidegate.integrity.verdicts import Note

NOT_COMPACTED: Final = -1
INTEGRITY_LAG_MS: Final = 86_400_000
"""What `min.compaction.lag.ms` is set to where Tidegate makes a compacted topic of numbered records."""
UNKNOWN_BOUND: Final = -1
"""Of an offset below which compaction has been: nobody knows it."""
PREVIOUS: Final = "previous"
INCOMING: Final = "incoming"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """`compaction_lag_ms` is -1 where the topic is not compacted; `always` is for a stage behind something that
    removes records by design, such as conflict resolution before the store. `compacted_below` answers the offset
    below which compaction may have removed records; ask it after the records were read, because it moves on."""

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
        """NONE when a gap before the record at `offset` is loss; `known_…` is its producer's last record before."""
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
        """Where loss would not show, as a clause; empty where every gap is a fault."""
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
    """How gaps in a partition of a log, embedded or a cluster, are judged: by its topic's settings."""
    config = log.describe(topic).config
    if not config.compacts:
        return Tolerance(NOT_COMPACTED)
    return Tolerance(config.min_compaction_lag_ms, compacted_below=log.compacted_below(topic, partition))
