"""`reader.join` and `writer.append_sorted`: the same rows as planned loads and plain appends, for very many keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tidegate.errors import InvalidError
from tidegate.storage.index.state import PlainState
from tidegate.storage.reading.plan import All, RangeRequest, RowsTail, Time
from tidegate.storage.runs.hashing import hash_keys
from tidegate.storage.spec import Merge
from tidegate.testing.storage import keys_of_one_hash
from tidegate.testing.workers import TASK, Row, Worker, store


def joined(worker: Worker, state: PlainState, keys: list[bytes], bounds: Any = All()) -> list[Row]:  # noqa: B008
    column = pa.array(keys, pa.binary())
    hashes = hash_keys(column)
    order = np.argsort(hashes, kind="stable")
    found = worker.runtime.reader().join(TASK, state, column.take(pa.array(order)), hashes[order], bounds)
    names = ("ts", "value")
    rows = zip(*(found.rows.column(name).to_pylist() for name in names), strict=True)
    return [(keys[order[number]], *row) for number, row in zip(found.numbers.tolist(), rows, strict=True)]


def loaded(worker: Worker, state: PlainState, keys: list[bytes], bounds: Any = All()) -> list[Row]:  # noqa: B008
    reader = worker.runtime.reader()
    with reader.load(reader.plan(TASK, state, [RangeRequest(keys, bounds)])) as found:
        table = found.to_table()
    return list(zip(*(table.column(name).to_pylist() for name in ("key", "ts", "value")), strict=True))


@pytest.mark.parametrize("merge", [Merge.LAST, Merge.APPEND])
@pytest.mark.parametrize("seed", range(6))
def test_a_join_finds_what_a_load_finds(merge: Merge, seed: int) -> None:
    chance = np.random.default_rng(seed)
    worker, state = Worker(), store(merge)
    worker.attach(state)
    names = [b"key-%d" % number for number in range(60)] + keys_of_one_hash(3)
    for _ in range(12):
        rows = [
            (
                names[chance.integers(len(names))],
                int(chance.integers(0, 4000)),
                None if merge is Merge.LAST and chance.random() < 0.2 else int(chance.integers(100)),
            )
            for _ in range(int(chance.integers(1, 60)))
        ]
        worker.append(state, rows)
        buckets = state.index.all_buckets()
        if chance.integers(2):
            worker.run(worker.runtime.dumping(TASK, state, buckets, evict=bool(chance.integers(2))))
        if chance.integers(2):
            worker.run(worker.runtime.compacting(TASK, state, buckets[int(chance.integers(len(buckets)))]))
        asked = [name for name in names if chance.random() < chance.choice([0.05, 0.9])] + [b"nobody"]
        bounds = All() if chance.integers(2) else Time(500, 2500)
        assert sorted(joined(worker, state, asked, bounds)) == sorted(loaded(worker, state, asked, bounds))
    assert not worker.runtime.pins.pinned(TASK), "nothing is held after a join"


def test_rows_of_a_join_ascend_by_key_and_time() -> None:
    worker, state = Worker(), store(Merge.LAST)
    worker.attach(state)
    worker.append(state, [(b"a", 3000, 1), (b"b", 10, 2)])
    worker.append(state, [(b"a", 10, 3), (b"a", 3000, 4)])
    found = joined(worker, state, [b"a", b"b"])
    assert [row for row in found if row[0] == b"a"] == [(b"a", 10, 3), (b"a", 3000, 4)]


def test_what_cannot_be_joined_is_refused() -> None:
    worker = Worker()
    fold, last = worker.attach(store(Merge.FOLD)), worker.attach(store(Merge.LAST, "last"))
    keys = pa.array([b"a", b"b"], pa.binary())
    hashes = np.array([1, 2], np.uint64)
    reader = worker.runtime.reader()
    with pytest.raises(InvalidError, match="fold"):
        reader.join(TASK, fold, keys, hashes)
    with pytest.raises(InvalidError, match="ascend"):
        reader.join(TASK, last, keys, hashes[::-1].copy())
    with pytest.raises(InvalidError, match="hashes"):
        reader.join(TASK, last, keys, hashes[:1])
    with pytest.raises(InvalidError, match="tail"):
        reader.join(TASK, last, keys, hashes, RowsTail(5, 1))


def sorted_batch(rows: list[Row]) -> tuple[pa.RecordBatch, np.ndarray[Any, Any]]:
    hashes = hash_keys(pa.array([row[0] for row in rows], pa.binary()))
    order = sorted(range(len(rows)), key=lambda at: (hashes[at], rows[at][0], rows[at][1]))
    columns = {
        "key": pa.array([rows[at][0] for at in order], pa.binary()),
        "ts": pa.array([rows[at][1] for at in order], pa.int64()),
        "value": pa.array([rows[at][2] for at in order], pa.int64()),
    }
    return pa.RecordBatch.from_pydict(columns), hashes[order]


@pytest.mark.parametrize("settings", [{}, {"max_run_rows": 7}, {"max_batch_bytes": 1 << 12}])
def test_sorted_rows_make_the_runs_that_plain_rows_make(settings: dict[str, int]) -> None:
    chance = np.random.default_rng(3)
    names = [b"key-%d" % number for number in range(50)] + keys_of_one_hash(2)
    rows = [
        (names[at % len(names)], int(chance.integers(-2000, 3000)) * 10 + at % 10, at) for at in range(200)
    ]
    rows = list({row[:2]: row for row in rows}.values())
    one, other = Worker(**settings), Worker(**settings)
    plain, given = one.attach(store(Merge.LAST)), other.attach(store(Merge.LAST))
    one.append(plain, rows)
    batch, hashes = sorted_batch(rows)
    given.index.insert(other.runtime.writer().append_sorted(TASK, given, batch, hashes))
    assert other.rows(given) == one.rows(plain) == sorted(rows)
    if "max_batch_bytes" not in settings:
        for bucket in plain.index.all_buckets():
            made, expected = given.index.snapshot(bucket), plain.index.snapshot(bucket)
            assert made is not None and expected is not None
            for mine, theirs in zip(made.runs, expected.runs, strict=True):
                assert mine.hot is not None and theirs.hot is not None
                assert mine.hot.run.rows.equals(theirs.hot.run.rows)
                assert mine.hot.run.directory.equals(theirs.hot.run.directory)
                assert mine.hot.run.nbytes == theirs.hot.run.nbytes
        assert other.runtime.backlog.used == one.runtime.backlog.used


def test_rows_that_are_not_sorted_or_not_of_the_store_are_refused_and_nothing_is_taken() -> None:
    worker = Worker()
    state, fold = worker.attach(store(Merge.LAST)), worker.attach(store(Merge.FOLD, "fold"))
    batch, hashes = sorted_batch([(b"a", 1, 1), (b"b", 1, 2), (b"c", 1, 3)])
    writer = worker.runtime.writer()
    with pytest.raises(InvalidError, match="row 1 does not ascend"):
        writer.append_sorted(TASK, state, batch.take(pa.array([2, 1, 0])), hashes[::-1].copy())
    with pytest.raises(InvalidError, match="kind last"):
        writer.append_sorted(TASK, fold, batch, hashes)
    with pytest.raises(InvalidError, match="wanted are"):
        writer.append_sorted(TASK, state, batch.drop_columns(["value"]), hashes)
    with pytest.raises(InvalidError, match="hash each"):
        writer.append_sorted(TASK, state, batch, hashes[:2])
    assert writer.append_sorted(TASK, state, batch.slice(0, 0), hashes[:0]) == []
    assert worker.runtime.backlog.used == 0 and worker.runtime.pool.total == 0
