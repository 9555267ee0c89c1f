"""What the values of results look like in a topic."""

from __future__ import annotations

import json
from decimal import Decimal

import pyarrow as pa
import pytest

import tidegate as tg


@pytest.fixture
def app(tmp_path) -> tg.App:
    return tg.App("shop", data=tmp_path)


def written(app: tg.App, topic: str, **columns) -> list[bytes | None]:
    flow = app.flow(topic)
    (sink,) = flow.topics
    batch = pa.record_batch(
        [
            pa.array(values, field.type)
            for values, field in zip(columns.values(), flow.result_schema, strict=True)
        ],
        schema=flow.result_schema,
    )
    return flow.value_format(sink).encode(batch).to_pylist()


def test_a_lone_count_is_a_long_as_kafka_streams_writes_it(app) -> None:
    stream = app.stream("t", value=tg.Json(a="int"))
    stream.window(tg.Tumbling("1m")).count().to_topic("counts")
    assert written(app, "counts", count=[1, 258]) == [(1).to_bytes(8, "big"), (258).to_bytes(8, "big")]
    stream.window(tg.Tumbling("1m")).agg(n=tg.count("a")).to_topic("values")
    assert written(app, "values", n=[3]) == [b'{"n":3}']  # of a column: one number among others


def test_everything_else_is_json_in_declared_order(app) -> None:
    stream = app.stream("t", value=tg.Json(a="int", b="string", c="timestamp", d="decimal(9,2)"))
    stream.select("b", "a", "c", "d").to_topic("plain")
    (row,) = written(app, "plain", b=['q"x'], a=[None], c=[0], d=[Decimal("1.50")])
    assert list(json.loads(row)) == ["b", "a", "c", "d"]
    assert json.loads(row) == {"b": 'q"x', "a": None, "c": "1970-01-01T00:00:00.000Z", "d": 1.5}


def test_bytes_that_were_only_passed_on_stay_as_they_are(app) -> None:
    app.stream("t").filter("offset > 5").to_topic("copy")
    assert written(app, "copy", value=[b"\x00\xff", None]) == [b"\x00\xff", None]


def test_a_given_serde_writes_its_own_columns(app) -> None:
    stream = app.stream("t", value=tg.Json(a="int", b="string"))
    stream.to_topic("some", value=tg.Json(b="string"))
    assert written(app, "some", a=[1], b=["x"]) == [b'{"b":"x"}']
    stream.select("b").to_topic("text", value=tg.String())
    assert written(app, "text", b=["x", None]) == [b"x", None]


def test_what_is_written_can_be_read_as_declared(app) -> None:
    stream = app.stream("t", value=tg.Json(a="int", b="string", c="timestamp", d="decimal(9,2)", e="double"))
    stream.to_topic("all")
    flow = app.flow("all")
    form = flow.value_format(flow.topics[0])
    batch = pa.record_batch(
        [pa.array([7, None]), pa.array(["ü", ""]), pa.array([0, 1_767_225_600_123], pa.timestamp("ms", "UTC")),
         pa.array([None, "2.25"]).cast(pa.decimal128(9, 2)), pa.array([0.1, -0.0])],
        schema=flow.result_schema,
    )  # fmt: skip
    serde = form.read_serde(flow.result_schema)
    assert serde is not None
    back = serde.decode_column(form.encode(batch)).require_good()
    assert pa.RecordBatch.from_struct_array(back).to_pylist() == batch.to_pylist()
