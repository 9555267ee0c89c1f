"""How far a run has come, as one value for people and programs.

Thread rule: values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StoppedPartition:
    """A source partition that is not worked on any more: why, where, and the command that resumes it."""

    flow: str
    topic: str
    partition: int
    reason: str
    message: str
    offset: int
    command: str


@dataclass(frozen=True)
class Progress:
    """One look at a run. Totals are the app's since it was made, not this process's."""

    app: str
    round: int = 0
    records: int = 0
    records_per_second: float = 0.0
    lag_records: int = 0
    lag_seconds: float = 0.0
    eta_s: float | None = None
    caught_up: bool = False
    watermarks: Mapping[str, Mapping[int, int]] = field(
        default_factory=dict
    )  # flow → partition → stream time
    waiting_for: tuple[str, ...] = ()  # partitions that hold a watermark back, or the brake, in words
    backlog_bytes: int = 0
    backlog_limit_bytes: int = 0
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    verdicts: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    late: int = 0
    duplicates: int = 0
    stopped: tuple[StoppedPartition, ...] = ()
    round_seconds: float = 0.0
    timings_ms: Mapping[str, float] = field(default_factory=dict)
