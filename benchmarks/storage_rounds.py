"""What does a round cost when the state grows, a checkpoint when little changed, a restore when there is much?

A round appends a batch, reads some keys, maintains and checkpoints, as a micro-batch does. Back of the envelope:
50 k rows at 5 M rows/s are 10 ms, a thousand keys a few ms, a pack and a manifest are two synced files; none of it
looks at the state that was there before.

The peer is the same thing with a tenth of the state. A restore reads a manifest: some hundred bytes a run.

    python benchmarks/storage_rounds.py [--rows 10000000] [--full] [--json]
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from _report import Report, demand
from _storage import MINUTE, START_MS, TASK, Store, batches, events_spec, key_names, scratch_folder
from backend_faults import BackendEffect, WatchedBackend
from tidegate.files import Files
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.reader import RangeRequest, Time

KEYS, BATCH, ROUND = 100_000, 100_000, 50_000
ROUNDS = 12


class Meter:
    """Bytes put on a backend."""

    def __init__(self, inner: FolderBackend) -> None:
        self.bytes = 0
        self.backend = WatchedBackend(inner, self._seen)
        put = self.backend.put

        def counted(name: str, parts: list[object]) -> None:
            self.bytes += sum(memoryview(part).nbytes for part in parts)  # type: ignore[arg-type]
            put(name, parts)  # type: ignore[arg-type]

        self.backend.put = counted  # type: ignore[method-assign,assignment]

    def _seen(self, effect: BackendEffect) -> None:
        pass


def filled(rows: int, folder: Path) -> tuple[Store, Meter]:
    meter = Meter(FolderBackend(folder, files=Files()))
    store = Store(events_spec(), meter.backend)
    for batch in batches(rows, KEYS, BATCH):
        store.append(batch)
    store.runtime.checkpoint(TASK)
    return store, meter


def a_round(store: Store, number: int, rows: int) -> float:
    """Seconds of one round at the young end of the stream."""
    now = START_MS + 10_000 * MINUTE + number * MINUTE
    generator = np.random.default_rng(number)
    names = key_names(KEYS)
    batch = pa.RecordBatch.from_arrays(
        [
            names.take(pa.array(generator.integers(0, KEYS, rows))),
            pa.array(now + generator.integers(0, MINUTE, rows)),
            pa.array(generator.integers(0, 1000, rows)),
        ],
        names=["key", "ts", "value"],
    )
    asked = names.take(pa.array(generator.integers(0, KEYS, 1000)))
    started = perf_counter()
    store.append(batch)
    request = RangeRequest(asked, Time(now - 5 * MINUTE, now + MINUTE))
    with store.reader.load(store.reader.plan(TASK, store.state, [request])) as loaded:
        found = loaded.to_table().num_rows
    store.runtime.maintain(TASK, 1000)
    store.runtime.release_checkpoint(TASK, store.runtime.checkpoint(TASK))
    seconds = perf_counter() - started
    demand(found > 0, "a round reads nothing")
    return seconds


def measure_restore(report: Report, store: Store, folder: Path, rows: int) -> None:
    token = store.runtime.checkpoint(TASK)
    expected = store.state.index.total_rows
    best = float("inf")
    for _ in range(3):
        started = perf_counter()
        fresh = Store(events_spec(), FolderBackend(folder, files=Files()))
        fresh.runtime.apply_checkpoint(TASK, token)
        request = RangeRequest(key_names(1)[0].as_py(), Time(START_MS, START_MS + 60 * MINUTE))
        with fresh.reader.load(fresh.reader.plan(TASK, fresh.state, [request])) as loaded:
            demand(loaded.to_table().num_rows > 0, "the first key has rows")
        best = min(best, perf_counter() - started)
        demand(fresh.state.index.total_rows == expected, "rows after a restore")
    report.figure(
        f"restore of {rows / 1e6:g} M rows to first read", f"{best * 1e3:.0f} ms", "", "< 1 s", best < 1
    )


def main() -> None:
    report = Report("What does a round cost when the state grows?", rows=10_000_000)
    large = report.numbers["rows"]
    small = large // 10
    rounds = ROUNDS * (3 if report.full else 1)
    with scratch_folder(large * 150) as folder:
        stores = {rows: filled(rows, folder / str(rows)) for rows in (small, large)}
        times: dict[int, list[float]] = {small: [], large: []}
        for number in range(rounds):  # in turn, so that both see the same disturbances
            for rows, (store, _) in stores.items():
                times[rows].append(a_round(store, number, ROUND))
        medians = {rows: float(np.median(seconds[2:])) for rows, seconds in times.items()}
        ratio = medians[large] / medians[small]
        report.figure(
            f"round of {ROUND // 1000} k rows, {small / 1e6:g} M rows of state",
            f"{medians[small] * 1e3:.0f} ms",
        )
        report.figure(
            f"round of {ROUND // 1000} k rows, {large / 1e6:g} M rows of state",
            f"{medians[large] * 1e3:.0f} ms",
            f"{ratio:.2f}x",
            "<= 1.3x",
            ratio <= 1.3,
        )
        store, meter = stores[large]
        written = []
        for number, rows in enumerate((ROUND // 10, ROUND)):
            before = meter.bytes
            a_round(store, rounds + number, rows)
            written.append(meter.bytes - before)
            report.figure(
                f"bytes put by a round of {rows // 1000} k rows",
                f"{written[-1] / 1e6:.2f} MB",
                f"{written[-1] / rows:.0f} bytes a row",
            )
        growth = written[1] / written[0]
        report.figure("ten times the rows, bytes written", f"{growth:.1f}x", "", "<= 12x", growth <= 12)
        measure_restore(report, store, folder / str(large), large)


if __name__ == "__main__":
    main()
