"""Events that go on, whatever their columns are."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tidegate.windows.events import EventBatch, keep_events

ROWS = 40


def events() -> EventBatch:
    chance = np.random.default_rng(5)
    texts = ["x" * (number % 19) for number in range(ROWS)]
    values = pa.RecordBatch.from_pydict(
        {
            "text": pa.array(texts),
            "bytes": pa.array(texts).cast(pa.binary()),
            "even": pa.array([f"number {number:03d}" for number in range(ROWS)]),
            "double": pa.array(chance.random(ROWS)),
            "small": pa.array(np.arange(ROWS, dtype=np.int16)),
            "half": pa.array(np.arange(ROWS, dtype=np.float32)),
            "flag": pa.array([number % 3 == 0 for number in range(ROWS)]),
            "some": pa.array([None if number % 4 == 0 else number for number in range(ROWS)]),
            "list": pa.array([[number] * (number % 3) for number in range(ROWS)]),
            "when": pa.array(np.arange(ROWS), pa.timestamp("ms", "UTC")),
        }
    )
    key = pa.array([None if number == 7 else b"k%d" % number for number in range(ROWS)], pa.binary())
    numbers = np.arange(ROWS, dtype=np.int64)
    return EventBatch(key, numbers * 3, numbers + 5, numbers.astype(np.int32) % 2, numbers * 2, values)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("first", [0, 3])
def test_events_kept_are_the_ones_taken(share: float, first: int) -> None:
    batch = events().slice(first, ROWS)
    flags = np.random.default_rng(int(share * 10)).random(len(batch)) < share
    kept, taken = keep_events(batch, flags), batch.take(np.flatnonzero(flags))
    assert kept.key.equals(taken.key) and kept.values.equals(taken.values)
    for name in ("ts", "offset", "partition", "stream_time"):
        mine, theirs = getattr(kept, name), getattr(taken, name)
        assert mine.dtype == theirs.dtype and mine.tolist() == theirs.tolist()


def test_all_events_are_the_batch_itself_and_no_columns_are_no_matter() -> None:
    batch = events()
    assert keep_events(batch, np.ones(ROWS, np.bool_)) is batch
    bare = batch.with_values(batch.values.select([]))
    flags = np.arange(ROWS) % 2 == 0
    assert len(keep_events(bare, flags)) == ROWS // 2
