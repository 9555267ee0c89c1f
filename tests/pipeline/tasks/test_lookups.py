"""A stream that looks into a table: rows are found by key, of one commit for a whole round."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.clock import SystemClock
from tidegate.errors import InvalidError, UnavailableError
from tidegate.metrics import Metrics

TEN = 1_767_261_600_000
PRICE = tg.Json(cents="int64", name="string")


def write(folder: Path, topic: str, rows: list[tuple[str, str | None]]) -> None:
    with tg.Log(folder / "log") as log:
        log.create_topic(topic, 2, if_not_exists=True)
        log.writer(topic).write(
            pa.table(
                {
                    "key": [key for key, _ in rows],
                    "value": pa.array([value for _, value in rows], pa.string()),
                    "timestamp": [TEN] * len(rows),
                }
            )
        )


def prices(folder: Path, rows: list[tuple[str, str | None]]) -> None:
    write(folder, "prices", rows)
    reader = tg.App("reader", data=folder)
    with reader.table("prices", value=PRICE) as table:
        table.catch_up()


def sold(folder: Path, **settings: object) -> list[tuple[str, str]]:
    """What an app that looks prices up sends on."""
    app = tg.App("sales", data=folder)
    stream = app.stream("sales", value=tg.Json(item="string", pieces="int64"))
    stream.lookup("prices", "cents", label="name", value=PRICE, **settings).to_topic(
        "priced", integrity=False
    )  # type: ignore[arg-type]
    app.run("local", until="caught_up")
    with tg.Log(folder / "log", read_only=True) as log:
        found = log.reader("priced").read_all().to_pylist()
    return sorted((row["key"].decode(), row["value"].decode()) for row in found)


def test_columns_are_added_and_null_where_there_is_no_row(tmp_path: Path) -> None:
    prices(
        tmp_path,
        [("pen", '{"cents":120,"name":"Pen"}'), ("ink", '{"cents":900,"name":"Ink"}'), ("gone", None)],
    )
    write(tmp_path, "sales", [("pen", '{"item":"a","pieces":2}'), ("gone", '{"item":"b","pieces":1}')])
    assert sold(tmp_path) == [
        ("gone", '{"item":"b","pieces":1,"cents":null,"label":null}'),
        ("pen", '{"item":"a","pieces":2,"cents":120,"label":"Pen"}'),
    ]


def test_rows_without_a_match_can_be_left_out(tmp_path: Path) -> None:
    prices(tmp_path, [("pen", '{"cents":120,"name":"Pen"}')])
    write(tmp_path, "sales", [("pen", '{"item":"a","pieces":2}'), ("ink", '{"item":"b","pieces":1}')])
    assert [key for key, _ in sold(tmp_path, required=True)] == ["pen"]


def test_another_key_than_the_streams_can_be_looked_up(tmp_path: Path) -> None:
    prices(tmp_path, [("pen", '{"cents":120,"name":"Pen"}')])
    write(tmp_path, "sales", [("order-1", '{"item":"pen","pieces":2}')])
    assert sold(tmp_path, key="item") == [("order-1", '{"item":"pen","pieces":2,"cents":120,"label":"Pen"}')]


def test_a_table_that_is_not_built_yet_is_named(tmp_path: Path) -> None:
    write(tmp_path, "sales", [("pen", '{"item":"a","pieces":2}')])
    with pytest.raises(UnavailableError, match="no commit of table prices"):
        sold(tmp_path)


def test_windows_cannot_be_looked_up(tmp_path: Path) -> None:
    with tg.Log(tmp_path / "log") as log:
        log.create_topic("prices", 1)
    with tg.App("reader", data=tmp_path).windowed_table("prices", "1m") as table:
        table.catch_up()
    write(tmp_path, "sales", [("pen", '{"item":"a","pieces":2}')])
    with pytest.raises(InvalidError, match="holds windows"):
        sold(tmp_path)


def sales_app(folder: Path) -> tg.App:
    app = tg.App("sales", data=folder)
    stream = app.stream("sales", value=tg.Json(item="string", pieces="int64"))
    stream.lookup("prices", "cents", value=PRICE).to_topic("priced", integrity=False)
    return app


def cents(folder: Path) -> list[int | None]:
    with tg.Log(folder / "log", read_only=True) as log:
        found = log.reader("priced").read_all()["value"].to_pylist()
    return [json.loads(value)["cents"] for value in found]


def sell(folder: Path, count: int = 1) -> None:
    write(folder, "sales", [("pen", '{"item":"a","pieces":1}')] * count)


def test_a_changed_row_is_seen_though_nobody_else_builds_the_table(tmp_path: Path) -> None:
    prices(tmp_path, [("pen", '{"cents":120,"name":"Pen"}')])
    sell(tmp_path)
    app = sales_app(tmp_path)
    app.run("local", until="caught_up")
    write(tmp_path, "prices", [("pen", '{"cents":130,"name":"Pen"}')])  # and nobody opens the table
    sell(tmp_path)
    assert "prices: commit 1, 1 records behind prices" in app.explain()
    summary = app.run("local", until="caught_up")
    assert cents(tmp_path) == [120, 130]
    assert dict(summary.progress.lookup_lag_records) == {"prices": 0}
    assert "prices: commit 2, 0 records behind prices" in app.explain()
    write(tmp_path, "prices", [("pen", None)])
    sell(tmp_path)
    app.run("local", until="caught_up")
    assert cents(tmp_path) == [120, 130, None]


def test_a_table_that_nobody_has_built_is_built_from_the_topic_of_its_name(tmp_path: Path) -> None:
    write(tmp_path, "prices", [("pen", '{"cents":120,"name":"Pen"}')])
    sell(tmp_path)
    app = sales_app(tmp_path)
    assert "prices: not built yet" in app.explain()
    app.run("local", until="caught_up")
    assert cents(tmp_path) == [120]
    with tg.App("reader", data=tmp_path).table("prices", value=PRICE) as table:  # a table like any other
        assert table.role == "builder" and table.get("pen")["cents"] == 120


def test_a_table_that_another_process_builds_is_read_as_that_one_commits_it_and_its_lag_is_told(
    tmp_path: Path,
) -> None:
    write(tmp_path, "prices", [("pen", '{"cents":120,"name":"Pen"}')])
    sell(tmp_path)
    app, metrics = sales_app(tmp_path), Metrics()
    with tg.App("reader", data=tmp_path).table("prices", value=PRICE) as table:
        assert table.role == "builder"
        write(
            tmp_path, "prices", [("pen", '{"cents":130,"name":"Pen"}'), ("ink", '{"cents":9,"name":"Ink"}')]
        )
        summary = app.run("local", until="caught_up", metrics=metrics)
        assert cents(tmp_path) == [120]
        assert dict(summary.progress.lookup_lag_records) == {"prices": 2}
        lag = next(each for each in metrics.instruments() if each.name == "tidegate_lookup_lag_records")
        assert lag.value(app="sales", table="prices") == 2
        assert "2 records behind prices" in app.explain()
        table.catch_up()
        sell(tmp_path)
        app.run("local", until="caught_up")
        assert cents(tmp_path) == [120, 130]


def test_a_running_app_sees_changes_of_the_table(tmp_path: Path) -> None:
    write(tmp_path, "prices", [("pen", '{"cents":1,"name":"Pen"}')])
    sell(tmp_path)
    run = sales_app(tmp_path).start("local", trigger="50ms")
    try:
        for price in range(2, 5):
            write(tmp_path, "prices", [("pen", f'{{"cents":{price},"name":"Pen"}}')])
            until = SystemClock().monotonic_ms() + 120_000
            while price not in cents(tmp_path):
                assert SystemClock().monotonic_ms() < until
                sell(tmp_path)
                SystemClock().sleep_ms(200)
    finally:
        run.stop()
    seen = cents(tmp_path)
    assert seen == sorted(seen, key=lambda each: each or 0) and {1, 2, 3, 4} >= set(seen) - {None}


def test_rows_that_do_not_fit_leave_the_table_as_it_is_and_the_lag_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prices(tmp_path, [("pen", '{"cents":120,"name":"Pen"}')])
    write(tmp_path, "prices", [("pen", "no JSON at all")])
    sell(tmp_path)
    summary = sales_app(tmp_path).run("local", until="caught_up")
    assert cents(tmp_path) == [120]
    assert dict(summary.progress.lookup_lag_records) == {"prices": 1}
    assert "cannot be kept up to date here" in caplog.text
