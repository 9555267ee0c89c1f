"""Spark over a real broker through `format("tidegate")`: read, validated, streamed into another topic, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kafka_broker import Broker

from tidegate.log.log import open_log

pytestmark = [
    pytest.mark.interop,
    pytest.mark.spark,
    pytest.mark.xdist_group("spark"),
]

RECORDS = 600


@pytest.fixture
def spark() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    import tidegate.spark

    running = SparkSession.getActiveSession()
    session = tidegate.spark.session(
        "tidegate-live", master="local[2,4]", config={"spark.sql.shuffle.partitions": "2"}
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    if running is None:
        session.stop()


def stream(spark: Any, url: str, folder: Path) -> None:
    query = (
        spark.readStream.format("tidegate")
        .options(log=url, topic="spark-in", maxRecordsPerTrigger=250)
        .load()
        .select("key", "value", "timestamp")
        .writeStream.format("tidegate")
        .options(log=url, topic="spark-out", outbox=str(folder / "outbox"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(300)


def test_a_topic_is_streamed_into_another_once_and_validates(
    spark: Any, broker: Broker, tmp_path: Path
) -> None:
    url = f"kafka://{broker.address}"
    with open_log(url) as log:
        for topic in ("spark-in", "spark-out"):
            log.create_topic(topic, partitions=2)
        with log.writer("spark-in", integrity=True) as sender:
            names = range(RECORDS)
            sender.write(pa.table({"key": [f"k{n}" for n in names], "value": [f"v{n}" for n in names]}))
    stream(spark, url, tmp_path)
    last = sorted((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))[-1]
    last.unlink()  # as after a crash between the sink's commit and Spark's: the batch comes again
    stream(spark, url, tmp_path)
    for topic in ("spark-in", "spark-out"):
        found = spark.read.format("tidegate").options(log=url, topic=topic, verdicts="true").load()
        rows = found.select("verdict", "value").collect()
        assert {row.verdict for row in rows} == {"ok"}
        assert sorted(bytes(row.value) for row in rows) == sorted(b"v%d" % n for n in range(RECORDS))
