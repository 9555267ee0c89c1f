"""The pytest plugin: its fixtures work, and loading it costs next to nothing."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa

from tidegate.clock import ManualClock
from tidegate.log.log import Log


def test_a_record_written_to_the_fixtures_log_is_there_at_the_manual_time(
    tidegate_log: Log, manual_clock: ManualClock
) -> None:
    tidegate_log.create_topic("orders", partitions=2)
    manual_clock.advance("1h")
    with tidegate_log.writer("orders") as writer:
        writer.write(pa.table({"key": ["ann"], "value": ["tea"]}))
    with tidegate_log.reader("orders") as reader:
        (order,) = reader.read_all().to_pylist()
    assert (order["key"], order["value"], order["offset"]) == (b"ann", b"tea", 0)
    assert int(order["timestamp"].timestamp() * 1000) == manual_clock.now_ms()


def test_each_test_gets_an_empty_log(tidegate_log: Log) -> None:
    assert tidegate_log.topics() == []


def test_loading_the_plugin_imports_nothing_heavy() -> None:
    code = "import sys, tidegate.testing.fixtures; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    heavy = {
        "numba",
        "numpy",
        "pyarrow",
        "pyspark",
        "pandas",
        "click",
        "rich",
        "tidegate.log.log",
    }
    assert heavy & set(loaded.split()) == set()
