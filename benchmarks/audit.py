"""How fast is an audit that proves every record, serial and in ranges on Spark; and a comparison, and a certificate?

Back of the envelope: unpacking and decoding a small record 40 ns, its metadata 10 ns, CRC-32 15 ns, judging and
counting 30 ns: about 100 ns a record, 10 M records/s on one core. Summing a range up is a little cheaper than judging
it; two cores share nothing but memory, Spark's JVM takes some 20 ms a range, and the fold of a partition's ranges
micro-seconds. So about twice that on two; 1.8 times is the promise.

Peers, in the same run: the serial audit of the same topic. Both several times in turn, the fastest of each counts, and
beside it stands what they took of the processors, which waiting for a core does not change. Reports of both must be
equal before a figure is printed. Spark's session is that of `tidegate verify --spark`, and warm, as in a second audit.

    python benchmarks/audit.py [--full] [--json]        --full: 50 M records
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from _report import Report, demand, family_seconds, load_line
from tidegate.integrity.audit import FullReport, Runner, audit
from tidegate.integrity.certificates import digest_topic
from tidegate.integrity.compare import compare_topics
from tidegate.integrity.digests import TopicAt
from tidegate.integrity.sender import ChainLimits
from tidegate.log.log import Log

NOW_MS = 1_767_225_600_000
PARTITIONS = 2
ROWS = 500_000
TURNS = 5


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
    from tidegate.spark.audit import SCHEDULES_ONLY, SparkRunner
    from tidegate.spark.session import session

    report = Report("How fast is an audit, serial and on two cores?", rows=0)
    rows = report.numbers["rows"] or (50_000_000 if report.full else 4_000_000)
    with tempfile.TemporaryDirectory(
        prefix="tidegate-audit-", dir=os.environ.get("TIDEGATE_BENCH_DIR")
    ) as folder:
        path = Path(folder) / "log"
        fill(path, "orders", rows, integrity=True)
        fill(path, "plain", rows // 4, integrity=False)
        spark = session("benchmark", master="local[2]", config=SCHEDULES_ONLY)
        runner = SparkRunner(spark)
        audit("plain", log=path, now_ms=NOW_MS, runner=runner)
        for topic, records in (("orders", rows), ("plain", rows // 4)):
            serial, parallel = compared(topic, path, runner, TURNS if report.full else 1)
            found = serial.report.native.records
            demand(found >= records, "records are missing")
            speed, ratio = found / parallel.wall, serial.wall / parallel.wall
            what = "with metadata" if topic == "orders" else "without metadata"
            report.figure(
                f"serial audit, {what}", f"{found / serial.wall / 1e6:.1f} M records/s", load_line()
            )
            fast = ("", None) if topic == "plain" else (">= 5 M records/s", speed >= 5e6)
            report.figure(
                f"on Spark, two cores, {what}", f"{speed / 1e6:.1f} M records/s", load_line(), *fast
            )
            goal = ("", None) if topic == "plain" else (">= 1.8x", ratio >= 1.8)
            report.figure("… over serial", f"{ratio:.2f}x", "", *goal)
            report.figure(
                "… processor time, over serial's",
                f"{parallel.processors / serial.processors:.2f}",
                f"{parallel.processors:.1f} s to {serial.processors:.1f} s",
            )
        source = TopicAt(str(path), "orders")
        for what, used in (("here", None), ("on Spark, two cores", runner)):
            started = perf_counter()
            demand(compare_topics(source, source, runner=used).is_equal, "a topic differs from itself")
            both = 2 * sum(end - first for first, end in source.extents().values())
            report.figure(f"compare {what}", f"{both / (perf_counter() - started) / 1e6:.1f} M records/s")
        started = perf_counter()
        found = digest_topic(source, source.extents(), 1 << 16, runner)
        records = sum(digest.records for each in found.values() for digest in each.blocks.values())
        report.figure(
            "digests of a certificate", f"{records / (perf_counter() - started) / 1e6:.1f} M records/s"
        )
        spark.stop()


class Turn(NamedTuple):
    report: FullReport
    wall: float
    processors: float


def compared(topic: str, path: Path, runner: Runner, turns: int) -> tuple[Turn, Turn]:
    """The fastest serial and the fastest parallel audit of some turns; every report is the same."""
    alone, together = [], []
    for _ in range(turns):
        alone.append(timed(topic, path, None))
        together.append(timed(topic, path, runner))
    first = alone[0].report
    for each in alone + together:
        demand(
            each.report.native == first.native and each.report.metadata == first.metadata, "reports differ"
        )
    demand(first.native.all_findings().faults == 0, "a sound topic has faults")
    return min(alone, key=lambda turn: turn.wall), min(together, key=lambda turn: turn.wall)


def timed(topic: str, path: Path, runner: Runner | None) -> Turn:
    spent, started = family_seconds(), perf_counter()
    found = audit(topic, log=path, now_ms=NOW_MS, runner=runner)
    return Turn(found, perf_counter() - started, family_seconds() - spent)


if __name__ == "__main__":
    main()
