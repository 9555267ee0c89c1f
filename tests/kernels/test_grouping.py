"""Grouping against dictionaries and Python's sort; each kernel compiled and in plain Python (K4)."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_lives import BOTH, alive, columns, int32s
from tidegate.kernels.sorting import (
    arrange_rows,
    mark_identities,
    mark_rows,
    number_places,
    place_rows,
    sort_cursors,
)

WIDTH = 10


a_key = st.binary(max_size=3) | st.sampled_from(
    [b"a" * 8, b"ab" * 8, b"ab" * 9, b"ab" * 4 + b"c" + b"ab" * 4, b"ab" * 4 + b"d" + b"ab" * 4]
)
rows_in = st.lists(st.tuples(a_key, st.integers(-35, 35)), min_size=1, max_size=60)


@BOTH
@settings(max_examples=60, deadline=None)
@given(rows_in, st.sampled_from([0, 1, 3, 3 << 62, 2**64 - 1]))
def test_rows_are_put_in_order_of_bucket_hash_and_key_whatever_the_hashes(
    life: str, rows: list[tuple[bytes, int]], mask: int
) -> None:
    keys, count = [key for key, _ in rows], len(rows)
    hashes = np.array([xxhash.xxh64_intdigest(key) & mask for key in keys], np.uint64)
    ts = np.array([moment for _, moment in rows], np.int64)
    lowest = int(ts.min()) // WIDTH * WIDTH
    buckets = [(moment - lowest) // WIDTH for _, moment in rows]
    bucket_bits, row_bits = max(buckets).bit_length(), max(count - 1, 1).bit_length()
    marks, counts = np.empty(count, np.uint64), np.zeros(max(buckets) + 1, np.int64)
    alive(mark_rows, life)(hashes, ts, WIDTH, lowest, bucket_bits, row_bits, marks, counts)
    assert counts.tolist() == [buckets.count(bucket) for bucket in range(max(buckets) + 1)]
    marks.sort()
    order, starts = np.empty(count, np.int32), np.empty(count + 1, np.int32)
    found = alive(arrange_rows, life)(marks, row_bits, *columns(keys), hashes, order, starts)

    def place(row: int) -> tuple[int, int, bytes]:
        return buckets[row], int(hashes[row]), keys[row]

    expected = sorted(range(count), key=lambda row: (*place(row), row))
    assert order.tolist() == expected
    groups = [list(group) for _, group in groupby(expected, key=place)]
    assert starts[: found + 1].tolist() == np.cumsum([0, *map(len, groups)]).tolist()


def test_many_keys_of_one_hash_are_sorted_by_merging() -> None:
    chance = np.random.default_rng(3)
    keys = [b"%d" % number for number in chance.integers(0, 700, 5000)]
    marks, hashes = np.arange(5000, dtype=np.uint64), np.full(5000, 7, np.uint64)
    order, starts = np.empty(5000, np.int32), np.empty(5001, np.int32)
    found = arrange_rows(marks, 13, *columns(keys), hashes, order, starts)
    assert order.tolist() == sorted(range(5000), key=lambda row: (keys[row], row))
    assert found == len(set(keys))


@BOTH
@pytest.mark.parametrize("has_seq", [False, True])
def test_places_are_numbered_by_identity(life: str, has_seq: bool) -> None:
    ts, seq = np.array([1, 1, 1, 2, 2, 2, 5], np.int64), np.array([0, 0, 4, 4, 4, 4, 4], np.int64)
    starts = int32s([0, 4, 5, 7])
    numbers, firsts = np.empty(7, np.int32), np.empty(8, np.int32)
    identity_starts, flags = np.empty(4, np.int32), np.empty(7, np.uint8)
    given_seq = seq if has_seq else seq[:0]
    found = alive(number_places, life)(ts, given_seq, starts, flags, numbers, firsts, identity_starts)
    if has_seq:
        assert (numbers.tolist(), firsts[: found + 1].tolist()) == (
            [0, 0, 1, 2, 3, 4, 5],
            [0, 2, 3, 4, 5, 6, 7],
        )
        assert identity_starts.tolist() == [0, 3, 4, 6]
    else:
        assert (numbers.tolist(), firsts[: found + 1].tolist()) == ([0, 0, 0, 1, 2, 3, 4], [0, 3, 4, 5, 6, 7])
        assert identity_starts.tolist() == [0, 2, 3, 5]


@BOTH
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=50), st.randoms())
def test_rows_are_placed_by_group_as_they_came(life: str, chosen: list[int], random: Any) -> None:
    distinct = sorted(set(chosen))
    groups = [distinct.index(group) for group in chosen]
    order = list(range(len(distinct)))
    random.shuffle(order)
    counts = [groups.count(group) for group in range(len(distinct))]
    starts, rows = np.empty(len(order) + 1, np.int32), np.empty(len(groups), np.int32)
    alive(place_rows, life)(
        int32s(order), int32s(counts), int32s(groups), np.empty(len(order), np.int32), starts, rows
    )
    expected = [[row for row, group in enumerate(groups) if group == wanted] for wanted in order]
    assert rows.tolist() == [row for part in expected for row in part]
    assert np.diff(starts).tolist() == [len(part) for part in expected]


@BOTH
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(-4, 4), st.integers(-2, 2)), max_size=70), min_size=1, max_size=4
    ),
    st.booleans(),
)
def test_rows_of_a_group_are_sorted_by_cursor_and_numbered_by_identity(
    life: str, groups: list[list[tuple[int, int]]], has_seq: bool
) -> None:
    flat = [cursor if has_seq else (cursor[0], 0) for group in groups for cursor in group]
    starts = int32s(np.cumsum([0, *map(len, groups)]).tolist())
    rows, scratch = np.arange(len(flat), dtype=np.int32), np.empty(len(flat), np.int32)
    ts = np.array([moment for moment, _ in flat], np.int64)
    seq = np.array([number for _, number in flat] if has_seq else [], np.int64)
    alive(sort_cursors, life)(rows, starts, ts, seq, scratch)
    expected: list[int] = []
    for start, stop in pairwise(starts):
        expected += sorted(range(start, stop), key=lambda row: (*flat[row], row))
    assert rows.tolist() == expected

    groups = [group for group in groups if group]  # a group without rows has no identities
    starts = int32s(np.cumsum([0, *map(len, groups)]).tolist())
    numbers, lasts = np.empty(len(flat), np.int32), np.empty(len(flat), np.int32)
    identity_starts = np.empty(len(starts), np.int32)
    found = alive(mark_identities, life)(rows, starts, ts, seq, numbers, lasts, identity_starts)
    identities: dict[tuple[int, tuple[int, int]], list[int]] = {}
    for group, (start, stop) in enumerate(pairwise(starts)):
        for row in expected[start:stop]:
            identities.setdefault((group, flat[row]), []).append(row)
    assert found == len(identities)
    assert lasts[:found].tolist() == [rows[-1] for rows in identities.values()]
    assert all(numbers[row] == number for number, rows in enumerate(identities.values()) for row in rows)
    per_group = [
        len({cursor for group, cursor in identities if group == wanted}) for wanted in range(len(groups))
    ]
    assert np.diff(identity_starts).tolist() == per_group


def test_a_long_disordered_group_is_sorted_by_merging() -> None:
    random = np.random.default_rng(5)
    ts, seq = random.integers(0, 500, 5000), random.integers(0, 5, 5000)
    rows, scratch = np.arange(5000, dtype=np.int32), np.empty(5000, np.int32)
    sort_cursors(rows, int32s([0, 5000]), ts, seq, scratch)
    assert rows.tolist() == np.lexsort((np.arange(5000), seq, ts)).tolist()
