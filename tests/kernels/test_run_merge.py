"""Directories merged, chosen from and expanded, against plain lists; compiled and in plain Python (K4)."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_lives import BOTH, alive, columns, int32s
from tidegate.kernels.run_merge import (
    choose_lines,
    copy_keys,
    drop_rows,
    expand_lines,
    gather_words,
    join_lines,
    measure_keys,
    merge_lines,
    settle_keys,
)


def weak(key: bytes) -> int:
    """A hash under which most keys meet."""
    return len(key) % 2 * 2**63


directories = st.lists(
    st.dictionaries(st.binary(max_size=2), st.integers(1, 3), max_size=12).map(
        lambda keys: sorted(keys.items(), key=lambda line: (weak(line[0]), line[0]))
    ),
    min_size=1,
    max_size=6,
)


@BOTH
@settings(max_examples=80, deadline=None)
@given(directories)
def test_directories_merge_by_hash_then_key_then_run(life: str, runs: list[list[tuple[bytes, int]]]) -> None:
    lines = [line for run in runs for line in run]
    keys = [key for key, _ in lines]
    hashes = np.array([weak(key) for key in keys], np.uint64)
    run_starts = np.cumsum([0, *map(len, runs)]).astype(np.int64)
    orders = np.empty(len(lines), np.int32), np.empty(len(lines), np.int32)
    sorted_hashes = hashes.copy(), np.empty(len(lines), np.uint64)
    turn = alive(merge_lines, life)(sorted_hashes[0], orders[0], run_starts, sorted_hashes[1], orders[1])
    repeats = np.empty(len(lines), np.uint8)
    alive(settle_keys, life)(orders[turn], sorted_hashes[turn], *columns(keys), repeats)
    expected = sorted(range(len(lines)), key=lambda line: (weak(keys[line]), keys[line], line))
    assert orders[turn].tolist() == expected

    row_starts = np.cumsum([0, *(rows for _, rows in lines)])
    chosen, starts = np.empty(len(lines), np.int32), np.empty(len(lines) + 1, np.int32)
    rows = np.empty(int(row_starts[-1]), np.int32)
    count = alive(join_lines, life)(orders[turn], repeats, int32s(row_starts.tolist()), chosen, starts, rows)
    by_key: dict[bytes, list[int]] = {}
    for line in expected:
        by_key.setdefault(keys[line], []).extend(range(row_starts[line], row_starts[line + 1]))
    assert [keys[line] for line in chosen[:count]] == list(by_key)
    assert rows.tolist() == [row for part in by_key.values() for row in part]
    assert np.diff(starts[: count + 1]).tolist() == [len(part) for part in by_key.values()]


@BOTH
@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=20))
def test_dropped_rows_take_empty_keys_with_them(life: str, keys: list[list[bool]]) -> None:
    marks = [mark for key in keys for mark in key]
    rows = np.arange(len(marks), dtype=np.int32)
    starts, lines = int32s(np.cumsum([0, *map(len, keys)]).tolist()), np.arange(len(keys), dtype=np.int32)
    kept_rows, kept_keys = alive(drop_rows, life)(rows, starts, lines, len(keys), np.array(marks))
    assert rows[:kept_rows].tolist() == [row for row, mark in enumerate(marks) if not mark]
    assert lines[:kept_keys].tolist() == [line for line, key in enumerate(keys) if not all(key)]
    assert np.diff(starts[: kept_keys + 1]).tolist() == [key.count(False) for key in keys if not all(key)]


@BOTH
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3))), st.sets(st.integers(0, 9)), st.booleans())
def test_lines_are_chosen_by_hash_and_expanded_to_rows(
    life: str, lines: list[tuple[int, int]], chosen: set[int], keep: bool
) -> None:
    lines = sorted(lines)
    row_starts = np.cumsum([0, *(rows for _, rows in lines)])
    picked, starts = np.empty(len(lines), np.int32), np.empty(len(lines) + 1, np.int32)
    hashes = np.array([hash_ for hash_, _ in lines], np.uint64)
    keys, count = alive(choose_lines, life)(
        hashes, int32s(row_starts.tolist()), np.array(sorted(chosen), np.uint64), int(keep), picked, starts
    )
    expected = [line for line, (hash_, _) in enumerate(lines) if (hash_ in chosen) is keep]
    assert picked[:keys].tolist() == expected
    rows = np.empty(count, np.int32)
    alive(expand_lines, life)(picked[:keys], int32s(row_starts.tolist()), rows)
    assert rows.tolist() == [
        row for line in expected for row in range(row_starts[line], row_starts[line + 1])
    ]
    assert np.diff(starts[: keys + 1]).tolist() == [lines[line][1] for line in expected]


@BOTH
@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=10), min_size=1, max_size=20), st.data())
def test_keys_and_words_are_copied_from_their_lines(life: str, keys: list[bytes], data: Any) -> None:
    lines = data.draw(st.lists(st.integers(0, len(keys) - 1), max_size=20))
    content, bounds = columns(keys)
    out_bounds = np.empty(len(lines) + 1, np.int32)
    size = alive(measure_keys, life)(int32s(lines), bounds, out_bounds)
    out = np.empty(size, np.uint8)
    alive(copy_keys, life)(int32s(lines), content, bounds, out_bounds, out)
    assert bytes(out) == b"".join(keys[line] for line in lines)
    into = np.empty(len(lines), np.int64)
    alive(gather_words, life)(np.arange(len(keys)) - 3, int32s(lines), into)
    assert into.tolist() == [line - 3 for line in lines]
