"""What cannot run is refused where it is said, with what to write instead."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import tidegate as tg

ORDER = tg.Json(order_id="string", amount="double", user="string", tags="list<string>")
MINUTE = tg.Tumbling("1m")


@pytest.fixture
def stream(tmp_path) -> tg.Stream:
    return tg.App("shop", data=tmp_path).stream("orders", value=ORDER)


WRONG = {
    "unknown column in SQL": (lambda s: s.filter("amout > 0"), "no column 'amout'; did you mean amount"),
    "unknown column alone": (lambda s: s.filter("amout"), "no column 'amout'; did you mean amount"),
    "unknown column in Arrow": (lambda s: s.filter(pc.field("amout") > 0), "did you mean amount"),
    "unknown column selected": (lambda s: s.select("usr"), "did you mean user"),
    "unknown column of dedupe": (lambda s: s.drop_duplicates("orderid", "1m"), "did you mean order_id"),
    "unknown column aggregated": (
        lambda s: s.window(MINUTE).agg(a=tg.sum("amout")),
        "did you mean amount",
    ),
    "unknown column looked up": (
        lambda s: s.lookup("c", "nam", value=tg.Json(name="string")),
        "did you mean name",
    ),
    "a condition of another type": (lambda s: s.filter("amount"), "amount is double.*write a comparison"),
    "no SQL": (lambda s: s.filter("amount >"), "no SQL expression"),
    "two expressions": (lambda s: s.filter("amount > 0), (amount < 5"), "expression"),
    "nothing": (lambda s: s.filter("  "), "an empty expression"),
    "an unknown function": (lambda s: s.filter("foo(amount)"), "foo does not exist"),
    "a constant of another type": (lambda s: s.filter("amount > 'much'"), "TRY_CAST"),
    "an aggregate in SQL": (lambda s: s.filter("sum(amount) > 5"), r"use \.window"),
    "a window function": (lambda s: s.select(n="row_number() OVER ()"), "where a batch is cut"),
    "a subquery": (lambda s: s.filter("amount > (SELECT 5)"), "subquery"),
    "chance": (lambda s: s.filter("random() < 0.5"), "the same rows again"),
    "the clock": (lambda s: s.filter("ts > now()"), "own time ts"),
    "the clock as a word": (lambda s: s.filter("ts > current_timestamp"), "own time ts"),
    "rows of its own": (lambda s: s.select(t="unnest(tags)"), "one value for each row"),
    "all columns as one": (lambda s: s.select(t="COLUMNS(*)"), "name the columns"),
    "a parameter": (lambda s: s.filter("amount > ?"), "parameters"),
    "a null of no type": (lambda s: s.select(x="NULL"), "only nulls"),
    "no column at all": (lambda s: s.select(), "no column is left"),
    "a column twice": (lambda s: s.select("user", "user"), "comes twice"),
    "a function of no array": (lambda s: s.filter(lambda batch: True), "an Arrow array .* is due"),
    "a function that fails on nothing": (
        lambda s: s.select(x=lambda batch: batch["amount"][0]),
        "failed on a batch without rows",
    ),
    "a function of another length": (
        lambda s: s.select(x=lambda batch: pa.array([1])),
        "1 values for 0 rows",
    ),
    "a map of other columns": (
        lambda s: s.map(lambda batch: batch, pa.schema([("x", pa.int64())])),
        "answered columns",
    ),
    "a map of other types": (
        lambda s: s.map(lambda batch: batch.select(["user"]), pa.schema([("user", pa.list_(pa.int8()))])),
        "declared are",
    ),
    "a map of other rows": (
        lambda s: s.map(lambda batch: pa.record_batch({"x": [1]}), pa.schema([("x", pa.int64())])),
        "keeps rows",
    ),
    "a key of a time": (lambda s: s.key_by("ts"), "no bytes of their own: cast it"),
    "a key its serde cannot write": (lambda s: s.key_by("amount", tg.String()), "give another serde"),
    "shards": (lambda s: s.key_by("user", shards=0), "from 1 to 1024"),
    "validate after others": (lambda s: s.filter("amount > 0").validate(), "it comes first"),
    "an unknown policy": (lambda s: s.validate("ignore"), "choose 'fail', 'drop' or 'keep'"),
    "an old policy": (lambda s: s.validate("stop"), "on_error is 'stop': say 'fail'"),
    "an old keyword": (
        lambda s: s.validate(on_fault="stop"),
        r"validate\(on_fault='stop'\) has another name now: validate\(on_error='fail'\)",
    ),
    "an unknown fault": (lambda s: s.validate({"lost": "fail"}), "'lost' is no kind of fault"),
    "an age below never": (lambda s: s.validate(max_age=-2), "duration -2 is negative"),
    "state on both sides of a shuffle": (
        lambda s: s.drop_duplicates("order_id", "1m").key_by("user").window(MINUTE).count(),
        "put key_by first",
    ),
    "a step after windows": (
        lambda s: s.window(MINUTE).count().filter("count > 5"),
        r"app\.changes",
    ),
    "windows of windows": (lambda s: s.window(MINUTE).count().window(MINUTE).count(), "last step"),
    "windows without an aggregate": (
        lambda s: s.window(MINUTE).to_topic("x"),
        r"\.agg\(orders=count\(\)\)",
    ),
    "windows of nothing": (lambda s: s.window(MINUTE).agg(), "ask for count"),
    "an aggregate of text": (
        lambda s: s.window(MINUTE).agg(a=tg.sum("user")),
        "string cannot be summed; cast",
    ),
    "an aggregate twice": (
        lambda s: s.window(MINUTE).agg(tg.count(), count=tg.count()),
        "its own name",
    ),
    "a retention below the window": (
        lambda s: s.window(tg.Tumbling("1m", retention="10s")),
        "give at least 60000 ms",
    ),
    "closing what never closes": (
        lambda s: s.window(tg.Unlimited(), emit="close").count(),
        "never closes",
    ),
    "an unknown emit": (lambda s: s.window(MINUTE, emit="often").count(), "choose 'update' or 'close'"),
    "a guard without a late table": (
        lambda s: s.window(MINUTE, late="drop", future=tg.FutureGuard("1m", "late")).count(),
        "policy='keep'",
    ),
    "a table of events": (lambda s: s.to_table("t"), r"use \.window"),
    "no topic's name": (lambda s: s.to_topic("a/b"), "a/b"),
    "partitions": (lambda s: s.to_topic("x", partitions=0), "at least 1"),
    "a key format": (lambda s: s.to_topic("x", key_format="java"), "choose 'changelog', 'topic'"),
    "a value of columns that are not there": (
        lambda s: s.to_topic("x", value=tg.Json(amont="double")),
        "did you mean amount",
    ),
    "a value of one column for several": (lambda s: s.to_topic("x", value=tg.Long()), "select one"),
    "a value of another type": (
        lambda s: s.select("user").to_topic("x", value=tg.Long()),
        "cannot be written by user as long",
    ),
    "bytes in JSON": (lambda s: s.select(x="encode(user)").to_topic("x"), r"hex\(x\)"),
    "a column that is there already": (
        lambda s: s.lookup("c", "user", value=tg.Json(user="string")),
        "under another name",
    ),
    "nothing looked up": (lambda s: s.lookup("c", value=tg.Json(name="string")), "which columns"),
}


@pytest.mark.parametrize(("ask", "said"), WRONG.values(), ids=WRONG.keys())
def test_it_is_refused_with_the_remedy(stream, ask, said) -> None:
    with pytest.raises(tg.InvalidError, match=f"(?s){said}"):
        ask(stream)


@pytest.mark.parametrize(
    "ask",
    [
        lambda s: s.filter(5),
        lambda s: s.select(5),
        lambda s: s.map(lambda batch: batch, {"a": "int"}),
        lambda s: s.window("1m").count(),
        lambda s: s.window(MINUTE).agg(a="count"),
        lambda s: s.key_by("user", tg.String),
        lambda s: s.to_topic("x", value=tg.windowed(tg.String(), size="1m")),
    ],
)
def test_things_of_the_wrong_kind_are_type_errors(stream, ask) -> None:
    with pytest.raises(TypeError):
        ask(stream)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"timestamp": "placd"}, "did you mean placed"),
        ({"timestamp": "user"}, "a timestamp, or a long"),
        ({"start": "middle"}, "'earliest', 'latest'"),
        ({"on_error": "ignore"}, "'fail', 'drop', 'keep'"),
    ],
)
def test_a_source_is_checked_too(tmp_path, settings, said) -> None:
    app = tg.App("shop", data=tmp_path)
    value = tg.Json(user="string", placed="timestamp")
    with pytest.raises(tg.InvalidError, match=said):
        app.stream("orders", value=value, **settings)
    assert app.stream("orders", value=value, timestamp="placed").schema.names == ["user", "placed"]


def test_attributes_that_nobody_has_stay_attribute_errors(stream) -> None:
    with pytest.raises(AttributeError):
        _ = stream.window(MINUTE).nonsense
    assert not hasattr(stream.window(MINUTE), "__arrow_array__")
