"""What is asked of apps, and what is answered."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from tidegate.web.reading.copying import Copy
from tidegate.web.reading.numbers import (
    Age,
    Backlog,
    Committed,
    Detail,
    Faults,
    Lag,
    Late,
    Memory,
    Moment,
    Name,
    Offset,
    RecordsRead,
    Rounds,
    Setting,
    Stopped,
    StreamTime,
    metric,
)

Lost: TypeAlias = Annotated[int, metric("tidegate_lost_records_total")]


class Way(msgspec.Struct, frozen=True):
    """One way to go on: what it does, and the whole command."""

    sentence: str
    command: str


class StoppedLine(msgspec.Struct, frozen=True):
    """A source partition that a fault stopped, and how to go on: without loss first, where that can be."""

    flow: str
    topic: str
    partition: Name
    offset: Offset
    reason: str
    message: str
    ways: list[Way]


class AppLine(msgspec.Struct, frozen=True):
    """One app in a list. `state` is starting, running, idle, stopped or unreadable; `health` good, watch or bad."""

    name: str
    state: str
    sentence: str
    round: Rounds
    records: RecordsRead
    lag_records: Lag
    log_records: Offset
    backlog_bytes: Backlog
    memory_bytes: Memory
    faults: Faults
    late: Late
    stopped: Stopped
    committed_ms: Committed
    health: str
    backlog_limit_bytes: Setting
    memory_limit_bytes: Setting
    all_fail: list[str]
    """Flows of which no record could be used so far."""


class SourceLine(msgspec.Struct, frozen=True):
    """One source partition of a flow: how far it was read, what event time has been reached, what it waits for."""

    flow: str
    topic: str
    partition: Name
    next_offset: Offset
    end_offset: Offset | None
    lag_records: Lag | None
    stream_time_ms: StreamTime | None
    waits_for: str


class TenantLine(msgspec.Struct, frozen=True):
    """One task of a flow: the state it keeps, on disk and in memory."""

    flow: str
    task: Name
    backlog_bytes: Annotated[int, metric("tidegate_task_backlog_bytes")]
    memory_bytes: Annotated[int, metric("tidegate_task_memory_bytes")]
    stream_time_ms: StreamTime | None


class RoundLine(msgspec.Struct, frozen=True):
    """One commit that is kept; `records` are those of this round, null where the one before is gone.

    `stream_times` is the event time that each partition had reached, by TOPIC-PARTITION.
    """

    round: Name
    committed_ms: Moment
    records: Annotated[int, metric("tidegate_round_records")] | None
    total: RecordsRead
    seconds: Annotated[float, metric("tidegate_round_interval_seconds")] | None
    records_per_second: Annotated[float, metric("tidegate_round_records_per_second")] | None
    stream_times: dict[str, StreamTime]
    memory_bytes: Memory
    backlog_bytes: Backlog
    generation: Name
    change: str


class CounterLine(msgspec.Struct, frozen=True):
    """One of the app's totals since it was made, and the metric with which a run counts the same."""

    flow: str
    counter: str
    value: Annotated[int, metric("tidegate_app_counts_total")]
    metric: str


class FlowShown(msgspec.Struct, frozen=True):
    """One flow: what it reads, what it does, where its results go."""

    name: str
    topic: str
    steps: list[str]
    tables: list[str]
    topics: list[str]
    watermark_ms: Moment | None


class AppDocument(msgspec.Struct, frozen=True):
    """One app whole. `health` is good, watch or bad."""

    name: str
    state: str
    health: str
    sentence: str
    owner: str
    generation: Name
    round: Rounds
    committed_ms: Committed
    age_ms: Age
    """How long ago that was."""
    now_ms: Moment
    records: RecordsRead
    lag_records: Lag
    backlog_bytes: Backlog
    backlog_limit_bytes: Setting
    memory_bytes: Memory
    memory_limit_bytes: Setting
    flows: list[FlowShown]
    sources: list[SourceLine]
    tenants: list[TenantLine]
    rounds: list[RoundLine]
    counters: list[CounterLine]
    stopped: list[StoppedLine]
    stopped_total: Stopped
    lost_records: Lost
    lost: dict[str, Lost]
    held: dict[str, Annotated[int, metric("tidegate_held_records")]]
    """The same by flow."""
    faults: Faults
    """Records with an integrity fault, records that could not be read, partitions that stopped for another fault."""
    faults_of: dict[str, Faults]
    all_fail: list[str]
    """Flows of which no record could be used so far."""
    by_hand: Copy
    next: str


class AppList(msgspec.Struct, frozen=True):
    """All apps that have state here."""

    state: str
    apps: list[AppLine]
    by_hand: Copy


class FaultLine(msgspec.Struct, frozen=True):
    """One fault that an app met, and its record."""

    kind: str
    flow: str
    topic: str
    partition: Name
    offset: Offset
    message: str
    remedy: str
    missing: Detail | None = None
    """How many records of its producer are not there; their numbers, first and last."""
    missing_first: Name | None = None
    missing_last: Name | None = None


class FaultsDocument(msgspec.Struct, frozen=True):
    """The faults that an app met: what stopped it, what it set aside, what validation found.

    Validation counts, and does not say where: for that the topic is checked again, and `checking` are those of which
    that is not done yet.
    """

    app: str
    faults_total: Faults
    faults: list[FaultLine]
    checking: list[str]
    is_acknowledged: bool
    by_hand: Copy


class FaultsQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`wait_ms`: for how long to wait for a check of a topic."""

    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=20_000)] = 150


class AppQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`after` is the last round that is known already: what a live page sends back."""

    after: Annotated[str, msgspec.Meta(max_length=40)] = ""
