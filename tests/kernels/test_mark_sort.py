"""Marks sorted by digits are sorted as numbers, whatever their bits; and what cannot be sorted so is not lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.kernels.sorting import DIGITS, FARTHEST, UNSORTED, radix_sort
from tidegate.storage.runs.columns import sorted_marks


def made(count: int, seed: int, *, same_bits: int = 0, buckets: int = 1) -> tuple[np.ndarray, int, int]:
    """Marks as kernels make them: bucket, bits of a hash (the first `same_bits` all 0), row."""
    chance = np.random.default_rng(seed)
    row_bits, bucket_bits = max(count - 1, 1).bit_length(), (buckets - 1).bit_length()
    hashes = chance.integers(0, 2**64, count, np.uint64) >> np.uint64(same_bits)
    number = chance.integers(0, buckets, count).astype(np.uint64)
    upper = number << np.uint64(64 - bucket_bits) if bucket_bits else np.zeros(count, np.uint64)
    marks = upper | (hashes >> np.uint64(bucket_bits))
    marks = marks >> np.uint64(row_bits) << np.uint64(row_bits)
    return marks | np.arange(count, dtype=np.uint64), bucket_bits, row_bits


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3000),
    st.integers(0, 9),
    st.sampled_from([0, 1, 7, 20, 40]),
    st.sampled_from([1, 2, 7, 600]),
)
def test_marks_are_sorted_as_numbers(count: int, seed: int, same_bits: int, buckets: int) -> None:
    marks, bucket_bits, row_bits = made(count, seed, same_bits=same_bits, buckets=buckets)
    expected = sorted(marks.tolist())
    assert sorted_marks(marks, bucket_bits, row_bits).tolist() == expected


@pytest.mark.parametrize("bits", [8, 16, 24])
def test_the_kernel_says_where_they_are(bits: int) -> None:
    marks, _, _ = made(4 * DIGITS, 3)
    expected = np.sort(marks)
    other = np.empty_like(marks)
    where = radix_sort(marks, other, bits)
    if bits == 8:  # four marks a digit: some stand far from their place, or none does
        assert where in (1, UNSORTED)
    else:
        assert where == (bits // 8) % 2
    assert np.array_equal(np.sort(marks) if where == UNSORTED else (marks, other)[where], expected)


@pytest.mark.parametrize("passes", [2, 3])
def test_chosen_hashes_are_given_back_unsorted_and_whole(passes: int) -> None:
    marks, _, row_bits = made(8 * FARTHEST * DIGITS, 5, same_bits=8 * passes)
    expected = np.sort(marks)
    given = marks.copy()
    assert radix_sort(given, np.empty_like(given), 8 * passes) == UNSORTED
    assert np.array_equal(np.sort(given), expected)
    assert np.array_equal(sorted_marks(marks, 0, row_bits), expected)


def test_the_twin_agrees() -> None:
    marks, _, _ = made(DIGITS + 44, 11)
    plain, compiled = marks.copy(), marks.copy()
    rooms = np.empty_like(marks), np.empty_like(marks)
    assert radix_sort.py_func(plain, rooms[0], 16) == radix_sort(compiled, rooms[1], 16) == 0
    assert np.array_equal(plain, compiled) and np.array_equal(plain, np.sort(marks))
