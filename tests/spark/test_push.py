"""Pushes on Spark, from a DataFrame to a table that is shown: clean ones, and each kind of damage on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from push_kit import damage, keys_of

from tidegate.errors import InvalidError, UnavailableError
from tidegate.integrity.fault_injection import DamageKind
from tidegate.integrity.header import CONTROL_KEY_PREFIX
from tidegate.log.writer import partition_of_key
from tidegate.spark.push.driver import push
from tidegate.spark.push.progress import PushProgress
from tidegate.storage import open_backend
from tidegate.tables.versions.catalog import PushFailedError, PushReport, State, Versions
from tidegate.tables.versions.diff import diff_versions
from tidegate.tables.versions.reader import versioned_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 240


def users(spark: SparkSession, count: int = ROWS, text: str = "v") -> DataFrame:
    from pyspark.sql import functions as f

    number = f.col("id")
    return spark.range(0, count, 1, 3).select(
        f.format_string("user-%04d", number).alias("name"),
        f.concat(f.lit(text), number.cast("string")).alias("said"),
        (number * 0.5).alias("score"),
    )


def pushed(folder: Path, frame: DataFrame, **settings: Any) -> PushReport:
    settings = {"key": "name", "partitions": 2, **settings}
    return push(frame, table="users", log=str(folder / "log"), state=str(folder / "state"), **settings)


def shown(folder: Path) -> dict[str, Any]:
    with versioned_table("users", state=folder / "state") as table:
        return {row.key: row.value for row in table.all()}


def versions_of(folder: Path) -> Versions:
    return Versions(open_backend(str(folder / "state")), "users")


def test_a_frame_becomes_a_table_in_kafkas_partitions_and_the_next_one_takes_its_place(
    spark: SparkSession, tmp_path: Path
) -> None:
    told: list[PushProgress] = []
    report = pushed(tmp_path, users(spark), progress=told.append, source="a frame")
    assert report.is_current and report.version.rows == ROWS
    assert shown(tmp_path)["user-0007"] == {"said": "v7", "score": 3.5}
    for partition in range(2):
        keys = [
            key
            for key in keys_of(tmp_path / "log", "users_v1", partition)
            if not key.startswith(CONTROL_KEY_PREFIX)
        ]
        assert keys == sorted(keys) and len(keys) > 50
        assert {partition_of_key(key, 2) for key in keys} == {partition}
    assert {each.step for each in told} >= {"sending", "ingesting"}
    changed = users(spark, ROWS + 5).where("name <> 'user-0003'")
    from pyspark.sql import functions as f

    changed = changed.withColumn(
        "said", f.when(f.col("name") == "user-0004", f.lit("new")).otherwise(f.col("said"))
    )
    second = pushed(tmp_path, changed, swap=False)
    assert (second.is_current, second.current) == (False, 1)
    found = diff_versions(open_backend(str(tmp_path / "state")), report.version, second.version)
    assert (found.gained, found.lost, found.changed, found.same) == (5, 1, 1, ROWS - 2)
    assert [each.key for each in found.examples["changed"]] == [b"user-0004"]
    assert versions_of(tmp_path).swap(2).current == 2
    assert shown(tmp_path)["user-0004"]["said"] == "new"


NAMED = {
    DamageKind.DROP: ("missing", "DIV-13"),
    DamageKind.FLIP: ("corrupt", "DIV-10"),
    DamageKind.SWAP: ("corrupt", "DIV-45"),
    DamageKind.REORDER: ("late", "DIV-13"),
    DamageKind.TRUNCATE_TAIL: ("missing", "DIV-44"),
    DamageKind.FORGET_PRODUCER: ("missing", "DIV-44"),
    DamageKind.FUTURE_CLOCK: ("corrupt", "DIV-10"),
}


@pytest.fixture(scope="module")
def with_an_old_version(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pushed")
    pushed(folder, users(spark, 50, "old"))
    return folder


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, id=f"{row}-{kind.value}") for kind, (_, row) in NAMED.items()]
)
def test_damage_on_the_way_fails_the_version_is_named_and_the_old_one_answers(
    spark: SparkSession, with_an_old_version: Path, kind: DamageKind
) -> None:
    folder, done = with_an_old_version, []

    def strike(step: str) -> None:
        if step == "ended":
            topic = versions_of(folder).list().versions[-1].topic
            done.append(damage(folder / "log", topic, kind, folder / f"copy-{kind.value}", partition=1))

    with pytest.raises(PushFailedError) as failed:
        pushed(folder, users(spark), watch=strike)
    (struck,), (fault,) = done, failed.value.report.version.faults
    assert (fault.kind, fault.partition) == (NAMED[kind][0], 1)
    if kind not in (DamageKind.TRUNCATE_TAIL, DamageKind.FORGET_PRODUCER):
        assert fault.offset in {offset for offset, _ in struck.seen}
        assert fault.producer == struck.producer
    else:
        assert struck.producer in fault.message  # only the manifest knows, and names it
    said = str(failed.value)
    assert "version 1 is still shown" in said and "tidegate verify users_v" in said
    results = {each.partition: each for each in failed.value.report.version.results}
    assert results[0].is_complete and not results[1].is_complete  # the other one came to its end
    version = versions_of(folder).list().versions[-1]
    assert (version.state, versions_of(folder).list().current) == (State.FAILED, 1)
    assert len(shown(folder)) == 50 and shown(folder)["user-0007"]["said"] == "old7"


@pytest.mark.parametrize("row", ["DIV-14"])
def test_records_repeated_on_the_way_are_no_damage_the_version_goes_live_with_each_once(
    row: str, spark: SparkSession, tmp_path: Path
) -> None:
    assert set(DamageKind) - set(NAMED) == {DamageKind.REPEAT}, "all others fail a version, above"

    def repeat(step: str) -> None:
        if step == "ended":
            for number in range(2):
                into = tmp_path / f"copy-{number}"
                damage(tmp_path / "log", "users_v1", DamageKind.REPEAT, into, partition=number, count=3)

    report = pushed(tmp_path, users(spark), watch=repeat)
    assert report.is_current and report.version.verdicts["duplicate"] == 6
    assert (report.version.rows, len(shown(tmp_path))) == (ROWS, ROWS)


def test_progress_says_how_long_it_will_probably_take(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.sql import functions as f

    told: list[PushProgress] = []
    estimated = tmp_path / "estimated"

    def tell(seen: PushProgress) -> None:
        told.append(seen)
        if seen.left_ms is not None:
            estimated.touch()

    @f.udf(returnType="string", useArrow=False)
    def said(number: int) -> str:
        """The first row is ready at once; the others wait until somebody was told how long they will take."""
        until = time.monotonic() + 300
        while number and not estimated.exists() and time.monotonic() < until:
            time.sleep(0.05)
        return "x"

    frame = spark.range(0, 4, 1, 4).select(f.col("id").cast("string").alias("name"), said("id").alias("said"))
    pushed(tmp_path, frame, partitions=4, progress=tell)
    sending = [each for each in told if each.step == "sending"]
    assert [each.done for each in sending] == sorted(each.done for each in sending)
    (first, *_) = [each for each in sending if each.left_ms is not None]
    assert 0 < first.done < first.total
    assert first.left_ms == first.elapsed_ms * (first.total - first.done) // first.done


def test_rows_without_a_key_are_refused_with_their_number_or_left_out(
    spark: SparkSession, tmp_path: Path
) -> None:
    from pyspark.sql import functions as f

    frame = users(spark, 30).withColumn("name", f.when(f.col("score") >= 5.5, f.col("name")))
    with pytest.raises(InvalidError, match="11 rows have no key"):
        pushed(tmp_path, frame)
    known = versions_of(tmp_path).list()
    assert (known.current, known.versions[0].state) == (0, State.FAILED)
    report = pushed(tmp_path, frame, without_key="skip")
    assert (report.version.number, report.version.rows, report.version.without_key) == (2, 19, 11)


def test_of_rows_with_one_key_the_last_by_the_order_counts(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.createDataFrame(
        [(1, 9, "old"), (1, 10, "new"), (2, 3, "only"), (1, 2, "oldest")], "id long, at int, said string"
    )
    report = pushed(tmp_path, frame, key="id", value="said", order_by="at")
    assert shown(tmp_path) == {1: "new", 2: "only"}
    assert (report.version.repeated_keys, report.version.key_serde) == (2, "Long()")


def test_several_key_columns_are_a_json_key_and_what_json_cannot_say_is_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    frame = spark.createDataFrame([("a", 1, 0.5), ("a", 2, 1.5)], "name string, day int, score double")
    pushed(tmp_path, frame, key=["name", "day"])
    with versioned_table("users", state=tmp_path / "state") as table:
        assert table.get({"name": "a", "day": 2}) == {"score": 1.5}
    with pytest.raises(InvalidError, match="array<int>"):
        pushed(tmp_path, frame.selectExpr("name", "array(day) as days"))
    assert len(versions_of(tmp_path).list().versions) == 1  # refused before a version was made


def test_an_interrupted_push_leaves_a_failed_version_and_the_next_gets_the_next_number(
    spark: SparkSession, tmp_path: Path
) -> None:
    def interrupt(step: str) -> None:
        if step == "sent":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pushed(tmp_path, users(spark, 20), watch=interrupt)
    (version,) = versions_of(tmp_path).list().versions
    assert (version.state, version.faults[0].kind) == (State.FAILED, "interrupted")
    with pytest.raises(UnavailableError, match="no version to show"):
        shown(tmp_path)
    assert pushed(tmp_path, users(spark, 20)).version.number == 2


def test_a_task_whose_process_is_killed_is_tried_again(spark: SparkSession, tmp_path: Path) -> None:
    frame = users(spark, 400)
    report = pushed(tmp_path, frame.select("name", dying("said", tmp_path / "died")(frame)), value="said")
    assert report.is_current and report.version.rows == 400
    assert (tmp_path / "died").exists()


def dying(column: str, mark: Path) -> Callable[[DataFrame], Any]:
    """The column; the process that makes it first is killed."""
    import os
    import signal

    import pyarrow as pa
    from pyspark.sql.pandas.functions import arrow_udf

    def maybe(values: pa.Array) -> pa.Array:
        if not mark.exists():
            mark.write_text("once")
            os.kill(os.getpid(), signal.SIGKILL)
        return values

    maybe.__annotations__ = {"values": pa.Array, "return": pa.Array}
    made: Any = arrow_udf
    return lambda frame: made(maybe, "string")(frame[column]).alias(column)


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
def test_a_number_that_json_cannot_say_is_the_callers_fault(
    spark: SparkSession, tmp_path: Path, number: str
) -> None:
    from pyspark.sql import functions as f

    bad = f.when(f.col("name") == "user-0100", f.lit(number).cast("double")).otherwise(f.col("score"))
    with pytest.raises(
        InvalidError, match=r"a row cannot be pushed: .*'score' is (nan|inf), which JSON cannot say"
    ):
        pushed(tmp_path, users(spark).withColumn("score", bad))
    assert pushed(tmp_path, users(spark)).is_current
