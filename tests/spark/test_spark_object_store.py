"""State in an object store with Spark: rounds, a push and tables read by executors, over S3's real HTTP.

In a process of its own: Spark's Python workers take the settings of the store from the environment they are born with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa

import tidegate as tg
from s3_server import Place

TEN = 1_767_261_600_000  # 2026-01-01T10:00Z
ORDERS = 600
SCRIPT = """
import json, sys
import tidegate as tg
import tidegate.spark
sys.path.insert(0, sys.argv[3])
from test_spark_object_store import shop

folder, state = sys.argv[1:3]
spark = tidegate.spark.session("objects", master="local[2,4]")
spark.sparkContext.setLogLevel("OFF")
app = shop(folder, state)
app.run(spark, until="caught_up", close=True, round_records=200)
with app.open_table("minutes") as table:
    minutes = table.to_arrow().to_pylist()
frame = spark.range(300).selectExpr("concat('key-', id) as key", "id * 2 as twice")
app.push(frame, table="users", key="key")
with app, app.versioned_table("users") as users:
    one = users.get("key-7")
source = spark.read.format("tidegate.table").option("state", state)
rows = sum(source.option("table", f"users_v1-{number}").load().count() for number in range(4))
with app, app.windowed_table("minutes-changes") as table:
    table.commit()
    windows = table.to_spark(spark).count()
print("RESULT " + json.dumps([minutes, one, rows, windows], default=str))
spark.stop()
"""


def shop(folder: str, state: str) -> tg.App:
    app = tg.App("shop", log=f"{folder}/log", state=state)
    minutes = app.stream("orders", value=tg.Json(shop="string", amount="double")).key_by("shop", shards=2)
    counted = minutes.window(tg.Tumbling("1m")).agg(orders=tg.count(), revenue=tg.sum("amount"))
    counted.to_topic("minutes-changes").to_table("minutes")
    return app


def test_rounds_a_push_and_tables_of_executors_work_on_an_object_store(s3: Place, tmp_path: Path) -> None:
    with tg.Log(tmp_path / "log", durability="os") as log:
        log.create_topic("orders", 2)
        numbers = range(ORDERS)
        values = [f'{{"shop": "s{each % 5}", "amount": {each % 7}.5}}' for each in numbers]
        keys = [f"customer-{each % 20}" for each in numbers]
        times = [TEN + 1000 * each for each in numbers]
        log.writer("orders").write(pa.table({"key": keys, "value": values, "timestamp": times}))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), s3.url, str(Path(__file__).parent)],
        env=os.environ | s3.environment | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True, text=True, timeout=1000,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("RESULT ")]
    minutes, one, rows, windows = json.loads(line.removeprefix("RESULT "))
    twin = shop(str(tmp_path), str(tmp_path / "folder"))
    with tg.Log(tmp_path / "log") as log:
        log.delete_topic("minutes-changes")
    twin.run("local", until="caught_up", close=True)
    with twin.open_table("minutes") as table:
        expected = table.to_arrow().to_pylist()
    by_window = sorted(minutes, key=lambda row: (row["key"], row["window_start"]))
    assert by_window == json.loads(
        json.dumps(sorted(expected, key=lambda row: (row["key"], row["window_start"])), default=str)
    )
    assert sum(row["orders"] for row in minutes) == ORDERS
    assert (one, rows, windows) == ({"twice": 14}, 300, len(minutes))
    assert {method for method, _ in s3.proxy.requests} >= {"GET", "PUT"}
