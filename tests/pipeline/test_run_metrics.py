"""What a run on the local engine exports: every gauge of the reference, and of storage the run's own numbers."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.metrics import Metrics, prometheus_text

START = 1_700_000_000_000
REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def documented(section: str) -> set[str]:
    """The gauges of a section of the reference."""
    page = REFERENCE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(tidegate_\w+)` \| gauge \|", page, re.MULTILINE))


def send(folder: Path, first: int, rows: int) -> None:
    """Orders with these numbers, one in a second."""
    numbers = range(first, first + rows)
    with tg.Log(folder / "log") as log:
        log.create_topic("orders", 2, if_not_exists=True)
        with log.writer("orders") as writer:
            writer.write(
                pa.table(
                    {
                        "key": [f"k{number % 7}" for number in numbers],
                        "value": [f'{{"id":"o{number}"}}' for number in numbers],
                        "timestamp": [START + 1000 * number for number in numbers],
                    }
                )
            )


def sums(metrics: Metrics) -> Counter[str]:
    """Every metric that has a number, and the sum of its numbers."""
    found = Counter[str]()
    for sample in metrics.samples():
        found[sample.name] += sample.value  # type: ignore[assignment]
    return found


@pytest.mark.parametrize("rekeyed", [False, True])
def test_every_gauge_of_storage_has_the_numbers_of_the_run(tmp_path: Path, rekeyed: bool) -> None:
    send(tmp_path, 0, 200)
    app, metrics = tg.App("shop", data=tmp_path), Metrics()
    stream = app.stream("orders", value=tg.Json(id="string"))
    if rekeyed:
        stream = stream.key_by("id", shards=3)
    stream.drop_duplicates("id", within="1h").window(tg.Tumbling("1m")).agg(n=tg.count()).to_topic(
        "per_window"
    )
    with app.start("local", trigger="20ms", metrics=metrics) as run:
        run.await_caught_up("60s")
        before = sums(metrics)
        send(tmp_path, 200, 300)
        deadline = time.monotonic() + 60
        while (progress := run.await_caught_up("60s")).held:  # a round follows that takes what was held back
            assert time.monotonic() < deadline
            time.sleep(0.02)
        now = sums(metrics)
        of_storage = documented("Worker storage")
        assert len(of_storage) > 8 and of_storage - now.keys() == set()
        # without a looked-up table, there is no lag of one
        assert documented("Pipelines") - now.keys() == {"tidegate_lookup_lag_records"}
        assert now["tidegate_storage_backlog_bytes"] == progress.backlog_bytes > 0
        assert now["tidegate_storage_backlog_bytes"] > before["tidegate_storage_backlog_bytes"]
        assert now["tidegate_storage_backlog_limit_bytes"] == progress.backlog_limit_bytes
        assert now["tidegate_storage_pool_bytes"] == progress.memory_bytes > 0
        assert now["tidegate_storage_hot_bytes"] == progress.memory_bytes
        assert now["tidegate_storage_pool_limit_bytes"] == progress.memory_limit_bytes
        tasks = {each.labels["task"] for each in metrics.samples() if "task" in each.labels}
        assert tasks == {f"shop/per_window/{task}" for task in range(3 if rekeyed else 2)}
        served = prometheus_text(metrics)[0].decode()
        assert f"\ntidegate_storage_pool_bytes {float(progress.memory_bytes)}\n" in served
    assert of_storage & sums(metrics).keys() == set(), "closed storage has no gauges"
    assert sums(metrics)["tidegate_storage_appended_rows_total"] > 0
