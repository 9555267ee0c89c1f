"""Which offsets speak of which windows: cells equal a plain walk over the records, however they are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.kernels.stream_time import note_cells
from tidegate.tables import snapshot as module
from tidegate.tables.options import table_rules
from tidegate.tables.snapshot import MOST_CELLS, Cell, OffsetCells, PartitionState
from tidegate.windows.stores.segments import Expiry

MINUTE = 60_000
NONE = np.empty(0, np.int64)


def note(cells: OffsetCells, ts: list[int], offsets: list[int], dropped: list[int]) -> None:
    rows = np.array(dropped, np.int64)
    cells.note(np.array(ts, np.int64), np.array(offsets, np.int64), rows, 0)


def walked(cells: OffsetCells, ts: list[int], offsets: list[int], dropped: set[int]) -> dict[int, Cell]:
    """The same, record by record."""
    found: dict[int, Cell] = {}
    for row, (time, offset) in enumerate(zip(ts, offsets, strict=True)):
        number = cells._number(time)
        known = found.get(number)
        gone = -1 if known is None else known.dropped_from
        if row in dropped and gone < 0:
            gone = offset
        found[number] = (
            Cell(1, offset, offset, gone) if known is None else Cell(known.count + 1, known.low, offset, gone)
        )
    return found


@pytest.mark.parametrize("at_once", [1 << 15, 1], ids=["near", "far"])
@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([1, 1000, 7 * MINUTE, 10**9]),
    segment=st.sampled_from([MINUTE, 90_000, 43_200_000]),
    ts=st.lists(st.integers(0, 3 * 43_200_000), max_size=60),
    gaps=st.lists(st.integers(1, 5), min_size=60, max_size=60),
    dropped=st.sets(st.integers(0, 59)),
    cut=st.integers(1, 60),
)
def test_cells_equal_a_walk_over_the_records(
    at_once: int, size: int, segment: int, ts: list[int], gaps: list[int], dropped: set[int], cut: int
) -> None:
    offsets = np.cumsum(gaps)[: len(ts)].tolist()
    cells = OffsetCells(Expiry(2 * segment, segment), size)
    saved, module.MOST_AT_ONCE = module.MOST_AT_ONCE, at_once  # type: ignore[misc]
    try:
        for at in range(0, len(ts), cut):
            here = [row - at for row in sorted(dropped) if at <= row < min(at + cut, len(ts))]
            note(cells, ts[at : at + cut], offsets[at : at + cut], here)
    finally:
        module.MOST_AT_ONCE = saved  # type: ignore[misc]
    assert cells.cells == walked(cells, ts, offsets, dropped)


@given(ts=st.lists(st.integers(0, 1000), min_size=1, max_size=50), width=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_the_kernel_counts_as_plain_python_does(ts: list[int], width: int) -> None:
    segment, offsets = 100, list(range(10, 10 + 3 * len(ts), 3))
    per_segment = -(-segment // width)
    numbers = [time // segment * per_segment + time % segment // width for time in ts]
    first, span = min(numbers), max(numbers) - min(numbers) + 1
    counts, lows, highs = (np.zeros(span, np.int64) for _ in range(3))
    arrays: Any = (np.array(ts, np.int64), np.array(offsets, np.int64))
    note_cells(*arrays, segment, per_segment, width, first, counts, lows, highs)
    for cell in range(span):
        mine = [offset for offset, number in zip(offsets, numbers, strict=True) if number == first + cell]
        assert counts[cell] == len(mine)
        assert not mine or (lows[cell], highs[cell]) == (mine[0], mine[-1])


def test_no_cell_reaches_over_the_border_of_a_time_segment() -> None:
    cells = OffsetCells(Expiry(200, 100), 30)  # three cells of 34, 34 and 32
    assert [cells._number(time) for time in (0, 33, 34, 67, 68, 99, 100, 134)] == [0, 0, 1, 1, 2, 2, 3, 4]


def test_a_window_is_never_finer_than_a_cell_and_cells_stay_few() -> None:
    assert OffsetCells(Expiry(86_400_000, 43_200_000), 1)._per_segment == 256
    assert OffsetCells(Expiry(86_400_000, 43_200_000), 86_400_000)._per_segment == 1


def test_when_there_are_too_many_the_expired_ones_go_first_and_of_those_the_oldest() -> None:
    cells = OffsetCells(Expiry(10**9, 1000), 1000)
    many = MOST_CELLS + 10
    live = MOST_CELLS - 5
    cells.note(np.arange(many) * 1000, np.arange(many), NONE, (many - live) * 1000)
    assert len(cells.cells) == MOST_CELLS
    assert sorted(cells.cells) == list(range(10, many))
    again = OffsetCells(Expiry(10**9, 1000), 1000)
    again.note(np.array([10**8]), np.array([0]), NONE, 10**8)  # live, and never spoken of again
    again.note(np.arange(many) * 1000, np.arange(1, many + 1), NONE, 10**8)
    assert again.find(10**8) == Cell(1, 0, 0)
    assert again.find(0) is None


def test_cells_are_in_the_checkpoint() -> None:
    shape = table_rules("window", "topic", (0,), size="10ms").shape
    state, again = PartitionState(shape, 0), PartitionState(shape, 0)
    state.cells.note(np.array([10, 20, 86_400_000 * 3]), np.array([4, 6, 9]), np.array([1]), 0)
    again.restore_progress(state.encode_progress())
    assert again.cells.cells == state.cells.cells
    assert again.cells.find(10) == Cell(2, 4, 6, 6)
    assert again.cells.find(86_400_000 * 3) == Cell(1, 9, 9, -1)
    assert again.cells.find(86_400_000) is None
