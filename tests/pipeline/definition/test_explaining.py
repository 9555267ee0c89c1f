"""The plan in words: what is in it, and that its figures are those of the log and of the state that comes of it."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.pipeline.definition.sampling import Fields, Sample, sample_flow
from tidegate.pipeline.definition.sizing import ID_BYTES, state_sizes

START = 1_767_261_600_000
ORDER = tg.Json(order_id="string", amount="double", user="string")


@pytest.fixture
def app(tmp_path) -> tg.App:
    app = tg.App("shop", data=tmp_path / "data")
    orders = app.stream("orders", value=ORDER, on_error="keep")
    (
        orders.validate({"missing": "fail"})
        .filter("amount > 0")
        .drop_duplicates("order_id", within="10m")
        .window(tg.Tumbling("1m", grace="30s", retention="1h"))
        .agg(orders=tg.count(), revenue=tg.sum("amount"))
        .to_topic("orders-per-minute")
    )
    orders.key_by("user").window(tg.Session("10m"), late="drop").count().to_topic("visits").to_table(
        "visits-table"
    )
    return app


def fill(app: tg.App, rows: int, *, every_ms: int, keys: int, partitions: int = 2) -> None:
    with tg.Log(app.log) as log:
        log.create_topic("orders", partitions)
        log.writer("orders").write(
            pa.table(
                {
                    "key": [f"k{row % keys}" for row in range(rows)],
                    "value": [
                        f'{{"order_id":"o{row}","amount":{row % 2},"user":"u{row % 7}"}}'
                        for row in range(rows)
                    ],
                    "timestamp": [START + row * every_ms for row in range(rows)],
                }
            )
        )


def test_the_plan_says_what_happens_to_each_kind_of_record(app) -> None:
    text = app.explain()
    for wanted in (
        "Flow orders-per-minute",
        "co-partitioned: state is kept by the key of orders",
        "one for each partition of orders",
        "re-keyed: window keeps state by user",
        "8, a shard of the new keys each",
        "drop_duplicates by key, order_id within 10m, grace 10m",
        "window tumbling 1m, grace 30s, kept 1h: orders = count(), revenue = sum(amount)",
        "topic orders-per-minute: a windowed changelog, value JSON of orders, revenue",
        "value count as long",
        "table visits-table",
        "kept as dead letters",
        "missing                  its partition stops there",
        "corrupt                  left out, kept as a dead letter",
        "a fault before push end  its partition stops there",
        "kept in the late table (7d, 64 MiB a task)",
        "clock > 5m ahead",
        "there is no log at",
        "assuming 1,000 records/s and 10,000 keys",
    ):
        assert wanted in text, wanted
    assert not Path(app.log).exists()  # explaining makes nothing


def test_sizes_come_from_a_minute_of_the_log(app) -> None:
    fill(app, 40_000, every_ms=4, keys=50)  # 160 s; half of the records pass the filter
    text = app.explain()
    assert "2, one for each partition of orders" in text
    assert re.search(r"newest 59s\d+ms of orders: 40,000 records read, 125/s and 25 keys", text), text
    flow = app.flow("orders-per-minute")
    sample, fields = sample_flow(flow, app.log, {})
    assert fields == Fields()
    assert isinstance(sample, Sample)
    dedupe, windows = state_sizes(flow, sample)
    assert dedupe.rows == pytest.approx(125 * 1200, rel=0.01) and dedupe.row_bytes == ID_BYTES
    # 25 keys have records in every minute of the hour that is kept; the minute may be cut in two
    assert 25 * 60 <= windows.rows <= 2 * 25 * 60
    assert "nobody looked at the log" in app.explain(sample=False)


def test_a_sample_of_nothing_says_so(app) -> None:
    flow = app.flow("orders-per-minute")
    assert "no log at" in str(sample_flow(flow, app.log, {}))
    with tg.Log(app.log) as log:
        log.create_topic("other", 1)
    assert "no topic orders" in str(sample_flow(flow, app.log, {}))
    with tg.Log(app.log) as log:
        log.create_topic("orders", 1)
    assert "holds nothing" in str(sample_flow(flow, app.log, {}))


def test_what_does_not_fit_the_budget_is_said_with_the_setting(tmp_path) -> None:
    app = tg.App("shop", data=tmp_path, storage={"backlog_limit_bytes": "1MiB"})
    app.stream("orders").window(tg.Hopping("1h", "1m", retention="7d")).count().to_topic("many")
    assert re.search(r"do not fit one process: .*raise backlog_limit_bytes", app.explain())


@pytest.mark.parametrize(
    "kind",
    [
        tg.Tumbling("1m"),
        tg.Hopping("1h", "5m"),
        tg.Sliding("1m"),
        tg.Session("5m"),
        tg.Unlimited(),
    ],
    ids=lambda kind: kind.name,
)
def test_every_kind_of_window_has_a_size_and_a_sentence(tmp_path, kind) -> None:
    app = tg.App("shop", data=tmp_path)
    aggregates = {"n": tg.count(), "all": tg.collect("amount"), "most": tg.top_k("amount", 3)}
    app.stream("orders", value=ORDER).window(kind).agg(**aggregates).to_topic("out")
    (size,) = state_sizes(app.flows[0], None)
    assert size.rows > 0 and size.row_bytes > 100 and size.size > 0
    assert kind.name in app.explain()


def test_a_stream_without_an_end_can_be_explained_too(app) -> None:
    stream = (
        app.stream("orders", value=ORDER)
        .select("user", big="amount > 5")
        .lookup("customers", town="city", value=tg.Json(city="string"), required=True)
    )
    text = stream.explain()
    assert "select user, big = amount > 5" in text
    assert "lookup city as town in customers by key; left out where there is none" in text
    assert "map double(…)" in stream.map(double, stream.schema).explain().replace("test_explaining.", "")


def double(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select(["user", "big", "town"])


def test_flows_travel_between_processes(app) -> None:
    for flow in app.flows:
        copy = pickle.loads(pickle.dumps(flow))
        assert copy == flow and copy.schemas == flow.schemas and copy.why == flow.why
        assert copy.value_format(copy.topics[0]).columns == flow.value_format(flow.topics[0]).columns
    cloudpickle = pytest.importorskip("pyspark.cloudpickle")
    app.stream("x", value=ORDER).filter(lambda batch: batch["amount"].is_valid()).to_topic("y")
    copy = pickle.loads(cloudpickle.dumps(app.flow("y")))
    assert copy == app.flow("y")


@pytest.mark.parametrize(
    ("idle_after", "idle_close", "said"),
    [
        ("30s", None, "silent for 30s (idle_after) is not waited for"),
        ("30s", "10s", "silent for 10s (idle_close) is not waited for"),
        (None, "10s", "silent for 10s (idle_close) is not waited for"),
        (None, None, "every partition is waited for, however long it is silent (idle_after=None)"),
    ],
)
def test_the_plan_says_in_which_order_partitions_meet_and_who_is_waited_for(
    tmp_path: Path, idle_after: str | None, idle_close: str | None, said: str
) -> None:
    for kind, order in (
        (tg.Session("1m"), "by stream time, partition of orders and offset"),
        (tg.Tumbling("1m"), "any:"),
    ):
        app = tg.App("shop", data=tmp_path, idle_after=idle_after)
        keyed = app.stream("orders", value=ORDER).key_by("user")
        keyed.window(kind, idle_close=idle_close).agg(n=tg.count()).to_topic("visits")
        text = app.explain(sample=False)
        assert f"order  {order}" in text and said in text
        at_the_end = "at the end of a run until caught up, one that was read to its end" in text
        assert at_the_end is (isinstance(kind, tg.Session) and idle_after is not None)
    app = tg.App("shop", data=tmp_path)
    app.stream("orders", value=ORDER).window(tg.Session("1m")).count().to_topic("visits")
    assert "  order  " not in app.explain(sample=False), "a partition's own order is that of its offsets"
