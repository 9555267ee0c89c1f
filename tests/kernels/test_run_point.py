"""A point read finds what the general search finds, in as many stretches."""

from __future__ import annotations

import numpy as np
import pytest

from tidegate.clock import ManualClock
from tidegate.kernels.run_lookup import point_lookup, point_read
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import AppendBatch
from tidegate.storage.lookup import span_of
from tidegate.storage.memory.pool import WorkerMemoryPool, WriteBuffer
from tidegate.storage.runs.build import build_runs
from tidegate.storage.spec import Merge
from workers import rows_batch, store


@pytest.mark.filterwarnings("ignore:overflow encountered")  # plain Python wraps hashes around, and says so
@pytest.mark.parametrize("merge", [Merge.APPEND, Merge.LAST])
@pytest.mark.parametrize("seed", range(6))
def test_one_key_is_found_as_the_general_search_finds_it(seed: int, merge: Merge) -> None:
    chance, index = np.random.default_rng(seed), store(merge).index
    cache = WriteBuffer(WorkerMemoryPool(StorageConfig.for_tests(), ManualClock()))
    for number in range(4):
        keys, times = chance.integers(0, 20, 60), chance.integers(0, 3000, 60)
        deleted = chance.random(60) < (0.3 if merge is Merge.LAST else 0)
        rows = [
            (b"key-%d" % key, int(ts), None if gone else at)
            for at, (key, ts, gone) in enumerate(zip(keys, times, deleted, strict=True))
        ]
        seq = 60 * number if merge is Merge.APPEND else None
        for run in build_runs(index.spec, rows_batch(merge, rows), first_seq=seq, max_rows=1000):
            bounds = (run.bucket, cache.put_all("t", [run])[0], run.row_count, 1, 1, run.min_ts, run.max_ts)
            index.insert([AppendBatch(*bounds)])
    span = span_of(index.query(0, 3000))
    kind = 0 if merge is Merge.APPEND else 1
    found = 0
    for key in [b"key-%d" % number for number in range(22)] + [b""]:
        for first, last in ((0, 5000), (500, 1500), (1000, 1000), (4000, 5000)):
            hashed, expected = np.empty(1, np.uint64), np.empty(300, np.int32)
            data = np.frombuffer(key, np.uint8) if key else np.empty(0, np.uint8)
            ties = np.empty(0, np.int32)
            count, _, _, total = point_lookup(
                span.flat, data, np.uint64(0), 0, first, last, kind, hashed, expected, ties
            )
            for read in (point_read, point_read.py_func):
                out = np.empty(300, np.int32)
                again, rows_found, key_hash = read(span.flat, key, first, last, kind, out)
                assert (again, rows_found) == (count, total)
                assert int(key_hash) % 2**64 == int(hashed[0])
                assert out[: 3 * count].tolist() == expected[: 3 * count].tolist()
            if count > 1:
                short = point_read(span.flat, key, first, last, kind, np.empty(3, np.int32))
                assert short[0] >= count, "room for one stretch only: it says how much is needed"
            found += count
    assert found > 50
