"""Where the records of a window lie, partition by partition: equal to a plain walk, whatever the cuts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.storage import Count
from tidegate.testing.workers import TASK, Worker
from tidegate.windows.aggregates.sources import RESULT, SourceRanges
from tidegate.windows.events import EventBatch
from tidegate.windows.kinds import Hopping, Session, Sliding, Tumbling, WindowKind
from tidegate.windows.operators.sessions import SessionOperator
from tidegate.windows.operators.shapes import Moment
from tidegate.windows.operators.sliding import SlidingOperator
from tidegate.windows.operators.windows import WindowOperator

KINDS: list[WindowKind] = [
    Tumbling("10ms", grace="1s"), Hopping("10ms", "5ms", grace="1s"), Session("3ms", grace="1s"),
    Sliding("5ms", grace="1s"),
]  # fmt: skip
RECORDS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 3), st.sampled_from([b"a", b"b"])), min_size=1, max_size=30
)
Found = list[dict[str, int]]


def batch_of(records: list[tuple[int, int, bytes]], first: int) -> EventBatch:
    return EventBatch(
        key=pa.array([key for _, _, key in records], pa.binary()),
        ts=np.array([ts for ts, _, _ in records], np.int64),
        offset=np.arange(first, first + len(records)) * 7 % 1000,
        partition=np.array([partition for _, partition, _ in records], np.int32),
        stream_time=np.full(len(records), -1, np.int64),
        values=pa.RecordBatch.from_pydict({"x": pa.array([1] * len(records), pa.int64())}),
    )


def walked(records: list[tuple[int, int, bytes]], key: bytes, first: int, last: int) -> Found:
    found: dict[int, dict[str, int]] = {}
    for number, (ts, partition, owner) in enumerate(records):
        if owner == key and first <= ts <= last:
            offset = number * 7 % 1000
            known = found.setdefault(
                partition, {"partition": partition, "count": 0, "min_offset": offset, "max_offset": offset}
            )
            known["count"] += 1
            known["min_offset"] = min(known["min_offset"], offset)
            known["max_offset"] = max(known["max_offset"], offset)
    return [found[partition] for partition in sorted(found)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@settings(max_examples=25, deadline=None)
@given(records=RECORDS, cut=st.integers(1, 30))
def test_every_window_knows_its_sources(kind: Any, records: list[tuple[int, int, bytes]], cut: int) -> None:
    made: Any = {Session: SessionOperator, Sliding: SlidingOperator}.get(type(kind), WindowOperator)
    operator = made(Worker().runtime, TASK, "w", kind, (Count("n"), SourceRanges()))
    for at in range(0, len(records), cut):
        operator.process(batch_of(records[at : at + cut], at), Moment(0))
    rows = operator.windows()
    assert len(rows) > 0
    for key, start, end, count, result in zip(
        rows.key.to_pylist(),
        rows.window_start.tolist(),
        rows.window_end.tolist(),
        rows.count.tolist(),
        rows.values.column("sources").to_pylist(),
        strict=True,
    ):
        last = end - 1 if isinstance(kind, Hopping) else end
        assert result == walked(records, key, start, last)
        assert sum(each["count"] for each in result) == count


def test_no_records_are_no_sources() -> None:
    ranges = SourceRanges()
    none = pa.record_batch({"partition": pa.array([], pa.int32()), "offset": pa.array([], pa.int64())})
    (state,) = ranges.partial(none, np.empty(0, np.int32), 2)
    assert state.to_pylist() == [[], []]
    (merged,) = ranges.merge([state], np.array([0, 0], np.int32), 1)
    assert ranges.finish([merged]).to_pylist() == [[]]
    assert ranges.finish([merged]).type == RESULT == ranges.result
