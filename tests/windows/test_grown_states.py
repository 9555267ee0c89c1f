"""A store that was made for fewer aggregates: those of before go on, those appended count from then on."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from tidegate.errors import InvalidError
from tidegate.storage import StorageConfig, WorkerStorageRuntime, open_backend
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.aggregates.folds import resolve
from tidegate.windows.events import EventBatch
from tidegate.windows.kinds import Hopping, Session, Sliding, Tumbling
from tidegate.windows.operators.base import Moment
from tidegate.windows.operators.layout import StateLayout, window_layout
from tidegate.windows.operators.session import SessionOperator
from tidegate.windows.operators.sliding import SlidingOperator
from tidegate.windows.operators.windows import WindowOperator

VALUES = pa.schema(
    [("amount", pa.float64()), ("name", pa.string()), ("price", pa.decimal128(9, 2)), ("n", pa.int64())]
)
APPENDED = {
    "count": agg.count(),
    "count of a column": agg.count("amount"),
    "sum of doubles": agg.sum("amount"),
    "sum of whole numbers": agg.sum("n"),
    "sum of decimals": agg.sum("price"),
    "mean": agg.mean("amount"),
    "min": agg.min("name"),
    "max": agg.max("amount"),
    "first": agg.first("name"),
    "last": agg.last("amount"),
    "collect": agg.collect("n"),
    "top_k": agg.top_k("amount", 2),
    "count_distinct": agg.count_distinct("name"),
    "approx_count_distinct": agg.approx_count_distinct("name"),
}
KINDS = {
    "tumbling": Tumbling("10s", grace="1d"),
    "hopping": Hopping("10s", "5s", grace="1d"),
    "session": Session("3s", grace="1d"),
    "sliding": Sliding("4s", grace="1d"),
}
BEFORE = {"orders": agg.count(), "total": agg.sum("amount")}
NOW = Moment(now_ms=0)


def events(rows: int, offset: int, seed: int) -> EventBatch:
    chance = random.Random(seed)
    ts = np.array([chance.randrange(60_000) for _ in range(rows)], np.int64)
    columns = [
        pa.array(
            [None if chance.random() < 0.1 else chance.uniform(-5, 5) for _ in range(rows)], pa.float64()
        ),
        pa.array([chance.choice(["ann", "bob", "eve", None]) for _ in range(rows)], pa.string()),
        pa.array([chance.randrange(1000) for _ in range(rows)], pa.int64())
        .cast(pa.decimal128(19, 0))
        .cast(pa.decimal128(9, 2)),
        pa.array([chance.randrange(9) for _ in range(rows)], pa.int64()),
    ]
    return EventBatch(
        key=pa.array([f"k{chance.randrange(5)}".encode() for _ in range(rows)], pa.binary()),
        ts=ts,
        offset=np.arange(offset, offset + rows, dtype=np.int64),
        partition=np.zeros(rows, np.int32),
        stream_time=np.full(rows, -1, np.int64),
        values=pa.record_batch(columns, schema=VALUES),
    )


def operator(runtime, kind, aggregates, layout=None):
    made = {Session: SessionOperator, Sliding: SlidingOperator}.get(type(kind), WindowOperator)
    return made(runtime, "t", "w", kind, resolve(aggregates, VALUES), values=VALUES, layout=layout)


def shown(operator) -> dict[tuple, dict]:
    rows = operator.windows()
    keys = zip(rows.key.to_pylist(), rows.window_start.tolist(), rows.window_end.tolist(), strict=True)
    return dict(zip(keys, rows.values.to_pylist(), strict=True))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_states_of_before_are_those_of_no_record_for_what_was_appended(tmp_path, kind) -> None:
    first, second = events(300, 0, seed=1), events(200, 300, seed=2)
    after = {**BEFORE, **{f"a{place}": each for place, each in enumerate(APPENDED.values())}}

    backend = open_backend(tmp_path / "grown")
    with WorkerStorageRuntime.open(StorageConfig.for_tests(), backend) as runtime:
        operator(runtime, kind, BEFORE).process(first, NOW)
        token = runtime.checkpoint("t")
    with WorkerStorageRuntime.open(StorageConfig.for_tests(), open_backend(tmp_path / "grown")) as runtime:
        runtime.apply_checkpoint("t", token)
        plain = window_layout(kind)
        grown = operator(runtime, kind, after, StateLayout(plain.bucket_ms, plain.segment_ms, (len(BEFORE),)))
        unseen = shown(grown)
        grown.process(second, NOW)
        got = shown(grown)
        again = runtime.checkpoint("t")
    with WorkerStorageRuntime.open(StorageConfig.for_tests(), open_backend(tmp_path / "grown")) as runtime:
        runtime.apply_checkpoint("t", again)  # packs of both shapes
        once_more = operator(
            runtime, kind, after, StateLayout(plain.bucket_ms, plain.segment_ms, (len(BEFORE),))
        )
        assert shown(once_more) == got

    with WorkerStorageRuntime.open(StorageConfig.for_tests(), open_backend(tmp_path / "whole")) as runtime:
        whole = operator(runtime, kind, BEFORE)
        whole.process(first, NOW)
        whole.process(second, NOW)
        wanted = shown(whole)
    assert {key: {name: row[name] for name in BEFORE} for key, row in got.items()} == wanted

    nothing = {f"a{place}": None for place in range(len(APPENDED))}
    counted = {f"a{place}": 0 for place, name in enumerate(APPENDED) if "count" in name}
    for row in unseen.values():
        have = {name: row[name] or None for name in nothing if name not in counted}
        assert have == dict.fromkeys(have), row
        assert {name: row[name] for name in counted} == counted
    if isinstance(kind, Session | Sliding):
        return  # their windows depend on the records of before, too
    with WorkerStorageRuntime.open(StorageConfig.for_tests(), open_backend(tmp_path / "late")) as runtime:
        late = operator(runtime, kind, after)
        late.process(second, NOW)
        for key, row in shown(late).items():
            appended = {name: value for name, value in row.items() if name not in BEFORE}
            assert {name: got[key][name] for name in appended} == appended


def test_a_store_grows_at_the_end_only(tmp_path) -> None:
    kind = KINDS["tumbling"]
    plain = window_layout(kind)
    with WorkerStorageRuntime.open(StorageConfig.for_tests(), open_backend(tmp_path)) as runtime:
        operator(runtime, kind, BEFORE).process(events(10, 0, seed=1), NOW)
        token = runtime.checkpoint("t")
    for aggregates, grown_from in (
        ({"first": agg.count(), **BEFORE}, (2,)),  # in front
        ({**BEFORE, "most": agg.max("amount")}, ()),  # nobody said so
        ({**BEFORE, "most": agg.max("amount")}, (1,)),  # it had two
    ):
        with WorkerStorageRuntime.open(StorageConfig.for_tests(), open_backend(tmp_path)) as runtime:
            runtime.apply_checkpoint("t", token)
            with pytest.raises(InvalidError, match="another shape"):
                operator(
                    runtime, kind, aggregates, StateLayout(plain.bucket_ms, plain.segment_ms, grown_from)
                )
