"""Pathway: the earliest row of each order by `groupby`, then `windowby` a tumbling window; two workers, updates each
second.

Ids are kept for ever, not for an hour: forgetting them is more work. Nothing is persisted. The figure is the better
for both.
"""

from __future__ import annotations

import os
from time import perf_counter
from typing import Any

os.environ.setdefault("PATHWAY_THREADS", "2")  # read when pathway is imported

import pathway as pw

import handed


class Order(pw.Schema):
    key: str
    ts: int
    order_id: int
    amount: float


class Orders(pw.io.python.ConnectorSubject):
    def __init__(self, events: list[handed.Event]) -> None:
        super().__init__()
        self._events = events

    @property
    def _deletions_enabled(self) -> bool:
        return False

    def run(self) -> None:
        for key, ts, order, amount in self._events:
            self.next(key=key, ts=ts, order_id=order, amount=amount)


def main() -> None:
    events = handed.events()
    windows: dict[tuple[str, int], tuple[int, float]] = {}

    def keep(key: pw.Pointer, row: dict[str, Any], time: int, is_addition: bool) -> None:
        if is_addition:
            windows[row["key"], row["start"] // handed.MINUTE] = (row["n"], row["total"])

    orders = pw.io.python.read(Orders(events), schema=Order, autocommit_duration_ms=1000)
    once = orders.groupby(orders.key, orders.order_id).reduce(
        orders.key,
        ts=pw.reducers.earliest(orders.ts),
        amount=pw.reducers.earliest(orders.amount),
    )
    counted = once.windowby(
        once.ts,
        window=pw.temporal.tumbling(duration=handed.MINUTE),
        instance=once.key,
        behavior=pw.temporal.common_behavior(cutoff=handed.HOUR, keep_results=True),
    ).reduce(
        key=pw.this._pw_instance,
        start=pw.this._pw_window_start,
        n=pw.reducers.count(),
        total=pw.reducers.sum(pw.this.amount),
    )
    pw.io.subscribe(counted, keep)
    began = perf_counter()
    pw.run(monitoring_level=pw.MonitoringLevel.NONE)
    seconds = perf_counter() - began
    handed.hand_over(
        seconds, len(events), handed.table_of((*window, *state) for window, state in windows.items())
    )


if __name__ == "__main__":
    main()
