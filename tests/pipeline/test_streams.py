"""Streams and apps as users write them: values, flows, names, and what an app refuses."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import tidegate as tg
from tidegate.pipeline.topology import Aggregate, AsTable, Dedupe, Filter, To

ORDER = tg.Json(order_id="string", amount="double", user="string", placed="timestamp")


@pytest.fixture
def app(tmp_path) -> tg.App:
    return tg.App("shop", data=tmp_path)


def orders(app: tg.App) -> tg.Stream:
    return app.stream("orders", value=ORDER)


def test_the_story_of_the_front_page_is_one_flow(app) -> None:
    (
        orders(app)
        .validate()
        .drop_duplicates("order_id", within="10m")
        .window(tg.Tumbling("1m", grace="30s"))
        .agg(orders=tg.count(), revenue=tg.sum("amount"))
        .to_topic("orders-per-minute")
    )
    (flow,) = app.flows
    assert flow.name == "orders-per-minute"
    assert flow.result == "windows" and flow.rekey_at is None and flow.shards is None
    assert flow.result_schema == pa.schema([("orders", pa.int64()), ("revenue", pa.float64())])
    assert flow.operators == {1: "dedupe", 2: "windows"}
    assert flow.tasks(7) == 7
    assert [schema.names for schema in flow.schemas] == [ORDER.schema.names] * 3 + [["orders", "revenue"]]


def test_every_call_leaves_the_stream_it_was_made_on_as_it_was(app) -> None:
    start = orders(app)
    large = start.filter("amount > 100")
    assert start.steps == () and len(large.steps) == 1
    small = start.select("user", "amount")
    assert small.schema.names == ["user", "amount"] and start.schema.names == ORDER.schema.names
    assert app.flows == ()  # nothing has an end


def test_ends_of_one_stream_are_one_flow_and_others_are_not(app) -> None:
    counted = orders(app).window(tg.Tumbling("1m")).count()
    counted.to_topic("a").to_table("b")
    counted.to_topic("c")
    orders(app).filter("amount > 1").to_topic("d")
    assert [flow.name for flow in app.flows] == ["a", "d"]
    assert app.flows[0].sinks == (To("a"), AsTable("b"), To("c"))
    assert app.flow("c") is app.flows[0]


def test_a_notebook_cell_that_runs_twice_changes_nothing(app) -> None:
    for _ in range(2):
        orders(app).filter("amount > 1").window(tg.Tumbling("1m")).count().to_topic("a")
    assert len(app.flows) == 1


def test_two_things_cannot_go_to_one_name(app) -> None:
    orders(app).filter("amount > 1").to_topic("a")
    with pytest.raises(tg.InvalidError, match="something that goes to 'a' already"):
        orders(app).filter("amount > 2").to_topic("a")
    with pytest.raises(tg.InvalidError, match="already"):
        orders(app).window(tg.Tumbling("1m")).count().to_table("a")


def test_flows_cannot_feed_each_other_in_a_circle(app) -> None:
    app.stream("a").to_topic("b")
    app.stream("b").to_topic("c")
    with pytest.raises(tg.InvalidError, match="circle"):
        app.stream("c").to_topic("a")
    with pytest.raises(tg.InvalidError, match="read what it writes"):
        app.stream("x").to_topic("x")
    assert [flow.name for flow in app.flows] == ["b", "c"]


def test_streams_flows_and_steps_are_equal_when_they_say_the_same(app, tmp_path) -> None:
    def made(threshold: int) -> tg.Stream:
        return orders(app).filter(f"amount > {threshold}").select("user", twice="amount * 2")

    assert made(1) == made(1) and hash(made(1)) == hash(made(1))
    assert made(1) != made(2)
    assert Filter(pc.field("a") > 1) == Filter(pc.field("a") > 1)
    assert Filter(pc.field("a") > 1) != Filter(pc.field("a") > 2)
    other = tg.App("shop", data=tmp_path / "elsewhere")
    orders(app).window(tg.Tumbling("1m")).count().to_topic("a")
    orders(other).window(tg.Tumbling("1m")).count().to_topic("a")
    assert app.flows == other.flows and app.fingerprint == other.fingerprint


def test_re_keying_is_only_done_where_state_needs_it(app) -> None:
    plain = orders(app).key_by("user").to_topic("by-user")
    assert app.flow("by-user").rekey_at is None and "stay where they are" in app.flow("by-user").why
    plain.window(tg.Tumbling("1m")).count().to_topic("counts")
    flow = app.flow("counts")
    assert flow.rekey_at == 0 and flow.shards == 8 and flow.tasks(3) == 8
    assert "re-keyed" in flow.why and "user" in flow.why
    twice = orders(app).key_by("amount").key_by("user", shards=2).drop_duplicates("order_id", "1m")
    twice.window(tg.Session("5m")).count().to_topic("visits")
    assert app.flow("visits").rekey_at == 1 and app.flow("visits").shards == 2


@pytest.mark.parametrize(
    ("column", "kind", "serde"),
    [
        ("s", "string", tg.String),
        ("i", "int32", tg.Int),
        ("l", "int64", tg.Long),
        ("u", "uint32", tg.Long),
        ("d", "double", tg.Double),
    ],
)
def test_a_key_is_written_by_the_serde_of_its_type(app, column, kind, serde) -> None:
    stream = app.stream("t", value=tg.Json(**{column: kind})).key_by(column)
    assert isinstance(stream.key, serde)
    stream.key.encode_column(pa.array([], stream.schema.field(column).type))


def test_a_composite_key_takes_a_serde(app) -> None:
    serde = tg.Json(user="string", day="date")
    stream = orders(app).key_by("struct_pack(user := user, day := CAST(placed AS DATE))", serde)
    assert stream.key is serde


@pytest.mark.parametrize("settings", [{"late": "fail"}, {"late": None}, {"late": True}, {"future": "5m"}])
def test_settings_of_another_type_are_refused_where_they_are_given(app, settings) -> None:
    with pytest.raises(tg.InvalidError, match=f"{next(iter(settings))}=.*: (choose 'keep', 'drop'|.*None)"):
        app.stream("orders").window(tg.Tumbling("1m"), **settings)


@pytest.mark.parametrize(
    "said, now",
    [
        (lambda stream: stream.deduplicate("order_id", "1m"), r"\.drop_duplicates\(…\) now"),
        (lambda stream: stream.to("sent"), r"\.to_topic\(…\) now"),
        (lambda stream: stream.table("kept"), r"\.to_table\(…\) now"),
        (lambda stream: stream.window(tg.Tumbling("1m")).aggregate(n=tg.count()), r"\.agg\(…\) now"),
        (
            lambda stream: stream.window(tg.Tumbling("1m")).agg(n=tg.count(), emit="close"),
            r"window\(…, emit='close'\)",
        ),
        (
            lambda stream: stream.drop_duplicates("order_id", "1m", keep_late=None),
            r"drop_duplicates\(late=",
        ),
    ],
)
def test_an_old_spelling_is_refused_with_the_new_one(app, said, now) -> None:
    with pytest.raises(tg.InvalidError, match=now):
        said(orders(app))


def test_an_aggregate_may_have_any_name(app) -> None:
    stream = orders(app).window(tg.Tumbling("1m")).agg(emit=tg.count(), late=tg.count(), future=tg.count())
    assert stream.schema.names[-3:] == ["emit", "late", "future"]
    same = orders(app).with_columns(twice="amount * 2")
    assert same.schema.names == [*orders(app).schema.names, "twice"]


def test_windows_keep_late_records_and_guard_against_clocks_by_default(app) -> None:
    step = orders(app).window(tg.Tumbling("1m")).count().steps[-1]
    assert isinstance(step, Aggregate)
    assert step.late == tg.LateSettings("7d") and step.future == tg.FutureGuard("5m", "late")
    bare = orders(app).window(tg.Tumbling("1m"), late="drop").count().steps[-1]
    assert isinstance(bare, Aggregate) and bare.future is not None and bare.future.policy == "keep"
    none = orders(app).window(tg.Tumbling("1m"), late="drop", future=None).count().steps[-1]
    assert isinstance(none, Aggregate) and none.late is None and none.future is None
    dedupe = orders(app).drop_duplicates("order_id", "1m", late="forward").steps[-1]
    assert isinstance(dedupe, Dedupe) and dedupe.late is None  # what goes on is not late


def test_changes_of_a_table_bring_their_windows_as_columns(app) -> None:
    stream = app.changes("counts", window_size="1m", value=tg.Json(orders="int64"))
    time = pa.timestamp("ms", tz="UTC")
    assert stream.schema == pa.schema([("window_start", time), ("window_end", time), ("orders", pa.int64())])
    stream.filter("window_end - window_start >= INTERVAL 1 MINUTE AND orders > 5").to_topic("busy")
    assert app.changes("visits", sessions=True).source.windows.size_ms is None
    for wrong in ({}, {"window_size": "1m", "sessions": True}):
        with pytest.raises(tg.InvalidError, match="window_size= where"):
            app.changes("counts", **wrong)
    with pytest.raises(tg.InvalidError, match="window_start"):
        app.changes("counts", sessions=True, value=tg.Json(window_start="int"))


def test_a_lookup_adds_columns_of_the_table(app) -> None:
    customer = tg.Json(name="string", city="string")
    stream = orders(app).lookup("customers", "name", town="city", value=customer, key="user")
    assert stream.schema.names == [*ORDER.schema.names, "name", "town"]
    assert stream.schema.field("town").type == pa.string()


def test_where_an_app_is_does_not_depend_on_the_folder_it_is_used_in(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = tg.App("a", data="./data")
    assert app.log == str(tmp_path / "data" / "log") and app.state == str(tmp_path / "data" / "state")
    cluster = tg.App(
        "a", log="kafka://broker:9092", state="s3://bucket/a", client={"security.protocol": "SSL"}
    )
    assert (cluster.log, cluster.state) == ("kafka://broker:9092", "s3://bucket/a")
    assert list(tmp_path.iterdir()) == []  # nothing is made by defining


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "give data='./data'"),
        ({"log": "kafka://broker:9092"}, "place for its state"),
        ({"data": "kafka://broker:9092"}, "give log="),
        ({"data": "x", "client": {"a": "b"}}, "Kafka client"),
        ({"data": "x", "state": "memory://"}, "give a folder"),
        ({"data": "x", "storage": {"max_task": 4}}, "did you mean max_tasks"),
        ({"data": "x", "log": "kafka://user@broker"}, "kafka://HOST:PORT"),
    ],
)
def test_a_place_that_cannot_be_is_refused_at_once(settings, said) -> None:
    with pytest.raises(tg.InvalidError, match=said):
        tg.App("a", **settings)


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a b", "x" * 200, 5])
def test_names_of_apps_fit_every_store(name, tmp_path) -> None:
    with pytest.raises(tg.InvalidError, match="app name"):
        tg.App(name, data=tmp_path)


def test_an_app_without_flows_or_with_an_unknown_engine_does_not_start(app) -> None:
    with pytest.raises(tg.InvalidError, match=r"end a stream with \.to"):
        app.start()
    orders(app).to_topic("a")
    with pytest.raises(tg.InvalidError, match="SparkSession, 'spark' or 'local'"):
        app.start("flink")
    with pytest.raises(TypeError, match="is no engine"):
        app.start(5)


def test_what_is_shown_is_short_and_escaped(app) -> None:
    stream = orders(app).filter("amount < 5")
    stream.to_topic("cheap")
    assert repr(stream).startswith("<Stream orders, 1 steps: order_id string")
    assert repr(app) == "<App shop: orders → cheap>"
    assert repr(app.flows[0]) == "<Flow cheap: orders → 1 steps → events, co-partitioned>"
    assert "amount &lt; 5" in stream._repr_html_() and "amount &lt; 5" in app._repr_html_()
    assert "no result yet" in repr(stream.window(tg.Tumbling("1m")))
