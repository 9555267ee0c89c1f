"""DataFrames and streams into topics on a real Spark: once, numbered, whatever is tried again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidegate.integrity import audit_topic
from tidegate.integrity.verdicts import Verdict
from tidegate.log.log import Log

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

RECORDS = 90


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic("in", partitions=2)
        log.create_topic("out", partitions=3)
        with log.writer("in", batch_records=10) as writer:
            names = range(RECORDS)
            writer.write(pa.table({"key": [f"k{n}" for n in names], "value": [f"v{n}" for n in names]}))
    yield tmp_path


def written(folder: Path, topic: str = "out") -> list[str]:
    """The values in the topic, sorted; validation has nothing to say."""
    with Log(folder / "log", read_only=True) as log:
        report = audit_topic(log, topic)
        assert report.faults == sum(part.total.verdicts[Verdict.DUPLICATE] for part in report.partitions) == 0
        found = []
        with log.reader(topic) as reader:
            for batch in reader:
                rows = batch.to_pylist()
                found += [
                    row["value"].decode() for row in rows if not (row["key"] or b"").startswith(b"\x00DIV")
                ]
    return sorted(found)


def stream(spark: Any, folder: Path, **options: object) -> Any:
    """Copy topic `in` to topic `out`, 30 records a micro-batch, and end."""
    query = (
        spark.readStream.format("tidegate")
        .options(log=str(folder / "log"), topic="in", maxRecordsPerTrigger=30)
        .load()
        .select("key", "value", "headers", "timestamp")
        .writeStream.format("tidegate")
        .options(
            log=str(folder / "log"), topic="out", checkpointLocation=str(folder / "checkpoint"), **options
        )
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(240)
    return query


def test_a_stream_arrives_once_also_when_spark_forgets_that_a_batch_was_committed(
    spark: Any, folder: Path
) -> None:
    expected = sorted(f"v{n}" for n in range(RECORDS))
    stream(spark, folder)
    assert written(folder) == expected
    commits = sorted((folder / "checkpoint" / "commits").glob("[0-9]*"))
    assert len(commits) == 3
    commits[-1].unlink()  # as after a crash between the sink's commit and Spark's: the batch comes again
    stream(spark, folder)
    assert written(folder) == expected
    (progress,) = (folder / "log.outbox").rglob("progress")
    assert sorted(path.name for path in progress.parent.iterdir()) == ["lock", "progress"]


def test_a_failed_commit_loses_nothing_and_the_batch_comes_again(spark: Any, folder: Path) -> None:
    from pyspark.errors import StreamingQueryException

    with Log(folder / "log") as log:
        log.partition("out", 1)  # somebody else writes
        with pytest.raises(StreamingQueryException, match="out-1 is being written by process"):
            stream(spark, folder, lockTimeout="100ms")
    assert len(list((folder / "log.outbox").rglob("*.arrow"))) > 0  # abort deleted nothing
    stream(spark, folder)
    assert written(folder) == sorted(f"v{n}" for n in range(RECORDS))


def test_a_batch_write_with_attempts_that_fail(spark: Any, folder: Path) -> None:
    """Two of the tasks die at first; only what their second attempts wrote is appended."""

    def once_failing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        yield from batches
        if context is not None and context.partitionId() > 0 and context.attemptNumber() == 0:
            raise RuntimeError("the first attempt dies after its last row")

    frame = spark.range(0, 300, 1, 3).selectExpr("cast(id as string) key", "cast(id as string) value")
    frame = frame.mapInArrow(once_failing, frame.schema)
    target = {"log": str(folder / "log"), "topic": "out", "writeId": "load-1"}
    frame.write.format("tidegate").options(**target).mode("append").save()
    expected = sorted(str(n) for n in range(300))
    assert written(folder) == expected
    frame.write.format("tidegate").options(**target).mode("append").save()
    assert written(folder) == expected, "the same writeId adds nothing"
    back = spark.read.format("tidegate").options(log=target["log"], topic="out", verdicts="true").load()
    assert [(row.verdict, row["count"]) for row in back.groupBy("verdict").count().collect()] == [("ok", 300)]


@pytest.mark.parametrize(
    ("expressions", "options", "complaint"),
    [
        (["value", "value as colour"], {}, r"columns colour are no part of a record"),
        (["value"], {"topic": "uot"}, "did you mean out"),
        (["value"], {"mode": "overwrite"}, "never overwritten"),
        (["value", "7 as partition"], {}, "topic out has no partition 7"),
    ],
)
def test_mistakes_are_told_in_our_words(
    spark: Any, folder: Path, expressions: list[str], options: dict[str, str], complaint: str
) -> None:
    frame = spark.range(1).selectExpr("cast(id as string) value").selectExpr(*expressions)
    given = {"log": str(folder / "log"), "topic": "out"} | options
    with pytest.raises(Exception, match=re.compile(complaint)):
        frame.write.format("tidegate").mode(given.pop("mode", "append")).options(**given).save()
    assert written(folder) == []
