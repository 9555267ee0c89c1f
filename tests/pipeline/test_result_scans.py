"""A scan of an app's table is of one commit from its first batch to its last, also on the page."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tidegate as tg
from tidegate.clock import SystemClock
from tidegate.errors import CommitGoneError
from tidegate.pipeline.checkpoint import KEPT, Records
from tidegate.pipeline.gc import Collector
from tidegate.pipeline.lineage import explain_window
from tidegate.pipeline.table import ResultTable
from tidegate.storage import open_backend
from tidegate.tables.commits import PinnedCommit
from tidegate.web.open_tables import Opened, asked, opened
from tidegate.web.site import Site
from tidegate.windows.operators.windows import WindowOperator

TEN = 1_767_261_600_000  # 2026-01-01T10:00Z
KEYS, PARTITIONS = 40, 4
SHORT = tg.Tumbling("1m", retention="2m")
KINDS: dict[str, Any] = {
    "tumbling": tg.Tumbling("1m", retention="1d"),
    "hopping": tg.Hopping("1m", "30s", retention="1d"),
    "sliding": tg.Sliding("1m", retention="1d"),
    "session": tg.Session("1m", retention="1d"),
}


def write(folder: Path, hours: int = 0) -> None:
    """One more record of every key, all at one time: a window's count is the number of rounds."""
    with tg.Log(folder / "log") as log:
        log.create_topic("clicks", PARTITIONS, if_not_exists=True)
        rows = {
            "key": [f"k{n:02}" for n in range(KEYS)],
            "value": ['{"x":1}'] * KEYS,
            "timestamp": [TEN + hours * 3_600_000] * KEYS,
        }
        log.writer("clicks").write(pa.table(rows))


def app_of(folder: Path, kind: Any = KINDS["tumbling"], *, rekeyed: bool = False) -> tg.App:
    app = tg.App("clicks", data=folder)
    stream = app.stream("clicks", value=tg.Json(x="long"))
    if rekeyed:
        stream = stream.key_by("key || '!'", shards=3)
    stream.window(kind).count("n").to_table("totals")
    return app


def go_on(app: tg.App, folder: Path, hours: int = 0) -> None:
    write(folder, hours)
    app.run("local", until="caught_up")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rekeyed", [False, True], ids=["co-partitioned", "re-keyed"])
def test_batches_are_of_one_commit_when_the_app_goes_on_between_them(
    tmp_path: Path, kind: str, rekeyed: bool
) -> None:
    app = app_of(tmp_path, KINDS[kind], rekeyed=rekeyed)
    go_on(app, tmp_path)
    with app.open_table("totals") as table:
        before, seen = table.to_arrow(), []
        for batch in table.batches():
            seen.append(batch)
            go_on(app, tmp_path)
            table.refresh()
        assert len(seen) >= 3
        order = [("key", "ascending"), ("window_start", "ascending")]
        assert pa.Table.from_batches(seen).sort_by(order) == before.sort_by(order)
        assert max(table.to_arrow()["n"].to_pylist()) == 1 + len(seen)


@pytest.mark.parametrize("form", ["sql", "export", "to_arrow", "to_pandas", "to_polars"])
def test_every_form_of_a_whole_table_is_of_one_commit(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_of(tmp_path)
    go_on(app, tmp_path)
    original = WindowOperator.scan
    with app.open_table("totals") as table:

        def moving(operator: WindowOperator, *bounds: int) -> Any:
            found = list(original(operator, *bounds))
            go_on(app, tmp_path)
            table.refresh()
            return found

        monkeypatch.setattr(WindowOperator, "scan", moving)
        if form == "sql":
            (row,) = table.sql("select count(*) c, min(n) low, max(n) high from rows").to_pylist()
            assert row == {"c": KEYS, "low": 1, "high": 1}
        elif form == "export":
            assert table.export(tmp_path / "t.parquet") == KEYS
            assert set(pq.read_table(tmp_path / "t.parquet")["n"].to_pylist()) == {1}
        else:
            found = getattr(table, form)()["n"]
            assert (found.to_pylist() if form == "to_arrow" else list(found)) == [1] * KEYS


def test_a_commit_that_is_collected_under_a_scan_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    app = app_of(tmp_path, SHORT)
    go_on(app, tmp_path)
    with app.open_table("totals") as table:
        scan = table.batches()
        assert set(next(scan)["window_start"].to_pylist()) == {TEN}
        newest = _collected(app, tmp_path, table)
        with pytest.raises(CommitGoneError, match=r"is not kept any more.*read it again"):
            list(scan)
        assert table.to_arrow()["window_start"].to_pylist() == [newest] * KEYS  # the remedy: it is read again


def test_a_query_that_meets_a_collected_commit_looks_into_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_of(tmp_path, SHORT)
    go_on(app, tmp_path)
    with app.open_table("totals") as table:
        past = table.as_of(table.round)
        assert past.get("k00", TEN) == {"n": 1}
        newest = _collected(app, tmp_path, table, past)
        monkeypatch.setattr(
            table._follower, "_is_fresh", lambda: True
        )  # it believes that it has looked just now
        found = table.sql("select distinct window_start from rows")
        assert found["window_start"].to_pylist() == [newest]
        with pytest.raises(CommitGoneError):
            past.all()
        with pytest.raises(CommitGoneError):
            past.sql("select * from rows")  # not told as an error of the query
        past.close()


def test_questions_that_belong_together_are_asked_of_one_commit(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    go_on(app, tmp_path)
    with app.open_table("totals") as table:
        with table.pinned() as at:
            before = at.round, at.position, at.get("k00", TEN)
            go_on(app, tmp_path)
            table.refresh()
            assert (at.round, at.position, at.get("k00", TEN)) == before
            assert set(at.to_arrow()["n"].to_pylist()) == {1}
        assert table.get("k00", TEN) == {"n": 2}


def test_an_explanation_is_of_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count, the position and what was set aside belong together, though the app goes on in between."""
    app = app_of(tmp_path)
    go_on(app, tmp_path)
    original = ResultTable.fetch

    def moving(table: ResultTable, *asked: Any) -> Any:
        found = original(table, *asked)
        go_on(app, tmp_path)
        if not isinstance(table._follower, PinnedCommit):
            table.refresh()
        return found

    monkeypatch.setattr(ResultTable, "fetch", moving)
    with app.open_table("totals") as table, tg.Log(tmp_path / "log", read_only=True) as log:
        found = explain_window(table, log, "k00", TEN)
    assert found.value == {"n": 1} and found.counted == 1
    assert [each.outcome for each in found.contributions] == ["counted", "waiting"]


def test_a_page_shows_one_commit_though_the_app_goes_on_while_it_is_made(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    go_on(app, tmp_path)
    site = Site(tmp_path / "log", tmp_path / "state")

    def look(table: Opened) -> tuple[int, dict[int, int], set[Any], set[Any]]:
        go_on(app, tmp_path)
        with app.open_table("totals") as other:
            assert other.round > table.number  # whoever looks now sees more
        rows, more = table.scan(0, 2**63 - 1, 0, KEYS)
        assert len(rows) == KEYS and not more
        one = table.fetch("k07", 0, 2**63 - 1)
        return (
            table.number,
            table.positions,
            {row.value["n"] for row in rows},
            {row.value["n"] for row in one},
        )

    try:
        number, positions, seen, one = asked(site, "clicks:totals", None, look)
        assert (seen, one, sum(positions.values())) == ({1}, {1}, KEYS)
        with opened(site, "clicks:totals", anew=True) as table:
            number_2, positions, seen, one = look(table)
        assert number_2 > number and (seen, one, sum(positions.values())) == ({2}, {2}, 2 * KEYS)
    finally:
        site.close()


def test_a_scan_that_is_let_go_gives_its_snapshot_back(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    go_on(app, tmp_path)
    with app.open_table("totals") as table:
        for number in range(2, 8):
            scan = table.batches()
            assert set(next(scan)["n"].to_pylist()) == {number - 1}
            go_on(app, tmp_path)
            table.refresh()
            if number % 2:
                scan.close()
            del scan
            gc.collect()
        assert len(table._follower._others) <= 1 and not any(each.readers for each in table._follower._others)


def _collected(app: tg.App, folder: Path, *tables: ResultTable) -> int:
    """The app goes on by more than it keeps, old windows expire, and what no commit names is deleted."""
    for hours in range(1, KEPT + 3):
        go_on(app, folder, hours)
    backend = open_backend(str(folder / "state"))
    Collector(Records(backend, "clicks"), clock=SystemClock(), grace_ms=0, every_ms=0).run()
    backend.close()
    for side in (side for table in tables for side in (table._follower._current, *table._follower._others)):
        if side is not None:
            side.view._runtime.packs.close()  # as where packs are far away, or too many to stay open
    return TEN + hours * 3_600_000
