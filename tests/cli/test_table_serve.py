"""`tidegate table serve` as users run it: two processes, one killed, and what `info`, `fetch` say meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidegate.cli.main import run
from tidegate.integrity import Manifest, Push
from tidegate.log.log import Log


def served(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "tidegate.cli.main", "table", "serve", "users_v1", "--live", "updates",
        "--log", str(folder / "log"), "--state", str(folder / "state"), "--lease-ttl", "2s",
        "--commit-interval", "100ms", *options,
    ]  # fmt: skip
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def info(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    code = run(["table", "info", "users_v1", "--state", str(folder / "state"), "--format", "json"])
    said = capsys.readouterr().out
    answer: dict[str, str] = json.loads(said) if code == 0 else {}
    return answer


def until(is_so: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 300
    while not (found := is_so()):
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.1)
    return found


def test_two_serve_one_is_killed_and_the_other_leads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic("users_v1", 1)
        log.create_topic("updates", 1)
        with log.writer("users_v1", integrity=True) as driver:
            push = Push(driver)
            push.start()
            with log.writer("users_v1", integrity=True) as task:
                task.write(pa.table({"key": ["alice"], "value": ["pushed"]}))
            push.end({0: Manifest.of(list(task.sent().values()))})
        with log.writer("updates", integrity=True) as live:
            live.write(pa.table({"key": ["alice"], "value": ["live"]}))
    first = served(tmp_path, "--replica", "left")
    second = None
    try:
        until(lambda: "leader, epoch 1" in info(tmp_path, capsys).get("replica left", ""), "left leads")
        second = served(tmp_path, "--replica", "right")
        until(lambda: "standby, epoch 1" in info(tmp_path, capsys).get("replica right", ""), "right follows")
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        until(lambda: "leader, epoch 2" in info(tmp_path, capsys).get("replica right", ""), "right leads")
        second.terminate()
        _, said = second.communicate(timeout=600)
        assert second.returncode == 0, said
        beats = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        assert beats and beats[0]["replica"] == "right" and beats[0]["partitions"][0]["partition"] == 0
        assert "replica right of users_v1 is closed" in said
    finally:
        for process in (first, second):
            if process is not None and process.poll() is None:
                process.kill()
                process.communicate()
    assert "standby, epoch 2" in info(tmp_path, capsys)["replica right"]
    words = ["--state", str(tmp_path / "state"), "--key", "string", "--value", "string", "--format", "json"]
    assert run(["table", "fetch", "users_v1", "alice", *words]) == 0
    assert json.loads(capsys.readouterr().out)[0]["value"] == "live"


def test_wrong_partitions_are_refused(tmp_path: Path) -> None:
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic("users_v1", 1)
        log.create_topic("updates", 1)
    for given in ("x", "7"):
        places = ["--log", str(tmp_path / "log"), "--state", str(tmp_path / "state")]
        assert run(["table", "serve", "users_v1", "--live", "updates", *places, "--partitions", given]) == 2
