"""Topics as DataFrames and streams, on a real Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidegate.log.log import Log

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

START_MS = 1_767_225_600_000
RECORDS = 600


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic("orders", partitions=3, config={"segment.bytes": 16384, "index.interval.bytes": 400})
        write(log, 0, RECORDS)
        yield log


def write(log: Log, first: int, last: int, topic: str = "orders") -> None:
    """Records first…last−1, round robin over three partitions, one second apart, some odd ones among them."""
    numbers = range(first, last)
    table = pa.table(
        {
            "partition": pa.array([n % 3 for n in numbers], pa.int32()),
            "key": pa.array([None if n % 7 == 0 else b"key-%d" % n for n in numbers], pa.binary()),
            "value": pa.array([None if n % 11 == 0 else b"value-%d" % n for n in numbers], pa.binary()),
            "timestamp": pa.array([START_MS + 1000 * n for n in numbers], pa.int64()),
            "headers": pa.array(
                [
                    [{"key": "n", "value": b"%d" % n}, {"key": "none", "value": None}][: n % 3]
                    for n in numbers
                ],
                pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
            ),
        }
    )
    with log.writer(topic, batch_records=10) as writer:
        writer.write(table)


def source(spark: Any, log: Log, **options: object) -> Any:
    return spark.read.format("tidegate").options(log=str(log.path), topic="orders", **options)


def offsets(frame: Any) -> dict[int, list[int]]:
    """Partition → the offsets that were read, sorted."""
    found: dict[int, list[int]] = {}
    for row in frame.select("partition", "offset").collect():
        found.setdefault(row.partition, []).append(row.offset)
    return {partition: sorted(numbers) for partition, numbers in sorted(found.items())}


def test_a_batch_read_gives_what_the_reader_gives(spark: Any, log: Log) -> None:
    rows = source(spark, log).load().orderBy("partition", "offset").collect()
    with log.reader("orders") as reader:
        expected = sorted(
            (row for batch in reader for row in batch.to_pylist()),
            key=lambda row: (row["partition"], row["offset"]),
        )
    assert len(rows) == len(expected) == RECORDS
    for row, record in zip(rows, expected, strict=True):
        assert (row.topic, row.partition, row.offset) == ("orders", record["partition"], record["offset"])
        assert row.timestamp.timestamp() == record["timestamp"].timestamp()
        assert (row.key and bytes(row.key)) == record["key"]
        assert (row.value and bytes(row.value)) == record["value"]
        got = [(header.key, header.value and bytes(header.value)) for header in row.headers]
        assert got == [(header["key"], header["value"]) for header in record["headers"]]


def test_the_columns_have_the_types_of_sparks_kafka_source(spark: Any, log: Log) -> None:
    assert source(spark, log).load().dtypes == [
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("key", "binary"),
        ("value", "binary"),
        ("headers", "array<struct<key:string,value:binary>>"),
    ]


def test_bounds_by_offset_hold_in_every_partition(spark: Any, log: Log) -> None:
    start = json.dumps({"orders": {"0": 5, "1": -2, "2": 199}})
    end = json.dumps({"orders": {"0": 15, "1": 3, "2": -1}})
    frame = source(spark, log, startingOffsets=start, endingOffsets=end, minPartitions=7).load()
    assert offsets(frame) == {0: list(range(5, 15)), 1: [0, 1, 2], 2: [199]}
    assert frame.rdd.getNumPartitions() >= 7


def test_bounds_by_time_hold_in_every_partition(spark: Any, log: Log) -> None:
    frame = source(
        spark, log, startingTimestamp=START_MS + 90_000, endingTimestamp="2026-01-01T00:02:00Z"
    ).load()
    assert offsets(frame) == {p: list(range(30, 40)) for p in range(3)}
    late = source(spark, log, startingTimestamp="2030-01-01T00:00Z").load()
    assert late.count() == 0


def test_several_topics_and_sql(spark: Any, log: Log) -> None:
    log.create_topic("returns", config={})
    write(log, 0, 10, topic="orders")
    with log.writer("returns") as writer:
        writer.write(pa.table({"value": [b"back"]}))
    frame = spark.read.format("tidegate").option("subscribe", "orders,returns").load(str(log.path))
    assert {row.topic: row["count"] for row in frame.groupBy("topic").count().collect()} == {
        "orders": RECORDS + 10,
        "returns": 1,
    }


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"topic": "ordres"}, "did you mean orders"),
        ({"startingOffset": "earliest"}, "did you mean startingOffsets"),
        ({"startingOffsets": '{"orders": {"0": 1}}'}, "leaves out orders-1"),
        ({"startingOffsets": '{"orders": {"0": 100000, "1": 0, "2": 0}}'}, "the log now ends at 200"),
        ({"log": "/nowhere/at/all"}, "does not exist"),
    ],
)
def test_mistakes_are_told_in_our_words(
    spark: Any, log: Log, options: dict[str, str], complaint: str
) -> None:
    with pytest.raises(Exception, match=complaint):  # Spark wraps errors of Python sources in its own types
        spark.read.format("tidegate").options(
            **({"log": str(log.path), "topic": "orders"} | options)
        ).load().count()


# -- streams ---------------------------------------------------------------------------------------


class Sink:
    """Collects what each micro-batch brought, in this process."""

    def __init__(self) -> None:
        self.batches: list[dict[int, list[int]]] = []

    def __call__(self, frame: Any, _batch_id: int) -> None:
        self.batches.append(offsets(frame))

    def sizes(self) -> list[int]:
        return [sum(map(len, batch.values())) for batch in self.batches]

    def everything(self) -> dict[int, list[int]]:
        merged: dict[int, list[int]] = {}
        for batch in self.batches:
            for partition, numbers in batch.items():
                merged.setdefault(partition, []).extend(numbers)
        return dict(sorted(merged.items()))


def run_available_now(spark: Any, log: Log, checkpoint: Path, **options: object) -> Sink:
    sink = Sink()
    stream = spark.readStream.format("tidegate").options(log=str(log.path), topic="orders", **options).load()
    query = (
        stream.writeStream.foreachBatch(sink)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    return sink


def test_a_stream_drains_in_limited_micro_batches_and_goes_on_exactly_after_a_restart(
    spark: Any, log: Log, tmp_path: Path
) -> None:
    first = run_available_now(spark, log, tmp_path / "checkpoint", maxRecordsPerTrigger=250)
    assert first.sizes() == [250, 250, 100]
    assert first.everything() == {p: list(range(200)) for p in range(3)}
    write(log, RECORDS, RECORDS + 90)
    second = run_available_now(spark, log, tmp_path / "checkpoint", maxRecordsPerTrigger=250)
    assert second.everything() == {p: list(range(200, 230)) for p in range(3)}
    assert run_available_now(spark, log, tmp_path / "checkpoint").sizes() in ([], [0])


def test_a_limit_in_bytes_makes_several_micro_batches(spark: Any, log: Log, tmp_path: Path) -> None:
    sink = run_available_now(spark, log, tmp_path / "checkpoint", maxBytesPerTrigger="6KiB")
    assert len(sink.batches) >= 3
    assert sink.everything() == {p: list(range(200)) for p in range(3)}


def test_a_running_stream_picks_up_new_records_and_new_partitions(
    spark: Any, log: Log, tmp_path: Path
) -> None:
    sink = Sink()
    stream = spark.readStream.format("tidegate").options(
        log=str(log.path), topic="orders", startingOffsets="latest", maxRecordsPerTrigger=40
    )
    query = (
        stream.load()
        .writeStream.foreachBatch(sink)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        query.processAllAvailable()
        assert sink.everything() == {}
        write(log, RECORDS, RECORDS + 60)
        query.processAllAvailable()
        log.add_partitions("orders", 4)
        with log.writer("orders") as writer:
            writer.write(pa.table({"value": [b"x"], "partition": pa.array([3], pa.int32())}))
        query.processAllAvailable()
        progress = query.lastProgress
    finally:
        query.stop()
    assert sink.everything() == {
        0: list(range(200, 220)),
        1: list(range(200, 220)),
        2: list(range(200, 220)),
        3: [0],
    }
    assert max(sink.sizes()) <= 40
    assert json.loads(progress["sources"][0]["endOffset"]) == {
        "orders": {"0": 220, "1": 220, "2": 220, "3": 1, "id": log.describe("orders").topic_id}
    }


def test_records_that_vanished_unread_stop_the_query_until_the_user_says_otherwise(
    spark: Any, log: Log, tmp_path: Path
) -> None:
    from pyspark.errors import StreamingQueryException

    checkpoint = tmp_path / "checkpoint"
    run_available_now(spark, log, checkpoint)
    write(log, RECORDS, RECORDS + 300)
    log.partition("orders", 1).delete_records_before(250)
    with pytest.raises(StreamingQueryException) as caught:
        run_available_now(spark, log, checkpoint)
    for part in ("orders-1: offsets 200 to 249 are gone", "failOnDataLoss", "same checkpoint"):
        assert part in str(caught.value)
    sink = run_available_now(spark, log, checkpoint, failOnDataLoss="false")
    everything = sink.everything()
    assert everything[0] == everything[2] == list(range(200, 300))
    assert everything[1] == list(range(250, 300))
