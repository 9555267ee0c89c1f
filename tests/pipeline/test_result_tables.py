"""`.to_table()` and `app.open_table`: committed windows as tables, while the app goes on, of every kind of window."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.errors import InvalidError, UnavailableError
from tidegate.windows.keys import SessionWindow, TimeWindow

TEN = 1_767_261_600_000  # 2026-01-01T10:00Z
MINUTE = 60_000
KINDS: dict[str, Any] = {
    "tumbling": tg.Tumbling("1m", grace="1h", retention="1d"),
    "hopping": tg.Hopping("2m", "1m", grace="1h", retention="1d"),
    "sliding": tg.Sliding("1m", grace="1h", retention="1d"),
    "session": tg.Session("1m", grace="1h", retention="1d"),
}
CLICKS = [
    ("ann", 0, 1.0),
    ("bob", 10, 2.0),
    ("ann", 30, 4.0),
    ("ann", 70, 8.0),
    ("bob", 200, 16.0),
    ("cy", 210, 32.0),
]


def write(folder: Path, rows: list[tuple[str, int, float]], *, partitions: int = 1) -> None:
    with tg.Log(folder / "log") as log:
        log.create_topic("clicks", partitions, if_not_exists=True)
        log.writer("clicks").write(
            pa.table(
                {
                    "key": [key for key, _, _ in rows],
                    "value": [f'{{"x":{x}}}' for *_, x in rows],
                    "timestamp": [TEN + second * 1000 for _, second, _ in rows],
                }
            )
        )


def app_of(folder: Path, kind: Any = KINDS["tumbling"], *, rekeyed: bool = False, **settings: Any) -> tg.App:
    app = tg.App("clicks", data=folder)
    stream = app.stream("clicks", value=tg.Json(x="double"))
    if rekeyed:
        stream = stream.key_by("key || '!'", shards=3)
    stream.window(kind, **settings).agg(n=tg.count(), x=tg.sum("x")).to_table("totals")
    return app


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("rekeyed", [False, True], ids=["co-partitioned", "re-keyed"])
def test_a_key_shows_the_windows_that_the_whole_table_shows(tmp_path: Path, kind: Any, rekeyed: bool) -> None:
    write(tmp_path, CLICKS, partitions=2)
    app = app_of(tmp_path, kind, rekeyed=rekeyed)
    app.run("local", until="caught_up")
    mark = "!" if rekeyed else ""
    with app.open_table("totals") as table:
        whole = table.all().to_arrow()
        names = sorted(set(whole["key"].to_pylist()))
        assert names == [f"ann{mark}", f"bob{mark}", f"cy{mark}"]
        for name in names:
            expected = [row for row in whole.to_pylist() if row["key"] == name]
            assert table.fetch(name).to_arrow().to_pylist() == expected
        assert table.fetch_many(names).to_arrow() == whole
        assert table.fetch("nobody").to_arrow().num_rows == 0


@pytest.mark.parametrize("name", ["tumbling", "hopping", "sliding"])
def test_bounds_are_on_the_window_start_whatever_the_kind(tmp_path: Path, name: str) -> None:
    write(tmp_path, CLICKS)
    app = app_of(tmp_path, KINDS[name])
    app.run("local", until="caught_up")
    with app.open_table("totals") as table:
        whole = table.all().to_arrow().to_pylist()
        for first, last in (
            (TEN, TEN + MINUTE),
            (TEN + 1, TEN + 3 * MINUTE),
            (0, TEN),
            (TEN + MINUTE, TEN + MINUTE),
        ):
            expected = [row for row in whole if first <= row["window_start"] <= last]
            assert table.fetch_all(first, last).to_arrow().to_pylist() == expected
            ann = [row for row in expected if row["key"] == "ann"]
            assert table.fetch("ann", first, last).to_arrow().to_pylist() == ann


def test_rows_are_values_with_windows_and_the_aggregates_by_name(tmp_path: Path) -> None:
    write(tmp_path, CLICKS)
    app = app_of(tmp_path)
    app.run("local", until="caught_up")
    with app.open_table("totals") as table:
        first = table.fetch("ann", "2026-01-01T10:00Z", "2026-01-01T10:00Z")[0]
        assert (first.key, first.value) == ("ann", {"n": 2, "x": 5.0})
        assert first.window == TimeWindow(TEN, TEN + MINUTE)
        assert first.timestamp == TEN + 30_000
        assert table.get("ann", TEN) == {"n": 2, "x": 5.0}
        assert table.get("ann", TEN + 5 * MINUTE) is None
        assert table.schema.names == ["key", "window_start", "window_end", "n", "x", "timestamp"]
        assert table.position == {0: 6}
        assert [row.key for row in table.all()][-1] == "cy" and len(table.all()[1:3]) == 2
        assert "Rows(" in repr(table.all()) and "<table" in table.all()._repr_html_()


def test_sessions_carry_both_ends(tmp_path: Path) -> None:
    write(tmp_path, CLICKS)
    app = app_of(tmp_path, KINDS["session"])
    app.run("local", until="caught_up")
    with app.open_table("totals") as table:
        assert [row.window for row in table.fetch("ann")] == [SessionWindow(TEN, TEN + 70_000)]


def test_a_reader_follows_the_app_and_can_look_back(tmp_path: Path) -> None:
    write(tmp_path, CLICKS[:3])
    app = app_of(tmp_path)
    app.run("local", until="caught_up")
    with app.open_table("totals") as table:
        before, round = table.get("ann", TEN), table.round
        write(tmp_path, [("ann", 31, 100.0)])
        app_of(tmp_path).run("local", until="caught_up")
        with app.open_table("totals") as later:
            assert later.get("ann", TEN) == {"n": 3, "x": 105.0}
            past = later.as_of(round)
            assert past.get("ann", TEN) == before == {"n": 2, "x": 5.0}
            assert round in later.rounds() and later.round > round
            past.close()
            with pytest.raises(InvalidError, match="is not kept"):
                later.as_of(4711)
        assert table.refresh() > round
        assert table.fetch("ann", TEN, TEN)[0].value == {"n": 3, "x": 105.0}


def test_a_long_look_does_not_hold_up_others_nor_see_what_comes(tmp_path: Path) -> None:
    """While one thread reads a commit, the app goes on, and another thread reads the newer one."""
    write(tmp_path, CLICKS, partitions=2)
    app = app_of(tmp_path)
    app.run("local", until="caught_up")
    with app.open_table("totals") as table:
        reading, may_end, seen = threading.Event(), threading.Event(), list[tuple[int, int]]()

        def look(shown: Any) -> None:
            before = shown.commit.round
            reading.set()
            may_end.wait(60)
            rows = sum(batch.num_rows for batch in shown.scan(0, 2**63 - 1))
            assert shown.commit.round == before
            seen.append((before, rows))

        thread = threading.Thread(target=table._read, args=(look,))
        thread.start()
        assert reading.wait(60)
        first = table.round
        for turn in range(3):
            write(tmp_path, [("dee", 300 + turn, 1.0)])
            app.run("local", until="caught_up")
            table.refresh()
            assert table.round > first
            assert [row.value["n"] for row in table.fetch("dee")] == [turn + 1]
        may_end.set()
        thread.join(300)
        assert seen == [(first, 5)]


def test_columns_that_are_called_like_ours_keep_apart(tmp_path: Path) -> None:
    write(tmp_path, CLICKS)
    app = tg.App("clicks", data=tmp_path)
    stream = app.stream("clicks", value=tg.Json(x="double"))
    stream.window(KINDS["tumbling"]).agg(key=tg.count(), timestamp=tg.sum("x")).to_table("totals")
    app.run("local", until="caught_up")
    with app.open_table("totals") as table:
        assert table.schema.names == [
            "key",
            "window_start",
            "window_end",
            "value.key",
            "value.timestamp",
            "timestamp",
        ]
        assert table.get("ann", TEN) == {"key": 2, "timestamp": 5.0}


def test_late_and_future_records_can_be_read_with_why(tmp_path: Path) -> None:
    future = 20 * 365 * 86_400  # seconds
    write(tmp_path, [("ann", 0, 1.0), ("ann", 9_000, 2.0), ("ann", 1, 4.0), ("bob", future, 8.0)])
    app = app_of(tmp_path)
    app.run("local", until="caught_up")
    late = app.late("totals").to_pylist()
    assert [(row["key"], row["offset"], row["reason"]) for row in late] == [
        (b"ann", 2, "late"),
        (b"bob", 3, "future"),
    ]
    assert late[0]["window_start"] == TEN and late[0]["how_late_ms"] > 0
    assert late[0]["values"] == {"x": 4.0} and late[0]["operator"] == "windows"


def test_values_that_cannot_be_read_are_kept_with_why(tmp_path: Path) -> None:
    with tg.Log(tmp_path / "log") as log:
        log.create_topic("clicks", 1)
        log.writer("clicks").write(
            pa.table({"key": ["a", "b"], "value": ['{"x":1}', "{broken"], "timestamp": [TEN, TEN]})
        )
    app = tg.App("clicks", data=tmp_path)
    stream = app.stream("clicks", value=tg.Json(x="double"), on_error="keep")
    stream.window(KINDS["tumbling"]).count().to_table("totals")
    app.run("local", until="caught_up")
    (letter,) = app.dead_letters("totals").to_pylist()
    assert (letter["offset"], letter["key"], letter["value"]) == (1, b"b", b"{broken")
    assert letter["reason"]


def test_asking_for_what_is_not_there_says_what_is(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    with pytest.raises(InvalidError, match="'total'; it has totals"):
        app.open_table("total")
    two = tg.App("two", data=tmp_path)
    windows = two.stream("clicks", value=tg.Json(x="double")).window(tg.Tumbling("10s")).agg(n=tg.count())
    windows.to_topic("sent")
    windows.to_table("kept")
    with pytest.raises(InvalidError, match="no topic or table 'kep'; it has sent, kept"):
        two.open_table("kep")
    with app.open_table("totals") as table, pytest.raises(UnavailableError, match="no commit yet"):
        table.all()
    with pytest.raises(InvalidError, match="is closed"):
        table.all()


def test_tables_go_to_sql_parquet_and_frames(tmp_path: Path) -> None:
    write(tmp_path, CLICKS)
    app = app_of(tmp_path)
    app.run("local", until="caught_up")
    with app.open_table("totals") as table:
        (row,) = table.sql("select key, sum(n) as n from rows where key = 'ann' group by key").to_pylist()
        assert row == {"key": "ann", "n": 3}
        assert table.export(tmp_path / "totals.parquet") == len(table.all())
        assert table.to_pandas()["n"].sum() == 6
        assert table.to_polars()["n"].sum() == 6


@pytest.mark.parametrize("refresh", [False, True])
def test_an_explanation_names_the_records_that_count_and_no_others(tmp_path: Path, refresh: bool) -> None:
    """A copy at exactly `within` is none, and one in between is a copy of either: it named 19 and not 10."""
    seconds = [0, 10, 5, 19, 28, 21, 45]
    write(tmp_path, [("ann", at, 1.0) for at in seconds])
    app = tg.App("shop", data=tmp_path)
    stream = app.stream("clicks", value=tg.Json(x="double"))
    unique = stream.drop_duplicates("x", "10s", grace="1h", refresh=refresh)
    unique.window(tg.Tumbling("1m", grace="1h", retention="1d")).agg(at=tg.collect("x")).to_table("t")
    unique.to_topic("once")
    app.run("local", until="caught_up")
    with tg.Log(app.log, read_only=True) as log:
        counted = sorted(log.reader("once").read_all()["timestamp"].cast(pa.int64()).to_pylist())
    with app, app.open_table("t") as table:
        found = table.explain("ann", TEN)
    assert sorted(each.timestamp for each in found.contributions if each.outcome == "counted") == counted
    assert [TEN + 1000 * at for at in ([0, 10, 28, 45] if not refresh else [0, 10, 45])] == counted


@pytest.mark.parametrize("late", ["keep", "drop"])
@pytest.mark.parametrize("kind", [tg.Tumbling("10s"), tg.Hopping("10s", "5s", grace="3s")])
def test_an_explanation_names_late_records_also_where_they_are_not_kept(
    tmp_path: Path, kind: Any, late: Any
) -> None:
    write(tmp_path, [("ann", at, 1.0) for at in (1, 9, 12, 8, 13, 7, 30, 2)])
    app = app_of(tmp_path, kind, late=late, future=None)
    app.run("local", until="caught_up", round_records=3)
    with app, app.open_table("totals") as table:
        found = table.explain("ann", TEN)
        assert found.counted == table.get("ann", TEN)["n"]
    outcomes = {each.offset: each.outcome for each in found.contributions}
    too_late = {3, 5, 7} if isinstance(kind, tg.Tumbling) else {5, 7}
    assert {offset for offset, outcome in outcomes.items() if outcome == "late"} == too_late
