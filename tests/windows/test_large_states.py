"""Windows whose lists are more than there is memory to merge: refused by name, nothing taken, and read with more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tidegate.errors import OverloadError
from tidegate.storage import StorageConfig, WorkerStorageRuntime
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.aggregates.folds import resolve
from tidegate.windows.events import EventBatch
from tidegate.windows.kinds import Hopping, Session, Sliding, Tumbling
from tidegate.windows.operators.base import Moment, WindowRows
from tidegate.windows.operators.session import SessionOperator
from tidegate.windows.operators.sliding import SlidingOperator
from tidegate.windows.operators.windows import WindowOperator

MIB = 1 << 20
ROWS = 8_000
KINDS = {
    "tumbling": (WindowOperator, Tumbling("1h", grace="1h")),
    "hopping": (WindowOperator, Hopping("1h", "30m", grace="1h")),
    "session": (SessionOperator, Session("1m", grace="1h")),
    "sliding": (SlidingOperator, Sliding("100ms", grace="1h")),
}


def batch(number: int, rows: int = ROWS) -> EventBatch:
    """One hot key, and a record of another."""
    offsets = rows * number + np.arange(rows)
    return EventBatch(
        key=pa.array([b"hot"] * (rows - 1) + [b"other"], pa.binary()),
        ts=1_000 * number + np.arange(rows) // 100,
        offset=offsets,
        partition=np.zeros(rows, np.int32),
        stream_time=np.full(rows, -1),
        values=pa.record_batch({"text": pa.array([f"text-{each:020}" for each in offsets])}),
    )


def runtime(working_mib: float, backend: MemoryBackend | None = None) -> WorkerStorageRuntime:
    ceiling = 8 * MIB + int(2 * working_mib * MIB)
    config = StorageConfig.for_tests(memory_ceiling_bytes=ceiling, max_batch_bytes=MIB)
    return WorkerStorageRuntime.open(config, backend or MemoryBackend())


def operator(shape: str, on: WorkerStorageRuntime, aggregate: str = "collect", **settings: Any) -> Any:
    made, kind = KINDS[shape]
    kept = {"collect": agg.collect("text"), "distinct": agg.count_distinct("text")}[aggregate]
    resolved = resolve({"kept": kept}, pa.schema([("text", pa.string())]))
    return made(on, "task", "windows", kind, resolved, **settings)


def until_refused(made: Any, most: int = 60) -> tuple[int, OverloadError]:
    """How many batches were taken before one was too much, and what was said then."""
    for number in range(most):
        try:
            made.process(batch(number), Moment(0))
        except OverloadError as error:
            return number, error
    raise AssertionError("never refused")


@pytest.mark.parametrize("aggregate", ["collect", "distinct"])
@pytest.mark.parametrize("shape", ["tumbling", "hopping", "session"])
def test_an_update_that_cannot_be_merged_is_refused_by_name(shape: str, aggregate: str) -> None:
    made = operator(shape, runtime(12), aggregate)
    taken, error = until_refused(made)
    assert taken > 1
    assert error.reason == "window_state"
    assert "window of key b'hot' from 1970-01-01T00:00:00Z" in str(error)
    assert "memory_ceiling_bytes" in str(error)
    if shape == "tumbling":  # it is known before the panes are touched
        assert made.counters["records"] == ROWS * taken
        assert made.windows_of(pa.array([b"other"], pa.binary())).count.tolist() == [taken]


def test_windows_that_overlap_are_refused_for_what_they_are_together() -> None:
    """A sliding window for every record, each with all that lie near it."""
    with pytest.raises(OverloadError, match=r"window of key b'hot'.*and [0-9]+ others needs"):
        operator("sliding", runtime(12)).process(batch(0), Moment(0))


@pytest.mark.parametrize("shape", ["tumbling", "hopping"])
def test_a_window_too_large_to_close_is_kept_and_closes_with_more_memory(shape: str) -> None:
    backend = MemoryBackend()
    small = runtime(8, backend)
    made = operator(shape, small, emit="close")
    for number in range(12):
        made.process(batch(number), Moment(0))
    small.maintain("task", budget_ms=60_000)
    token = small.checkpoint("task")
    with pytest.raises(OverloadError, match=r"window of key b'hot'.*memory_ceiling_bytes"):
        made.tick(Moment(0, closing=True))
    small.close()
    large = runtime(200, backend)
    again = operator(shape, large, emit="close")
    large.apply_checkpoint("task", token)
    rows = again.tick(Moment(0, closing=True)).rows
    assert isinstance(rows, WindowRows)
    expected = [
        f"text-{each:020}" for number in range(12) for each in range(ROWS * number, ROWS * number + ROWS - 1)
    ]
    hot = [each["values"]["kept"] for each in rows.to_batch().to_pylist() if each["key"] == b"hot"]
    assert hot == [expected]


def test_compaction_leaves_a_key_in_pieces_that_it_cannot_merge() -> None:
    """The pieces stay few, and no read of another key suffers."""
    on = runtime(12)
    made = operator("tumbling", on, heard=False)
    for number in range(40):
        made.process(batch(number), Moment(0))
        on.maintain("task", budget_ms=60_000)
    (bucket,) = made.states[0].index.buckets(0, 1 << 40)
    sizes = [run.nbytes for run in bucket.runs]
    assert 2 < len(sizes) < 40
    with pytest.raises(OverloadError, match="memory_ceiling_bytes"):
        made.windows_of(pa.array([b"hot"], pa.binary()))
    assert made.windows_of(pa.array([b"other"], pa.binary())).count.tolist() == [40]


def test_many_small_lists_of_one_bucket_are_read_in_pieces() -> None:
    """What is too much together is not too much window by window."""
    on = runtime(12)
    made = operator("tumbling", on, heard=False)
    keys = [b"key-%d" % (each % 200) for each in range(ROWS)]
    for number in range(10):
        plain = batch(number)
        made.process(
            EventBatch(
                pa.array(keys, pa.binary()),
                plain.ts,
                plain.offset,
                plain.partition,
                plain.stream_time,
                plain.values,
            ),
            Moment(0),
        )
    rows = made.windows()
    assert int(rows.count.sum()) == 10 * ROWS
    assert [len(each) for each in rows.values.column("kept").to_pylist()] == [10 * ROWS // 200] * 200
