"""Spark's own way to the same windows: `dropDuplicatesWithinWatermark` and a window aggregation over files."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
IN_HEAP = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"


def write_files(events: pa.Table, folder: Path, batch_rows: int) -> None:
    """One Parquet file for each micro-batch; key, ts, order_id, amount."""
    folder.mkdir()
    times = events["ts"].cast(pa.timestamp("ms", "UTC"))
    table = pa.table(
        {
            "key": events["key"].cast(pa.string()),
            "ts": times,
            "order_id": events["order_id"].cast(pa.string()),
            "amount": events["amount"],
        }
    )
    for number, start in enumerate(range(0, table.num_rows, batch_rows)):
        pq.write_table(table.slice(start, batch_rows), folder / f"{number:06d}.parquet")


def run_stream(spark: Any, files: Path, checkpoint: Path, provider: str) -> tuple[float, int, int, float]:
    """Seconds of all micro-batches after the first, windows, events counted, and the sum of amounts."""
    from pyspark.sql import functions as f

    spark.conf.set("spark.sql.streaming.stateStore.providerClass", provider)
    schema = "key string, ts timestamp, order_id string, amount double"
    stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(files))
    windows = (
        stream.withWatermark("ts", "1 hour")
        .dropDuplicatesWithinWatermark(["key", "order_id"])
        .groupBy("key", f.window("ts", "1 minute"))
        .agg(f.count("*").alias("n"), f.sum("amount").alias("total"))
    )
    changed: dict[tuple[str, int], tuple[int, float]] = {}
    marks: list[float] = []

    def keep(frame: Any, _number: int) -> None:
        table = frame.select("key", f.col("window.start").cast("long").alias("start"), "n", "total").toArrow()
        for key, start, count, total in zip(*(column.to_pylist() for column in table.columns), strict=True):
            changed[key, start] = (count, total)
        marks.append(perf_counter())

    query = (
        windows.writeStream.outputMode("update")
        .foreachBatch(keep)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    seconds = marks[-1] - marks[0] if len(marks) > 1 else float("nan")
    rows = changed.values()
    return seconds, len(changed), sum(count for count, _ in rows), sum(total for _, total in rows)
