"""Planning and reading of the Spark source without a JVM: bounds, limits, losses, conversions."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import StructType

from remedies import typed
from tidegate.errors import InvalidError, OffsetOutOfRangeError, TidegateWarning, UnavailableError
from tidegate.log.log import Log
from tidegate.spark.offset_ranges import OffsetRange, Planner, from_json_object, to_json_object
from tidegate.spark.options import SourceOptions
from tidegate.spark.topic_source import (
    COLUMNS,
    RangePartition,
    TopicReader,
    TopicStreamReader,
    read_range,
    to_spark,
)

START_MS = 1_767_225_600_000
ALL = {("t", 0): 100, ("t", 1): 100}
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    config = {"segment.bytes": 4096, "index.interval.bytes": 100}
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic("t", partitions=2, config=config)
        write(log, 0, 100)
        yield log


def write(log: Log, first: int, last: int) -> None:
    """Records first…last−1 in both partitions, one second apart, ten bytes each, one a batch."""
    numbers = list(range(first, last))
    with log.writer("t", batch_records=1) as writer:
        for partition in (0, 1):
            stamps = pa.array([START_MS + 1000 * n for n in numbers], pa.int64())
            writer.write(
                pa.table({"value": [b"%010d" % n for n in numbers], "timestamp": stamps}), partition=partition
            )


def planner(log: Log, **options: str) -> Planner:
    return Planner(SourceOptions.parse({"log": str(log.path), "topic": "t", **options}))


def schema() -> StructType:
    from pyspark.sql.types import ArrayType, BinaryType, IntegerType, LongType, StringType, TimestampType

    header = StructType().add("key", StringType()).add("value", BinaryType())
    return (
        StructType()
        .add("topic", StringType())
        .add("partition", IntegerType())
        .add("offset", LongType())
        .add("timestamp", TimestampType())
        .add("key", BinaryType())
        .add("value", BinaryType())
        .add("headers", ArrayType(header))
    )


@pytest.mark.parametrize(
    ("options", "start", "end"),
    [
        ({}, 0, 100),
        ({"startingOffsets": "latest"}, 100, 100),
        ({"startingOffsets": '{"0": 5, "1": 5}', "endingOffsets": '{"0": 7, "1": 7}'}, 5, 7),
        ({"startingTimestamp": str(START_MS + 40_000)}, 40, 100),
        ({"startingTimestamp": str(START_MS + 39_001), "endingTimestamp": str(START_MS + 50_000)}, 40, 50),
        ({"startingTimestamp": "2031-01-01"}, 100, 100),
        ({"endingTimestamp": "1999-01-01"}, 0, 0),
    ],
)
def test_bounds_are_resolved_in_every_partition(
    log: Log, options: dict[str, str], start: int, end: int
) -> None:
    plan = planner(log, **options)
    assert plan.starting() == {("t", 0): start, ("t", 1): start}
    assert plan.ending() == {("t", 0): end, ("t", 1): end}


def test_a_missing_folder_and_an_unknown_topic_are_told_apart(log: Log, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="does not exist"):
        Planner(SourceOptions.parse({"log": str(tmp_path / "no"), "topic": "t"})).latest()
    with pytest.raises(InvalidError, match="topic s does not exist"):
        Planner(SourceOptions.parse({"log": str(log.path), "topic": "s"})).latest()


def test_planning_writes_nothing_into_the_folder(log: Log) -> None:
    log.close()
    before = {path: path.stat().st_mtime_ns for path in log.path.rglob("*")}
    plan = planner(log, maxBytesPerTrigger="1KiB")
    plan.check_loss(plan.starting(), plan.latest())
    plan.admit_bytes(plan.starting(), plan.latest(), 1000)
    list(read_range(plan, OffsetRange("t", 0, 0, 100), schema()))
    assert {path: path.stat().st_mtime_ns for path in log.path.rglob("*")} == before


def test_a_limit_of_rows_is_exact(log: Log) -> None:
    plan = planner(log)
    assert plan.admit_rows(plan.starting(), plan.latest(), 60) == {("t", 0): 30, ("t", 1): 30}
    assert plan.admit_rows(plan.starting(), plan.latest(), 1000) == ALL
    assert sum(plan.admit_rows(plan.starting(), plan.latest(), 1).values()) == 1


@pytest.mark.parametrize("limit", [1, 500, 2000, 5000, 10**9])
def test_a_limit_of_bytes_is_kept_and_always_gets_to_the_end(log: Log, limit: int) -> None:
    plan = planner(log)
    position, end, rounds = plan.starting(), plan.latest(), 0
    size = sum(path.stat().st_size for path in (log.path / "t-0").glob("*.log")) / 100
    while position != end:
        following = plan.admit_bytes(position, end, limit)
        read = sum(following.values()) - sum(position.values())
        assert read > 0
        assert read * size <= limit + 2 * (
            100 + 2 * size
        )  # an index entry further in each partition, at most
        position, rounds = following, rounds + 1
        assert rounds < 400
    assert (rounds == 1) == (limit == 10**9)


def test_records_removed_before_they_were_read_are_a_loss(log: Log) -> None:
    log.partition("t", 1).delete_records_before(50)
    with pytest.raises(OffsetOutOfRangeError) as caught:
        planner(log).check_loss({("t", 0): 0, ("t", 1): 20}, ALL)
    assert "t-1: offsets 20 to 49 are gone" in str(caught.value)
    assert "failOnDataLoss" in str(caught.value) and "tidegate log lifetime t" in str(caught.value)
    with pytest.warns(TidegateWarning, match="going on without them"):
        usable = planner(log, failOnDataLoss="false").check_loss({("t", 0): 0, ("t", 1): 20}, ALL)
    assert usable == {("t", 0): 0, ("t", 1): 50}


def test_nothing_to_read_is_no_loss(log: Log) -> None:
    log.partition("t", 1).delete_records_before(50)
    position = {("t", 0): 0, ("t", 1): 20}
    assert planner(log).check_loss(position, position)[("t", 0)] == 0


def test_a_topic_made_anew_is_a_loss(log: Log) -> None:
    with pytest.raises(OffsetOutOfRangeError, match="the log now ends at 100: it was cut or made anew"):
        planner(log).check_loss({("t", 0): 150, ("t", 1): 0}, ALL)
    with pytest.raises(OffsetOutOfRangeError, match="deleted"):
        planner(log).check_loss({("t", 0): 0, ("t", 1): 0, ("t", 2): 7}, {**ALL, ("t", 2): 9})


def test_a_loss_in_the_middle_of_a_range_is_reported_by_the_task(log: Log) -> None:
    log.partition("t", 0).delete_records_before(50)
    with pytest.raises(OffsetOutOfRangeError, match="offsets 10 to 49 are gone"):
        list(read_range(planner(log), OffsetRange("t", 0, 10, 80), schema()))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = list(read_range(planner(log, failOnDataLoss="false"), OffsetRange("t", 0, 10, 80), schema()))
    assert [n for batch in got for n in batch.column("offset").to_pylist()] == list(range(50, 80))
    assert any("going on without them" in str(warning.message) for warning in told)


def test_batches_have_exactly_the_schema_spark_declared(log: Log) -> None:
    (batch, *_) = read_range(planner(log), OffsetRange("t", 1, 3, 8), schema())
    assert batch.schema.equals(to_arrow_schema(schema(), timezone="UTC"), check_metadata=True)
    assert batch.column("offset").to_pylist() == [3, 4, 5, 6, 7]


def test_the_declared_columns_are_the_ones_of_the_tests() -> None:
    fields = [
        part.split()[0]
        for part in COLUMNS.replace("ARRAY<STRUCT<key: STRING, value: BINARY>>", "X").split(", ")
    ]
    assert fields == schema().fieldNames()


def test_a_timestamp_spark_cannot_hold_is_null() -> None:
    from tidegate.log.format.records import RECORD_SCHEMA

    batch = pa.RecordBatch.from_pydict(
        {
            "topic": pa.array(["t"] * 3).dictionary_encode(),
            "partition": [0] * 3,
            "offset": [0, 1, 2],
            "timestamp": pa.array([5, 2**63 - 1, None], pa.int64()).cast(pa.timestamp("ms", tz="UTC")),
            "key": pa.nulls(3, pa.binary()),
            "value": [b"", None, b"x"],
            "headers": pa.array([[], [{"key": "k", "value": None}], []], HEADERS),
        }
    ).cast(RECORD_SCHEMA)
    spark = to_spark(batch, to_arrow_schema(schema(), timezone="UTC"))
    assert spark.column("timestamp").cast(pa.int64()).to_pylist() == [5000, None, None]
    assert spark.column("headers").to_pylist() == [[], [{"key": "k", "value": None}], []]


# -- the stream reader, driven as Spark drives it ----------------------------------------------------


def stream(log: Log, **options: str) -> TopicStreamReader:
    return TopicStreamReader(SourceOptions.parse({"log": str(log.path), "topic": "t", **options}), schema())


def test_available_now_drains_to_where_it_began_and_no_further(log: Log) -> None:
    reader = stream(log, maxRecordsPerTrigger="70")
    assert reader.getDefaultReadLimit() == ReadMaxRows(70)
    position = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    write(log, 100, 150)
    seen = []
    while (following := reader.latestOffset(position, ReadMaxRows(70))) != position:
        ranges = [p.range for p in reader.partitions(position, following) if isinstance(p, RangePartition)]
        seen.append(sum(map(len, ranges)))
        position = following
    assert seen == [70, 70, 60]
    assert from_json_object(position) == ALL


def test_the_engine_may_ask_for_everything_whatever_the_options_say(log: Log) -> None:
    reader = stream(log, maxRecordsPerTrigger="70", maxBytesPerTrigger="100")
    assert from_json_object(reader.latestOffset(reader.initialOffset(), ReadAllAvailable())) == ALL
    both = reader.latestOffset(reader.initialOffset(), ReadMaxRows(70))
    assert sum(from_json_object(both).values()) < 70
    assert stream(log, maxBytesPerTrigger="1KiB").getDefaultReadLimit() == ReadMaxBytes(1024)
    assert stream(log).getDefaultReadLimit() == ReadAllAvailable()


@pytest.mark.parametrize("again", [150, 100, 10], ids=["longer", "equal", "shorter"])
def test_a_topic_created_again_between_batches_is_a_loss_however_long_it_is(log: Log, again: int) -> None:
    reader = stream(log)
    position = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    log.delete_topic("t")
    log.create_topic("t", 2)
    write(log, 0, again)
    with pytest.raises(OffsetOutOfRangeError, match="deleted and created again"):
        reader.latestOffset(position, ReadAllAvailable())
    with pytest.raises(OffsetOutOfRangeError, match="deleted and created again"):
        reader.partitions(position, position)
    going_on = stream(log, failOnDataLoss="false")
    with pytest.warns(TidegateWarning, match="deleted and created again"):
        following = going_on.latestOffset(position, ReadAllAvailable())
        ranges = [p.range for p in going_on.partitions(position, following) if isinstance(p, RangePartition)]
    assert {(r.topic, r.partition, r.start, r.end) for r in ranges} == {
        ("t", 0, 0, again),
        ("t", 1, 0, again),
    }
    assert going_on.latestOffset(following, ReadAllAvailable()) == following


def test_a_loss_names_how_long_records_stay_and_how_to_go_on(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = stream(log)
    position = reader.initialOffset()
    log.partition("t", 0).delete_records_before(40)
    with pytest.raises(OffsetOutOfRangeError) as told:
        reader.partitions(position, reader.reportLatestOffset())
    monkeypatch.setenv("TIDEGATE_LOG", str(log.path))
    assert "retention" in typed(told.value, "spark.offset_ranges.Planner.report_loss: log lifetime")
    assert ".option('failOnDataLoss', 'false')" in str(told.value)
    going_on = stream(log, failOnDataLoss="false")
    with pytest.warns(TidegateWarning, match="going on without them"):
        ranges = [each.range for each in going_on.partitions(position, reader.reportLatestOffset())]  # type: ignore[attr-defined]
    assert {(each.partition, each.start, each.end) for each in ranges} == {(0, 40, 100), (1, 0, 100)}


def test_a_position_of_an_older_release_has_no_ids_and_is_read_on(log: Log) -> None:
    reader = stream(log)
    assert from_json_object(reader.latestOffset(to_json_object(ALL), ReadAllAvailable())) == ALL


def test_a_partition_added_later_is_read_from_its_start(log: Log) -> None:
    reader = stream(log)
    position = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    log.add_partitions("t", 3)
    with log.writer("t") as writer:
        writer.write(pa.table({"value": ["x", "y"]}), partition=2)
    following = reader.latestOffset(position, ReadAllAvailable())
    assert from_json_object(following) == {("t", 0): 100, ("t", 1): 100, ("t", 2): 2}
    assert [p.range for p in reader.partitions(position, following)] == [OffsetRange("t", 2, 0, 2)]  # type: ignore[attr-defined]
    assert reader.reportLatestOffset() == following


def test_an_empty_topic_has_an_empty_plan(log: Log) -> None:
    log.create_topic("empty")
    options = SourceOptions.parse({"log": str(log.path), "topic": "empty"})
    assert TopicReader(options, schema()).partitions() == []
    reader = TopicStreamReader(options, schema())
    position = reader.initialOffset()
    assert position == reader.latestOffset(position, ReadAllAvailable())
    assert from_json_object(position) == {("empty", 0): 0}
    assert reader.partitions(position, position) == []
