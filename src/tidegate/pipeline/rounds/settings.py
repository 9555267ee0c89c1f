"""How a run goes about it: when it ends, how large rounds are, what a loss means. Checked once, then values.

Thread rule: values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from tidegate.errors import InvalidError

LEAST_LEASE_MS: Final = 100
GRACE_ROUNDS: Final = 4
OnLoss: TypeAlias = Literal["stop", "accept"]


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What `App.start` was asked for, in milliseconds and records.

    `round_records` fixes how many records a round reads at most (None: as many as take about `target_ms` while
    catching up). `on_loss` is what happens when records were deleted before they were read. `maintains_log`: the run
    also applies retention and compaction to its embedded log. What is out of reach (a broker that restarts, a full
    disk) is tried again for `patience_ms` once the run has done anything at all; a run that cannot begin says so at
    once. `stop_within_ms` is how long an interrupted `App.run` waits for the round it is in.
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
    grace_ms: int = 3_600_000  # as long as tasks reckon with (`StorageConfig.garbage_grace_ms`)
    collect_every_ms: int = 60_000
    attempts: int = 4
    patience_ms: int = 60_000
    stop_within_ms: int = 30_000
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
        for name in (
            "trigger_ms",
            "idle_after_ms",
            "collect_every_ms",
            "patience_ms",
            "stop_within_ms",
        ):
            if (getattr(self, name) or 0) < 0:
                raise InvalidError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        for name in ("round_records", "first_round_records", "target_ms", "lease_ms", "attempts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidError(f"{name} is {value}; it must be at least 1")
        if self.lease_ms < LEAST_LEASE_MS:
            raise InvalidError(
                f"lease_ms is {self.lease_ms}; it must be at least {LEAST_LEASE_MS}, or it cannot be renewed in "
                "time, and another run takes the app over"
            )
        if self.grace_ms < GRACE_ROUNDS * self.target_ms:
            raise InvalidError(
                f"grace_ms is {self.grace_ms}; it must be at least {GRACE_ROUNDS} times target_ms ({self.target_ms}): "
                "rounds that take longer than half of it are never committed"
            )
