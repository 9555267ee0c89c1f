"""Through Spark: a partition that a fault stopped leaves the others going on, and the command that the message names
brings it back; rounds that are done again, with other slots, change no byte (R-19)."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import pipelines
from pipelines import NOON, every_kind, run_all, stored
from tidegate.cli.main import run as command_line
from tidegate.clock import ManualClock
from tidegate.log.log import Log
from tidegate.pipeline.rounds.records import CommitRecord, Records
from tidegate.spark.engine import SparkEngine
from tidegate.storage import open_backend

TOPICS = ("tumbling", "session", "by-shop")
CO_PARTITIONED = TOPICS[:2]


def newest(folder: Path) -> CommitRecord:
    backend = open_backend(folder / "state")
    records = Records(backend, "every-kind")
    number = records.newest()
    assert number is not None
    commit = records.read_commit(number)[0]
    backend.close()
    return commit


# -- stops are data ------------------------------------------------------------------------------


def positions(folder: Path, flow: str) -> dict[int, int]:
    return {line.partition: line.next_offset for line in newest(folder).sources if line.flow == flow}


def ends(folder: Path) -> dict[int, int]:
    with Log(folder / "log", read_only=True) as log:
        return {row["partition"]: row["high_watermark"] for row in log.partition_rows("orders")}


def test_a_stopped_partition_leaves_the_others_going_on_and_its_command_resumes_it(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipelines.create(tmp_path, only=CO_PARTITIONED)
    pipelines.write_orders(tmp_path, 200, seed=1)
    with Log(tmp_path / "log", durability="os") as log, log.writer("orders") as writer:
        writer.write(pa.table({"key": [b"customer-1"], "value": [b"not json"]}), partition=1)
    pipelines.write_orders(tmp_path, 200, seed=2)
    summary = run_all(every_kind(tmp_path, only=CO_PARTITIONED), spark, round_records=300, close=False)
    assert summary.caught_up and summary.exit_code == 5 and "stopped" in str(summary)
    assert {(each.flow, each.partition) for each in summary.stopped} == {(flow, 1) for flow in CO_PARTITIONED}
    (bad,) = {each.offset for each in summary.stopped}
    there = ends(tmp_path)
    for flow in CO_PARTITIONED:
        assert positions(tmp_path, flow) == {0: there[0], 1: bad}, (
            "all before it counts, and the other goes on"
        )
    again = run_all(every_kind(tmp_path, only=CO_PARTITIONED), spark, close=False)
    assert (again.rounds, again.exit_code, again.stopped) == (0, 5, summary.stopped)
    for each in summary.stopped:
        program, *arguments = each.command.split()
        assert program == "tidegate" and f"--skip-to {bad + 1}" in each.command
        assert command_line([*arguments, "--state", str(tmp_path / "state")]) == 0
    capsys.readouterr()
    last = run_all(every_kind(tmp_path, only=CO_PARTITIONED), spark)
    assert last.exit_code == 0 and last.stopped == () and last.closed
    assert positions(tmp_path, "tumbling") == there
    assert {(loss.first, loss.end) for loss in newest(tmp_path).losses} == {(bad, bad + 1)}


# -- rounds done again -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rounds(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An app run on Spark, and a copy of its state after every round, as an operator would take it."""
    folder: Path = tmp_path_factory.mktemp("rounds") / "app"
    pipelines.create(folder, only=TOPICS)
    pipelines.write_orders(folder, 400)
    taken: list[int] = []

    def copy(_: Any) -> None:
        number = newest(folder).round
        if number not in taken:
            taken.append(number)
            copied = folder.parent / f"state-{number}"
            shutil.copytree(folder / "state", copied)
            (copied / "apps" / "every-kind" / "lease").unlink()  # whoever has the turn has it in the original

    every_kind(folder, only=TOPICS).run(
        spark, until="caught_up", close=True, round_records=300, clock=ManualClock(NOON), progress=copy
    )
    assert len(taken) > 4
    return folder


@pytest.mark.parametrize("back", [1, 2, 3], ids=lambda back: f"R-19-back-{back}")
def test_rounds_done_again_with_other_slots_change_no_byte(
    spark: Any, rounds: Path, tmp_path: Path, back: int, tally: Any
) -> None:
    """The state is a copy from some rounds ago, the log has all that was sent since: it is compared and left."""
    folder = tmp_path / "app"
    shutil.copytree(rounds, folder)
    shutil.rmtree(folder / "state")
    last = newest(rounds)
    shutil.copytree(rounds.parent / f"state-{last.round - back}", folder / "state")
    engine = partial(SparkEngine, spark, slots=(1, 3, 5)[back - 1])
    summary = run_all(every_kind(folder, only=TOPICS), engine, round_records=300)
    assert summary.rounds == back
    assert stored(folder, *TOPICS) == stored(rounds, *TOPICS)
    commit = newest(folder)
    assert (commit.totals, commit.ends) == (last.totals, last.ends)
    assert [line.state for line in commit.sources] == [line.state for line in last.sources]
    tally(back, repaired=back, changed_bytes=0)
