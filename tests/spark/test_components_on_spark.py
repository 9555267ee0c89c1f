"""`tidegate run` on Spark and `tidegate table fetch` call the same components as an app in one process.

The calls of the command, of Spark's driver and of its Python workers are recorded (`call_trace`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa

import tidegate as tg
from call_trace import STORAGE, TIME_SEGMENTS, in_processes

APP = """
import tidegate as tg

app = tg.App("shop", data={data!r})
clicks = app.stream("clicks", value=tg.Json(id="long", x="double")).drop_duplicates("id", within="1m")
clicks.window(tg.Tumbling("1m", grace="1h")).agg(n=tg.count()).to_table("minutes")
clicks.window(tg.Session("1m")).agg(n=tg.count()).to_table("visits")
"""
READING = {"StorageReader.plan", "StorageReader.load", "StorageReader.scan", "BatchPins.pin"}
START = 1_767_261_600_000


def test_a_run_on_spark_and_a_fetch_go_through_the_same_components(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP.format(data=str(tmp_path)))
    with tg.Log(tmp_path / "log") as log:
        log.create_topic("clicks", 2)
        with log.writer("clicks") as writer:
            values = [json.dumps({"id": number % 20, "x": 1}) for number in range(40)]
            keys = [f"k{number % 5}" for number in range(40)]
            writer.write(pa.table({"key": keys, "value": values, "timestamp": [START] * 40}))
    environment, names = in_processes(tmp_path / "site")

    def tidegate(*arguments: str) -> tuple[str, set[str]]:
        names.write_text("")
        command = [sys.executable, "-m", "tidegate.cli.main", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, set(names.read_text().split("\n"))

    _, run = tidegate("run", "shop.py", "--once", "--engine", "spark", "--master", "local[2,4]")
    written = STORAGE - READING - {"ScratchLimiter.try_permit"} | {"MaintenanceSupervisor.maintain"}
    stores = {
        "WindowStore.put_batch",
        "SessionStore.put_batch",
        "StateHandle.keep",
        "WorkerStorageRuntime.state_handle",
    }
    operators = {"DedupeOperator.process", "WindowOperator.process", "SessionOperator.process"}
    assert (written | TIME_SEGMENTS | stores | operators) - run == set()

    said, fetch = tidegate("table", "fetch", "minutes", "k1", "--state", str(tmp_path / "state"))
    assert '"n"' in said
    assert {
        "CommitFollower.pinned",
        "StorageReader.plan",
        "StorageReader.load",
        "BatchPins.pin",
    } - fetch == set()
