"""Thousands of keys that were made to share one hash: found, merged and read as any others, in about as much time.

Before a batch's rows are grouped by sorting, its hash table must have noticed; so the numbers here are above that.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tidegate.kernels.grouping import CROWDED
from tidegate.storage.reading.plan import RangeRequest
from tidegate.storage.runs import building
from tidegate.storage.runs.building import MOST_STEPS, build_runs
from tidegate.storage.spec import Merge
from tidegate.testing.storage import keys_of_one_hash
from tidegate.testing.workers import TASK, Row, Worker, rows_batch, store

COUNT = 4 * MOST_STEPS


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
        worker.run(worker.runtime.compacting(TASK, state, bucket))
    assert worker.rows(state) == found
    assert worker.rows(state, keys=keys) == found, "all of them, looked up"
    worker.run(worker.runtime.dumping(TASK, state, state.index.all_buckets(), evict=True))
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


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the grouping kernel answers from now on."""
    answers: list[int] = []
    kernel = building.group_rows  # type: ignore[attr-defined]

    def answering(*given: object) -> int:
        answers.append(kernel(*given))
        return answers[-1]

    monkeypatch.setattr(building, "group_rows", answering)
    return answers


def test_the_runs_of_flooded_and_unflooded_grouping_are_the_same(
    keys: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [b"ordinary%d" % number for number in range(500)]
    batch = rows_batch(Merge.LAST, spread([*keys, *others, *keys[:50]]))
    spec = store(Merge.LAST).index.spec
    answers = watched(monkeypatch)
    flooded = build_runs(spec, batch, first_seq=None, max_rows=300)
    assert CROWDED in answers and answers[-1] == batch.num_rows
    answers.clear()
    monkeypatch.setattr(building, "MOST_STEPS", batch.num_rows)
    plain = build_runs(spec, batch, first_seq=None, max_rows=300)
    assert CROWDED not in answers
    assert [(run.bucket, run.directory, run.rows) for run in flooded] == [
        (run.bucket, run.directory, run.rows) for run in plain
    ]


def test_half_a_million_ordinary_keys_are_no_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = watched(monkeypatch)
    count = 500_000
    numbers = np.arange(count, dtype=np.int64)
    batch = pa.RecordBatch.from_pydict(
        {
            "key": pa.array(numbers).cast(pa.string()).cast(pa.binary()),
            "ts": pa.array(numbers % 5000),
            "value": pa.array(numbers),
        }
    )
    runs = build_runs(store().index.spec, batch, first_seq=0, max_rows=count)
    assert sum(run.row_count for run in runs) == count and CROWDED not in answers
