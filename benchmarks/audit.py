"""How fast is an audit that proves every record, serial and in ranges on Spark; and a comparison, and a certificate?

Back of the envelope: unpacking and decoding a small record 40 ns, its metadata 10 ns, CRC-32 15 ns, judging and
counting 30 ns: about 100 ns a record, 10 M records/s on one core. Two cores share nothing but memory, and the fold of
a partition's ranges costs micro-seconds; so 1.8 times that on two.

Peers, in the same run: the serial audit of the same topic. Reports of both must be equal, and a damaged copy's too,
before a figure is printed; Spark's session and workers are warm, as in a second audit of a session.

    python benchmarks/audit.py [--full] [--json]        --full: 50 M records
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa

from _report import Report, demand
from tidegate.integrity.auditing import FullReport, audit
from tidegate.integrity.certificates import digest_topic
from tidegate.integrity.chains import ChainLimits
from tidegate.integrity.comparing import compare
from tidegate.integrity.reading_ranges import TopicAt
from tidegate.log.access.embedded import Log

NOW_MS = 1_767_225_600_000
PARTITIONS = 2
ROWS = 500_000


def fill(path: Path, topic: str, rows: int, *, integrity: bool) -> None:
    """Small records: a key of 8 bytes, a value of 20."""
    settings = {"segment.bytes": 256 << 20, "compression.type": "lz4", "max.message.bytes": 4 << 20}
    with Log(path, durability="os") as log:
        log.create_topic(topic, PARTITIONS, settings)
        given = {"limits": ChainLimits(max_age=0)} if integrity else False
        with log.writer(topic, integrity=given) as writer:  # type: ignore[call-overload]
            for start in range(0, rows // PARTITIONS, ROWS):
                count = min(ROWS, rows // PARTITIONS - start)
                numbers = np.arange(start, start + count)
                keys = pa.array(np.char.zfill((numbers % 100_000).astype("U8"), 8)).cast(pa.binary())
                values = pa.array(np.char.zfill(numbers.astype("U20"), 20)).cast(pa.binary())
                times = pa.array(NOW_MS + numbers)
                table = pa.table({"key": keys, "value": values, "timestamp": times})
                for number in range(PARTITIONS):
                    writer.write(table, partition=number)


def main() -> None:
    from tidegate.spark.audit import SparkRunner
    from tidegate.spark.session import session

    report = Report("How fast is an audit, serial and on two cores?", rows=0)
    rows = report.numbers["rows"] or (50_000_000 if report.full else 4_000_000)
    with tempfile.TemporaryDirectory(
        prefix="tidegate-audit-", dir=os.environ.get("TIDEGATE_BENCH_DIR")
    ) as folder:
        path = Path(folder) / "log"
        fill(path, "orders", rows, integrity=True)
        fill(path, "plain", rows // 4, integrity=False)
        spark = session("benchmark", master="local[2]")
        runner = SparkRunner(spark)
        audit("plain", log=path, now_ms=NOW_MS, runner=runner)
        for topic, records in (("orders", rows), ("plain", rows // 4)):
            serial, seconds = timed(topic, path, None)
            parallel, spent = timed(topic, path, runner)
            demand(
                serial.native == parallel.native and serial.metadata == parallel.metadata, "reports differ"
            )
            demand(serial.native.all_findings().faults == 0, "a sound topic has faults")
            demand(serial.native.records >= records, "records are missing")
            found = serial.native.records
            speed, ratio = found / spent, seconds / spent
            what = "with metadata" if topic == "orders" else "without metadata"
            report.figure(f"serial audit, {what}", f"{found / seconds / 1e6:.1f} M records/s")
            fast = ("", None) if topic == "plain" else (">= 5 M records/s", speed >= 5e6)
            report.figure(f"on Spark, two cores, {what}", f"{speed / 1e6:.1f} M records/s", "", *fast)
            goal = ("", None) if topic == "plain" else (">= 1.8x", ratio >= 1.8)
            report.figure("… over serial", f"{ratio:.2f}x", "", *goal)
        source = TopicAt(str(path), "orders")
        for what, used in (("here", None), ("on Spark, two cores", runner)):
            started = perf_counter()
            demand(compare(source, source, runner=used).is_equal, "a topic differs from itself")
            both = 2 * sum(end - first for first, end in source.extents().values())
            report.figure(f"compare {what}", f"{both / (perf_counter() - started) / 1e6:.1f} M records/s")
        started = perf_counter()
        found = digest_topic(source, source.extents(), 1 << 16, runner)
        records = sum(digest.records for each in found.values() for digest in each.blocks.values())
        report.figure(
            "digests of a certificate", f"{records / (perf_counter() - started) / 1e6:.1f} M records/s"
        )
        spark.stop()


def timed(topic: str, path: Path, runner: object) -> tuple[FullReport, float]:
    started = perf_counter()
    found = audit(topic, log=path, now_ms=NOW_MS, runner=runner)  # type: ignore[arg-type]
    return found, perf_counter() - started


if __name__ == "__main__":
    main()
