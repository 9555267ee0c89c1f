"""Every kind of table as a DataFrame that executors read: of an app also by name, without its program."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from table_stages import KEYS, KINDS, PARTITIONS, Results, Stage
from tidegate.errors import UnsupportedError
from tidegate.storage.backends.memory import MemoryBackend

ALL_KEYS = [f"k{number:03}" for number in range(KEYS)]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__.lower())
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    made = request.param(tmp_path)
    yield made
    made.close()


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Results]:
    made = Results(tmp_path)
    yield made
    made.close()


def named(spark: Any, folder: Path, table: str | None = "totals", **options: Any) -> Any:
    given = {"state": str(folder / "state"), **({} if table is None else {"table": table}), **options}
    return spark.read.format("tidegate.table").options(**given).load()


def test_executors_read_every_kind(stage: Stage, spark: Any) -> None:
    frame = stage.table.to_spark(spark)
    assert frame.rdd.getNumPartitions() == PARTITIONS
    assert sorted(row.key for row in frame.collect()) == ALL_KEYS
    assert stage.table.to_spark(spark, columns=["key"]).columns == ["key"]


def test_a_table_of_an_app_is_loaded_by_its_name(results: Results, spark: Any) -> None:
    for name in ("totals", "a:totals", None):
        frame = named(spark, results.folder, name)
        assert frame.rdd.getNumPartitions() == PARTITIONS
        assert sorted((row.key, row.total) for row in frame.collect()) == [(key, 1) for key in ALL_KEYS]
    (row,) = frame.where("key = 'k007'").collect()
    begin = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert row.window_start.astimezone(UTC) == begin and row.window_end > row.window_start
    assert frame.columns == ["key", "window_start", "window_end", "total", "timestamp"]


def test_a_frame_stays_with_its_commit_and_an_older_one_can_be_chosen(results: Results, spark: Any) -> None:
    before, first = results.table.to_spark(spark), results.table.round
    results.commit(5)
    results.table.refresh()
    assert {row.total for row in before.collect()} == {1}
    assert {row.total for row in results.table.to_spark(spark).collect()} == {5}
    assert {row.total for row in named(spark, results.folder).collect()} == {5}
    assert {row.total for row in named(spark, results.folder, versionAsOf=first).collect()} == {1}
    with pytest.raises(Exception, match="keeps no commit as old as"):
        named(spark, results.folder, timestampAsOf="2001-01-01T00:00Z").collect()
    with pytest.raises(Exception, match="is not kept"):
        named(spark, results.folder, versionAsOf=99)


def test_what_cannot_be_is_said(results: Results, spark: Any) -> None:
    with pytest.raises(Exception, match="leave the options key"):
        named(spark, results.folder, key="string")
    with pytest.raises(Exception, match="has no column 'nothing'"):
        named(spark, results.folder, columns="nothing")
    with pytest.raises(Exception, match="cannot become"):
        given = {"state": str(results.folder / "state"), "table": "totals"}
        spark.read.format("tidegate.table").options(**given).schema("total BINARY").load().count()
    with pytest.raises(Exception, match="there is no table 'none'"):
        named(spark, results.folder, "none")
    with pytest.raises(UnsupportedError, match="of kind memory"):
        results.table._backend = MemoryBackend()
        results.table.to_spark(spark)


def test_aggregates_of_the_users_own_are_read_too(tmp_path: Path, spark: Any) -> None:
    with tg.Log(tmp_path / "log", durability="os") as log:
        log.create_topic("t", 2)
        with log.writer("t") as writer:
            import pyarrow as pa

            rows = {
                "key": ["a", "b", "a"],
                "value": [b'{"n": 1}', b'{"n": 2}', b'{"n": 3}'],
                "timestamp": [1, 1, 2],
            }
            writer.write(pa.table(rows))
    app = tg.App("own", data=tmp_path)
    stream = app.stream("t", value=tg.Json(n="long"))
    stream.window(tg.Tumbling("1s")).agg(most=tg.max("n"), all=tg.collect("n")).to_table("lists")
    app.run("local", until="caught_up")
    with app.open_table("lists") as table:
        found = {row.key: (row.most, sorted(row.all)) for row in table.to_spark(spark).collect()}
    assert found == {"a": (3, [1, 3]), "b": (2, [2])}
