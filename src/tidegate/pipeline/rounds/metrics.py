"""A run's numbers as metrics: few names, base units, Kafka's words.

Counters count what this process committed; gauges are what is now.

Thread rule: safe from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tidegate.metrics import Metrics
from tidegate.pipeline.rounds.facts import FlowFacts
from tidegate.pipeline.rounds.heads import Head
from tidegate.pipeline.rounds.orders import RoundResult
from tidegate.pipeline.rounds.records import CommitRecord

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
}
"""What a summary says of records that a flow's operators did not take and of results they could not make."""


class RunInstruments:
    """What is measured of an app: by the run itself, and by whoever reads its commits."""

    def __init__(self, metrics: Metrics) -> None:
        of_partition = ("app", "flow", "topic", "partition")
        self.lag = metrics.gauge(
            "tidegate_lag_records", "Offsets in the log that are not committed yet", of_partition
        )
        self.lookup_lag = metrics.gauge(
            "tidegate_lookup_lag_records",
            "Records of a looked-up table's topic that the table has not seen",
            ("app", "table"),
        )
        self.lag_seconds = metrics.gauge(
            "tidegate_lag_seconds",
            "How far event time is behind now where there is something to read",
            ("app", "flow"),
        )
        self.watermark = metrics.gauge(
            "tidegate_watermark_seconds", "Event time of a source partition, seconds since 1970", of_partition
        )
        self.watermark_age = metrics.gauge(
            "tidegate_watermark_age_seconds",
            "How long the flow's least event time has not moved",
            ("app", "flow"),
        )
        self.stopped = metrics.gauge(
            "tidegate_stopped_partitions", "Partitions that a fault stopped", ("app",)
        )
        self.backlog = metrics.gauge(
            "tidegate_backlog_bytes", "Data accepted and not pruned", ("app", "flow")
        )
        self.memory = metrics.gauge("tidegate_memory_bytes", "Memory that tasks hold", ("app", "flow"))
        self.held = metrics.gauge(
            "tidegate_held_records",
            "Records that were read and wait for another partition to come as far",
            ("app", "flow"),
        )
        self.records = metrics.counter(
            "tidegate_records_total", "Records read, by verdict", ("topic", "partition", "verdict")
        )
        self.late = metrics.counter(
            "tidegate_late_total",
            "Records that came too late or lie too far ahead",
            ("app", "flow", "policy"),
        )
        self.late_windows = metrics.counter(
            "tidegate_late_windows_total",
            "Windows that did not take a record because they were final",
            ("app", "flow"),
        )
        self.partly_late = metrics.counter(
            "tidegate_partly_late_total",
            "Records that some of their windows took, and others did not because they were final",
            ("app", "flow"),
        )
        self.dropped = metrics.counter(
            "tidegate_dropped_records_total",
            "Records that went into no result, by reason; late ones are in tidegate_late_total",
            ("app", "flow", "reason"),
        )
        self.duplicates = metrics.counter(
            "tidegate_duplicates_total", "Repeated events left out", ("app", "flow")
        )
        self.rows = metrics.counter("tidegate_rows_sent_total", "Result rows sent on", ("app", "flow"))
        self.rounds = metrics.counter("tidegate_rounds_total", "Rounds committed", ("app",))
        self.lost = metrics.counter(
            "tidegate_lost_records_total",
            "Offsets that were deleted unread and accepted as lost",
            ("app", "flow"),
        )
        self.round_seconds = metrics.gauge("tidegate_round_seconds", "How long the last round took", ("app",))
        self.round_records = metrics.gauge("tidegate_round_records", "Records of the last round", ("app",))


class RoundMetrics:
    """What a run tells whoever collects metrics."""

    def __init__(self, metrics: Metrics, app: str, flows: Mapping[str, FlowFacts]) -> None:
        self._app = app
        self._flows = flows
        self._moved: dict[str, tuple[int, int]] = {}  # flow → its least event time, and since when it is that
        self._to = RunInstruments(metrics)

    def round(self, result: RoundResult, commit: CommitRecord, took_ms: int) -> None:
        """A round was committed."""
        for source in result.sources:
            topic = self._flows[source.flow].topic
            unjudged = source.records - sum(source.verdicts.values())
            for verdict, count in source.verdicts.items():
                self._to.records.add(count, topic=topic, partition=source.partition, verdict=verdict)
            if unjudged > 0:
                self._to.records.add(unjudged, topic=topic, partition=source.partition, verdict="unjudged")
            for name, count in source.counters.items():
                if name in DROPPED:
                    self._to.dropped.add(count, app=self._app, flow=source.flow, reason=name)
        for task in result.tasks:
            self._to.rows.add(task.rows_sent, app=self._app, flow=task.flow)
            for name, count in task.counters.items():
                if is_late(name):
                    policy = name.partition(".")[2]
                    self._to.late.add(count, app=self._app, flow=task.flow, policy=policy)
                elif name.partition(".")[2] == "late_windows":
                    self._to.late_windows.add(count, app=self._app, flow=task.flow)
                elif is_partly_late(name):
                    self._to.partly_late.add(count, app=self._app, flow=task.flow)
                elif (reason := name.partition(".")[2]) in DROPPED:
                    self._to.dropped.add(count, app=self._app, flow=task.flow, reason=reason)
                elif is_duplicate(name):
                    self._to.duplicates.add(count, app=self._app, flow=task.flow)
        for loss in commit.losses:
            if loss.round == commit.round:
                self._to.lost.add(loss.end - loss.first, app=self._app, flow=loss.flow)
        self._to.rounds.add(1, app=self._app)
        self._to.round_seconds.set(took_ms / 1000, app=self._app)
        self._to.round_records.set(sum(each.records for each in result.sources), app=self._app)

    def standing(
        self,
        commit: CommitRecord,
        heads: Mapping[str, Mapping[int, Head]],
        lag_seconds: Mapping[str, float],
        now_ms: int,
        lookup_lags: Mapping[str, int],
    ) -> None:
        """Where the app stands after a look at the log; `now_ms` by the clock that never jumps."""
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
    """Whether a counter of a task counts records that were set aside for their time."""
    return counter.partition(".")[2] in ("late_records", "late", "future")


def is_partly_late(counter: str) -> bool:
    """Whether it counts records that missed only some of their windows."""
    return counter.partition(".")[2] == "partly_late_records"


def is_duplicate(counter: str) -> bool:
    return counter.partition(".")[2] == "duplicates"


def left_out(counters: Mapping[str, int]) -> dict[str, int]:
    """What is said of a flow's records that went into no result, or not into all → how many there are.

    Faulty ones are told apart from it (`faults`); records without a value may be deletions.
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
