"""Real processes of Spark, really killed: workers, executors, the driver. What is left shows no trace of it."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cluster_kit import answers, run_script

import pipelines
from meddling import STEPS, Meddling
from pipelines import (
    every_kind,
    named_objects,
    objects_of,
    records,
    run_all,
    stored,
)
from tidegate.clock import SystemClock
from tidegate.pipeline.checkpoint import Records
from tidegate.pipeline.gc import Collector
from tidegate.storage.backends.folder import FolderBackend

APP = "every-kind"
TOPICS = ("tumbling", "by-shop")
ROUND = 150
DRIVER_STEPS = (
    "before-lease", "before-plan", "plan", "before-work", "work", "state", "before-commit", "commit", "check",
    "before-deliver", "deliver", "before-collect", "collect",
)  # fmt: skip
CLUSTER = """
import json, os, sys
from pathlib import Path
import tidegate.spark
from cluster_kit import two_hosts
from meddling import Meddling
from pipelines import NOON, every_kind
from tidegate.clock import ManualClock

folder, wanted = Path(sys.argv[1]), json.loads(sys.argv[2])
config = {
    "spark.executor.memory": "512m",
    "spark.task.maxFailures": "8",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.5",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.minTaskRuntime": "300ms",
    "spark.executorEnv.PYTHONPATH": os.environ.get("PYTHONPATH", ""),
}
spark = tidegate.spark.session("kills", master=two_hosts(folder.parent / "workers"), config=config)
spark.sparkContext.setLogLevel("OFF")
meddling = Meddling(folder / "requests", stall_s=600)

def next_request(_):
    if wanted:
        meddling.ask(*wanted.pop(0))

next_request(None)
app = every_kind(folder, meddling, only=("tumbling", "by-shop"))
summary = app.run(
    spark, until="caught_up", close=True, round_records=int(sys.argv[3]), clock=ManualClock(NOON), progress=next_request
)
told = {"rounds": summary.rounds, "done": meddling.done, "overtaken": meddling.overtaken}
print(json.dumps(told))
spark.stop()
"""
DRIVER = """
import os, signal, sys
from pathlib import Path
import tidegate.spark
from tidegate.pipeline.gc import Collector
from tidegate.pipeline.lease import AppLease
from tidegate.pipeline.coordinator import Coordinator
from tidegate.pipeline.checkpoint import Records
from tidegate.spark.engine import SparkEngine
from pipelines import every_kind, run_all

folder, step, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
moment, _, step = step.rpartition("-")
owner, name = {
    "lease": (AppLease, "keep"), "plan": (Records, "put_plan"), "work": (SparkEngine, "run"),
    "state": (Records, "store_state"), "commit": (Records, "put_commit"), "check": (AppLease, "check"),
    "deliver": (Coordinator, "deliver_outstanding"), "collect": (Collector, "superseded"),
}[step]
inner, calls = getattr(owner, name), []

def dies(*arguments, **named):
    calls.append(1)
    if len(calls) == count and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = inner(*arguments, **named)
    if len(calls) == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(owner, name, dies)
spark = tidegate.spark.session("driver", master="local[2,4]")
spark.sparkContext.setLogLevel("OFF")
run_all(every_kind(folder, only=("tumbling", "by-shop")), spark, round_records=int(sys.argv[4]))
"""


def kills(tmp_path: Path, wanted: list[tuple[str, str]], rows: int, cut: int) -> dict[str, Any]:
    """An app on two executors whose tasks die as wanted, one after each round, compared with an undisturbed run."""
    folder, twin = tmp_path / "app", tmp_path / "twin"
    pipelines.create(folder, change=Meddling(folder / "requests"), only=TOPICS)
    pipelines.write_orders(folder, rows)
    shutil.copytree(folder, twin)
    run_all(every_kind(twin, Meddling(twin / "requests"), only=TOPICS), "local", round_records=cut)
    said = run_script(CLUSTER, tmp_path, folder, json.dumps(wanted), cut)
    assert stored(folder, *TOPICS) == stored(twin, *TOPICS)
    found: dict[str, Any] = answers(said)[-1]
    return found


ACTIONS = ("worker", "executor")
VICTIMS = list(zip(STEPS, itertools.cycle(ACTIONS), strict=False))  # every step once; all pairs in the soak


class Killed(NamedTuple):
    """An app that lived through every kill, and the twin that was left alone."""

    folder: Path
    twin: Path
    done: list[str]
    rounds: int
    overtaken: list[str]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """One session on two hosts, a death in each round, and one attempt that stalls until Spark has started a twin."""
    folder = tmp_path_factory.mktemp("kills")
    wanted = [*VICTIMS, ("records", "stall")]
    found = kills(folder, wanted, 700, ROUND)
    return Killed(folder / "app", folder / "twin", found["done"], found["rounds"], found["overtaken"])


@pytest.mark.timeout(2700)
@pytest.mark.parametrize(
    ("step", "victim"), VICTIMS, ids=[f"R-18-{step}-{victim}" for step, victim in VICTIMS]
)
def test_a_killed_worker_or_executor_costs_a_retry_and_never_data(
    killed: Killed, step: str, victim: str, tally: Any
) -> None:
    assert [name for name in killed.done if name.startswith(f"{step}.{victim}.")], "it happened"
    assert stored(killed.folder, *TOPICS) == stored(killed.twin, *TOPICS)
    tally(1, repaired=1)


@pytest.mark.timeout(2700)
@pytest.mark.parametrize("what", [pytest.param("stall", id="R-20-speculation")])
def test_an_attempt_that_stalls_has_a_twin_and_whoever_is_late_changes_nothing(
    killed: Killed, what: str
) -> None:
    assert [name for name in killed.done if name.startswith(f"records.{what}.")], "it happened"
    assert len(killed.overtaken) == 1, "two attempts were at work on one task"
    assert killed.rounds > len(VICTIMS)
    assert stored(killed.folder, *TOPICS) == stored(killed.twin, *TOPICS)


@pytest.mark.timeout(2700)
@pytest.mark.parametrize("what", [pytest.param("collected", id="WS-T97-collected")])
def test_after_deaths_at_every_step_collection_takes_the_orphans_and_nothing_else(
    killed: Killed, tmp_path: Path, what: str
) -> None:
    """What dead attempts wrote is gone then; what any kept commit needs is there, and says the same."""
    folder = tmp_path / what
    shutil.copytree(killed.folder, folder)
    backend = FolderBackend(folder / "state")
    orphans = objects_of(backend, APP) - named_objects(backend, APP)
    assert len(orphans) > 2, "attempts died after they had written something"
    Collector(Records(backend, APP), clock=SystemClock(), grace_ms=0, every_ms=0).run()
    assert objects_of(backend, APP) == named_objects(backend, APP) != set()
    for round in Records(backend, APP).rounds()[-3:]:
        for name in TOPICS:
            with every_kind(folder, Meddling(folder / "requests"), only=TOPICS).open_table(
                name, round=round
            ) as rows:
                assert rows.to_arrow().num_rows > 0
    with every_kind(folder, Meddling(folder / "requests"), only=TOPICS).open_table("tumbling") as ours:
        after = sorted(ours.to_arrow().to_pylist(), key=repr)
    with every_kind(killed.twin, Meddling(killed.twin / "requests"), only=TOPICS).open_table(
        "tumbling"
    ) as theirs:
        assert after == sorted(theirs.to_arrow().to_pylist(), key=repr)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "victim", [pytest.param(each, id=f"R-18-soak-{each}") for each in (*ACTIONS, "stall")]
)
def test_kills_at_every_step(tmp_path: Path, victim: str, tally: Any) -> None:
    wanted = [(step, victim) for step in STEPS for _ in range(3)]
    found = kills(tmp_path, wanted, 3000, ROUND)
    assert len(found["done"]) == len(wanted)
    assert victim != "stall" or len(found["overtaken"]) == len(wanted)
    tally(len(wanted), repaired=len(wanted))


def pairs(folder: Path) -> dict[str, list[tuple[bytes, bytes]]]:
    """What consumers of the topics see; control records carry the time of their round."""
    return {
        partition: [(key, value) for key, value, _ in rows if value]
        for partition, rows in records(folder, *TOPICS).items()
    }


def driver_killed(tmp_path: Path, steps: list[tuple[str, int]], rows: int, cut: int) -> None:
    folder, twin = tmp_path / "app", tmp_path / "twin"
    pipelines.create(folder, only=TOPICS)
    pipelines.write_orders(folder, rows)
    shutil.copytree(folder, twin)
    run_all(every_kind(twin, only=TOPICS), "local", round_records=cut)
    for step, count in steps:
        run_script(DRIVER, tmp_path, folder, step, count, cut, expected=-9)
    run_all(every_kind(folder, only=TOPICS), "local", round_records=cut)
    assert pairs(folder) == pairs(twin)


@pytest.mark.timeout(2700)
@pytest.mark.parametrize(
    "steps", [pytest.param([("plan", 2), ("work", 1), ("commit", 1)], id="R-17-plan-work-commit")]
)
def test_a_driver_killed_between_plan_work_commit_and_delivery_is_replaced_without_a_trace(
    tmp_path: Path, steps: list[tuple[str, int]], tally: Any
) -> None:
    """Three drivers die, each at another step of a round; a local engine brings it to the end."""
    driver_killed(tmp_path, steps, 600, ROUND)
    tally(len(steps), repaired=len(steps))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("step", [pytest.param(step, id=f"R-17-soak-{step}") for step in DRIVER_STEPS])
def test_drivers_killed_again_and_again(tmp_path: Path, step: str, tally: Any) -> None:
    driver_killed(tmp_path, [(step, 1 + number % 2) for number in range(8)], 3000, ROUND)
    tally(8, repaired=8)
