"""Columns without the rows that go, and sorted rows by bucket, against plain Python; each kernel in both lives (K4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_lives import BOTH, alive, columns
from tidegate.kernels import run_merge, stream_time
from tidegate.kernels.windows import note_in_order, note_records, rise_by_one


@BOTH
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=20), st.booleans()), max_size=40))
def test_what_stays_moves_up(life: str, rows: list[tuple[bytes, bool]]) -> None:
    flags = np.array([stays for _, stays in rows], np.uint8)
    kept = [row for row, (_, stays) in enumerate(rows) if stays]
    words, halves = np.arange(len(rows)) * 7 - 50, np.arange(len(rows), dtype=np.int32) * -3
    into_words, into_halves = np.empty(len(kept) + 1, np.int64), np.empty(len(kept) + 1, np.int32)
    alive(stream_time.filter_words, life)(flags, words, into_words)
    alive(stream_time.filter_halves, life)(flags, halves, into_halves)
    assert into_words[:-1].tolist() == [7 * row - 50 for row in kept]
    assert into_halves[:-1].tolist() == [-3 * row for row in kept]
    data, bounds = columns([value for value, _ in rows])
    ends = np.empty(len(kept) + 1, np.int32)
    content = np.empty(alive(stream_time.filter_bounds, life)(flags, bounds, ends), np.uint8)
    alive(stream_time.filter_bytes, life)(flags, bounds, data, content)
    expected = columns([rows[row][0] for row in kept])
    assert (content.tobytes(), ends.tolist()) == (expected[0].tobytes(), expected[1].tolist())


@BOTH
@pytest.mark.parametrize("width", [8, 9, 12, 16])
@settings(max_examples=20, deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.integers(0, 5))
def test_values_of_one_width_move_up(life: str, width: int, stays: list[bool], first: int) -> None:
    data = np.random.default_rng(width).integers(0, 256, first + width * len(stays), np.uint8)
    flags, kept = np.array(stays, np.uint8), [row for row, stay in enumerate(stays) if stay]
    into = np.empty((len(kept) + 1) * width, np.uint8)
    alive(stream_time.filter_even, life)(flags, data, first, width, into)
    expected = b"".join(data[first + width * row :][:width].tobytes() for row in kept)
    assert into[: width * len(kept)].tobytes() == expected


@BOTH
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(-40, 40)), max_size=40, unique=True), st.randoms())
def test_sorted_rows_are_divided_by_bucket(life: str, rows: list[tuple[int, int]], random: Any) -> None:
    random.shuffle(rows)
    order = sorted(range(len(rows)), key=lambda row: rows[row])
    lines = np.array([rows[row][0] for row in order], np.int32)
    ts = np.array([moment for _, moment in rows], np.int64)
    buckets, counts = np.empty(len(rows), np.int32), np.zeros(9, np.int64)
    rows_in = np.array(order, np.int32)
    count = alive(run_merge.count_buckets, life)
    assert count(lines, rows_in, ts, 10, -40, buckets, counts) == len(rows)
    expected = [(moment + 40) // 10 for _, moment in rows]
    assert buckets.tolist() == [expected[row] for row in order]
    into = np.empty(len(rows), np.int32), np.empty(len(rows), np.int32)
    places = np.cumsum(counts) - counts
    alive(run_merge.divide_rows, life)(lines, rows_in, buckets, places, *into)
    by_bucket = sorted(range(len(rows)), key=lambda at: expected[order[at]])
    assert into[0].tolist() == [int(lines[at]) for at in by_bucket]
    assert into[1].tolist() == [order[at] for at in by_bucket]
    if len(rows) > 1:
        backwards = rows_in[::-1].copy(), lines[::-1].copy()
        again = count(backwards[1], backwards[0], ts, 10, -40, buckets, np.zeros(9, np.int64))
        assert again == 1, "the second row does not ascend"


@BOTH
@pytest.mark.parametrize(
    ("keys", "hashes", "answer"),
    [
        ([], [], 0),
        ([b"b", b"a", b"b"], [1, 2, 2], 3),
        ([b"b", b"b"], [2, 2], 1),
        ([b"a", b"b", b"a"], [1, 2, 2], 2),
        ([b"a", b"b"], [2, 1], 1),
    ],
)
def test_keys_that_do_not_ascend_are_told(
    life: str, keys: list[bytes], hashes: list[int], answer: int
) -> None:
    assert alive(run_merge.first_disorder, life)(np.array(hashes, np.uint64), *columns(keys)) == answer


@BOTH
@pytest.mark.parametrize("width", [0, 1, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 80])
def test_keys_of_every_width_are_copied_whole(life: str, width: int) -> None:
    chance = np.random.default_rng(width)
    keys = [chance.bytes(width) for _ in range(9)]
    data, bounds = columns([b"xyz", *keys])
    data, bounds = data.copy(), bounds[1:].copy()
    lines = np.array([3, 3, 0, 8, 5], np.int32)
    ends = np.empty(6, np.int32)
    content = np.empty(alive(run_merge.measure_keys, life)(lines, bounds, ends), np.uint8)
    alive(run_merge.copy_keys, life)(lines, data, bounds, ends, content)
    expected = b"".join(keys[line] for line in lines)
    assert (content.tobytes(), ends.tolist()) == (expected, [width * number for number in range(6)])
    if 8 <= width <= 16:
        even = np.empty(5 * width, np.uint8)
        alive(run_merge.copy_even_keys, life)(lines, data, int(bounds[0]), width, even)
        assert even.tobytes() == expected


@BOTH
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), *[st.integers(-(2**63), 2**63 - 1)] * 3), min_size=1, max_size=30),
    st.booleans(),
)
def test_notes_of_groups_in_order_are_those_of_any_groups(
    life: str, rows: list[tuple[int, int, int, int]], is_plain: bool
) -> None:
    groups = np.cumsum([0, *(each[0] == 1 for each in rows[1:])], dtype=np.int32)
    ones, *others = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    given_ones = ones[:0] if is_plain else ones
    count = int(groups[-1]) + 1
    made = [np.empty(count, np.int64) for _ in range(4)]
    expected = [np.empty(count, np.int64) for _ in range(4)]
    alive(note_in_order, life)(given_ones, *others, groups, *made)
    note_records(given_ones, *others, groups, np.zeros(4 * count, np.int64), *expected)
    assert [each.tolist() for each in made] == [each.tolist() for each in expected]


@BOTH
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), max_size=30), st.lists(st.integers(0, 3), max_size=30))
def test_lines_side_by_side_begin_where_they_change(life: str, sizes: list[int], steps: list[int]) -> None:
    lines = np.repeat(np.arange(len(sizes)) * 3, sizes).astype(np.int32)
    starts = np.empty(len(lines) + 1, np.int32)
    found = alive(run_merge.list_starts, life)(lines, starts)
    assert starts[: found + 1].tolist() == np.cumsum([0, *sizes]).tolist()
    numbers = np.cumsum(np.array([5, *steps, -1][: len(steps) + 1 + len(sizes) % 2]), dtype=np.int32)
    expected = all(0 <= step <= 1 for step in np.diff(numbers).tolist())
    assert alive(rise_by_one, life)(numbers) == expected
