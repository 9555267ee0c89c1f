"""How fast is a topic read from its files, by scan and by look-up, beside the usual client?

Back of the envelope: decoding takes about 30 ns a record of 100 bytes (see scan.py), reading its 110 bytes from
the page cache into a buffer that is used again 15, and opening, finding and checking about 100 µs for each fetch
of 4 MiB, which is 3 ns a record: 20 M records/s. A look-up reads the index, one interval and one batch.

The peer is confluent-kafka's consumer on librdkafka's own mock cluster, in the same process and the same run.

    python benchmarks/reading.py [--full] [--json]
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from time import perf_counter

import pyarrow as pa

from _report import MIB, Report, best_of, demand, events
from machine import memcpy_bytes_per_second
from tidegate.files import Effect, Files
from tidegate.log.log import Log


def peer_records_per_second(table: pa.Table) -> float | None:
    """confluent-kafka's consumer over the same values; None where it is not installed."""
    try:
        import confluent_kafka
    except ImportError:
        return None
    owner = confluent_kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "x", "log_level": 0})
    broker = next(iter(owner.list_topics(timeout=20).brokers.values()))
    values = table.column("value").to_pylist()
    for value in values:
        while True:
            try:
                owner.produce("peer", value, partition=0)
                break
            except BufferError:
                owner.poll(0.05)
    owner.flush(60)
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": f"127.0.0.1:{broker.port}",
            "group.id": "peer",
            "auto.offset.reset": "earliest",
            "log_level": 0,
            "fetch.message.max.bytes": 8 * MIB,
            "queued.max.messages.kbytes": 1 << 20,
        }
    )
    fastest = 0.0
    for _ in range(5):
        consumer.assign([confluent_kafka.TopicPartition("peer", 0, 0)])
        started, first, seen = 0.0, 0, 0
        while seen < len(values):
            messages = consumer.consume(5000, timeout=1)
            demand(bool(messages), f"the peer stopped after {seen} records")
            seen += sum(1 for message in messages if message.error() is None and message.value() is not None)
            if not first:  # from the first answer on: connecting is not reading
                started, first = perf_counter(), seen
        fastest = max(fastest, (len(values) - first) / (perf_counter() - started))
    consumer.close()
    return fastest


def main() -> None:
    report = Report("How fast is a topic read from its files?")
    rows, repetitions = (8_000_000, 5) if report.full else (2_000_000, 3)
    table = events(rows)
    memcpy = memcpy_bytes_per_second()
    with tempfile.TemporaryDirectory(dir=".") as name:
        path = Path(name) / "log"
        with Log(path, durability="os") as log:
            log.create_topic("t", 1, {"index.interval.bytes": "4096"})
            log.create_topic("small", 1)
            log.writer("t").write(table)
            log.writer("small", batch_bytes=4096).write(table)
        with Log(path, read_only=True) as log:
            size = sum(found for _, found in log.view("t", 0).segment_sizes())

            def scan(topic: str) -> int:
                return sum(batch.num_rows for batch in log.reader(topic))

            demand(scan("t") == rows, "not every record was read")
            seconds = best_of(repetitions, lambda: scan("t"), perf_counter)
            ours = rows / seconds
            ratio = size / seconds / memcpy
            report.figure(
                "scan, 1-MiB batches", f"{ours / 1e6:.1f} M records/s", f"{ratio:.2f} of memory copy"
            )
            seconds = best_of(repetitions, lambda: scan("small"), perf_counter)
            report.figure("scan, 4-KiB batches", f"{rows / seconds / 1e6:.1f} M records/s")
        peer = peer_records_per_second(table.slice(0, 40_000))  # more than 5 MB the mock forgets
        if peer is not None:
            report.figure(
                "confluent-kafka, mock cluster",
                f"{peer / 1e6:.2f} M records/s",
                f"ours is {ours / peer:.0f}×",
                "≥ 10×",
                ours >= 10 * peer,
            )
        look_up(report, path, rows)


def look_up(report: Report, path: Path, rows: int) -> None:
    """Random offsets, and how many bytes each one reads."""
    read: list[int] = []

    def watch(effect: Effect) -> None:
        if effect.kind == "read" and effect.path.suffix in (".log", ".index"):
            read.append(effect.length)

    chance = random.Random(5)
    offsets = [chance.randrange(rows) for _ in range(300)]
    with Log(path, read_only=True, files=Files(watch)) as log:

        def once(offset: int) -> None:
            batch = log.reader("small", start=offset, max_bytes=1).poll()
            demand(
                batch is not None and batch.column("offset")[0].as_py() == offset,
                f"offset {offset} not found",
            )

        once(offsets[0])
        read.clear()
        started = perf_counter()
        for offset in offsets:
            once(offset)
        seconds = (perf_counter() - started) / len(offsets)
    per_look_up = sum(read) / len(offsets)
    report.figure(
        "random offset, 4-KiB batches",
        f"{seconds * 1e6:.0f} µs",
        f"{per_look_up / 1024:.1f} KiB read",
        "index + interval + batch",
        per_look_up < 8192 + 8192 + 2 * 4096 + 4096,
    )


if __name__ == "__main__":
    main()
