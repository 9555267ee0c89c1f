"""A stream that looks into a table: rows are found by key, of one commit for a whole round."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.errors import InvalidError, UnavailableError

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
    stream.lookup("prices", "cents", label="name", value=PRICE, **settings).to("priced", integrity=False)  # type: ignore[arg-type]
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
