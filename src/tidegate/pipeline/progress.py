"""Progress, faults and metrics of a run.

`Progress` is one value with everything a run reports. Faults are stopped partitions and counted validation faults;
they determine the exit code. A fault that did not stop its partition is reported by every run until it is
acknowledged, so a killed process cannot hide it. `RoundMetrics` exports counters of what this process committed and
gauges of the current state, in base units.

Thread rule: immutable values and pure functions; metrics are safe from any thread.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from tidegate.durations import format_moment, format_size
from tidegate.errors import without_credentials
from tidegate.integrity.verdicts import FATAL
from tidegate.metrics import Metrics
from tidegate.notebook import facts_html, grid_html
from tidegate.pipeline.checkpoint import CommitRecord, SourceLine
from tidegate.pipeline.flow import FlowFacts
from tidegate.pipeline.log_end_offsets import Head
from tidegate.pipeline.messages import RoundResult, Stop, resume_command

SEEN = "seen"  # OPERATOR.seen: events that reached an operator
NULL = "null."  # OPERATOR.null.COLUMN: those of them that lack a column that its state is computed from


def null_shares(flow: str, totals: Mapping[str, int]) -> dict[str, float]:
    """Return `FLOW.COLUMN` → the share of a flow's events that lack a column that state is computed from."""
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
    """A stopped source partition: why, where, and the command that resumes it."""

    flow: str
    topic: str
    partition: int
    reason: str
    message: str
    offset: int
    command: str


def null_text(nulls: Mapping[str, float]) -> str:
    """Return `orders-per-minute.amount 12 %`, largest shares first."""
    most = sorted(nulls.items(), key=lambda each: -each[1])
    return ", ".join(f"{name} {'<1' if share < 0.01 else f'{share * 100:.0f}'} %" for name, share in most)


@dataclass(frozen=True)
class Progress:
    """A snapshot of a run. Totals count since the app was created, not since this process began.

    `records`, `lag_records`, `verdicts` and `faults` count each record of a topic once, however many flows read it;
    `late`, `duplicates` and operator counters are sums over flows.
    """

    app: str
    round: int = 0
    records: int = 0
    records_per_second: float = 0.0
    lag_records: int = 0
    lag_seconds: float = 0.0
    eta_s: float | None = None
    caught_up: bool = False
    # flow → partition → stream time
    watermarks: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    lookup_lag_records: Mapping[str, int] = field(default_factory=dict)
    """Table that is looked up → the records of its topic that it has not seen."""
    waiting_for: tuple[str, ...] = ()  # partitions that hold a watermark back, or backpressure, in words
    backlog_bytes: int = 0
    backlog_limit_bytes: int = 0
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    verdicts: Mapping[str, int] = field(default_factory=dict)
    faults: Mapping[str, int] = field(default_factory=dict)  # the verdicts that are faults
    new_faults: int = 0  # faults that were not acknowledged
    counters: Mapping[str, int] = field(default_factory=dict)
    late: int = 0
    partly_late: int = 0  # records that some of their windows accepted
    left_out: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Flow → what is said of records that went into no result, or not into all → how many."""
    duplicates: int = 0
    held: int = 0  # records that were read and wait for another partition
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


# -- stops ----------------------------------------------------------------------------------------

FAULT, CORRUPT = 1, 5
ACKNOWLEDGED = "acknowledged_faults"
"""The counter of a flow that says how many of its faults somebody knows of."""
READ = frozenset(
    {
        "records",
        "bytes",
        "unchecked",
        "faulty_kept",
        "faulty_dropped",
        "unreadable",
        "unreadable_kept",
        "no_value",
    }
)
"""Counters of what was read, which flows that share a topic share, too."""
Totals: TypeAlias = Mapping[str, Mapping[str, int]]
"""Flow → counter → since the app was made."""
_FATAL = {f"verdict.{verdict.label}": verdict.label for verdict in sorted(FATAL)}


def given_state(address: str | None) -> str:
    """Return ` --state ADDRESS` for a command, or nothing where it looks there by itself or cannot be told."""
    if address in (None, str(Path("data/state").absolute())) or without_credentials(address) != address:
        return ""
    return f" --state {shlex.quote(address)}"


def with_state(text: str, address: str | None) -> str:
    """Return a text with `--state` in the commands about apps that it names."""
    state = given_state(address)
    return re.sub(r"`(tidegate app [^`]*)`", lambda found: f"`{found[1]}{state}`", text)


def stopped_of(
    commit: CommitRecord, topics: Mapping[str, str], address: str | None
) -> tuple[StoppedPartition, ...]:
    """Return the stopped partitions of the current flows, with commands as they are typed for a state at `address`.

    `topics` are the sources of the flows.
    """
    state = given_state(address)
    return tuple(
        StoppedPartition(
            line.flow,
            topics[line.flow],
            line.partition,
            line.stopped.reason,
            with_state(line.stopped.message, address),
            line.stopped.offset,
            _command(commit.app, line, line.stopped) + state,
        )
        for line in commit.sources
        if line.stopped is not None and line.flow in topics
    )


def _command(app: str, line: SourceLine, stop: Stop) -> str:
    """Return the command of a remedy; a remedy that is more than a command is part of the message."""
    if stop.remedy.startswith("tidegate app resume"):
        return stop.remedy
    return resume_command(app, line.flow, line.partition, stop.offset + 1)


def topics_of(flows: Mapping[str, FlowFacts]) -> dict[str, str]:
    return {name: flow.topic for name, flow in flows.items()}


def read_once(totals: Totals, topics: Mapping[str, str] | None = None) -> Counter[str]:
    """Return the counters of what flows read, each record of a topic once: of flows that share a topic, the largest.

    `totals` are those of flows, `topics` their sources: flows without one do not count. None: no flows share a
    topic.
    """
    by_topic: dict[str, Counter[str]] = {}
    for flow, topic in _sources(totals, topics):
        by_topic[topic] = by_topic.get(topic, Counter()) | Counter(totals.get(flow, {}))
    return sum(by_topic.values(), Counter())


def records_of(result: RoundResult, flows: Mapping[str, FlowFacts]) -> int:
    """Count the records that a round read, each once."""
    read: dict[str, Counter[str]] = {}
    for each in result.sources:
        read.setdefault(each.flow, Counter())["records"] += each.records
    return read_once(read, topics_of(flows))["records"]


def _sources(totals: Totals, topics: Mapping[str, str] | None) -> Collection[tuple[str, str]]:
    return [(flow, flow) for flow in totals] if topics is None else topics.items()


def faults_of(totals: Totals, topics: Mapping[str, str] | None = None) -> dict[str, int]:
    """Count the faults of each kind that validation found, each record once (`read_once`)."""
    found = read_once(totals, topics)
    return {label: found[name] for name, label in _FATAL.items() if found[name]}


def new_faults(totals: Totals, topics: Mapping[str, str] | None = None) -> int:
    """Count the faults that are not acknowledged."""
    found: dict[str, int] = {}
    for flow, topic in _sources(totals, topics):
        counters = totals.get(flow, {})
        new = max(0, sum(faults_of({flow: counters}).values()) - counters.get(ACKNOWLEDGED, 0))
        found[topic] = max(new, found.get(topic, 0))
    return sum(found.values())


def acknowledged(commit: CommitRecord, flows: Collection[str]) -> CommitRecord:
    """Return the commit with all faults of these flows acknowledged; they stay counted."""
    totals = {flow: dict(counters) for flow, counters in commit.totals.items()}
    for flow in totals.keys() & set(flows):
        if faults := sum(faults_of({flow: totals[flow]}).values()):
            totals[flow][ACKNOWLEDGED] = faults
    return msgspec.structs.replace(commit, totals=totals)


def exit_code_of(stopped: Sequence[StoppedPartition], faults: int) -> int:
    """Return 0 if all is well, 1 if a check found a fault, 5 if input could not be read at all.

    `faults` are those that are not acknowledged.
    """
    if any(each.reason != "integrity" for each in stopped):
        return CORRUPT
    return FAULT if stopped or faults else 0


# -- metrics --------------------------------------------------------------------------------------

DROPPED: Final = (
    "no_key",
    "negative_time",
    "before_start",
    "no_value",
    "unreadable",
    "faulty_kept",
    "faulty_dropped",
)
"""Counters of records that went into no result for another reason than their time."""
SAID: Final = {
    "late_records": "late",
    "late": "late",
    "partly_late_records": "late for some of their windows",
    "future": "too far ahead",
    "no_key": "without a key",
    "negative_time": "with a time before 1970",
    "before_start": "before the start of the window",
    "without_result": "results that could not be made and are null",
    "duplicate": "duplicates by their numbers",
}
"""What a summary says of records that were left out and of results that operators could not make."""


class RunInstruments:
    """The metrics of an app, set by its run and by readers of its commits."""

    def __init__(self, metrics: Metrics) -> None:
        gauge, counter = metrics.gauge, metrics.counter
        flow, partition = ("app", "flow"), ("app", "flow", "topic", "partition")
        self.lag = gauge("tidegate_lag_records", "Offsets in the log that are not committed yet", partition)
        said = "Records of a looked-up table's topic that the table has not seen"
        self.lookup_lag = gauge("tidegate_lookup_lag_records", said, ("app", "table"))
        said = "How far event time is behind now where there is something to read"
        self.lag_seconds = gauge("tidegate_lag_seconds", said, flow)
        said = "Event time of a source partition, seconds since 1970"
        self.watermark = gauge("tidegate_watermark_seconds", said, partition)
        said = "How long the flow's least event time has not moved"
        self.watermark_age = gauge("tidegate_watermark_age_seconds", said, flow)
        self.stopped = gauge("tidegate_stopped_partitions", "Partitions that a fault stopped", ("app",))
        self.backlog = gauge("tidegate_backlog_bytes", "Data accepted and not pruned", flow)
        self.memory = gauge("tidegate_memory_bytes", "Memory that tasks hold", flow)
        said = "Records that were read and wait for another partition to come as far"
        self.held = gauge("tidegate_held_records", said, flow)
        labels = ("topic", "partition", "verdict")
        self.records = counter("tidegate_records_total", "Records read, by verdict", labels)
        said = "Records that came too late or lie too far ahead"
        self.late = counter("tidegate_late_total", said, (*flow, "policy"))
        said = "Windows that did not take a record because they were final"
        self.late_windows = counter("tidegate_late_windows_total", said, flow)
        said = "Records that some of their windows took, and others did not because they were final"
        self.partly_late = counter("tidegate_partly_late_total", said, flow)
        said = "Records that went into no result, by reason; late ones are in tidegate_late_total"
        self.dropped = counter("tidegate_dropped_records_total", said, (*flow, "reason"))
        self.duplicates = counter("tidegate_duplicates_total", "Repeated events left out", flow)
        self.rows = counter("tidegate_rows_sent_total", "Result rows sent on", flow)
        self.rounds = counter("tidegate_rounds_total", "Rounds committed", ("app",))
        said = "Offsets that were deleted unread and accepted as lost"
        self.lost = counter("tidegate_lost_records_total", said, flow)
        self.round_seconds = gauge("tidegate_round_seconds", "How long the last round took", ("app",))
        self.round_records = gauge("tidegate_round_records", "Records of the last round", ("app",))


class RoundMetrics:
    """Records metrics of a run."""

    def __init__(self, metrics: Metrics, app: str, flows: Mapping[str, FlowFacts]) -> None:
        self._app = app
        self._flows = flows
        # flow → its least event time, and since when it has that value
        self._moved: dict[str, tuple[int, int]] = {}
        self._read: dict[tuple[str, int, str], Counter[str]] = {}  # topic, partition, verdict → by flow
        self._to = RunInstruments(metrics)

    def round(self, result: RoundResult, commit: CommitRecord, took_ms: int) -> None:
        """Record a committed round."""
        for source in result.sources:
            topic = self._flows[source.flow].topic
            unjudged = source.records - sum(source.verdicts.values())
            for verdict, count in {**source.verdicts, "unjudged": max(0, unjudged)}.items():
                self._count_once(source.flow, topic, source.partition, verdict, count)
            for name, count in source.counters.items():
                if name in DROPPED:
                    self._to.dropped.add(count, app=self._app, flow=source.flow, reason=name)
        for task in result.tasks:
            self._to.rows.add(task.rows_sent, app=self._app, flow=task.flow)
            of_flow = {"app": self._app, "flow": task.flow}
            for name, count in task.counters.items():
                what = name.partition(".")[2]
                if is_late(name):
                    self._to.late.add(count, **of_flow, policy=what)
                elif what == "late_windows":
                    self._to.late_windows.add(count, **of_flow)
                elif is_partly_late(name):
                    self._to.partly_late.add(count, **of_flow)
                elif what in DROPPED:
                    self._to.dropped.add(count, **of_flow, reason=what)
                elif is_duplicate(name):
                    self._to.duplicates.add(count, **of_flow)
        for loss in commit.losses:
            if loss.round == commit.round:
                self._to.lost.add(loss.end - loss.first, app=self._app, flow=loss.flow)
        self._to.rounds.add(1, app=self._app)
        self._to.round_seconds.set(took_ms / 1000, app=self._app)
        self._to.round_records.set(records_of(result, self._flows), app=self._app)

    def _count_once(self, flow: str, topic: str, partition: int, verdict: str, count: int) -> None:
        """Count records that flows which share a topic read, each once (`read_once`)."""
        by_flow = self._read.setdefault((topic, partition, verdict), Counter())
        before = max(by_flow.values(), default=0)
        by_flow[flow] += count
        if (more := max(by_flow.values()) - before) > 0:
            self._to.records.add(more, topic=topic, partition=partition, verdict=verdict)

    def standing(
        self,
        commit: CommitRecord,
        heads: Mapping[str, Mapping[int, Head]],
        lag_seconds: Mapping[str, float],
        now_ms: int,
        lookup_lags: Mapping[str, int],
    ) -> None:
        """Record the app's state after reading log end offsets; `now_ms` is monotonic."""
        for table, lag in lookup_lags.items():
            self._to.lookup_lag.set(lag, app=self._app, table=table)
        backlog = dict.fromkeys(self._flows, 0)
        memory = dict.fromkeys(self._flows, 0)
        held = dict.fromkeys(self._flows, 0)
        for task in commit.tasks:
            if task.flow in backlog:
                held[task.flow] += 0 if task.held is None else task.held.events
                backlog[task.flow] += task.backlog_bytes
                memory[task.flow] += task.memory_bytes
        for line in commit.sources:
            if line.flow not in self._flows:
                continue
            topic = self._flows[line.flow].topic
            labels = {"app": self._app, "flow": line.flow, "topic": topic, "partition": line.partition}
            self._to.lag.set(max(0, heads[topic][line.partition].end - line.next_offset), **labels)
            if line.stream_time >= 0:
                self._to.watermark.set(line.stream_time / 1000, **labels)
        for flow in self._flows:
            self._to.backlog.set(backlog[flow], app=self._app, flow=flow)
            self._to.memory.set(memory[flow], app=self._app, flow=flow)
            self._to.held.set(held[flow], app=self._app, flow=flow)
            self._to.lag_seconds.set(lag_seconds[flow], app=self._app, flow=flow)
            time = min((line.stream_time for line in commit.sources if line.flow == flow), default=-1)
            if self._moved.get(flow, (None, 0))[0] != time:
                self._moved[flow] = (time, now_ms)
            self._to.watermark_age.set((now_ms - self._moved[flow][1]) / 1000, app=self._app, flow=flow)
        stopped = sum(1 for line in commit.sources if line.stopped is not None)
        self._to.stopped.set(stopped, app=self._app)


def is_late(counter: str) -> bool:
    """Whether a task's counter counts records that were set aside for their time."""
    return counter.partition(".")[2] in ("late_records", "late", "future")


def is_partly_late(counter: str) -> bool:
    """Whether it counts records that were too late for only some of their windows."""
    return counter.partition(".")[2] == "partly_late_records"


def is_duplicate(counter: str) -> bool:
    return counter.partition(".")[2] == "duplicates"


def left_out(counters: Mapping[str, int]) -> dict[str, int]:
    """Return description → number of a flow's records that were left out of some or all results.

    Faulty records are reported separately (`faults`); records without a value may be deletions.
    """
    said: dict[str, int] = {}
    for name, count in counters.items():
        if (what := SAID.get(name.rpartition(".")[2])) is not None:
            said[what] = said.get(what, 0) + count
    kept = counters.get("unreadable_kept", 0)
    if kept:
        said["unreadable, set aside as dead letters"] = kept
    if dropped := counters.get("unreadable", 0) - kept:
        said["unreadable, dropped"] = dropped
    return said
