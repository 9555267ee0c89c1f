"""Sessions are the same whatever is sent on and however long they can be read, and lie more than a gap apart."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.storage.backends.memory import MemoryBackend
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.aggregates.folds import resolve
from tidegate.windows.events import EventBatch
from tidegate.windows.kinds import Session
from tidegate.windows.operators.base import Moment, Output
from tidegate.windows.operators.session import SessionOperator
from window_oracles import Record, SessionOracle
from workers import TASK, Worker

Sessions = dict[tuple[bytes, int, int], tuple[int, int | None]]

AGGREGATES = resolve({"n": agg.count(), "total": agg.sum("value")}, pa.schema([("value", pa.int64())]))


def events(records: list[Record]) -> EventBatch:
    return EventBatch(
        key=pa.array([each.key for each in records], pa.binary()),
        ts=np.array([each.ts for each in records], np.int64),
        offset=np.array([each.offset for each in records], np.int64),
        partition=np.array([each.partition for each in records], np.int32),
        stream_time=np.full(len(records), -1, np.int64),
        values=pa.RecordBatch.from_arrays(
            [pa.array([each.value for each in records], pa.int64())], ["value"]
        ),
    )


def streams() -> Any:
    """Records of three keys and two partitions whose times jump back and forth around gaps of 20."""
    return st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(-60, 45), st.integers(1, 9)), max_size=45
    ).map(
        lambda drawn: [
            Record(b"%d" % key, max(0, at + step), value, offset, partition)
            for offset, (at, (key, partition, step, value)) in enumerate(
                zip(
                    itertools.accumulate((max(0, row[2]) // 4 for row in drawn), initial=100),
                    drawn,
                    strict=False,
                )
            )
        ]
    )


def run(
    kind: Session, emit: str, batches: list[list[Record]], restarts: set[int]
) -> tuple[Sessions, list[int]]:
    """What a reader of everything sent knows at the end, and the offsets of late records."""
    backend, outputs, token = MemoryBackend(), list[Output](), None

    def start(life: int) -> tuple[Worker, Any]:
        worker = Worker(backend=backend, seed=life)
        operator = SessionOperator(worker.runtime, TASK, "s", kind, AGGREGATES, emit=emit)
        if token is not None:
            worker.runtime.apply_checkpoint(TASK, token)
        return worker, operator

    worker, operator = start(0)
    for number, piece in enumerate(batches):
        if number in restarts:
            token = worker.runtime.checkpoint(TASK)
            worker, operator = start(number + 1)
        outputs.append(operator.process(events(piece), Moment(0)))
    outputs.append(operator.tick(Moment(0, closing=True)))
    known: Sessions = {}
    for output in outputs:
        rows: Any = output.rows
        values = zip(*(column.to_pylist() for column in rows.values.columns), strict=True)
        deleted = [False] * len(rows) if rows.deleted is None else rows.deleted.tolist()
        bounds = zip(rows.key.to_pylist(), rows.window_start.tolist(), rows.window_end.tolist(), strict=True)
        for window, value, is_deleted in zip(bounds, values, deleted, strict=True):
            known.pop(window, None)
            if not is_deleted:
                known[window] = value
    late = [
        offset for each in outputs if each.late is not None for offset in each.late.events.offset.tolist()
    ]
    return known, sorted(late)


@settings(max_examples=150, deadline=None)
@given(
    records=streams(),
    cuts=st.lists(st.integers(0, 45), max_size=6),
    emit=st.sampled_from(["update", "close"]),
    gap=st.sampled_from([1, 7, 20]),
    grace=st.sampled_from([0, 1, 5, 40]),
    longer=st.sampled_from([None, 0, 1, 30, 10_000]),
    restarts=st.sets(st.integers(0, 6)),
)
def test_sessions_do_not_depend_on_what_is_sent_nor_on_retention(
    records: list[Record],
    cuts: list[int],
    emit: str,
    gap: int,
    grace: int,
    longer: int | None,
    restarts: set[int],
) -> None:
    kept = None if longer is None else f"{gap + grace + longer}ms"
    kind = Session(f"{gap}ms", grace=f"{grace}ms", retention=kept)
    edges = sorted({0, len(records), *(place for place in cuts if place < len(records))})
    batches = [records[start:stop] for start, stop in itertools.pairwise(edges)]
    found, late = run(kind, emit, batches, restarts)
    oracle = SessionOracle(Session(f"{gap}ms", grace=f"{grace}ms"))
    oracle.run(records)
    expected = {
        window: (len(taken), sum(each.value or 0 for each in taken))
        for window, taken in oracle.windows.items()
    }
    assert found == expected
    assert late == sorted(line.offset for line in oracle.late)
    for (key, _, end), (next_key, start, _) in itertools.pairwise(sorted(found)):
        assert key != next_key or start - end > gap, f"{key!r}: {end} and {start} lie within {gap}"
