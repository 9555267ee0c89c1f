"""`tidegate run` and `tidegate app`: an app from a module, its line, its summary, and the ways out."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.cli.loading import load_app
from tidegate.cli.main import run
from tidegate.cli.run_line import bar, line, short
from tidegate.errors import InvalidError
from tidegate.pipeline.rounds.progress import Progress, StoppedPartition

TEN = 1_767_261_600_000
MODULE = """
import tidegate as tg

app = tg.App("counts", data={data!r})
app.stream("clicks", value=tg.Json(x="double"){more}).window(tg.Tumbling("1m", grace="1h")).count().to("counts")
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with clicks.py and three clicks."""
    (tmp_path / "clicks.py").write_text(MODULE.format(data=str(tmp_path), more=""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.delitem(sys.modules, "clicks", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path, 3)
    return tmp_path


def write(folder: Path, records: int, value: str = '{"x":1}') -> None:
    with tg.Log(folder / "log") as log:
        log.create_topic("clicks", 1, if_not_exists=True)
        rows = {"key": ["a"] * records, "value": [value] * records, "timestamp": [TEN] * records}
        log.writer("clicks").write(pa.table(rows))


def printed_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_once_catches_up_and_ends_with_a_summary(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "clicks:app", "--once", "--engine", "local"]) == 0
    summary = printed_json(capsys)
    assert (summary["records"], summary["caught_up"], summary["engine"]) == (3, True, "local")
    assert run(["run", "clicks.py", "--once", "--engine", "local"]) == 0
    assert printed_json(capsys)["records"] == 0


def test_explain_prints_the_plan_and_does_nothing(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "clicks", "--explain"]) == 0
    assert "co-partitioned" in capsys.readouterr().out
    assert not (shop / "state").exists()


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("clickz:app", "there is no module clickz"),
        ("clicks:apple", "did you mean clicks:app?"),
        ("clicks:tg", "tg is a module, not an App"),
        ("nothing.py", "there is no file nothing.py"),
        ("", "which app?"),
        ("json", "it defines no App"),
    ],
)
def test_an_app_that_is_not_there_is_told_with_what_is(shop: Path, where: str, said: str) -> None:
    with pytest.raises(InvalidError) as refused:
        load_app(where)
    assert said in str(refused.value)


def test_a_fault_in_the_module_itself_is_shown_as_it_is(shop: Path) -> None:
    (shop / "broken.py").write_text("import not_there_at_all")
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        load_app("broken:app")


def test_close_needs_once(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "clicks", "--close"]) == 2
    assert "--once" in capsys.readouterr().err


def test_a_stopped_partition_is_exit_code_5_and_can_be_resumed(
    shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(shop, 1, "{broken")
    write(shop, 2)
    state = ["--state", str(shop / "state")]
    assert run(["run", "clicks", "--once", "--engine", "local"]) == 5
    (stopped,) = printed_json(capsys)["stopped"]
    assert stopped["offset"] == 3
    assert run(["app", "status", *state]) == 5
    shown = capsys.readouterr()
    assert json.loads(shown.out)["stopped"] == 1 and stopped["command"] in shown.err
    command = stopped["command"].split()[1:]
    assert run([*command, *state]) == 0
    capsys.readouterr()
    assert run(["run", "clicks", "--once", "--engine", "local"]) == 0
    assert printed_json(capsys)["records"] == 2
    assert run(["app", "status", "counts", *state, "--log", str(shop / "log")]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["stopped"], row["lag"], row["losses"]) == (0, 0, 1)


def test_an_app_can_be_reset_and_replayed(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = ["--state", str(shop / "state")]
    assert run(["run", "clicks", "--once", "--engine", "local"]) == 0
    capsys.readouterr()
    assert run(["app", "checkpoints", "counts", *state]) == 0
    rounds = [json.loads(row)["round"] for row in capsys.readouterr().out.splitlines()]
    assert rounds == [0, 1]
    for way in (
        ["replay", "counts", "--yes"],
        ["reset", "counts", "--yes"],
        ["replay", "counts", "--to-round", "0", "--yes"],
    ):
        assert run(["app", *way, *state]) == 0
        capsys.readouterr()
        assert run(["run", "clicks", "--once", "--engine", "local"]) == 0
        assert printed_json(capsys)["records"] == 3
    assert run(["app", "reset", "nobody", "--yes", *state]) == 2
    assert "there are: counts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_it_can_be_asked_to_end_and_serves_metrics_till_then(shop: Path, sent: int, code: int) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "tidegate.cli.main",
        "run",
        "clicks",
        "--engine",
        "local",
        "--trigger",
        "50ms",
    ]
    started = subprocess.Popen(
        [*command, "--metrics", f":{port}"], cwd=shop, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        text = ""
        deadline = time.monotonic() + 300
        while not re.search(r"tidegate_rounds_total{.*} [1-9]", text) and time.monotonic() < deadline:
            time.sleep(0.2)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                    text = answer.read().decode()
            except OSError:
                continue
        assert "tidegate_rounds_total" in text
        started.send_signal(sent)
        out, err = started.communicate(timeout=600)
    finally:
        started.kill()
    assert started.returncode == code, err
    assert json.loads(out.splitlines()[-1])["records"] == 3
    assert "Traceback" not in err


def test_the_line_says_what_a_person_wants_to_know() -> None:
    stopped = StoppedPartition("f", "clicks", 0, "corrupt", "…", 3, "tidegate app resume")
    progress = Progress(
        "shop", records=12_400_000, records_per_second=2_100_000, lag_records=3_600_000, eta_s=1.7,
        watermarks={"f": {0: TEN, 1: TEN + 1}}, backlog_bytes=38, backlog_limit_bytes=100, memory_bytes=12,
        memory_limit_bytes=100, verdicts={"ok": 5, "missing": 2, "duplicate": 9, "heartbeat": 3},
        faults={"missing": 2}, stopped=(stopped,),
    )  # fmt: skip
    assert line(progress) == (
        "shop  12.4 M records  2.1 M/s  lag 3.6 M (2s)  stream time 2026-01-01 10:00:00  backlog ▰▰▱▱▱ 38%  "
        "memory ▰▱▱▱▱ 12%  2 faults  1 stopped"
    )
    assert "caught up" in line(Progress("shop", caught_up=True))
    assert [short(n) for n in (0, 950, 12_400, 3.1e9)] == ["0", "950", "12.4 k", "3.1 G"]
    assert bar(2.0).startswith("▰▰▰▰▰")
