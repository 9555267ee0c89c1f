"""Real processes, really killed: whatever the instant, the next one goes on and nothing shows that there were two."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidegate.errors import ConflictError
from tidegate.log.log import Log
from tidegate.pipeline.checkpoint import Records
from tidegate.pipeline.definition.app import App
from tidegate.pipeline.query import Run
from tidegate.storage import open_backend
from tidegate.tables.serdes.base import String
from tidegate.tables.serdes.json import Json
from tidegate.windows.aggregates.definitions import count
from tidegate.windows.aggregates.definitions import sum as sum_of
from tidegate.windows.kinds import Tumbling

ROWS = 5_000
START = 1_700_000_000_000
PIPELINE = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from test_killed_processes import begin

run = begin(Path(sys.argv[2]), until="caught_up" if sys.argv[3] == "once" else None)
print("running", flush=True)
run.await_termination()
"""


def begin(folder: Path, until: Any = "caught_up") -> Run:
    """The app of these tests, here or in a process of its own."""
    app = App("shop", data=folder)
    stream = app.stream("orders", key=String(), value=Json(order_id="string", amount="double")).validate()
    stream = stream.drop_duplicates("order_id", within="1m")
    stream.window(Tumbling("10s", grace="1m")).agg(n=count(), total=sum_of("amount")).to_topic("per_window")
    return app.start("local", until=until, round_records=150, trigger="10ms", lease_ms=1000)


def filled(folder: Path) -> None:
    chance = random.Random(5)
    numbers = [number if chance.random() > 0.1 else max(0, number - 3) for number in range(ROWS)]
    with Log(folder / "log") as log:
        log.create_topic("orders", 2)
        with log.writer("orders", integrity=True) as writer:
            writer.write(
                pa.table(
                    {
                        "key": [f"k{number % 11}" for number in numbers],
                        "value": [f'{{"order_id":"o{number}","amount":{number}}}' for number in numbers],
                        "timestamp": [START + number * 20 for number in numbers],
                    }
                )
            )


def begun(folder: Path, how: str) -> subprocess.Popen[str]:
    """The app in a process of its own, running."""
    process = subprocess.Popen(
        [sys.executable, "-c", PIPELINE, str(Path(__file__).parent), str(folder), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        if line.startswith("running"):
            return process
        lines.append(line)
    raise AssertionError(f"it ended with {process.wait()}: {''.join(lines)}")


def outcome(folder: Path) -> Any:
    """All that is left behind: results as they lie in the log, and the counters.

    The sender's own records are left out: they name the life of the app, which is another for each.
    """
    with Log(folder / "log", read_only=True) as log:
        table = log.reader("per_window").read_all()
    rows = table.sort_by([("partition", "ascending"), ("offset", "ascending")])
    records = Records(open_backend(folder / "state"), "shop")
    number = records.newest()
    assert number is not None
    commit = records.read_commit(number)[0]
    columns = [rows[name].to_pylist() for name in ("partition", "offset", "key", "value", "timestamp")]
    results = [row for row in zip(*columns, strict=True) if row[3]]
    return results, commit.totals, commit.ends, [line.next_offset for line in commit.sources]


def test_R_17_a_process_killed_at_random_instants_leaves_no_trace(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        filled(folder)
    begin(whole).await_termination("120s")
    chance, kills = random.Random(11), 0
    for _ in range(3):
        process = begun(killed, "once")
        time.sleep(chance.random() * 0.4)  # the instant is the point of this test
        process.send_signal(signal.SIGKILL)
        kills += process.wait(60) != 0  # it may have ended before
    assert kills > 0
    begin(killed).await_termination("120s")
    assert outcome(killed) == outcome(whole)


def test_R_27_a_second_process_fails_fast_and_a_dead_one_does_not_block(tmp_path: Path) -> None:
    filled(tmp_path)
    other = begun(tmp_path, "on")
    try:
        with pytest.raises(ConflictError) as raised:
            begin(tmp_path)
        assert f"being run by process {other.pid} on {socket.gethostname()}" in str(raised.value)
        assert "stop that one first" in str(raised.value) and raised.value.exit_code == 4
        assert other.poll() is None
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait(30)
    assert begin(tmp_path).await_termination("120s").caught_up
