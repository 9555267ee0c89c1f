"""What does deduplication cost for each record, with millions of ids alive?

Batches of 250 k records, one in ten a copy of a record from up to 2.4 M records ago, the others with ids never seen;
the horizon keeps about 2.5 M ids alive in about ten runs. Each id is hashed (16 rounds of SipHash: 30 ns), sorted
(30 ns), held against every live run's directory (ten hashes a record, in order: 30 ns), decided (10 ns), and kept
(30 ns): 130 ns, and 20 ns to copy what goes on. The thread's processor time; the first batches fill the state and
are not timed. Upkeep between batches (merging, storing and evicting runs) is shown beside it.

Run: .venv/bin/python benchmarks/windows_dedupe.py [--full]
"""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time
from typing import Any

import numpy as np
import pyarrow as pa

from _report import Report, demand
from tidegate.randomness import SeededRandomness
from tidegate.storage import StorageConfig, WorkerStorageRuntime, open_backend
from tidegate.windows.events import EventBatch
from tidegate.windows.kinds import Deduplicate
from tidegate.windows.operators.base import Moment
from tidegate.windows.operators.dedupe import DedupeOperator

TASK = "bench/dedupe/0"
ALIVE = 2_500_000
RECORDS_A_MS = 10
SCHEMA = pa.schema([("order", pa.binary()), ("amount", pa.float64())])
STAGES = {
    "fingerprint, sort, group": "_group",
    "join with live runs, decide": "_decide",
    "keep new ids": "_keep",
    "drop old ids": "_drop_old",
}


def batches(count: int, rows: int) -> list[tuple[EventBatch, np.ndarray[Any, Any]]]:
    """Batches of a stream, each with the mask of the records that are no copies."""
    generator = np.random.default_rng(5)
    total = count * rows
    event = np.arange(total)
    is_copy = generator.random(total) < 0.1
    is_copy[:1000] = False
    back = generator.integers(1, ALIVE * 95 // 100, total)
    event[is_copy] = np.maximum(0, event - back)[is_copy]
    while True:  # a copy of a copy is a copy of what that one copies
        again = is_copy[event] & is_copy
        if not again.any():
            break
        event[again] -= 1
        event[event < 0] = 0
    text = np.char.mod(b"order-%010d", event)
    keys = np.char.mod(b"c%05d", event % 50_000)
    found = []
    for start in range(0, total, rows):
        part = slice(start, start + rows)
        values = pa.RecordBatch.from_arrays(
            [_fixed(text[part]), pa.array(np.arange(start, start + rows, dtype=np.float64))], schema=SCHEMA
        )
        offset = np.arange(start, start + rows, dtype=np.int64)
        batch = EventBatch(
            _fixed(keys[part]), offset // RECORDS_A_MS, offset, np.zeros(rows, np.int32), offset, values
        )
        found.append((batch, ~is_copy[part]))
    return found


def _fixed(text: np.ndarray[Any, Any]) -> pa.Array:
    width, rows = text.dtype.itemsize, len(text)
    bounds = np.arange(0, (rows + 1) * width, width, dtype=np.int32)
    content = np.ascontiguousarray(text).view(np.uint8)
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(bounds), pa.py_buffer(content)])


def timed(target: Any, name: str, spent: dict[str, float], label: str) -> None:
    """Have a method of one object note the time it takes."""
    method: Callable[..., Any] = getattr(target, name)

    def measured(*given: Any, **named: Any) -> Any:
        started = thread_time()
        try:
            return method(*given, **named)
        finally:
            spent[label] = spent.get(label, 0.0) + thread_time() - started

    setattr(target, name, measured)


def main() -> None:
    report = Report(__doc__.splitlines()[0], rows=250_000, batches=16)
    rows, count = report.numbers["rows"], report.numbers["batches"] * (2 if report.full else 1)
    warm = -(-ALIVE // rows) + 1
    stream = batches(warm + count, rows)
    runtime = WorkerStorageRuntime.open(
        StorageConfig.of({"worker_total_bytes": "4GiB", "memory_ceiling_bytes": "6GiB"}),
        open_backend("memory://"),
        randomness=SeededRandomness(1),
    )
    horizon = ALIVE // RECORDS_A_MS
    operator = DedupeOperator(
        runtime,
        TASK,
        "dedupe",
        Deduplicate("order", f"{horizon}ms", grace=0),
        SCHEMA,
        randomness=SeededRandomness(2),
    )
    spent: dict[str, float] = {}
    for label, name in STAGES.items():
        timed(operator, name, spent, label)
    timed(operator.clocks, "stamp", spent, "stream time")
    upkeep, passed = 0.0, 0
    costs = []
    for number, (batch, is_first) in enumerate(stream):
        if number == warm:
            spent.clear()
            upkeep = 0.0
        started = thread_time()
        output = operator.process(batch, Moment(0))
        costs.append(thread_time() - started)
        demand(np.array_equal(output.rows.offset, batch.offset[is_first]), f"batch {number}")
        passed += len(output.rows)
        started = thread_time()
        runtime.maintain(TASK, 200)
        upkeep += thread_time() - started
    measured = costs[warm:]
    records = rows * len(measured)
    index = operator.states[0].index
    runs = sum(len(index.snapshot(bucket).runs) for bucket in index.all_buckets())
    report.figure("ids alive, runs", f"{index.total_rows:,}, {runs}")
    total = sum(measured) / records * 1e9
    for label, seconds in sorted(spent.items(), key=lambda each: -each[1]):
        report.figure(label, f"{seconds / records * 1e9:.0f} ns")
    rest = (sum(measured) - sum(spent.values())) / records * 1e9
    report.figure("output (rows that go on) and the rest", f"{rest:.0f} ns")
    best = min(measured) / rows * 1e9
    report.figure("a record in all", f"{total:.0f} ns", f"best batch {best:.0f} ns", "≤ 150 ns", best <= 150)
    report.figure("upkeep (merging runs), beside it", f"{upkeep / records * 1e9:.0f} ns")


if __name__ == "__main__":
    main()
