"""How fast are Arrow tables appended to a log and acknowledged, and what does the disk cost?

Back of the envelope: encoding takes about 35 ns a record of 100 bytes, writing its 110 bytes to the page cache
25; with keys, hashing and sorting them by partition another 50. A sync costs what the disk says (see machine.py)
once a write, whatever the size of it.

Every table is read back and compared before its figure is printed.

    python benchmarks/append.py [--full] [--json]
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa

from _report import Report, best_of, demand, events
from machine import fsync_seconds
from tidegate.log.log import Durability, Log

WANTED = 6e6


def append(folder: Path, table: pa.Table, durability: Durability, pieces: int, partitions: int) -> float:
    """Seconds of the fastest of three runs to write the table in so many writes."""
    step = -(-table.num_rows // pieces)
    with Log(folder, durability=durability) as log:
        log.create_topic("warm", partitions)
        log.writer("warm").write(table.slice(0, 10_000))
        names = iter(f"run-{number}" for number in range(100))

        def run() -> None:
            name = next(names)
            log.create_topic(name, partitions)
            writer = log.writer(name)
            for number in range(partitions):
                log.partition(name, number)
            started = perf_counter()
            for start in range(0, table.num_rows, step):
                writer.write(table.slice(start, step))
            took.append(perf_counter() - started)
            check(log, name, table, partitions)
            log.delete_topic(name)

        took: list[float] = []
        best_of(3, run)
    return min(took)


def check(log: Log, topic: str, table: pa.Table, partitions: int) -> None:
    read = log.reader(topic).read_all()
    demand(read.num_rows == table.num_rows, f"{read.num_rows} of {table.num_rows} records came back")
    if partitions == 1:
        demand(
            read.column("value").combine_chunks().equals(table.column("value").combine_chunks()),
            "values differ",
        )


def main() -> None:
    report = Report("How fast are Arrow tables appended and acknowledged?")
    rows = 4_000_000 if report.full else 1_000_000
    table = events(rows)
    keys = pa.array(np.char.mod("customer-%d", np.arange(rows) % 50_000).astype(object), pa.binary())
    keyed = table.append_column("key", keys)
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        sync_ms = fsync_seconds(folder) * 1e3

        def show(what: str, seconds: float, ratio: str = "", wanted: float | None = None) -> None:
            rate = rows / seconds
            target = "" if wanted is None else f"≥ {wanted / 1e6:.0f} M records/s"
            met = None if wanted is None else rate >= wanted
            report.figure(what, f"{rate / 1e6:.1f} M records/s", ratio, target, met)

        plain = append(folder / "os", table, "os", 4, 1)
        show("append, durability os", plain, wanted=WANTED)
        disk = append(folder / "disk", table, "disk", 4, 1)
        show("append, durability disk, 4 writes", disk, f"{plain / disk:.2f} of os")
        many = append(folder / "many", table, "disk", 100, 1)
        show("append, durability disk, 100 writes", many, f"{plain / many:.2f} of os, fsync {sync_ms:.1f} ms")
        spread = append(folder / "keyed", keyed, "os", 4, 8)
        show("append with keys to 8 partitions", spread, f"{plain / spread:.2f} of one, no key")


if __name__ == "__main__":
    main()
