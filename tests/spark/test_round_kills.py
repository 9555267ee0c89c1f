"""Real processes of Spark, really killed: workers, executors, the driver. What is left shows no trace of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tidegate.testing import pipelines
from tidegate.testing.meddling import STEPS, Meddling
from tidegate.testing.pipelines import every_kind, records, run_all, stored

TOPICS = ("tumbling", "by-shop")
ROUND = 150
CLUSTER = """
import json, os, sys
from pathlib import Path
import tidegate.spark
from tidegate.testing.meddling import Meddling
from tidegate.testing.pipelines import NOON, every_kind
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
spark = tidegate.spark.session("kills", master="local-cluster[2,1,1024]", config=config)
spark.sparkContext.setLogLevel("OFF")
meddling = Meddling(folder / "requests", stall_s=5)

def next_request(_):
    if wanted:
        meddling.ask(*wanted.pop(0))

next_request(None)
app = every_kind(folder, meddling, only=("tumbling", "by-shop"))
summary = app.run(
    spark, until="caught_up", close=True, round_records=int(sys.argv[3]), clock=ManualClock(NOON), progress=next_request
)
print(json.dumps({"rounds": summary.rounds, "records": summary.records, "done": meddling.done}))
spark.stop()
"""
DRIVER = """
import os, signal, sys
from pathlib import Path
import tidegate.spark
from tidegate.pipeline.rounds.records import Records
from tidegate.spark.engine import SparkEngine
from tidegate.testing.pipelines import every_kind, run_all

folder, step, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
owner, name = {"plan": (Records, "put_plan"), "work": (SparkEngine, "run"), "commit": (Records, "put_commit")}[step]
inner, calls = getattr(owner, name), []

def dies(*arguments, **named):
    result = inner(*arguments, **named)
    calls.append(1)
    if len(calls) == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(owner, name, dies)
spark = tidegate.spark.session("driver", master="local[2,4]")
spark.sparkContext.setLogLevel("OFF")
run_all(every_kind(folder, only=("tumbling", "by-shop")), spark, round_records=int(sys.argv[4]))
"""


def run_script(text: str, tmp_path: Path, *arguments: object, expected: int = 0) -> str:
    script = tmp_path / "script.py"
    script.write_text(text)
    environment = os.environ | {"SPARK_WORKER_DIR": str(tmp_path / "workers"), "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == expected, done.stdout[-4000:]
    return done.stdout


def kills(tmp_path: Path, wanted: list[tuple[str, str]], rows: int, cut: int) -> dict[str, Any]:
    """An app on two executors whose tasks die as wanted, one after each round, compared with an undisturbed run."""
    folder, twin = tmp_path / "app", tmp_path / "twin"
    pipelines.create(folder, change=Meddling(folder / "requests"), only=TOPICS)
    pipelines.write_orders(folder, rows)
    shutil.copytree(folder, twin)
    run_all(every_kind(twin, Meddling(twin / "requests"), only=TOPICS), "local", round_records=cut)
    said = run_script(CLUSTER, tmp_path, folder, json.dumps(wanted), cut)
    assert stored(folder, *TOPICS) == stored(twin, *TOPICS)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


@pytest.mark.timeout(900)
def test_killed_workers_and_executors_cost_a_retry_and_never_data(tmp_path: Path) -> None:
    """R-18, R-20: with speculation on, a task that stalls has a twin, and whoever is late changes nothing."""
    wanted = [
        ("records", "worker"),
        ("checkpoint", "executor"),
        ("records", "stall"),
        ("put", "worker"),
        ("token", "executor"),
        ("parcel", "worker"),
    ]
    found = kills(tmp_path, wanted, 600, ROUND)
    assert found["rounds"] >= len(wanted)
    assert len(found["done"]) == len(wanted)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("victim", ["worker", "executor", "stall"])
def test_kills_at_every_step(tmp_path: Path, victim: str) -> None:
    wanted = [(step, victim) for step in STEPS for _ in range(3)]
    found = kills(tmp_path, wanted, 3000, ROUND)
    assert len(found["done"]) == len(wanted)


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


@pytest.mark.timeout(900)
def test_a_driver_killed_between_plan_work_commit_and_delivery_is_replaced_without_a_trace(
    tmp_path: Path,
) -> None:
    """R-17: three drivers die, each at another step of a round; a local engine brings it to the end."""
    driver_killed(tmp_path, [("plan", 2), ("work", 1), ("commit", 1)], 600, ROUND)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("step", ["plan", "work", "commit"])
def test_drivers_killed_again_and_again(tmp_path: Path, step: str) -> None:
    driver_killed(tmp_path, [(step, 1 + number % 2) for number in range(8)], 3000, ROUND)
