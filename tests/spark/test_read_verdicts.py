"""What validation says of each record Spark reads: the same however the topic is cut into tasks and micro-batches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from tidegate.errors import InvalidError
from tidegate.log.log import Log
from tidegate.spark.topics.options import SourceOptions
from tidegate.spark.topics.planning import Planner
from tidegate.spark.topics.ranges import OffsetRange
from tidegate.spark.topics.source import TidegateDataSource, read_range

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC = "t"
FAULTS = {6: "missing", 8: "duplicate", 9: "corrupt"}
"""Offsets of the damaged topic: one record is left out before 6, one comes twice, one has another value."""


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """Sound records, copied with one left out, one twice and one changed; then a record without metadata."""
    with Log(tmp_path / "sound", durability="os") as sound:
        sound.create_topic(TOPIC)
        with sound.writer(TOPIC, integrity=True) as sender:
            sender.write(
                pa.table({"key": [f"k{n}" for n in range(20)], "value": [f"v{n}" for n in range(20)]})
            )
        with sound.reader(TOPIC, control_records=True) as reader:
            records = pa.Table.from_batches(list(reader)).to_pylist()
    damaged = records[:6] + records[7:9] + records[8:9] + [records[9] | {"value": b"other"}] + records[10:]
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic(TOPIC)
        schema = pa.schema(
            [("key", pa.binary()), ("value", pa.binary()), ("headers", HEADERS), ("timestamp", TIME)]
        )
        with log.writer(TOPIC, batch_records=1) as writer:
            rows = [{name: row[name] for name in schema.names} for row in damaged]
            writer.write(pa.Table.from_pylist(rows, schema))
            writer.write(pa.table({"value": ["plain"]}))
    return log


HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TIME = pa.timestamp("ms", tz="UTC")


def options(log: Log, **given: str) -> SourceOptions:
    return SourceOptions.parse({"log": str(log.path), "topic": TOPIC, "verdicts": "true", **given})


def schema(chosen: SourceOptions) -> StructType:
    from pyspark.sql.types import ArrayType, BinaryType, IntegerType, LongType, StringType, TimestampType

    header = StructType().add("key", StringType()).add("value", BinaryType())
    fields = [("topic", StringType()), ("partition", IntegerType()), ("offset", LongType())]
    fields += [("timestamp", TimestampType()), ("key", BinaryType()), ("value", BinaryType())]
    fields += [("headers", ArrayType(header))] + ([("verdict", StringType())] if chosen.verdicts else [])
    declared = StructType()
    for name, kind in fields:
        declared = declared.add(name, kind)
    return declared


def verdicts(chosen: SourceOptions, start: int, end: int) -> dict[int, str]:
    found = read_range(Planner(chosen), OffsetRange(TOPIC, 0, start, end), schema(chosen))
    return {row["offset"]: row["verdict"] for batch in found for row in batch.to_pylist()}


def test_faults_repeats_and_plain_records_are_told_where_they_are(log: Log) -> None:
    found = verdicts(options(log), 0, 100)
    assert {offset: found[offset] for offset in FAULTS} == FAULTS
    assert found[max(found)] == "unmanaged"
    rest = Counter(verdict for offset, verdict in found.items() if offset not in FAULTS)
    assert set(rest) == {"ok", "unmanaged"} and 0 not in found  # the start of the chain is not the user's
    shown = verdicts(options(log, controlRecords="true"), 0, 100)
    assert shown[0] == "ok" and len(shown) > len(found)


@pytest.mark.parametrize("step", [1, 4, 7])
def test_verdicts_do_not_depend_on_where_a_topic_is_cut(log: Log, step: int, tmp_path: Path) -> None:
    whole = verdicts(options(log), 0, 24)
    for given in ({}, {"verdictState": str(tmp_path / "states")}):
        pieces: dict[int, str] = {}
        for start in range(0, 24, step):
            pieces |= verdicts(options(log, **given), start, min(start + step, 24))
        assert pieces == whole


def test_states_are_a_cache_few_are_kept_and_damage_costs_time_only(log: Log, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    chosen = options(log, verdictState=str(folder))
    whole = verdicts(options(log), 0, 24)
    for start in range(0, 20, 2):
        verdicts(chosen, start, start + 2)
    states = sorted(folder.rglob("*.state"))
    assert [int(path.stem.split("-")[1]) for path in states] == [14, 16, 18, 20]
    for path in states:
        path.write_bytes(b"TGIV nonsense")
    assert verdicts(chosen, 20, 24) == {offset: said for offset, said in whole.items() if offset >= 20}


def test_a_state_is_used(log: Log, tmp_path: Path) -> None:
    """With the state of another history in its place, verdicts follow it: so it was read."""
    folder = tmp_path / "states"
    chosen = options(log, verdictState=str(folder))
    verdicts(chosen, 0, 2)
    (early,) = folder.rglob("*.state")
    early.rename(early.with_name(early.name.replace(f"{2:020d}", f"{12:020d}")))
    assert verdicts(options(log), 12, 14) == {12: "ok", 13: "ok"}
    assert verdicts(chosen, 12, 14) == {12: "missing", 13: "ok"}


def test_the_column_is_there_only_where_it_is_asked_for(log: Log) -> None:
    given = {"log": str(log.path), "topic": TOPIC}
    assert "verdict" not in str(TidegateDataSource(given).schema())
    assert str(TidegateDataSource({**given, "verdicts": "true"}).schema()).endswith("verdict STRING")


def test_control_records_are_left_out_without_verdicts_too(log: Log) -> None:
    plain = SourceOptions.parse({"log": str(log.path), "topic": TOPIC})
    found = list(read_range(Planner(plain), OffsetRange(TOPIC, 0, 0, 100), schema(plain)))
    offsets = [row["offset"] for batch in found for row in batch.to_pylist()]
    assert 0 not in offsets and offsets == sorted(verdicts(options(log), 0, 100))


@pytest.mark.parametrize(
    "wrong", [{"minPartitions": "4"}, {"verdicts": "false", "verdictState": "x"}, {"verdicts": "maybe"}]
)
def test_options_that_do_not_go_together_are_said(log: Log, wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidError, match="verdict"):
        options(log, **wrong)


# -- damage behind a gap -------------------------------------------------------------------------


@pytest.fixture
def behind_a_gap(log: Log, tmp_path: Path) -> Log:
    """Of the sound records one is left out, and the one behind it has another value: a gap that a damaged one shows."""
    with Log(tmp_path / "sound", read_only=True) as sound:
        records = sound.reader(TOPIC, control_records=True).read_all().to_pylist()
    rows = [*records[:6], records[7] | {"value": b"other"}, *records[8:]]
    schema = pa.schema(
        [("key", pa.binary()), ("value", pa.binary()), ("headers", HEADERS), ("timestamp", TIME)]
    )
    with Log(tmp_path / "gap", durability="os") as made:
        made.create_topic(TOPIC)
        with made.writer(TOPIC) as writer:
            writer.write(
                pa.Table.from_pylist([{name: row[name] for name in schema.names} for row in rows], schema)
            )
        return made


@pytest.mark.parametrize("step", [1, 4, 100])
def test_a_damaged_record_behind_a_gap_is_corrupt_wherever_the_topic_is_cut(
    behind_a_gap: Log, step: int
) -> None:
    found: dict[int, str] = {}
    for start in range(0, 21, step):
        found |= verdicts(options(behind_a_gap), start, min(start + step, 21))
    assert {offset: said for offset, said in found.items() if said != "ok"} == {6: "corrupt"}


def test_who_filters_by_the_column_does_not_count_it(spark: SparkSession, behind_a_gap: Log) -> None:
    rows = spark.read.format("tidegate").option("log", str(behind_a_gap.path)).option("topic", TOPIC)
    judged = rows.option("verdicts", "true").load()
    assert [(row.offset, row.value) for row in judged.where("verdict = 'corrupt'").collect()] == [
        (6, b"other")
    ]
    assert judged.where("verdict = 'missing'").count() == 0
    assert b"other" not in {row.value for row in judged.where("verdict in ('ok', 'missing')").collect()}
