"""One class reads every kind of table: the same calls, and one error for what a kind cannot answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from push_kit import push_here

import tidegate as tg
from hybrid_stage import LIVE, VERSION
from hybrid_stage import Stage as Replicated
from table_stages import KEYS, KINDS, Results, Sessioned, Stage, Stored, Versioned, Windowed
from tidegate.clock import SystemClock
from tidegate.errors import InvalidError, UnsupportedError
from tidegate.storage import open_backend
from tidegate.tables.factories import table as key_table
from tidegate.tables.hybrid.table import HybridTable
from tidegate.tables.table import Table
from tidegate.tables.topic_table import open_committed
from tidegate.tables.versions.catalog import replica_table
from tidegate.tables.versions.reader import VersionedTable

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
    with pytest.raises(UnsupportedError, match=r"keeps no late records|plain keys: no record is ever late"):
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


def test_a_call_that_cannot_be_meant_is_refused_and_is_never_an_empty_answer(stage: Stage) -> None:
    table = stage.table
    for rows in (0, -1, -5):
        with pytest.raises(InvalidError, match=f"batches of {rows} rows"):
            next(table.scan(batch_rows=rows))
    for keys in ("k007", b"k007"):
        with pytest.raises(TypeError, match="a list of keys, not one"):
            table.fetch_many(keys)
    with pytest.raises(TypeError, match=r"get\(key"):
        table.get("k007", end=2000)
    if isinstance(stage, Versioned | Results):
        with pytest.raises(UnsupportedError, match="at_least"):
            table.get("k007", *(() if isinstance(stage, Versioned) else (1000,)), at_least={0: 1})


def test_a_replica_answers_the_same_calls_here_and_from_its_commits(tmp_path: Path) -> None:
    made = Replicated(tmp_path)
    try:
        made.push(ann="1", bob="2")
        replica = made.replica("a")
        made.settle(replica)
        made.write(made.sender(LIVE), bob="3", cleo="4")
        made.settle(replica)
        replica.commit()
        state, consumed = tmp_path / "state", tg.Consumed(tg.String(), tg.String())
        named = tg.Materialized(replica_table(VERSION, "a"))
        with (
            key_table(
                made.log, VERSION, state=state, consumed=consumed, materialized=named, read_only=True
            ) as read,
            replica.as_of(replica.commits()[-1]) as past,
        ):
            for table in (replica, read, past):
                assert table.get("bob") == "3" and table.get("dora") is None
                assert [row.value for row in table.fetch_many(["cleo", "ann"])] == ["1", "4"]
                assert [row.key for row in table.fetch_range("b", None)] == ["bob", "cleo"]
                whole = {"ann": "1", "bob": "3", "cleo": "4"}
                assert {
                    row["key"]: row["value"] for each in table.scan() for row in each.to_pylist()
                } == whole
                for form in ("to_arrow", "to_pandas", "to_polars"):
                    assert len(getattr(table, form)()) == 3
                assert table.sql("select max(value) m from rows").to_pylist() == [{"m": "4"}]
                assert table.dead_letters().num_rows == 0
                with pytest.raises(UnsupportedError, match="no record is ever late"):
                    table.late()
            assert replica.explain("bob").value == read.explain("bob").value == "3"
            with replica.changes() as changes:
                made.write(made.sender(LIVE), ann="5")
                made.settle(replica)
                assert [(each.key, each.old, each.new) for each in changes.take()] == [("ann", "1", "5")]
            with pytest.raises(UnsupportedError, match="told there"):
                read.changes()
            assert (replica.get("ann"), past.get("ann")) == ("5", "1")
    finally:
        made.close()


def test_declared_fields_are_read_as_such_whoever_opens_the_table(tmp_path: Path) -> None:
    value = tg.Json(n="long")
    with tg.Log(tmp_path / "log", durability="os") as log:
        for topic in ("counts", "live"):
            log.create_topic(topic, 1)
        with log.writer("counts") as writer:
            writer.write(pa.table({"key": ["ann"], "value": ['{"n": 1}']}))
        with key_table(log, "counts", state=tmp_path / "state", consumed=tg.Consumed(tg.String(), value)):
            pass
    push_here(
        tmp_path, [(b"ann", b'{"n": 2}')], table="pushed", partitions=1, serdes=("String()", repr(value))
    )
    backend = open_backend(tmp_path / "state")
    with tg.Log(tmp_path / "log", durability="os") as log:
        for opened, expected in (
            (open_committed(backend, "counts", clock=SystemClock()), 1),
            (VersionedTable(backend, "pushed"), 2),
            (tg.hybrid_table(log, "pushed", live="live", state=backend), 2),
        ):
            with opened as table:
                if isinstance(table, HybridTable):
                    table.catch_up()
                assert table.get("ann") == {"n": expected}
                assert table.to_arrow()["value"].type == pa.struct([("n", pa.int64())])
    backend.close()
