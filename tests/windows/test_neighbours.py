"""Windows put together from merged neighbours: the same as from their rows one by one (WS INV-22)."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.clock import ManualClock
from tidegate.storage import ScratchLimiter
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.aggregates.folds import Folds, resolve
from tidegate.windows.events import EventBatch
from tidegate.windows.operators import merge_tree
from tidegate.windows.operators.merge_tree import Stretches, merge_stretches, place_by_time

INT = pa.int64()
SCRATCH = ScratchLimiter(ManualClock(), reader_slots=1, maintenance_slots=1, timeout_ms=0)
FOLDS = Folds(
    resolve(
        {"n": agg.count(), "total": agg.sum("v"), "low": agg.min("v"), "high": agg.max("v")},
        pa.schema([("v", INT)]),
    )
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(-9, 9), st.sampled_from([0, 0, 0, 1, 2])),
        min_size=1, max_size=60,
    ),
    cuts=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=12),
    limit=st.integers(0, 2),
    few=st.sampled_from([0, 4, 1000]),
)  # fmt: skip
def test_a_stretch_is_the_sum_of_the_rows_its_window_takes(
    rows: list[tuple[int, int, int, int]], cuts: list[tuple[int, int]], limit: int, few: int
) -> None:
    codes = np.array([row[0] for row in rows], np.int32)
    values = np.array([row[2] for row in rows], np.int64)
    firsts = np.array([row[3] for row in rows], np.int64)
    order, starts = place_by_time(codes, np.array([row[1] for row in rows], np.int64), 4)
    assert [rows[at][:2] for at in order] == sorted(row[:2] for row in rows)
    assert starts.tolist() == [sum(row[0] < key for row in rows) for key in range(5)]

    spans = [sorted((min(low, len(rows)), min(high, len(rows)))) for low, high in cuts]
    spans = [span for span in spans if any(firsts[at] <= limit for at in order[slice(*span)])]
    taken = [[at for at in order[low:high] if firsts[at] <= limit] for low, high in spans]
    if not spans:
        return
    windows = Stretches(
        limits=np.full(len(spans), limit, np.int64),
        lows=np.array([low for low, _ in spans], np.int32),
        highs=np.array([high for _, high in spans], np.int32),
        firsts=firsts,
        away_before=np.concatenate([[0], np.cumsum(firsts[order] > 0)]).astype(np.int32),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_tree, "FEW", few)
        merged = merge_stretches(FOLDS, partial(values), order, windows, SCRATCH, str)
    (counts, *_), results = FOLDS.finish(merged)
    assert counts.tolist() == [len(each) for each in taken]
    assert results["n"].to_pylist() == [len(each) for each in taken]
    assert results["total"].to_pylist() == [int(values[each].sum()) for each in taken]
    assert results["low"].to_pylist() == [int(values[each].min()) for each in taken]
    assert results["high"].to_pylist() == [int(values[each].max()) for each in taken]


def partial(values: np.ndarray) -> list[pa.Array]:
    """The states of records taken one by one."""
    count = len(values)
    events = EventBatch(
        key=pa.array([b"k"] * count, pa.binary()),
        ts=np.zeros(count, np.int64),
        offset=np.arange(count),
        partition=np.zeros(count, np.int32),
        stream_time=np.full(count, -1, np.int64),
        values=pa.record_batch({"v": pa.array(values)}),
    )
    inputs = pa.RecordBatch.from_pydict(FOLDS.inputs(events))
    groups = np.arange(count, dtype=np.int32)
    return [column for each in FOLDS.stored for column in each.partial(inputs, groups, count)]
