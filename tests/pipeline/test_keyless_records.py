"""Records without a key are deduplicated by their id, or the partition stops and says why; none passes silently."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.cli.main import run as cli

TEN = 1_767_261_600_000
# Confluent's tutorial "Find distinct events": nine events without a key, three different ones.
NINE = ["a", "b", "a", "a", "b", "c", "c", "a", "b"]


def produce(folder: Path, ids: list[str], *, partitions: int, keys: list[str | None] | None = None) -> None:
    with tg.Log(folder / "log") as log:
        log.create_topic("clicks", partitions, if_not_exists=True)
        writer = log.writer("clicks")
        for place, id in enumerate(ids):
            row = {
                "key": pa.array([None if keys is None else keys[place]], pa.string()),
                "value": [f'{{"id":"{id}"}}'],
                "timestamp": [TEN + place],
            }
            writer.write(pa.table(row), partition=place % partitions)


def distinct(folder: Path, change=lambda stream: stream, key=None, **settings) -> tg.App:
    app = tg.App("distinct", data=folder)
    clicks = change(app.stream("clicks", key=key, value=tg.Json(id="string")))
    clicks.drop_duplicates("id", within="2m", **settings).to_topic("distinct-clicks")
    return app


def passed(folder: Path) -> list[str]:
    with tg.Log(folder / "log", read_only=True) as log:
        rows = log.reader("distinct-clicks").read_all()
    return sorted(value.decode() for value in rows["value"].to_pylist() if value)


THREE = ['{"id":"a"}', '{"id":"b"}', '{"id":"c"}']


@pytest.mark.parametrize("round_records", [None, 1, 4])
@pytest.mark.parametrize("key", [None, tg.Long(), tg.Bytes()])
def test_in_one_partition_nine_events_without_keys_are_three(tmp_path, round_records, key) -> None:
    produce(tmp_path, NINE, partitions=1)
    summary = distinct(tmp_path, key=key).run("local", until="caught_up", round_records=round_records)
    assert passed(tmp_path) == THREE
    assert summary.progress.duplicates == 6


@pytest.mark.parametrize("round_records", [None, 1, 4])
@pytest.mark.parametrize("partitions", [1, 3])
def test_keyed_by_their_id_they_are_three_wherever_they_lie(tmp_path, round_records, partitions) -> None:
    produce(tmp_path, NINE, partitions=partitions)
    app = distinct(tmp_path, lambda stream: stream.key_by("id", shards=2))
    app.run("local", until="caught_up", round_records=round_records)
    assert passed(tmp_path) == THREE


def test_in_several_partitions_the_first_one_without_a_key_stops_its_partition(tmp_path) -> None:
    produce(tmp_path, NINE, partitions=3, keys=["k"] * 3 + [None] * 6)
    summary = distinct(tmp_path).run("local", until="caught_up")
    assert summary.exit_code != 0
    assert [(each.partition, each.offset) for each in summary.stopped] == [(0, 1), (1, 1), (2, 1)]
    assert "the record has no key. drop_duplicates finds copies by key and id" in summary.stopped[0].message
    assert "any of the 3 partitions of clicks" in summary.stopped[0].message
    assert len(passed(tmp_path)) == 3  # those with keys


@pytest.mark.parametrize("change", [
    lambda stream: stream.key_by("id"),
    lambda stream: stream.filter("key IS NOT NULL"),
])  # fmt: skip
def test_both_remedies_that_the_message_names_help(tmp_path, change) -> None:
    produce(tmp_path, NINE, partitions=3, keys=["k", *[None] * 8])
    distinct(tmp_path).run("local", until="caught_up")
    assert cli(["app", "reset", "distinct", "--state", str(tmp_path / "state"), "--yes"]) == 0
    summary = distinct(tmp_path, change).run("local", until="caught_up")
    assert summary.exit_code == 0
    assert set(passed(tmp_path)) in ({THREE[0]}, set(THREE))


def test_no_key_and_an_empty_key_are_two(tmp_path) -> None:
    produce(tmp_path, ["a"] * 6, partitions=1, keys=[None, "", "k", "k", None, ""])
    distinct(tmp_path).run("local", until="caught_up")
    assert passed(tmp_path) == ['{"id":"a"}'] * 3


@pytest.mark.parametrize("key", [None, tg.Long()])
def test_a_late_one_without_a_key_is_kept_and_can_be_read(tmp_path, key) -> None:
    produce(tmp_path, ["a"], partitions=1, keys=["8 bytes!"])
    with tg.Log(tmp_path / "log") as log:
        for ts in (TEN + 3_600_000, TEN):
            row = {"key": pa.array([None], pa.string()), "value": [f'{{"id":"x{ts}"}}'], "timestamp": [ts]}
            log.writer("clicks").write(pa.table(row))
    app = tg.App("distinct", data=tmp_path)
    clicks = app.stream("clicks", key=key, value=tg.Json(id="string"))
    clicks.drop_duplicates("id", within="2m", grace="1m").window(tg.Tumbling("1m")).count().to_table("counts")
    assert app.run("local", until="caught_up").progress.late == 1
    with app, app.open_table("counts") as table:
        assert table.late().num_rows == 1


def test_explain_says_what_happens_to_them(tmp_path) -> None:
    assert "a copy is told by its id alone" in distinct(tmp_path).explain(sample=False)
    assert "a copy is told" not in distinct(tmp_path, lambda stream: stream.key_by("id")).explain(
        sample=False
    )


@pytest.mark.parametrize("rekeyed", [False, True])
@pytest.mark.parametrize("round_records", [1, 1000])
def test_a_record_without_an_id_counts_though_it_is_the_newest(
    tmp_path: Path, round_records: int, rekeyed: bool
) -> None:
    """It was set aside as too far ahead: of four records two were in the windows."""
    with tg.Log(tmp_path / "log") as log:
        log.create_topic("events", 1)
        values = ['{"id":"a","by":"x"}', '{"by":"x"}', '{"id":"b","by":"x"}', '{"by":"x"}']
        times = [TEN, TEN + 30_000, TEN + 31_000, TEN + 90_000]
        log.writer("events").write(pa.table({"key": ["k"] * 4, "value": values, "timestamp": times}))
    app = tg.App("once", data=tmp_path)
    stream = app.stream("events", value=tg.Json(id="string", by="string"))
    stream = stream.key_by("by", shards=2) if rekeyed else stream
    stream.drop_duplicates("id", "10m").window(tg.Tumbling("1m")).count("n").to_table("counts")
    app.run("local", until="caught_up", round_records=round_records)
    with app.open_table("counts") as table:
        assert [row.value["n"] for row in table.all()] == [3, 1]
    assert app.late("counts").num_rows == 0
