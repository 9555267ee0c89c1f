"""How fast does a DataFrame become a version of a table that can be served, proven complete?

Back of the envelope, for each row of 100 bytes, in processor time: reading Parquet and Spark's shuffle and sort 2.5 µs,
the hop of keys to Python for Kafka's partition 0.4 µs, the hop of sorted rows to Python 0.7 µs, numbering,
check-summing and appending 0.35 µs, reading back, validating, hashing, gathering and storing 0.8 µs: about 5 µs. The
peer sorts the same and writes Parquet instead: about 3.5 µs. So about 0.7 of it; at least 0.5 is the promise.

The same DataFrame twice in one run: `repartition(key).sortWithinPartitions(key).write.parquet`, and the push, from
its first step to the version that readers see. Both once to warm up, on `local[2]`; beside the time stands what they
took of the processors, which waiting for a core does not change. All rows are counted and some looked up before a
number is printed. Swap and rollback are timed on the small and on the large table.

    python benchmarks/push.py [--full] [--json] [--rows N]
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import tidegate.spark
from _report import Report, demand, family_seconds, load_line
from tidegate.spark.push.driver import push
from tidegate.storage import open_backend
from tidegate.tables.versions.catalog import Versions
from tidegate.tables.versions.reader import VersionedTable

PARTITIONS = 2
RATIO, SWAP_MS = 0.5, 100.0


def source(spark: Any, rows: int, folder: Path) -> Any:
    """Rows of 100 bytes: a key of 14, a value of 86 of which half does not compress; in no order."""
    from pyspark.sql import functions as f

    number = f.pmod(f.col("id") * 7919, f.lit(rows))
    key = f.format_string("user-%09d", number).alias("key")
    value = f.rpad(f.concat(f.md5(number.cast("string")), f.lit("-")), 86, "x").alias("value")
    spark.range(0, rows, 1, 4).select(key, value).write.mode("overwrite").parquet(str(folder))
    return spark.read.parquet(str(folder))


def pushed(frame: Any, folder: Path) -> float:
    started = perf_counter()
    push(
        frame,
        table="users",
        key="key",
        log=str(folder / "log"),
        state=str(folder / "state"),
        partitions=PARTITIONS,
    )
    return perf_counter() - started


def peer(frame: Any, folder: Path) -> float:
    started = perf_counter()
    placed = frame.repartition(PARTITIONS, "key").sortWithinPartitions("key")
    placed.write.mode("overwrite").parquet(str(folder / "parquet"))
    return perf_counter() - started


def check(folder: Path, rows: int) -> None:
    backend = open_backend(str(folder / "state"))
    with VersionedTable(backend, "users") as table:
        found = sum(batch.num_rows for batch in table.batches())
        demand(found == rows, f"{found} rows of {rows} are in the table")
        for number in range(0, rows, max(1, rows // 7)):
            said = table.get(f"user-{number:09d}")
            demand(said is not None and len(said) == 86, f"user {number} says {said!r}")
    backend.close()


def swaps(folder: Path) -> float:
    """The slowest of twenty swaps and rollbacks, in milliseconds."""
    versions = Versions(open_backend(str(folder / "state")), "users")
    numbers = [each.number for each in versions.list().versions][-2:]
    took = []
    for turn in range(10):
        started = perf_counter()
        versions.swap(numbers[turn % 2])
        took.append((perf_counter() - started) * 1000)
        started = perf_counter()
        versions.rollback()
        took.append((perf_counter() - started) * 1000)
    versions.backend.close()
    return max(took)


def main() -> None:
    report = Report("How fast does a DataFrame become a version of a table?", rows=1_000_000)
    rows = report.numbers["rows"] * (5 if report.full else 1)
    folder = Path(tempfile.mkdtemp(prefix="tidegate-push-"))
    spark = tidegate.spark.session("push", master="local[2]", config={"spark.driver.memory": "3g"})
    spark.sparkContext.setLogLevel("ERROR")
    try:
        small = source(spark, 20_000, folder / "small-source")
        for _ in range(2):
            pushed(small, folder / "small")
        peer(small, folder / "small")
        frame = source(spark, rows, folder / "source")
        times: dict[str, list[float]] = {"push": [], "parquet": []}
        spent: dict[str, list[float]] = {"push": [], "parquet": []}
        for _ in range(2):
            for name, run, where in (("parquet", peer, folder), ("push", pushed, folder / "large")):
                before = family_seconds()
                times[name].append(run(frame, where))
                spent[name].append(family_seconds() - before)
        check(folder / "large", rows)
        ours, theirs = (statistics.median(times[name]) for name in ("push", "parquet"))
        ratio = theirs / ours
        report.figure(
            f"{rows} rows of 100 bytes to a version that is shown",
            f"{rows / ours / 1e6:.2f} M rows/s",
            f"{ratio:.2f} of repartition, sort, Parquet ({rows / theirs / 1e6:.2f} M rows/s)",
            f"{RATIO} of it",
            ratio >= RATIO,
        )
        ours, theirs = (statistics.median(spent[name]) for name in ("push", "parquet"))
        report.figure(
            "… by processor time",
            f"{theirs / ours:.2f} of it",
            f"{ours:.1f} s to {theirs:.1f} s; {load_line()}",
        )
        for name in ("small", "large"):
            slowest = swaps(folder / name)
            report.figure(
                f"swap and rollback, {name} table, slowest of 20",
                f"{slowest:.1f} ms",
                "one publish",
                f"{SWAP_MS:.0f} ms",
                slowest < SWAP_MS,
            )
    finally:
        spark.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
