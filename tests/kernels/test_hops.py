"""Hopping windows over ordered panes, against plain loops; compiled and in plain Python (K4)."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_lives import BOTH
from tidegate.kernels.windows import list_hops, reach_of_hops

LATEST = 2**63 - 1
NONE = np.empty(0, np.int64)
KEYS = 3
Pane = tuple[int, int, int]  # key, which pane, the first window that takes it (0: all)

PANES = st.lists(
    st.tuples(st.integers(0, KEYS - 1), st.integers(0, 30), st.sampled_from([0, 0, 0, 6, 12])),
    min_size=1, max_size=20,
)  # fmt: skip
SHAPES = st.sampled_from([(6, 2, 2), (6, 3, 3), (6, 4, 2), (3, 1, 1), (2, 6, 2), (12, 2, 2)])


def ordered(panes: list[Pane], width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    keys = np.array([pane[0] for pane in panes], np.int32)
    ts = np.array([pane[1] * width for pane in panes], np.int64)
    first = np.array([pane[2] for pane in panes], np.int64)
    rows = np.lexsort((ts, keys)).astype(np.int32)
    return rows, np.searchsorted(keys[rows], np.arange(KEYS + 1)).astype(np.int32), ts, first


@BOTH
@settings(max_examples=300, deadline=None)
@given(PANES, SHAPES, st.integers(0, 40), st.integers(0, 80))
def test_every_window_of_a_pane_is_listed_once_with_its_panes(
    life: str, panes: list[Pane], shape: tuple[int, int, int], low: int, span: int
) -> None:
    listing, reaching = (each if life == "compiled" else each.py_func for each in (list_hops, reach_of_hops))
    size, advance, width = shape
    lowest, highest = -(-low // advance) * advance, low + span
    stride = max(1, (highest - lowest) // advance + 1)
    rows, starts, ts, first = ordered(panes, width)
    bounds = (rows, starts, ts, first, size, advance, lowest, highest, stride)
    numbers = np.empty(listing(*bounds, NONE), np.int64)
    listing(*bounds, numbers)
    expected = {
        (key, start)
        for key, pane, first_start in panes
        for start in range(lowest, highest + 1, advance)
        if first_start == 0 and start <= pane * width < start + size
    }
    got = [(number // stride, number % stride * advance + lowest) for number in numbers.tolist()]
    assert got == sorted(expected)

    lows, highs = np.empty(len(numbers), np.int32), np.empty(len(numbers), np.int32)
    reaching(numbers, lowest, size, advance, stride, rows, starts, ts, lows, highs)
    for (key, start), begin, end in zip(got, lows, highs, strict=True):
        inside = sorted(
            at for at, pane in enumerate(panes) if pane[0] == key and start <= pane[1] * width < start + size
        )
        assert sorted(rows[begin:end].tolist()) == inside


@BOTH
def test_windows_at_the_end_of_time_reach_to_it(life: str) -> None:
    listing, reaching = (each if life == "compiled" else each.py_func for each in (list_hops, reach_of_hops))
    size, advance = 10, 5
    pane = (LATEST - 3) // advance * advance
    rows, starts = np.zeros(1, np.int32), np.array([0, 1], np.int32)
    ts, first = np.array([pane], np.int64), np.zeros(1, np.int64)
    lowest = pane - advance
    bounds = (rows, starts, ts, first, size, advance, lowest, LATEST, 3)
    numbers = np.empty(listing(*bounds, NONE), np.int64)
    listing(*bounds, numbers)
    assert numbers.tolist() == [0, 1]
    lows, highs = np.empty(2, np.int32), np.empty(2, np.int32)
    reaching(numbers, lowest, size, advance, 3, rows, starts, ts, lows, highs)
    assert (lows.tolist(), highs.tolist()) == ([0, 0], [1, 1])
