"""One class reads every kind of table: the same calls, and one error for what a kind cannot answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from table_stages import KEYS, KINDS, Results, Sessioned, Stage, Stored, Versioned, Windowed
from tidegate.errors import UnsupportedError
from tidegate.tables.table import Table

CALLS = ("get", "fetch", "scan", "changes", "explain", "late", "sql")
FORMS = ("to_arrow", "to_pandas", "to_polars", "to_spark")


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__.lower())
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    made = request.param(tmp_path)
    yield made
    made.close()


def test_every_kind_answers_the_same_calls(stage: Stage) -> None:
    table = stage.table
    assert isinstance(table, Table) and all(callable(getattr(table, name)) for name in (*CALLS, *FORMS))
    assert stage.get() == 1
    (row,) = table.fetch("k007")
    assert row.key == "k007" and row.value in (1, {"total": 1})
    assert not len(table.fetch("nobody"))
    assert [each.key for each in table.fetch_many(["k011", "k003", "nobody"])] == ["k003", "k011"]
    assert [each.key for each in table.fetch_range("k001", "k003")] == ["k001", "k002", "k003"]
    assert [each.key for each in table.fetch_range("k038", None, backward=True)] == ["k039", "k038"]
    assert len(table.all()) == len(table.fetch_all()) == KEYS
    assert sum(batch.num_rows for batch in table.scan(batch_rows=7)) == KEYS
    assert table.sql("select count(*) n from rows").to_pylist() == [{"n": KEYS}]
    for form in ("to_arrow", "to_pandas", "to_polars"):
        assert len(getattr(table, form)()) == KEYS
    assert table.dead_letters().num_rows == 0


def test_bounds_find_windows_by_their_start_and_sessions_that_touch_them(stage: Stage) -> None:
    table = stage.table
    begin = {Windowed: 1000, Results: 1000, Sessioned: 1000}.get(type(stage))
    if begin is None:
        assert len(table.fetch("k007", 5000, 6000)) == 1, "plain keys have no time"
        with pytest.raises(TypeError, match=r"plain keys: get\(key\)"):
            table.get("k007", 1000)
        return
    assert len(table.fetch("k007", 1000, 1000)) == len(table.fetch("k007", 0, 1000)) == 1
    assert len(table.fetch("k007", 1500, 1600)) == (type(stage) is Sessioned)
    assert not len(table.fetch("k007", 2001)) and not len(table.fetch("k007", 0, 999))
    assert not len(table.fetch_all(2001)) and len(table.fetch_all(0, 1000)) == KEYS
    assert table.get("k007", 999) is None and table.get("k007", 1001) is None
    with pytest.raises(TypeError, match=r"get\(key, start\)"):
        table.get("k007")


def test_what_a_kind_cannot_answer_is_one_error_that_says_why(stage: Stage) -> None:
    table = stage.table
    with pytest.raises(UnsupportedError, match="changes are told"):
        table.changes()
    if isinstance(stage, Results):
        assert isinstance(table.late(), pa.Table)
        with pytest.raises(UnsupportedError, match="opened without a log"):
            table.explain("k007", 1000)
        with stage.app().open_table("totals") as ours:
            assert ours.explain("k007", 1000).counted == 1
        return
    with pytest.raises(UnsupportedError, match="keeps no late records"):
        table.late()
    if isinstance(stage, Versioned):
        with pytest.raises(UnsupportedError, match="its push sent last"):
            table.explain("k007")
        return
    where: Any = {Stored: (), Windowed: (1000,), Sessioned: (1000, 2000)}[type(stage)]
    assert table.explain("k007", *where).value == 1
    wrong = () if where else (1000,)
    with pytest.raises(TypeError, match=r"explain\(key"):
        table.explain("k007", *wrong)
