"""Rows of behaviour about what a topic has kept and what a store can keep, met by Spark: compaction, a full disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from version_kit import Job, Script, ingested, made, write

from stamped_streams import Row
from tidegate.clock import ManualClock, SystemClock
from tidegate.integrity.header import ControlKey
from tidegate.log.log import Log
from tidegate.log.maintenance import Housekeeping
from tidegate.log.topic_config import BrokerConfig
from tidegate.randomness import SeededRandomness
from tidegate.tables.versions.ingest import Ingested

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAY = 86_400_000


def aged(age_ms: int) -> Script:
    """A push of some time ago."""
    return Script(time=SystemClock().now_ms() - age_ms)


def overwritten() -> list[Row]:
    """Every key twice: compaction leaves the later values, and gaps."""
    script = aged(2 * DAY)
    start = script.task.start()
    puts = [script.task.put(b"k%d" % (n % 3), b"value %d" % n) for n in range(6)]
    return script.whole([start, *puts, script.task.end()])


def young_gap() -> list[Row]:
    """A record that no compaction can have taken yet."""
    script = aged(DAY // 2)
    rows = script.task.chain_of(4)
    return script.whole(rows[:2] + rows[3:])


def attempts(*nonces: int) -> Callable[[], list[Row]]:
    """A second attempt begins again and dies, then the first one goes on; `nonces` are in their control keys."""

    def rows() -> list[Row]:
        script = aged(2 * DAY)
        start, *rest = script.task.chain_of(4)
        begun, again = (with_nonce(start, nonce) for nonce in nonces)
        return script.whole([begun, *rest[:3], again, *rest[3:]])

    return rows


def repeated_last() -> list[Row]:
    """A second attempt sends one record again and dies: compaction leaves the repeat, and not the record."""
    script = aged(2 * DAY)
    start, *rest = script.task.chain_of(4)
    return script.whole([with_nonce(start, 7), *rest[:4], with_nonce(start, 8), rest[1], *rest[4:]])


def with_nonce(row: Row, nonce: int) -> Row:
    assert row.stamp is not None
    return row._replace(key=ControlKey(row.stamp.guid, row.stamp.chain, row.stamp.sequence, nonce).to_bytes())


COMPACTED: list[tuple[str, Callable[[], list[Row]], str, dict[str, str]]] = [
    ("DIV-16-old", overwritten, "", {f"k{n}": f"value {n + 3}" for n in range(3)}),
    ("DIV-16-young", young_gap, "missing", {}),
    ("DIV-43-same-control-key", attempts(7, 7), "unregistered_producer", {}),
    ("DIV-43-nonce-of-attempt", attempts(7, 8), "", {f"k{n}": f"value {n}" for n in range(4)}),
    ("DIV-43-repeat-alone", repeated_last, "compacted", {}),
]


@pytest.fixture(scope="module")
def compacted(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("compacted")
    settings = {"cleanup.policy": "compact", "min.compaction.lag.ms": DAY, "min.cleanable.dirty.ratio": 0.01}
    version = made(folder, "kept", len(COMPACTED), settings)
    with Log(folder / "log", durability="os") as log:
        for number, (_, rows, _, _) in enumerate(COMPACTED):
            write(log, version.topic, number, rows())
            log.partition(version.topic, number).roll()
        clean(log)
    return ingested(spark, folder, version)


def clean(log: Log) -> None:
    clock = ManualClock(SystemClock().now_ms())
    chores = Housekeeping(
        log, broker=BrokerConfig(), files=log.files, clock=clock, randomness=SeededRandomness(1)
    )
    done = chores.clean_once()
    assert sum(each.compaction is not None for each in done) >= 3, "the old ones are compacted"


@pytest.mark.parametrize("number", [pytest.param(n, id=name) for n, (name, _, _, _) in enumerate(COMPACTED)])
def test_gaps_that_compaction_explains_are_fine_and_others_are_not(compacted: Job, number: int) -> None:
    _, _, expected, rows = COMPACTED[number]
    result, fault = compacted.done[number].result, compacted.done[number].fault
    assert ("" if fault is None else fault.kind) == expected
    assert result.is_complete == (not expected) and result.rows == len(rows)


def test_of_compacted_keys_the_latest_values_are_there(compacted: Job) -> None:
    expected = sorted(item for _, _, _, rows in COMPACTED for item in rows.items())
    assert compacted.stored() == expected


@pytest.mark.parametrize("row", ["DIV-31+DIV-27"])
def test_a_partition_that_cannot_be_stored_stays_where_it_was_and_goes_on_later(
    row: str, spark: SparkSession, tmp_path: Path
) -> None:
    version = made(tmp_path, "kept", 2)
    with Log(tmp_path / "log", durability="os") as log:
        for number in range(2):
            script = Script()
            write(log, version.topic, number, script.whole(script.task.chain_of(3)))
    packs = tmp_path / "state" / version.shape(1).name / "packs"
    packs.parent.mkdir(parents=True)
    packs.write_text("in the way of a folder")
    first = ingested(spark, tmp_path, version)
    assert first.done[0].fault is None and first.done[0].result.is_complete
    fault = first.done[1].fault
    assert fault is not None and fault.kind not in ("missing", "corrupt")
    assert first.commits(0) == [2, 8] and first.commits(1) == [2], "the start of push; no row was stored"
    assert first.drained(1) == 2, "offset and validation state are one cut"
    packs.unlink()
    again = ingested(spark, tmp_path, version)
    whole = replace(first.done[0].result, partition=1)  # its counts, too, are of all records
    assert again.done[1] == Ingested(whole)
    assert again.commits(0) == [2, 8], "what is complete is not built again"
