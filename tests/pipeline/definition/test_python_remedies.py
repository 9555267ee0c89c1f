"""What an error says to write instead is taken out of its text, written, and then the pipeline is accepted or runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from remedies import keyword, written

TEN = 1_767_261_600_000
ORDER = tg.Json(id="string", amount="double", ts="timestamp")
MINUTE = tg.Tumbling("1m")
BLANKS = {"to_topic(topic)": "to_topic('out')", "to_table(name)": "to_table('out')"}


def orders(folder: Path, **settings: Any) -> tuple[tg.App, tg.Stream]:
    app = tg.App("shop", data=folder)
    return app, app.stream("orders", value=ORDER, **settings)


def produced(folder: Path, *values: str, topic: str = "orders", keys: list[Any] | None = None) -> None:
    with tg.Log(folder / "log") as log:
        log.create_topic(topic, if_not_exists=True)
        rows = {
            "key": keys or ["k"] * len(values),
            "value": list(values),
            "timestamp": [TEN + n for n in range(len(values))],
        }
        log.writer(topic).write(pa.table(rows))


FIVE = ['{"id":"a","amount":1.0}'] * 5


def refused(what: Callable[[], Any]) -> str:
    with pytest.raises(tg.TidegateError) as told:
        what()
    return str(told.value)


def ran(app: tg.App, **settings: Any) -> Any:
    summary = app.run("local", until="caught_up", **settings)
    assert summary.exit_code == 0, summary
    return summary


# -- steps ---------------------------------------------------------------------------------------


def test_windows_over_windows_go_through_a_topic_and_its_changes(tmp_path: Path) -> None:
    app, stream = orders(tmp_path)
    windows = stream.window(MINUTE).agg(n=tg.count())
    told = refused(lambda: windows.window(tg.Tumbling("1h")).agg(n=tg.sum("value")))
    sent = written(told, ".to_topic(topic)", {"w": windows}, **{".to_topic(topic)": "w.to_topic('minutes')"})
    assert sent is not None
    changes = written(
        told,
        "app.changes(topic, …)",
        {"app": app},
        topic="'minutes'",
        **{"…": "window_size='1m', value=Long()"},
    )
    changes.window(tg.Tumbling("1h", retention="1d")).agg(n=tg.sum("value")).to_table("hours")
    produced(tmp_path, *FIVE)
    ran(app, round_records=2)
    with app.open_table("hours") as table:
        assert sum(row.value["n"] for row in table.all()) == 5


def test_validate_is_put_first(tmp_path: Path) -> None:
    app, stream = orders(tmp_path)
    told = refused(lambda: stream.filter("amount > 0").validate())
    first = written(told, "stream(…).validate()", {"stream": app.stream}, **{"…": "'orders'"})
    first.to_topic("out")
    app.explain(sample=False)


def test_a_condition_is_a_comparison(tmp_path: Path) -> None:
    _, stream = orders(tmp_path)
    told = refused(lambda: stream.filter("amount"))
    assert "like amount > 0" in told
    stream.filter("amount > 0")


def test_an_unlimited_window_is_sent_with_every_update(tmp_path: Path) -> None:
    _, stream = orders(tmp_path)
    told = refused(lambda: stream.window(tg.Unlimited(), emit="close").agg(n=tg.count()))
    stream.window(tg.Unlimited(), **keyword(told, "emit='update'")).agg(n=tg.count()).to_topic("out")


LATE = ["late=LateSettings(…)", "future=FutureGuard(…, policy='keep')", "future=None"]


@pytest.mark.parametrize("instead", LATE)
def test_the_future_guard_has_somewhere_to_put_records(tmp_path: Path, instead: str) -> None:
    _, stream = orders(tmp_path)
    given: dict[str, Any] = {"late": "drop", "future": tg.FutureGuard("1d")}
    told = refused(lambda: stream.window(MINUTE, **given).agg(n=tg.count()))
    blanks = {"…": "'1d'"} if "Guard" in instead else {}
    stream.window(MINUTE, **(given | keyword(told, instead, **blanks))).agg(n=tg.count()).to_topic("out")


OVER_UPDATES: dict[str, Callable[[Any], Any]] = {
    "deduplicate": lambda changes: changes.drop_duplicates("value", within="1m"),
    "sessions": lambda changes: changes.window(tg.Session("1m")).agg(n=tg.count()),
    "an aggregate that cannot take back": lambda changes: changes.window(MINUTE).agg(n=tg.max("value")),
}


@pytest.mark.parametrize("what", OVER_UPDATES)
def test_what_cannot_take_back_reads_windows_that_are_final(tmp_path: Path, what: str) -> None:
    app, stream = orders(tmp_path)
    stream.window(MINUTE).agg(n=tg.count()).to_topic("minutes")
    told = refused(lambda: OVER_UPDATES[what](app.changes("minutes", window_size="1m", value=tg.Long())))
    app, stream = orders(tmp_path)
    closing = written(told, "window(…, emit='close')", {"window": stream.window}, **{"…": "Tumbling('1m')"})
    closing.agg(n=tg.count()).to_topic("minutes")
    changes = written(
        told,
        "app.changes(…, emit='close')",
        {"app": app},
        **{"…": "'minutes', window_size='1m', value=Long()"},
    )
    OVER_UPDATES[what](changes).to_topic("out")
    produced(tmp_path, *FIVE)
    ran(app, close=True)


def test_deduplicate_is_left_out_of_changes(tmp_path: Path) -> None:
    app, stream = orders(tmp_path)
    stream.window(MINUTE).agg(n=tg.count()).to_topic("minutes")
    told = refused(
        lambda: app.changes("minutes", window_size="1m", value=tg.Long()).drop_duplicates(
            "value", within="1m"
        )
    )
    assert "leave drop_duplicates out" in told
    app.changes("minutes", window_size="1m", value=tg.Long()).window(tg.Tumbling("1h")).agg(
        n=tg.sum("value")
    ).to_topic("hours")
    app.explain(sample=False)


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [".to_topic(topic)", ".to_table(name)"])
def test_a_stream_gets_an_end(tmp_path: Path, end: str) -> None:
    app, stream = orders(tmp_path)
    told = refused(lambda: app.run("local", until="caught_up"))
    windows = stream.window(MINUTE).agg(n=tg.count())
    written(told, end, {"w": windows}, **{end: f"w.{BLANKS[end[1:]]}"})
    produced(tmp_path, *FIVE)
    ran(app)


def test_only_windows_are_a_table_and_a_topic_is_one_too(tmp_path: Path) -> None:
    app, stream = orders(tmp_path)
    told = refused(lambda: (stream.to_table("out"), app.explain(sample=False)))
    assert ".window(…).agg(…)" in told and ".to_topic(topic) and app.table(topic)" in told
    app, stream = orders(tmp_path)
    stream.to_topic("copies")
    produced(tmp_path, *FIVE)
    ran(app)
    with app.table("copies") as table:
        table.catch_up()
        assert len(list(table.all())) == 1


def test_windows_have_a_result_before_an_end(tmp_path: Path) -> None:
    _, stream = orders(tmp_path)
    windows = stream.window(MINUTE)
    told = refused(lambda: windows.to_topic("out"))
    written(told, ".agg(orders=count())", {"w": windows}, **{".agg": "w.agg"}).to_topic("out")


def test_bytes_are_sent_as_text(tmp_path: Path) -> None:
    app = tg.App("shop", data=tmp_path)
    stream = app.stream("orders")
    told = refused(lambda: (stream.select("value", n="1").to_topic("out"), app.explain(sample=False)))
    for code in re.findall(r"(\w+\(value\))", told)[:2]:
        fixed = tg.App("shop", data=tmp_path)
        fixed.stream("orders").select(value=code, n="1").to_topic("out")
        fixed.explain(sample=False)


# -- topics that the app writes itself -----------------------------------------------------------


def test_own_windows_are_read_as_changes(tmp_path: Path) -> None:
    app, stream = orders(tmp_path)
    stream.window(MINUTE).agg(n=tg.count()).to_topic("minutes")
    hours = app.stream("minutes", value=tg.Json(n="int64")).window(tg.Tumbling("1h")).agg(n=tg.sum("n"))
    told = refused(lambda: hours.to_topic("hours"))
    app, stream = orders(tmp_path)
    stream.window(MINUTE).agg(n=tg.count()).to_topic("minutes")
    changes = written(
        told, "app.changes('minutes', …)", {"app": app}, **{"…": "window_size='1m', value=Long()"}
    )
    changes.window(tg.Tumbling("1h")).agg(n=tg.sum("value")).to_topic("hours")
    app.explain(sample=False)


def test_what_is_recorded_of_a_topic_is_said(tmp_path: Path) -> None:
    writer, stream = orders(tmp_path)
    stream.window(MINUTE, emit="close").agg(n=tg.count(), total=tg.sum("amount")).to_topic("minutes")
    produced(tmp_path, *FIVE)
    ran(writer, close=True)

    def hours(changes: Any) -> None:
        changes.window(tg.Tumbling("1h", retention="1d")).agg(n=tg.sum("n")).to_table("hours")

    other = tg.App("other", data=tmp_path)
    value = tg.Json(n="int64")
    hours(other.changes("minutes", window_size="1m", value=value))
    told = refused(lambda: other.run("local", until="caught_up"))
    other = tg.App("other", data=tmp_path)
    code = "app.changes('minutes', emit='close', …)"
    hours(written(told, code, {"app": other, "value": value}, **{"…": "window_size='1m', value=value"}))
    ran(other)
    with other.open_table("hours") as table:
        assert sum(row.value["n"] for row in table.all()) == 5


# -- keys, values, places ------------------------------------------------------------------------


def test_a_key_without_bytes_of_its_own_is_cast(tmp_path: Path) -> None:
    _, stream = orders(tmp_path)
    told = refused(lambda: stream.key_by("ts"))
    written(told, 'key_by("CAST(… AS VARCHAR)")', {"key_by": stream.key_by}, **{"…": "ts"}).to_topic("out")


def test_keys_that_cannot_be_read_are_declared_as_bytes(tmp_path: Path) -> None:
    produced(tmp_path, *FIVE, keys=[b"\xff"] * 5)
    app, stream = orders(tmp_path, key=tg.Long())
    stream.filter("key > 5").to_topic("out")
    told = str(app.run("local", until="caught_up"))
    app = tg.App("again", data=tmp_path)
    app.stream("orders", value=ORDER, **keyword(told, "key=Bytes()")).filter(
        "octet_length(key) = 1"
    ).to_topic("out")
    assert ran(app).records == 5


def test_a_value_that_cannot_be_converted_is_tried(tmp_path: Path) -> None:
    _, stream = orders(tmp_path)
    told = refused(lambda: stream.select(n="CAST('x' AS BIGINT)"))
    assert "TRY_CAST(… AS …)" in told
    stream.select(n="TRY_CAST('x' AS BIGINT)").to_topic("out")


def test_an_app_is_told_where_its_data_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = refused(lambda: tg.App("shop"))
    app = tg.App("shop", **keyword(told, "data='./data'"))
    assert Path(app.log) == tmp_path / "data" / "log"
    told = refused(lambda: tg.App("shop", log="./data/log", state="memory://"))
    tg.App("shop", log="./data/log", **keyword(told, "state='./state'"))


def test_input_that_ends_is_read_to_its_end(tmp_path: Path) -> None:
    app, stream = orders(tmp_path)
    stream.window(MINUTE).agg(n=tg.count()).to_table("out")
    produced(tmp_path, *FIVE)
    told = refused(lambda: app.run("local", close=True))
    app.run("local", close=True, **keyword(told, "until='caught_up'"))


# -- lookups -------------------------------------------------------------------------------------


def test_a_table_to_look_into_is_built_and_its_keys_are_cast(tmp_path: Path) -> None:
    price = tg.Json(cents="int64")
    produced(tmp_path, '{"id":"a","amount":7.0}')

    def looked_up(**given: Any) -> tg.App:
        app, stream = orders(tmp_path)
        stream.lookup("prices", "cents", value=price, **given).to_topic("priced", integrity=False)
        return app

    told = refused(lambda: ran(looked_up(key="CAST(amount AS VARCHAR)")))
    produced(tmp_path, '{"cents":5}', topic="prices", keys=[b"7"])
    with written(told, "app.table('prices', …)", {"app": tg.App("x", data=tmp_path), "price": price}, **{
        "…": "key=tg.String(), value=price"
    }) as table:  # fmt: skip
        table.catch_up()
    told = refused(lambda: ran(looked_up(key="amount")))
    cast = re.search(r'key="(CAST\(… AS \w+\))"', told)
    assert cast is not None, told
    ran(looked_up(key=cast.group(1).replace("…", "CAST(amount AS BIGINT)")))
    with tg.Log(tmp_path / "log", read_only=True) as log:
        assert b'"cents":5' in log.reader("priced").read_all().column("value")[0].as_py()
