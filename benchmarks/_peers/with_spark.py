"""Spark's own ways to the same windows, over files: what is built in, and `transformWithState` in Python.

One Parquet file is one micro-batch; the first one, and the empty one that Spark adds at the end, are not timed. What
each batch sends is kept as Arrow and looked at when the query has ended. The session is set up as Tidegate's own is,
which is faster than Spark's defaults, with one shuffle partition for each core.

    with_spark.py EVENTS WINDOWS in-heap|rocksdb|python BATCH_ROWS
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from handed import HOUR, MINUTE, hand_over

_STATE = "org.apache.spark.sql.execution.streaming.state"
ROCKSDB = f"{_STATE}.RocksDBStateStoreProvider"
IN_HEAP = f"{_STATE}.HDFSBackedStateStoreProvider"
SCHEMA = "key string, ts timestamp, order_id long, amount double"


def write_files(events: pa.Table, folder: Path, batch_rows: int) -> None:
    folder.mkdir()
    columns = {
        "key": events["key"].cast(pa.string()),
        "ts": events["ts"].cast(pa.timestamp("ms", "UTC")),
        "order_id": events["order_id"],
        "amount": events["amount"],
    }
    table = pa.table(columns)
    for number, start in enumerate(range(0, table.num_rows, batch_rows)):
        pq.write_table(table.slice(start, batch_rows), folder / f"{number:06d}.parquet")


def built_in(events: Any) -> Any:
    """`dropDuplicatesWithinWatermark`, then a window aggregation."""
    from pyspark.sql import functions as f

    return (
        events.withWatermark("ts", "1 hour")
        .dropDuplicatesWithinWatermark(["key", "order_id"])
        .groupBy("key", f.window("ts", "1 minute"))
        .agg(f.count("*").alias("n"), f.sum("amount").alias("total"))
        .select("key", (f.unix_millis("window.start") / MINUTE).cast("long").alias("minute"), "n", "total")
    )


def with_state(events: Any) -> Any:
    """`transformWithState`: ids of the last hour and windows as two maps of each key, and timers that forget."""
    from pyspark.sql import Row
    from pyspark.sql.streaming import StatefulProcessor

    class Counted(StatefulProcessor):  # type: ignore[misc]
        def init(self, handle: Any) -> None:
            self._handle = handle
            self._seen = handle.getMapState("seen", "order_id long", "ts long")
            self._windows = handle.getMapState("windows", "minute long", "n long, total double")

        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
            changed = {}
            for row in rows:
                if self._seen.containsKey((row.order_id,)):
                    continue
                ts = int(row.ts.timestamp() * 1000)
                self._seen.updateValue((row.order_id,), (ts,))
                self._handle.registerTimer(ts + HOUR)
                minute = ts // MINUTE
                n, total = changed.get(minute) or self._windows.getValue((minute,)) or (0, 0.0)
                changed[minute] = (n + 1, total + row.amount)
            for minute, state in changed.items():
                self._windows.updateValue((minute,), state)
                yield Row(key=key[0], minute=minute, n=state[0], total=state[1])

        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
            until = expiredTimerInfo.getExpiryTimeInMs() - HOUR
            for (order,), (ts,) in list(self._seen.iterator()):
                if ts <= until:
                    self._seen.removeKey((order,))
            for (minute,) in list(self._windows.keys()):
                if (minute + 1) * MINUTE <= until:
                    self._windows.removeKey((minute,))
            return iter(())

        def close(self) -> None:
            pass

    return (
        events.withWatermark("ts", "1 hour")
        .groupBy("key")
        .transformWithState(
            statefulProcessor=Counted(),
            outputStructType="key string, minute long, n long, total double",
            outputMode="Update",
            timeMode="EventTime",
        )
    )


WAYS = {"in-heap": (built_in, IN_HEAP), "rocksdb": (built_in, ROCKSDB), "python": (with_state, ROCKSDB)}


def run_stream(spark: Any, files: Path, checkpoint: Path, way: str) -> tuple[list[float], pa.Table]:
    """When each micro-batch had ended, and the last state of each window."""
    query, provider = WAYS[way]
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", provider)
    events = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(files))
    sent: list[pa.Table] = []
    marks: list[float] = []

    def keep(frame: Any, _number: int) -> None:
        sent.append(frame.toArrow())
        marks.append(perf_counter())

    running = (
        query(events)
        .writeStream.outputMode("update")
        .foreachBatch(keep)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    running.awaitTermination()
    return marks, last_of(sent)


def last_of(sent: list[pa.Table]) -> pa.Table:
    """Each window as the last batch that changed it says; within a batch it comes once."""
    rows = pa.concat_tables(
        table.append_column("batch", pa.array(np.full(len(table), number)))
        for number, table in enumerate(sent)
    )
    last = rows.group_by(["key", "minute"]).aggregate([("batch", "max")])
    rows = rows.join(last, ["key", "minute"])
    return rows.filter(pc.equal(rows["batch"], rows["batch_max"])).select(["key", "minute", "n", "total"])


def main() -> None:
    import tidegate.spark

    way, batch_rows = sys.argv[3], int(sys.argv[4])
    events = pq.read_table(sys.argv[1])
    config = {"spark.sql.shuffle.partitions": "2"}
    with tempfile.TemporaryDirectory(dir=Path(sys.argv[2]).parent) as folder:
        write_files(events, Path(folder) / "files", batch_rows)
        spark = tidegate.spark.session("peer", master="local[2]", config=config)
        spark.sparkContext.setLogLevel("OFF")
        marks, windows = run_stream(spark, Path(folder) / "files", Path(folder) / "checkpoint", way)
        spark.stop()
    batches = -(-len(events) // batch_rows)
    hand_over(marks[batches - 1] - marks[0], len(events) - batch_rows, windows)


if __name__ == "__main__":
    main()
