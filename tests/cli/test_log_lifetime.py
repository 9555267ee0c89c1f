"""`tidegate log lifetime`: the workload form others script against, topics, pictures, wrong calls."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tidegate.cli.main import run
from tidegate.clock import ManualClock
from tidegate.log.log import Log

CANARY = [
    "--record-bytes",
    "150",
    "--interval",
    "5s",
    "-X",
    "retention.ms=600000",
    "-X",
    "segment.bytes=16384",
]


def answer(capsys) -> dict:
    return json.loads(capsys.readouterr().out)


def test_the_workload_form_answers_in_the_contracts_keys(capsys):
    assert run(["log", "lifetime", *CANARY, "--format", "json"]) == 0
    found = answer(capsys)
    assert found["guaranteed_ms"] == 600_000
    assert found["oldest_at_expiry_ms"] == 1_140_000
    assert found["visible_max_ms"] == 1_440_000
    assert found["disk_max_ms"] == 1_500_000
    assert found["records_per_segment"] == 109
    assert set(found["rules"]) == {"guaranteed_ms", "oldest_at_expiry_ms", "visible_max_ms", "disk_max_ms"}
    assert found["traps"][0]["fix"]


def test_broker_settings_durations_and_sizes_are_understood(capsys):
    options = [
        "--record-bytes",
        "1KiB",
        "--interval",
        "1m",
        "-X",
        "retention=1h",
        "-X",
        "segment.bytes=16KiB",
    ]
    options += ["-X", "log.retention.check.interval.ms=60000", "-X", "file.delete.delay.ms=0"]
    assert run(["log", "lifetime", *options, "--format", "jsonl"]) == 0
    found = answer(capsys)
    assert (found["records_per_segment"], found["check_interval_ms"]) == (16, 60_000)
    assert found["disk_max_ms"] == found["visible_max_ms"] == 15 * 60_000 + 3_600_000 + 60_000


def test_never_is_an_answer(capsys):
    assert run(["log", "lifetime", *CANARY, "--checked-every", "never", "--format", "json"]) == 0
    found = answer(capsys)
    assert (found["visible_max_ms"], found["rules"]["visible_max_ms"]["rule"]) == (None, "unattended")


def test_the_table_tells_the_story(capsys):
    assert run(["log", "lifetime", *CANARY, "--format", "table"]) == 0
    out = capsys.readouterr().out
    assert "109 records" in out
    for moment in ("10m", "19m", "24m", "25m"):
        assert f" {moment} " in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a TOPIC"),
        (["--record-bytes", "150"], "name a TOPIC"),
        ([*CANARY, "--offset", "3"], "need a TOPIC"),
        (["orders", "--record-bytes", "3", "--interval", "5s"], "leave TOPIC out"),
        (["orders", "--offset", "3", "--at", "2026-01-01T00:00Z"], "keep one"),
        ([*CANARY, "-X", "retention.mss=5"], "retention.ms"),
        ([*CANARY, "--picture", "x.bmp"], ".png"),
        (["--record-bytes", "0", "--interval", "5s"], "at least one byte"),
        (["nothere"], "nothere"),
    ],
)
def test_wrong_calls_say_what_to_do(arguments, said, capsys, tmp_path):
    assert run(["log", "lifetime", *arguments, *(["--log", str(tmp_path)] if arguments else [])]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_pictures_of_a_workload_carry_the_four_moments(suffix, tmp_path, capsys):
    picture = tmp_path / f"life.{suffix}"
    assert run(["log", "lifetime", *CANARY, "--picture", str(picture), "--format", "json"]) == 0
    content = picture.read_bytes()
    assert content.startswith({"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype html>"}[suffix])
    if suffix == "html":
        text = content.decode()
        for moment in ("10m", "19m", "24m", "25m"):
            assert f">{moment}  " in text
        assert "http" not in text.replace("http-equiv", ""), "self-contained"
        assert "prefers-color-scheme: dark" in text
    assert list(tmp_path.iterdir()) == [picture], "no temporary file stays"


def test_without_matplotlib_the_way_out_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["log", "lifetime", *CANARY, "--picture", str(tmp_path / "a.png"), "--format", "json"]) == 2
    assert "tidegate[plot]" in capsys.readouterr().err
    assert run(["log", "lifetime", *CANARY, "--picture", str(tmp_path / "a.html"), "--format", "json"]) == 0


# -- topics ---------------------------------------------------------------------------------------


@pytest.fixture
def topic_log(tmp_path):
    """A canary topic of ours whose records came every 5 s until now: 400 of them, four log segments."""
    import pyarrow as pa

    now = int(time.time() * 1000)
    clock = ManualClock(now)
    with Log(tmp_path / "log", clock=clock, durability="os") as log:
        log.create_topic("canary", config={"segment.bytes": "16384", "retention.ms": "600000"})
        with log.writer("canary", batch_records=1) as writer:
            stamps = pa.array([now - (400 - i) * 5000 for i in range(400)], pa.timestamp("ms", "UTC"))
            writer.write(pa.table({"value": [b"x" * 78] * 400, "timestamp": stamps}))
    return tmp_path / "log", now


def test_a_topic_is_forecast_per_segment_and_nobody_cleans_it(topic_log, capsys):
    log, now = topic_log
    assert run(["log", "lifetime", "canary", "--log", str(log), "--format", "json"]) == 0
    found = answer(capsys)
    segments = found["partitions"][0]["segments"]
    assert [segment["rule"] for segment in segments] == ["unattended"] * len(segments)
    assert segments[0]["due_ms"] == segments[0]["largest_timestamp_ms"] + 600_001
    assert found["check_interval_ms"] is None
    assert segments[-1]["active"] is True
    assert segments[-1]["next_offset"] == 400
    assert segments[-1]["largest_timestamp_ms"] == now - 5000


def test_with_a_check_interval_the_moments_are_exact(topic_log, capsys):
    log, _ = topic_log
    arguments = ["log", "lifetime", "canary", "--log", str(log), "--checked-every", "5m", "--format", "json"]
    assert run(arguments) == 0
    segments = answer(capsys)["partitions"][0]["segments"]
    waiting = next(s for s in segments if not s["active"] and s["gone_earliest_ms"] == s["due_ms"])
    assert waiting["gone_latest_ms"] == waiting["due_ms"] + 300_000
    assert waiting["disk_latest_ms"] == waiting["gone_latest_ms"] + 60_000


def test_an_offset_and_a_time_are_answered(topic_log, capsys):
    log, now = topic_log
    assert run(["log", "lifetime", "canary", "--log", str(log), "--offset", "120", "--format", "json"]) == 0
    by_offset = answer(capsys)[0]
    assert by_offset["timestamp_ms"] == now - 280 * 5000
    assert (
        run(["log", "lifetime", "canary", "--log", str(log), "--at", "2000-01-01T00:00Z", "--format", "json"])
        == 0
    )
    assert answer(capsys)[0]["offset"] == 0
    assert run(["log", "lifetime", "canary", "--log", str(log), "--offset", "4000", "--format", "json"]) == 0
    assert "not written yet" in answer(capsys)[0]["answer"]


def test_what_if_settings_change_the_answer(topic_log, capsys):
    log, _ = topic_log
    arguments = ["log", "lifetime", "canary", "--log", str(log), "-X", "retention.ms=-1", "--format", "json"]
    assert run(arguments) == 0
    assert {s["rule"] for s in answer(capsys)["partitions"][0]["segments"]} == {"unlimited"}


def test_what_if_settings_may_be_the_brokers(topic_log, capsys):
    log, _ = topic_log
    asked = ["-X", "cleanup.policy=compact", "-X", "log.cleaner.enable=false", "--format", "json"]
    assert run(["log", "lifetime", "canary", "--log", str(log), *asked]) == 0
    assert "cleaner-off" in {trap["name"] for trap in answer(capsys)["traps"]}


def test_the_table_and_a_picture_of_a_topic(topic_log, capsys, tmp_path):
    log, _ = topic_log
    picture = tmp_path / "topic.html"
    arguments = [
        "log",
        "lifetime",
        "canary",
        "--log",
        str(log),
        "--format",
        "table",
        "--picture",
        str(picture),
    ]
    assert run(arguments) == 0
    out = capsys.readouterr().out
    assert "nobody checks retention" in out
    assert "tidegate log clean" in out
    assert "canary-0" in picture.read_text()


def test_looking_at_a_topic_writes_nothing(topic_log, capsys):
    log, _ = topic_log
    before = {path: path.stat().st_mtime_ns for path in log.rglob("*")}
    assert run(["log", "lifetime", "canary", "--log", str(log), "--format", "json"]) == 0
    assert {path: path.stat().st_mtime_ns for path in log.rglob("*")} == before


def test_the_workload_form_loads_neither_arrow_nor_numba():
    code = (
        "import sys; from tidegate.cli.main import run; "
        f"run(['log','lifetime',*{CANARY!r},'--format','jsonl']); "
        "sys.exit(any(m in sys.modules for m in ('numba','pyarrow','numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=600).returncode == 0
