"""`reader.join` and `writer.append_sorted`: the same rows as planned loads and plain appends, for very many keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from maintenance_steps import compacting, dumping
from storage_oracles import keys_of_one_hash
from tidegate.errors import InvalidError
from tidegate.storage.index import PlainState
from tidegate.storage.reader import All, RangeRequest, Time
from tidegate.storage.runs.build import SortedRows
from tidegate.storage.runs.columns import hash_keys
from tidegate.storage.spec import Merge
from workers import TASK, Row, Worker, store


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
            worker.run(dumping(worker.runtime, TASK, state, buckets, evict=bool(chance.integers(2))))
        if chance.integers(2):
            worker.run(compacting(worker.runtime, TASK, state, buckets[int(chance.integers(len(buckets)))]))
        asked = [name for name in names if chance.random() < chance.choice([0.05, 0.9])] + [b"nobody"]
        bounds = All() if chance.integers(2) else Time(500, 2500)
        assert sorted(joined(worker, state, asked, bounds)) == sorted(loaded(worker, state, asked, bounds))
    assert not worker.runtime._parts.pins.pinned(TASK), "nothing is held after a join"


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


def sorted_rows(rows: list[Row]) -> SortedRows:
    keys = sorted({row[0] for row in rows}, key=lambda key: (xxhash.xxh64_intdigest(key), key))
    column = pa.array(keys, pa.binary())
    order = sorted(range(len(rows)), key=lambda at: (keys.index(rows[at][0]), rows[at][1]))
    columns = {
        "ts": pa.array([row[1] for row in rows], pa.int64()),
        "value": pa.array([row[2] for row in rows], pa.int64()),
    }
    lines = np.array([keys.index(rows[at][0]) for at in order], np.int32)
    return SortedRows(
        column, hash_keys(column), pa.RecordBatch.from_pydict(columns), lines, np.array(order, np.int32)
    )


@pytest.mark.parametrize("settings", [{}, {"max_run_rows": 7}, {"max_batch_bytes": 1 << 12}])
@pytest.mark.parametrize("far", [1, 10**9], ids=["near", "far apart"])
@pytest.mark.parametrize("name", [b"key-%d", b"a key of some length %d", b"ten-%06d"])
def test_sorted_rows_make_the_runs_that_plain_rows_make(
    settings: dict[str, int], far: int, name: bytes
) -> None:
    chance = np.random.default_rng(3)
    names = [name % number for number in range(50)] + ([] if b"ten" in name else keys_of_one_hash(2))
    rows = [
        (names[at % len(names)], int(chance.integers(-2000, 3000)) * 10 * far + at % 10, at)
        for at in range(200)
    ]
    rows = list({row[:2]: row for row in rows}.values())
    one, other = Worker(**settings), Worker(**settings)
    plain, given = one.attach(store(Merge.LAST)), other.attach(store(Merge.LAST))
    one.append(plain, rows)
    given.index.insert(other.runtime.writer().append_sorted(TASK, given, sorted_rows(rows)))
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
    rows = sorted_rows([(b"a", 1, 1), (b"b", 1, 2), (b"c", 1, 3)])
    writer = worker.runtime.writer()

    def refused(match: str, given: SortedRows, to: Any = state) -> None:
        with pytest.raises(InvalidError, match=match):
            writer.append_sorted(TASK, to, given)

    refused("row 1 does not ascend", rows._replace(lines=rows.lines[::-1].copy()))
    refused("row 1 does not ascend", rows._replace(lines=np.zeros(3, np.int32)))
    backwards = rows.keys.take(pa.array([2, 1, 0]))
    refused("key 1 does not ascend", rows._replace(keys=backwards, hashes=hash_keys(backwards)))
    refused("kind last", rows, fold)
    refused("wanted are", rows._replace(columns=rows.columns.drop_columns(["value"])))
    refused("hash each", rows._replace(hashes=rows.hashes[:2]))
    refused("those that are there", rows._replace(order=rows.order + np.int32(1)))
    refused("those that are there", rows._replace(order=rows.order[:2]))
    lowest = rows.columns.set_column(0, "ts", pa.array([-(2**63), 1, 2]))
    refused("before 64-bit time", rows._replace(columns=lowest))
    assert worker.runtime.backlog.used == 0
    assert writer.append_sorted(TASK, state, rows.slice(0, 0)) == []
