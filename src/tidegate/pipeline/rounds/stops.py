"""Partitions that a fault stopped: what users are told of them, and the exit code that says so.

Thread rule: pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidegate.pipeline.rounds.facts import FlowFacts
from tidegate.pipeline.rounds.orders import Stop
from tidegate.pipeline.rounds.planning import resume_command
from tidegate.pipeline.rounds.progress import StoppedPartition
from tidegate.pipeline.rounds.records import CommitRecord, SourceLine

FAULT, CORRUPT = 1, 5


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


def exit_code_of(stopped: Sequence[StoppedPartition]) -> int:
    """0 when nothing stopped; 1 when a check found a fault, 5 when input could not be read at all."""
    if not stopped:
        return 0
    return FAULT if all(each.reason == "integrity" for each in stopped) else CORRUPT
