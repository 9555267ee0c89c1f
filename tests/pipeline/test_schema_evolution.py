"""Fields that are declared later, and definitions that are taken back: what is followed, and what is said where not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg

TEN = 1_767_261_600_000
TWO, THREE = {"id": "string", "n": "int64"}, {"id": "string", "n": "int64", "extra": "string"}


def produce(folder: Path, first: int, seconds: list[int]) -> None:
    with tg.Log(folder / "log", durability="os") as log:
        log.create_topic("orders", 1, if_not_exists=True)
        values = [
            json.dumps({"id": f"{first + row}", "n": first + row, "extra": f"e{first + row}"})
            for row in range(len(seconds))
        ]
        times = [TEN + 1000 * second for second in seconds]
        log.writer("orders").write(
            pa.table({"key": ["k"] * len(values), "value": values, "timestamp": times})
        )


def define(folder: Path, fields: dict[str, str], **settings: Any) -> tg.App:
    app = tg.App("shop", data=folder)
    stream = app.stream("orders", value=tg.Json(**fields))
    if settings.pop("rekeyed", False):
        stream = stream.key_by("id")
    stream = stream.drop_duplicates("id", within="30s")
    window = tg.Tumbling("10s", grace="5s", retention=settings.pop("retention", "1h"))
    stream.window(window, **settings).agg(total=tg.sum("n")).to_table("totals")
    return app


def ran(app: tg.App) -> tg.App:
    summary = app.run("local", until="caught_up")
    assert summary.exit_code == 0, summary
    return app


def totals(app: tg.App) -> list[int]:
    with app, app.open_table("totals") as table:
        return table.to_arrow().sort_by("window_start")["total"].to_pylist()


def test_one_more_field_is_followed_and_late_records_of_before_stay_readable(tmp_path: Path) -> None:
    """Twice, so that the late table holds rows of three sets of columns."""
    produce(tmp_path, 1, [0, 25, 1])  # the third is late for its window
    app = ran(define(tmp_path, TWO))
    assert app.late("totals").num_rows == 1 and totals(app) == [1, 2]
    produce(tmp_path, 4, [26, 2])
    app = ran(define(tmp_path, THREE))
    assert totals(app) == [1, 2 + 4]
    late = app.late("totals").sort_by("offset")
    assert late["offset"].to_pylist() == [2, 4]
    assert [row["extra"] for row in _values(late)] == [None, "e5"]
    assert [row["n"] for row in _values(late)] == [3, 5]
    produce(tmp_path, 6, [27, 3])
    four = {"another": "int64", **THREE}
    app = ran(define(tmp_path, four))
    assert totals(app) == [1, 2 + 4 + 6]
    late = app.late("totals").sort_by("offset")
    assert [(row["extra"], row["another"]) for row in _values(late)] == [
        (None, None),
        ("e5", None),
        ("e7", None),
    ]
    produce(tmp_path, 8, [28])
    assert totals(ran(define(tmp_path, four))) == [1, 2 + 4 + 6 + 8]  # and unchanged again


def _values(late: pa.Table) -> list[dict[str, Any]]:
    return [row.get("values", row) for row in late.to_pylist()]


def test_a_field_less_that_nothing_is_made_of_is_followed(tmp_path: Path) -> None:
    def without_late(fields: dict[str, str]) -> tg.App:
        app = tg.App("shop", data=tmp_path)
        stream = app.stream("orders", value=tg.Json(**fields))
        stream.window(tg.Tumbling("10s", retention="1h"), late="drop").agg(total=tg.sum("n")).to_table(
            "totals"
        )
        return app

    produce(tmp_path, 1, [0, 1])
    ran(without_late(THREE))
    produce(tmp_path, 3, [2])
    assert totals(ran(without_late(TWO))) == [6]


@pytest.mark.parametrize(
    ("before", "after", "settings", "said"),
    [
        (
            TWO,
            {"id": "string", "n": "double"},
            {},
            "field n was int64 and is double: states of drop_duplicates and agg",
        ),
        (THREE, TWO, {}, "field extra is not declared any more: the late table of drop_duplicates holds"),
        (TWO, THREE, {"rekeyed": True}, "field extra is new: the store of records that wait behind key_by"),
    ],
    ids=["another type", "a field less", "held back"],
)
def test_what_cannot_be_followed_names_the_state_and_the_ways_out(
    tmp_path: Path, before: dict[str, str], after: dict[str, str], settings: dict[str, Any], said: str
) -> None:
    produce(tmp_path, 1, [0, 25, 1])
    ran(define(tmp_path, before, **settings))
    with pytest.raises(tg.InvalidError) as refused:
        define(tmp_path, after, **settings).run("local", until="caught_up")
    assert said in str(refused.value) and "tidegate app replay shop" in str(refused.value)
    produce(tmp_path, 4, [26])
    ran(define(tmp_path, before, **settings))


def test_a_change_is_taken_back_while_nothing_was_read(tmp_path: Path) -> None:
    produce(tmp_path, 1, [0, 1])
    ran(define(tmp_path, TWO))
    ran(define(tmp_path, TWO, retention="9h"))
    ran(define(tmp_path, THREE, retention="10h"))
    produce(tmp_path, 3, [2])
    app = ran(define(tmp_path, TWO))  # shorter than what was committed last, and a field less
    assert totals(app) == [6]
    ran(define(tmp_path, TWO, retention="9h"))
    produce(tmp_path, 4, [3])
    ran(define(tmp_path, TWO, retention="9h"))
    with pytest.raises(tg.InvalidError, match="retention was 9h and is 1h"):
        define(tmp_path, TWO).run("local", until="caught_up")
    assert totals(define(tmp_path, TWO, retention="9h")) == [10]


def test_an_app_that_has_read_nothing_follows_any_definition(tmp_path: Path) -> None:
    with tg.Log(tmp_path / "log", durability="os") as log:
        log.create_topic("orders", 1)
    ran(define(tmp_path, TWO))
    app = tg.App("shop", data=tmp_path)
    stream = app.stream("orders", value=tg.Json(n="double"))
    stream.window(tg.Session("5s")).agg(total=tg.max("n")).to_table("totals")
    ran(app)
    produce(tmp_path, 1, [0, 1])
    with ran(app) as opened, opened.open_table("totals") as table:
        assert table.to_arrow()["total"].to_pylist() == [2.0]


def test_a_beginning_at_the_end_of_the_log_stays_where_it_was_decided(tmp_path: Path) -> None:
    def latest(aggregate: Any) -> tg.App:
        app = tg.App("shop", data=tmp_path)
        stream = app.stream("orders", value=tg.Json(**TWO), start="latest")
        stream.window(tg.Tumbling("10s", retention="1h")).agg(total=aggregate).to_table("totals")
        return app

    produce(tmp_path, 1, [0])
    ran(latest(tg.sum("n")))
    produce(tmp_path, 2, [1, 2])
    assert totals(ran(latest(tg.max("n")))) == [3]  # not read over


# -- a longer grace ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("emit", ["update", "close"])
@pytest.mark.parametrize(
    "kind",
    [tg.Tumbling, lambda size, **rest: tg.Hopping(size, "5s", **rest), tg.Session, tg.Sliding],
    ids=["tumbling", "hopping", "session", "sliding"],
)
def test_windows_that_were_final_stay_final_when_the_grace_becomes_longer(
    tmp_path: Path, kind: Any, emit: str
) -> None:
    """A record went into a window whose result was sent for good, was not late, and was never sent."""

    def counted(grace: str) -> tg.App:
        app = tg.App("shop", data=tmp_path)
        stream = app.stream("orders", value=tg.Json(**TWO))
        windows = stream.window(kind("10s", grace=grace, retention="1d"), emit=emit)
        windows.agg(n=tg.count()).to_topic("counts", value=tg.Json(n="int64"))
        return ran(app)

    def rows(app: tg.App) -> dict[Any, int]:
        with app, app.open_table("counts") as table:
            return {row.window: row.value["n"] for row in table.all()}

    produce(tmp_path, 1, [1, 2, 30, 61])
    before = rows(counted("0s"))
    produce(tmp_path, 10, [3, 31, 60, 200])  # two too late for windows that were final, two in time
    app = counted("2m")
    after, late = rows(app), app.late("counts")
    final = {window: n for window, n in before.items() if window.end <= TEN + 45_000}
    assert final and {window: n for window, n in after.items() if window in final} == final
    assert {row["offset"] for row in late.to_pylist()} == {4, 5}
    if kind in (tg.Tumbling, tg.Session):  # others have a record in several windows
        assert sum(after.values()) == 8 - 2


def test_copies_of_ids_that_are_gone_do_not_count_when_the_grace_becomes_longer(tmp_path: Path) -> None:
    """Of 29 copies that had been late, 27 were counted a second time."""

    def unique(grace: str) -> tuple[int, int]:
        app = tg.App("shop", data=tmp_path)
        stream = app.stream("orders", value=tg.Json(**TWO)).drop_duplicates("id", "10s", grace=grace)
        stream.window(tg.Unlimited()).count("n").to_table("orders-once")
        ran(app)
        with app, app.open_table("orders-once") as table:
            return sum(row.value["n"] for row in table.all()), app.late("orders-once").num_rows

    seconds = list(range(0, 600, 20))
    produce(tmp_path, 0, seconds)
    assert unique("0s") == (30, 0)
    produce(tmp_path, 0, seconds)
    assert unique("1h") == (30, 29)
    produce(tmp_path, 100, [700, 620, 590])
    assert unique("1h") == (33, 29)
