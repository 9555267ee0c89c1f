"""Values added up or chosen from, against plain loops; compiled and in plain Python (K4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_lives import BOTH, alive
from tidegate.kernels.aggregates import add_numbers, add_wide, count_rows, pick_rows

GROUPS = 3
INT64 = st.integers(-(2**63), 2**63 - 1)


def bitmap(valid: list[bool], start: int) -> np.ndarray:
    return np.packbits([False] * start + valid, bitorder="little") if valid else np.empty(0, np.uint8)


rows_of = lambda value: st.lists(st.tuples(st.integers(0, GROUPS - 1), value, st.booleans()), max_size=30)  # noqa: E731


@BOTH
@settings(max_examples=60, deadline=None)
@given(rows_of(INT64), st.integers(0, 9), st.booleans())
def test_valid_rows_are_counted(
    life: str, rows: list[tuple[int, int, bool]], start: int, has_nulls: bool
) -> None:
    groups = np.array([group for group, _, _ in rows], np.int32)
    valid = bitmap([ok for _, _, ok in rows], start) if has_nulls else np.empty(0, np.uint8)
    counts = np.zeros(GROUPS, np.int64)
    alive(count_rows, life)(valid, start, groups, counts)
    assert counts.tolist() == [
        sum(group == wanted and (ok or not has_nulls) for group, _, ok in rows) for wanted in range(GROUPS)
    ]
    sums = np.zeros(GROUPS, np.int64)
    alive(add_numbers, life)(np.arange(len(rows)), groups, sums)
    assert sums.tolist() == [
        sum(row for row, (group, _, _) in enumerate(rows) if group == wanted) for wanted in range(GROUPS)
    ]


@BOTH
@pytest.mark.parametrize(("value_words", "sum_words"), [(1, 2), (2, 2), (2, 4), (4, 4)])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_wide_sums_are_those_of_whole_numbers(life: str, value_words: int, sum_words: int, data: Any) -> None:
    bits = min(64 * value_words, 64 * sum_words - 8)
    rows = data.draw(rows_of(st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)))
    raw = b"".join(value.to_bytes(8 * value_words, "little", signed=True) for _, value, _ in rows)
    sums, seen = np.zeros(GROUPS * sum_words, np.uint64), np.zeros(GROUPS, np.uint8)
    with np.errstate(over="ignore"):
        alive(add_wide, life)(
            np.frombuffer(raw, np.uint64),
            value_words,
            bitmap([ok for _, _, ok in rows], 3),
            3,
            np.array([group for group, _, _ in rows], np.int32),
            sum_words,
            sums,
            seen,
        )
    for group in range(GROUPS):
        expected = [value for other, value, ok in rows if ok and other == group]
        stored = sums[group * sum_words : (group + 1) * sum_words].tobytes()
        assert int.from_bytes(stored, "little", signed=True) == sum(expected)
        assert bool(seen[group]) is bool(expected)


@BOTH
@settings(max_examples=60, deadline=None)
@given(rows_of(st.tuples(*[st.integers(-1, 1)] * 3)), st.booleans(), st.booleans())
def test_the_row_with_the_best_key_is_picked(
    life: str, rows: list[Any], highest: bool, has_three: bool
) -> None:
    keys = np.array([key for _, key, _ in rows], np.int64).reshape(-1, 3)
    first, second, third = (np.ascontiguousarray(keys[:, i]) for i in range(3))
    if not has_three:
        second = third = np.empty(0, np.int64)
    picked = np.full(GROUPS, -1, np.int32)
    groups = np.array([group for group, _, _ in rows], np.int32)
    valid = bitmap([ok for _, _, ok in rows], 0)
    alive(pick_rows, life)(first, second, third, valid, 0, groups, int(highest), picked)
    for group in range(GROUPS):
        among = [row for row, (other, _, ok) in enumerate(rows) if ok and other == group]
        order = lambda row: tuple(keys[row]) if has_three else (keys[row][0],)  # noqa: E731
        best = (max if highest else min)(among, key=order, default=-1)
        assert picked[group] == best
