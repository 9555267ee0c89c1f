"""What went wrong in an app's input: partitions that a fault stopped, faults that were counted, and the exit code.

A fault that did not stop its partition is told until somebody acknowledges it, whatever run found it: a process that
was killed must not make the next one say that all is well.

Thread rule: pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import msgspec

from tidegate.integrity.verdicts import FATAL
from tidegate.pipeline.rounds.facts import FlowFacts
from tidegate.pipeline.rounds.orders import Stop, resume_command
from tidegate.pipeline.rounds.progress import StoppedPartition
from tidegate.pipeline.rounds.records import CommitRecord, SourceLine

FAULT, CORRUPT = 1, 5
ACKNOWLEDGED = "acknowledged_faults"
"""The counter of a flow that says how many of its faults somebody knows of."""
READ = frozenset(
    (
        "records",
        "bytes",
        "unchecked",
        "faulty_kept",
        "faulty_dropped",
        "unreadable",
        "unreadable_kept",
        "no_value",
    )
)
"""Counters of what was read, which flows that share a topic share, too."""
Totals: TypeAlias = Mapping[str, Mapping[str, int]]
"""Flow → counter → since the app was made."""
_FATAL = {f"verdict.{verdict.label}": verdict.label for verdict in sorted(FATAL)}


def stopped_of(commit: CommitRecord, topics: Mapping[str, str]) -> tuple[StoppedPartition, ...]:
    """The stopped partitions of the flows there are; `topics` are their sources."""
    return tuple(
        StoppedPartition(
            line.flow,
            topics[line.flow],
            line.partition,
            line.stopped.reason,
            line.stopped.message,
            line.stopped.offset,
            _command(commit.app, line, line.stopped),
        )
        for line in commit.sources
        if line.stopped is not None and line.flow in topics
    )


def _command(app: str, line: SourceLine, stop: Stop) -> str:
    """What to type; a remedy that is more than a command is part of the message."""
    if stop.remedy.startswith("tidegate app resume"):
        return stop.remedy
    return resume_command(app, line.flow, line.partition, stop.offset + 1)


def topics_of(flows: Mapping[str, FlowFacts]) -> dict[str, str]:
    return {name: flow.topic for name, flow in flows.items()}


def read_once(totals: Totals, topics: Mapping[str, str] | None = None) -> Counter[str]:
    """The counters of what flows read, each record of a topic once: of flows that share a topic, the most of any.

    `totals` are those of flows, `topics` their sources: flows without one do not count. None: no flows share a topic.
    """
    by_topic: dict[str, Counter[str]] = {}
    for flow, topic in _sources(totals, topics):
        by_topic[topic] = by_topic.get(topic, Counter()) | Counter(totals.get(flow, {}))
    return sum(by_topic.values(), Counter())


def _sources(totals: Totals, topics: Mapping[str, str] | None) -> Collection[tuple[str, str]]:
    return [(flow, flow) for flow in totals] if topics is None else topics.items()


def faults_of(totals: Totals, topics: Mapping[str, str] | None = None) -> dict[str, int]:
    """How many faults of each kind validation found in what an app read, each record once (`read_once`)."""
    found = read_once(totals, topics)
    return {label: found[name] for name, label in _FATAL.items() if found[name]}


def new_faults(totals: Totals, topics: Mapping[str, str] | None = None) -> int:
    """How many of these faults nobody has acknowledged."""
    found: dict[str, int] = {}
    for flow, topic in _sources(totals, topics):
        counters = totals.get(flow, {})
        new = max(0, sum(faults_of({flow: counters}).values()) - counters.get(ACKNOWLEDGED, 0))
        found[topic] = max(new, found.get(topic, 0))
    return sum(found.values())


def acknowledged(commit: CommitRecord, flows: Collection[str]) -> CommitRecord:
    """The commit with all faults of these flows acknowledged; they stay counted."""
    totals = {flow: dict(counters) for flow, counters in commit.totals.items()}
    for flow in totals.keys() & set(flows):
        if faults := sum(faults_of({flow: totals[flow]}).values()):
            totals[flow][ACKNOWLEDGED] = faults
    return msgspec.structs.replace(commit, totals=totals)


def exit_code_of(stopped: Sequence[StoppedPartition], faults: int) -> int:
    """0 when all is well; 1 when a check found a fault, 5 when input could not be read at all.

    `faults` are those that nobody acknowledged.
    """
    if any(each.reason != "integrity" for each in stopped):
        return CORRUPT
    return FAULT if stopped or faults else 0
