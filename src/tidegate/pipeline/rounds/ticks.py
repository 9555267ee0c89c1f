"""When time moves without records: watermarks of re-keyed flows, silent partitions, windows that close by the clock.

A re-keyed flow's watermark is the least stream time of its source partitions that are not silent. What a plan says is
recorded in it, so a round that is repeated says the same; it never falls.

W1  a partition with records to read is never silent, however long ago the last one came, also when this run ends before
    them.
W2  a partition is silent when this process watched it for `idle_after_ms` without a record, by the clock that never
    jumps; time in which nobody watched (the app was not running) does not count.
W3  a stopped partition holds the watermark back: what it would have brought is not there, so no window over it is
    final. It is named in what the flow waits for.
W4  when all are silent, the greatest of their stream times counts; with `idle_close_ms`, from then on it moves with the
    clock. A flow that never had a record has no watermark.
W5  a co-partitioned flow needs ticks only to close windows by the clock (`idle_close_ms`), and only until nothing that
    could be closed is left.

Thread rule: pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate.pipeline.rounds.facts import FlowFacts
from tidegate.pipeline.rounds.heads import Head
from tidegate.pipeline.rounds.records import SourceLine, TaskLine

NO_TIME = -1
TICK_EVERY_MS = 1000  # of windows closed by the clock


@dataclass(frozen=True, slots=True)
class Watch:
    """What is looked at: the time the round will have, how long silence has to be, and how long each source (flow,
    partition) has been watched without a record so far."""

    now_ms: int
    idle_after_ms: int | None  # None: silence never counts
    silent_ms: Mapping[tuple[str, int], int]


@dataclass(frozen=True, slots=True)
class Watermark:
    """Where a re-keyed flow stands: the time (-1: none), which partitions hold it back though they have nothing to
    read, and when the first of them will count as silent; all partitions that are not silent (`moving`), and when the
    first of those with nothing to read will be."""

    time: int
    holders: tuple[int, ...]
    changes_at_ms: int | None
    moving: tuple[int, ...] = ()
    silent_at_ms: int | None = None


def watermark_of(
    flow: FlowFacts, lines: Sequence[SourceLine], heads: Mapping[int, Head], watch: Watch, before: int
) -> Watermark:
    """The flow's watermark now, not below the one `before`."""
    closes_ms = flow.idle_close_ms
    wait_ms = min((each for each in (watch.idle_after_ms, closes_ms) if each is not None), default=None)
    moving: list[SourceLine] = []
    holders: list[int] = []
    ends_at: list[int] = []
    for line in lines:
        silent_ms = watch.silent_ms.get((line.flow, line.partition), 0)
        if line.stopped is not None:
            moving.append(line)
            holders.append(line.partition)
        elif heads[line.partition].end > line.next_offset or heads[line.partition].goes_on:
            moving.append(line)
        elif wait_ms is None or silent_ms < wait_ms:
            moving.append(line)
            holders.append(line.partition)
            if wait_ms is not None:
                ends_at.append(watch.now_ms + wait_ms - silent_ms)
    silent_at_ms = min(ends_at, default=None)
    newest = max((line.stream_time for line in lines), default=NO_TIME)
    if moving:
        time = min(line.frontier[0] for line in moving)
    else:
        time = newest
        silent_ms = min(watch.silent_ms.get((line.flow, line.partition), 0) for line in lines)
        if closes_ms is not None and newest != NO_TIME and silent_ms >= closes_ms:
            whole_ms = (flow.kept_ms or 0) + closes_ms
            time = newest + min(silent_ms, whole_ms)
            if silent_ms < whole_ms:
                ends_at.append(watch.now_ms + TICK_EVERY_MS)
    if min(time, newest) >= newest:
        holders, ends_at = [], ends_at if not moving else []
    waits = tuple(line.partition for line in moving)
    return Watermark(max(time, before), tuple(holders), min(ends_at, default=None), waits, silent_at_ms)


def tick_due(
    flow: FlowFacts, source: SourceLine, task: TaskLine, head: Head, watch: Watch
) -> tuple[bool, int | None]:
    """Whether a co-partitioned task wants a round without records now, and if not, when."""
    idle_ms = flow.idle_close_ms
    waits = source.stopped is None and head.end <= source.next_offset and source.stream_time != NO_TIME
    if idle_ms is None or not waits:
        return False, None
    # Operators count silence from the last round with records (W5); the last tick is behind all that is kept.
    over_ms = source.seen_ms + idle_ms + (flow.kept_ms or 0)
    if task.ticked_ms >= over_ms:
        return False, None
    first_ms = source.seen_ms + idle_ms
    next_ms = first_ms if task.ticked_ms < first_ms else min(over_ms, task.ticked_ms + TICK_EVERY_MS)
    return (True, None) if watch.now_ms >= next_ms else (False, next_ms)
