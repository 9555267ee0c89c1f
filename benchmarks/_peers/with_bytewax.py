"""Bytewax: `stateful_flat_map` drops the copies of a key, `fold_window` counts; one worker in each of two processes.

No recovery store: nothing survives a crash here, and the figure is the better for it. Windows are not closed by the
machine's clock (`to_system_utc`): with events of long ago every key would be woken for every batch, which is
quadratic.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import bytewax.operators as op
import bytewax.operators.windowing as win
from bytewax.dataflow import Dataflow
from bytewax.inputs import DynamicSource, StatelessSourcePartition, batch
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.testing import run_main

import handed

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
BATCH = 1000

Payload = tuple[datetime, int, float]


class Rows(DynamicSource[Any], StatelessSourcePartition[Any]):
    """Rows that are there already, a thousand at a time."""

    def __init__(self, rows: list[tuple[str, Payload]]) -> None:
        self._batches = batch(rows, BATCH)

    def build(self, *_: Any) -> Rows:
        return self

    def next_batch(self) -> Iterable[Any]:
        return next(self._batches)


class Kept(DynamicSink[Any], StatelessSinkPartition[Any]):
    """Closed windows, as they come."""

    def __init__(self) -> None:
        self.items: list[tuple[str, tuple[int, tuple[int, float]]]] = []

    def build(self, *_: Any) -> Kept:
        return self

    def write_batch(self, items: list[Any]) -> None:
        self.items.extend(items)


def first_only(seen: dict[int, datetime] | None, event: Payload) -> tuple[dict[int, datetime], list[Payload]]:
    """Ids of the last hour of one key, the oldest first."""
    seen = {} if seen is None else seen
    ts, order, _ = event
    while seen and ts - next(iter(seen.values())) > timedelta(hours=1):
        del seen[next(iter(seen))]
    if order in seen:
        return seen, []
    seen[order] = ts
    return seen, [event]


class Counted:
    def __init__(self, events: list[handed.Event]) -> None:
        rows = [
            (key, (EPOCH + timedelta(milliseconds=ts), order, amount)) for key, ts, order, amount in events
        ]
        self._kept = Kept()
        self._flow = Dataflow("bench")
        once = op.stateful_flat_map("first", op.input("events", self._flow, Rows(rows)), first_only)
        windows = win.fold_window(
            "minutes",
            once,
            win.EventClock(
                lambda event: event[0],
                wait_for_system_duration=timedelta(hours=1),
                to_system_utc=lambda _: None,
            ),
            win.TumblingWindower(length=timedelta(minutes=1), align_to=EPOCH),
            builder=lambda: (0, 0.0),
            folder=lambda state, event: (state[0] + 1, state[1] + event[2]),
            merger=lambda one, other: (one[0] + other[0], one[1] + other[1]),
        )
        op.output("kept", windows.down, self._kept)

    def run(self) -> None:
        run_main(self._flow)

    def windows(self) -> list[handed.Window]:
        return [(key, minute, *state) for key, (minute, state) in self._kept.items]


if __name__ == "__main__":
    handed.in_two_processes(Counted)
