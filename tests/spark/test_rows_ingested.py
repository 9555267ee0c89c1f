"""Rows of behaviour of a receiver, met by Spark: each is a partition of one version's topic, and one job ingests all.

A situation is written record by record (`stamped_streams`), so that it is exactly the row's. That the job brings every
other partition to its end is part of what is shown: a fault is its partition's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from version_kit import Job, Script, ingested, made, write

from stamped_streams import Pen, Row
from tidegate.integrity.audit import Cutting, audit
from tidegate.integrity.header import ChecksumType
from tidegate.integrity.state import Manifest
from tidegate.log.log import Log
from tidegate.spark.audit import SparkRunner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW = 1_800_000_000_000


def sound() -> list[Row]:
    script = Script()
    return script.whole(script.task.chain_of(3))


def wrong_sum() -> list[Row]:
    script = Script()
    return script.whole([script.task.start(), *script.task.puts(3), script.task.end(wrong=True)])


def empty_sum() -> list[Row]:
    script = Script()
    rows = [script.task.start(), *script.task.puts(3)]
    script.task.checksum = 0
    return script.whole([*rows, script.task.end()])


def chain_without_start() -> list[Row]:
    """Behind the end of push: a producer's chain, and the next one of which the start never came."""
    script, other = Script(), Pen(5)
    rows = script.whole(script.task.chain_of(3)) + other.chain_of(1)
    other.chain, other.sequence = 1, 1
    return [*rows, other.put(), other.put(), other.end(wrong=True), other.start()]


def without(skipped: int) -> Callable[[], list[Row]]:
    def rows() -> list[Row]:
        script = Script()
        chain = script.task.chain_of(5)
        return script.whole(chain[:skipped] + chain[skipped + 1 :])

    return rows


def twice() -> list[Row]:
    script = Script()
    start, *puts, end = script.task.chain_of(3)
    return script.whole([start, start, puts[0], puts[0], *puts[1:], puts[1], end, end, puts[2]])


def damaged_behind() -> list[Row]:
    """Behind the end of push: a record that was changed, one that was lost, one that is good."""
    script, other = Script(), Pen(5)
    rows = script.whole(script.task.chain_of(3))
    start, changed, _, good, end = [other.start(), *other.puts(3), other.end()]
    return [*rows, start, changed._replace(value=b"changed"), good, end]


def heartbeats() -> list[Row]:
    script = Script()
    start, *puts, end = script.task.chain_of(3)
    beat = script.task.heartbeat()
    return script.whole([beat, start, puts[0], beat, beat, *puts[1:], end, beat])


def interleaved() -> list[Row]:
    """Two attempts at one task, in turns; the first one dies."""
    script = Script()
    rows = script.task.chain_of(3)
    return script.whole([rows[0], rows[0], rows[1], rows[1], rows[2], rows[2], rows[3], rows[3], rows[4]])


def loser() -> list[Row]:
    """An attempt without order of its own has its own number, and is not in the manifest."""
    script, dead = Script(), Pen(5)
    return script.whole([dead.start(), dead.put(b"dead", b"1"), *script.task.chain_of(3)])


def tail_lost() -> list[Row]:
    script = Script()
    return script.whole(script.task.chain_of(5)[:-3])


def task_absent() -> list[Row]:
    script, absent = Script(), Pen(5)
    absent.chain_of(2)
    return script.whole(script.task.chain_of(3), script.sent(absent))


def swapped(kind: ChecksumType) -> Callable[[], list[Row]]:
    def rows() -> list[Row]:
        script = Script(kind)
        start, one, two, *rest = script.task.chain_of(3)
        return script.whole([start, one._replace(value=two.value), two._replace(value=one.value), *rest])

    return rows


def said_again() -> list[Row]:
    """The end of push twice, a start of push behind it, and data that no version holds."""
    script = Script()
    rows = script.head + script.task.chain_of(3)
    manifest = Manifest((script.sent(),))
    rows += [script.driver.end_push(manifest), script.driver.end_push(manifest), script.driver.start_push()]
    return [*rows, script.driver.put(b"late", b"1"), script.driver.end()]


@dataclass(frozen=True)
class Case:
    """What a partition holds and what must come of it; without a `fault` it is complete, with three rows."""

    id: str
    rows: Callable[[], list[Row]]
    fault: str = ""
    offset: int = -1
    verdicts: dict[str, int] = field(default_factory=dict)


CASES = [
    Case("DIV-13+DIV-32-sound", sound),
    Case("DIV-10-wrong-sum", wrong_sum, "corrupt", 6),
    Case("DIV-10-empty-sum", empty_sum, "corrupt", 6),
    Case(
        "DIV-11-no-start-of-chain", chain_without_start, verdicts={"unregistered_producer": 1, "corrupt": 0}
    ),
    *(Case(f"DIV-12+DIV-13-record-{n}", without(n), "missing", 2 + n) for n in range(1, 6)),
    Case("DIV-14-twice", twice, verdicts={"duplicate": 5}),
    Case("DIV-15-after-the-push", damaged_behind, verdicts={"corrupt": 1, "missing": 1, "unexpected": 2}),
    Case("DIV-33-heartbeats", heartbeats, verdicts={"duplicate": 0}),
    Case("DIV-41-two-attempts", interleaved, verdicts={"duplicate": 4}),
    Case("DIV-42-loser", loser, "unlisted", 9),
    Case("DIV-44-tail", tail_lost, "missing", 6),
    Case("DIV-44-task", task_absent, "missing", 7),
    Case("DIV-45-adhash2", swapped(ChecksumType.ADHASH2), "corrupt", 3),
    Case("DIV-45-adhash", swapped(ChecksumType.ADHASH), "corrupt", 3),
    Case("DIV-46-said-again", said_again, verdicts={"unexpected": 1, "missing": 0}),
]


@pytest.fixture(scope="module")
def job(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("rows")
    version = made(folder, "rows", len(CASES))
    with Log(folder / "log", durability="os") as log:
        for number, case in enumerate(CASES):
            write(log, version.topic, number, case.rows())
    return ingested(spark, folder, version)


@pytest.mark.parametrize("number", [pytest.param(n, id=case.id) for n, case in enumerate(CASES)])
def test_a_partition_comes_to_what_its_row_says_and_the_others_to_theirs(job: Job, number: int) -> None:
    case, (result, fault) = CASES[number], (job.done[number].result, job.done[number].fault)
    seen = {name: result.verdicts.get(name, 0) for name in case.verdicts}
    assert seen == case.verdicts
    if case.fault:
        assert fault is not None and (fault.kind, fault.partition) == (case.fault, number)
        assert fault.offset == case.offset
        assert not result.is_complete
        assert job.commits(number) == [2], "the start of push, and nothing behind it"
    else:
        assert fault is None and result.is_complete and result.rows == 3
        assert job.commits(number) == [2, result.end_of_push + 1], "start and end of push, no chain's"


def test_what_stays_in_a_stored_partition_is_what_was_sent(job: Job) -> None:
    whole = sum(not case.fault for case in CASES)
    assert job.stored() == sorted((f"k{n}", f"value {n}") for n in range(3) for _ in range(whole))


def test_an_audit_of_the_same_topic_on_spark_says_what_this_process_says(
    spark: SparkSession, job: Job
) -> None:
    given: dict[str, Any] = {"log": job.folder / "log", "now_ms": NOW}
    alone = audit(job.version.topic, **given)
    spread = audit(job.version.topic, runner=SparkRunner(spark), cutting=Cutting(2, smallest=200), **given)
    assert spread.native == alone.native and spread.metadata == alone.metadata
    assert spread.metadata is not None
    faulty = {each.partition for each in spread.metadata.partitions if each.total.faults}
    told = {n for n, case in enumerate(CASES) if case.fault not in ("", "unlisted")}
    behind = {"DIV-11-no-start-of-chain", "DIV-15-after-the-push"}
    after_the_push = {n for n, case in enumerate(CASES) if case.id in behind}
    assert faulty == told | after_the_push
