"""Grouping against dictionaries and Python's sort; each kernel compiled and in plain Python (K4)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.kernels.group_order import place_groups, settle_hashes
from tidegate.kernels.grouping import (
    EMPTY,
    GROUP_WORDS,
    group_rows,
    mark_identities,
    move_groups,
    number_rows,
    place_rows,
    sort_cursors,
)

BOTH = pytest.mark.parametrize("life", ["compiled", "plain"])
WIDTH = 10


def alive(kernel: Any, life: str) -> Any:
    return kernel if life == "compiled" else kernel.py_func


def int32s(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, np.int32)


def columns(keys: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    return np.frombuffer(b"".join(keys), np.uint8), int32s(np.cumsum([0, *map(len, keys)]).tolist())


def twin_groups(keys: list[bytes], ts: list[int]) -> tuple[list[int], dict[tuple[int, bytes], int]]:
    numbers: dict[tuple[int, bytes], int] = {}
    rows = [
        numbers.setdefault((moment // WIDTH * WIDTH, key), len(numbers))
        for key, moment in zip(keys, ts, strict=True)
    ]
    return rows, numbers


a_key = st.binary(max_size=3) | st.sampled_from(
    [b"a" * 8, b"ab" * 8, b"ab" * 9, b"ab" * 4 + b"c" + b"ab" * 4, b"ab" * 4 + b"d" + b"ab" * 4]
)
rows_in = st.lists(st.tuples(a_key, st.integers(-35, 35)), min_size=1, max_size=60)


@BOTH
@settings(max_examples=60, deadline=None)
@given(rows_in, st.sampled_from([0, 1, 3, 3 << 62, 2**64 - 1]), st.booleans())
def test_rows_are_grouped_by_bucket_and_key_whatever_the_hashes(
    life: str, rows: list[tuple[bytes, int]], mask: int, has_seq: bool
) -> None:
    keys, ts = [key for key, _ in rows], np.array([moment for _, moment in rows], np.int64)
    hashes = np.array([sum(key) * 0x9E3779B97F4A7C15 & mask for key in keys], np.uint64)
    seq = np.array([len(key) % 2 + moment % 3 for key, moment in rows] if has_seq else [], np.int64)
    count, data = len(rows), columns(keys)
    row_bits, bucket_bits = (count - 1).bit_length(), 3
    groups, marks = np.empty(count, np.int32), np.empty(count, np.uint64)
    found_groups, progress = np.empty(GROUP_WORDS * count, np.int64), np.zeros(3, np.int64)
    table = np.full(2, EMPTY, np.int64)
    with np.errstate(over="ignore"):
        while (
            alive(group_rows, life)(
                *data, hashes, ts, seq, WIDTH, -40, bucket_bits, row_bits,
                table, count, progress, groups, found_groups, marks,
            ) < count
        ):  # fmt: skip
            table = np.full(2 * len(table), EMPTY, np.int64)
            alive(move_groups, life)(hashes, found_groups, int(progress[1]), WIDTH, table)
    expected, numbers = twin_groups(keys, ts.tolist())
    found = len(numbers)
    assert groups.tolist() == expected
    assert int(progress[1]) == found
    cursors = {
        (group, moment, int(seq[row]) if has_seq else 0)
        for row, (group, moment) in enumerate(zip(expected, ts.tolist(), strict=True))
    }
    assert bool(progress[2]) is (len(cursors) > found)

    lines, places, ends = np.empty(found, np.int32), np.empty(found, np.int32), np.zeros(8, np.int64)
    is_placed = alive(place_groups, life)(
        *data, hashes, np.sort(marks[:found]), row_bits, bucket_bits, groups, lines, places, ends
    )
    if not is_placed:
        assert mask != 2**64 - 1
        return
    firsts = [expected.index(group) for group in range(found)]
    order = sorted(
        range(found), key=lambda each: (ts[firsts[each]] // WIDTH, hashes[firsts[each]], keys[firsts[each]])
    )
    assert lines.tolist() == [firsts[group] for group in order]
    assert [order[place] for place in places] == list(range(found))
    for index in range(8):
        inside = [bucket for bucket, _ in numbers if (bucket + 40) // WIDTH <= index]
        if any((bucket + 40) // WIDTH == index for bucket, _ in numbers):
            assert ends[index] == len(inside)
        else:
            assert ends[index] == 0

    row_numbers, lasts = np.empty(count, np.int32), np.empty(found, np.int32)
    alive(number_rows, life)(places, groups, row_numbers, lasts)
    assert [order[number] for number in row_numbers] == expected
    assert lasts.tolist() == [count - 1 - expected[::-1].index(group) for group in order]


@BOTH
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.binary(max_size=3)), min_size=1, unique=True)
)
def test_keys_with_one_hash_are_put_in_order_of_their_bytes(
    life: str, groups: list[tuple[int, int, bytes]]
) -> None:
    lines = int32s(sorted(range(len(groups)), key=lambda group: groups[group][:2]))
    hashes = np.array([hash_ for _, hash_, _ in groups], np.uint64)
    buckets = np.array([groups[line][0] for line in lines], np.int64)
    alive(settle_hashes, life)(*columns([key for _, _, key in groups]), hashes, buckets, lines)
    assert [groups[line] for line in lines] == sorted(groups)


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
