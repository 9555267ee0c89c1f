"""Rows of behaviour that Spark's rounds, reads and writes meet: chains cut by rounds, faults, tasks that send."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from push_kit import stamps
from version_kit import Script, write

from damaged_streams import damage, sound_rows
from scalar_validator import ScalarValidator
from stamped_streams import NOW, Pen, Row, Streams, arrivals
from tidegate.clock import ManualClock
from tidegate.integrity.header import HEADERS_ONLY, NO_CONTROL, ControlType
from tidegate.integrity.validator import OnError, ValidationRules
from tidegate.log.log import Log
from tidegate.pipeline.definition.app import App
from tidegate.pipeline.rounds.records import Records
from tidegate.pipeline.rounds.run import Summary
from tidegate.storage import open_backend
from tidegate.tables.serdes.json import Json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COPY = "copied"


def numbered(pen: Pen, first: int, stop: int) -> list[Row]:
    return [pen.put(b"k%d" % number, b'{"n":%d}' % number) for number in range(first, stop)]


def app_over(folder: Path, change: Any = None) -> App:
    """Every valid record of `orders` goes to another topic."""
    app = App("rows", data=folder)
    orders = app.stream("orders", value=Json(n="int64")).validate()
    if change is not None:
        orders = orders.map(change, pa.schema([("n", pa.int64())]))
    orders.to_topic(COPY)
    return app


def run(app: App, spark: SparkSession, now_ms: int = NOW, **given: Any) -> Summary:
    given = {"close": False, **given}
    return app.run(spark, until="caught_up", clock=ManualClock(now_ms), **given)


def append(folder: Path, rows: Sequence[Row]) -> None:
    with Log(folder / "log", durability="os") as log:
        if "orders" not in log.topics():
            log.create_topic("orders")
            log.create_topic(COPY)
        write(log, "orders", 0, rows)


def totals(folder: Path) -> dict[str, int]:
    """What the last commit has counted, by verdict."""
    backend = open_backend(str(folder / "state"))
    records = Records(backend, "rows")
    newest = records.newest()
    assert newest is not None
    ((_, counted),) = records.read_commit(newest)[0].totals.items()
    backend.close()
    return {name: count for name, count in counted.items() if name.startswith("verdict.")}


def copied(folder: Path) -> list[str]:
    with Log(folder / "log", read_only=True) as log, log.reader(COPY, control_records=True) as reader:
        rows = [row for batch in reader for row in batch.to_pylist()]
    return [row["value"].decode() for row in rows if row["value"]]


def said(*numbers: int) -> list[str]:
    return [f'{{"n":{number}}}' for number in numbers]


@pytest.mark.parametrize("row", ["DIV-15"])
def test_behind_an_end_of_push_faults_are_counted_and_good_records_kept(
    row: str, spark: SparkSession, tmp_path: Path
) -> None:
    script, live = Script(), Pen(5)
    pushed = script.whole([script.task.start(), *numbered(script.task, 0, 2), script.task.end()])
    start, (changed, _, good) = live.start(), numbered(live, 10, 13)
    append(tmp_path, [*pushed, start, changed._replace(value=b'{"n":99}'), good, live.end()])
    summary = run(app_over(tmp_path), spark)
    assert (summary.exit_code, summary.stopped) == (1, ()), "told until it is acknowledged; nothing stopped"
    counted = totals(tmp_path)
    assert (counted["verdict.corrupt"], counted["verdict.missing"]) == (1, 1)
    assert copied(tmp_path) == said(0, 1, 12), "a corrupt record never counts"
    (letter,) = app_over(tmp_path).dead_letters(COPY).to_pylist()
    assert (letter["offset"], letter["value"]) == (len(pushed) + 1, b'{"n":99}')


@pytest.mark.parametrize("row", ["DIV-26+DIV-27"])
def test_chains_go_on_over_rounds_and_restarts_and_a_round_done_again_says_nothing_new(
    row: str, spark: SparkSession, tmp_path: Path
) -> None:
    pen = Pen()
    append(tmp_path, [pen.start(), *numbered(pen, 0, 25)])
    assert run(app_over(tmp_path), spark, round_records=10).rounds == 3
    append(tmp_path, numbered(pen, 25, 30))
    shutil.copytree(tmp_path / "state", tmp_path / "before")
    run(app_over(tmp_path), spark)
    there, kept = totals(tmp_path), copied(tmp_path)
    shutil.rmtree(tmp_path / "state")  # the machine died, and this is what its disk has: an older commit
    (tmp_path / "before").rename(tmp_path / "state")
    run(app_over(tmp_path), spark)
    assert (totals(tmp_path), copied(tmp_path)) == (there, kept)
    append(tmp_path, [*numbered(pen, 30, 33), pen.end()])
    run(app_over(tmp_path), spark)
    assert totals(tmp_path) == {"verdict.ok": 35}, "the sum over all rounds is the one the end certifies"
    assert copied(tmp_path) == said(*range(33))


@pytest.mark.parametrize("row", ["DIV-37+DIV-39"])
def test_results_of_all_rounds_are_one_numbering_that_neither_time_nor_a_close_ends(
    row: str, spark: SparkSession, tmp_path: Path
) -> None:
    """Results are numbered in their headers alone: there is no end that time could write between them."""
    pen = Pen()
    append(tmp_path, [pen.start(), *numbered(pen, 0, 1000)])
    run(app_over(tmp_path), spark, round_records=400)
    append(tmp_path, numbered(pen, 1000, 1001))
    run(app_over(tmp_path), spark, NOW + 299_000)
    append(tmp_path, numbered(pen, 1001, 1002))
    run(app_over(tmp_path), spark, NOW + 360_000)
    run(app_over(tmp_path), spark, NOW + 900_000, close=True)
    append(tmp_path, numbered(pen, 1002, 1003))
    run(app_over(tmp_path), spark, NOW + 900_001)
    found = stamps(tmp_path / "log", COPY, 0)
    assert len({(int(each["guid_high"]), int(each["guid_low"])) for each in found}) == 1
    assert set(found["control"].tolist()) == {NO_CONTROL} and set(found["flags"].tolist()) == {HEADERS_ONLY}
    assert set(found["chain"].tolist()) == {0} and found["sequence"].tolist() == list(range(1003))
    assert copied(tmp_path) == said(*range(1003))


@pytest.mark.parametrize("row", ["DIV-38+DIV-40"])
def test_rows_of_eight_tasks_in_one_partition_are_numbered_one_after_the_other(
    row: str, spark: SparkSession, tmp_path: Path
) -> None:
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic("out", 2)
    frame = spark.range(0, 800, 1, 8).selectExpr(
        "cast(id as string) key", "cast(id as string) value", "0 partition"
    )
    frame.write.format("tidegate").mode("append").options(log=str(tmp_path / "log"), topic="out").save()
    found = stamps(tmp_path / "log", "out", 0)
    ends = found["control"] == ControlType.END_OF_CHAIN
    assert len(found) == 802 and ends.sum() == 1, "one start, one end"
    assert found["sequence"].tolist() == list(range(802)) and set(found["chain"].tolist()) == {0}
    with Log(tmp_path / "log", read_only=True) as log, log.reader("out", [1], control_records=True) as reader:
        assert [batch.num_rows for batch in reader] == [], "nothing was sent there, so nothing ends"


def telling(path: Path) -> Any:
    """Passes rows on; from then on what the validator of this process warns of is written to a file."""

    def change(batch: pa.RecordBatch) -> pa.RecordBatch:
        logger = logging.getLogger("tidegate.integrity.validator")
        if not any(isinstance(each, logging.FileHandler) for each in logger.handlers):
            logger.addHandler(logging.FileHandler(path))
        return batch.select(["n"])

    return change


@pytest.mark.parametrize("row", ["DIV-48"])
def test_a_thousand_faults_in_several_rounds_are_one_line_and_a_thousand_counts(
    row: str, spark: SparkSession, tmp_path: Path
) -> None:
    pen, told = Pen(), tmp_path / "told"
    append(tmp_path, [pen.start(), *numbered(pen, 0, 10)])
    run(app_over(tmp_path, telling(told)), spark)
    append(tmp_path, [row._replace(value=b'{"n":-1}') for row in numbered(pen, 10, 1010)])
    assert run(app_over(tmp_path, telling(told)), spark, round_records=250).rounds == 4
    assert totals(tmp_path)["verdict.corrupt"] == 1000
    (line,) = told.read_text().splitlines()
    assert "CORRUPT (D1) at orders-0 offset 11" in line and "(and 249 more like it)" in line


SEEDS = 24


@pytest.mark.parametrize("row", ["DIV-49"])
def test_spark_says_of_every_record_of_damaged_streams_what_the_scalar_twin_says(
    row: str, spark: SparkSession, tmp_path: Path
) -> None:
    written: list[list[Row]] = []
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic("orders", SEEDS)
        for seed in range(SEEDS):
            chance = random.Random(seed)
            rows = sound_rows(Streams, chance, early_end=True)
            for _ in range(chance.choice([0, 1, 2, 3, 8])):
                damage(Streams, chance, rows)
            written.append([row._replace(time=max(row.time, 0)) for row in rows])
            write(log, "orders", seed, written[-1])
    options = {"log": str(tmp_path / "log"), "topic": "orders", "verdicts": "true", "controlRecords": "true"}
    frame = spark.read.format("tidegate").options(**options).load().select("partition", "offset", "verdict")
    seen = {(found.partition, found.offset): found.verdict for found in frame.collect()}
    rules = ValidationRules(during_push=OnError.KEEP, otherwise=OnError.KEEP)
    expected = {}
    for seed, rows in enumerate(written):
        twin = ScalarValidator(rules)
        for offset, arrival in enumerate(arrivals(rows)):
            expected[seed, offset] = twin.look(arrival, NOW).verdict.label
    assert seen == expected and len(set(expected.values())) > 4
