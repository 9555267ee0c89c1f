"""What the real Kafka Streams sent on, as recorded: the oracle sends the same, and operators make the same table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from streams_fixtures import NAMES, Recorded, load_fixture

from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.aggregates.folds import resolve
from tidegate.windows.events import EventBatch
from tidegate.windows.keys import KeyFormat, decode_keys
from tidegate.windows.kinds import Hopping, Session, Sliding, WindowKind
from tidegate.windows.operators.base import Moment, WindowRows
from tidegate.windows.operators.session import SessionOperator
from tidegate.windows.operators.sliding import SlidingOperator
from tidegate.windows.operators.windows import WindowOperator
from window_oracles import CLOSE, UPDATE, KafkaSlidingOracle, Record, Row, ms, oracle_of
from workers import TASK, Worker

Sent = tuple[bytes, int, int, int | None, int | None]  # key, start, end, timestamp, count (None: deleted)


def batch(inputs: list[Any], first_offset: int) -> EventBatch:
    count = len(inputs)
    return EventBatch(
        key=pa.array([one.key for one in inputs], pa.binary()),
        ts=np.array([one.timestamp for one in inputs], np.int64),
        offset=np.arange(first_offset, first_offset + count, dtype=np.int64),
        partition=np.zeros(count, np.int32),
        stream_time=np.full(count, -1, np.int64),
        values=pa.RecordBatch.from_arrays([pa.array([1] * count, pa.int64())], names=["value"]),
    )


def sent(rows: WindowRows) -> list[Sent]:
    deleted = [False] * len(rows) if rows.deleted is None else rows.deleted.tolist()
    counts = [None if gone else n for gone, n in zip(deleted, rows.values.column(0).to_pylist(), strict=True)]
    columns = (
        rows.key.to_pylist(),
        rows.window_start.tolist(),
        rows.window_end.tolist(),
        rows.ts.tolist(),
        counts,
    )
    return list(zip(*columns, strict=True))


RECORDED = [
    name
    for name in NAMES
    if load_fixture(name).about.get("window") in ("session", "sliding", "tumbling", "hopping")
    and not name.startswith(("reduce", "suppress", "papi", "tumbling-integer"))
]


def kind_of(recorded: Recorded) -> WindowKind:
    about = recorded.about
    grace = about.get("grace", 0)
    if "gap" in about:
        return Session(ms(about["gap"]), grace=ms(grace))
    if "difference" in about:
        return Sliding(ms(about["difference"]), grace=ms(grace))
    return Hopping(ms(about["size"]), ms(about.get("advance", about["size"])), grace=ms(grace))


def recorded_rows(recorded: Recorded) -> list[Sent]:
    """What it sent on: key, bounds, timestamp, count."""
    records = recorded.written("out")
    key_format = KeyFormat.SESSION if recorded.store_kind == "session" else KeyFormat.TOPIC
    keys = decode_keys(
        pa.array([record.key for record in records], pa.binary()), key_format, size_ms=recorded.size_ms
    )
    counts = [None if record.value is None else int.from_bytes(record.value, "big") for record in records]
    return list(
        zip(
            keys.inner.to_pylist(), keys.start.tolist(), keys.end.tolist(),
            [record.timestamp for record in records], counts, strict=True,
        )
    )  # fmt: skip


def oracle_rows(rows: list[Row]) -> list[Sent]:
    return [
        (row.key, row.start, row.end, row.ts, None if row.is_deleted else len(row.records)) for row in rows
    ]


@pytest.mark.parametrize("name", RECORDED)
def test_the_oracle_sends_what_kafka_streams_sent(name: str) -> None:
    recorded = load_fixture(name)
    kind, emit = kind_of(recorded), recorded.about.get("emit", UPDATE)
    oracle = KafkaSlidingOracle(kind, emit) if isinstance(kind, Sliding) else oracle_of(kind, emit)
    oracle.run(Record(one.key, one.timestamp, 1, at) for at, one in enumerate(recorded.inputs))
    found, expected = oracle_rows(oracle.rows), recorded_rows(recorded)
    if name == "close-tumbling":  # a leap of stream time loses windows there, and must not here
        assert [row for row in found if row in expected] == expected and len(found) > len(expected)
    else:
        assert found == expected
    assert len(oracle.late) == recorded.dropped


@pytest.mark.parametrize("cut", [1, 3, 1000])
@pytest.mark.parametrize("name", RECORDED)
def test_the_operators_make_the_table_kafka_streams_made(name: str, cut: int) -> None:
    recorded = load_fixture(name)
    kind, emit = kind_of(recorded), recorded.about.get("emit", UPDATE)
    made = {Session: SessionOperator, Sliding: SlidingOperator}.get(type(kind), WindowOperator)
    operator: Any = made(
        Worker().runtime, TASK, "windows", kind, resolve({"n": agg.count()}, pa.schema([])), emit=emit
    )
    found: list[Sent] = []
    late = 0
    for at in range(0, len(recorded.inputs), cut):
        output = operator.process(batch(recorded.inputs[at : at + cut], at), Moment(0))
        found += sent(output.rows)
        late += 0 if output.late is None else len(output.late)
    assert late == recorded.dropped
    if emit == CLOSE:
        expected = recorded_rows(recorded)
        assert [row for row in found if name != "close-tumbling" or row in expected] == expected
    else:
        assert _table(found) == _table(recorded_rows(recorded))
        if cut == 1 and isinstance(kind, Session):
            assert found == recorded_rows(recorded)


def _table(rows: list[Any]) -> dict[Any, Any]:
    table: dict[Any, Any] = {}
    for key, start, end, ts, count in rows:
        table.pop((key, start, end), None)
        if count is not None:
            table[key, start, end] = (ts, count)
    return table
