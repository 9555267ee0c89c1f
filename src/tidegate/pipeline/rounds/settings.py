"""How a run goes about it: when it ends, how large rounds are, what a loss means. Checked once, then values.

Thread rule: values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from tidegate.errors import InvalidError

OnLoss: TypeAlias = Literal["stop", "accept"]


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What `App.start` was asked for, in milliseconds and records.

    `round_records` fixes how many records a round reads at most (None: as many as take about `target_ms` while
    catching up). `on_loss` is what happens when records were deleted before they were read. `maintains_log`: the run
    also applies retention and compaction to its embedded log. What is out of reach (a broker that restarts, a full
    disk) is tried again for `patience_ms` once the run has done anything at all; a run that cannot begin says so at
    once.
    """

    until: Literal["caught_up"] | None = None
    close: bool = False
    trigger_ms: int = 1000
    round_records: int | None = None
    first_round_records: int = 250_000
    target_ms: int = 2000
    on_loss: OnLoss = "stop"
    idle_after_ms: int | None = 30_000
    lease_ms: int = 10_000
    grace_ms: int = 1_800_000
    collect_every_ms: int = 60_000
    attempts: int = 4
    patience_ms: int = 60_000
    maintains_log: bool = False

    def __post_init__(self) -> None:
        if self.until not in (None, "caught_up"):
            raise InvalidError(f"until={self.until!r}: leave it out to run on, or say 'caught_up'")
        if self.close and self.until is None:
            raise InvalidError(
                "close=True says that the input ends with what is there now, so give until='caught_up' too"
            )
        if self.on_loss not in ("stop", "accept"):
            raise InvalidError(f"on_loss={self.on_loss!r}: choose 'stop' or 'accept'")
        for name in ("trigger_ms", "idle_after_ms", "collect_every_ms", "grace_ms", "patience_ms"):
            if (getattr(self, name) or 0) < 0:
                raise InvalidError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        for name in ("round_records", "first_round_records", "target_ms", "lease_ms", "attempts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidError(f"{name} is {value}; it must be at least 1")
