"""Faults of a pipeline as a user meets them, with nothing but the calls and commands that have always been there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.cli.main import run

AT = 1_767_261_600_000


def produce(folder: Path, values: list[bytes], *, partitions: int = 2, start: int = 0) -> None:
    with tg.Log(folder / "log") as log:
        log.create_topic("orders", partitions, if_not_exists=True)
        for number, value in enumerate(values, start):
            row = {"key": [f"k{number % 5}"], "value": [value], "timestamp": [AT + 1000 * number]}
            log.writer("orders").write(pa.table(row), partition=number % partitions)


def orders(numbers: range) -> list[bytes]:
    return [json.dumps({"n": str(number)}).encode() for number in numbers]


def counting(folder: Path, **settings: Any) -> tg.App:
    app = tg.App("shop", data=folder, **settings)
    stream = app.stream("orders", value=tg.Json(n="string"))
    stream.window(tg.Tumbling("10s", retention="1h")).agg(n=tg.count()).to_table("per_window")
    return app


def test_short_runs_do_not_fill_the_disk(tmp_path: Path) -> None:
    """Each ends as soon as it has caught up; what the next one replaces is removed all the same. Packs hold rows."""
    counts = []
    for number in range(30):
        produce(tmp_path, orders(range(number, number + 1)), start=number)
        counting(tmp_path).run("local", until="caught_up")
        files = [each for each in (tmp_path / "state").rglob("*") if each.is_file()]
        counts.append(sum(1 for each in files if each.suffix != ".pack"))
    assert counts[-1] <= counts[14] + 5, counts


def test_a_grace_in_which_no_round_ends_is_refused(tmp_path: Path) -> None:
    produce(tmp_path, orders(range(10)))
    with pytest.raises(tg.InvalidError, match="grace_ms"):
        counting(tmp_path).run("local", until="caught_up", grace_ms=0)


def test_a_partition_that_holds_all_windows_open_is_named(tmp_path: Path) -> None:
    """Partition 1 never had a record, and silence never counts."""
    app = tg.App("shop", data=tmp_path, idle_after=None)
    with tg.Log(tmp_path / "log") as log:
        log.create_topic("orders", 2)
        values = orders(range(20))
        times = [AT + 60_000 * number for number in range(20)]
        log.writer("orders").write(
            pa.table({"key": ["a"] * 20, "value": values, "timestamp": times}), partition=0
        )
    windows = (
        app.stream("orders", value=tg.Json(n="string")).key_by("n").window(tg.Tumbling("10s"), emit="close")
    )
    windows.agg(n=tg.count()).to_table("per_window")
    waits = app.run("local", until="caught_up").progress.waiting_for
    assert any("orders-1" in each for each in waits), waits


def as_numbers(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array([int(text) for text in batch.column("n").to_pylist()], pa.int64())})


def test_one_record_that_a_function_fails_on_stops_its_partition_alone(tmp_path: Path) -> None:
    produce(tmp_path, [*orders(range(10)), b'{"n": "poison"}', *orders(range(11, 20))])
    app = tg.App("shop", data=tmp_path)
    stream = app.stream("orders", value=tg.Json(n="string"))
    stream.map(as_numbers, pa.schema([("n", pa.int64())])).to_topic("numbers")
    summary = app.run("local", until="caught_up")
    (stopped,) = summary.stopped
    assert (stopped.topic, stopped.partition, stopped.offset) == ("orders", 0, 5)
    assert "as_numbers" in stopped.message and summary.exit_code == 5
    with tg.Log(tmp_path / "log", read_only=True) as log:
        assert log.reader("numbers").read_all().num_rows == 5 + 10


def test_a_module_that_raises_is_not_a_fault_of_tidegate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "broken_module.py"
    module.write_text("import os\nprice = {}['pen']\n")
    assert run(["run", str(module), "--engine", "local", "--once"]) == 2
    said = capsys.readouterr().err
    assert "KeyError" in said and "broken_module.py" in said and "fault in Tidegate" not in said


def test_doctor_compiles_nothing(tmp_path: Path) -> None:
    """In a copy without compiled kernels, as right after `pip install`."""
    package = Path(tg.__file__).parent
    copy = tmp_path / "site" / "tidegate"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(copy.parent)}
    ended = subprocess.run(
        [sys.executable, "-m", "tidegate.cli.main", "doctor", "--format", "json"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=140,
    )
    assert "kernel" in ended.stdout, ended
    assert not list(copy.rglob("*.nb[ci]")), "it compiled kernels"


def test_a_late_record_is_logged_with_its_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    produce(tmp_path, orders(range(3)), partitions=1)
    produce(tmp_path, orders(range(3)), partitions=1, start=7200)
    produce(tmp_path, orders(range(1)), partitions=1, start=100)  # its window was final two hours ago
    counting(tmp_path).run("local", until="caught_up")
    assert "orders-0 offset 6 is late" in caplog.text
