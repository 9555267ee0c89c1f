"""An app as its user meets it: run, read without saying things twice, changed, run again."""

from __future__ import annotations

import pyarrow as pa
import pytest

import tidegate as tg

TEN = 1_767_261_600_000
ORDER = tg.Json(order_id="string", amount="double")


def produce(app: tg.App, *rows: tuple[str, int, str, float]) -> None:
    with tg.Log(app.log) as log:
        if "orders" not in log.topics():
            log.create_topic("orders", 1)
        log.writer("orders").write(
            pa.table(
                {
                    "key": [key for key, *_ in rows],
                    "value": [f'{{"order_id":"{order}","amount":{amount}}}' for *_, order, amount in rows],
                    "timestamp": [TEN + second * 1000 for _, second, *_ in rows],
                }
            )
        )


def define(folder, *, retention="10m", within="5m", topic="counts", windows=None, **more) -> tg.App:
    app = tg.App("shop", data=folder)
    orders = app.stream("orders", value=ORDER).drop_duplicates("order_id", within)
    counted = orders.window(tg.Tumbling("1m", grace="30s", retention=retention), **(windows or {}))
    counted.agg(orders=tg.count(), revenue=tg.sum("amount"), **more).to_topic(topic)
    return app


def fetched(app: tg.App, key: str) -> list[dict[str, object]]:
    with app, app.windowed_table("counts") as table:
        return [row.value for row in table.fetch(key)]


def test_what_the_app_makes_is_read_without_saying_it_again(tmp_path) -> None:
    app = define(tmp_path)
    produce(app, ("ann", 0, "a", 1.5), ("ann", 1, "a", 1.5), ("ann", 70, "b", 2.0))
    app.run("local", until="caught_up")
    assert fetched(app, "ann") == [{"orders": 1, "revenue": 1.5}, {"orders": 1, "revenue": 2.0}]
    elsewhere = tg.App("reader", log=app.log, state=tmp_path / "reader")
    with elsewhere, elsewhere.windowed_table("counts", "1m", value=tg.Json(orders="int64")) as table:
        assert [row.value for row in table.fetch("ann")] == [{"orders": 1}, {"orders": 1}]


def test_results_cannot_be_read_as_what_they_are_not(tmp_path) -> None:
    app = define(tmp_path)
    app.stream("orders", value=ORDER).window(tg.Session("1m")).count().to_topic("visits")
    app.stream("orders", value=ORDER).select("amount").to_topic("amounts")
    for ask, said in (
        (lambda: app.sessioned_table("counts"), r"tumbling windows: use app\.windowed_table"),
        (lambda: app.table("counts"), r"use app\.windowed_table"),
        (lambda: app.windowed_table("visits"), r"use app\.sessioned_table"),
        (lambda: app.windowed_table("amounts", "1m"), r"plain records: use app\.table"),
        (lambda: app.windowed_table("counts", "5m"), "makes windows of 1m"),
        (lambda: app.windowed_table("another"), "give window_size="),
        (lambda: app.table("x", key=tg.Long(), consumed=tg.Consumed()), "the one or the other"),
    ):
        with pytest.raises(tg.InvalidError, match=said):
            ask()


def test_a_longer_retention_goes_on_with_the_windows_there_are(tmp_path) -> None:
    app = define(tmp_path)
    produce(app, ("ann", 0, "a", 1.0), ("ann", 1, "b", 1.0))
    app.run("local", until="caught_up")
    longer = define(tmp_path, retention="30d", within="9h")
    assert longer.flows[0].document["layouts"] != app.flows[0].document["layouts"]
    produce(longer, ("ann", 2, "a", 1.0), ("ann", 3, "c", 1.0))  # a copy of before, and a third order
    longer.run("local", until="caught_up")
    assert fetched(longer, "ann") == [{"orders": 3, "revenue": 3.0}]
    define(tmp_path, retention="30d", within="9h").run("local", until="caught_up")  # and again, unchanged
    produce(longer, ("ann", 4, "d", 1.0))
    define(tmp_path, retention="60d", within="9h").run("local", until="caught_up")
    assert fetched(longer, "ann") == [{"orders": 4, "revenue": 4.0}]


def test_a_change_that_state_cannot_follow_touches_nothing(tmp_path) -> None:
    app = define(tmp_path)
    produce(app, ("ann", 0, "a", 1.0))
    app.run("local", until="caught_up")
    changed = define(tmp_path, windows={"emit": "close"})
    produce(app, ("ann", 1, "b", 1.0))
    with pytest.raises(tg.InvalidError, match=r"(?s)emit was update and is close.*tidegate app replay shop"):
        changed.run("local", until="caught_up")
    app.run("local", until="caught_up")
    assert fetched(app, "ann") == [{"orders": 2, "revenue": 2.0}]


def test_a_new_aggregate_counts_from_now_on_and_the_others_go_on(tmp_path) -> None:
    app = define(tmp_path)
    produce(app, ("ann", 0, "a", 9.0), ("bob", 0, "b", 1.0))
    app.run("local", until="caught_up")
    grown = define(tmp_path, most=tg.max("amount"))
    produce(app, ("ann", 1, "c", 4.0), ("ann", 70, "d", 3.0))
    grown.run("local", until="caught_up")
    with grown.open_table("counts") as table:
        assert [(row.key, row.value) for row in table.all()] == [
            ("ann", {"orders": 2, "revenue": 13.0, "most": 4.0}),  # the 9.0 was before
            ("ann", {"orders": 1, "revenue": 3.0, "most": 3.0}),
            ("bob", {"orders": 1, "revenue": 1.0, "most": None}),
        ]
    produce(app, ("ann", 2, "e", 5.0))
    define(tmp_path, most=tg.max("amount"), least=tg.min("amount")).run("local", until="caught_up")
    changed = define(tmp_path, most=tg.max("amount"), least=tg.min("amount"))
    with changed.open_table("counts") as table:
        assert table.fetch("ann")[0].value == {"orders": 3, "revenue": 18.0, "most": 5.0, "least": 5.0}


def test_changes_of_one_apps_table_feed_another_app(tmp_path) -> None:
    app = define(tmp_path / "shop", windows={"emit": "close"})
    produce(app, ("ann", 0, "a", 9.0), ("bob", 0, "b", 1.0), ("ann", 61, "c", 2.0))
    app.run("local", until="caught_up", close=True)
    second = tg.App("second", log=app.log, state=tmp_path / "second")
    value = tg.Json(orders="int64", revenue="double")
    changes = second.changes("counts", window_size="1m", value=value, emit="close")
    hours = changes.select("revenue", minute="epoch_ms(window_start) // 60000 % 60")
    hours.window(tg.Tumbling("1h")).agg(revenue=tg.sum("revenue"), minutes=tg.collect("minute")).to_topic(
        "hours"
    )
    second.run("local", until="caught_up")
    with second.open_table("hours") as table:
        found = {row.key: row.value for row in table.all()}
    assert found == {
        "ann": {"revenue": 11.0, "minutes": [0, 1]},
        "bob": {"revenue": 1.0, "minutes": [0]},
    }


def test_a_new_flow_begins_beside_the_others(tmp_path) -> None:
    app = define(tmp_path)
    produce(app, ("ann", 0, "a", 1.0), ("bob", 1, "b", 2.0))
    app.run("local", until="caught_up")
    grown = define(tmp_path)
    grown.stream("orders", value=ORDER).filter("amount > 1.5").to_topic("large")
    grown.run("local", until="caught_up")
    with tg.Log(app.log) as log, log.reader("large") as reader:
        values = [value for value in reader.read_all()["value"].to_pylist() if value]
    assert values == [b'{"order_id":"b","amount":2}'] or values == [b'{"order_id":"b","amount":2.0}']


@pytest.mark.parametrize("way_out", ["reset_app", "replay_app"])
def test_the_ways_out_that_the_message_names_lead_out(tmp_path, way_out) -> None:
    from tidegate.pipeline import admin
    from tidegate.storage import open_backend

    app = define(tmp_path)
    produce(app, ("ann", 0, "a", 1.0), ("ann", 1, "b", 4.0))
    app.run("local", until="caught_up")
    changed = define(tmp_path, within="1m", most=tg.max("amount"))
    with pytest.raises(tg.InvalidError, match="cannot follow"):
        changed.run("local", until="caught_up")
    backend = open_backend(app.state)
    getattr(admin, way_out)(backend, "shop")
    backend.close()
    changed.run("local", until="caught_up")
    with changed, changed.windowed_table("counts", value=tg.Json(orders="int64", most="double")) as table:
        assert [row.value for row in table.fetch("ann")] == [{"orders": 2, "most": 4.0}]


def test_windows_late_records_and_dead_letters_are_read_from_the_state(tmp_path) -> None:
    app = tg.App("shop", data=tmp_path)
    orders = app.stream("orders", value=ORDER, on_error="keep")
    orders.window(tg.Tumbling("1m", grace="30s", retention="1d")).agg(
        orders=tg.count(), revenue=tg.sum("amount")
    ).to_table("minutes")
    orders.select("amount").to_topic("amounts")
    with pytest.raises(tg.UnavailableError, match="no commit yet"):
        app.late("minutes")
    produce(app, ("ann", 0, "a", 1.0), ("ann", 300, "b", 2.0), ("bob", 10, "late", 4.0))
    with tg.Log(app.log) as log:
        log.writer("orders").write(pa.table({"key": ["eve"], "value": ["{"], "timestamp": [TEN]}))
    app.run("local", until="caught_up")
    with app.open_table("minutes") as table:
        assert [(row.key, row.value["orders"]) for row in table.all()] == [("ann", 1), ("ann", 1)]
    late = app.late("minutes").to_pylist()
    assert [(row["key"], row["values"]["order_id"], row["reason"]) for row in late] == [
        (b"bob", "late", "late")
    ]
    for flow in ("minutes", "amounts"):
        (letter,) = app.dead_letters(flow).to_pylist()
        assert letter["value"] == b"{" and letter["offset"] == 3
    with pytest.raises(tg.InvalidError, match="nothing is ever late"):
        app.late("amounts")
    with pytest.raises(tg.InvalidError, match="no topic or table 'minuts'; it has minutes, amounts"):
        app.open_table("minuts")
