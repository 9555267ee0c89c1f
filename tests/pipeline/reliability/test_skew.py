"""Keys that are anything but even (R-25): results and memory are as with even ones.

A million records for each kind of skew, against numpy. Times of rounds are printed and go into the figures; a test
never judges them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from task_rig import TaskRig
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.definition.steps import Aggregate, Source, To
from tidegate.storage import StorageConfig
from tidegate.tables.serdes.base import Bytes, Long
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.kinds import Session, Tumbling

ROWS = 1_000_000
ROUNDS = 20
SPAN_MS = 600_000
STORAGE = StorageConfig.for_tests(
    memory_ceiling_bytes=256 << 20,
    worker_total_bytes=32 << 20,
    max_tasks=1,
    write_buffer={"reserve_bytes": 1 << 20, "soft_max_bytes": 8 << 20},
    base_runs={"reserve_bytes": 1 << 20, "soft_max_bytes": 8 << 20},
    backlog_limit_bytes=1 << 30,
    max_batch_bytes=32 << 20,
    max_run_rows=65_536,
)
_timings: dict[str, float] = {}  # of the uniform workload, to compare with


def keys_of(name: str, rows: int) -> npt.NDArray[np.int64]:
    chance = np.random.default_rng(11)
    if name == "one-key":
        return np.where(chance.random(rows) < 0.999, 0, chance.integers(1, 1000, rows))
    if name == "zipf":
        return np.minimum(chance.zipf(1.5, rows), 1 << 40).astype(np.int64)
    if name == "one-shot":
        return chance.permutation(rows)
    if name == "larger-than-the-pool":
        return np.zeros(rows, np.int64)
    return chance.integers(0, 1000, rows)


def ran(folder: Path, name: str, rows: int) -> tuple[dict[str, Any], list[float]]:
    """A table over these keys, its state's high mark and how long rounds took."""
    keys, chance = keys_of(name, rows), np.random.default_rng(12)
    times = np.sort(chance.integers(0, SPAN_MS, rows))
    values = chance.integers(-1000, 1000, rows)
    # One key larger than the pool: every record opens a session of its own.
    single = name == "larger-than-the-pool"
    if single:
        times = np.arange(rows) * 20
    kind = Session("10ms", retention="1d") if single else Tumbling("60000ms", retention="1d")
    step = Aggregate(kind, (agg.count().named("n"), agg.sum("value").named("total")))
    flow = Flow(Source("events", Bytes(), Long()), (step,), (To("results", integrity=False),))
    took, peak = list[float](), 0
    with TaskRig(folder, flow, storage=STORAGE) as rig:
        with rig.log.writer("events") as writer:
            writer.write(
                pa.table(
                    {
                        "key": pa.FixedSizeBinaryArray.from_buffers(
                            pa.binary(8), rows, [None, pa.py_buffer(keys.astype(">i8").tobytes())]
                        ).cast(pa.binary()),
                        "timestamp": times,
                        "value": pa.FixedSizeBinaryArray.from_buffers(
                            pa.binary(8), rows, [None, pa.py_buffer(values.astype(">i8").tobytes())]
                        ).cast(pa.binary()),
                    }
                ),
                partition=0,
            )
        for number in range(ROUNDS):
            began = time.perf_counter()
            rig.round({0: (number + 1) * rows // ROUNDS})
            took.append(time.perf_counter() - began)
            peak = max(peak, rig.worker.runtime.pool.total)
        (operator,) = rig.worker._tasks["results", 0].chain.operators
        found = operator.windows()  # type: ignore[union-attr]
        key = np.frombuffer(b"".join(found.key.to_pylist()), ">i8")
        table = {
            "key": key,
            "start": np.asarray(found.window_start),
            "n": found.values.column("n").to_numpy(),
            "total": found.values.column("total").to_numpy(),
            "peak": peak,
        }
    windows = times if single else times // 60_000 * 60_000
    place = np.lexsort((windows, keys))
    pairs = np.stack([keys[place], windows[place]])
    first = np.flatnonzero(np.r_[True, (pairs[:, 1:] != pairs[:, :-1]).any(axis=0)])
    order = np.lexsort((table["start"], table["key"]))
    np.testing.assert_array_equal(table["key"][order], pairs[0, first])
    np.testing.assert_array_equal(table["start"][order], pairs[1, first])
    np.testing.assert_array_equal(table["n"][order], np.diff(np.r_[first, rows]))
    np.testing.assert_array_equal(table["total"][order], np.add.reduceat(values[place], first))
    return table, took


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, id=f"R-25-{name}")
        for name in ("one-key", "zipf", "one-shot", "larger-than-the-pool")
    ],
)
def test_skew_changes_neither_results_nor_the_ceiling_of_memory(
    tmp_path: Path, name: str, tally: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    if "uniform" not in _timings:
        _, took = ran(tmp_path / "uniform", "uniform", ROWS // 4)
        _timings["uniform"] = float(np.quantile(took, 0.99)) * 4
    table, took = ran(tmp_path / name, name, ROWS)
    ceiling = STORAGE.memory_ceiling_bytes
    assert table["peak"] <= ceiling, f"{table['peak']} bytes were held, {ceiling} are the ceiling"
    ratio = float(np.quantile(took, 0.99)) / _timings["uniform"]
    with capsys.disabled():
        print(
            f"\n  R-25 {name}: {ROWS:,} rows, {len(table['n']):,} windows, p99 round {ratio:.1f} times even keys'"
        )
    tally(ROWS, seed=11, windows=len(table["n"]), peak_bytes=table["peak"], p99_ratio=round(ratio, 2))
