"""What does a window operator cost an event, from a batch of columns to the rows it sends on?

Back of the envelope: two passes over times (10 ns), a fold (hash, sort one number a row, one pass for each column:
90 ns), a walk beside older runs and a merge of what meets (20 ns), results rounded and laid out (20 ns).

Events of 50 k keys in batches of 250 k, tumbling windows of a minute, count and a sum of doubles. `spread` has about
as many windows as events, as a stream of many quiet keys does; `busy` has every batch change the same 50 k windows.

    python benchmarks/windows_operator.py [--full] [--json]
"""

from __future__ import annotations

import cProfile
import gc
import os
import pstats
from functools import partial

import numpy as np
import pyarrow as pa

from _report import Report, best_of, demand
from _storage import roomy
from tidegate.durations import duration_ms
from tidegate.storage import WorkerStorageRuntime
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.aggregates.folds import resolve
from tidegate.windows.events import EventBatch
from tidegate.windows.kinds import Hopping, Tumbling
from tidegate.windows.operators.base import Moment, WindowRows
from tidegate.windows.operators.windows import WindowOperator

KEYS, BATCH, START = 50_000, 250_000, 1_767_225_600_000
TARGET_NS = 200.0


def events(batches: int, batch_ms: int, key_count: int = KEYS) -> list[EventBatch]:
    """Batches that each go on for `batch_ms`, in order but for a second of disorder."""
    chance = np.random.default_rng(7)
    made = []
    for number in range(batches):
        at = START + number * batch_ms + np.sort(chance.integers(0, batch_ms, BATCH))
        keys = chance.integers(0, key_count, BATCH)
        made.append(
            EventBatch(
                key=pa.array(np.char.add("customer-", keys.astype("U6")).astype("S")).cast(pa.binary()),
                ts=at + chance.integers(-1000, 1000, BATCH),
                offset=np.arange(number * BATCH, (number + 1) * BATCH),
                partition=np.zeros(BATCH, np.int32),
                stream_time=np.full(BATCH, -1, np.int64),
                values=pa.record_batch({"amount": pa.array(chance.integers(1, 10_000, BATCH) / 100.0)}),
            )
        )
    return made


def fresh(kind: Hopping, emit: str) -> WindowOperator:
    runtime = WorkerStorageRuntime.open(roomy(), MemoryBackend())
    sums = resolve({"n": agg.count(), "total": agg.sum("amount")}, pa.schema([("amount", pa.float64())]))
    return WindowOperator(runtime, "bench", "totals", kind, sums, emit=emit)


def check(given: list[EventBatch], kind: Tumbling) -> int:
    """Every window's last row equals one query over all the events; how many windows there are."""
    operator, shown = fresh(kind, "update"), []
    for batch in given:
        rows = operator.process(batch, Moment(0)).rows
        if not isinstance(rows, WindowRows):
            raise TypeError(f"rows of windows are expected, not {type(rows).__name__}")
        columns = {
            "key": rows.key,
            "start": rows.window_start,
            "n": rows.count,
            "total": rows.values["total"],
        }
        shown.append(pa.table(columns))
    demand(operator.counters["accepted"] == BATCH * len(given), "all events are taken")
    keys = ["key", "start"]
    found = (
        pa.concat_tables(shown)
        .group_by(keys, use_threads=False)
        .aggregate([("n", "last"), ("total", "last")])
    )
    flat = pa.table(
        {
            "key": pa.concat_arrays([batch.key for batch in given]),
            "start": np.concatenate([batch.ts // kind.size_ms * kind.size_ms for batch in given]),
            "amount": pa.concat_arrays([batch.values["amount"] for batch in given]),
        }
    )
    expected = flat.group_by(keys).aggregate([("amount", "count"), ("amount", "sum")])
    order = [(name, "ascending") for name in keys]
    found, expected = found.sort_by(order), expected.sort_by(order)
    demand(found.select(keys).equals(expected.select(keys)), "the windows")
    demand(found["n_last"].equals(expected["amount_count"]), "the counts")
    near = np.isclose(found["total_last"].to_numpy(), expected["amount_sum"].to_numpy(), rtol=1e-12)
    demand(bool(near.all()), "the sums")
    return found.num_rows


def nanoseconds(given: list[EventBatch], kind: Hopping, emit: str, repetitions: int) -> float:
    """Of an event: the best time of each batch over several runs, added up."""
    best = np.full(len(given), np.inf)
    for _ in range(repetitions):
        operator = fresh(kind, emit)
        gc.collect()
        times = [best_of(1, partial(operator.process, batch, Moment(0))) for batch in given]
        best = np.minimum(best, times)
    return float(best.sum()) / (BATCH * len(given)) * 1e9


def main() -> None:
    report = Report(__doc__.splitlines()[0] if __doc__ else "")
    batches, repetitions = (16, 5) if report.full else (6, 3)
    minute = Tumbling("1m", grace="1m")
    for name, batch_ms in (("spread", 300_000), ("busy", 10_000)):
        given = events(batches, batch_ms)
        windows = check(given, minute)
        for emit in ("update", "close"):
            cost = nanoseconds(given, minute, emit, repetitions)
            report.figure(
                f"{name}, {windows / 1000:.0f} k windows in all, emit on {emit}",
                f"{cost:.0f} ns an event",
                target=f"at most {TARGET_NS:.0f} ns" if emit == "update" else "",
                met=cost <= TARGET_NS if emit == "update" else None,
            )
        if os.environ.get("PROFILE"):
            operator, profile = fresh(minute, "update"), cProfile.Profile()
            operator.process(given[0], Moment(0))
            profile.enable()
            for batch in given[1:]:
                operator.process(batch, Moment(0))
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    hopping = Hopping("5m", "1m", grace="1m")
    given = events(3, 300_000)
    for emit in ("update", "close"):
        cost = nanoseconds(given, hopping, emit, repetitions)
        report.figure(f"spread, hopping 5m by 1m, emit on {emit}", f"{cost:.0f} ns an event")
    few = events(3, 3_600_000, key_count=100)
    costs = {}
    for advance in ("5m", "10s"):
        costs[advance] = nanoseconds(few, Hopping("1h", advance, grace="1m"), "close", 1)
        panes = 3_600_000 // duration_ms(advance)
        report.figure(
            f"100 keys, hopping 1h by {advance} ({panes} panes a window), emit on close",
            f"{costs[advance]:.0f} ns an event",
            f"{costs[advance] / costs['5m']:.1f}x of 12 panes" if panes > 12 else "",
        )


if __name__ == "__main__":
    main()
