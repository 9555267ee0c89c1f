"""A batch that storage takes in pieces sends on what windows hold with all of it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tidegate.storage import StorageConfig, WorkerStorageRuntime
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.aggregates.folds import resolve
from tidegate.windows.events import EventBatch
from tidegate.windows.kinds import Hopping, Tumbling
from tidegate.windows.operators.base import Moment, WindowRows
from tidegate.windows.operators.windows import WindowOperator

ROWS, KEYS = 900, 20


def batch(number: int) -> EventBatch:
    chance = np.random.default_rng(number)
    keys = chance.integers(0, KEYS, ROWS)
    values = pa.record_batch(
        {
            "amount": pa.array(chance.integers(1, 1000, ROWS) / 10),
            "text": pa.array([f"{n:03}" for n in chance.integers(0, 999, ROWS)]),
        }
    )
    return EventBatch(
        key=pa.array([b"key-%d" % key for key in keys], pa.binary()),
        ts=60_000 * number + chance.integers(0, 200_000, ROWS),
        offset=ROWS * number + np.arange(ROWS),
        partition=np.zeros(ROWS, np.int32),
        stream_time=np.full(ROWS, -1),
        values=values,
    )


@pytest.mark.parametrize(
    "kind", [Tumbling("1m", grace="1h"), Hopping("2m", "1m", grace="1h")], ids=["1", "2"]
)
@pytest.mark.parametrize("largest", [1 << 22, 1 << 14])
def test_the_last_update_of_a_window_is_the_window(kind: Hopping, largest: int) -> None:
    aggregates = resolve(
        {"n": agg.count(), "total": agg.sum("amount"), "most": agg.max("text")}, batch(0).values.schema
    )
    config = StorageConfig.for_tests(max_batch_bytes=largest)
    operator = WindowOperator(
        WorkerStorageRuntime.open(config, MemoryBackend()), "task", "totals", kind, aggregates
    )
    last = {}
    for number in range(4):
        rows = operator.process(batch(number), Moment(0)).rows
        assert isinstance(rows, WindowRows)
        columns = rows.to_batch().to_pylist()
        last.update({(each["key"], each["window_start"]): each for each in columns})
    table = {(each["key"], each["window_start"]): each for each in operator.windows().to_batch().to_pylist()}
    assert last == table
