"""Thousands of keys that were made to share one hash: found, merged and read as any others, in about as much time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from maintenance_steps import compacting, dumping
from storage_oracles import keys_of_one_hash
from tidegate.kernels import sorting
from tidegate.storage.reader import RangeRequest
from tidegate.storage.runs.build import build_runs
from tidegate.storage.runs.columns import binary_parts
from tidegate.storage.spec import Merge
from workers import TASK, Row, Worker, rows_batch, store

COUNT = 1024


@pytest.fixture(scope="module")
def keys() -> list[bytes]:
    made = keys_of_one_hash(COUNT)
    np.random.default_rng(7).shuffle(made)
    return made


def spread(keys: list[bytes], start: int = 0) -> list[Row]:
    """A row for each key, over three buckets."""
    return [(key, 1000 * (place % 3), start + place) for place, key in enumerate(keys)]


@pytest.mark.parametrize("merge", list(Merge))
def test_keys_of_one_hash_are_grouped_merged_and_read_like_others(merge: Merge, keys: list[bytes]) -> None:
    """WS-INV-25"""
    worker = Worker()
    state = worker.attach(store(merge))
    first, second = spread(keys), spread(keys[: COUNT // 2], start=COUNT)
    worker.append(state, [*first, *first[:10]])
    worker.append(state, second)
    found = worker.rows(state)
    if merge is Merge.APPEND:
        assert found == sorted([*first, *first[:10], *second])
    elif merge is Merge.LAST:
        assert found == sorted({(key, ts): (key, ts, value) for key, ts, value in [*first, *second]}.values())
    for bucket in state.index.all_buckets():
        worker.run(compacting(worker.runtime, TASK, state, bucket))
    assert worker.rows(state) == found
    assert worker.rows(state, keys=keys) == found, "all of them, looked up"
    worker.run(dumping(worker.runtime, TASK, state, state.index.all_buckets(), evict=True))
    assert worker.rows(state, keys=keys) == found
    few = [keys[5], keys[COUNT - 1], b"not there"]
    assert worker.rows(state, keys=few) == [row for row in found if row[0] in few]


def test_each_key_of_one_hash_is_found_alone_and_its_neighbours_are_not(keys: list[bytes]) -> None:
    worker = Worker()
    state = worker.attach(store())
    present, absent = sorted(keys)[::2], sorted(keys)[1::2]
    worker.append(state, [(key, 1, place) for place, key in enumerate(present)])
    reader = worker.runtime.reader()
    for place in (0, 1, 7, 8, 9, 200, len(present) - 1):
        for key, expected in ((present[place], [place]), (absent[place], [])):
            with reader.load(reader.plan(TASK, state, [RangeRequest(key)])) as loaded:
                assert loaded.to_table().column("value").to_pylist() == expected


def test_a_flood_is_put_in_the_order_of_its_bytes_like_any_other_keys(keys: list[bytes]) -> None:
    others = [b"ordinary%d" % number for number in range(500)]
    given = spread([*keys, *others, *keys[:50]])
    runs = build_runs(
        store(Merge.LAST).index.spec, rows_batch(Merge.LAST, given), first_seq=None, max_rows=300
    )
    last = {(key, ts): value for key, ts, value in given}
    expected = sorted(last, key=lambda each: (each[1], xxhash.xxh64_intdigest(each[0]), each[0]))
    made = [
        (key, ts, value)
        for run in runs
        for key, ts, value in zip(
            run.row_keys().to_pylist(), run.ts.tolist(), run.rows.column("value").to_pylist(), strict=True
        )
    ]
    assert made == [(*each, last[each]) for each in expected]


def test_a_flood_costs_a_sort_and_not_a_comparison_of_all_with_all(keys: list[bytes]) -> None:
    """Comparing each with each would be 2^24 comparisons for these; sorting them compares some 2^16 times."""
    column = pa.array(keys * 4, pa.binary())
    parts = binary_parts(column)
    compared = 0

    def counting(keys: Any, left: Any, right: Any) -> bool:
        nonlocal compared
        compared += 1
        hashes = keys[2]
        return bool((hashes[left], column[int(left)].as_py()) > (hashes[right], column[int(right)].as_py()))

    rows, starts = np.empty(len(column), np.int32), np.empty(len(column) + 1, np.int32)
    marks = np.arange(len(column), dtype=np.uint64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorting, "_is_above", counting)
        arrange = sorting.arrange_rows.py_func
        found = arrange(marks, 16, *parts, np.full(len(column), 5, np.uint64), rows, starts)
    assert found == len(keys)
    assert compared < 20 * len(column)
