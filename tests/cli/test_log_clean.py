"""`tidegate log clean` and `log reseal`: what they did, what they would do, what they leave alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pytest

from tidegate.cli.main import run
from tidegate.files import Files
from tidegate.log.locks import owner_status
from tidegate.log.log import Log


@pytest.fixture
def old_log(tmp_path):
    """A topic whose first log segments are a day old."""
    log_folder = tmp_path / "log"
    now = int(time.time() * 1000)
    with Log(log_folder, durability="os") as log:
        log.create_topic("aged", config={"segment.bytes": "1000", "retention.ms": "600000"})
        with log.writer("aged", batch_records=1) as writer:
            for age in (86_400_000, 0):
                stamps = pa.array([now - age] * 20, pa.timestamp("ms", "UTC"))
                writer.write(pa.table({"value": [b"x" * 50] * 20, "timestamp": stamps}))
    return log_folder


def rows(capsys) -> list[dict]:
    return json.loads(capsys.readouterr().out)


def names(log) -> list[str]:
    return sorted(path.name for path in (log / "aged-0").iterdir() if path.name.endswith(".log"))


def test_a_dry_run_tells_and_a_run_does(old_log, capsys):
    before = names(old_log)
    assert run(["log", "clean", "--log", str(old_log), "--dry-run", "--format", "json"]) == 0
    would = rows(capsys)[0]
    assert names(old_log) == before
    assert run(["log", "clean", "aged", "--log", str(old_log), "--format", "json"]) == 0
    did = rows(capsys)[0]
    assert did["removed"] == would["removed"] > 0
    assert did["rules"] == "time"
    assert [segment["base_offset"] for segment in did["segments"]] == [
        int(name[:20]) for name in before[: did["removed"]]
    ]
    assert names(old_log) == before[did["removed"] :]
    assert run(["log", "clean", "--log", str(old_log), "--format", "json"]) == 0
    assert rows(capsys)[0]["removed"] == 0


def test_a_partition_another_process_writes_is_left_to_it(old_log, capsys):
    with Log(old_log) as log:
        log.partition("aged", 0)
        assert run(["log", "clean", "--log", str(old_log), "--format", "json"]) == 4
    assert "aged-0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--log", "/nowhere/at/all"], 2, "no log"),
        (["--log", "kafka://x:1"], 2, "cleans its own"),
        (["--every", "5m", "--dry-run"], 2, "do not go together"),
        (["typo"], 2, "aged"),
    ],
)
def test_wrong_calls_say_what_to_do(old_log, arguments, code, said, capsys):
    extra = [] if "--log" in arguments else ["--log", str(old_log)]
    assert run(["log", "clean", *arguments, *extra]) == code
    assert said in capsys.readouterr().err or said == "aged"


def test_every_goes_on_is_seen_by_others_and_ends_with_ctrl_c(old_log):
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tidegate.cli.main",
            "log",
            "clean",
            "--every",
            "1s",
            "--log",
            str(old_log),
            "--format",
            "jsonl",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        first = json.loads(child.stdout.readline())
        assert first["removed"] > 0
        status = owner_status(old_log, files=Files())
        assert (status.running, status.interval_ms) == (True, 1000)
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=30) == 130
    finally:
        child.kill()
        child.stdout.close()
    assert owner_status(old_log, files=Files()).running is False


# -- reseal ---------------------------------------------------------------------------------------


def test_a_changed_but_sound_segment_is_sealed_anew(old_log, capsys):
    seals = sorted((old_log / "aged-0").glob("*.seal"))
    if not seals:
        pytest.skip("this log writes no seals")
    index = seals[0].with_suffix(".timeindex")
    index.write_bytes(b"")
    assert run(["verify", "aged", "--log", str(old_log), "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["counts"] == {"seal": 1}
    assert run(["log", "reseal", "aged", "--log", str(old_log), "--dry-run", "--format", "json"]) == 0
    assert len(rows(capsys)) == 1
    assert run(["log", "reseal", "aged", "--log", str(old_log), "--format", "json"]) == 0
    assert rows(capsys)[0]["segment"] == int(seals[0].name[:20])
    assert run(["verify", "aged", "--log", str(old_log), "--format", "json"]) == 0


def test_a_damaged_segment_is_not_sealed_without_insisting(old_log, capsys):
    seals = sorted((old_log / "aged-0").glob("*.seal"))
    if not seals:
        pytest.skip("this log writes no seals")
    log_file = seals[0].with_suffix(".log")
    content = bytearray(log_file.read_bytes())
    content[100] ^= 1
    log_file.write_bytes(content)
    assert run(["log", "reseal", "aged", "--log", str(old_log)]) == 4
    assert "--force" in capsys.readouterr().err
