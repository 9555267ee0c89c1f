"""Joining sorted keys with a run's directory, against a plain twin; both ways, compiled and as checked Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.kernels import run_merge as kernels

FORMS = pytest.mark.parametrize("form", ["compiled", "checked"])
# few hashes, so that different keys share one
SIDES = st.sets(
    st.tuples(st.integers(0, 40).map(lambda number: number << 58), st.binary(max_size=2)), max_size=60
)


def run(form: str, kernel: Any, *arguments: Any) -> Any:
    return (kernel if form == "compiled" else kernel.py_func)(*arguments)


def column(values: list[bytes]) -> tuple[Any, Any]:
    return np.frombuffer(b"".join(values), np.uint8), np.cumsum([0, *map(len, values)], dtype=np.int32)


@FORMS
@pytest.mark.parametrize("way", ["stream", "leap"])
@settings(max_examples=60, deadline=None)
@given(SIDES, SIDES, st.integers(0, 30), st.integers(0, 30), st.integers(0, 2**32))
def test_the_rows_of_keys_both_sides_have_are_found(
    form: str,
    way: str,
    asked: set[tuple[int, bytes]],
    held: set[tuple[int, bytes]],
    first: int,
    last: int,
    seed: int,
) -> None:
    keys, lines = sorted(asked), sorted(held)
    chance = np.random.default_rng(seed)
    counts = chance.integers(1, 4, len(lines))
    starts = np.cumsum([0, *counts], dtype=np.int32)
    ts = chance.integers(0, 30, int(starts[-1]))
    expected = [
        (number, row)
        for line, key in enumerate(lines)
        for number in [keys.index(key) if key in asked else -1]
        for row in range(starts[line], starts[line + 1])
        if number >= 0 and first <= ts[row] <= last
    ]
    hashes = np.array([hash_ for hash_, _ in keys], np.uint64)
    own = (np.array([hash_ for hash_, _ in lines], np.uint64), *column([key for _, key in lines]), starts, ts)
    for room in (len(expected), max(0, len(expected) - 1)):
        found = np.empty(room, np.int32), np.empty(room, np.int32)
        rest = (hashes, *column([key for _, key in keys]), *own, first, last, *found)
        if way == "stream":
            bits = np.zeros(64, np.uint8)
            run(form, kernels.mark_hashes, hashes, 55, bits)
            count = run(form, kernels.stream_run, bits, 55, *rest)
        else:
            count = run(form, kernels.leap_run, *rest)
        assert count == len(expected)
        assert list(zip(found[0].tolist(), found[1].tolist(), strict=True)) == expected[:room]


@FORMS
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 300])
def test_leaping_and_walking_find_the_first_that_is_not_below(form: str, size: int) -> None:
    chance = np.random.default_rng(size)
    hashes = np.sort(chance.integers(0, 500, size).astype(np.uint64))
    wanted = np.sort(chance.integers(0, 520, 40).astype(np.uint64))
    leap, walk = kernels.leap, kernels.walk
    if form == "compiled":
        from numba import njit

        inner_leap, inner_walk = leap, walk
        leap = njit(lambda hashes, at, wanted: inner_leap(hashes, at, wanted))
        walk = njit(lambda hashes, at, wanted: inner_walk(hashes, at, wanted))
    at = np.int64(0)
    for each in wanted:
        expected = int(np.searchsorted(hashes, each))
        assert leap(hashes, at, each) == walk(hashes, at, each) == expected
        at = np.int64(expected)
