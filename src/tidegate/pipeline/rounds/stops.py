"""What went wrong in an app's input: partitions that a fault stopped, faults that were counted, and the exit code.

A fault that did not stop its partition is told until somebody acknowledges it, whatever run found it: a process that
was killed must not make the next one say that all is well.

Thread rule: pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec

from tidegate.integrity.verdicts import FATAL
from tidegate.pipeline.rounds.facts import FlowFacts
from tidegate.pipeline.rounds.orders import Stop
from tidegate.pipeline.rounds.planning import resume_command
from tidegate.pipeline.rounds.progress import StoppedPartition
from tidegate.pipeline.rounds.records import CommitRecord, SourceLine

FAULT, CORRUPT = 1, 5
ACKNOWLEDGED = "acknowledged_faults"
"""The counter of a flow that says how many of its faults somebody knows of."""
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


def faults_of(totals: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """How many faults of each kind validation found in what an app read; `totals` are those of its flows."""
    found: Counter[str] = Counter()
    for counters in totals.values():
        found.update({label: counters[name] for name, label in _FATAL.items() if counters.get(name)})
    return dict(found)


def new_faults(totals: Mapping[str, Mapping[str, int]]) -> int:
    """How many of these faults nobody has acknowledged."""
    return sum(
        max(0, sum(faults_of({flow: counters}).values()) - counters.get(ACKNOWLEDGED, 0))
        for flow, counters in totals.items()
    )


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
