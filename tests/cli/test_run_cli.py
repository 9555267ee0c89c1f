"""`tidegate run` and `tidegate app`: an app from a module, its line, its summary, and the remedies."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
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
from tidegate.cli.app import line, load_app
from tidegate.cli.main import run
from tidegate.cli.output import bar, short
from tidegate.errors import InvalidError
from tidegate.integrity.fault_injection import DamageKind, break_topic
from tidegate.pipeline.progress import Progress, StoppedPartition

TEN = 1_767_261_600_000
MODULE = """
import tidegate as tg

app = tg.App("counts", data={data!r})
app.stream("clicks", value=tg.Json(x="double"){more}).window(tg.Tumbling("1m", grace="1h")).count().to_topic("counts")
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with clicks.py and three clicks."""
    (tmp_path / "clicks.py").write_text(MODULE.format(data=str(tmp_path), more=""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(tg.__file__).parents[1]))  # processes run what is tested here
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
    assert {"read", "windows", "checkpoint"} <= set(summary["progress"]["timings_ms"])
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


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "import not_there_at_all",
            "ModuleNotFoundError: No module named 'not_there_at_all' (broken.py, line 1)",
        ),
        ("\nraise ValueError('boom\\nmore')", "ValueError: boom (broken.py, line 2)"),
        ("x = (", "SyntaxError: '(' was never closed (broken.py, line 1)"),
        ("import sys\nsys.exit(3)", "SystemExit: 3 (broken.py, line 2)"),
        (
            "import tidegate as tg\ntg.App('a', data='d').stream('t').map(None, 3)",
            "TypeError: map needs the schema",
        ),
    ],
    ids=["import", "raises", "syntax", "exits", "misuse"],
)
def test_a_fault_in_the_module_itself_is_told_as_the_modules(
    shop: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, content: str, said: str
) -> None:
    (shop / "broken.py").write_text(content)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    importlib.invalidate_caches()
    assert run(["run", "broken.py", "--once", "--engine", "local"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: broken.py cannot be imported: ") and said in line


def test_what_an_app_is_refused_for_is_told_with_its_place(
    shop: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (shop / "typo.py").write_text(
        "import tidegate as tg\n\ntg.App('a', data='d').stream('t', value=tg.Json(n='flaot'))"
    )
    monkeypatch.delitem(sys.modules, "typo", raising=False)
    importlib.invalidate_caches()
    assert run(["run", "typo.py"]) == 2
    said = capsys.readouterr().err
    assert "field 'n' is declared 'flaot'" in said and said.endswith(" (typo.py, line 3)\n")


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
    # The state is not where commands look by themselves, so the command says where it is.
    assert f"resume with: {stopped['command']}\n" in shown.err
    assert stopped["command"].endswith(shlex.join(state))
    assert run(shlex.split(stopped["command"])[1:]) == 0
    capsys.readouterr()
    assert run(["run", "clicks", "--once", "--engine", "local"]) == 0
    assert printed_json(capsys)["records"] == 2
    assert run(["app", "status", "counts", *state, "--log", str(shop / "log")]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["stopped"], row["lag"], row["losses"]) == (0, 0, 1)


def test_a_function_that_ends_the_process_stops_its_partition(
    shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the run would end with the function's exit code, as if somebody had asked it to end."""
    text = (
        (shop / "clicks.py")
        .read_text()
        .replace(".window(", ".map(leave, pa.schema([('x', 'float64')])).window(")
    )
    leave = "def leave(batch):\n    return sys.exit(0) if batch.num_rows else batch.select(['x'])\n"
    (shop / "clicks.py").write_text(f"import sys, pyarrow as pa\n{leave}{text}")
    assert run(["run", "clicks", "--once", "--engine", "local"]) == 5
    shown = capsys.readouterr()
    (stopped,) = json.loads(shown.out.splitlines()[-1])["stopped"]
    assert stopped["offset"] == 0 and "leave(…) failed with RuntimeError: it called sys.exit(0)" in shown.err


def test_an_aggregate_that_ends_the_process_is_no_end_of_the_run(
    shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        (shop / "clicks.py")
        .read_text()
        .replace(".count()", '.agg(n=tg.reduce("x", leave, state=pa.float64()))')
    )
    leave = "def leave(*_):\n    sys.exit(0)\n"
    (shop / "clicks.py").write_text(f"import sys, pyarrow as pa\n{leave}{text}")
    assert run(["run", "clicks", "--once", "--engine", "local"]) == 2
    assert "a function of app counts called sys.exit(0)" in capsys.readouterr().err


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


STUCK = """
import time

import pyarrow as pa
import tidegate as tg


def stuck(batch):
    while batch.num_rows:
        print("in the round", flush=True)
        time.sleep(0.2)
    return batch.select(["x"])


app = tg.App("counts", data={data!r})
app.stream("clicks", value=tg.Json(x="double")).map(stuck, pa.schema([("x", pa.float64())])).to_topic("copies")
"""


def test_a_second_interrupt_ends_it_at_once_whatever_its_round_does(shop: Path) -> None:
    (shop / "stuck.py").write_text(STUCK.format(data=str(shop)))
    command = [sys.executable, "-m", "tidegate.cli.main", "run", "stuck", "--engine", "local"]
    started = subprocess.Popen(command, cwd=shop, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None and started.stderr is not None
        assert started.stdout.readline() == "in the round\n"
        started.send_signal(signal.SIGINT)
        for line in started.stderr:
            if "once more to stop at once" in line:
                break
        started.send_signal(signal.SIGINT)
        assert started.wait(300) == 130
    finally:
        started.kill()
    assert run(["app", "status", "counts", "--state", str(shop / "state")]) == 0


@pytest.mark.parametrize("apart_ms", [0, 5, 40, 150])
def test_many_interrupts_in_a_row_never_wait_for_the_round(shop: Path, apart_ms: int) -> None:
    """As from a key that is held down: whatever it is doing when one comes, the process ends, and the app is free."""
    (shop / "stuck.py").write_text(STUCK.format(data=str(shop)))
    command = [sys.executable, "-m", "tidegate.cli.main", "run", "stuck", "--engine", "local"]
    started = subprocess.Popen(command, cwd=shop, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        assert started.stdout.readline() == "in the round\n"
        for _ in range(2000):
            if started.poll() is not None:
                break
            started.send_signal(signal.SIGINT)
            time.sleep(apart_ms / 1000)
        assert started.wait(60) == 130
    finally:
        started.kill()
    assert "Traceback" not in started.communicate()[1]


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


DROP_OVERRIDE = [
    "setpriv",
    "--inh-caps=-dac_override,-dac_read_search",
    "--bounding-set=-dac_override,-dac_read_search",
]
"""As root, permissions are only asked about without these capabilities."""


def as_anybody(shop: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a process that permissions apply to."""
    is_root = os.geteuid() == 0
    if is_root and shutil.which("setpriv") is None:
        pytest.skip("root without setpriv: permissions do not apply")
    return subprocess.run(
        [*(DROP_OVERRIDE if is_root else []), sys.executable, "-m", "tidegate.cli.main", *arguments],
        cwd=shop,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("exists", [True, False], ids=["read-only", "below a read-only folder"])
def test_a_read_only_state_folder_is_named_as_such(shop: Path, exists: bool) -> None:
    state = shop / "state"
    if exists:
        assert run(["run", "clicks", "--once", "--engine", "local"]) == 0
    locked = state if exists else shop
    modes = {each: each.stat().st_mode for each in [locked, *(state.rglob("*") if exists else ())]}
    for each, mode in modes.items():
        each.chmod(mode & 0o555)
    try:
        done = as_anybody(shop, "run", "clicks", "--once", "--engine", "local")
        assert done.returncode == 3, done.stderr
        assert f"error: the state folder {state} is read-only" in done.stderr
        assert f"{locked} is read-only for user" in done.stderr and "log folder" not in done.stderr
        if exists:
            reset = as_anybody(shop, "app", "reset", "counts", "--yes", "--state", str(state))
            assert reset.returncode == 3 and f"the state folder {state} is read-only" in reset.stderr
            looked = as_anybody(shop, "app", "status", "counts", "--state", str(state))
            assert looked.returncode == 0, "who only looks needs no permission to write"
    finally:
        for each, mode in modes.items():
            each.chmod(mode)


def test_a_read_only_log_folder_is_named(shop: Path) -> None:
    folder = shop / "log"
    folder.chmod(0o555)
    (folder / ".lock").chmod(0o444)
    try:
        done = as_anybody(shop, "topic", "create", "x", "--log", str(folder))
        assert done.returncode == 3 and f"the folder {folder} is read-only for user" in done.stderr
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize("verb", ["status", "checkpoints", "reset", "replay", "acknowledge"])
def test_a_state_folder_that_is_not_there_is_an_error_and_stays_away(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "nowhere"
    more = ["--yes"] if verb in ("reset", "replay") else []
    assert run(["app", verb, "shop", *more, "--state", str(state)]) == 2
    assert f"there is no state in {state}" in capsys.readouterr().err
    assert not state.exists()
    assert run(["app", "status", "--state", str(state)]) == 2 and not state.exists()


def redefine(shop: Path, module: str) -> None:
    """Another clicks.py, which is loaded anew."""
    (shop / "clicks.py").write_text(module)
    shutil.rmtree(shop / "__pycache__", ignore_errors=True)
    sys.modules.pop("clicks", None)


def test_a_refused_change_keeps_its_lines(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "clicks.py", "--once", "--engine", "local"]) == 0
    redefine(shop, MODULE.replace('"1m"', '"2m"').format(data=str(shop), more=""))
    capsys.readouterr()
    assert run(["run", "clicks.py", "--once", "--engine", "local"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: app counts was changed in a way its state cannot follow:"
    assert lines[1].startswith("- ") and len(lines) >= 3
    ways = re.findall(r"`tidegate ([^`]+)`", lines[2])
    assert len(ways) == 2 and [run([*shlex.split(way), "--yes"]) for way in ways] == [0, 0]
    assert run(["run", "clicks.py", "--once", "--engine", "local"]) == 2  # its topic holds windows of before
    with tg.Log(shop / "log") as log:
        log.delete_topic("counts")
    assert run(["run", "clicks.py", "--once", "--engine", "local"]) == 0


def broken_by(shop: Path, how: str) -> None:
    """Make the topic such that a run ends badly."""
    if how == "unreadable":
        write(shop, 1, "{broken")
    elif how == "corrupt":
        (segment,) = (shop / "log" / "clicks-0").glob("*.log")
        data = bytearray(segment.read_bytes())
        data[-3] ^= 0xFF
        segment.write_bytes(bytes(data))
    elif how in ("integrity", "faults"):
        with tg.Log(shop / "log") as log:
            log.delete_topic("clicks")
        with tg.Log(shop / "whole") as log:
            log.create_topic("clicks", 1)
            with log.writer("clicks", integrity=True) as sender:
                rows = {"key": ["a"] * 9, "value": ['{"x":1}'] * 9, "timestamp": [TEN] * 9}
                sender.write(pa.table(rows))
        shutil.rmtree(shop / "log")
        with tg.Log(shop / "whole", read_only=True) as log:
            break_topic(log, "clicks", DamageKind.FLIP, into=shop / "log", partition=0, offset=5)
        check = "" if how == "integrity" else 'on_error="keep"'
        module = MODULE.format(data=str(shop), more="").replace(").window", f").validate({check}).window")
        (shop / "clicks.py").write_text(module)


@pytest.mark.parametrize(
    ("how", "code"), [("fine", 0), ("unreadable", 5), ("corrupt", 5), ("integrity", 1), ("faults", 1)]
)
def test_run_and_status_end_with_the_same_code(
    shop: Path, how: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    broken_by(shop, how)
    assert run(["run", "clicks.py", "--once", "--engine", "local"]) == code
    assert printed_json(capsys)["exit_code"] == code
    assert run(["app", "status", "--state", str(shop / "state")]) == code
    assert run(["app", "status", "counts", "--state", str(shop / "state")]) == code


def test_faults_of_a_flow_that_is_gone_count_for_neither(
    shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`run` looked at the flows there are, `app status` at all there ever were."""
    broken_by(shop, "faults")
    assert run(["run", "clicks.py", "--once", "--engine", "local"]) == 1
    module = MODULE.format(data=str(shop), more=', on_error="drop"')
    redefine(shop, module.replace('to_topic("counts")', 'to_topic("others")'))
    assert run(["run", "clicks.py", "--once", "--engine", "local"]) == 0
    assert run(["app", "status", "--state", str(shop / "state")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["faults"] == 0


def test_two_flows_over_a_topic_count_its_records_and_faults_once(
    shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken_by(shop, "faults")
    more = 'app.stream("clicks", value=tg.Json(x="double")).validate(on_error="keep").window(tg.Tumbling("2m")).count()'
    (shop / "clicks.py").write_text((shop / "clicks.py").read_text() + more + '.to_topic("others")\n')
    assert run(["run", "clicks.py", "--once", "--engine", "local"]) == 1
    summary = printed_json(capsys)
    assert (summary["records"], summary["progress"]["faults"]) == (11, {"corrupt": 1})
    assert "faults: 1 corrupt (1 set aside as dead letters)" in summary["summary"]
    state = ["--state", str(shop / "state")]
    assert run(["app", "status", *state, "--log", str(shop / "log")]) == 1
    row = json.loads(capsys.readouterr().out)
    assert (row["records"], row["faults"], row["new_faults"], row["lag"]) == (11, 1, 1, 0)
    assert run(["app", "checkpoints", "counts", *state]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["records"] == 11
    assert run(["app", "acknowledge", "counts", *state]) == 0
    assert "1 faults acknowledged" in capsys.readouterr().err
    assert run(["app", "status", *state]) == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"onloss": "accept"}, "no setting 'onloss'; did you mean on_loss?"),
        ({"triger": "1s"}, "did you mean trigger?"),
        ({"once": True}, "no setting 'once'"),
        ({"trigger": "1x"}, "trigger: '1x' is not a duration"),
    ],
)
def test_a_misspelt_setting_of_a_run_is_named(shop: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidError) as refused:
        load_app("clicks").run("local", **settings)
    assert said in str(refused.value)
