"""How far a run has come, as one value for people and programs.

Thread rule: values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidegate.durations import format_moment, format_size
from tidegate.notebook import facts_html, grid_html

SEEN = "seen"  # OPERATOR.seen: events that came to an operator
NULL = "null."  # OPERATOR.null.COLUMN: those of them without a column that its state is made of


def null_shares(flow: str, totals: Mapping[str, int]) -> dict[str, float]:
    """`FLOW.COLUMN` → the share of a flow's events without it, for columns that state is made of and some lack."""
    shares: dict[str, float] = {}
    for counter, nulls in totals.items():
        operator, _, rest = counter.partition(".")
        seen = totals.get(f"{operator}.{SEEN}", 0)
        if rest.startswith(NULL) and seen:
            name = f"{flow}.{rest.removeprefix(NULL)}"
            shares[name] = max(nulls / seen, shares.get(name, 0.0))
    return shares


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


def null_text(nulls: Mapping[str, float]) -> str:
    """`orders-per-minute.amount 12 %`, the most first."""
    most = sorted(nulls.items(), key=lambda each: -each[1])
    return ", ".join(f"{name} {'<1' if share < 0.01 else f'{share * 100:.0f}'} %" for name, share in most)


@dataclass(frozen=True)
class Progress:
    """One look at a run. Totals are the app's since it was made, not this process's.

    `records`, `lag_records`, `verdicts` and `faults` are of records of topics, each once however many flows read it;
    `late`, `duplicates` and what operators count are sums over flows.
    """

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
    lookup_lag_records: Mapping[str, int] = field(default_factory=dict)
    """Table that is looked up → the records of its topic that it has not seen."""
    waiting_for: tuple[str, ...] = ()  # partitions that hold a watermark back, or the brake, in words
    backlog_bytes: int = 0
    backlog_limit_bytes: int = 0
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    verdicts: Mapping[str, int] = field(default_factory=dict)
    faults: Mapping[str, int] = field(default_factory=dict)  # those of the verdicts that are faults
    new_faults: int = 0  # those that nobody acknowledged
    counters: Mapping[str, int] = field(default_factory=dict)
    late: int = 0
    partly_late: int = 0  # those that some of their windows took
    left_out: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Flow → what is said of records that went into no result, or not into all → how many."""
    duplicates: int = 0
    held: int = 0  # records that were read and wait for another partition to come as far
    nulls: Mapping[str, float] = field(default_factory=dict)
    """FLOW.COLUMN → the share of records without it, of the columns that ids and aggregates are made of."""
    stopped: tuple[StoppedPartition, ...] = ()
    round_seconds: float = 0.0
    timings_ms: Mapping[str, float] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        facts = {
            "round": self.round,
            "records": f"{self.records:,}",
            "lag": "caught up" if self.caught_up else f"{self.lag_records:,} records",
            "looked-up tables": ", ".join(
                f"{table} {lag:,} records behind" for table, lag in self.lookup_lag_records.items()
            )
            or None,
            "held back": f"{self.held:,} records" if self.held else None,
            "waits for": ", ".join(self.waiting_for) or None,
            "backlog": f"{format_size(self.backlog_bytes)} of {format_size(self.backlog_limit_bytes)}",
            "memory": f"{format_size(self.memory_bytes)} of {format_size(self.memory_limit_bytes)}",
            "verdicts": ", ".join(f"{name} {count:,}" for name, count in self.verdicts.items()) or None,
            "late": self.late,
            "duplicates": self.duplicates,
            "null": null_text(self.nulls) or None,
        }
        clocks = [
            (flow, partition, format_moment(at) if at >= 0 else "no record yet")
            for flow, times in self.watermarks.items()
            for partition, at in times.items()
        ]
        shown = facts_html(f"app {self.app}", facts) + grid_html(
            ("flow", "partition", "stream time"), clocks, total=len(clocks), noun="partitions"
        )
        if self.stopped:
            halted = [
                (each.topic, each.partition, each.reason, each.message, each.command) for each in self.stopped
            ]
            columns = ("topic", "partition", "reason", "message", "resume with")
            shown += grid_html(columns, halted, total=len(halted), noun="stopped partitions")
        return shown
